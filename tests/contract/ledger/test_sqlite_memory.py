"""What an SQLite ledger remembers between two decisions changes no answer: histories at random, each question also put
to a ledger that forgets everything before it answers.
"""

from __future__ import annotations

import os
import random
from contextlib import closing
from typing import TYPE_CHECKING, Any

from quota.common.clock import LATEST_MS
from quota.ledger.contract import (
    MIN_RETENTION_MS,
    NOTHING_EXPECTED,
    ChargeRequest,
    Exhaustion,
    Expected,
    LimitCheck,
    read_entries,
)
from quota.ledger.entry import Charge
from quota.ledger.grants import Grant, grants_text
from quota.ledger.sqlite_ledger import SqliteLedger
from quota.ledger.sqlite_memory import MOST_UNREAD, Memory
from quota.ledger.unlogged import UnloggedUsage
from quota.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Selector, Sliding, View

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

    from quota.ledger.contract import ChargeResult

SEEDS = int(os.environ.get("QUOTA_TEST_SEEDS", "3"))
QUESTIONS = 700
FAR_MS = LATEST_MS - 1

VIEWS = (
    View(Selector(), Sliding(60)),
    View(Selector(("units",)), Sliding(2_000)),
    View(Selector(("units",), ("search.list",)), Sliding(DAY_MS)),
    View(Selector(("units",), count="calls"), Sliding(HOUR_MS)),
    View(Selector(jobs=("trending",)), Calendar("hour", "Australia/Lord_Howe")),
    View(Selector(), Calendar("day", "America/Los_Angeles")),
)
STEPS_MS = (0, 0, 0, 1, 1, 3, 20), (0, 9_000, 40_000), (10 * MINUTE_MS, HOUR_MS)
"""The pace of a history: many within the shortest windows; one leaves as one comes; and so that the log is trimmed."""
JUMPS_MS = (50, 900, 2_500, -1, -40, -3_000, MINUTE_MS, -MINUTE_MS, HOUR_MS, -HOUR_MS, 30 * HOUR_MS, -26 * HOUR_MS)
GRANTS = ([], [Grant("units", 40, 0, FAR_MS)], [Grant("units", 50, 0, FAR_MS)])


class Remembering(SqliteLedger):
    reads = 0

    def _decide(self, *args: Any) -> Any:
        self.reads += 1
        return super()._decide(*args)


class Forgetful(SqliteLedger):
    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        self._memory = Memory(None, 0)
        return super().decide(request, commit=commit)


