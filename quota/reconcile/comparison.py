"""Upstream's count beside ours. Pure: points and entries go in, what only one of the two knows comes out.

Both counts of a bucket are added up from upstream's reset on. We charge a call before it leaves and upstream counts it
when it arrives, by its own clock, and publishes it some minutes later. So neither count is exact near its end, and
TOLERANCE_MS is left for that:

    unknown     upstream counted it and we never charged it. At every moment s of upstream's points:
                its count up to s, less all that we charged until TOLERANCE_MS later. The most that this ever was
    drift       we charged it and upstream did not count it: all that we charged up to its newest point and more than
                TOLERANCE_MS ago, less its count

For example, points of 100 units each at 10:00 and 11:00, and our charges of 100 at 09:59 and 10:40. At 10:00 both say
100. At 11:00 it is 200 and 200. If somebody else then uses 50, upstream says 250 at 11:10 and we 200: 50 units are
unknown, used by 11:10, and count from then on like charges of that time.
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
    """Units that one side counted for a method: we at `at_ms`, upstream in the interval that ended there."""

    at_ms: int
    units: int
    method: str


class Period(NamedTuple):
    """One of upstream's own periods, from one reset to the next."""

    since_ms: int
    until_ms: int


class MethodCount(NamedTuple):
    """What both sides counted for one method: upstream's units, ours, and how many calls those are.

    `price` is the book's for one call; None where the book does not have the method.
    """

    method: str
    upstream_units: int
    our_units: int
    our_calls: int
    price: int | None

    @property
    def upstream_price(self) -> int | None:
        """What upstream charged for each of our calls, where that is another price than the book's: its units are a
        whole multiple of our calls. None where the units tell no such thing."""
        if not self.our_calls or not self.upstream_units or self.upstream_units % self.our_calls:
            return None
        price = self.upstream_units // self.our_calls
        return None if price * self.our_calls == self.our_units else price


class BucketCount(NamedTuple):
    """Both counts of one bucket in one period, up to `through_ms`.

    `near_units` of ours were charged so near to that moment, and so lately, that upstream may not have them. `unknown`
    are the units that only upstream knows of, each with the time by which it was used; `drift_units` those that only we
    know of. `methods` has the largest difference first.
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

    `upstream` and `ours` are in order of time; ours reaches TOLERANCE_MS further on both sides, as far as there is any.
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
