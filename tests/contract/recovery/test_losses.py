"""Machines put back what their ledger loses, whatever their clocks say: nothing is granted twice or lost."""

from __future__ import annotations

from pathlib import Path

import pytest

import quota
from quota.budget import Budget
from quota.deciding.project import Project
from quota.deciding.repairs import repair
from quota.ledger.sqlite_log import SqliteLog
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SLACK_MS
from support.books import BOOK
from support.inbound import Clock
from support.losses import LedgerStorage, Site
from support.setup import NOW_MS, charges_at, limit
from support.torture import Torture

SIXTY, TEN = limit(60), limit(10)


@pytest.mark.parametrize("ahead_ms", [0, HOUR_MS // 2, 3 * HOUR_MS], ids=["", "after a repair", "of a clock far ahead"])
def test_a_charge_that_is_put_back_keeps_its_time_and_what_it_counts(site: Site, ahead_ms: int) -> None:
    machine = site.machine()
    site.now_ms += ahead_ms
    first = machine.budget(SIXTY).charge("videos.list", units=30)
    site.now_ms += 5_000 - ahead_ms
    repair(machine.ledger, "p", site.now_ms)
    site.machine("theirs").budget(SIXTY).settle(str(first.id), 20)
    assert machine.budget(SIXTY).usage()[0].used_units == 20
    before = charges_at(machine.ledger)
    site.empty()
    again = machine.budget(SIXTY)
    assert again.usage()[0].used_units == 20
    assert charges_at(machine.ledger) == before
    assert again.settle(str(first.id), 10).units == 20
    site.now_ms += DAY_MS + SLACK_MS + 1
    again.charge("videos.list")
    site.empty()
    machine.budget(SIXTY).usage()
    assert [charge.units for charge in charges_at(machine.ledger)] == [1], "it does not come back once it has left"


def test_each_charge_of_calls_that_were_decided_together_is_put_back(site: Site) -> None:
    budget = site.machine().budget(SIXTY)
    budget.charge_many([("videos.list", 20), ("videos.list", 30)])
    site.clear()
    assert budget.usage()[0].used_units == 50, "the journal of this machine lacks a charge"


def test_a_loss_without_charges_says_what_came_back(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    budget = site.machine().budget(SIXTY)
    charged = str(budget.charge("videos.list").id)
    copy = site.place.copy()
    budget.settle(charged, 2)
    site.place.overwrite(copy)
    assert budget.usage()[0].used_units == 2
    assert "project=p: the ledger lost corrections, and this machine put them back" in caplog.text


@pytest.mark.usefixtures("state_dir")
def test_configurations_of_one_machine_note_what_each_of_them_charged(
    ledger_place: LedgerStorage, tmp_path: Path
) -> None:
    for name, units in (("a", 1), ("a", 4), ("b", 1)):  # the first process makes the state folder
        config = tmp_path / name
        config.write_text(f'ledger.url = "{ledger_place.url}"\ncredentials.main = {{ api = "youtube-v3" }}\n')
        with quota.open(config) as session:
            assert session.budget().charge("videos.list", units=units).admitted
    ledger_place.empty()
    with quota.open(tmp_path / "b") as session:
        assert session.budget().usage()[0].used_units == 6


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


@pytest.mark.usefixtures("state_dir")
def test_charges_of_another_url_count_and_are_no_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tmp_path / "quota.toml"
    for name in ("one", "two"):
        config.write_text(f'[ledger]\nurl = "sqlite:///{name}.db"\n[credentials.main]\napi = "youtube-v3"\n')
        with quota.open(config) as session:
            assert session.budget().charge("videos.list").admitted
            assert session.project().reading.facts.losses == ()
            used_units = session.budget().usage()[0].used_units
            if name == "two":  # a real loss of a process that goes on
                (tmp_path / "two.db").rename(tmp_path / "gone.db")
                session.budget().peek("videos.list")
                assert [loss.units for loss in session.project().reading.facts.losses] == [2]
    assert used_units == 2
    assert "/one.db, and they count here, too: ledger.url was changed, or a program still has" in caplog.text


@pytest.mark.parametrize(
    ("skew_ms", "reason"), [(2 * DAY_MS, "limit"), (-2 * HOUR_MS, "clock"), (-2 * DAY_MS, "clock")]
)
def test_a_machine_whose_clock_is_wrong_charges_nothing_that_does_not_fit(
    site: Site, skew_ms: int, reason: str
) -> None:
    site.machine("theirs").budget(TEN).charge("videos.list", units=10)
    machine = site.machine()
    machine.skew_ms = skew_ms
    assert machine.budget(TEN).charge("videos.list").reason == reason
    assert len(charges_at(machine.ledger)) == 1


def test_a_machine_behind_takes_no_charge_for_one_of_the_future(site: Site) -> None:
    site.machine("theirs").budget(TEN).charge("videos.list", units=10)
    machine = site.machine()
    machine.skew_ms = -2 * DAY_MS
    assert machine.budget(TEN).charge("videos.list").ahead_ms == 0
    site.now_ms -= 2 * DAY_MS
    machine.skew_ms = 0
    assert site.machine().budget(TEN).charge("videos.list").ahead_ms == NOW_MS


def test_a_ledger_whose_clock_goes_back_refuses_nothing() -> None:
    clock = Clock()
    project = Project(SqliteLog(clock=clock), "p", wall=clock)
    budget = Budget(credential="main", book=BOOK, limits=SIXTY, project=project)
    for _ in range(3):
        assert budget.charge("videos.list").admitted
        clock.ms -= 3_000


@pytest.mark.parametrize("lost", [False, True], ids=["the log stays", "the log is lost"])
def test_a_charge_counts_again_after_clocks_were_a_day_ahead(site: Site, lost: bool) -> None:
    """Charges made meanwhile count beside it."""
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


@pytest.mark.parametrize(("kind", "machines"), [("redis", 3), ("sqlite", 1)])
def test_no_machine_is_granted_units_that_it_had_read(kind: str, machines: int, tmp_path: Path) -> None:
    outcome = Torture("all of it", tmp_path, 4, seed=3, on_redis=kind == "redis", machines=machines).run(1.0)
    assert outcome.strikes
    assert outcome.granted
    assert [*outcome.broken] == []
    assert (outcome.missing, outcome.twice, outcome.moved) == (set(), set(), set())
