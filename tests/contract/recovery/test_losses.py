"""What a ledger loses, its machines put back, whatever their clocks say: nothing is granted twice or lost."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest
import redis

import quota
from quota.deciding.repairs import repair
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.losses import LedgerStorage, Machine, RedisStorage, Site
from support.servers import RedisServer, until
from support.setup import budget_of, charges_at, limit
from support.torture import Torture

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


TEN = limit(10)


@pytest.mark.parametrize("ahead_ms", [3 * HOUR_MS, 2 * DAY_MS])
def test_a_machine_whose_clock_is_ahead_counts_what_the_others_count(site: Site, ahead_ms: int) -> None:
    site.machine("theirs").budget(TEN).charge("videos.list", units=10)
    machine = site.machine()
    machine.skew_ms = ahead_ms
    decision = machine.budget(TEN).charge("videos.list")
    assert (decision.reason, decision.limits[0].used_units) == ("limit", 10)


@pytest.mark.parametrize("behind_ms", [2 * HOUR_MS, 2 * DAY_MS])
def test_a_machine_hours_behind_the_ledger_charges_nothing(site: Site, behind_ms: int) -> None:
    """Or the ledger's is ahead: that of this machine does not say which."""
    machine = site.machine()
    machine.skew_ms = -behind_ms
    assert machine.budget(TEN).charge("videos.list").reason == "clock"
    assert charges_at(machine.ledger) == []


def test_windows_end_later_for_a_machine_minutes_behind(site: Site) -> None:
    ours, theirs = site.machine("ours"), site.machine("theirs")
    theirs.budget(TEN).charge("videos.list", units=10)
    ours.skew_ms = -10 * MINUTE_MS
    site.now_ms += DAY_MS
    assert not ours.budget(TEN).peek("videos.list").admitted
    assert theirs.budget(TEN).peek("videos.list").admitted
    site.now_ms += 10 * MINUTE_MS
    assert ours.budget(TEN).peek("videos.list").admitted


@pytest.mark.parametrize("lost", [False, True], ids=["the log stays", "the log is lost"])
def test_a_charge_counts_again_after_clocks_were_a_day_ahead(site: Site, lost: bool) -> None:
    """What was charged meanwhile counts beside it."""
    machine = site.machine()
    budget = machine.budget(TEN)
    budget.charge("videos.list", units=4)
    site.now_ms += DAY_MS
    assert budget.charge("videos.list", units=3).limits[0].used_units == 3
    site.now_ms -= DAY_MS - MINUTE_MS
    if lost:
        site.empty()
        budget = machine.budget(TEN)
    decision = budget.charge("videos.list", units=4)
    assert (decision.reason, decision.limits[0].used_units) == ("limit", 7)
    site.now_ms += DAY_MS - MINUTE_MS
    assert budget.charge("videos.list", units=4).admitted


@pytest.mark.parametrize("off_ms", [3 * DAY_MS, -30 * HOUR_MS, -365 * DAY_MS])
def test_charges_that_a_ledger_lost_count_though_its_clock_was_wrong_meanwhile(site: Site, off_ms: int) -> None:
    machine = site.machine()
    machine.budget(TEN).charge("videos.list", units=10)
    site.empty()
    site.now_ms, machine.skew_ms = site.now_ms + off_ms, -off_ms
    budget = machine.budget(TEN)
    assert not budget.charge("videos.list").admitted
    site.now_ms, machine.skew_ms = site.now_ms - off_ms + MINUTE_MS, 0
    for asked in (budget, machine.budget(TEN)):
        decision = asked.charge("videos.list")
        assert (decision.reason, decision.limits[0].used_units) == ("limit", 10)


def test_a_bucket_stays_closed_though_the_clock_of_an_emptied_ledger_was_behind(site: Site) -> None:
    machine = site.machine()
    machine.budget(SIXTY).exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    site.empty()
    site.now_ms, machine.skew_ms = site.now_ms - 30 * HOUR_MS, 30 * HOUR_MS
    budget = machine.budget(SIXTY)
    assert budget.charge("videos.list").reason == "exhausted"
    site.now_ms, machine.skew_ms = site.now_ms + 30 * HOUR_MS + MINUTE_MS, 0
    assert budget.charge("videos.list").reason == "exhausted"


LIMIT = limit(100)


@pytest.mark.parametrize("dumped", [True, False], ids=["with an old dump", "with nothing"])
def test_a_killed_server_comes_back_and_lacks_nothing(own_server: RedisServer, tmp_path: Path, dumped: bool) -> None:
    with closing(open_ledger(own_server.url)) as ledger, redis.Redis(port=own_server.port) as client:
        budget = budget_of(ledger, LIMIT, folder=tmp_path)
        budget.charge("videos.list", units=5)
        if dumped:
            client.save()
        budget.charge("videos.list", units=3)
        before = charges_at(ledger)
        own_server.kill()
        own_server.start()
        assert len(charges_at(ledger)) == dumped
        assert budget.charge("videos.list").limits[0].used_units == 9
        assert charges_at(ledger)[:2] == before


def test_a_replica_that_lagged_takes_over_and_lacks_nothing(tmp_path: Path) -> None:
    first, other = RedisServer("--repl-diskless-sync-delay", "0"), RedisServer()
    with first, other, closing(open_ledger(first.url)) as ledger, closing(open_ledger(other.url)) as then:
        budget = budget_of(ledger, LIMIT, folder=tmp_path)
        budget.charge("videos.list", units=5)
        with redis.Redis(port=other.port) as replica:
            replica.replicaof("127.0.0.1", str(first.port))
            until(lambda: replica.exists("quota:{p}:ledger:log"), "the replica has no log")
            replica.replicaof("NO", "ONE")
        budget.charge("videos.list", units=3)
        before = charges_at(ledger)
        assert [charge.units for charge in charges_at(then)] == [5]
        assert budget_of(then, LIMIT, folder=tmp_path).charge("videos.list").limits[0].used_units == 9
        assert charges_at(then)[:2] == before


@pytest.mark.parametrize(("kind", "machines"), [("redis", 3), ("redis", 1), ("sqlite", 3)])
def test_no_machine_is_granted_units_that_it_had_read(kind: str, machines: int, tmp_path: Path) -> None:
    outcome = Torture("all of it", tmp_path, 4, seed=3, on_redis=kind == "redis", machines=machines).run(1.0)
    assert outcome.strikes
    assert outcome.granted
    assert [*outcome.broken] == []
    assert (outcome.missing, outcome.twice, outcome.moved) == (set(), set(), set())
