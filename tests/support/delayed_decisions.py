"""Decisions that reach the log late: between each question and its arrival others charge, correct, close buckets, and
the clock moves over edges, forth and back.

After every admission the whole log is summed: at the time of the ledger, no limit of whoever was admitted is exceeded,
and none of its buckets is closed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from quota.budget import Budget
from quota.common.clock import NEVER
from quota.deciding import decide
from quota.deciding import project as project_module
from quota.deciding.project import Project
from quota.errors import CostExceedsLimit, LedgerError, UnknownCharge
from quota.ledger.log import Append, Reply
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.entry import START
from quota.rules.facts import FACTS, Facts, closing
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.log_operations import CLOCK_CHANGES, LORD_HOWE, LOS_ANGELES, PRICES, SANTIAGO, small_bounds
from support.log_oracle import Asked, Charge, LogOracle, Terms

DEPTH = 3
"""So many may wait for the log at once, each between the question and the arrival of another."""

SKEWS_MS = (0, 0, 0, 900, -3_000, -40 * 60_000, 2 * HOUR_MS)
LATEST_BACK_MS = 20 * HOUR_MS
JOBS = ("trending", "backfill")
METHODS = ("search.list", "videos.list", "suggest.list", "pair.list")
PROJECT = "delayed"


class ExceededError(AssertionError):
    """A call was admitted that some limit had no room for."""


class DelayedLog(SqliteLog):
    """A log in memory whose questions are under way for a while: `before` is what happens meanwhile, and `after` is
    called with what was appended."""

    def __init__(self, clock: Callable[[], int], before: Callable[[], None], after: Callable[[Append, Reply], None]):
        super().__init__(clock=clock)
        self._before, self._after = before, after

    def append(self, project: str, request: Append) -> Reply:
        self._before()
        reply = super().append(project, request)
        if reply.word == "APPENDED":
            self._after(request, reply)
        return reply

    def begin(self, *args: Any) -> Any:
        self._before()
        return super().begin(*args)

    def read(self, *args: Any) -> Any:
        self._before()
        return super().read(*args)

    def corrections(self, *args: Any) -> Any:
        self._before()
        return super().corrections(*args)

    def change(self, *args: Any, **named: Any) -> Any:
        self._before()
        return super().change(*args, **named)


class Process:
    """A caller with limits of its own, and a project of its own, which hears the ledger's clock in answers alone."""

    def __init__(self, log: DelayedLog, terms: Terms, clock: Callable[[], int]) -> None:
        self.terms = terms
        self.job = ""
        """The job for which it asks."""
        self.project = Project(
            log, PROJECT, wall=lambda: clock() + terms.skew_ms, longest_ms=DAY_MS, jitter_ms=terms.jitter_ms
        )
        self.budget = Budget(
            credential="main", book=PRICES, limits=terms.limits, project=self.project, leave=terms.leave
        )


