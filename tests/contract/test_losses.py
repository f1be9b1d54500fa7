"""What a ledger loses, the machines that saw it put back: nothing is granted twice, and nothing is lost."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from quota.deciding.repairs import repair
from quota.terms.limits import DAY_MS
from support.losses import Machine, RedisStorage
from support.setup import charges_at, limit

if TYPE_CHECKING:
    from pathlib import Path

    from support.losses import LedgerStorage

NOW_MS, LIMIT = 1_793_000_000_000, 60


class Site:
    def __init__(self, place: LedgerStorage, folder: Path, count: int) -> None:
        self.now_ms, self.place = NOW_MS, place
        self.machines = [Machine(f"m{n}", folder, place.url, lambda: self.now_ms) for n in range(count)]
        self.admitted: list[str] = []

    def charge(self, machine: Machine, units: int = 1) -> bool:
        decision = machine.budget(limit(LIMIT)).charge("videos.list", units=units)
        assert decision.reason in ("ok", "limit"), decision
        if decision.admitted:
            self.admitted.append(str(decision.id).partition("-")[2])
        return decision.admitted

    def lose(self, dice: random.Random, copies: list[object]) -> None:
        ways = ["empty", "copy", "restore"] + (["a key"] if isinstance(self.place, RedisStorage) else [])
        way = dice.choice(ways)
        for machine in self.machines:  # a file is replaced while nobody has it open
            machine.stop()
        if way == "empty":
            self.place.empty()
        elif way == "copy":
            copies.append(self.place.copy())
        elif way == "restore" and copies:
            self.place.restore(dice.choice(copies))
        elif way == "a key" and isinstance(self.place, RedisStorage):
            for client in self.place.clients:
                keys = client.keys("*")
                if keys:
                    client.delete(dice.choice(keys))
        for machine in self.machines:
            machine.start()

    def stop(self) -> None:
        for machine in self.machines:
            machine.stop()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_whenever_each_admitted_call_counts_once(
    seed: int, ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    """As long as each machine comes back before the window is over."""
    dice, site, copies = random.Random(seed), Site(ledger_place, tmp_path, 3), list[object]()
    for _ in range(80):
        if dice.random() < 0.15:
            site.lose(dice, copies)
            for machine in site.machines:
                machine.budget(limit(LIMIT)).usage()
        else:
            site.charge(dice.choice(site.machines))
            site.now_ms += dice.choice((0, 1, 500))
    assert len(site.admitted) == LIMIT
    for machine in site.machines:
        assert not site.charge(machine)
    charged = [charge.key for charge in charges_at(site.machines[0].ledger)]
    site.stop()
    assert sorted(charged) == sorted(site.admitted)


def test_a_charge_that_is_put_back_keeps_its_time_and_what_it_counts(
    ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    site = Site(ledger_place, tmp_path, 1)
    (machine,) = site.machines
    budget = machine.budget(limit(LIMIT))
    first = budget.charge("videos.list", units=30)
    site.now_ms += 5_000
    budget.settle(str(first.id), 20)
    before = charges_at(machine.ledger)
    machine.stop()
    ledger_place.empty()
    machine.start()
    again = machine.budget(limit(LIMIT))
    assert again.usage()[0].used_units == 20
    assert charges_at(machine.ledger) == before
    assert again.settle(str(first.id), 10).units == 20
    site.stop()


def test_what_an_old_copy_lacks_is_put_back_though_others_have_charged_since(
    ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    site = Site(ledger_place, tmp_path, 2)
    ours, theirs = site.machines
    site.charge(ours, 20)
    theirs.budget(limit(LIMIT)).usage()
    copy = ledger_place.copy()
    site.charge(ours, 10)
    for machine in site.machines:
        machine.stop()
    ledger_place.restore(copy)
    for machine in reversed(site.machines):
        site.now_ms += 1
        machine.start()
        site.charge(machine)
    assert [charge.units for charge in charges_at(ours.ledger)] == [20, 10, 1, 1]
    site.stop()


def test_an_entry_that_nobody_can_read_keeps_nothing_from_being_put_back(
    ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    site = Site(ledger_place, tmp_path, 1)
    (machine,) = site.machines
    site.charge(machine, 20)
    copy = ledger_place.copy()
    site.charge(machine, 10)
    machine.stop()
    ledger_place.restore(copy)
    machine.start()
    add_unreadable(ledger_place, site.now_ms + 1)
    assert machine.budget(limit(LIMIT)).usage()[0].used_units == 30
    assert [charge.units for charge in charges_at(machine.ledger)] == [20, 10]
    site.stop()


def test_an_exhaustion_of_the_future_that_was_removed_is_not_put_back(
    ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    """The machine that heard of it still has it in its journal."""
    site = Site(ledger_place, tmp_path, 2)
    right_ms = site.now_ms
    budgets = [machine.budget(limit(LIMIT)) for machine in site.machines]
    site.now_ms += DAY_MS
    budgets[0].exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    for budget in budgets:
        assert budget.charge("videos.list").reason == "exhausted"
    site.now_ms = right_ms
    repair(site.machines[0].ledger, "p", right_ms)
    for budget in budgets:
        assert budget.charge("videos.list").admitted
    site.stop()


def add_unreadable(place: LedgerStorage, ms: int) -> None:
    """What no program of ours writes, at the end of the log."""
    if isinstance(place, RedisStorage):
        place.open().xadd("quota:{p}:ledger:log", {"e": "no entry"}, f"{ms}-0")
    else:
        with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"))) as db, db:
            db.execute("INSERT INTO log VALUES ('p', ?, 0, 'no entry')", (ms,))
