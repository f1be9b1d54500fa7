"""What a budget must answer, computed the slow and obvious way: by summing all that was charged at every decision.

    LogOracle   a project's charges, what others used, and its facts
    Terms       what a caller decides by: limits, leave, and a clock that is off
    Answer      what a decision must say

The edges of windows are those of `quota.terms.limits`. All sums are made anew, over the whole log, each time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.decision import Decision, LimitState
from quota.rules.entry import CALLS
from quota.rules.facts import Grant
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View, cutoff, leaves_at, of_jobs

WALL_SLACK_MS = 5_000
"""Windows end by the ledger's clock, or by the caller's and this, if that is behind."""

LATEST_MS = HOUR_MS
"""A ledger's clock that is further ahead of the caller's stops every decision."""

AHEAD_MS = 2_000 * DAY_MS
"""Long after any window has passed."""


@dataclass(eq=False)
class Charge:
    """What a call is charged in one bucket. `ms` and `key` are its date and its key in the log, once it has them."""

    units: int
    bucket: str
    method: str
    job: str
    ms: int = 0
    key: str = ""


@dataclass
class Column:
    """The charges that a selector counts: their dates, and what each counts now."""

    ms: list[int] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    places: dict[Charge, int] = field(default_factory=dict)


class Others(NamedTuple):
    """Units that only upstream has counted."""

    bucket: str
    units: int
    since_ms: int
    until_ms: int
    name: str
    window_ms: int
    noun: str
    ms: int


class Closing(NamedTuple):
    """What upstream said of a bucket, and when that was lifted (0: it stands)."""

    since_ms: int
    until_ms: int
    reopened_ms: int = 0

    def opens_ms(self, jitter_ms: int) -> int:
        tenth_ms = (self.until_ms - self.since_ms) // 10
        return NEVER if self.until_ms == NEVER else self.until_ms + max(0, min(jitter_ms, tenth_ms))


class Terms(NamedTuple):
    """What a caller decides by. Its clock is `skew_ms` ahead of the ledger's."""

    limits: tuple[Limit, ...]
    leave: Mapping[str, Mapping[str, int]]
    skew_ms: int = 0
    jitter_ms: int = 0

    def now_ms(self, clock_ms: int) -> int:
        """The time by which it decides."""
        return min(clock_ms, clock_ms + self.skew_ms + WALL_SLACK_MS)

    def clocks_disagree(self) -> bool:
        return self.skew_ms < -LATEST_MS

    def asked(self, charges: Sequence[Charge], job: str) -> list[Asked]:
        """The limits that count these charges of a job, with what these add."""
        leave, asked = self.leave.get(job, {}), []
        for limit in of_jobs(self.limits, (job,)):
            selector = limit.view.selector
            counted = [selector.cost(x.units) for x in charges if selector.counts(x.bucket, x.method, x.job)]
            if counted:
                asked.append(Asked(limit, leave.get(limit.name, 0), sum(counted)))
        return asked

    def all_asked(self, job: str) -> list[Asked]:
        """All limits that people look at, with no charge."""
        leave = self.leave.get(job, {})
        return [Asked(limit, leave.get(limit.name, 0), 0) for limit in of_jobs(self.limits, self.leave)]


class Asked(NamedTuple):
    """A limit, what the caller's job leaves of it to others, and what the charges add to it."""

    limit: Limit
    leave_units: int
    cost_units: int


class State(NamedTuple):
    """A limit as an answer shows it."""

    name: str
    cost_units: int
    used_units: int
    limit_units: int
    remaining_units: int
    would_refuse: bool

    @classmethod
    def of(cls, state: LimitState) -> State:
        """What a budget says."""
        return cls(
            state.name, state.cost_units, state.used_units, state.limit_units, state.remaining_units, state.would_refuse
        )


