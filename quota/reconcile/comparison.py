"""Compares upstream's count with ours. Pure: points and entries go in, the differences come out.

Both counts of a bucket start at upstream's reset. We charge a call before it leaves. Upstream counts it when it
arrives, by its own clock, and publishes it some minutes later. So neither count is exact near its end, and TOLERANCE_MS
allows for that:

    unknown     units that upstream counted and we never charged. At each of upstream's points, at a moment s: its
                count up to s, less our charges up to TOLERANCE_MS later. The largest of these numbers
    drift       units that we charged and upstream did not count: our charges up to its newest point and more than
                TOLERANCE_MS ago, less its count

For example, points of 100 units each at 10:00 and 11:00, and our charges of 100 at 09:59 and 10:40. At 10:00 both
counts are 100, and at 11:00 both are 200. If somebody else then uses 50, upstream's count at 11:10 is 250 and ours 200:
50 units are unknown, used by 11:10, and count like charges of that time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from quota.terms.costs import CostBook
from quota.terms.limits import MINUTE_MS

TOLERANCE_MS = 10 * MINUTE_MS


class Counted(NamedTuple):
    """Units of a method: our charge at `at_ms`, or upstream's count of the interval that ended then."""

    at_ms: int
    units: int
    method: str


class Period(NamedTuple):
    """One of upstream's own periods, from one reset to the next."""

    since_ms: int
    until_ms: int


class MethodCount(NamedTuple):
    """Both counts of one method: upstream's units, our units, and our calls.

    `price` is the book's price of one call; None if the book does not have the method.
    """

    method: str
    upstream_units: int
    our_units: int
    our_calls: int
    price: int | None

    @property
    def upstream_price(self) -> int | None:
        """Upstream's price of each of our calls, if it differs from the book's and its units are a whole multiple of
        our calls; else None."""
        if not self.our_calls or not self.upstream_units or self.upstream_units % self.our_calls:
            return None
        price = self.upstream_units // self.our_calls
        return None if price * self.our_calls == self.our_units else price


class BucketCount(NamedTuple):
    """Both counts of one bucket in one period, up to `through_ms`.

    We charged `near_units` so close to that moment, and so recently, that upstream may not have them. `unknown` has the
    units that only upstream counted, each with the time by which they were used. Only we counted `drift_units`.
    `methods` has the largest difference first.
    """

    bucket: str
    period: Period
    through_ms: int
    upstream_units: int
    our_units: int
    near_units: int
    unknown: tuple[tuple[int, int], ...]
    drift_units: int
    methods: tuple[MethodCount, ...]

    @property
    def unknown_units(self) -> int:
        return sum(units for units, _ in self.unknown)


def compare(
    bucket: str,
    period: Period,
    through_ms: int,
    upstream: Sequence[Counted],
    ours: Sequence[Counted],
    book: CostBook,
    now_ms: int,
) -> BucketCount:
    """Compare the counts of one bucket in one period. `through_ms` is the end of upstream's newest point.

    `upstream` and `ours` are in order of time. `ours` reaches TOLERANCE_MS further on both sides, if there are charges.
    """
    end_ms = min(through_ms, period.until_ms)
    theirs = [point for point in upstream if period.since_ms < point.at_ms <= end_ms]
    times = [charge.at_ms for charge in ours]
    sums = [0, *accumulate(charge.units for charge in ours)]

    def charged(from_ms: int, to_ms: int) -> int:
        """Our units from one moment to another, both included."""
        return max(0, sums[bisect_right(times, to_ms)] - sums[bisect_right(times, from_ms - 1)])

    unknown, unknown_units, counted = [], 0, 0
    for point in theirs:
        counted += point.units
        more = counted - charged(period.since_ms - TOLERANCE_MS, point.at_ms + TOLERANCE_MS) - unknown_units
        if more > 0:
            unknown.append((more, point.at_ms))
            unknown_units += more
    sure_ms = min(end_ms, now_ms - TOLERANCE_MS, period.until_ms - TOLERANCE_MS)
    surely_ours = charged(period.since_ms + TOLERANCE_MS, sure_ms)
    last_ms = min(end_ms, period.until_ms - 1)
    return BucketCount(
        bucket=bucket,
        period=period,
        through_ms=end_ms,
        upstream_units=counted,
        our_units=charged(period.since_ms, last_ms),
        near_units=charged(max(period.since_ms, sure_ms + 1), end_ms + TOLERANCE_MS),
        unknown=tuple(unknown),
        drift_units=max(0, surely_ours - counted),
        methods=_by_method(theirs, [charge for charge in ours if period.since_ms <= charge.at_ms <= last_ms], book),
    )


def _by_method(upstream: Iterable[Counted], ours: Iterable[Counted], book: CostBook) -> tuple[MethodCount, ...]:
    theirs, charged, calls = Counter[str](), Counter[str](), Counter[str]()
    for point in upstream:
        theirs[point.method] += point.units
    for charge in ours:
        if charge.units:  # a refunded charge is not a call
            charged[charge.method] += charge.units
            calls[charge.method] += 1
    rows = []
    for method in {**theirs, **charged}:
        price = book.price(method).units if method in book.methods else None
        rows.append(MethodCount(method, theirs[method], charged[method], calls[method], price))
    return tuple(sorted(rows, key=lambda row: (-abs(row.upstream_units - row.our_units), row.method)))
