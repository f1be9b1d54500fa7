"""While either clock is right, the other frees no budget: seconds, an hour, a day ahead or behind, stepping, mended."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from quota.budget import Budget
from quota.common.clock import elapsed_s
from quota.ledger.contract import CLOCK_SLACK_MS
from quota.ledger.factory import open_ledger
from quota.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, Calendar, Limit, Selector, View
from support.books import BOOK
from support.setup import limit

if TYPE_CHECKING:
    from quota.ledger.contract import Ledger

NOW = 1_793_000_000_000
UNITS = 60
SKEWS_MS = (SECOND_MS, 4 * SECOND_MS, 30 * SECOND_MS, HOUR_MS, DAY_MS)
STEPS_MS = (1, SECOND_MS, MINUTE_MS, 20 * MINUTE_MS, HOUR_MS, 5 * HOUR_MS)
PACIFIC = Limit("pacific", UNITS, View(Selector(), Calendar("day", "America/Los_Angeles")), UNITS, 0)


class World:
    """True time, a ledger and two callers, each with a clock that may be wrong by some `skew_ms`."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.true_ms = NOW
        self.skew_ms = {"ledger": 0, "a": 0, "b": 0}
        self.ledger: Ledger = open_ledger(url, clock=lambda: self.true_ms + self.skew_ms["ledger"])
        self.budgets = {name: self._budget(name) for name in ("a", "b")}
        self.spent: list[tuple[int, int]] = []
        self.answers: dict[str, int] = {}

    def _budget(self, name: str) -> Budget:
        return Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=(limit(UNITS), PACIFIC),
            ledger=self.ledger,
            clock=lambda: self.true_ms + self.skew_ms[name],
        )

    def charge(self) -> None:
        name, units = self.random.choice("ab"), self.random.choice((1, 3, 10))
        decision = self.budgets[name].charge("videos.list", units=units)
        self.answers[decision.reason] = self.answers.get(decision.reason, 0) + 1
        if decision.admitted:
            self.spent.append((self.true_ms, units))
            self.check()

    def check(self) -> None:
        """What was really spent, by the true time. The slack that is allowed to a clock is what an edge may be off."""
        slack_ms = 2 * CLOCK_SLACK_MS
        within = sum(units for ms, units in self.spent if ms > self.true_ms - DAY_MS + slack_ms)
        assert within <= UNITS, f"{within} of {UNITS} in a day"
        window = PACIFIC.view.window
        assert isinstance(window, Calendar)
        start_ms, end_ms, _ = window.edges(self.true_ms)
        today = sum(units for ms, units in self.spent if start_ms + slack_ms <= ms < end_ms - slack_ms)
        assert today <= UNITS, f"{today} of {UNITS} in upstream's day"

    def turn(self, names: tuple[str, ...]) -> None:
        """Now and then a clock goes wrong, or is mended."""
        if self.random.random() < 0.1:
            name = self.random.choice(names)
            wrong = self.random.choice(SKEWS_MS) * self.random.choice((-1, 1))
            self.skew_ms[name] = self.random.choice((0, 0, wrong))


@pytest.mark.parametrize(
    "wrong", [("ledger",), ("a",), ("a", "b")], ids=["the server's", "one caller's", "every caller's"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_clock_frees_no_budget(ledger_url: str, wrong: tuple[str, ...], seed: int) -> None:
    world = World(ledger_url, seed)
    for _ in range(600):
        world.turn(wrong)
        world.true_ms += world.random.choice(STEPS_MS)
        world.charge()
    world.ledger.close()
    assert world.answers["ok"] > 50
    assert world.answers["limit"] > 50
    assert world.answers["clock"] > 10, "a caller too far ahead of the ledger is told so"


def test_both_clocks_ahead_are_one_clock(ledger_url: str) -> None:
    """On one machine there is no second witness: a day later everything has expired, whoever says so."""
    world = World(ledger_url, 0)
    budget = world.budgets["a"]
    assert budget.charge("videos.list", units=UNITS).admitted
    world.skew_ms = dict.fromkeys(world.skew_ms, DAY_MS)
    assert budget.charge("videos.list").admitted
    world.ledger.close()


def test_a_server_that_runs_ahead_dates_charges_ahead_and_keeps_them_longer(ledger_url: str) -> None:
    world = World(ledger_url, 0)
    budget = world.budgets["a"]
    world.skew_ms["ledger"] = HOUR_MS
    assert budget.charge("videos.list", units=UNITS).admitted
    world.skew_ms["ledger"] = 0
    world.true_ms += DAY_MS
    assert not budget.charge("videos.list").admitted, "it was dated an hour ahead"
    world.true_ms += HOUR_MS
    assert budget.charge("videos.list").admitted
    world.ledger.close()


def test_elapsed_time_only_grows() -> None:
    assert elapsed_s() <= elapsed_s()