class History:
    """The same history in two files, each shared by two processes' ledgers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock_ms = HOUR_MS * (500_000 + self.random.randrange(24)) - self.random.randrange(6_000)
        urls = [f"sqlite:///{folder}/{seed}-{kind}.db" for kind in ("remembering", "forgetful")]
        self.pairs: list[Any] = [
            [made(url, clock=lambda: self.clock_ms) for url, made in zip(urls, (Remembering, Forgetful), strict=True)]
            for _ in range(2)
        ]
        self.one = 0
        self.steps_ms = STEPS_MS[seed % len(STEPS_MS)]
        self.unrest = self.random.choice((0.005, 0.02, 0.08))
        windows = VIEWS if self.steps_ms[-1] < 2_000 else VIEWS[2:]  # not those that would always be empty
        self.views = [view for view in windows if self.random.random() < 0.7]
        self.caps = [self.random.choice((3, 40, 400, 10**6)) for _ in self.views]
        self.last: tuple[str, tuple[int, int]] = "", (0, 0)

    def same(self, ask: Callable[[SqliteLedger], Any]) -> Any:
        remembered, read = (ask(ledger) for ledger in self.pairs[self.one])
        assert remembered == read
        return read

    def step(self, number: int) -> None:
        r = self.random
        self.clock_ms += r.choice(JUMPS_MS) if r.random() < 0.02 else r.choice(self.steps_ms)
        if r.random() < self.unrest:
            self.one = 1 - self.one
        project = "q" if r.random() < 0.1 else "p"
        if r.random() < self.unrest:
            self._change(project, number)
        else:
            self._decide(project, number)

    def _decide(self, project: str, number: int) -> None:
        r = self.random
        method, job = r.choice(("search.list", "videos.list")), r.choice(("trending", "trending", ""))
        bucket, units = r.choice(("units", "units", "units", "search")), r.choice((1, 1, 2, 30))
        caller_ms = self.clock_ms + r.choice((*(0,) * 12, 700, 4_000, -700, -30_000, -HOUR_MS - 1, 5_001))
        wanted = [n for n, view in enumerate(self.views) if view.selector.counts(bucket, method, job)]
        if r.random() < 0.1:
            wanted = [n for n in wanted if r.random() < 0.7]
        checks = []
        for n in wanted:
            view = self.views[n]
            edges = view.window.edges(caller_ms) if isinstance(view.window, Calendar) else None
            checks.append(LimitCheck(view, self.caps[n], view.selector.cost(units), edges))
        expected = NOTHING_EXPECTED
        if r.random() < 0.3 and self.last[0] and project == "p":
            epoch, last = self.last
            expected = Expected(epoch if r.random() < 0.98 else "another", (last, *((last,) * (r.random() < 0.2))))
        request = ChargeRequest(
            project,
            Charge(units, bucket, method, job, "US", f"key-{number}"),
            checks,
            (bucket,) if r.random() < 0.9 else (),
            caller_ms,
            r.choice((0, 0, 50)),
            expected,
            MIN_RETENTION_MS + (HOUR_MS if r.random() < 0.01 else 0),
            grants_text(r.choice(GRANTS)) if r.random() < 0.1 else None,
        )
        commit = r.random() < 0.8
        remembered, result = (ledger.decide(request, commit=commit) for ledger in self.pairs[self.one])
        assert remembered._replace(leaving_ms=()) == result._replace(leaving_ms=())
        for check, used, *leaving_ms in zip(
            checks, result.used_units, remembered.leaving_ms, result.leaving_ms, strict=False
        ):
            if used + check.cost_units > check.cap_units and None not in leaving_ms:
                assert leaving_ms[0] == leaving_ms[1]
        if project == "p" and result.outcome in ("admitted", "refused"):
            self.last = result.epoch, result.last

    def _change(self, project: str, number: int) -> None:
        r, now_ms = self.random, self.clock_ms
        match r.choice(("settle", "settle", "settle", "close", "close", "open", "grant", "unlogged", "repay", "other")):
            case "settle":
                log = self.same(lambda ledger: ledger.read(project, (now_ms - 5_000, 0), FAR_MS, 200))
                if log:
                    entry, units = r.choice(log), r.choice((0, 1, 9))
                    views = VIEWS if r.random() < 0.7 else VIEWS[:2]
                    self.same(lambda ledger: ledger.settle(project, entry.id, units, views))
            case "close":
                closed = Exhaustion(r.choice(("units", "search")), now_ms, now_ms + r.choice((1, 60)), "said so", "me")
                self.same(lambda ledger: ledger.exhaust(project, closed))
            case "open":
                self.same(lambda ledger: ledger.reopen(project, "units"))
            case "grant":
                grants = r.choice(GRANTS)
                self.same(lambda ledger: ledger.grant(project, grants))
            case "unlogged":
                lost = UnloggedUsage(r.choice(VIEWS).name, f"lost-{number}", ((3, now_ms + 40),), (now_ms, 0))
                self.same(lambda ledger: ledger.add_unlogged(project, f"epoch-{number}", [lost]))
            case "repay":
                charge = Charge(2, "units", "search.list", "trending", "US", f"repaid-{number}")
                self.same(lambda ledger: ledger.repay(project, "machine", [(number, charge)]))
            case _ if r.random() < 0.5:
                self.same(lambda ledger: ledger.roll_up(project, now_ms))
            case _ if r.random() < 0.3:
                self.same(lambda ledger: ledger.repair(project, f"repaired-{number}", now_ms))
            case _:
                for ledger in self.pairs[self.one]:
                    ledger.close()

    def close(self) -> None:
        for pair in self.pairs:
            for ledger in pair:
                ledger.close()


def _kept(db: sqlite3.Connection, project: str) -> list[Any]:
    return db.execute(
        "SELECT epoch, retention_ms, trimmed_through_ms FROM projects WHERE project = ?", (project,)
    ).fetchall()


def test_the_first_charge_after_a_peek_begins_an_epoch(tmp_path: Path) -> None:
    now_ms = 1_790_000_000_000
    with closing(SqliteLedger(f"sqlite:///{tmp_path}/ledger.db", clock=lambda: now_ms)) as ledger:
        ledger.repay("p", "machine", [(1, Charge(1, "units", "videos.list", "", "", "drawn"))])
        checks = [LimitCheck(VIEWS[2], 100, 1, None)]
        request = ChargeRequest("p", Charge(1, "units", "videos.list", "", "", "first"), checks, (), now_ms)
        assert ledger.decide(request, commit=False).epoch == ""
        assert ledger.decide(request, commit=True).epoch == "first"


def test_in_production_most_decisions_read_next_to_nothing(tmp_path: Path) -> None:
    """One comes and one leaves; of each minute's first, only those that meet the stored views read them."""
    clock_ms = 1_790_000_000_000
    view, charges = View(Selector(), Sliding(HOUR_MS)), 1_000
    with closing(Remembering(f"sqlite:///{tmp_path}/ledger.db", clock=lambda: clock_ms)) as ledger:
        for number in range(charges):
            clock_ms += 9_000
            charge = Charge(1, "units", "videos.list", "", "", f"key-{number}")
            request = ChargeRequest("p", charge, [LimitCheck(view, 10**6, 1, None)], (), clock_ms)
            assert ledger.decide(request, commit=True).used_units == (min(number + 1, HOUR_MS // 9_000),)
        assert ledger.reads < charges / MOST_UNREAD * 1.2


def test_what_is_remembered_changes_no_answer(tmp_path: Path) -> None:
    reads = asked = 0
    for seed in range(SEEDS):
        with closing(History(tmp_path, seed)) as history:
            for number in range(1, QUESTIONS):
                history.step(number)
                if number % 9 == 0:
                    history.same(lambda ledger: ledger._file.transact(lambda db: _kept(db, "p"), write=False))
            for project in "pq":
                history.same(lambda ledger, project=project: list(read_entries(ledger, project, 0, FAR_MS)))
                history.same(
                    lambda ledger, project=project: ledger._file.transact(lambda db: _kept(db, project), write=False)
                )
            reads += sum(ledger.reads for ledger, _ in history.pairs)
            asked += QUESTIONS
    assert reads < asked * 0.8  # else nothing was remembered
