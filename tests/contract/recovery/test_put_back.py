"""What a loss may meet: other machines, corrections, answers on their way, and a log that is long."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Thread
from typing import Any

import pytest

from quota.budget import Budget, project_of
from quota.deciding import corrections, decide, fence, losses, project
from quota.deciding.fence import Fence
from quota.errors import LedgerError
from quota.ledger.log import EPOCH, LEASE_MS, MAX_UNSEEN, Append, Log
from quota.rules.entry import START, Entry, Id
from quota.rules.facts import merged
from quota.terms.limits import DAY_MS
from support.losses import Fault, FaultyLog, Machine, Site
from support.processes import in_threads
from support.servers import until
from support.setup import charges_at, limit

HUNDRED = limit(100)


def used_units(machine: Machine) -> int:
    return machine.budget(HUNDRED).usage()[0].used_units


def test_two_machines_that_put_back_one_loss_report_one_loss(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> list[tuple[str, int]]:
        return [(loss.machine, loss.units) for loss in merged(project_of(ours).state.facts().losses)]

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
    assert lost() == [("ours, theirs", 7), ("theirs, ours", 8)]
    third = site.machine("third").budget(HUNDRED)
    third.charge("videos.list")
    site.empty()
    look(third, "third")
    look(ours, "ours")
    names = [loss.machine for loss in merged(project_of(third).state.facts().losses)]
    assert names == ["ours, theirs", "theirs, ours", "third"], "ours has told it of the first two"


def test_a_process_pauses_before_it_tries_again_to_put_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose memory is full may drop each log at once."""
    for name, value in (("WAIT_S", 0.5), ("LOOK_AGAIN_S", 0.6)):
        monkeypatch.setattr(losses, name, value)
    machine = site.machine()
    machine.budget(HUNDRED).charge("videos.list")
    site.empty()
    machine.ledger = log = FaultyLog(machine.ledger, dict.fromkeys(range(999), Fault(site.clear)), "replace")
    assert machine.budget(HUNDRED).charge("videos.list").reason == "counting"
    assert len(log.calls) <= 2


