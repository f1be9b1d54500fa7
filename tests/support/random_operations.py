"""Random operations on a ledger, each answer held against the brute-force oracle.

    python -m support.random_operations LEDGER_URL SEED OPERATIONS       (in the folder `tests`)

Three callers, each with a configuration of 1 to 20 limits that changes and a clock that is off by its own amount,
charge, several at once too, peek, refund and settle on one project, and draw on one allowance while the ledger is
away, which the next to reach it repays; the ledger's clock walks, jumps and steps back around both of the year's clock
changes. Some calls are charged to two buckets, and some are free.

What a ledger has let go of, it says (`whole_after_ms`), and that is held against the windows named until then: from
there on the oracle counts what is left.
"""

from __future__ import annotations

import random
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from quota.budget import Budget
from quota.common.clock import NEVER
from quota.deciding.corrections import ALLOWANCE_ID
from quota.errors import CostExceedsLimit, UnknownCharge
from quota.ledger.contract import (
    CLOCK_BEHIND_MS,
    CLOCK_SLACK_MS,
    MAX_READ,
    MIN_RETENTION_MS,
    Exhaustion,
    Ledger,
    retention_of,
)
from quota.ledger.factory import open_ledger
from quota.recovery.allowance import Allowance
from quota.terms.costs import Part, Price
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK
from support.oracle import Answer, Journal, Oracle, Spent, cost, counts, cutoff, paced

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.decision import Decision
    from quota.terms.limits import Window

LOS_ANGELES = "America/Los_Angeles"


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
    ),
    (0, 0, 0, 1, 1, 2, 5, 30),
    (400, 2_500, -1, -5, -60, -2_400, HOUR_MS, -HOUR_MS, 60 * HOUR_MS),
)
DAILY = Pace(
    (
        Calendar("quarter-hour", LOS_ANGELES),
        Sliding(HOUR_MS),
        Calendar("hour", "Australia/Lord_Howe"),
        Sliding(DAY_MS),
        Calendar("day", LOS_ANGELES),
    ),
    (0, 1, 1_000, 20_000, 60_000, 120_000),
    (DAY_MS, 3 * HOUR_MS, -1, -4_000, -60_000, -HOUR_MS, -5 * HOUR_MS, 26 * HOUR_MS, -20 * HOUR_MS),
)
MONTHLY = Pace(
    (
        Sliding(DAY_MS),
        Calendar("day", "Europe/Berlin"),
        Sliding(7 * DAY_MS),
        Calendar("week", LOS_ANGELES),
        Calendar("week", "Europe/Berlin", starts="sunday"),
        Sliding(30 * DAY_MS),
        Calendar("month", LOS_ANGELES),
        Calendar("month", LOS_ANGELES, 31),
        Calendar("month", "Europe/Berlin", 8),
    ),
    (0, 60_000, HOUR_MS, 3 * HOUR_MS),
    (20 * DAY_MS, -HOUR_MS, -20 * HOUR_MS, 3 * DAY_MS, 70 * DAY_MS),
)
NUMBERS_OF_LIMITS = (1, 1, 2, 2, 3, 4, 5, 8, 9, 11, 20)
ALLOWANCE_UNITS, ALLOWANCE_MOST = 60, 7
CLOCK_CHANGES = (datetime(2026, 3, 7, 20, tzinfo=UTC), datetime(2026, 10, 31, 20, tzinfo=UTC))


PAIR, STATUS = "pair.list", "status.get"
OF_TWO_BUCKETS = Price((Part("units", 7), Part("search", 2)))
PRICES = BOOK._replace(methods={**BOOK.methods, PAIR: (OF_TWO_BUCKETS,), STATUS: (Price(()),)})
"""The book of the tests, with a call of two buckets and one that is free."""


@dataclass
class Call:
    """A call, and what it is charged."""

    method: str
    spends: list[Spent]

    @property
    def units(self) -> int:
        return self.spends[0].units if self.spends else 0


@dataclass
class Caller:
    limits: list[Limit]
    leave: dict[str, dict[str, int]]
    skew_ms: int
    budget: Budget = field(init=False)
    cut_off: Budget = field(init=False)
    """The same while its ledger does not answer."""

    @property
    def windows(self) -> list[Window]:
        return [limit.view.window for limit in self.limits]


class DisagreementError(AssertionError):
    """The ledger and the oracle disagree."""


