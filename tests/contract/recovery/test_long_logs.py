"""A process reads a long log in pieces beside its decisions, and what it has not read counts longest."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import NEVER
from quota.errors import LedgerError
from quota.ledger.contract import read_entries
from quota.recovery import high_water_mark as high_water_mark
from quota.recovery.registry import END_WITHIN_S
from quota.terms.limits import DAY_MS, HOUR_MS
from support.losses import Machine
from support.setup import limit
from support.site import NOW, Site, charge, full_hour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.ledger.entry import Entry


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three charges are read with each decision, however short ago the last were read."""
    monkeypatch.setattr(high_water_mark, "PIECE", 3)
    monkeypatch.setattr(high_water_mark, "READ_SHARE", 1e9)


def _charged_by_others(site: Site) -> int:
    """Four charges in one hour, four in the next, and an hour later; who made them saw them in another folder. Returns
    when the first hour ends."""
    other = site.machine("other").budget(limit(100))
    site.now_ms = full_hour(NOW) + 1
    charge(other, 4)
    site.now_ms += HOUR_MS
    charge(other, 4)
    site.now_ms += HOUR_MS
    return full_hour(NOW) + HOUR_MS


@pytest.mark.usefixtures("small_pieces")
def test_a_loss_right_after_the_first_decision_counts_what_was_not_read_as_long_as_the_newest(site: Site) -> None:
    first_hour_ms = _charged_by_others(site)
    budget = site.machine().budget(limit(100))
    assert charge(budget) == 9
    last_ms = site.now_ms
    site.empty()
    assert charge(budget) == 10
    for at_ms, used_before, used in ((first_hour_ms + DAY_MS, 10, 7), (last_ms + DAY_MS, 7, 1)):
        site.now_ms = at_ms - 1
        assert budget.usage()[0].used_units == used_before
        site.now_ms += 1
        assert budget.usage()[0].used_units == used


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("how", ["one process", "killed each time", "ended each time"])
def test_a_long_log_is_read_on_by_later_decisions_and_processes(site: Site, how: str) -> None:
    """Also from the middle of an hour."""
    first_hour_ms = _charged_by_others(site)
    machine = site.machine()
    for n in range(3):
        assert charge(machine.budget(limit(100))) == 9 + n
        if how == "ended each time":
            machine.high_water_mark.end(machine.ledger, END_WITHIN_S)
        if how != "one process":
            machine.stop()
            machine.start()
    budget = machine.budget(limit(100))
    site.empty()
    for at_ms, used in ((first_hour_ms + DAY_MS, 7), (first_hour_ms + HOUR_MS + DAY_MS, 3)):
        site.now_ms = at_ms - 1
        assert budget.usage()[0].used_units == used + 4
        site.now_ms = at_ms
        assert budget.usage()[0].used_units == used


@pytest.mark.parametrize("seed", range(6))
def test_however_a_log_is_read_its_slices_are_the_same(site: Site, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes of two machines, pieces of all sizes, two windows, charges at the edges of slices."""
    dice = random.Random(seed)
    monkeypatch.setattr(high_water_mark, "READ_SHARE", 1e9)
    limits = limit(10_000), limit(10_000, 3 * HOUR_MS, name="short", methods=("search.list",))
    machines = [site.machine(name) for name in "ab"]
    site.now_ms = full_hour(NOW)
    for _ in range(120):
        monkeypatch.setattr(high_water_mark, "PIECE", dice.randint(1, 9))
        site.now_ms += dice.choice((0, 0, 0, 1, HOUR_MS // 8, HOUR_MS // 8 - 1, HOUR_MS))
        machine = dice.choice(machines)
        assert machine.budget(*limits).charge("search.list", units=dice.randint(1, 9)).admitted
        if dice.random() < 0.2:
            machine.stop()
            machine.start()
    for machine in machines:
        for _ in range(200):
            machine.budget(*limits).peek("search.list")
        for one in limits:
            window_ms = one.view.window.longest_ms
            slice_ms = window_ms // 24
            whole_ms = (machine.high_water_mark._known.newest[0] - 1) // slice_ms * slice_ms
            expected: dict[int, int] = {}
            for entry in read_entries(machine.ledger, "p", 0, whole_ms):
                until_ms = -(-entry.ms // slice_ms) * slice_ms + window_ms
                if until_ms > site.now_ms:
                    expected[until_ms] = expected.get(until_ms, 0) + entry.units
            sliced = machine.high_water_mark._known.rest.sliced[one.view.name]
            assert {until_ms: n for n, until_ms in sliced.expiries if until_ms > site.now_ms} == expected
            assert sliced.through == (whole_ms, NEVER)


def test_a_piece_of_the_log_is_read_with_a_small_part_of_the_decisions(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is more than a piece to be read."""
    monkeypatch.setattr(high_water_mark, "PIECE", 3)
    monkeypatch.setattr(high_water_mark, "READ_SHARE", 1e-9)
    _charged_by_others(site)
    machine = site.machine()
    reads = _noted_reads(machine)
    charge(machine.budget(limit(100)), 5)
    assert reads == [3]
    machine.high_water_mark.end(machine.ledger, END_WITHIN_S)
    assert reads == [3, 5]


def test_nobody_waits_while_the_log_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _charged_by_others(site)
    machine = site.machine()
    budget, read = machine.budget(limit(100)), machine.ledger.read
    used: list[int] = []

    def slow(*args: Any) -> Sequence[Entry]:
        beside = threading.Thread(target=lambda: used.append(charge(budget)))
        beside.start()
        beside.join(5)
        assert not beside.is_alive()
        return read(*args)

    monkeypatch.setattr(machine.ledger, "read", slow)
    assert charge(budget) == 9
    assert used == [10]


def test_a_log_that_cannot_be_read_stops_no_decision_and_is_asked_again_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    _charged_by_others(site)
    machine = site.machine()
    asked = []

    def failing(*args: Any) -> Sequence[Entry]:
        asked.append(args)
        raise LedgerError("it does not answer")

    monkeypatch.setattr(machine.ledger, "read", failing)
    assert charge(machine.budget(limit(100)), 3) == 11
    assert len(asked) == 1
    machine.high_water_mark.end(machine.ledger, END_WITHIN_S)
    assert len(asked) == 2


def _noted_reads(machine: Machine) -> list[int]:
    """How many entries each read of the log gave, from now on."""
    read, reads = machine.ledger.read, []

    def noting(*args: Any) -> Sequence[Entry]:
        entries = read(*args)
        reads.append(len(entries))
        return entries

    machine.ledger.read = noting  # type: ignore[method-assign,assignment]
    return reads