def test_a_fence_is_renewed_until_a_long_log_is_put_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else machines that take longer than its lease would end each other's fences without end."""
    monkeypatch.setattr(fence, "RENEW_S", 0.005)
    machine = site.machine()
    machine.budget(HUNDRED).charge("videos.list")
    site.empty()
    log = machine.ledger

    def wait() -> None:
        site.now_ms += LEASE_MS // 2
        until(lambda: log.begin("p").epoch.endswith(f":{site.now_ms + LEASE_MS}"), "its fence is not renewed")

    machine.ledger = FaultyLog(log, {1: Fault(wait)}, "replace")
    assert machine.budget(HUNDRED).charge("videos.list").admitted
    site.clear()
    monkeypatch.setattr(Thread, "ident", 1)  # a signal handler raises while its thread begins
    monkeypatch.setattr(Thread, "start", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        machine.budget(HUNDRED).charge("videos.list")


def test_machines_that_have_put_back_a_loss_stay_with_one_log(site: Site) -> None:
    budgets = [site.machine(name).budget(HUNDRED) for name in ("ours", "theirs")]
    for budget in budgets:
        budget.charge("videos.list")
    site.empty()
    epochs = []
    for budget in budgets * 3:
        budget.usage()
        epochs.append(budget.ledger.begin(budget.project).epoch)
    assert [epoch == epochs[-1] for epoch in epochs] == [False, True, True, True, True, True]


@pytest.mark.parametrize("settles", [True, False])
def test_a_process_compares_an_old_copy_before_it_settles_or_reads_on(site: Site, settles: bool) -> None:
    """Its reading may have been interrupted."""
    ours, theirs = (site.machine(name).budget(HUNDRED) for name in ("ours", "theirs"))
    theirs.charge("videos.list")
    copy = site.place.copy()
    ours.charge("videos.list", units=5)
    site.place.overwrite(copy)
    site.now_ms += 1
    charged = str(theirs.charge("videos.list", units=2).id)
    if settles:
        ours.settle(charged, 2 + 1)
    else:
        with pytest.raises(ZeroDivisionError):
            project_of(ours).in_turn(lambda: 1 // 0)
        corrections.catch_up(project_of(ours))
    assert ours.usage()[0].used_units == 1 + 5 + 2 + settles


@pytest.mark.usefixtures("real_walls")
def test_a_correction_behind_a_fence_that_is_given_back_counts(site: Site) -> None:
    """It came before the fence. A process sees it there when an older charge leaves, and cannot read on."""
    theirs = site.machine("theirs").budget(HUNDRED)
    theirs.charge("videos.list", units=10)
    site.now_ms += 1
    charged = str(theirs.charge("videos.list", units=20).id)
    assert project_of(theirs).keep()
    ours = site.machine("ours").budget(HUNDRED)
    assert ours.peek("videos.list").limits[0].used_units == 30
    theirs.settle(charged, 60)
    site.now_ms += DAY_MS - 1
    mover = Fence(theirs.ledger, "p", "mover")
    mover.take()
    assert ours.charge("videos.list").reason == "counting"
    theirs.ledger.change("p", {EPOCH: mover.epoch}, {EPOCH: mover.stood})
    assert ours.usage()[0].used_units == 60


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("last", ["ours", "theirs"])
def test_a_charge_keeps_its_last_units_though_an_old_copy_has_the_same(site: Site, last: str, settled: bool) -> None:
    budget = site.machine("ours").budget(HUNDRED)
    charged = str(budget.charge("videos.list", units=5).id)
    if settled:
        budget.settle(charged, 5)
    copy = site.place.copy()
    budget.settle(charged, 3)
    site.place.overwrite(copy)
    site.now_ms += 1
    site.machine(last).budget(HUNDRED).settle(charged, 5)
    assert budget.usage()[0].used_units == 5


@pytest.mark.parametrize("repeats", ["ours", "theirs"])
def test_a_correction_comes_back_whose_first_try_got_no_answer(site: Site, repeats: str) -> None:
    machine = site.machine()
    charged = str(machine.budget(HUNDRED).charge("videos.list", units=5).id)
    budget = machine.budget(HUNDRED)
    budget._project.log = FaultyLog(machine.ledger, dict.fromkeys((1, 2, 3), Fault(is_lost=True)), "append")
    with pytest.raises(LedgerError):
        budget.settle(charged, 60)
    again = site.machine(repeats).budget(HUNDRED)
    again.settle(charged, 60)
    site.clear()
    assert again.usage()[0].used_units == 60
    assert budget._project.reading.pending == {}


@pytest.mark.parametrize("charges", [0, 1])
def test_an_exhaustion_comes_back_that_nobody_had_read(site: Site, charges: int, caplog: Any) -> None:
    """The ledger loses it as soon as it has it."""
    machine = site.machine()
    budget = machine.budget(HUNDRED)
    for _ in range(charges):
        budget.charge("videos.list")
    budget.exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    site.clear()
    assert budget.charge("videos.list").reason == "exhausted"
    assert "the ledger lacked facts that this machine had noted, and this machine added them" in caplog.text
    site.clear()
    assert machine.budget(HUNDRED).reopen("units", "upstream was wrong")
    site.clear()
    assert budget.charge("videos.list").reason == "ok"


@pytest.mark.parametrize("call", [3, 4])
def test_a_bucket_stays_closed_that_upstream_closes_during_a_put_back(site: Site, call: int) -> None:
    ours, theirs = site.machine("ours"), site.machine("theirs")
    ours.budget(HUNDRED).charge("videos.list")
    site.empty()
    informed, budget = theirs.budget(HUNDRED), ours.budget(HUNDRED)
    informed.charge("videos.list")
    closes = Fault(lambda: informed.exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded"))
    budget._project.log = log = FaultyLog(ours.ledger, {call: closes})
    assert budget.charge("videos.list").reason == "exhausted"
    assert log.calls[2:4] == ["read", "fence"]


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("change", ["exhaust", "grant"])
def test_a_bucket_stays_closed_though_facts_change_in_an_emptied_ledger(site: Site, change: str, is_new: bool) -> None:
    machine = site.machine()
    budget = machine.budget(HUNDRED)
    budget.charge("videos.list")
    budget.exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    assert budget.charge("videos.list").reason == "exhausted"
    site.clear()
    budget = machine.budget(HUNDRED) if is_new else budget
    if change == "exhaust":
        budget.exhaust("searches", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    else:
        budget.grant([])
    assert budget.charge("videos.list").reason == "exhausted"


def test_a_bucket_stays_closed_though_another_machine_puts_back_older_facts(site: Site) -> None:
    machine, theirs = site.machine(), site.machine("theirs").budget(HUNDRED)
    budget = machine.budget(HUNDRED)
    charged = str(budget.charge("videos.list").id)
    budget.exhaust("searches", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    theirs.charge("videos.list")
    machine.budget(HUNDRED).exhaust("units", site.now_ms, site.now_ms + DAY_MS, "403 quotaExceeded")
    budget.refund(charged)  # reads that the facts have changed
    site.clear()
    theirs.usage()
    assert budget.charge("videos.list").reason == "exhausted"


OLD_COPY = ["another process, on an old copy", "a third process, on an old copy", "on an old copy, at midnight"]


@pytest.mark.parametrize("who", ["another process", "another thread", *OLD_COPY])
def test_a_charge_whose_answer_came_after_the_loss_is_put_back_before_the_next_call(site: Site, who: str) -> None:
    """Its own process may never ask again. Others of its machine go on with the new log, and look for it there."""
    machine = site.machine()
    site.now_ms -= site.now_ms % DAY_MS + 1 if "midnight" in who else 0
    slow, quick, asked = machine.budget(HUNDRED), machine.budget(HUNDRED), machine.budget(HUNDRED)
    quick = slow if who == "another thread" else quick
    quick.charge("videos.list")
    slow.peek("videos.list")
    asked = asked if who == OLD_COPY[1] and asked.peek("videos.list") else quick
    copy = site.place.copy()

    def lose() -> None:
        slow._project.log = machine.ledger
        if who in OLD_COPY:
            site.place.overwrite(copy)
            site.now_ms += 1
        else:
            site.clear()
        in_threads(charge, (quick, 3))

    slow._project.log = FaultyLog(machine.ledger, {1: Fault(after=lose)}, "append")
    assert slow.charge("videos.list", units=50).admitted
    assert asked.charge("videos.list").limits[0].used_units == 1 + 3 + 50 + 1
    assert sorted(charge.units for charge in charges_at(machine.ledger)) == [1, 1, 3, 50]


@pytest.mark.parametrize("who", ["another process", "another thread", "another process, at midnight"])
def test_a_charge_is_put_back_that_was_made_and_lost_while_another_was_on_its_way(site: Site, who: str) -> None:
    """The other charge has the later time, and its process asks no more."""
    machine = site.machine()
    site.now_ms -= site.now_ms % DAY_MS + 1 if "midnight" in who else 0
    slow, quick = machine.budget(HUNDRED), machine.budget(HUNDRED)
    quick = slow if who == "another thread" else quick
    quick.charge("videos.list")
    slow.peek("videos.list")
    copy = site.place.copy()

    def lose() -> None:
        slow._project.log = machine.ledger
        in_threads(charge, (quick, 50))
        site.place.overwrite(copy)
        site.now_ms += 1

    slow._project.log = FaultyLog(machine.ledger, {1: Fault(lose)}, "append")
    assert slow.charge("videos.list", units=3).admitted
    assert machine.budget(HUNDRED).charge("videos.list").limits[0].used_units == 1 + 3 + 50 + 1


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
        site.clear()
        theirs.peek("videos.list")

    budget._project.log = FaultyLog(machine.ledger, {1: Fault(after=lose, is_lost=True)}, "append")
    decision = budget.charge("videos.list", units=units)
    assert (decision.admitted, decision.limits[0].used_units) == (True, 1 + units)
    assert [charge.units for charge in charges_at(machine.ledger)] == [1, units]
    site.empty()
    assert used_units(machine) == 1 + units


def charge(budget: Budget, units: int) -> None:
    assert budget.charge("videos.list", units=units).limits[0].used_units == 1 + units


THOUSANDS = 9
DAY, DAYS = limit(100_000), limit(100_000, 3 * DAY_MS, name="days")


@pytest.mark.parametrize("call", range(3, 7))
def test_a_correction_does_not_come_back_without_its_charge(site: Site, call: int) -> None:
    """Another machine made the charge, and an old copy comes back while this machine settles it."""
    machine = site.machine()
    machine.budget(limit(30)).charge("videos.list", units=20)
    copy = site.place.copy()
    charged = str(site.machine("theirs").budget(limit(30)).charge("videos.list", units=10).id)
    budget = machine.budget(limit(30))
    budget._project.log = FaultyLog(machine.ledger, {call: Fault(after=lambda: site.place.overwrite(copy))})
    budget.settle(charged, 3)
    assert [state.used_units for state in (*budget.usage(), *machine.budget(limit(30)).usage())] == [23, 23]


def test_a_put_back_names_the_longest_window_before_anybody_trims(site: Site) -> None:
    machine, month = site.machine(), limit(100, 30 * DAY_MS)
    machine.budget(month).charge("videos.list", units=60)
    site.empty()
    site.now_ms += 10 * DAY_MS
    losses.put_back(project_of(machine.budget(month)))
    daily = site.machine("theirs").budget(HUNDRED)
    for _ in range(2):
        daily.charge("videos.list")
        project_of(daily)._trim()
        site.now_ms += 2 * project.TRIM_AFTER_MS
    assert machine.budget(month).charge("videos.list").limits[0].used_units == 63


def charge_thousands(site: Site, ledger: Log) -> None:
    """Others have charged, and kept what they counted."""
    for n in range(THOUSANDS):
        made = [Entry(START, 1, "units", "videos.list", "", "", f"{n}-{m}") for m in range(1_000)]
        beginning = ledger.begin("p")
        ask = Append(beginning.epoch, beginning.tip, made, 2**53, new_epoch="e")
        assert ledger.append("p", ask).word == "APPENDED"
        site.now_ms += 1


def test_a_machine_without_a_journal_reads_entries_that_it_only_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a piece after each decision. A loss takes no entry that it has read."""
    monkeypatch.setattr(project, "READ_BACK_S", 0.0)
    others = site.machine("others")
    charge_thousands(site, others.ledger)
    assert others.budget(DAY).usage()[0].used_units == 1_000 * THOUSANDS
    opened = others.budget(DAY)
    opened.usage()
    opened._project.keep()
    budget = site.machine().budget(DAY)
    for n in range(3):
        assert budget.charge("videos.list").limits[0].used_units == 1_000 * THOUSANDS + n + 1
    site.empty()
    assert site.machines[-1].budget(DAY).usage()[0].used_units == 3 * MAX_UNSEEN + 3


def test_a_machine_far_behind_settles_and_charges_while_others_go_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections, "MAX_TRIES", 2)
    settling, charging = (site.machine(name).budget(DAY) for name in ("settling", "charging"))
    charged = [budget.charge("videos.list").id for budget in (settling, charging)]
    charge_thousands(site, site.machine("others").ledger)
    settling.settle(charged[0] or "", 0)
    assert charging.charge("videos.list").limits[0].used_units == 1_000 * THOUSANDS + 2


class Slow:
    """A ledger that takes its time for each piece of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.now_s, self.pieces = 0.0, 0

    def begin(self, *args: Any) -> Any:
        self.now_s += 1.0
        return self._log.begin(*args)

    def read(self, name: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        self.now_s += 0.2
        self.pieces += 1
        return self._log.read(name, after, through, min(count, 1_000))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


@pytest.mark.parametrize("restarted", [False, True], ids=["one process", "killed each time"])
def test_a_longer_limit_is_refused_until_it_has_read_the_log_and_goes_on_where_it_was(
    site: Site, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = site.machine()
    charge_thousands(site, machine.ledger)
    machine.budget(DAY).charge("videos.list")
    slow = Slow(machine.ledger)
    for module in (decide, project):
        monkeypatch.setattr(module, "elapsed_s", lambda: slow.now_s)
    monkeypatch.setattr(decide, "COUNT_WITHIN_S", 0.7)
    monkeypatch.setattr(project, "MAX_READ", 1_000)
    machine.ledger = slow
    budget, refused = machine.budget(DAYS), 0
    while (decision := budget.charge("videos.list")).reason == "counting" and refused < 9:
        refused += 1
        assert decision.retry_at_ms is not None
        if restarted:
            budget = machine.budget(DAYS)
    assert (refused, decision.limits[0].used_units) == (2, 1_000 * THOUSANDS + 2)
    assert slow.pieces <= THOUSANDS + 2
