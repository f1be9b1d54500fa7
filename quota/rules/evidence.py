"""What an answer says about a bucket: evidence of what others use. Pure.

    Level          `remaining_units` of `limit_units` until `reset_ms`, as one answer says it
    Heard          what follows from a level: until when it holds, which limits it concerns, what upstream has counted
    evidence_of    makes a Heard of a Level; None if nothing follows
    whole_limits   the limits that count every unit of a bucket, whoever uses it
    others_name    names what others used in one period

A level never frees units. It only says that no more than this remains: if we expect more, others have used the
difference. An example with a limit of 5,000 units an hour, of which we have charged 700:

    remaining 4,400   upstream counted 600. The other 100 are in flight, or from before its reset. Nothing follows
    remaining 4,000   upstream counted 1,000, so others have used 300. They count here until upstream's reset

**Which window.** A bucket may have several windows, and an answer seldom names one. We take the window of the answer's
length, else the one whose quota is its limit, else the shortest that may last until its reset, or of all. A wrong guess
does no harm: upstream refuses calls when any window is full, so no more than this remains in the other windows either,
and any excess is gone at that reset.

**Which period.** What upstream said before its reset must not count after it. An answer may have travelled for as long
as the call took. So it is void if the named reset is no further away than that: the reset may be over. If an answer
names no reset and upstream counts by the calendar, the answer is void if the call left in an earlier period. For a
while after our clock began a period, upstream's clock may still be in the period before; then the answer is void too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quota.rules.calls import granted_units
from quota.terms.costs import Bucket, CostBook
from quota.terms.limits import MAX_UNITS, MINUTE_MS, Calendar, Limit, Sliding, Window, as_long, no_longer

WORTH_PERCENT = 1
"""A level goes to the ledger only if it changes a limit by more than this share."""


class Level(NamedTuple):
    """What an answer says about one bucket: `remaining_units` of `limit_units` until `reset_ms`, in a window that lasts
    `window_ms`.

    The last three are None if the answer does not name them. `reset_ms` is in ms since 1970, by the ledger's clock.
    """

    bucket: str
    remaining_units: int
    limit_units: int | None = None
    reset_ms: int | None = None
    window_ms: int | None = None


class Heard(NamedTuple):
    """What follows from a level, until `until_ms`. Upstream's period began at `since_ms`; 0 if its window slides.

    `limits` count the whole bucket in such a window; the limits in `alone` also count no other bucket. `granted_units`
    are what upstream grants of the bucket, or None: see `_granted`.
    """

    level: Level
    since_ms: int
    until_ms: int
    limits: tuple[Limit, ...]
    alone: tuple[Limit, ...]
    granted_units: int | None

    @property
    def why_empty(self) -> str:
        """Why the bucket is closed until then; "" where units remain."""
        if self.level.remaining_units:
            return ""
        return "nothing remains" if self.level.limit_units is None else f"0 of {self.level.limit_units:,} remain"

    def stands(self, at_ms: int, now_ms: int) -> bool:
        """Whether what was heard at a time holds now. If upstream's window slides, its count falls as charges leave."""
        return bool(self.since_ms or self.level.reset_ms) or 100 * (now_ms - at_ms) <= self.until_ms - at_ms

    def counted_units(self, limit: Limit) -> int:
        """The least that upstream has counted against a limit's quota, so that no more than the answer's figure
        remains; below 0 if more than the quota remains. A smaller limit in the answer is the quota if it lowers ours,
        or if it is no more than our headroom: then the answer is about something else."""
        level, quota_units = self.level, limit.quota_units
        if level.limit_units is not None:
            most = granted_units(limit, {level.bucket: level.limit_units})
            if most == 0 or (most is not None and self.granted_units is not None):
                quota_units = min(level.limit_units, quota_units)
        return quota_units - level.remaining_units

    def changes(self, used: Mapping[str, int]) -> bool:
        """Whether upstream has counted enough more than these used units, by limit, to report it."""
        return any(
            100 * (self.counted_units(limit) - used.get(limit.name, 0)) > WORTH_PERCENT * limit.limit_units
            for limit in self.alone
        )