class RandomOperations:
    """One seeded run. `counts` says afterwards how often each outcome was seen: a run that tested nothing shows."""

    def __init__(self, make_ledger: Callable[[Callable[[], int]], Ledger], seed: int) -> None:
        self.random = random.Random(seed)
        self.pace = self.random.choice((FAST, DAILY, DAILY, MONTHLY, MONTHLY))
        self.stretch = self.random.choice((1, 4, 4, 10))
        self.in_use = self.random.choice(
            (1, 2, len(self.pace.windows))
        )  # so many of the windows: longer ones join later
        self.clock_ms = int(self.random.choice(CLOCK_CHANGES).timestamp() * 1000)
        self.latest_ms = self.clock_ms
        self.ledger = make_ledger(lambda: self.clock_ms)
        self.project = f"random-{seed}"
        self.oracle = Oracle()
        self.counts: dict[str, int] = {}
        self.folder = tempfile.TemporaryDirectory()
        nowhere = Path(self.folder.name, "not-a-folder")
        nowhere.touch()
        self.away = open_ledger(f"sqlite:///{nowhere}/ledger.db")
        path = str(Path(self.folder.name, "allowance.db"))
        self.allowance = Allowance(path, ALLOWANCE_MOST, ALLOWANCE_UNITS, lambda: self.clock_ms)
        self.journal = Journal(ALLOWANCE_MOST, ALLOWANCE_UNITS)
        self.prefix = ""  # of the ids of draws, once one has shown it
        self.retention_of = MIN_RETENTION_MS  # or as long as any writer has named
        self.trimmable_ms = 0  # up to here the ledger may have let go of charges,
        self.whole_after_ms = 0  # and up to here it has
        self.gone: list[Spent] = []
        self.pairs: list[list[Spent]] = []
        self.callers = [self._new_caller() for _ in range(3)]

    def close(self) -> None:
        self.allowance.close()
        self.folder.cleanup()

    def run(self, operations: int) -> dict[str, int]:
        for number in range(operations):
            self._walk_clock()
            caller = self.random.randrange(3)
            choice = self.random.random()
            if choice < 0.01:
                self.in_use += self.random.random() < 0.4
                self.callers[caller] = self._new_caller()
            elif choice < 0.03:
                self._change_a_limit(self.callers[caller])
            elif choice < 0.05:
                self._close_or_reopen()
            elif choice < 0.10:
                self._cross_an_edge(number)
            elif choice < 0.15 and self.oracle.log:
                self._correct(self.callers[caller])
            elif choice < 0.16 and self.journal.draws:
                self._correct_a_draw(self.callers[caller])
            elif choice < 0.19:
                self._draw(number, self.callers[caller], commit=choice < 0.185)
            else:
                self._decide(number, self.callers[caller], commit=choice < 0.85)
                self._compare_what_is_gone(number)
        return self.counts

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _walk_clock(self) -> None:
        pace = self.pace
        jump = self.random.random() < 0.004
        self.clock_ms += self.random.choice(pace.jumps_ms) if jump else self.random.choice(pace.steps_ms) * self.stretch
        # A log is kept for the longest window and a long day: a clock further back than that has no history.
        self.clock_ms = max(self.clock_ms, self.latest_ms - 20 * HOUR_MS)
        self.latest_ms = max(self.latest_ms, self.clock_ms)

    def _cross_an_edge(self, number: int) -> None:
        """One caller looks just after the next edge of a calendar window; of another one's charges, with limits of its
        own, the first is made before that edge, where the clock went back to.
        """
        windows = [window for window in self.pace.windows[: self.in_use] if isinstance(window, Calendar)]
        if not windows:
            return
        edge_ms = self.random.choice(windows).edges(max(self.clock_ms, self.oracle.newest[0]))[1]
        step_ms = self.random.choice(self.pace.steps_ms) * self.stretch
        one, other = self.random.sample(self.callers, 2)
        for caller, at_ms, commit in (
            (one, edge_ms, False),
            (other, edge_ms - 1 - step_ms, True),
            (other, edge_ms + step_ms, True),
            (one, edge_ms + 2 * step_ms, True),
        ):
            self.clock_ms = at_ms
            self.latest_ms = max(self.latest_ms, at_ms)
            self._decide(number, caller, commit=commit)
            self._compare_what_is_gone(number)

    def _compare_what_is_gone(self, number: int) -> None:
        until_ms = self.ledger.whole_after_ms(self.project)
        log = self.oracle.log
        if until_ms == self.whole_after_ms and (not log or log[0].ms > until_ms):
            return
        if not self.whole_after_ms <= until_ms <= self.trimmable_ms:
            raise DisagreementError(f"operation {number} at {self.clock_ms}: all up to {until_ms} was let go of")
        self.whole_after_ms = until_ms
        here = self.ledger.read(self.project, (until_ms - 1, NEVER), until_ms, MAX_READ)
        gone = self.oracle.trim({entry.id for entry in here}, until_ms)
        if gone:
            self.gone = [*self.gone, *gone][-200:]
            self._count("trimmed")

    def _new_caller(self) -> Caller:
        limits = [self._new_limit(i) for i in range(self.random.choice(NUMBERS_OF_LIMITS))]
        leave = {"backfill": {limit.name: self.random.randrange(1, 90) for limit in limits[:1]}}
        caller = Caller(
            limits, leave, self.random.choice((0, 0, 0, 700, -1_500, -40_000, -HOUR_MS, -HOUR_MS - 1, 5_000, 5_001))
        )
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
        window = r.choice(self.pace.windows[: self.in_use])
        pacing = isinstance(window, Calendar) and r.random() < 0.5
        return Limit(f"limit-{number}", units, View(selector, window), units + 10, 10, pacing)

    def _change_a_limit(self, caller: Caller) -> None:
        number = self.random.randrange(len(caller.limits))
        old = caller.limits[number]
        units = max(1, old.limit_units + self.random.randrange(-90, 300))
        caller.limits[number] = Limit(old.name, units, old.view, units + 10, 10, old.paced)
        self._rebuild(caller)

    def _rebuild(self, caller: Caller) -> None:
        caller.budget, caller.cut_off = (
            Budget(
                credential="main",
                project=self.project,
                book=PRICES,
                limits=caller.limits,
                ledger=ledger,
                leave=caller.leave,
                clock=lambda: self.clock_ms + caller.skew_ms,
                allowance=self.allowance,
            )
            for ledger in (self.ledger, self.away)
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

    def _draw(self, number: int, caller: Caller, *, commit: bool) -> None:
        units = self.random.choice((1, 1, 2, 7, 8))
        job = self.random.choice(("", "trending", "backfill"))
        check = caller.cut_off.charge if commit else caller.cut_off.peek
        try:
            got = check("videos.list", units=units, job=job)
        except CostExceedsLimit:
            self._count("never fits")
            return
        longest_ms = max(window.longest_ms for window in caller.windows)
        spent = Spent(0, 0, units, "units", "videos.list", job)
        admitted, left_units = self.journal.draw(spent, self.clock_ms, longest_ms, commit=commit)
        if not self.prefix and got.id is not None:
            self.prefix = got.id.rpartition("-")[0]
            assert self.prefix.startswith(ALLOWANCE_ID)
        charge_id = f"{self.prefix}-{self.journal.numbers}" if admitted and commit else None
        self._count("drawn" if admitted else "not drawn")
        if (got.admitted, got.id, got.remaining_units) != (admitted, charge_id, left_units):
            raise DisagreementError(f"operation {number} at {self.clock_ms}: got {got}, want {left_units} left")

    def _correct_a_draw(self, caller: Caller) -> None:
        """In the journal while it is owed, then in the ledger while that has it."""
        draw = self.random.choice(self.journal.draws)
        units = self.random.choice((0, draw.units + 3))
        there = not draw.repaid or any(spent is draw.spent for spent in self.oracle.log)
        try:
            before = caller.budget.settle(f"{self.prefix}-{draw.number}", units)
        except UnknownCharge:
            if there:
                raise
            self._count("draw left the log")
            return
        if before.units != draw.spent.units or not there:
            raise DisagreementError(f"settle saw {before}, the oracle {draw}")
        draw.units = draw.spent.units = units
        draw.spent.known.clear()
        self._count("draw settled")

    def _repay(self, caller: Caller) -> None:
        """What every question to the ledger begins with, unless the clocks disagree."""
        if not -CLOCK_BEHIND_MS <= caller.skew_ms <= CLOCK_SLACK_MS:
            return
        for draw in self.journal.owed:
            draw.repaid = True
            self.oracle.append(draw.spent, self.clock_ms)
            self.retention_of = max(self.retention_of, retention_of(caller.windows))
            self._count("repaid")

    def _correct(self, caller: Caller) -> None:
        if self.gone and self.random.random() < 0.05:
            gone = self.random.choice(self.gone)
            try:
                caller.budget.settle(gone.id, 0)
            except UnknownCharge:
                self._count("left the log")
                return
            raise DisagreementError(f"{gone}, which is gone, was settled")
        if self.pairs and self.random.random() < 0.2:
            self._correct_a_pair(caller, self.random.choice(self.pairs[-20:]))
            return
        spent = self.random.choice(self.oracle.log[-200:])
        units = self.random.choice((0, 0, spent.units + self.random.randrange(5), spent.units // 2))
        if self.random.random() < 0.05:
            try:
                caller.budget.settle(f"{spent.ms + 1}-999", units)
            except UnknownCharge:
                self._count("unknown charge")
                return
            raise DisagreementError("an unknown charge was settled")
        before = caller.budget.settle(spent.id, units)
        if (before.units, before.method, before.job) != (spent.units, spent.method, spent.job):
            raise DisagreementError(f"settle saw {before}, the oracle {spent}")
        spent.units = units
        spent.known.clear()
        self._count("settled")

    def _correct_a_pair(self, caller: Caller, pair: list[Spent]) -> None:
        """A call of two buckets is given back in both, and settled in the first."""
        charge_id = "+".join(spent.id for spent in pair)
        units = self.random.choice((None, 3))
        there = all(any(spent is one for one in self.oracle.log) for spent in pair)
        try:
            before = caller.budget.refund(charge_id) if units is None else caller.budget.settle(charge_id, units)
        except UnknownCharge:
            if there:
                raise
            self._count("pair left the log")
            return
        if before.units != pair[0].units or not there:
            raise DisagreementError(f"a correction of {charge_id} saw {before}, the oracle {pair}")
        for spent in pair if units is None else pair[:1]:
            spent.units = units or 0
            spent.known.clear()
        self._count("pair refunded" if units is None else "pair settled")

    def _decide(self, number: int, caller: Caller, *, commit: bool) -> None:
        r = self.random
        job = r.choice(("", "trending", "backfill", "odd|job,%*"))
        calls = [self._new_call(job) for _ in range(r.choice((1, 1, 1, 2, 3, 10)) if commit else 1)]
        spends = [spend for call in calls for spend in call.spends]
        leave = caller.leave.get(job, {})
        limits = [(limit, max(0, limit.limit_units - leave.get(limit.name, 0))) for limit in caller.limits]
        applying = [(x, cap) for x, cap in limits if any(counts(x, spend) for spend in spends)]
        first = calls[0]
        try:
            if len(calls) > 1:
                named = [(call.method, call.units) if call.spends else call.method for call in calls]
                several = caller.budget.charge_many(named, job=job, region="US")
            else:
                check = caller.budget.charge if commit else caller.budget.peek
                several = [check(first.method, units=first.units or None, job=job, region="US")]
        except CostExceedsLimit:
            if all(cost(limit, spends) <= cap for limit, cap in applying):
                raise
            self._count("never fits")
            return
        if [(got.method, got.cost_units) for got in several] != [(call.method, call.units) for call in calls]:
            raise DisagreementError(f"operation {number} at {self.clock_ms}: got {several} for {calls}")
        if not spends:
            self._count("free")
            if not all(got.admitted and got.id is None and got.limits == () for got in several):
                raise DisagreementError(f"operation {number} at {self.clock_ms}: got {several} for {calls}")
            return
        self._repay(caller)
        now_ms = min(self.clock_ms, self.clock_ms + caller.skew_ms + CLOCK_SLACK_MS)
        if any(cutoff(limit.view, now_ms) < self.whole_after_ms for limit, _ in applying):
            self._count("joined later")
        want = self.oracle.answer(
            applying,
            spends,
            [name for spend in spends for name in BOOK.closed_by(spend.method, spend.bucket)],
            self.clock_ms,
            self.clock_ms + caller.skew_ms,
            commit=commit,
        )
        if commit and want.outcome == "admitted":
            self.retention_of = max(self.retention_of, retention_of(caller.windows))
        self.trimmable_ms = max(self.trimmable_ms, now_ms - self.retention_of)
        self._count(want.outcome if len(calls) == 1 else f"several {want.outcome}")
        if any(len(call.spends) > 1 for call in calls):
            self._count(f"pair {want.outcome}")
        self._count(f"paced {want.outcome}" if any(limit.paced for limit, _ in applying) else "unpaced")
        caller_ms = self.clock_ms + caller.skew_ms
        caps = [paced(limit, cap, cost(limit, spends), caller_ms) if limit.paced else cap for limit, cap in applying]
        for got, call in zip(several, calls, strict=True):
            charged = want.ids and call.spends
            self._compare(number, got, want, "+".join(spend.id for spend in call.spends) if charged else None, caps)
        if want.ids:
            self.pairs += [call.spends for call in calls if len(call.spends) > 1]

    def _new_call(self, job: str) -> Call:
        r = self.random
        odd = "odd,na|me*%"
        method = r.choice(("search.list", "videos.list", "captions.list", "suggest.list", odd, PAIR, PAIR, STATUS))
        parts = PRICES.price(method).parts if method != odd else (Part("units", 1),)
        spends = [Spent(0, 0, part.units, part.bucket, method, job) for part in parts]
        if spends and (method == odd or r.random() < 0.5):
            spends[0].units = r.choice((1, 7, 100))
        return Call(method, spends)

    def _compare(self, number: int, got: Decision, want: Answer, charge_id: str | None, caps: list[int]) -> None:
        right = (
            got.admitted == (want.outcome == "admitted")
            and got.id == charge_id
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
    run.close()


if __name__ == "__main__":
    main()
