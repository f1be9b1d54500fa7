"""An awaited decision is the one that blocks: random histories in two projects in step, of which one is awaited."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter
from contextvars import copy_context
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget
from quota.deciding.recorder import Recorder
from quota.errors import LedgerError, QuotaError
from quota.ledger.contract import Exhaustion, read_entries
from quota.ledger.factory import open_ledger
from quota.ledger.grants import Grant
from quota.ledger.identity import Identity
from quota.recovery.allowance import Allowance
from quota.recovery.high_water_mark import HighWaterMark
from quota.terms.attribution import AttemptKeys, labels
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quota.decision import Decision
    from quota.ledger.contract import Ledger
    from support.losses import LedgerStorage

SEEDS = int(os.environ.get("QUOTA_TEST_SEEDS", "3"))
DECISIONS = 250
PRICE_CHANGE_MS = 1_764_806_400_000
"""When `videos.insert` gets cheaper."""

UNITS = View(Selector(buckets=("units",)), Sliding(DAY_MS))
LIMITS = (
    Limit("minute", 250, View(Selector(buckets=("units",)), Sliding(MINUTE_MS)), 250, 0),
    Limit("day", 5_000, UNITS, 5_000, 0),
    Limit("pacific", 6_000, View(Selector(), Calendar("day", "America/Los_Angeles")), 6_000, 0),
    Limit("search", 40, View(Selector(methods=("search.list",), count="calls"), Sliding(HOUR_MS)), 40, 0),
)
PACED = Limit("paced", 8_000, View(Selector(), Calendar("hour", "UTC")), 8_000, 0, paced=True)
UNREST = 0.15
"""So much of what happens is no decision."""


class Method(StrEnum):
    SEARCH = "search.list"


class Away:
    """A ledger that cannot be asked."""

    label = "away"

    def __getattr__(self, _: str) -> Any:
        def away(*_: object, **__: object) -> Any:
            raise LedgerError("away")

        return away


class Awaited(Budget):
    awaiter: Awaiter
    runner: asyncio.Runner

    def _decide(self, *call: Any, **options: Any) -> list[Decision]:
        awaited = AsyncBudget(self, self.awaiter)._decide(*call, **options)
        return self.runner.run(awaited, context=copy_context())


class World:
    """One of the projects, with all that a session gives its budget."""

    def __init__(self, made: type[Budget], ledger: Ledger, folder: Path, now: Callable[[], int], *more: Limit) -> None:
        self.project = made.__name__
        self.ledger, self.folder = ledger, folder / self.project
        self.folder.mkdir()
        self.mark = HighWaterMark(str(self.folder / "high-water-marks" / "1"), self.project, label=ledger.label)
        self.allowance = Allowance(str(self.folder / "allowance.db"), 60, 300, now)
        self.budget = made(
            credential="main",
            project=self.project,
            book=BOOK,
            limits=(*LIMITS, *more),
            ledger=ledger,
            leave={"backfill": {"day": 4_000}},
            clock=now,
            jitter_ms=20,
            attempt_keys=AttemptKeys("run-of-8"),
            allowance=self.allowance,
            high_water_mark=self.mark,
            identity=Identity("here", self.project),
            recorder=Recorder(ledger, self.project, now),
        )

    def seen(self) -> object:
        """What this machine knows of the ledger, in memory and in the file, and would ask of it."""
        mark = self.mark
        slots = [] if mark._file is None else mark._file.read_all().values()
        heads = [(slot.head.newest, slot.head.numbers) for slot in slots]
        known = mark._known
        return (None if known is None else (known.watermark(""), known.expected.ids)), heads

    def stored(self) -> object:
        entries = list(read_entries(self.ledger, self.project, 0, 2**53 - 1))
        return entries, self.ledger.notes(self.project), self.ledger.refusals(self.project)

    def close(self) -> None:
        self.budget._account.close()
        self.mark.close()
        self.allowance.close()


class History:
    def __init__(self, storage: LedgerStorage, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.storage = storage
        self.now_ms = self.caller_ms = PRICE_CHANGE_MS - self.random.choice((5_000, 40_000, HOUR_MS))
        self.ledger = open_ledger(storage.url, clock=lambda: self.now_ms)
        more = (PACED,) if seed % 3 == 0 else ()
        kinds = (Budget, Awaited)
        self.worlds = [World(kind, self.ledger, folder, lambda: self.caller_ms, *more) for kind in kinds]
        Awaited.awaiter, Awaited.runner = Awaiter(self.ledger), asyncio.Runner()
        self.found: Counter[str] = Counter()

    def same(self, do: Callable[[World], Any]) -> Any:
        """Do the same in each project; what follows is the same too."""
        results = []
        for world in self.worlds:
            try:
                result = do(world)
            except QuotaError as error:
                result = type(error), str(error)
            shown = repr(result).replace(world.project, "p")
            results.append(re.sub(r"allowance-[0-9a-f]{8}", "allowance", shown))  # the journal's own name
        assert results[0] == results[1], "blocking, and awaited"
        return result

    def step(self) -> None:
        r = self.random
        self.now_ms += r.choice((0, 1, 1, 7, 40, 900, 4_000, 20_000, r.choice((0, 11 * MINUTE_MS, 5 * HOUR_MS))))
        self.caller_ms = self.now_ms + r.choice((*(0,) * 30, 300, -2_000, 5_500, -2 * HOUR_MS))
        if r.random() < UNREST:
            self._change()
            return
        method = r.choice(("videos.list", "videos.list", "search.list", "videos.insert", Method.SEARCH))
        units = r.choice((None, None, None, 1, 1, 30))
        if r.random() < 0.1:
            method, units = r.choice(((5, 1), ("of.nobody", None), (method, r.choice((True, 1.0, 0, 5_500)))))
        names = r.choice(
            ({}, {"job": "a", "region": "US"}, {"job": "backfill"}, {"region": "DE"}, {"region": "x" * 65})
        )
        if r.random() < 0.02:
            names = {"region": "x" * 65}
        ask = "peek" if r.random() < 0.15 else "charge"

        def decide(world: World) -> Decision:
            with labels(job="labelled", region="FR"):
                decision: Decision = getattr(world.budget, ask)(method, units=units, **names)
            return decision

        decision = self.same(decide)
        self.found[decision.reason if hasattr(decision, "reason") else decision[0].__name__] += 1
        self.same(World.seen)

    def _change(self) -> None:
        r = self.random
        what = r.choice(("settle", "grant", "exhaust", "reopen", "away", "lose", "close", "forget", "read"))
        self.found[what] += 1
        ledger, until_ms = self.ledger, self.now_ms + r.choice((50, HOUR_MS))
        units = r.choice((900, 3_000, 20_000))
        if what == "settle":
            self.same(lambda world: self._settle(world, units // 900 - 1))
        elif what == "grant":
            self.same(lambda world: ledger.grant(world.project, [Grant("units", units, self.now_ms, until_ms)]))
        elif what == "exhaust":
            closed = Exhaustion(r.choice(("units", "SearchList")), self.now_ms, until_ms, "it said so", "a test")
            self.same(lambda world: ledger.exhaust(world.project, closed))
        elif what == "reopen":
            self.same(lambda world: ledger.reopen(world.project, "units", "a test"))
        elif what == "away":
            is_away = isinstance(self.worlds[0].budget._account.ledger, Away)
            for world in self.worlds:
                world.budget._account.ledger = ledger if is_away else Away()  # type: ignore[assignment]
        elif what == "lose" and r.random() < 0.3:
            self.storage.empty()
        elif what == "close":
            self.same(lambda world: world.mark.close())
        elif what == "forget":
            for world in self.worlds:
                world.allowance._checked_ms.clear()
                world.mark._next_look_s = 0.0
        self.same(World.stored)

    def _settle(self, world: World, units: int) -> object:
        last = [entry.id for entry in read_entries(world.ledger, world.project, self.now_ms - HOUR_MS, self.now_ms)]
        return world.budget.settle(last[-1], units) if last else None

    def close(self) -> None:
        for world in self.worlds:
            world.close()
        Awaited.awaiter.close()
        Awaited.runner.close()
        self.ledger.close()


def test_an_awaited_decision_is_the_one_that_blocks(ledger_place: LedgerStorage, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(1, 1 + SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ledger_place.empty()
        history = History(ledger_place, folder, seed)
        for _ in range(DECISIONS):
            history.step()
        history.close()
        found += history.found
    for what in ("ok", "limit", "clock", "exhausted", "ledger-unavailable", "UsageError", "UnknownMethod"):
        assert found[what] > 2, found
