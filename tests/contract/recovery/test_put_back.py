"""What a loss may meet: other machines, corrections, answers on their way, a union that was killed in the middle."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from quota.budget import project_of
from quota.deciding import losses
from quota.errors import LedgerError, UnknownCharge
from quota.ledger.log import LEASE_MS, MAX_READ
from quota.rules.entry import END, START
from quota.terms.limits import DAY_MS
from support.losses import RedisStorage, Site
from support.setup import charges_at, limit
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quota.budget import Budget
    from quota.ledger.log import Append, Log, Reply
    from support.losses import Machine
    from support.servers import RedisServer

HUNDRED = limit(100)


def used_units(machine: Machine) -> int:
    """What a new process of this machine counts."""
    return machine.budget(HUNDRED).usage()[0].used_units


@pytest.mark.parametrize("key", ["log", "state", "corrected"])
def test_a_key_that_was_evicted_alone_comes_back_with_all_it_had(server: RedisServer, tmp_path: Path, key: str) -> None:
    storage = RedisStorage(server.url)
    site = Site(storage, tmp_path)
    machine = site.machine()
    budget = machine.budget(HUNDRED)
    charged = budget.charge("videos.list", units=10)
    budget.charge("videos.list", units=3)
    budget.settle(str(charged.id), 7)
    before = charges_at(machine.ledger)
    assert storage.client.delete(f"quota:{{p}}:ledger:{key}") == 1
    assert budget.usage()[0].used_units == 10
    assert charges_at(machine.ledger) == before
    assert machine.ledger.corrections("p", [before[0].key])[before[0].key].units == 7
    site.stop()
    storage.client.close()


def test_what_two_machines_put_back_of_one_loss_is_one_loss(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds what it alone saw. Another loss is another one, also where nothing was charged between."""

    def lost() -> list[tuple[str, int]]:
        return [(loss.machine, loss.units) for loss in losses.merged(losses.losses(project_of(ours)))]

    def look(budget: Budget, name: str) -> None:
        monkeypatch.setattr("quota.deciding.losses.machine_name", lambda: name)
        site.now_ms += 1_000
        budget.usage()

    ours, theirs = (site.machine(name).budget(HUNDRED) for name in ("ours", "theirs"))
    ours.charge("videos.list", units=3)
    theirs.charge("videos.list", units=4)
    site.empty()
    look(ours, "ours")
    look(theirs, "theirs")
    assert lost() == [("ours, theirs", 7)]
    ours.charge("videos.list")
    site.empty()
    look(theirs, "theirs")
    look(ours, "ours")
    assert lost() == [("theirs, ours", 8)]


@pytest.mark.parametrize("first", ["who saw more", "who saw less"])
def test_of_two_branches_of_corrections_the_later_one_wins(site: Site, first: str) -> None:
    """One machine corrects a charge, an old copy lacks that, and another machine corrects the charge there."""
    ours, theirs = site.machine("ours"), site.machine("theirs")
    charged = str(ours.budget(HUNDRED).charge("videos.list", units=10).id)
    copy = site.place.copy()
    site.now_ms += 1
    ours.budget(HUNDRED).settle(charged, 8)
    site.restore(copy)
    theirs.budget(HUNDRED).settle(charged, 6)
    machines = [ours, theirs] if first == "who saw more" else [theirs, ours]
    for machine in (*machines, *machines):
        used_units(machine)
    assert [used_units(machine) for machine in machines] == [6, 6]
    corrections = [x for x in ours.ledger.read("p", START, END, MAX_READ) if x.kind == "correction"]
    assert [(x.before_units, x.units) for x in corrections] == [(10, 8), (8, 6)]


def test_what_upstream_said_comes_back(site: Site) -> None:
    """A bucket that was closed stays closed."""
    ours, theirs = site.machine("ours"), site.machine("theirs")
    ours.budget(HUNDRED).exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    assert theirs.budget(HUNDRED).charge("videos.list").reason == "exhausted"
    site.empty()
    assert theirs.budget(HUNDRED).charge("videos.list").reason == "exhausted"
    assert site.machine("new").budget(HUNDRED).charge("videos.list").reason == "exhausted"


def test_a_machine_that_knows_nothing_may_charge_first_and_then_counts_what_the_others_put_back(site: Site) -> None:
    ours = site.machine("ours")
    ours.budget(HUNDRED).charge("videos.list", units=90)
    site.empty()
    new = site.machine("new").budget(HUNDRED)
    assert new.charge("videos.list", units=20).limits[0].used_units == 20
    site.now_ms += 1
    assert used_units(ours) == 110
    assert new.charge("videos.list").limits[0].used_units == 110
    assert [charge.units for charge in charges_at(ours.ledger)] == [90, 20]