class Answer(NamedTuple):
    """What a decision says, without what was asked."""

    reason: str
    decided_at_ms: int
    refused_by: str | None = None
    retry_at_ms: int | None = None
    remaining_units: int = 0
    limits: tuple[State, ...] = ()

    @classmethod
    def of(cls, decision: Decision) -> Answer:
        """What a budget says."""
        return cls(
            decision.reason,
            decision.decided_at_ms,
            decision.refused_by,
            decision.retry_at_ms,
            decision.remaining_units,
            tuple([State.of(state) for state in decision.limits]),
        )

    def apart_from(self, other: Answer) -> tuple[dict[str, object], dict[str, object]]:
        """What differs in two answers: of limits, those that do."""
        parts = [{**answer._asdict(), **{x.name: x for x in answer.limits}, "limits": 0} for answer in (self, other)]
        names = [name for name in {**parts[0], **parts[1]} if parts[0].get(name) != parts[1].get(name)]
        mine, theirs = ({name: part.get(name) for name in names} for part in parts)
        return mine, theirs


class LogOracle:
    """One project's log. Times are given by the ledger's clock."""

    def __init__(self) -> None:
        self.charges: list[Charge] = []
        self.newest_ms = 0
        self.others: list[Others] = []
        self.closings: dict[str, Closing] = {}
        self.grants: tuple[Grant, ...] = ()
        self._granted_ms = 0
        self._columns: dict[Selector, Column] = {}

    # -- what happens ------------------------------------------------------------------------------------------------

    def date(self, clock_ms: int) -> int:
        """The date of a new entry: dates never go back, whatever the clock does."""
        self.newest_ms = max(self.newest_ms, clock_ms)
        return self.newest_ms

    def charge(self, charges: Sequence[Charge], clock_ms: int) -> None:
        for charge in charges:
            charge.ms = self.date(clock_ms)
            self.charges.append(charge)
            for selector, column in self._columns.items():
                _count(selector, column, charge)

    def correct(self, charge: Charge, units: int) -> None:
        charge.units = units
        for selector, column in self._columns.items():
            if charge in column.places:
                column.costs[column.places[charge]] = selector.cost(units)

    def add_others(self, others: Others) -> None:
        self.others.append(others)

    def exhaust(self, bucket: str, since_ms: int, until_ms: int, clock_ms: int) -> None:
        """A closed bucket stays as it is. A later answer of upstream closes a reopened bucket again."""
        before = self.closings.get(bucket)
        if before is not None and before.until_ms > clock_ms:
            stands = not before.reopened_ms or since_ms < before.reopened_ms <= clock_ms
            if stands:
                return
        if before is not None:
            since_ms = max(since_ms, min(before.reopened_ms or before.since_ms, clock_ms))
        self.closings[bucket] = Closing(since_ms, until_ms)
        self.date(clock_ms)

    def reopen(self, bucket: str, clock_ms: int) -> bool:
        before = self.closings.get(bucket)
        if before is None or before.reopened_ms:
            return False
        self.closings[bucket] = before._replace(reopened_ms=clock_ms)
        self.date(clock_ms)
        return True

    def grant(self, grants: Sequence[Grant], clock_ms: int) -> None:
        if (tuple(grants), clock_ms) != (self.grants, self._granted_ms):
            self.grants, self._granted_ms = tuple(grants), clock_ms
            self.date(clock_ms)

    def trim(self, through_ms: int, kept: Collection[str]) -> list[Charge]:
        """Forget all that is dated up to a time, except the charges with these keys and the units with these names."""
        first = bisect_right(self.charges, through_ms, key=lambda charge: charge.ms)
        older, newer = self.charges[:first], self.charges[first:]
        self.charges = [charge for charge in older if charge.key in kept] + newer
        self.others = [others for others in self.others if others.ms > through_ms or others.name in kept]
        self._columns = {}
        return [charge for charge in older if charge.key not in kept]

    # -- sums --------------------------------------------------------------------------------------------------------

    def used_units(self, view: View, now_ms: int) -> int:
        """What a view counts at a time."""
        column = self._column(view.selector)
        first = bisect_right(column.ms, cutoff(view.window, now_ms))
        return sum(column.costs[first:]) + self.others_units(view, now_ms)

    def _column(self, selector: Selector) -> Column:
        column = self._columns.get(selector)
        if column is None:
            column = self._columns[selector] = Column()
            for charge in self.charges:
                _count(selector, column, charge)
        return column

    def others_units(self, view: View, now_ms: int) -> int:
        """Of each name the largest that has not left."""
        largest: dict[str, int] = {}
        for others in self.others:
            if counts_others(view, others) and now_ms < _others_leave_ms(view, others):
                largest[others.name] = max(others.units, largest.get(others.name, 0))
        return sum(largest.values())

    def cap(self, asked: Asked, now_ms: int, leave_units: int | None = None, *, paced: bool = True) -> int:
        """What a limit holds at a time, for this caller."""
        limit = asked.limit
        granted_units = self._granted_units(limit, now_ms)
        units = limit.limit_units if granted_units is None else min(limit.limit_units, granted_units)
        units = max(0, units - (asked.leave_units if leave_units is None else leave_units))
        if not (paced and limit.paced and isinstance(limit.view.window, Calendar)):
            return units
        start_ms, end_ms = limit.view.window.edges(now_ms)
        span_ms = end_ms - start_ms
        share = units * (now_ms - start_ms + span_ms // 8) // span_ms
        return min(units, max(asked.cost_units, 1, share))

    def _granted_units(self, limit: Limit, now_ms: int) -> int | None:
        """What upstream's grant leaves to a limit that counts the units of one bucket, for a day or less."""
        selector = limit.view.selector
        if selector.count == "calls" or len(selector.buckets) != 1 or limit.view.window.longest_ms > 25 * HOUR_MS:
            return None
        for grant in self.grants:
            if grant.bucket == selector.buckets[0] and grant.since_ms - DAY_MS <= now_ms < grant.until_ms:
                return max(0, grant.quota_units - limit.headroom_units)
        return None

    def fits(self, asked: Asked, now_ms: int) -> bool:
        if asked.limit.shadow or not asked.cost_units:
            return True
        return self.used_units(asked.limit.view, now_ms) + asked.cost_units <= self.cap(asked, now_ms)

    # -- the answer --------------------------------------------------------------------------------------------------

    def answer(
        self, terms: Terms, asked: Sequence[Asked], closed_by: Sequence[str], clock_ms: int, *, commit: bool
    ) -> Answer:
        """The answer to charges that add so much to these limits, and that these buckets close. What is admitted is
        not charged yet."""
        now_ms = terms.now_ms(clock_ms)
        if terms.clocks_disagree():
            return Answer("clock", now_ms)
        closed = self._closed(closed_by, now_ms, terms.jitter_ms)
        admitted = closed is None and all(self.fits(each, now_ms) for each in asked)
        states = self.states(asked, now_ms, charged=admitted and commit)
        enforced = [state for state, (limit, _, _) in zip(states, asked, strict=True) if not limit.shadow]
        tightest = min(enforced, key=lambda state: state.remaining_units // max(1, state.cost_units), default=None)
        answer = Answer("ok", now_ms, None, None, tightest.remaining_units if tightest else 0, states)
        if admitted:
            return answer
        if closed is not None:
            bucket, closing = closed
            if closing.until_ms == NEVER:
                return answer._replace(reason="closed", refused_by=bucket)
            opens_ms = closing.opens_ms(terms.jitter_ms)
            return answer._replace(
                reason="exhausted", refused_by=bucket, retry_at_ms=self._room_or(asked, opens_ms, opens_ms)
            )
        refusing = [each for each in asked if not self.fits(each, now_ms)]
        for each in refusing:
            if self._is_granted_too_little(each, now_ms):
                return answer._replace(reason="closed", refused_by=each.limit.name)
        longest = max(refusing, key=lambda each: self.room_at(each, now_ms))
        alone_units = self.cap(longest, now_ms, 0)
        fits_alone = self.used_units(longest.limit.view, now_ms) + longest.cost_units <= alone_units
        reason = "leave" if longest.leave_units and fits_alone else "limit"
        return answer._replace(
            reason=reason, refused_by=longest.limit.name, retry_at_ms=self._room_or(asked, now_ms, None)
        )

    def states(self, asked: Sequence[Asked], now_ms: int, *, charged: bool) -> tuple[State, ...]:
        """Each limit, with the charges if they are `charged`."""
        states = []
        for each in asked:
            limit, cost_units, cap_units = each.limit, each.cost_units, self.cap(each, now_ms)
            used_units = self.used_units(limit.view, now_ms)
            if used_units and not charged:  # then it has no room for one call that costs more than its pace
                cap_units = min(cap_units, self.cap(each._replace(cost_units=0), now_ms))
            would_refuse = limit.shadow and cost_units > 0 and used_units + cost_units > cap_units
            used_units += cost_units if charged else 0
            left_units = max(0, cap_units - used_units)
            states.append(State(limit.name, cost_units, used_units, cap_units, left_units, would_refuse))
        return tuple(states)

    def _closed(self, buckets: Sequence[str], now_ms: int, jitter_ms: int) -> tuple[str, Closing] | None:
        """The bucket of these that is closed longest, and its closing."""
        closed = [
            (bucket, self.closings[bucket])
            for bucket in buckets
            if bucket in self.closings
            and not self.closings[bucket].reopened_ms
            and self.closings[bucket].opens_ms(jitter_ms) > now_ms
        ]
        return max(closed, key=lambda each: each[1].opens_ms(jitter_ms), default=None)

    def _is_granted_too_little(self, asked: Asked, at_ms: int) -> bool:
        """Whether a call never fits as long as upstream grants so little: nobody waits for the end of that."""
        return not asked.limit.shadow and asked.cost_units > self.cap(asked, at_ms, paced=False)

    def _room_or(self, asked: Sequence[Asked], from_ms: int, instead_ms: int | None) -> int | None:
        """The first moment from `from_ms` on at which all limits have room. Where upstream grants too little then,
        `instead_ms`."""
        if any(self._is_granted_too_little(each, from_ms) for each in asked):
            return instead_ms
        at_ms, before_ms = from_ms, -1
        while at_ms > before_ms:
            before_ms, at_ms = at_ms, max([at_ms, *(self.room_at(each, at_ms) for each in asked)])
        return at_ms

    def room_at(self, asked: Asked, from_ms: int) -> int:
        """The first moment from `from_ms` on at which a limit has room, if nothing else is charged.

        Usage only falls then, and what a limit holds only grows, but for a paced one at the edge of its window. Between
        two edges, therefore, the moment is found by halving.
        """
        window = asked.limit.view.window
        while True:
            if self.fits(asked, from_ms):
                return from_ms
            end_ms = window.edges(from_ms)[1] if isinstance(window, Calendar) else from_ms + AHEAD_MS
            if self.fits(asked, end_ms - 1):
                return _first_ms(from_ms, end_ms - 1, lambda at_ms: self.fits(asked, at_ms))
            from_ms = end_ms


def _first_ms(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first of the moments low < x <= high at which something holds that goes on holding; at `high` it does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _count(selector: Selector, column: Column, charge: Charge) -> None:
    if selector.counts(charge.bucket, charge.method, charge.job):
        column.places[charge] = len(column.ms)
        column.ms.append(charge.ms)
        column.costs.append(selector.cost(charge.units))


def counts_others(view: View, others: Others) -> bool:
    """Whether a view counts all units of the bucket, in a window as long as that in which upstream counted them."""
    selector, longest_ms = view.selector, view.window.longest_ms
    if not selector.counts_bucket(others.bucket) or selector.methods or selector.jobs:
        return False
    if not others.window_ms:
        return True
    shorter_ms, longer_ms = sorted((longest_ms, others.window_ms))
    return 24 * longer_ms <= 25 * shorter_ms and (selector.count == "units" or others.noun == CALLS)


def _others_leave_ms(view: View, others: Others) -> int:
    """At the end of upstream's period, or of the limit's own that holds its beginning, or an entry of that date."""
    leaves_ms = min(others.until_ms, leaves_at(view.window, others.ms))
    return min(leaves_ms, leaves_at(view.window, others.since_ms)) if isinstance(view.window, Calendar) else leaves_ms
