"""Calls that were admitted without an answer of the ledger: in the end the ledger counts each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quota.budget import Budget, project_of
from quota.common.clock import moment, rfc3339
from quota.deciding.allowance import Allowance
from quota.deciding.history import charges
from quota.deciding.project import Project
from quota.decision import AllowanceState
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.ledger.log import Log
from quota.terms.limits import DAY_MS
from support.books import BOOK
from support.losses import Fault, FaultyLog, Machine, Site
from support.proxy import Proxy
from support.setup import charges_at, limit

ALLOWANCE = Allowance(max_cost_units=5, allowance_units=20)
NOWHERE = "redis://127.0.0.1:9/0"


@contextmanager
def cut(line: Proxy) -> Iterator[None]:
    """Nothing that is sent arrives."""
    line.fail("drop-request", times=1_000, match=b"")
    yield
    line.heal()


@contextmanager
def deaf(line: Proxy) -> Iterator[None]:
    """What is sent arrives, and no answer comes back."""
    line.fail("drop-reply", times=1_000)
    yield
    line.heal()


def draw_in_vain(machine: Machine, line: Proxy) -> None:
    """Draw a call that had reached the ledger, whose process ends then."""
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    budget.peek("videos.list")
    with deaf(line):
        assert budget.charge("videos.list", units=3).source == "allowance"
    assert units_of(machine) == [3]


def units_of(machine: Machine) -> list[int]:
    return [charge.units for charge in charges_at(machine.ledger)]


@pytest.mark.usefixtures("real_walls")
def test_the_allowance_admits_nothing_while_a_log_is_rebuilt(site: Site) -> None:
    machine = site.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    budget.charge("videos.list")
    machine.ledger.fence("p", machine.ledger.begin("p").epoch, "of somebody else")
    decision = budget.charge("videos.list")
    assert (decision.admitted, decision.reason, decision.source) == (False, "counting", None)
    assert budget.owed_units() == 0


def test_any_process_of_the_machine_hands_over_the_draws(far: Site, line: Proxy) -> None:
    machine = far.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    with cut(line):
        assert "left of this machine's allowance: the ledger does not" in budget.peek("videos.list").sentence()
        assert budget.charge("videos.list", units=3).source == "allowance"
    assert machine.budget(limit(100)).usage()[0].used_units == 3
    assert (budget.owed_units(), units_of(machine)) == (0, [3])


@pytest.mark.parametrize("lost", [False, True], ids=["the log stays", "the log is lost"])
def test_a_draw_whose_first_try_did_reach_the_ledger_counts_once(far: Site, line: Proxy, lost: bool) -> None:
    """Its process had no answer and has ended. Who hands it over finds it by its key, and notes it."""
    machine = far.machine()
    draw_in_vain(machine, line)
    assert machine.budget(limit(100)).usage()[0].used_units == 3
    if lost:
        far.empty()
    assert machine.budget(limit(100)).usage()[0].used_units == 3
    assert units_of(machine) == [3]


@pytest.mark.parametrize("reading", [1, 2, 3])
def test_a_draw_is_found_in_a_log_that_others_put_back_meanwhile(far: Site, line: Proxy, reading: int) -> None:
    """They had read its first try, and the ledger was emptied while this machine looked for it."""
    machine, theirs = far.machine(), far.machine("theirs").budget(limit(100))
    draw_in_vain(machine, line)
    assert theirs.usage()[0].used_units == 3
    budget = machine.budget(limit(100))
    budget._project.log = FaultyLog(machine.ledger, {reading: Fault(far.empty, theirs.usage)}, "read")
    assert budget.usage()[0].used_units == 3
    assert units_of(machine) == [3]


def test_a_draw_is_found_before_what_the_process_has_read_since_its_first_try(site: Site) -> None:
    """Another thread read the log between the two tries."""
    machine = site.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    budget.charge("videos.list")
    lost = {1: Fault(after=budget.usage, is_lost=True), 2: Fault(is_lost=True)}
    budget._project.log = FaultyLog(machine.ledger, lost)
    assert budget.charge("videos.list", units=3).source == "allowance"
    assert machine.budget(limit(100)).usage()[0].used_units == 4
    assert units_of(machine) == [1, 3]


def test_a_refusal_shows_what_was_drawn_and_when_it_frees(far: Site, line: Proxy) -> None:
    budget = far.machine().budget(limit(100), allowance=ALLOWANCE)
    with cut(line):
        first = budget.charge("videos.list", units=5)
        far.now_ms += 1_000
        assert all(budget.charge("videos.list", units=5).admitted for _ in range(3))
        refused = budget.charge("videos.list", units=5)
    frees_ms = first.decided_at_ms + DAY_MS
    assert refused.as_json()["allowance"] == {
        "max_cost_units": 5,
        "allowance_units": 20,
        "drawn_units": 20,
        "remaining_units": 0,
        "frees_at": rfc3339(frees_ms),
    }
    assert f"20 of 20 units drawn, 0 left until {moment(frees_ms)}" in refused.sentence()


def test_a_refusal_of_an_expensive_call_shows_what_is_left_for_cheap_calls(far: Site, line: Proxy) -> None:
    budget = far.machine().budget(limit(100), allowance=ALLOWANCE)
    with cut(line):
        sentence = budget.charge("videos.list", units=6).sentence()
    assert "allowance, for calls of at most 5 units: 0 of 20 units drawn, 20 left; run again" in sentence


def test_an_allowance_has_room_for_a_call_when_enough_of_it_has_left(far: Site, line: Proxy) -> None:
    budget = far.machine().budget(limit(100), allowance=ALLOWANCE)
    with cut(line):
        draws = []
        for units in (1, 4, 5, 5, 5):
            draws.append(budget.charge("videos.list", units=units))
            far.now_ms += 1_000
        assert budget.charge("videos.list", units=3).allowance == AllowanceState(
            5, 20, 20, draws[1].decided_at_ms + DAY_MS
        )
        budget.refund(str(draws[1].id))
        assert budget.allowance() == AllowanceState(5, 20, 16, draws[0].decided_at_ms + DAY_MS)


def test_reading_the_charges_hands_the_draws_over(far: Site, line: Proxy) -> None:
    machine = far.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    with cut(line):
        budget.charge("videos.list", units=3)
    assert [charge.units for charge in charges(project_of(machine.budget(limit(100))))] == [3]


def test_a_debt_goes_to_the_ledger_of_the_configuration_that_drew_it(site: Site, tmp_path: Path) -> None:
    """Two configurations of one machine share the allowance, and no ledger."""
    here, there = site.machine().ledger, open_ledger(f"sqlite:///{tmp_path / 'there.db'}")

    def budget(name: str, ledger: Log) -> Budget:
        journal = Journal(tmp_path / "state", Identity(name, "p"), keep_ms=DAY_MS)
        project = Project(ledger, "p", journal=journal, clock=lambda: site.now_ms)
        return Budget(credential="main", book=BOOK, limits=limit(100), project=project, allowance=ALLOWANCE)

    (tmp_path / "state").mkdir()
    assert budget("here", open_ledger(NOWHERE)).charge("videos.list", units=5).remaining_units == 15
    assert budget("there", open_ledger(NOWHERE)).charge("videos.list", units=4).remaining_units == 11
    assert budget("there", there).usage()[0].used_units == 4
    assert budget("here", here).usage()[0].used_units == 5
    there.close()


def test_a_settled_draw_keeps_its_true_cost_when_others_put_its_first_try_back(far: Site, line: Proxy) -> None:
    """They had read the first try, as it was charged, and put it back after the hand-over."""
    machine, theirs = far.machine(), far.machine("theirs").budget(limit(100))
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    budget.peek("videos.list")
    with deaf(line):
        draw = budget.charge("videos.list", units=3)
        budget.settle(str(draw.id), 5)
    assert theirs.usage()[0].used_units == 3
    far.empty()
    assert machine.budget(limit(100)).usage()[0].used_units == 5
    far.empty()
    assert theirs.usage()[0].used_units == 3
    assert machine.budget(limit(100)).usage()[0].used_units == 5