class DelayedDecisions:
    """One seeded run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.clock_ms = self.latest_ms = int(self.random.choice(CLOCK_CHANGES).timestamp() * 1000)
        self.passed_ms = 0
        """By a clock that never jumps."""
        self.goes_back = self.random.random() < 0.5
        self.log = DelayedLog(self.clock, self._meanwhile, self._take)
        self.oracle = LogOracle()
        self.by_key: dict[str, Charge] = {}
        self.ids: list[str] = []
        self.counts: Counter[str] = Counter()
        self.number = 0
        self.asking: list[Process] = []
        self.pool = self._limits()
        self.processes = [self._new_process() for _ in range(4)]

    def clock(self) -> int:
        return self.clock_ms

    def run(self, decisions: int) -> Counter[str]:
        """Make so many decisions, besides those that are made meanwhile. Raises ExceededError."""
        with small_bounds(small=self.seed % 2 == 1), self._passing_time():
            for self.number in range(decisions):
                self._move_clock()
                if self.random.random() < 0.01:
                    self.processes[self.random.randrange(len(self.processes))] = self._new_process()
                self._act(self.random.choice(self.processes))
        return self.counts

    @contextmanager
    def _passing_time(self) -> Iterator[None]:
        """A process measures by simulated time how long ago it heard the ledger's clock, and counts without haste."""
        passing = patch.object(project_module, "elapsed_s", lambda: self.passed_ms / 1_000)
        with passing, patch.object(decide, "COUNT_WITHIN_S", 10**9):
            yield

    # -- who asks ----------------------------------------------------------------------------------------------------

    def _limits(self) -> list[Limit]:
        r = self.random
        views = (
            View(Selector(), Sliding(r.choice((1_000, 60_000, HOUR_MS)))),
            View(Selector(buckets=("units",)), Calendar("day", r.choice((LOS_ANGELES, LORD_HOWE, SANTIAGO)))),
            View(Selector(methods=("search.list",), count="calls"), Sliding(DAY_MS)),
            View(Selector(jobs=("trending",)), Sliding(r.choice((5_000, 2 * HOUR_MS)))),
            View(Selector(buckets=("search",)), Calendar("hour", r.choice((LOS_ANGELES, LORD_HOWE)))),
        )
        limits = []
        for number, view in enumerate(views):
            units = r.choice((40, 150, 500)) if view.selector.count == "units" else r.choice((3, 10))
            paced = isinstance(view.window, Calendar) and r.random() < 0.3
            limits.append(Limit(f"limit-{number}", units, view, units, 0, paced))
        return limits

    def _new_process(self) -> Process:
        """Of the same limits, each process has some."""
        r = self.random
        limits = tuple(r.sample(self.pool, r.randint(1, len(self.pool))))
        leave = {"backfill": {limits[0].name: r.randrange(2)}}
        return Process(self.log, Terms(limits, leave, r.choice(SKEWS_MS)), self.clock)

    # -- what happens ------------------------------------------------------------------------------------------------

    def _move_clock(self) -> None:
        r = self.random
        choice, step_ms = r.random(), 0
        if choice < 0.5:
            step_ms = r.choice((0, 1, 5, 400, 1_000, 30_000))
        elif choice < 0.53:
            step_ms = r.choice((HOUR_MS, 2 * HOUR_MS, 8 * HOUR_MS))
        elif choice < 0.56:
            calendar = r.choice([limit.view.window for limit in self.pool if isinstance(limit.view.window, Calendar)])
            step_ms = calendar.edges(self.clock_ms)[1] - self.clock_ms - r.randrange(2)
        elif choice < 0.58 and self.goes_back:
            step_ms = -r.choice((1, 1_000, 60_000, HOUR_MS))
        self.clock_ms = max(self.clock_ms + step_ms, self.latest_ms - LATEST_BACK_MS)
        self.latest_ms = max(self.latest_ms, self.clock_ms)
        self.passed_ms += max(0, step_ms)

    def _meanwhile(self) -> None:
        """What happens while a question is under way."""
        if not self.asking or len(self.asking) > DEPTH:
            return
        for _ in range(self.random.choice((0, 0, 1, 2) if len(self.asking) > 1 else (0, 1, 2, 3))):
            self._move_clock()
            others = [process for process in self.processes if process not in self.asking]
            if others:
                self.counts["meanwhile"] += 1
                self._act(self.random.choice(others))
        self._move_clock()

    def _act(self, process: Process) -> None:
        choice = self.random.random()
        self.asking.append(process)
        try:
            if choice < 0.82:
                self._charge(process)
            elif choice < 0.95:
                self._settle(process)
            else:
                self._close_or_reopen(process)
        except LedgerError:
            self.counts["away"] += 1  # the clock went back meanwhile, again and again
        finally:
            self.asking.pop()

    def _charge(self, process: Process) -> None:
        r = self.random
        process.job = r.choice(JOBS)
        calls = [(r.choice(METHODS), r.choice((1, 2, 7))) for _ in range(r.choice((1, 1, 1, 3)))]
        try:
            decisions = process.budget.charge_many(calls, job=process.job, region="US")
        except CostExceedsLimit:
            return
        self.counts[decisions[0].reason] += 1
        self.ids += [decision.id for decision in decisions if decision.id is not None]

    def _settle(self, process: Process) -> None:
        if self.ids:
            with suppress(UnknownCharge):  # it has left the log
                process.budget.settle(self.random.choice(self.ids[-20:]), self.random.choice((0, 0, 1, 9)))
                self.counts["settled"] += 1

    def _close_or_reopen(self, process: Process) -> None:
        bucket = self.random.choice(("units", "search"))
        if self.random.random() < 0.7:
            process.budget.reopen(bucket, "a test")
        else:
            until_ms = self.random.choice((self.clock_ms + 500, self.clock_ms + 60_000, self.clock_ms + DAY_MS, NEVER))
            process.budget.exhaust(bucket, self.clock_ms, until_ms, f"decision {self.number}")
            self.counts["closed bucket"] += 1

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _take(self, request: Append, reply: Reply) -> None:
        """Add what was appended to the oracle, and hold an admission against the sums of the whole log."""
        assert reply.id is not None
        charges = []
        for entry in request.entries:
            if entry.kind == "charge":
                charge = Charge(entry.units, entry.bucket, entry.method, entry.job, key=entry.key)
                self.by_key[entry.key] = charge
                self.oracle.charge([charge], reply.id[0])
                charges.append(charge)
            elif entry.kind == "correction":
                self.oracle.correct(self.by_key[entry.of], entry.units)
        if charges:
            self._check(charges)

    def _check(self, charges: Sequence[Charge]) -> None:
        process, now_ms = self.asking[-1], self.clock_ms
        self.counts["checked"] += 1
        for asked in process.terms.asked(charges, charges[0].job):
            units, most = self.oracle.used_units(asked.limit.view, now_ms), self._most(asked)
            if units > most:
                raise ExceededError(f"{self._where()}: {units} of {most} used of {asked}")
        facts = Facts.read(SqliteLog.change(self.log, PROJECT, {FACTS: None}, {}).state.get(FACTS, ""))
        buckets = [bucket for x in charges for bucket in PRICES.closed_by(x.method, x.bucket)]
        closed = closing(facts, buckets, now_ms, process.terms.jitter_ms)
        if closed is not None:
            raise ExceededError(f"{self._where()}: admitted into {closed}")

    @staticmethod
    def _most(asked: Asked) -> int:
        """The most that a limit holds: its pace is that of the decision's time."""
        return max(0, asked.limit.limit_units - asked.leave_units)

    def _where(self) -> str:
        return f"seed {self.seed}, decision {self.number}, at {self.clock_ms}"

    def check_the_oracle(self) -> None:
        """What the oracle sums is what the log says, read entry by entry."""
        units: dict[str, int] = {}
        for entry in SqliteLog.read(self.log, PROJECT, START, (2**53, 0), 10**9):
            if entry.kind == "charge":
                units[entry.key] = entry.units
            elif entry.kind == "correction" and entry.of in units:
                units[entry.of] = entry.units
        assert units == {key: self.by_key[key].units for key in units}
