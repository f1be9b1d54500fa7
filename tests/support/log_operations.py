"""Random operations on a log, each answer held against the brute-force oracle.

Three callers, each with limits, a project and a clock of its own, charge, also several at once, peek, look and correct
on one log. Upstream closes buckets, grants less than the limits say, and counts units of others. The ledger's clock
walks, jumps, and steps back, around days on which clocks change. Callers start anew, with and without what was kept.

Pace            windows, and steps of the clock that fill them
small_bounds    bounds that a short run meets

A seed does the same each time. A difference says the seed, the operation, both answers, and what was done before.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any, NamedTuple, Self

from quota.budget import Budget
from quota.common.clock import NEVER
from quota.deciding.project import Project
from quota.decision import Decision
from quota.errors import CostExceedsLimit, LedgerError, QuotaError, UnknownCharge
from quota.ledger import sqlite_log
from quota.ledger.factory import open_ledger
from quota.ledger.log import MAX_READ, Log
from quota.rules import total
from quota.rules.entry import CALLS, END, START
from quota.rules.facts import Grant
from quota.terms.costs import Part, Price
from quota.terms.limits import DAY_MS, HOUR_MS, SLACK_MS, Calendar, Limit, Selector, Sliding, View, Window
from support.books import BOOK
from support.log_oracle import AHEAD_MS, Answer, Charge, LogOracle, Others, State, Terms

LOS_ANGELES, LORD_HOWE, SANTIAGO = "America/Los_Angeles", "Australia/Lord_Howe", "America/Santiago"


@dataclass(frozen=True)
class Pace:
    """How time passes in one run, so that the windows, shortest first, hold some dozens to some hundred charges."""

    windows: tuple[Window, ...]
    steps_ms: tuple[int, ...]
    jumps_ms: tuple[int, ...]


FAST = Pace(
    (
        Sliding(50),
        Sliding(300),
        Sliding(2_000),
        Calendar("quarter-hour", "Asia/Kathmandu"),
        Calendar("hour", LOS_ANGELES),
        Calendar("hour", LORD_HOWE),
    ),
    (0, 0, 0, 1, 1, 2, 5, 30),
    (400, 2_500, -1, -5, -60, -2_400, HOUR_MS, -HOUR_MS, 60 * HOUR_MS),
)
DAILY = Pace(
    (
        Calendar("quarter-hour", LOS_ANGELES),
        Sliding(HOUR_MS),
        Calendar("hour", LORD_HOWE),
        Sliding(DAY_MS),
        Calendar("day", LOS_ANGELES),
        Calendar("day", SANTIAGO),
        Calendar("day", LORD_HOWE),
    ),
    (0, 1, 1_000, 20_000, 60_000, 120_000),
    (DAY_MS, 3 * HOUR_MS, -1, -4_000, -60_000, -HOUR_MS, -5 * HOUR_MS, 26 * HOUR_MS, -20 * HOUR_MS),
)
MONTHLY = Pace(
    (
        Sliding(DAY_MS),
        Calendar("day", SANTIAGO),
        Sliding(7 * DAY_MS),
        Calendar("week", LOS_ANGELES),
        Calendar("week", LORD_HOWE),
        Sliding(30 * DAY_MS),
        Calendar("month", LOS_ANGELES),
        Calendar("month", SANTIAGO, 31),
        Calendar("month", "Europe/Berlin", 8),
    ),
    (0, 60_000, HOUR_MS, 3 * HOUR_MS),
    (20 * DAY_MS, -HOUR_MS, -20 * HOUR_MS, 3 * DAY_MS, 70 * DAY_MS),
)
PACES = (FAST, DAILY, DAILY, MONTHLY)

CLOCK_CHANGES = (
    datetime(2026, 3, 7, 20, tzinfo=UTC),  # Los Angeles, forth
    datetime(2026, 10, 31, 20, tzinfo=UTC),  # and back
    datetime(2026, 4, 3, 20, tzinfo=UTC),  # Lord Howe, by half an hour, and Santiago, at midnight, back
    datetime(2026, 9, 5, 12, tzinfo=UTC),  # Santiago, forth: a day without midnight
    datetime(2026, 10, 2, 20, tzinfo=UTC),  # Lord Howe, forth
)
"""A day before clocks change."""

SKEWS_MS = (0, 0, 0, 0, 700, -1_500, -5_001, -40_000, -HOUR_MS, -HOUR_MS - 1, 5_001, 2 * HOUR_MS, 3 * DAY_MS)
"""How far a caller's clock is ahead of the ledger's."""

NUMBERS_OF_LIMITS = (1, 1, 2, 2, 3, 4, 6, 12)
JOBS = ("", "trending", "backfill", "odd|job,%*")
ODD, PAIR, STATUS = "odd,na|me*%", "pair.list", "status.get"
METHODS = ("search.list", "videos.list", "captions.list", "suggest.list", ODD, PAIR, PAIR, STATUS)
PRICES = BOOK._replace(
    methods={**BOOK.methods, PAIR: (Price((Part("units", 7), Part("search", 2))),), STATUS: (Price(()),)}
)
"""The book of the tests, with a call of two buckets and one that is free."""


@contextmanager
def small_bounds(*, small: bool = True) -> Iterator[None]:
    """Bounds so small that a short run meets each of them: answers that are not whole, totals that hold only some of
    what leaves, views that are kept after some entries."""
    project = sys.modules[Project.__module__]
    bounds = {
        (total, "MAX_LEAVING"): 8,
        (total, "READ_LEAVING"): 3,
        (project, "MAX_READ"): 7,
        (project, "KEEP_AFTER"): 5,
        (sqlite_log, "MAX_UNSEEN"): 6,
    }
    before = {place: getattr(*place) for place in bounds}
    try:
        for (module, name), bound in bounds.items() if small else ():
            setattr(module, name, bound)
        yield
    finally:
        for (module, name), bound in before.items():
            setattr(module, name, bound)


# -- a run -------------------------------------------------------------------------------------------------------------

FURTHEST_BACK_MS = 20 * HOUR_MS
"""How far the clock goes back, at most: less than SLACK_MS."""

OPERATIONS = {
    "charge": 44,
    "charge_many": 8,
    "peek": 10,
    "settle": 12,
    "usage": 4,
    "cross_an_edge": 4,
    "come_back": 4,
    "exhaust": 2,
    "reopen": 2,
    "grant": 1,
    "add_others": 2,
    "start_anew": 3,
    "change_a_limit": 2,
    "replace": 1,
    "check_the_oracle": 1,
}
"""How often each operation is done."""


class Call(NamedTuple):
    """A call, and what it is charged."""

    method: str
    charges: list[Charge]

    @property
    def units(self) -> int:
        return self.charges[0].units if self.charges else 0


@dataclass
class Made:
    """A call that was charged."""

    id: str
    charges: list[Charge]


@dataclass
class Caller:
    """A process: what it decides by, and its budget over a project of its own."""

    terms: Terms
    project: Project = field(init=False)
    budget: Budget = field(init=False)

    @property
    def longest_ms(self) -> int:
        return max(limit.view.window.longest_ms for limit in self.terms.limits)


class DifferenceError(AssertionError):
    """A budget and the oracle differ."""


class Watched:
    """A log that notes whether it was asked to trim."""

    def __init__(self, log: Log) -> None:
        self.log, self.was_trimmed = log, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)

    def trim(self, project: str, before_ms: int, count: int = MAX_READ) -> int:
        self.was_trimmed = True
        return self.log.trim(project, before_ms, count)


class RandomOperations:
    """One seeded run. `counts` says afterwards how often each outcome was seen: a run that tested nothing shows."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.pace = self.random.choice(PACES)
        self.stretch = self.random.choice((1, 4, 10))
        self.scale = self.random.choice((1, 1, 1, 6, 40))
        """Limits of so many times as many units: some hold thousands of charges."""
        self.in_use = self.random.choice((1, 2, len(self.pace.windows)))
        """So many of the windows: longer ones join later."""
        self.clock_ms = int(self.random.choice(CLOCK_CHANGES).timestamp() * 1000)
        self.latest_ms = self.clock_ms
        self.corrected = set[str]()
        self.name = f"random-{seed}"
        self.log = Watched(open_ledger(url, clock=self.clock))
        self.oracle = LogOracle()
        self.counts: Counter[str] = Counter()
        self.number = 0
        self.history: deque[str] = deque(maxlen=25)
        self.made: deque[Made] = deque(maxlen=300)
        self.names = count()
        self.heard: deque[tuple[str, str, int, int, int, str]] = deque(maxlen=3)
        self.longest_ms = DAY_MS
        """The longest window that was ever named."""
        self.trimmed = START
        self.callers = [self._new_caller() for _ in range(3)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()

    def clock(self) -> int:
        return self.clock_ms

    def run(self, operations: int) -> Counter[str]:
        """Do so many; every other seed with `small_bounds`. Raises DifferenceError."""
        names, weights = [*OPERATIONS], [*OPERATIONS.values()]
        with small_bounds(small=self.seed % 2 == 1):
            for self.number in range(operations):
                self._walk_clock()
                operation = getattr(self, f"_{self.random.choices(names, weights)[0]}")
                caller = self.random.choice(self.callers)
                try:
                    operation(caller)
                except QuotaError as error:
                    raise self._difference("".join(traceback.format_exception(error)), "an answer") from error
                self._hear_of_trims()
        return self.counts

    def _note(self, caller: Caller, what: str) -> None:
        """Note a step. An operation may have several, and each may trim the log."""
        self._hear_of_trims()
        self.history.append(f"{self.number} at {self.clock_ms} caller {self.callers.index(caller)}: {what}")

    def _difference(self, got: object, want: object) -> DifferenceError:
        where, before = f"operation {self.number}, at {self.clock_ms}", "\n    ".join(self.history)
        return DifferenceError(f"seed {self.seed}, {where}\n  got  {got}\n  want {want}\n    {before}")

    # -- the clock ---------------------------------------------------------------------------------------------------

    def _walk_clock(self) -> None:
        jumps = self.random.random() < 0.006
        step_ms = self.random.choice(self.pace.jumps_ms if jumps else self.pace.steps_ms)
        self._set_clock(self.clock_ms + (step_ms if jumps else step_ms * self.stretch))

    def _set_clock(self, clock_ms: int) -> None:
        """Set the clock, but not further back than a log is kept."""
        self.clock_ms = max(clock_ms, self.latest_ms - FURTHEST_BACK_MS)
        self.latest_ms = max(self.latest_ms, self.clock_ms)

    def _hear_of_trims(self) -> None:
        """A process that begins no longer counts trimmed entries. No window ever named may reach them."""
        if not self.log.was_trimmed:
            return
        self.log.was_trimmed = False
        trimmed = self.log.begin(self.name).trimmed
        if trimmed <= self.trimmed:
            return
        self.trimmed = trimmed
        if trimmed[0] >= self.latest_ms - self.longest_ms - SLACK_MS:
            raise self._difference(f"trimmed up to {trimmed}", f"kept for {self.longest_ms + SLACK_MS} ms")
        here = self.log.read(self.name, trimmed, (trimmed[0], END[1]), MAX_READ)
        if self.oracle.trim(trimmed[0], {entry.key for entry in here} | {entry.of for entry in here if entry.of}):
            self.counts["trimmed"] += 1

    # -- callers -----------------------------------------------------------------------------------------------------

    def _new_caller(self) -> Caller:
        r = self.random
        limits = tuple(self._new_limit(n) for n in range(r.choice(NUMBERS_OF_LIMITS)))
        names = [f"{limit.name}:backfill" if limit.per_job else limit.name for limit in limits[:2]]
        leave = {"backfill": {name: r.randrange(1, 90) for name in names}, "trending": {}}
        caller = Caller(Terms(limits, leave, r.choice(SKEWS_MS), r.choice((0, 0, 7_000))))
        self._open(caller)
        return caller

    def _new_limit(self, number: int) -> Limit:
        r = self.random
        per_job = r.random() < 0.15
        selector = Selector(
            buckets=r.choice(((), ("units",), ("units",), ("search",), ("search", "units"))),
            methods=r.choice(((), (), (), ("search.list",), ("videos.list", ODD))),
            jobs=() if per_job else r.choice(((), (), (), ("trending",), ("backfill", "odd|job,%*"))),
            count=r.choice(("units", "units", "units", "calls")),
        )
        units = self.scale * (r.randrange(100, 900) if selector.count == "units" else r.randrange(2, 40))
        window = r.choice(self.pace.windows[: self.in_use])
        return Limit(
            f"limit-{number}",
            units,
            View(selector, window),
            units + 10,
            10,
            paced=isinstance(window, Calendar) and r.random() < 0.4,
            per_job=per_job,
            shadow=r.random() < 0.15,
        )

    def _open(self, caller: Caller) -> None:
        """A new process."""
        terms = caller.terms
        caller.project = Project(
            self.log, self.name, clock=self.clock, wall=lambda: self.clock_ms + terms.skew_ms, jitter_ms=terms.jitter_ms
        )
        self._set_budget(caller)

    def _set_budget(self, caller: Caller) -> None:
        terms = caller.terms
        caller.budget = Budget(
            credential="main", book=PRICES, limits=terms.limits, project=caller.project, leave=terms.leave
        )

    def _start_anew(self, caller: Caller) -> None:
        """A cold start."""
        self._note(caller, "starts anew")
        self._open(caller)
        self.counts["cold"] += 1

    def _change_a_limit(self, caller: Caller) -> None:
        """Another budget over what the process has read."""
        limits, number = [*caller.terms.limits], self.random.randrange(len(caller.terms.limits))
        if self.random.random() < 0.5:
            limits[number] = self._new_limit(number)
        else:
            old = limits[number]
            units = max(1, old.limit_units + self.random.randrange(-90, 300))
            limits[number] = Limit(
                old.name, units, old.view, units + 10, 10, old.paced, old.per_job, self.random.random() < 0.15
            )
        caller.terms = caller.terms._replace(limits=tuple(limits))
        self._note(caller, f"has {limits[number]}")
        self._set_budget(caller)

    def _replace(self, caller: Caller) -> None:
        """Another process in the place of one."""
        self.in_use += self.random.random() < 0.4
        number = self.callers.index(caller)
        self.callers[number] = new = self._new_caller()
        self._note(new, f"is new: {new.terms}")

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _new_call(self, job: str) -> Call:
        r = self.random
        method = r.choice(METHODS)
        parts = (Part("units", 1),) if method == ODD else PRICES.price(method).parts
        charges = [Charge(part.units, part.bucket, method, job) for part in parts]
        if charges and (method == ODD or r.random() < 0.5):
            charges[0].units = r.choice((1, 7, 100))
        return Call(method, charges)

    def _charge(self, caller: Caller) -> None:
        job = self.random.choice(JOBS)
        self._decide(caller, [self._new_call(job)], job, commit=True)

    def _charge_many(self, caller: Caller) -> None:
        job = self.random.choice(JOBS)
        calls = [self._new_call(job) for _ in range(self.random.choice((2, 2, 3, 10)))]
        self._decide(caller, calls, job, commit=True)

    def _peek(self, caller: Caller) -> None:
        job = self.random.choice(JOBS)
        self._decide(caller, [self._new_call(job)], job, commit=False)

    def _decide(self, caller: Caller, calls: Sequence[Call], job: str, *, commit: bool) -> Answer | None:
        """Ask, and compare. None if the call could never fit, or is free."""
        terms, charges = caller.terms, [charge for call in calls for charge in call.charges]
        self._note(caller, f"{'charge' if commit else 'peek'} {[(x.method, x.units) for x in calls]} for {job!r}")
        asked = terms.asked(charges, job)
        never_fits = any(
            cost_units > max(0, limit.limit_units - leave_units)
            for limit, leave_units, cost_units in asked
            if not limit.shadow
        )
        try:
            decisions = self._ask(caller, calls, job, commit=commit)
        except CostExceedsLimit:
            if not never_fits:
                raise
            self.counts["never fits"] += 1
            return None
        if never_fits or [(x.method, x.cost_units) for x in decisions] != [(x.method, x.units) for x in calls]:
            raise self._difference(decisions, f"CostExceedsLimit: {never_fits}; calls {calls}")
        if not charges:
            if not all(decision.admitted and decision.id is None and not decision.limits for decision in decisions):
                raise self._difference(decisions, "a free call")
            self.counts["free"] += 1
            return None
        self.longest_ms = max(self.longest_ms, caller.longest_ms)
        names = [name for call in calls if call.charges for name in self._closed_by(call)]
        want = self.oracle.answer(terms, asked, [*dict.fromkeys(names)], self.clock_ms, commit=commit)
        for decision in decisions:
            got = Answer.of(decision)
            if got != want or decision.admitted != (want.reason == "ok"):
                raise self._difference(*got.apart_from(want))
        self._count(want, calls, [limit for limit, _, _ in asked])
        if want.reason == "ok" and commit:
            self.oracle.charge(charges, self.clock_ms)
        for decision, call in zip(decisions, calls, strict=True):
            self._take(decision, call, charged=want.reason == "ok" and commit)
        return want

    def _closed_by(self, call: Call) -> tuple[str, ...]:
        return PRICES.closed_by(call.method, *[charge.bucket for charge in call.charges])

    def _ask(self, caller: Caller, calls: Sequence[Call], job: str, *, commit: bool) -> Sequence[Decision]:
        """A total that has far to read goes on in the next decision."""
        for _ in range(20):
            if len(calls) > 1:
                several = [(call.method, call.units) if call.charges else call.method for call in calls]
                decisions = caller.budget.charge_many(several, job=job, region="US")
            else:
                ask = caller.budget.charge if commit else caller.budget.peek
                decisions = [ask(calls[0].method, units=calls[0].units or None, job=job, region="US")]
            if decisions[0].reason != "counting":
                return decisions
            self.counts["counting"] += 1
        raise self._difference(decisions, "an end of counting")

    def _take(self, decision: Decision, call: Call, *, charged: bool) -> None:
        """The id has the date of the charge, and the number of its further charges."""
        if not (charged and call.charges):
            if decision.id is not None:
                raise self._difference(decision, "no id")
            return
        ms, _, key = (decision.id or "").partition("-")
        first, _, further = key.partition("+")
        if (ms, further) != (str(call.charges[0].ms), str(len(call.charges) - 1).strip("0")):
            raise self._difference(decision, f"an id with {call.charges[0].ms} and {len(call.charges) - 1} further")
        for n, charge in enumerate(call.charges):
            charge.key = f"{first}+{n}" if n else first
        self.made.append(Made(decision.id or "", call.charges))

    def _count(self, want: Answer, calls: Sequence[Call], limits: Sequence[Limit]) -> None:
        self.counts[want.reason] += 1
        if len(calls) > 1:
            self.counts[f"several {want.reason}"] += 1
        if any(len(call.charges) > 1 for call in calls):
            self.counts[f"pair {want.reason}"] += 1
        if any(limit.paced for limit in limits):
            self.counts[f"paced {want.reason}"] += 1
        if any(":" in limit.name for limit in limits):
            self.counts[f"per job {want.reason}"] += 1
        if any(state.would_refuse for state in want.limits):
            self.counts["would refuse"] += 1
        if want.reason in ("limit", "leave") and want.retry_at_ms is None:
            raise self._difference(want, "a time")

    # -- decisions at chosen times -----------------------------------------------------------------------------------

    def _cross_an_edge(self, caller: Caller) -> None:
        """One caller looks just after the next edge of a calendar window. Then the clock goes back before that edge,
        and another caller, with limits of its own, makes its first charge there."""
        windows = [window for window in self.pace.windows[: self.in_use] if isinstance(window, Calendar)]
        if not windows:
            return
        edge_ms = self.random.choice(windows).edges(max(self.clock_ms, self.oracle.newest_ms))[1]
        step_ms = self.random.choice(self.pace.steps_ms) * self.stretch
        other = self.random.choice([x for x in self.callers if x is not caller])
        for asks, at_ms, operation in (
            (caller, edge_ms, self._peek),
            (other, edge_ms - 1 - step_ms, self._charge),
            (other, edge_ms + step_ms, self._charge),
            (caller, edge_ms + 2 * step_ms, self._charge),
        ):
            self._set_clock(at_ms)
            operation(asks)

    def _come_back(self, caller: Caller) -> None:
        """A refused call is refused until the millisecond before `retry_at`, and admitted then, by whoever asks with
        these limits."""
        job = self.random.choice(JOBS)
        calls = [self._new_call(job)]
        answer = self._decide(caller, calls, job, commit=False)
        if answer is None or answer.retry_at_ms is None or answer.retry_at_ms > self.clock_ms + self.longest_ms:
            return
        ahead_ms = self.clock_ms - answer.decided_at_ms
        for before_ms in (1, 0):
            self._set_clock(answer.retry_at_ms + ahead_ms - before_ms)
            if self.random.random() < 0.3:
                self._start_anew(caller)
            again = self._decide(caller, calls, job, commit=not before_ms)
            if again is None or (answer.reason == "exhausted" and again.reason == "closed"):
                continue  # upstream grants too little for what its exhaustion held back first
            if (again.reason == "ok") != (not before_ms):
                raise self._difference(again, f"what was to come of {answer}, {before_ms} ms before its time")
        self.counts["came back"] += 1

    # -- looks and corrections ---------------------------------------------------------------------------------------

    def _usage(self, caller: Caller) -> None:
        job, terms = self.random.choice(JOBS), caller.terms
        self._note(caller, f"usage of {job!r}")
        try:
            got = tuple([State.of(state) for state in caller.budget.usage(job)])
        except LedgerError:
            if not terms.clocks_disagree():
                raise
            return
        want = self.oracle.states(terms.all_asked(job), terms.now_ms(self.clock_ms), charged=False)
        if got != want or terms.clocks_disagree():
            raise self._difference(got, want)
        self.longest_ms = max(self.longest_ms, caller.longest_ms)
        self.counts["usage"] += 1

    def _settle(self, caller: Caller) -> None:
        """Correct a call of two buckets in the first bucket, or in both. A charge that has left the log is unknown."""
        if not self.made:
            return
        made = self.random.choice([*self.made][-self.random.choice((10, 300)) :])
        refunds = self.random.random() < 0.3
        charges = made.charges if refunds else made.charges[:1]
        first = charges[0]
        units = 0 if refunds else self.random.choice((0, first.units, first.units + 3, first.units // 2, 250))
        self._note(caller, f"{'refund' if refunds else f'settle with {units}'} {made}")
        becomes = {charge.key: units if charge is first else 0 for charge in charges}
        changed = [x for x in charges if x.key not in self.corrected or x.units != becomes[x.key]]
        there = all(charge.ms > self.trimmed[0] or charge in self.oracle.charges for charge in charges)
        try:
            before = caller.budget.refund(made.id) if refunds else caller.budget.settle(made.id, units)
        except UnknownCharge:
            if there:
                raise
            self.counts["left the log"] += 1
            return
        except LedgerError:
            if not (caller.terms.clocks_disagree() and changed):
                raise
            return
        if not there or (before.units, before.method, before.job) != (first.units, first.method, first.job):
            raise self._difference(before, f"{first}, in the log: {there}")
        for charge in changed:
            self.oracle.correct(charge, becomes[charge.key])
            self.oracle.date(self.clock_ms)
            self.corrected.add(charge.key)
        self.counts["refunded" if refunds else "settled"] += 1
        if len(charges) > 1:
            self.counts["pair refunded"] += 1

    # -- facts and others --------------------------------------------------------------------------------------------

    def _exhaust(self, caller: Caller) -> None:
        r = self.random
        bucket = r.choice(("units", "search"))
        since_ms = self.clock_ms - r.choice((0, 0, *self.pace.steps_ms))
        until_ms = r.choice((self.clock_ms + r.choice(self.pace.steps_ms) * 20, self._edge_ms(), NEVER, 5))
        evidence = f"operation {self.number}"
        self._note(caller, f"exhaust {bucket} since {since_ms} until {until_ms}")
        caller.budget.exhaust(bucket, since_ms, until_ms, evidence)
        self.oracle.exhaust(bucket, since_ms, until_ms, self.clock_ms)
        if r.random() < 0.5:
            self._reopen(caller)

    def _edge_ms(self) -> int:
        calendar = self.random.choice([x for x in self.pace.windows if isinstance(x, Calendar)])
        return calendar.edges(self.clock_ms)[1]

    def _reopen(self, caller: Caller) -> None:
        bucket = self.random.choice(("units", "search"))
        self._note(caller, f"reopen {bucket}")
        got, want = caller.budget.reopen(bucket, "a test"), self.oracle.reopen(bucket, self.clock_ms)
        if got != want:
            raise self._difference(got, want)
        self.counts["reopened"] += got

    def _grant(self, caller: Caller) -> None:
        """Upstream grants less than the limits say, for a while."""
        r, buckets = self.random, ("search", "units")
        grants = [
            Grant(
                bucket,
                self.scale * r.choice((0, 60, 300, 600)),
                self.clock_ms,
                self.clock_ms + 1 + r.choice(self.pace.steps_ms) * 100,
            )
            for bucket in r.sample(buckets, r.randrange(3))
        ]
        self._note(caller, f"grant {grants}")
        caller.budget.grant(grants)
        self.oracle.grant(sorted(grants), self.clock_ms)

    def _add_others(self, caller: Caller) -> None:
        """Upstream counted more of a period than we did: a new one, or one that was heard of before."""
        r = self.random
        if not self.heard or r.random() < 0.5:
            window = r.choice(self.pace.windows[: self.in_use])
            if isinstance(window, Calendar):
                since_ms, until_ms = window.edges(self.clock_ms)
            else:
                since_ms, until_ms = self.clock_ms, self.clock_ms + window.window_ms
            name = f"others-{next(self.names)}"
            window_ms = r.choice((window.longest_ms, window.longest_ms, 0))
            self.heard.append(
                (name, r.choice(("units", "search")), since_ms, until_ms, window_ms, r.choice(("", CALLS)))
            )
        name, bucket, since_ms, until_ms, window_ms, noun = r.choice(self.heard)
        units = self.scale * r.randrange(1, 60)
        self._note(caller, f"add {units} others of {bucket} until {until_ms} as {name}, {window_ms} ms, {noun!r}")
        try:
            caller.budget.add_others(bucket, units, since_ms, until_ms, name, window_ms=window_ms, noun=noun)
        except LedgerError:
            if not caller.terms.clocks_disagree():
                raise
            return
        ms = self.oracle.date(self.clock_ms)
        self.oracle.add_others(Others(bucket, units, since_ms, until_ms, name, window_ms, noun, ms))
        self.counts["others"] += 1

    # -- the oracle itself -------------------------------------------------------------------------------------------

    def _check_the_oracle(self, caller: Caller) -> None:
        """What the oracle sums is what the entries of the log say, read one by one."""
        entries = self.log.read(self.name, START, END, AHEAD_MS)
        for limit in caller.terms.limits:
            view, units = limit.view, dict[str, int]()
            now_ms = caller.terms.now_ms(self.clock_ms)
            first_ms = (
                view.window.edges(now_ms)[0]
                if isinstance(view.window, Calendar)
                else now_ms - view.window.window_ms + 1
            )
            for entry in entries:
                counts = view.selector.counts(entry.bucket, entry.method, entry.job)
                if entry.kind == "charge" and counts and entry.id[0] >= first_ms:
                    units[entry.key] = view.selector.cost(entry.units)
                elif entry.kind == "correction" and entry.of in units:
                    units[entry.of] = view.selector.cost(entry.units)
            want = self.oracle.used_units(view, now_ms) - self.oracle.others_units(view, now_ms)
            if sum(units.values()) != want:
                raise self._difference(f"in the log {sum(units.values())} of {view.name}", f"the oracle {want}")
        self.counts["oracle checked"] += 1
