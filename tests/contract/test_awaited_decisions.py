"""An awaited decision is the one that blocks: random histories in two projects in step, of which one is awaited."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections import Counter
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget, project_of
from quota.deciding.allowance import Allowance
from quota.deciding.recorder import Recorder
from quota.errors import LedgerError, QuotaError
from quota.ledger.factory import open_ledger
from quota.rules.facts import Grant
from quota.terms.arguments import labels
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.setup import budget_of, charges_at, ids_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quota.decision import Decision
    from quota.ledger.log import Log
    from support.losses import LedgerStorage

SEEDS = int(os.environ.get("QUOTA_TEST_SEEDS", "3"))
DECISIONS = 220
PRICE_CHANGE_MS = 1_764_806_400_000
"""When `videos.insert` gets cheaper."""

UNREST = 0.15
"""So much of what happens is no decision."""

UNITS = View(Selector(buckets=("units",)), Sliding(DAY_MS))
LIMITS = (
    Limit("minute", 250, View(Selector(buckets=("units",)), Sliding(MINUTE_MS)), 250, 0),
    Limit("day", 5_000, UNITS, 5_000, 0),
    Limit("pacific", 6_000, View(Selector(), Calendar("day", "America/Los_Angeles")), 6_000, 0),
    Limit("search", 40, View(Selector(methods=("search.list",), count="calls"), Sliding(HOUR_MS)), 40, 0),
    Limit("paced", 8_000, View(Selector(), Calendar("hour", "UTC")), 8_000, 0, paced=True),
)


class Away:
    """A ledger that cannot be asked."""

    label, shared = "away", True

    def __getattr__(self, _: str) -> Any:
        def away(*_: object, **__: object) -> Any:
            raise LedgerError("away")

        return away


class Awaited:
    """A budget on an event loop, with the methods of one that blocks."""

    def __init__(self, budget: Budget, ledger: Log) -> None:
        self.awaiter, self.runner = Awaiter(ledger), asyncio.Runner()
        self.budget = AsyncBudget(budget, self.awaiter)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def await_it(*args: Any, **options: Any) -> Any:
            return self.runner.run(getattr(self.budget, name)(*args, **options), context=copy_context())

        return await_it

    def close(self) -> None:
        self.awaiter.close()
        self.runner.close()


class World:
    """One of the projects, on a machine of its own."""

    def __init__(self, name: str, ledger: Log, folder: Path, now: Callable[[], int]) -> None:
        self.name, self.ledger = name, ledger
        (folder / name).mkdir()
        options: dict[str, Any] = {"project": name, "folder": folder / name, "clock": now}
        self.blocking = budget_of(
            ledger, *LIMITS, leave={"backfill": {"day": 4_000}}, allowance=Allowance(60, 300), **options
        )
        self.project = project_of(self.blocking)
        self.blocking._recorder = self.recorder = Recorder(self.project.state)
        self.budget: Any = Awaited(self.blocking, ledger) if name == "awaited" else self.blocking

    def change(self, what: str, now_ms: int, until_ms: int, units: int) -> object:
        budget = self.blocking
        if what == "settle":
            ids = ids_of(charges_at(self.ledger, self.name))
            return self.budget.settle(ids[-1], units // 900 - 1).before_units if ids else None
        if what == "grant":
            budget.grant([Grant("units", units, now_ms, until_ms)])
        elif what == "exhaust":
            budget.exhaust("units", now_ms, until_ms, "no more", "a test")
        elif what == "reopen":
            return budget.reopen("units", "a test")
        elif what == "others":
            budget.add_others("units", units // 10, now_ms, until_ms, "console")
        return self.budget.owed_units()

    def stored(self) -> object:
        """What the log has, by everything but the keys and ids."""
        entries = [(entry.units, entry.charged_units, *entry[3:7]) for entry in charges_at(self.ledger, self.name)]
        return entries, self.project.state.facts().exhaustions, self.project.state.facts().grants

    def close(self) -> None:
        self.recorder.close()
        if isinstance(self.budget, Awaited):
            self.budget.close()


class History:
    def __init__(self, storage: LedgerStorage, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = self.caller_ms = PRICE_CHANGE_MS - self.random.choice((5_000, 40_000, HOUR_MS))
        self.ledger = open_ledger(storage.url, clock=lambda: self.now_ms)
        self.worlds = [World(name, self.ledger, folder, lambda: self.caller_ms) for name in ("blocking", "awaited")]
        self.counts: Counter[str] = Counter()

    def same(self, do: Callable[[World], Any]) -> Any:
        """Do the same in each project; what follows is the same too."""
        results = []
        for world in self.worlds:
            try:
                result = do(world)
            except QuotaError as error:
                result = type(error), str(error)
            shown = repr(result).replace(world.name, "p")
            results.append(re.sub(r"'\d+-[\w-]+'", "'ID'", shown))
        assert results[0] == results[1], "blocking, and awaited"
        return result

    def step(self) -> None:
        r = self.random
        self.now_ms += r.choice((0, 1, 1, 7, 40, 900, 4_000, 20_000, r.choice((0, 11 * MINUTE_MS, 5 * HOUR_MS))))
        self.caller_ms = self.now_ms + r.choice((*(0,) * 30, -2_000, -2 * HOUR_MS))
        if r.random() < UNREST:
            self._change()
            return
        method: object = r.choice(("videos.list", "videos.list", "search.list", "videos.insert"))
        units: object = r.choice((None, None, None, 1, 1, 30))
        if r.random() < 0.1:
            method, units = r.choice(((5, 1), ("of.nobody", None), (method, r.choice((True, 1.0, 0, 5_500)))))
        names = r.choice(({}, {"job": "a", "region": "US"}, {"job": "backfill"}, {"region": "DE"}))
        if r.random() < 0.02:
            names = {"region": "x" * 65}
        ask = "peek" if r.random() < 0.15 else "charge"

        def decide(world: World) -> Decision:
            with labels(job="labelled", region="FR"):
                decision: Decision = getattr(world.budget, ask)(method, units=units, **names)
            return decision

        decision = self.same(decide)
        self.counts[decision.reason if hasattr(decision, "reason") else decision[0].__name__] += 1

    def _change(self) -> None:
        r = self.random
        what = r.choice(("settle", "grant", "exhaust", "reopen", "others", "owed", "away"))
        self.counts[what] += 1
        now_ms, until_ms = self.now_ms, self.now_ms + r.choice((50, HOUR_MS))
        units = r.choice((900, 3_000, 20_000))
        if what == "away":
            is_away = isinstance(self.worlds[0].project.log, Away)
            for world in self.worlds:
                world.project.log = self.ledger if is_away else Away()
        else:
            self.same(lambda world: world.change(what, now_ms, until_ms, units))
        self.same(World.stored)

    def close(self) -> None:
        for world in self.worlds:
            world.close()
        self.ledger.close()


def test_an_awaited_decision_equals_a_blocking_decision(ledger_place: LedgerStorage, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(1, 1 + SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ledger_place.empty()
        history = History(ledger_place, folder, seed)
        for _ in range(DECISIONS):
            history.step()
        history.close()
        counts += history.counts
    for what in ("ok", "limit", "exhausted", "ledger-unavailable", "UsageError", "UnknownMethod", "CostExceedsLimit"):
        assert counts[what] > 2, counts
