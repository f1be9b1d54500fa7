"""What a ledger loses, the machines that saw it put back: nothing is granted twice, and nothing is lost."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing

import pytest

import quota
from quota.deciding.repairs import repair
from quota.terms.limits import DAY_MS
from support.losses import LedgerStorage, Machine, RedisStorage, Site
from support.setup import charges_at, limit

SIXTY = limit(60)


class Losses:
    """A site that loses something now and then, and the keys of what was admitted there."""

    def __init__(self, site: Site, dice: random.Random) -> None:
        self.site, self.dice = site, dice
        self.copies: list[object] = []
        self.admitted: list[str] = []

    def charge(self, machine: Machine) -> bool:
        decision = machine.budget(SIXTY).charge("videos.list")
        assert decision.reason in ("ok", "limit"), decision
        if decision.admitted:
            self.admitted.append(str(decision.id).partition("-")[2])
        return decision.admitted

    def lose(self) -> None:
        place = self.site.place
        way = self.dice.choice(["empty", "copy", "restore"] + ["a key"] * isinstance(place, RedisStorage))
        if way == "empty":
            self.site.empty()
        elif way == "copy":
            self.copies.append(place.copy())
        elif way == "restore" and self.copies:
            self.site.restore(self.dice.choice(self.copies))
        elif way == "a key" and isinstance(place, RedisStorage):
            for client in place.clients:
                keys = client.keys("*")
                if keys:
                    client.delete(self.dice.choice(keys))
        for machine in self.site.machines:
            machine.stop()
            machine.start()


@pytest.mark.parametrize("seed", range(2))
def test_each_admitted_call_counts_once_after_any_loss(seed: int, site: Site) -> None:
    dice = random.Random(seed)
    losses, machines = Losses(site, dice), [site.machine(f"m{number}") for number in range(3)]
    for _ in range(80):
        if dice.random() < 0.15:
            losses.lose()
            for machine in machines:
                machine.budget(SIXTY).usage()
        else:
            losses.charge(dice.choice(machines))
            site.now_ms += dice.choice((0, 1, 500))
    assert len(losses.admitted) == 60
    assert not any(losses.charge(machine) for machine in machines)
    assert sorted(charge.key for charge in charges_at(machines[0].ledger)) == sorted(losses.admitted)


def test_a_charge_that_is_put_back_keeps_its_time_and_what_it_counts(site: Site) -> None:
    machine = site.machine()
    first = machine.budget(SIXTY).charge("videos.list", units=30)
    site.now_ms += 5_000
    machine.budget(SIXTY).settle(str(first.id), 20)
    before = charges_at(machine.ledger)
    site.empty()
    again = machine.budget(SIXTY)
    assert again.usage()[0].used_units == 20
    assert charges_at(machine.ledger) == before
    assert again.settle(str(first.id), 10).units == 20


def test_charges_that_an_old_copy_lacks_are_put_back_after_newer_charges(site: Site) -> None:
    ours, theirs = site.machine("ours"), site.machine("theirs")
    ours.budget(SIXTY).charge("videos.list", units=20)
    theirs.budget(SIXTY).usage()
    copy = site.place.copy()
    ours.budget(SIXTY).charge("videos.list", units=10)
    site.restore(copy)
    for machine in (theirs, ours):
        machine.budget(SIXTY).charge("videos.list")
        site.now_ms += 1
    assert [charge.units for charge in charges_at(ours.ledger)] == [20, 10, 1, 1]


def test_an_unreadable_entry_stops_no_put_back(site: Site) -> None:
    machine = site.machine()
    machine.budget(SIXTY).charge("videos.list", units=20)
    copy = site.place.copy()
    machine.budget(SIXTY).charge("videos.list", units=10)
    site.restore(copy)
    add_unreadable(site.place, site.now_ms + 1)
    assert machine.budget(SIXTY).usage()[0].used_units == 30
    assert [charge.units for charge in charges_at(machine.ledger)] == [20, 10]


def test_an_exhaustion_of_the_future_that_was_removed_is_not_put_back(site: Site) -> None:
    """The machine that heard of it still has it in its journal."""
    right_ms = site.now_ms
    budgets = [site.machine(name).budget(SIXTY) for name in ("ours", "theirs")]
    site.now_ms += DAY_MS
    budgets[0].exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    for budget in budgets:
        assert budget.charge("videos.list").reason == "exhausted"
    site.now_ms = right_ms
    repair(site.machines[0].ledger, "p", right_ms)
    for budget in budgets:
        assert budget.charge("videos.list").admitted


def add_unreadable(place: LedgerStorage, ms: int) -> None:
    """What no program of ours writes, at the end of the log."""
    if isinstance(place, RedisStorage):
        place.open().xadd("quota:{p}:ledger:log", {"e": "no entry"}, f"{ms}-0")
    else:
        with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"))) as db, db:
            db.execute("INSERT INTO log VALUES ('p', ?, 0, 'no entry')", (ms,))


@pytest.mark.usefixtures("state_dir")
def test_an_emptied_project_that_another_api_has_taken_gets_nothing_back(ledger_place: LedgerStorage) -> None:
    def opened(api: str) -> quota.Session:
        credentials = {"main": {"api": api, "project": "p"}}
        return quota.open(settings={"ledger": {"url": ledger_place.url}, "credentials": credentials})

    with opened("asana") as asana:
        assert asana.budget().charge("write").admitted
        ledger_place.empty()
        with opened("github") as github:
            assert github.budget().charge("read").admitted
            refused = asana.budget().charge("write")
            assert "project 'p' has the charges of api 'github'" in (refused.detail or "")
            assert {charge.method for charge in charges_at(github.ledger)} == {"read"}
