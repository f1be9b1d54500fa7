"""A limit that is new to a long log: it is counted in pieces, and until that is done calls are refused (L21)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

import quota.ledger.factory
import quota.ledger.redis_decision
import quota.ledger.redis_ledger
import quota.ledger.sqlite_decision
import quota.ledger.sqlite_ledger
from quota.errors import LedgerError, decision_status
from quota.jobs.alarms import _of_run
from quota.jobs.job import RunReport
from quota.ledger.entry import Charge
from quota.ledger.redis_scripts import script
from quota.recovery.allowance import Allowance
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, View
from support.oracle import Oracle, Spent
from support.setup import Setup, limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.budget import Budget
    from quota.decision import Decision

PACIFIC = Limit("pacific", 900, View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles")), 900, 0)
LIMITS = (
    limit(900),
    limit(300, 3 * HOUR_MS, name="short", methods=("search.list",)),
    limit(120, 2 * HOUR_MS, name="calls", count="calls"),
    PACIFIC,
)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision reads seven charges in one script call, or in each of two transactions."""

    def smaller(name: str) -> tuple[str, str]:
        text, sha = script(name)
        if name != "charge":
            return text, sha
        assert "CHUNK, MAX_ENTRIES = 250, 250" in text
        return text.replace("CHUNK, MAX_ENTRIES = 250, 250", "CHUNK, MAX_ENTRIES = 3, 7"), "0" * 40

    monkeypatch.setattr(quota.ledger.redis_decision, "script", smaller)
    monkeypatch.setattr(quota.ledger.redis_ledger, "COUNT_WITHIN_S", 0)
    monkeypatch.setattr(quota.ledger.sqlite_ledger, "COUNT_WITHIN_S", 0)
    monkeypatch.setattr(quota.ledger.sqlite_decision, "ROWS_AT_ONCE", 7)


def charged(setup: Setup, hours: int, units: int = 1) -> None:
    """Ten charges an hour that no view has read."""
    for _ in range(hours):
        setup.now_ms += HOUR_MS
        _append(setup, [units] * 10, "videos.list")


_numbers = count(1)


def _append(setup: Setup, several: list[int], method: str) -> None:
    numbers = [next(_numbers) for _ in several]
    charges = [(n, Charge(units, "units", method, "", "", f"r{n}")) for n, units in zip(numbers, several, strict=True)]
    assert setup.ledger.repay(setup.project, "m", charges)


def until_counted(budget: Budget) -> tuple[Decision, int]:
    """The decision, and how often it was refused until then because the ledger still counted."""
    for times in range(1_000):
        decision = budget.charge("videos.list")
        if decision.reason != "counting":
            return decision, times
    raise AssertionError("it never ends")


@pytest.mark.usefixtures("pieces")
def test_until_a_new_limit_is_counted_calls_are_refused_and_each_goes_on(setup: Setup) -> None:
    charged(setup, 10)
    budget = setup.budget(limit(500))
    refused = budget.charge("videos.list")
    assert (refused.admitted, refused.reason, refused.refused_by, refused.id) == (False, "counting", None, None)
    assert (refused.retry_after_ms, refused.limits, decision_status(refused)) == (1_000, (), 75)
    assert refused.sentence().startswith(
        "refused videos.list (1 unit) on main: the ledger still counts what was charged before; next at "
    )
    assert budget.peek("videos.list").reason == "counting"
    decision, times = until_counted(budget)
    assert (decision.admitted, decision.limits[0].used_units) == (True, 101)
    assert 0 < times < 100 / 7
    assert budget.charge("videos.list").limits[0].used_units == 102


