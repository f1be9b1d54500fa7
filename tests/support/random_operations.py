"""Random operations on a ledger, each answer held against the brute-force oracle.

    python -m support.random_operations LEDGER_URL SEED OPERATIONS       (in the folder `tests`)

Three callers, whose limits differ and change and whose clocks are off by their own amount, charge, peek, refund and
settle on one project, while the ledger's clock walks, jumps and steps back around both of the year's clock changes.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quota.budget import Budget
from quota.errors import CostExceedsLimit, UnknownCharge
from quota.ledger import KEEP_MS, NEVER, Exhaustion, Ledger, open_ledger
from quota.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK
from support.oracle import Answer, Oracle, Spent, paced

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.decision import Decision
    from quota.limits import Window

LOS_ANGELES = "America/Los_Angeles"


@dataclass(frozen=True)
class Pace:
    """How time passes in one run, so that the windows hold some hundred charges."""

    windows: tuple[Window, ...]
    steps_ms: tuple[int, ...]
    jumps_ms: tuple[int, ...]
    longest_ms: int


FAST = Pace(
    (Sliding(50), Sliding(300), Sliding(2_000), Calendar("hour", LOS_ANGELES)),
    (0, 0, 0, 1, 1, 2, 5, 30),
    (400, 2_500, -1, -5, -60, -2_400, HOUR_MS, -HOUR_MS),
    3 * HOUR_MS,
)
DAILY = Pace(
    (Sliding(HOUR_MS), Sliding(DAY_MS), Calendar("day", LOS_ANGELES), Calendar("hour", "Australia/Lord_Howe")),
    (0, 1, 1_000, 20_000, 60_000, 120_000),
    (DAY_MS, 3 * HOUR_MS, -1, -4_000, -60_000, -HOUR_MS, -5 * HOUR_MS, 26 * HOUR_MS, -20 * HOUR_MS),
    DAY_MS + 25 * HOUR_MS,
)
MONTHLY = Pace(
    (Sliding(7 * DAY_MS), Calendar("month", LOS_ANGELES), Calendar("day", "Europe/Berlin"), Sliding(DAY_MS)),
    (0, 60_000, HOUR_MS, 3 * HOUR_MS),
    (20 * DAY_MS, -HOUR_MS, -20 * HOUR_MS, 3 * DAY_MS),
    33 * DAY_MS,
)
CLOCK_CHANGES = (datetime(2026, 3, 7, 20, tzinfo=UTC), datetime(2026, 10, 31, 20, tzinfo=UTC))


@dataclass
class Caller:
    limits: list[Limit]
    leave: dict[str, dict[str, int]]
    skew_ms: int
    budget: Budget = field(init=False)


class DisagreementError(AssertionError):
    """The ledger and the oracle disagree."""


class RandomOperations:
    """One seeded run. `counts` says afterwards how often each outcome was seen: a run that tested nothing shows."""

    def __init__(self, make_ledger: Callable[[Callable[[], int]], Ledger], seed: int) -> None:
        self.random = random.Random(seed)
        self.pace = self.random.choice((FAST, FAST, DAILY, DAILY, MONTHLY))
        self.clock_ms = int(self.random.choice(CLOCK_CHANGES).timestamp() * 1000)
        self.latest_ms = self.clock_ms
        self.ledger = make_ledger(lambda: self.clock_ms)
        self.project = f"random-{seed}"
        self.oracle = Oracle()
        self.counts: dict[str, int] = {}
        self._announce_windows()
        self.callers = [self._new_caller() for _ in range(3)]

    def run(self, operations: int) -> dict[str, int]:
        for number in range(operations):
            self._walk_clock()
            if number % 500 == 499:
                self.oracle.forget(self.latest_ms - 2 * self.pace.longest_ms)
            caller = self.random.randrange(3)
            choice = self.random.random()
            if choice < 0.01:
                self.callers[caller] = self._new_caller()
            elif choice < 0.03:
                self._change_a_limit(self.callers[caller])
            elif choice < 0.05:
                self._close_or_reopen()
            elif choice < 0.17 and self.oracle.log:
                self._correct(self.callers[caller])
            else:
                self._decide(number, self.callers[caller], commit=choice < 0.85)
        return self.counts

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _walk_clock(self) -> None:
        pace = self.pace
        jump = self.random.random() < 0.004
        self.clock_ms += self.random.choice(pace.jumps_ms if jump else pace.steps_ms)
        # A log is kept for the longest window and a long day: a clock further back than that has no history.
        self.clock_ms = max(self.clock_ms, self.latest_ms - 20 * HOUR_MS)
        self.latest_ms = max(self.latest_ms, self.clock_ms)

    def _announce_windows(self) -> None:
        """Ask about every window once: the log is kept for the longest that anybody has asked about."""
        caller = Caller([Limit(w.name, 10**6, View(Selector(), w), 10**6, 0) for w in self.pace.windows], {}, 0)
        self._rebuild(caller)
        caller.budget.charge("videos.list")
        spent = Spent(0, 0, 1, "units", "videos.list", "")
        self.oracle.answer([], spent, (), self.clock_ms, self.clock_ms, commit=True)

    def _new_caller(self) -> Caller:
        limits = [self._new_limit(i) for i in range(self.random.randrange(1, 5))]
        leave = {"backfill": {limit.name: self.random.randrange(1, 90) for limit in limits[:1]}}
        caller = Caller(limits, leave, self.random.choice((0, 0, 0, 700, -1_500, -40_000, 4_999, 5_001)))
        self._rebuild(caller)
        return caller

    def _new_limit(self, number: int) -> Limit:
        r = self.random
        selector = Selector(
            buckets=r.choice(((), ("units",), ("units",), ("search",), ("search", "units"))),
            methods=r.choice(((), (), (), ("search.list",), ("videos.list", "odd,na|me*%"))),
            jobs=r.choice(((), (), (), ("trending",), ("backfill", "odd|job,%*"))),
            count=r.choice(("units", "units", "units", "calls")),
        )
        units = r.randrange(100, 900) if selector.count == "units" else r.randrange(2, 40)
        window = r.choice(self.pace.windows)
        pacing = isinstance(window, Calendar) and r.random() < 0.5
        return Limit(f"limit-{number}", units, View(selector, window), units + 10, 10, pacing)

    def _change_a_limit(self, caller: Caller) -> None:
        number = self.random.randrange(len(caller.limits))
        old = caller.limits[number]
        units = max(1, old.limit_units + self.random.randrange(-90, 300))
        caller.limits[number] = Limit(old.name, units, old.view, units + 10, 10, old.paced)
        self._rebuild(caller)

    def _rebuild(self, caller: Caller) -> None:
        caller.budget = Budget(
            credential="main",
            project=self.project,
            book=BOOK,
            limits=caller.limits,
            ledger=self.ledger,
            leave=caller.leave,
            clock=lambda: self.clock_ms + caller.skew_ms,
        )

    def _close_or_reopen(self) -> None:
        bucket = self.random.choice(("units", "search"))
        if self.random.random() < 0.5:
            self.ledger.reopen(self.project, bucket)
            self.oracle.closed.pop(bucket, None)
            return
        until_ms = self.random.choice((self.clock_ms + self.random.choice(self.pace.steps_ms) * 20, NEVER, 5))
        standing = self.oracle.closed.get(bucket, 0)
        self.ledger.exhaust(self.project, Exhaustion(bucket, self.clock_ms, until_ms, "said so", "the test"))
        if standing <= self.clock_ms:
            self.oracle.closed[bucket] = until_ms

    def _correct(self, caller: Caller) -> None:
        spent = self.random.choice(self.oracle.log[-200:])
        units = self.random.choice((0, 0, spent.units + self.random.randrange(5), spent.units // 2))
        if self.random.random() < 0.05:
            try:
                caller.budget.settle(f"{spent.ms + 1}-999", units)
            except UnknownCharge:
                self._count("unknown charge")
                return
            raise DisagreementError("an unknown charge was settled")
        try:
            before = caller.budget.settle(spent.id, units)
        except UnknownCharge:
            if spent.ms >= self.latest_ms - KEEP_MS:
                raise
            self._count("left the log")
            return
        if (before.units, before.method, before.job) != (spent.units, spent.method, spent.job):
            raise DisagreementError(f"settle saw {before}, the oracle {spent}")
        self.oracle.settle(spent.id, units)
        self._count("settled")

    def _decide(self, number: int, caller: Caller, *, commit: bool) -> None:
        r = self.random
        method = r.choice(("search.list", "videos.list", "captions.list", "suggest.list", "odd,na|me*%"))
        job = r.choice(("", "trending", "backfill", "odd|job,%*"))
        known = method in BOOK.methods
        units = r.choice((1, 7, 100)) if not known or r.random() < 0.5 else BOOK.price(method).units
        bucket = BOOK.price(method).bucket if known else "units"
        leave = caller.leave.get(job, {})
        limits = [(limit, max(0, limit.limit_units - leave.get(limit.name, 0))) for limit in caller.limits]
        applying = [(x, cap) for x, cap in limits if x.view.selector.counts(bucket, method, job)]
        ask = caller.budget.charge if commit else caller.budget.peek
        try:
            got = ask(method, units=units, job=job, region="US")
        except CostExceedsLimit:
            if all(limit.view.selector.cost(units) <= cap for limit, cap in applying):
                raise
            self._count("never fits")
            return
        want = self.oracle.answer(
            applying,
            Spent(0, 0, units, bucket, method, job),
            BOOK.closed_by(method, bucket),
            self.clock_ms,
            self.clock_ms + caller.skew_ms,
            commit=commit,
        )
        self._count(want.outcome)
        self._count(f"paced {want.outcome}" if any(limit.paced for limit, _ in applying) else "unpaced")
        caller_ms = self.clock_ms + caller.skew_ms
        caps = [
            paced(limit, cap, limit.view.selector.cost(units), caller_ms) if limit.paced else cap
            for limit, cap in applying
        ]
        self._compare(number, got, want, caps)

    def _compare(self, number: int, got: Decision, want: Answer, caps: list[int]) -> None:
        right = (
            got.admitted == (want.outcome == "admitted")
            and got.id == want.id
            and got.retry_at_ms == want.retry_at_ms
            and [state.used_units for state in got.limits] == want.used
            and [state.remaining_units for state in got.limits]
            == [max(0, c - u) for c, u in zip(caps, want.used, strict=False)]
            and {"admitted": ("ok",), "refused": ("limit", "leave"), "clock": ("clock",)}.get(
                want.outcome, ("exhausted", "closed")
            ).count(got.reason)
            == 1
        )
        if not right:
            raise DisagreementError(f"operation {number} at {self.clock_ms}: got {got}, want {want}")


def main() -> None:
    url, seed, operations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run = RandomOperations(lambda clock: open_ledger(url, clock=clock), seed)
    print(f"seed {seed}: {run.run(operations)}")


if __name__ == "__main__":
    main()