def evidence_of(level: Level, book: CostBook, limits: Sequence[Limit], charged_ms: int, now_ms: int) -> Heard | None:
    """What follows at `now_ms` from an answer to a call that was charged at `charged_ms`. None if nothing does: the
    book has no such bucket, the numbers are impossible, or their period is over."""
    bucket, limit_units = book.buckets.get(level.bucket), level.limit_units
    most_units = MAX_UNITS if limit_units is None else limit_units
    if bucket is None or not 0 <= level.remaining_units <= most_units <= MAX_UNITS or not most_units:
        return None
    if level.reset_ms is not None and level.reset_ms - now_ms <= max(0, now_ms - charged_ms):
        return None
    whole = tuple(whole_limits(limits, bucket.name, book))
    window = _window(level, bucket, whole, now_ms)
    concerned = tuple([limit for limit in whole if as_long(limit.view.window.longest_ms, window.longest_ms)])
    if isinstance(window, Sliding) and level.reset_ms is None:
        # A limit may say when upstream's day ends, which neither the answer nor the book knows.
        periods = [each.view.window for each in concerned if not each.shadow]
        calendars = [period for period in periods if isinstance(period, Calendar)]
        window = max(calendars, key=lambda calendar: calendar.edges(now_ms), default=window)  # the last to end
    since_ms, until_ms = 0, now_ms + window.longest_ms
    if isinstance(window, Calendar):
        since_ms, until_ms = window.edges(now_ms)
        speaks_of_ms = charged_ms if level.reset_ms is None else level.reset_ms
        if speaks_of_ms <= since_ms + min(MINUTE_MS, window.longest_ms // 60):
            return None
    elif level.reset_ms is None and charged_ms <= now_ms - window.longest_ms:
        return None
    if level.reset_ms is not None:
        until_ms = min(until_ms, level.reset_ms)
    alone = tuple([limit for limit in concerned if (limit.view.selector.buckets or (*book.buckets,)) == (bucket.name,)])
    return Heard(level, since_ms, until_ms, concerned, alone, _granted(level, bucket, limits))


def _granted(level: Level, bucket: Bucket, limits: Sequence[Limit]) -> int | None:
    """What upstream grants of a bucket, by the limit in an answer. None if the bucket has several windows, if a limit
    counts it for longer, or if the headroom would leave nothing: then no call could leave, and no answer could correct
    the mistake."""
    units = level.limit_units
    if units is None or len(bucket.quotas) > 1:
        return None
    for limit in limits:
        most = granted_units(limit, {bucket.name: units})
        if most == 0 or (most is not None and not no_longer(limit.view.window.longest_ms, bucket.window.longest_ms)):
            return None
    return units


def _window(level: Level, bucket: Bucket, whole: Sequence[Limit], now_ms: int) -> Window:
    """The window of its bucket that a level is about."""
    windows = sorted([quota.window for quota in bucket.quotas], key=lambda window: window.longest_ms)
    if level.window_ms is not None:
        windows = [window for window in windows if as_long(level.window_ms, window.longest_ms)] or windows
    named = []
    for window in windows:
        granted = {quota.units for quota in bucket.quotas if quota.window == window}
        same = [limit for limit in whole if as_long(limit.view.window.longest_ms, window.longest_ms)]
        if level.limit_units in granted | {limit.quota_units for limit in same}:
            named.append(window)
    named = named or windows
    if level.reset_ms is None:
        return named[0]
    left_ms = level.reset_ms - now_ms
    return next((window for window in named if no_longer(left_ms, window.longest_ms)), named[-1])


def whole_limits(limits: Sequence[Limit], bucket: str, book: CostBook) -> Iterator[Limit]:
    """The limits that count every unit of a bucket, whoever spends it. A limit on calls does so if each call costs a
    unit."""
    prices = [price for of_method in book.methods.values() for price in of_method]
    for limit in limits:
        selector = limit.view.selector
        if limit.narrow or bucket not in (selector.buckets or (bucket,)):
            continue
        if selector.count == "units" or all(price.units_in(bucket) in (0, 1) for price in prices):
            yield limit


def others_name(bucket: str, since_ms: int) -> str:
    """The name of the entry for what others used of a bucket in the period since then. Every process uses this name."""
    return f"{bucket}@{since_ms}"