@pytest.mark.usefixtures("pieces")
def test_so_it_is_where_much_has_left_the_window(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    charged(setup, 10)
    until_counted(budget)
    other = setup.budget(limit(500, 30 * DAY_MS, name="month"))
    until_counted(other)
    charged(setup, 10)
    setup.now_ms += 10 * HOUR_MS - 1
    decision, times = until_counted(budget)
    assert decision.limits[0].used_units == 5 * 10 + 2 + 100 + 1
    assert times > 0


@pytest.mark.usefixtures("pieces")
def test_a_peek_and_a_look_at_the_numbers_go_on_too(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    charged(setup, 30)
    budget = setup.budget(limit(500, 40 * HOUR_MS))
    for _ in range(20):
        assert budget.peek("videos.list").reason == "counting"
    assert budget.usage()[0].used_units == 300
    narrow = setup.budget(limit(500, 41 * HOUR_MS))
    monkeypatch.setattr("quota.deciding.outlook.MAX_COUNTING", 1)
    with pytest.raises(LedgerError, match="still counts what was charged before; run again, it goes on from there"):
        narrow.usage()


@pytest.mark.usefixtures("pieces")
def test_the_allowance_admits_nothing_while_the_ledger_counts(setup: Setup, tmp_path: Path) -> None:
    """It has answered."""
    charged(setup, 10)
    allowance = Allowance(str(tmp_path / "allowance.db"), 1, 50, lambda: setup.now_ms)
    budget = setup.budget(limit(500), allowance=allowance)
    assert budget.charge("videos.list").reason == "counting"
    assert budget.owed_units() == 0
    assert until_counted(budget)[0].source == "ledger"
    allowance.close()


@pytest.mark.usefixtures("pieces")
def test_nobody_is_notified_of_a_run_that_was_refused_for_counting(setup: Setup) -> None:
    charged(setup, 10)
    refused = setup.budget(limit(500)).charge("videos.list")
    assert refused.reason == "counting"
    report = RunReport(run="r", job="j", outcome="stopped", why=refused.why(), refused=True, refusal=refused.as_json())
    assert list(_of_run("p", "j", 0, report, None)) == []
    full = setup.budget(limit(1, HOUR_MS, name="one"))
    until_counted(full)
    report = RunReport(run="r", job="j", outcome="stopped", refused=True, refusal=full.charge("videos.list").as_json())
    assert [notice.event for notice in _of_run("p", "j", 0, report, None)] == ["refused"]


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("seed", range(int(os.environ.get("QUOTA_TEST_SEEDS", "2"))))
def test_whatever_is_counted_in_pieces_is_the_sum_of_the_log(setup: Setup, seed: int) -> None:
    """Budgets with other limits decide, peek, correct and append in between; the clock goes on, and back."""
    dice = random.Random(seed)
    oracle, counting, compared = Oracle(), 0, 0
    budgets = [setup.budget(*dice.sample(LIMITS, dice.randint(1, 4))) for _ in range(4)]
    steps = (0, 0, 0, 1, 1_000, 2 * MINUTE_MS, 20 * MINUTE_MS, HOUR_MS)
    for _ in range(400):
        setup.now_ms += dice.choice(steps) if dice.random() < 0.97 else -dice.choice(steps)
        method, chance = dice.choice(("videos.list", "search.list")), dice.random()
        if chance < 0.06:
            several = [dice.randint(0, 2) for _ in range(dice.randint(1, 40))]
            setup.now_ms += 1
            _append(setup, several, method)
            for units in several:
                oracle.append(Spent(0, 0, units, "units", method, ""), setup.now_ms)
        elif chance < 0.12 and oracle.log:
            spent, units = dice.choice(oracle.log[-60:]), dice.randint(0, 3)
            views = tuple(one.view for one in dice.choice(budgets).limits)
            assert setup.ledger.settle(setup.project, spent.id, units, views) is not None
            spent.units = units
            spent.known.clear()
        else:
            budget, commit = dice.choice(budgets), dice.random() < 0.7
            units = dice.choice((1, 1, 2, 30))
            decide: Any = budget.charge if commit else budget.peek
            decision = decide(method, units=units)
            while decision.reason == "counting" and dice.random() < 0.6:
                counting += 1
                setup.now_ms += dice.choice((0, 1, MINUTE_MS))
                decision = decide(method, units=units)
            if decision.reason == "counting":
                counting += 1
                continue
            asked = [(one, one.limit_units) for one in budget.limits]
            spend = Spent(0, 0, units, "units", method, "")
            want = oracle.answer(asked, [spend], ("units",), setup.now_ms, setup.now_ms, commit=commit)
            assert decision.admitted == (want.outcome == "admitted")
            assert decision.id == (want.ids[0] if want.ids else None)
            assert [one.used_units for one in decision.limits] == want.used
            assert want.outcome != "refused" or decision.retry_at_ms == want.retry_at_ms
            compared += 1
    assert min(counting, compared) > 20


def test_many_count_one_view_at_once_while_others_charge(
    ledger_url: str, pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what somebody charges or corrects meanwhile is counted once."""
    setup = Setup.open(ledger_url)
    charged(setup, 20)
    counted: list[int] = []
    limits = [limit(10_000), limit(10_000, 23 * HOUR_MS, name="other")]

    def take_part(number: int) -> None:
        own = Setup(quota.ledger.factory.open_ledger(ledger_url, clock=lambda: setup.now_ms), setup.now_ms)
        own.project = setup.project
        decision, _ = until_counted(own.budget(limits[number % 2]))
        counted.append(decision.limits[0].used_units)
        own.ledger.close()

    threads = [threading.Thread(target=take_part, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    charge_ids = [setup.budget().charge("videos.list").id for _ in range(3)]
    for thread in threads:
        thread.join()
    admitted = len([one for one in charge_ids if one is not None])
    for one in limits:
        assert until_counted(setup.budget(one))[0].limits[0].used_units > 200
    log = list(setup.ledger.read(setup.project, (0, 0), setup.now_ms, 1_000))
    assert len(log) == 200 + 6 + admitted + 2
    assert setup.budget(limits[0]).usage()[0].used_units == len(log)
    assert sorted(counted)[0] > 200
    setup.ledger.close()


def test_who_is_killed_while_counting_leaves_what_it_has_counted(ledger_url: str, pieces: None) -> None:
    setup = Setup.open(ledger_url)
    charged(setup, 24)
    for n in range(4):
        setup.ledger.close()
        pid = os.fork()
        if pid == 0:
            try:
                own = Setup(quota.ledger.factory.open_ledger(ledger_url, clock=lambda: setup.now_ms), setup.now_ms)
                own.project = setup.project
                while True:
                    own.budget(limit(10_000, DAY_MS + HOUR_MS)).peek("videos.list")
            finally:
                os._exit(1)
        time.sleep(0.01 * n)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert setup.budget(limit(10_000, DAY_MS + HOUR_MS)).usage()[0].used_units == 240
    setup.ledger.close()