class Late:
    """A ledger whose answer to a charge arrives late, or never: first something else happens."""

    def __init__(self, log: Log, meanwhile: Callable[[], object], *, never: bool = False) -> None:
        self._log, self._meanwhile, self._never = log, meanwhile, never

    def append(self, name: str, request: Append) -> Reply:
        reply = self._log.append(name, request)
        if reply.word == "APPENDED":
            self._meanwhile()
            if self._never:
                raise LedgerError("the answer is lost")
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


@pytest.mark.parametrize("who", ["another process", "another thread"])
def test_a_charge_whose_answer_came_after_the_loss_was_mended_is_put_back_before_the_next_call(
    site: Site, who: str
) -> None:
    """Whoever made it may never ask again. The others of its machine go on with the new log, and look for it there."""
    machine = site.machine()
    slow, quick = machine.budget(HUNDRED), machine.budget(HUNDRED)
    if who == "another thread":
        quick = slow
    quick.charge("videos.list")
    slow.peek("videos.list")

    def lose() -> None:
        slow._project.log = machine.ledger
        clear(site)
        in_threads(charge, (quick, 3))

    slow._project.log = Late(machine.ledger, lose)
    assert slow.charge("videos.list", units=50).admitted
    assert quick.charge("videos.list").limits[0].used_units == 1 + 3 + 50 + 1
    assert sorted(charge.units for charge in charges_at(machine.ledger)) == [1, 1, 3, 50]


@pytest.mark.parametrize("read", [True, False], ids=["others had read it", "nobody had read it"])
@pytest.mark.parametrize("units", [40, 60])
def test_a_charge_whose_answer_was_lost_with_its_log_counts_once(site: Site, read: bool, units: int) -> None:
    """Where others had read it, they have put it back before it is tried again: then it needs no room beside itself."""
    machine, theirs = site.machine(), site.machine("theirs").budget(HUNDRED)
    budget = machine.budget(HUNDRED)
    theirs.charge("videos.list")
    budget.peek("videos.list")

    def lose() -> None:
        budget._project.log = machine.ledger
        if read:
            theirs.peek("videos.list")
        clear(site)
        theirs.peek("videos.list")

    budget._project.log = Late(machine.ledger, lose, never=True)
    decision = budget.charge("videos.list", units=units)
    assert (decision.admitted, decision.limits[0].used_units) == (True, 1 + units)
    assert [charge.units for charge in charges_at(machine.ledger)] == [1, units]
    site.empty()
    assert used_units(machine) == 1 + units


def charge(budget: Budget, units: int) -> None:
    assert budget.charge("videos.list", units=units).limits[0].used_units == 1 + units


def clear(site: Site) -> None:
    """Lose all that a ledger has, also a file that others have open."""
    site.now_ms += 1
    if isinstance(site.place, RedisStorage):
        site.place.empty()
        return
    with closing(sqlite3.connect(site.place.url.removeprefix("sqlite:///"))) as db, db:
        for table in ("log", "corrected", "state"):
            db.execute(f"DELETE FROM {table}")  # noqa: S608


@pytest.mark.parametrize("how", ["settled", "refunded"])
def test_a_charge_can_be_corrected_right_after_its_log_was_lost(site: Site, how: str) -> None:
    """Nobody has noticed the loss yet."""
    machine = site.machine()
    charged = str(machine.budget(HUNDRED).charge("videos.list", units=10).id)
    site.empty()
    budget = machine.budget(HUNDRED)
    assert (budget.settle(charged, 4) if how == "settled" else budget.refund(charged)).units == 10
    assert used_units(machine) == (4 if how == "settled" else 0)
    with pytest.raises(UnknownCharge):
        budget.settle(f"{site.now_ms}-of-nobody", 1)


def test_a_correction_waits_for_a_union_that_was_killed_in_the_middle(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fence stands until its lease is over."""
    monkeypatch.setattr(losses, "WAIT_S", 0.02)
    machine = site.machine()
    budget = machine.budget(HUNDRED)
    charged = str(budget.charge("videos.list", units=10).id)
    machine.ledger.fence("p", machine.ledger.begin("p").epoch, "of a killed process")
    over = threading.Timer(0.1, lambda: setattr(site, "now_ms", site.now_ms + LEASE_MS))
    over.start()
    assert budget.settle(charged, 4).units == 10
    over.join()
    assert used_units(machine) == 4
