"""While either clock is right, the other frees no budget: seconds, an hour, a day ahead or behind, stepping, mended."""

from __future__ import annotations

import random
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from quota.budget import Budget
from quota.common.clock import NEVER, elapsed_s, rfc3339
from quota.ledger.contract import CLOCK_BEHIND_MS, CLOCK_SLACK_MS, read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.recovery.allowance import Allowance
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, Calendar, Limit, Selector, View
from support.books import BOOK
from support.setup import limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.ledger.contract import Ledger
    from quota.ledger.entry import Entry

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


def test_a_charge_before_midnight_by_a_clock_set_back_is_none_of_the_day_after(ledger_url: str) -> None:
    """L6, L7. A view that began with the day reads nothing from before it, in whatever order the day was met."""
    now_ms = 0
    of_today = Limit("today", 1, View(Selector(methods=("search.list",)), Calendar("day", "America/Santiago")), 1, 0)
    with closing(open_ledger(ledger_url, clock=lambda: now_ms)) as ledger:
        first, other = (
            Budget(credential="main", project="p", book=BOOK, limits=limits, ledger=ledger, clock=lambda: now_ms)
            for limits in ([limit(UNITS), of_today], [limit(UNITS)])
        )
        steps = (
            (3, 0, first.peek, "search.list"),  # midnight in Santiago
            (2, 50, other.charge, "search.list"),
            (7, 35, first.charge, "videos.list"),
        )
        for hour, minute, ask, method in steps:
            now_ms = int(datetime(2026, 11, 1, hour, minute, tzinfo=UTC).timestamp()) * 1000
            assert ask(method, units=1).admitted
        now_ms += 11 * MINUTE_MS
        decision = first.charge("search.list", units=1)
        assert decision.admitted
        assert [state.used_units for state in decision.limits] == [3, 1]


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


YEAR_MS = 365 * DAY_MS
DRAWN = (1, Charge(1, "units", "videos.list", "", "", "drawn-1"))


@pytest.mark.parametrize("wrong", ["ledger", "a"])
@pytest.mark.parametrize(
    "skew_ms", [CLOCK_SLACK_MS + 1, CLOCK_BEHIND_MS + 1, DAY_MS, YEAR_MS, -CLOCK_BEHIND_MS - 1, -DAY_MS, -YEAR_MS]
)
def test_where_clocks_disagree_nothing_is_written_and_neither_is_trusted(
    ledger_url: str, wrong: str, skew_ms: int
) -> None:
    """L11: a decision, a peek and a repayment. The line names both times; once they agree all is as before."""
    world = World(ledger_url, 0)
    ledger, budget = world.ledger, world.budgets["a"]
    assert budget.charge("videos.list", units=UNITS - 5).admitted
    world.skew_ms[wrong] = skew_ms
    ahead_ms = world.skew_ms["a"] - world.skew_ms["ledger"]
    agree = -CLOCK_BEHIND_MS <= ahead_ms <= CLOCK_SLACK_MS
    log = read_all(ledger)
    caller_ms, ledger_ms = (NOW + world.skew_ms[who] for who in ("a", "ledger"))
    for ask in (budget.charge, budget.peek):
        decision = ask("videos.list")
        assert (decision.reason == "clock") == (not agree)
        if not agree:
            assert (decision.admitted, decision.id, decision.retry_at_ms) == (False, None, None)
            assert decision.sentence() == (
                f"refused videos.list (1 unit) on main: this machine's clock reads {rfc3339(caller_ms)}, "
                f"the ledger's {rfc3339(ledger_ms)}; set the one that is wrong, then run again"
            )
    if not agree:
        assert read_all(ledger) == log
    world.skew_ms[wrong] = 0
    budget.charge("videos.list")
    world.skew_ms[wrong] = skew_ms
    before = len(read_all(ledger))
    assert ledger.repay("p", "m", [DRAWN], caller_ms=caller_ms) == agree
    assert len(read_all(ledger)) == before + agree
    world.skew_ms[wrong] = 0
    assert ledger.repay("p", "m", [DRAWN], caller_ms=NOW)
    assert len(read_all(ledger)) == before + 1, "it was repaid once"
    assert budget.usage()[0].used_units >= UNITS - 5 + 2
    ledger.close()


def test_a_debt_waits_until_the_clocks_agree(ledger_url: str, tmp_path: Path) -> None:
    """It would be dated by a clock that is wrong. The decision says what to set, and the allowance is not asked."""
    world = World(ledger_url, 0)
    away = open_ledger(f"sqlite:///{tmp_path}/missing/ledger.db")
    (tmp_path / "missing").touch()
    allowance = Allowance(str(tmp_path / "allowance.db"), 1, 50, lambda: world.true_ms)
    budget = world.budgets["a"]
    budget._account.allowance, budget._account.ledger = allowance, away
    assert budget.charge("videos.list").source == "allowance"
    budget._account.ledger = world.ledger
    world.skew_ms["ledger"] = YEAR_MS
    refused = budget.charge("videos.list")
    assert (refused.admitted, refused.reason) == (False, "clock")
    assert (read_all(world.ledger), budget.owed_units()) == ([], 1)
    world.skew_ms["ledger"] = 0
    assert budget.charge("videos.list").limits[0].used_units == 2
    assert budget.owed_units() == 0
    allowance.close()
    world.ledger.close()


def test_a_caller_that_reads_its_clock_again_is_asked_once_more(ledger_url: str) -> None:
    """A clock that was set between two readings refuses nobody."""
    world = World(ledger_url, 0)
    readings = iter([NOW - DAY_MS, NOW, NOW, NOW])
    world.budgets["a"]._clock = lambda: next(readings)
    assert world.budgets["a"].charge("videos.list").admitted
    world.ledger.close()


def read_all(ledger: Ledger) -> list[Entry]:
    return list(read_entries(ledger, "p", 0, NEVER))


def test_elapsed_time_only_grows() -> None:
    assert elapsed_s() <= elapsed_s()
