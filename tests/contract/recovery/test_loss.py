"""A ledger that lost something: emptied, restored from an old copy, deleted. It gives no budget back."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.budget import Budget
from quota.common.clock import NEVER
from quota.errors import LedgerError
from quota.ledger.contract import MIN_RETENTION_MS, ChargeRequest, ChargeResult, Expected, read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.identity import Identity
from quota.ledger.unlogged import UnloggedUsage
from quota.recovery import high_water_mark as high_water_mark
from quota.recovery import knowledge, loss, slices
from quota.recovery.high_water_mark import HighWaterMark
from quota.recovery.registry import END_WITHIN_S, close_high_water_mark, open_high_water_mark
from quota.recovery.watermark_file import SLOT_BYTES, WatermarkFile
from quota.recovery.watermark_folder import make_room, watermark_path
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.books import BOOK
from support.interrupts import Interrupted, at_place
from support.losses import Machine
from support.processes import Children
from support.servers import RedisServer
from support.setup import limit
from support.users import not_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quota.ledger.contract import LimitCheck
    from quota.ledger.entry import Entry, Id
    from support.losses import LedgerStorage

NOW = 1_793_000_000_000


class Site:
    """One ledger, some machines, and the time."""

    def __init__(self, storage: LedgerStorage, folder: Path) -> None:
        self.storage = storage
        self.folder = folder
        self.now_ms = NOW
        self.machines: list[Machine] = []

    def machine(self, name: str = "a") -> Machine:
        self.machines.append(Machine(name, self.folder, self.storage.url, lambda: self.now_ms))
        return self.machines[-1]

    def empty(self) -> None:
        self.storage.empty()
        self.now_ms += 1

    def restore(self, copy: object) -> None:
        self.storage.restore(copy)
        self.now_ms += 1


@pytest.fixture
def site(ledger_place: LedgerStorage, tmp_path: Path) -> Iterator[Site]:
    made = Site(ledger_place, tmp_path)
    yield made
    for machine in made.machines:
        machine.stop()


def charge(budget: Budget, times: int = 1, units: int = 1) -> int:
    """Charge so often; the units used afterwards in the first limit."""
    for _ in range(times):
        decision = budget.charge("videos.list", units=units)
        assert decision.admitted, decision
    return decision.limits[0].used_units


# -- emptied -----------------------------------------------------------------------------------------------------------


def test_a_charge_that_is_lost_while_its_answer_waits_to_be_recorded_is_made_again(site: Site) -> None:
    """Another task restores what was missing first, and does not know of this charge."""
    machine = site.machine()
    budget, mark = machine.budget(limit(10)), machine.high_water_mark
    assert budget.charge("videos.list").admitted
    record, happened = mark.record, []

    def record_late(checks: Sequence[LimitCheck], result: ChargeResult) -> bool:
        """Something else happens between the ledger's answer and what is done with it."""
        if not happened:
            happened.append(True)
            site.empty()
            assert budget.charge("videos.list").admitted
        return record(checks, result)

    mark.record = record_late  # type: ignore[method-assign]
    decision = budget.charge("videos.list")
    assert decision.admitted
    assert budget.usage()[0].used_units == 3
    assert decision.id in {entry.id for entry in read_entries(site.machines[0].ledger, "p", 0, NEVER)}


@pytest.mark.topology
def test_an_emptied_ledger_counts_what_this_machine_saw(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 8)
    site.empty()
    assert charge(budget) == 9
    assert charge(budget) == 10
    assert not budget.charge("videos.list").admitted
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    told = [said for said in warned if not said.startswith("ledger_evicts ")]  # to a user without INFO
    assert len(told) == 1
    assert told[0].startswith("ledger_behind project=p")
    assert "lost_units=8 " in told[0]


@pytest.mark.topology
def test_several_calls_together_restore_what_was_lost_as_one_does(site: Site) -> None:
    machine = site.machine()
    budget = machine.budget(limit(20))
    assert budget.charge_many(["videos.list"] * 5)[0].admitted
    copy = site.storage.copy()
    site.now_ms += 1
    assert budget.charge_many(["videos.list"] * 6)[0].limits[0].used_units == 11
    site.restore(copy)
    decisions = budget.charge_many(["videos.list"] * 4)
    assert decisions[0].limits[0].used_units == 15
    entries = list(read_entries(machine.ledger, "p", 0, NEVER))
    assert [entry.id for entry in entries[5:]] == [decision.id for decision in decisions]
    refused = budget.charge_many(["videos.list"] * 6)
    assert {(one.admitted, one.refused_by) for one in refused} == {(False, "day")}
    assert len(list(read_entries(machine.ledger, "p", 0, NEVER))) == 9


def test_what_was_lost_leaves_its_window_hour_by_hour(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 4)
    site.now_ms += HOUR_MS
    charge(budget, 4)
    site.empty()
    for needs, at_ms, used in ((3, _full_hour(NOW) + DAY_MS, 4), (7, NOW + HOUR_MS + DAY_MS, 0)):
        refused = budget.charge("videos.list", units=needs)
        assert not refused.admitted
        assert refused.retry_at_ms == at_ms
        site.now_ms = at_ms - 1
        assert not budget.charge("videos.list", units=needs).admitted
        site.now_ms += 1
        assert budget.usage()[0].used_units == used


def test_within_an_hour_all_counts_as_long_as_the_newest(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    site.now_ms = _full_hour(NOW) + 1
    charge(budget, 4)
    site.now_ms += HOUR_MS - 1
    charge(budget, 4)
    last_ms = site.now_ms
    site.empty()
    refused = budget.charge("videos.list", units=3)
    assert refused.retry_at_ms == last_ms + DAY_MS, "which of them is older, nobody knows any more"


def test_the_log_is_read_once_an_hour_and_not_for_a_short_window(site: Site) -> None:
    """A decision is one question to the ledger. A slice that is over is one more, however many limits are checked."""
    budget = site.machine().budget(limit(100_000), limit(100_000, 1_500, name="burst"))
    read, spans = budget.ledger.read, []

    def counting(project: str, after: Id, until_ms: int, count: int, within_s: float | None) -> Sequence[Entry]:
        spans.append((after[0] + 1, until_ms))
        return read(project, after, until_ms, count, within_s)

    budget.ledger.read = counting  # type: ignore[method-assign,assignment]
    site.now_ms = _full_hour(NOW)
    for _ in range(60):
        charge(budget)
        site.now_ms += HOUR_MS // 6
    since_ms = _full_hour(NOW) - HOUR_MS
    hours = [(at_ms + 1, at_ms + HOUR_MS) for at_ms in range(since_ms, site.now_ms - HOUR_MS, HOUR_MS)]
    assert spans[1:] == hours, "the first read what there was"


def _full_hour(ms: int) -> int:
    """The first full hour that is not earlier."""
    return -(-ms // HOUR_MS) * HOUR_MS


@pytest.mark.parametrize("seed", range(6))
def test_a_loss_costs_little_more_than_what_was_spent(site: Site, seed: int) -> None:
    """Two machines spend for two days; the ledger is emptied or set back, and both go on looking.

    Never less counts than what was spent in the window. More does: of each hour all as long as its end, and what had
    begun to leave the window when the loss was found, an hour's worth, as long as the newest.
    """
    dice = random.Random(seed)
    budgets = [site.machine(name).budget(limit(10_000), limit(5_000, 3 * HOUR_MS, name="short")) for name in "ab"]
    spent: list[tuple[int, int]] = []
    copy = None
    for n in range(150):
        site.now_ms += dice.choice((0, 1, HOUR_MS // 10, HOUR_MS // 3, HOUR_MS))
        units = dice.randint(1, 9)
        dice.choice(budgets).charge("videos.list", units=units)
        spent.append((site.now_ms, units))
        if n == 120:
            copy = site.storage.copy()
    for budget in budgets:
        budget.peek("videos.list")
    site.restore(copy) if seed % 2 else site.empty()
    lost_ms = site.now_ms
    for _ in range(60):
        used = [state.used_units for state in dice.choice(budgets).usage()]
        for now_used, window_ms in zip(used, (DAY_MS, 3 * HOUR_MS), strict=True):
            cell_ms = window_ms // 24
            since_ms = site.now_ms - window_ms
            truth = sum(units for ms, units in spent if ms > since_ms)
            rounded = sum(units for ms, units in spent if ms > since_ms - cell_ms)
            leaving = sum(units for ms, units in spent if 0 <= ms - (lost_ms - window_ms) <= 2 * cell_ms)
            assert truth <= now_used <= rounded + leaving
        site.now_ms += HOUR_MS // 2
    assert budgets[0].usage()[0].used_units == 0


def test_new_charges_expire_by_themselves_beside_unlogged_usage(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 3)
    site.now_ms += HOUR_MS
    site.empty()
    charge(budget, 7)
    refused = budget.charge("videos.list", units=4)
    assert refused.retry_at_ms == site.now_ms + DAY_MS, "first the 3 unlogged units expire, then the first charges"
    assert budget.charge("videos.list", units=3).retry_at_ms == NOW + DAY_MS
    site.now_ms += DAY_MS
    assert charge(budget, units=10) == 10


def test_a_machine_that_saw_less_is_told_of_the_rest_by_one_that_saw_more(site: Site) -> None:
    first, second = site.machine("a").budget(limit(10)), site.machine("b").budget(limit(10))
    charge(first, 3)
    charge(second, 4)
    site.empty()
    assert charge(first) == 3 + 1, "it saw 3"
    assert charge(second) == 7 + 2, "the other saw 7, and the larger report stands"
    assert charge(first) == 7 + 3


def test_a_machine_that_knows_nothing_gets_what_others_put_back(site: Site) -> None:
    known = site.machine("a").budget(limit(10))
    charge(known, 8)
    site.empty()
    charge(known)
    assert charge(site.machine("new").budget(limit(10))) == 10


def test_a_peek_and_a_status_notice_it_too(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 8)
    site.empty()
    assert budget.peek("videos.list", units=2).admitted
    assert not budget.peek("videos.list", units=3).admitted
    (state,) = budget.usage()
    assert (state.used_units, state.unlogged_units) == (8, 8)


def test_every_limit_has_its_own_share(site: Site) -> None:
    """Also those that the next call does not ask about, calls, and upstream's own day."""
    selector = Selector(buckets=("units",))
    limits = (
        limit(1_000),
        limit(300, name="search", methods=("search.list",)),
        limit(5, name="calls", count="calls"),
        Limit("pacific", 900, View(selector, Calendar("day", "America/Los_Angeles")), 900, 0),
    )
    budget = site.machine().budget(*limits)
    assert budget.charge("search.list").admitted
    assert budget.charge("search.list").admitted
    assert budget.charge("videos.list").admitted
    site.empty()
    after = budget.charge("videos.list")
    assert {state.name: state.used_units for state in after.limits} == {"day": 202, "calls": 4, "pacific": 202}
    search = budget.charge("search.list")
    assert {state.name: state.used_units for state in search.limits} == {
        "day": 302,
        "search": 300,
        "calls": 5,
        "pacific": 302,
    }
    assert budget.charge("search.list").refused_by is not None


def test_unlogged_usage_of_a_calendar_limit_counts_until_its_edge(site: Site) -> None:
    pacific = Limit("pacific", 10, View(Selector(), Calendar("day", "America/Los_Angeles")), 10, 0)
    budget = site.machine().budget(pacific)
    charge(budget, 8)
    site.empty()
    refused = budget.charge("videos.list", units=3)
    assert refused.retry_at_ms == pacific.view.window.edges(NOW)[1]  # type: ignore[union-attr]
    site.now_ms = refused.retry_at_ms
    assert charge(budget, units=10) == 10


def test_a_paced_limit_says_when_it_has_room_beside_unlogged_usage(site: Site) -> None:
    pacific = Limit("pacific", 800, View(Selector(), Calendar("day", "UTC")), 800, 0, paced=True)
    budget = site.machine().budget(pacific)
    while budget.charge("videos.list", units=10).admitted:
        pass
    site.empty()
    refused = budget.charge("videos.list", units=10)
    assert not refused.admitted
    assert refused.retry_at_ms is not None
    site.now_ms = refused.retry_at_ms - 1
    assert not budget.charge("videos.list", units=10).admitted
    site.now_ms += 1
    assert budget.charge("videos.list", units=10).admitted


# -- a long log --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three charges are read with each decision, however short ago the last were read."""
    monkeypatch.setattr(high_water_mark, "PIECE", 3)
    monkeypatch.setattr(high_water_mark, "READ_SHARE", 1e9)


def _charged_by_others(site: Site) -> int:
    """Four charges in one hour, four in the next, and an hour later; who made them saw them in another folder. Returns
    when the first hour ends."""
    other = site.machine("other").budget(limit(100))
    site.now_ms = _full_hour(NOW) + 1
    charge(other, 4)
    site.now_ms += HOUR_MS
    charge(other, 4)
    site.now_ms += HOUR_MS
    return _full_hour(NOW) + HOUR_MS


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
    site.now_ms = _full_hour(NOW)
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


# -- an old copy -------------------------------------------------------------------------------------------------------


def test_what_an_old_copy_lacks_counts_on_and_what_it_has_counts_once(site: Site) -> None:
    """L18."""
    budget = site.machine().budget(limit(100))
    charge(budget, 5)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(budget, 3)
    site.restore(copy)
    assert charge(budget) == 9
    (state,) = budget.usage()
    assert (state.used_units, state.unlogged_units) == (9, 3)


def test_charges_made_before_anybody_noticed_are_added_to_what_was_lost(site: Site) -> None:
    """A machine that had seen less than the copy goes on as before; then one comes that had seen more."""
    ignorant = site.machine("b").budget(limit(100))
    budget = site.machine("a").budget(limit(100))
    charge(budget, 5)
    charge(ignorant)
    copy = site.storage.copy()
    charge(budget, 3)
    site.restore(copy)
    assert charge(ignorant, 2) == 8, "nobody could know"
    assert charge(budget) == 6 + 3 + 2 + 1


def test_one_loss_after_the_other(site: Site) -> None:
    budget = site.machine().budget(limit(100))
    charge(budget, 5)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(budget, 3)
    for n in range(1, 6):
        site.restore(copy) if n % 2 else site.empty()
        assert charge(budget) == 8 + n


def test_what_had_expired_when_the_loss_was_reported_is_not_taken_off_it(site: Site) -> None:
    """Who looked long ago saw charges that whoever reported the loss did not count any more."""
    early, late = site.machine("a").budget(limit(100)), site.machine("b").budget(limit(100))
    charge(early, 5)
    site.now_ms += DAY_MS - HOUR_MS
    charge(late, 3)
    assert early.peek("videos.list").admitted
    copy = site.storage.copy()
    site.now_ms += 2 * HOUR_MS
    assert charge(late) == 4
    site.empty()
    assert charge(early) >= 4
    assert charge(late) >= 6
    site.restore(copy)
    assert charge(early) >= 5, "it has not seen what the other spent"
    assert charge(late) >= 8


def test_what_expires_between_two_reports_of_a_loss_is_not_taken_off_the_later_one(site: Site) -> None:
    """L17. The first that asks says that 300 units are still there. When the other asks, they have expired."""
    first, second = site.machine("a").budget(limit(1_000)), site.machine("b").budget(limit(1_000))
    charge(first, units=300)
    site.now_ms += HOUR_MS
    charge(first)
    copy = site.storage.copy()
    site.now_ms += HOUR_MS
    charge(first, units=10)
    site.now_ms += HOUR_MS // 2
    assert charge(second, units=50) == 361
    site.now_ms += 2 * HOUR_MS
    site.restore(copy)
    assert first.usage()[0].used_units == 311, "of the 50 it knows nothing"
    site.now_ms = NOW + DAY_MS + 2 * HOUR_MS - HOUR_MS // 10
    assert second.usage()[0].used_units == 60
    assert first.usage()[0].used_units == 60


def test_what_was_charged_on_a_copy_before_anybody_noticed_is_not_taken_off_what_the_copy_lacks(site: Site) -> None:
    """L17. Then another copy lost more, and each machine reports another part of what it lacks of the same epoch."""
    first, second = site.machine("a").budget(limit(1_000)), site.machine("b").budget(limit(1_000))
    charge(second)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(first, units=50)
    site.restore(copy)
    site.now_ms += 10
    assert charge(second, units=10) == 11, "nobody could know"
    copy = site.storage.copy()
    charge(second, units=3)
    site.restore(copy)
    assert first.usage()[0].used_units == 61
    assert second.usage()[0].used_units >= 61
    assert charge(first) >= 62


def test_what_a_copy_brought_back_is_missed_when_it_goes_again(site: Site) -> None:
    """Emptied, restored from a copy, emptied again; in between the process only looked, at another limit."""
    machine = site.machine()
    budget, other = machine.budget(limit(100)), machine.budget(limit(50, HOUR_MS, name="other"))
    charge(budget, 5)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(budget, 3)
    for happen in (site.empty, lambda: site.restore(copy), site.empty):
        happen()
        other.peek("videos.list")
    assert charge(budget) == 9


def test_what_survived_one_loss_and_fell_to_the_next_counts_once(site: Site) -> None:
    """One machine asks between the two losses, the other only after both."""
    first, second = site.machine("a").budget(limit(100)), site.machine("b").budget(limit(100))
    charge(second, 5)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(second, 2)
    charge(first)
    site.restore(copy)
    assert charge(first) == 9
    site.empty()
    assert charge(first) == 10
    assert charge(second) == 11


def test_so_too_where_the_other_had_seen_more_of_the_first(site: Site) -> None:
    """What it reports of the first loss holds all that survived that one, and is counted for the second already."""
    first, second = site.machine("a").budget(limit(100)), site.machine("b").budget(limit(100))
    charge(second, 5)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(first)
    charge(second, 2)
    site.restore(copy)
    assert charge(first) == 7, "of what the other spent last it knows nothing"
    site.empty()
    assert charge(first) == 8
    assert charge(second) == 8 + 1 + 1 + 1
    site.empty()
    assert charge(second) == 12


def test_what_a_copy_brought_back_to_one_counts_once_for_the_other(site: Site) -> None:
    """Emptied, restored, emptied: one machine asks each time, the other after the first and after the last."""
    first, second = site.machine("a").budget(limit(100)), site.machine("b").budget(limit(100))
    charge(first, 5)
    charge(second)
    first.peek("videos.list")
    copy = site.storage.copy()
    site.empty()
    charge(first)
    assert charge(second) == 8
    first.peek("videos.list")
    site.restore(copy)
    assert charge(first) == 9
    site.empty()
    assert charge(first) == 10
    assert charge(second) == 11


def test_of_what_survived_no_more_is_taken_off_a_report_than_it_holds(site: Site) -> None:
    """The other had seen less: some charges had left its window since, or came before what it counts."""
    first, second = site.machine("a").budget(limit(100)), site.machine("b").budget(limit(100))
    charge(first, 5)
    site.now_ms += DAY_MS - 10
    copy = site.storage.copy()
    charge(first)
    site.now_ms += 20
    assert charge(second, 2) == 3, "the five have left the window"
    site.restore(copy)
    site.now_ms -= 30
    assert charge(first) == 5 + 1 + 1, "the clock is set back, and they count again"
    site.now_ms += 100
    site.empty()
    charge(first)
    assert charge(second) >= 3 + 1 + 1 + 1


def test_what_is_left_after_a_loss_is_not_forgotten_by_a_process_that_ends_then(site: Site) -> None:
    """It reports the loss, and is killed before its next decision; then comes the second loss."""
    machine = site.machine()
    charge(machine.budget(limit(100), limit(50, HOUR_MS, name="hour")), 5)
    copy = site.storage.copy()
    site.now_ms += 10
    charge(machine.budget(limit(100)), 3)
    site.restore(copy)
    expected = machine.high_water_mark.expected()
    asked = ChargeRequest("p", Charge(1, "units", "m", "", "", "t"), (), (), site.now_ms, 0, expected)
    result = machine.ledger.decide(asked, commit=False)
    assert result.outcome == "behind"
    machine.high_water_mark.restore_missing(machine.ledger, result, expected, "e2", MIN_RETENTION_MS)
    machine.stop()
    site.empty()
    machine.start()
    assert charge(machine.budget(limit(100), limit(50, HOUR_MS, name="hour"))) == 9
    assert machine.budget(limit(50, HOUR_MS)).usage()[0].used_units == 6


def test_of_calls_that_find_one_loss_at_once_the_first_restores_it(site: Site) -> None:
    """The others would each read the log and hand over the same: 64 tasks of an event loop waited for seconds."""
    machine = site.machine()
    budget = machine.budget(limit(100))
    charge(budget, 5)
    site.empty()
    expected = machine.high_water_mark.expected()
    asked = ChargeRequest("p", Charge(1, "units", "m", "", "", "t"), (), (), site.now_ms, 0, expected)
    behind = machine.ledger.decide(asked, commit=False)
    restore = machine.high_water_mark.restore_missing
    restore(machine.ledger, behind, expected, "e2", MIN_RETENTION_MS)
    epoch = machine.ledger.decide(asked, commit=False).epoch
    machine.ledger.close()
    away = open_ledger("redis://127.0.0.1:1/0")  # whoever asked it anything would get an error
    restore(away, behind, expected, "e3", MIN_RETENTION_MS)
    assert epoch == machine.high_water_mark.expected().epoch
    machine.stop()
    machine.start()
    assert charge(machine.budget(limit(100))) == 6


@pytest.mark.parametrize("charged_after_it", [0, 3])
def test_a_copy_put_back_over_an_emptied_ledger_counts_once(site: Site, charged_after_it: int) -> None:
    """The server came up empty, and somebody brings the backup an hour later."""
    machine = site.machine()
    budget, other = machine.budget(limit(100)), site.machine("b").budget(limit(100))
    charge(other)
    assert charge(budget, 5) == 6
    copy = site.storage.copy()
    site.now_ms += 10
    if charged_after_it:
        charge(budget, charged_after_it)
    site.empty()
    assert charge(budget) == 7 + charged_after_it
    machine.stop()
    machine.start()
    site.restore(copy)
    assert charge(machine.budget(limit(100))) == 8 + charged_after_it
    assert charge(other) == 9 + charged_after_it


def test_a_copy_older_than_the_report_of_a_loss_is_behind_too(site: Site) -> None:
    first, second = site.machine("a").budget(limit(100)), site.machine("b").budget(limit(100))
    charge(first, 5)
    site.empty()
    charge(second)
    copy = site.storage.copy()
    site.now_ms += 10
    assert charge(first) == 7
    assert charge(second) == 8
    site.restore(copy)
    assert charge(second) == 9, "the second learned of the unlogged usage from the ledger, and puts it back"


def test_a_correction_is_no_loss(site: Site) -> None:
    budget = site.machine().budget(limit(100))
    kept = budget.charge("videos.list", units=50)
    assert kept.id is not None
    budget.refund(kept.id)
    assert charge(budget) == 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("restarted", [False, True])
def test_of_two_histories_all_that_is_gone_is_counted(site: Site, seed: int, restarted: bool) -> None:
    """A network parts, both sides charge, and the log of one stays. Machine `a`, on the other side, finds that its
    first charge of that time is gone: what the log has after that is of others. What it has before that is taken for
    what `a` saw, so of this, what both sides granted counts once. A process of `a` that begins afterwards knows its
    newest charge only. It takes more for what it saw, and no unit more than both sides granted.
    """
    rng = random.Random(seed)
    machine = site.machine("a")
    a, b = (one.budget(limit(1_000)) for one in (machine, site.machine("b")))
    charge(a, rng.randrange(1, 6))
    before = charge(b, rng.randrange(1, 6))
    parted, parted_ms = site.storage.copy(), site.now_ms
    times = {who: sorted(rng.sample(range(1_001 + who, 9_000, 2), rng.randrange(1, 30))) for who in (0, 1)}
    for budget, at_ms in ((a, times[0]), (b, times[1])):
        site.storage.restore(parted)
        for ms in at_ms:
            site.now_ms = parted_ms + ms
            charge(budget)
    site.now_ms = parted_ms + 10_000
    of_a, of_b = len(times[0]), len(times[1])
    if restarted:
        machine.stop()
        machine.start()
        a = machine.budget(limit(1_000))
    known_ms = times[0][-1] if restarted else times[0][0]
    taken = min(of_a, sum(ms < known_ms for ms in times[1]))
    assert b.usage()[0].used_units == before + of_b
    assert a.usage()[0].used_units == before + of_a + of_b - taken
    assert b.usage()[0].used_units == before + of_a + of_b - taken, "as all see it from then on"


# -- machines and their processes --------------------------------------------------------------------------------------


def test_the_next_process_knows_what_the_last_one_saw(site: Site) -> None:
    machine = site.machine()
    charge(machine.budget(limit(10)), 8)
    machine.stop()
    site.empty()
    machine.start()
    assert charge(machine.budget(limit(10))) == 9


def test_what_shows_nothing_new_is_not_written(site: Site) -> None:
    machine = site.machine()
    budget = machine.budget(limit(8))
    charge(budget, 8)
    assert machine.watermark_path is not None
    written = Path(machine.watermark_path).read_bytes()
    site.now_ms += 60_000
    assert not budget.charge("videos.list").admitted
    assert Path(machine.watermark_path).read_bytes() == written
    machine.stop()
    site.empty()
    machine.start()
    assert not machine.budget(limit(8)).charge("videos.list").admitted


def test_the_next_process_keeps_what_it_does_not_ask_about(site: Site) -> None:
    """The search job ran in the morning; what it saw outlives ten runs of another job."""
    machine, search = site.machine(), limit(300, name="search", methods=("search.list",))
    assert machine.budget(search).charge("search.list").admitted
    for _ in range(10):
        machine.stop()
        machine.start()
        charge(machine.budget(limit(1_000)))
    machine.stop()
    site.empty()
    machine.start()
    assert machine.budget(search).charge("search.list").limits[0].used_units == 200


@pytest.mark.parametrize("charged", [0, 1])
def test_a_process_that_saw_an_idle_limit_hands_on_all_that_it_saw(site: Site, charged: int) -> None:
    """Nothing was charged for two of the limit's windows, or ever."""
    machine, hour = site.machine(), limit(10, HOUR_MS, name="hour", jobs=("idle",))
    if charged:
        charge(machine.budget(limit(10)))
    site.now_ms += 3 * HOUR_MS
    assert machine.budget(hour).peek("videos.list", job="idle").admitted
    charge(machine.budget(limit(10)), 8)
    machine.stop()
    site.empty()
    machine.start()
    assert charge(machine.budget(limit(10))) == 9 + charged


def test_without_a_folder_a_process_remembers_for_itself(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    (site.folder / "closed").mkdir(mode=0o500)
    machine = site.machine("closed/a")
    site.folder.chmod(0o755)
    budget = machine.budget(limit(10))
    with not_root():
        charge(budget, 8)
    assert [r.getMessage().partition(" ")[0] for r in caplog.records] == ["memory_unusable"]
    site.empty()
    assert charge(budget) == 9


@pytest.mark.parametrize("garbage", [b"", b"\0" * 40_000, b"x" * 40_000, os.urandom(200_000)])
def test_a_damaged_watermark_file_is_as_good_as_none(site: Site, garbage: bytes) -> None:
    machine = site.machine()
    charge(machine.budget(limit(10)), 8)
    machine.stop()
    assert machine.watermark_path is not None
    with open(machine.watermark_path, "wb") as file:
        file.write(garbage)
    machine.start()
    assert charge(machine.budget(limit(10))) == 9
    site.empty()
    assert charge(machine.budget(limit(10))) == 10


def test_a_ledger_that_keeps_losing_what_it_is_told_is_unavailable(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 8)
    usage = budget.ledger.add_unlogged

    def losing(project: str, epoch: str, usages: list[UnloggedUsage], retention_ms: int) -> str:
        told = usage(project, epoch, usages, retention_ms)
        site.empty()
        return told

    budget.ledger.add_unlogged = losing  # type: ignore[method-assign,assignment]  # a server emptied again each time
    site.empty()
    refused = budget.charge("videos.list")
    assert (refused.admitted, refused.reason) == (False, "ledger-unavailable")
    assert "loses what it is told" in refused.detail


def test_identities_are_remembered_apart(tmp_path: Path) -> None:
    paths = {
        watermark_path(tmp_path, Identity(ledger, project, endpoint))
        for ledger in ("/etc/quota.toml", "name quota")
        for project in ("p", "p/q", "p_q", "é")
        for endpoint in ("", "http://127.0.0.1:8765")
    }
    assert len(paths) == 16
    assert all(path.startswith(f"{tmp_path}/high-water-marks/p") or "_" in path for path in paths)


def test_a_mark_that_is_being_closed_is_found_by_a_session_that_begins(tmp_path: Path) -> None:
    """Two descriptors of one file would have one lock between them, and the first to be closed would end it."""
    identity = Identity("/etc/quota.toml", "p")
    ended = open_high_water_mark(tmp_path, identity, "redis://a")
    with ended._lock:  # another thread is in the middle of using it
        closing = threading.Thread(target=close_high_water_mark, args=(ended,))
        closing.start()
        closing.join(0.1)
        begun = open_high_water_mark(tmp_path, identity, "redis://a")
    closing.join()
    assert begun is ended
    close_high_water_mark(begun)
    assert open_high_water_mark(tmp_path, identity, "redis://a") is not ended


def test_a_process_has_one_high_water_mark_for_each_file(tmp_path: Path) -> None:
    identity = Identity("/etc/quota.toml", "p")
    path = watermark_path(tmp_path, identity)
    first, second = (open_high_water_mark(tmp_path, identity, "redis://a") for _ in "12")
    assert first is second
    first.record((), ChargeResult("admitted", "1-0", NOW, (NOW, 0), (), epoch="e1"))
    close_high_water_mark(first)
    assert second.expected() == Expected("e1", ((NOW, 0),))
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _is_open(fd)]
    assert held.count(path) == 1
    close_high_water_mark(second)
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _is_open(fd)]
    assert path not in held


def test_a_watermark_is_bounded(site: Site) -> None:
    """Hundreds of jobs, each with a limit of its own, and a loss now and then: one slot holds it."""
    machine = site.machine()
    for n in range(400):
        job = f"job-{n}-" + "x" * 50
        own = limit(10, HOUR_MS, name="own", jobs=(job,))
        machine.budget(limit(10_000), own).charge("videos.list", job=job)
        site.now_ms += 1_000
        if n % 100 == 50:
            site.empty()
    assert machine.watermark_path is not None
    assert os.path.getsize(machine.watermark_path) <= SLOT_BYTES
    machine.stop()
    site.now_ms += 3 * DAY_MS
    machine.start()
    charge(machine.budget(limit(10_000)))
    watermark = machine.high_water_mark._known.watermark("")
    assert len(watermark.observations) + len(watermark.usages) == 1, "what has expired is forgotten"


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _charge_some(url: str, path: str, times: int) -> Iterator[int]:
    ledger = open_ledger(url)
    high_water_mark = HighWaterMark(path, "p")
    budget = Budget(
        credential="main",
        project="p",
        book=BOOK,
        limits=(limit(10_000),),
        ledger=ledger,
        high_water_mark=high_water_mark,
    )
    yield charge(budget, times)
    os._exit(0)  # as if killed: nothing is closed


def test_eight_processes_of_one_machine_write_side_by_side(site: Site) -> None:
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    workers = Children(_charge_some, *[(site.storage.url, path, 50)] * 8)
    assert max(workers.answers()) == 400
    site.storage.empty()
    ledger = open_ledger(site.storage.url)
    budget = Budget(
        credential="main",
        project="p",
        book=BOOK,
        limits=(limit(10_000),),
        ledger=ledger,
        high_water_mark=HighWaterMark(path, "p"),
    )
    assert charge(budget) == 401
    ledger.close()


@pytest.mark.topology
def resting(site: Site, path: str) -> tuple[Budget, HighWaterMark]:
    """A process of its own, which may rest while others charge."""
    high_water_mark, ledger = HighWaterMark(path, "p"), open_ledger(site.storage.url)
    limits = (limit(100),)
    budget = Budget(
        credential="main", project="p", book=BOOK, limits=limits, ledger=ledger, high_water_mark=high_water_mark
    )
    return budget, high_water_mark


def close(budget: Budget, high_water_mark: HighWaterMark) -> None:
    budget.ledger.close()
    high_water_mark.close()


def test_a_process_notices_what_only_another_of_its_machine_has_seen(site: Site) -> None:
    """An old copy that has all that this process saw, but not what its neighbour saw later."""
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    budget, high_water_mark = resting(site, path)
    charge(budget, 2)
    copy = site.storage.copy()
    assert Children(_charge_some, (site.storage.url, path, 5)).answers() == [7]
    site.storage.restore(copy)
    high_water_mark._next_look_s = 0.0  # it looks every 50 ms
    assert charge(budget) == 8
    close(budget, high_water_mark)


def test_a_process_that_saw_nothing_yet_notices_what_others_saw(site: Site) -> None:
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    budget, high_water_mark = resting(site, path)
    assert not high_water_mark.expected().ids
    assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [3]
    site.storage.empty()
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 3 + 1
    close(budget, high_water_mark)


def test_what_two_saw_that_began_at_once_is_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has made the file, and ended, when the first is about to make it."""
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    budget, high_water_mark = resting(site, path)

    def make_room_late(at: str) -> None:
        monkeypatch.undo()
        site.storage.empty()
        assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [3]
        site.storage.empty()
        make_room(at)

    monkeypatch.setattr("quota.recovery.high_water_mark.make_room", make_room_late)
    assert charge(budget) == 1
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 1 + 3 + 1
    close(budget, high_water_mark)


def test_a_process_that_rested_notices_what_others_saw_after_a_loss(site: Site) -> None:
    """It saw only what an old copy has; meanwhile the ledger was emptied, spent from, and restored from that copy."""
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    budget, high_water_mark = resting(site, path)
    charge(budget, 5)
    copy = site.storage.copy()
    for times, used in ((3, 8), (2, 10)):
        assert Children(_charge_some, (site.storage.url, path, times)).answers() == [used]
        site.storage.empty()
    site.storage.restore(copy)
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 5 + 3 + 2 + 1
    close(budget, high_water_mark)


@pytest.mark.parametrize("emptied", [False, True])
def test_a_process_that_rested_notices_what_others_saw_in_a_later_epoch(site: Site, emptied: bool) -> None:
    """All that it saw is in the log again, with its old name; what others charged after a loss in between is not."""
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    budget, high_water_mark = resting(site, path)
    charge(budget, 3)
    older = site.storage.copy()
    charge(budget, 2)
    newer = site.storage.copy()
    site.storage.restore(older)
    assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [8]
    if emptied:  # and they went on in another log, which was told of this one
        site.storage.empty()
        assert Children(_charge_some, (site.storage.url, path, 2)).answers() == [10]
    site.storage.restore(newer)
    high_water_mark._next_look_s = 0.0
    assert charge(budget) == 5 + 3 + 2 * emptied + 1
    close(budget, high_water_mark)


@pytest.mark.parametrize("loses", [False, True], ids=["the same epoch", "a later epoch"])
def test_a_process_that_rested_notices_what_another_configuration_saw(site: Site, loses: bool) -> None:
    path, of_other = (str(site.folder / "state" / "high-water-marks" / "p" / (digit * 32)) for digit in "12")
    budget, high_water_mark = resting(site, path)
    charge(budget, 3)
    older = site.storage.copy()
    charge(budget, 2)
    newer = site.storage.copy()
    if loses:
        site.storage.restore(older)
    assert Children(_charge_some, (site.storage.url, of_other, 3)).answers() == [8]
    site.storage.restore(newer)
    high_water_mark._next_look_s = high_water_mark._next_siblings_s = 0.0  # it looks there once a minute
    assert charge(budget) == 5 + 3 + 1
    close(budget, high_water_mark)


def _note_and_rest(path: str, at_ms: int) -> Iterator[None]:
    slots = WatermarkFile(path, make=True)
    slots.write((at_ms, 0), 7, at_ms, (5,), f"epoch\tanother\t\t\nhead\t{limit(100).view.name}\t{DAY_MS}\n")
    yield
    signal.pause()


def test_a_clock_set_back_makes_nobody_compare_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process noted in an earlier epoch, before it rested, is dated later than all that comes now."""
    monkeypatch.setattr("quota.recovery.high_water_mark.LOOK_EVERY_S", 0.0)
    machine = site.machine()
    charge(machine.budget(limit(100)), 5)
    with Children(_note_and_rest, (machine.watermark_path, NOW + HOUR_MS)) as resting:
        resting.first_answers()
        for n in range(6, 12):
            assert charge(machine.budget(limit(100))) == n + 5


# -- a real server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["restarted without its data", "restored from an old copy", "flushed"])
def test_a_real_server_that_loses_its_data(tmp_path: Path, loss: str) -> None:
    server = RedisServer()
    try:
        ledger, high_water_mark = (
            open_ledger(server.url),
            HighWaterMark(str(tmp_path / "high-water-marks" / "p" / "1"), "p"),
        )
        budget = Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=(limit(100),),
            ledger=ledger,
            high_water_mark=high_water_mark,
        )
        charge(budget, 5)
        with redis.Redis(port=server.port) as client:
            client.save()
        charge(budget, 3)
        if loss == "flushed":
            with redis.Redis(port=server.port) as client:
                client.flushall()
        else:
            server.kill()
            if loss == "restarted without its data":
                (server.folder / "dump.rdb").unlink()
            server.start()
        budget.charge("videos.list")
        assert charge(budget) == 10
        ledger.close()
        high_water_mark.close()
    finally:
        server.close()


def test_a_replica_that_lagged_takes_over(tmp_path: Path) -> None:
    primary, replica = RedisServer(), RedisServer()
    try:
        ledger, high_water_mark = (
            open_ledger(primary.url),
            HighWaterMark(str(tmp_path / "high-water-marks" / "p" / "1"), "p"),
        )
        budget = Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=(limit(100),),
            ledger=ledger,
            high_water_mark=high_water_mark,
        )
        charge(budget, 5)
        with redis.Redis(port=primary.port) as client, redis.Redis(port=replica.port) as other:
            other.replicaof("127.0.0.1", str(primary.port))
            while other.info("replication")["master_link_status"] != "up" or not other.exists("quota:{p}:log"):
                pass
            client.execute_command("WAIT", 1, 5_000)
            other.replicaof("NO", "ONE")
        charge(budget, 3)
        assert (
            charge(
                Budget(
                    credential="main",
                    project="p",
                    book=BOOK,
                    limits=(limit(100),),
                    ledger=open_ledger(replica.url),
                    high_water_mark=high_water_mark,
                )
            )
            == 9
        )
        ledger.close()
        high_water_mark.close()
    finally:
        primary.close()
        replica.close()


# -- the contract of `add_unlogged`
# -------------------------------------------------------------------------------------------


def test_reports_of_one_loss_are_merged_and_losses_are_added(site: Site) -> None:
    """L17, L18."""
    ledger, view = site.machine().ledger, limit(100).view.name
    budget = Budget(
        credential="main",
        project="p",
        book=BOOK,
        limits=(limit(100),),
        ledger=ledger,
        clock=lambda: site.now_ms,
    )
    until_ms = NOW + HOUR_MS
    at = (NOW, 0)
    five, nine, two = (((n, until_ms),) for n in (5, 9, 2))
    three = ((1, until_ms - 9), (2, until_ms))
    six = ((1, until_ms - 9), (1, until_ms - 5), (4, until_ms + 1))
    assert (
        ledger.add_unlogged("p", "e1", [UnloggedUsage(view, "lost", five, at, 4, NOW - 9, NOW - 1, 4, NOW - 9)]) == "e1"
    )
    assert ledger.add_unlogged("p", "e2", [UnloggedUsage(view, "lost", five, at)]) == "e1", "nothing new"
    assert ledger.add_unlogged("p", "e2", [UnloggedUsage(view, "lost", nine, at, since_ms=NOW - 9)]) == "e1", (
        "four were lost later"
    )
    assert (
        ledger.add_unlogged(
            "p", "e3", [UnloggedUsage(view, "lost", three, (NOW, 1)), UnloggedUsage(view, "other", two, at)]
        )
        == "e1/e3"
    )
    site.now_ms = until_ms - 9
    assert budget.peek("videos.list").limits[0].used_units == 5 + 2, "the first says more, until then"
    assert ledger.add_unlogged("p", "e4", [UnloggedUsage(view, "lost", six, (NOW + 1, 0))]) == "e1/e4"
    assert budget.peek("videos.list").limits[0].used_units == 5 + 2
    site.now_ms = until_ms - 1
    assert charge(budget) == 5 + 2 + 1
    site.now_ms = until_ms
    assert charge(budget) == 4 + 1 + 1
    site.now_ms += 1
    assert charge(budget) == 3


@pytest.mark.parametrize(("since_ms", "kept_last_ms"), [(NOW - 8, NOW - 2), (NEVER, NOW - 2), (NOW - 9, NOW + 1)])
def test_a_report_that_may_hold_less_of_what_was_kept_counts_whole(
    site: Site, since_ms: int, kept_last_ms: int
) -> None:
    """It goes no further, and yet holds more: it counts later on, or comes from another branch of the log."""
    ledger, view = site.machine().ledger, limit(100).view.name
    five, nine = (((n, NOW + HOUR_MS),) for n in (5, 9))
    known = UnloggedUsage(view, "lost", five, (NOW, 0), 4, NOW - 9, kept_last_ms, 4, NOW - 9)
    assert ledger.add_unlogged("p", "e1", [known]) == "e1"
    assert (
        ledger.add_unlogged("p", "e2", [UnloggedUsage(view, "lost", nine, (NOW - 1, 0), since_ms=since_ms)]) == "e1/e2"
    )
    assert ledger.add_unlogged("p", "e3", [UnloggedUsage(view, "lost", nine, (NOW, 0), since_ms=since_ms)]) == "e1/e2"


def test_settling_leaves_unlogged_usage_alone(site: Site) -> None:
    """L15, L17."""
    budget = site.machine().budget(limit(100), limit(50, name="narrow", methods=("videos.list",)))
    charge(budget, 4)
    site.empty()
    admitted = budget.charge("videos.list")
    assert admitted.id is not None
    Budget(
        credential="main", project="p", book=BOOK, limits=(), ledger=budget.ledger, clock=lambda: site.now_ms
    ).settle(admitted.id, 3)
    assert [state.used_units for state in budget.usage()] == [7, 7]


# -- interrupted -------------------------------------------------------------------------------------------------------


_MODULES = tuple(module.__file__ for module in (high_water_mark, knowledge, loss, slices))
STEP = 1 if os.environ.get("QUOTA_TEST_INTERRUPTED") else 30
"""Every so manyth place is tried, by each handler from another one on; `make soak` tries them all."""

FIRST = {"raises": 0, "times out": 10 % STEP, "charges": 20 % STEP}


@pytest.mark.parametrize("handler", FIRST)
@pytest.mark.parametrize("lost", [False, True])
def test_a_high_water_mark_interrupted_anywhere_forgets_nothing(site: Site, lost: bool, handler: str) -> None:
    """By a signal handler, in the first decision of a process, or while it restores what is missing."""
    admitted = 0

    def handle() -> None:
        nonlocal admitted
        if handler == "raises":
            raise Interrupted
        if handler == "times out":
            raise TimeoutError
        admitted += budget.charge("videos.list").admitted

    number, more = FIRST[handler], True
    while more:
        site.empty()
        name = f"m{number}"
        before = site.machine(name)
        charge(before.budget(limit(1_000)), 3)
        if not lost:
            before.stop()
        else:
            site.empty()
        machine = before if lost else site.machine(name)
        budget, admitted, interrupted = machine.budget(limit(1_000)), 3, 0
        try:
            more = at_place(number, handle, lambda: charge(budget), within=_MODULES)  # noqa: B023
            admitted += 1
        except (Interrupted, TimeoutError):
            interrupted = 1
        used = charge(budget)
        admitted += 1
        assert used - admitted in range(interrupted + 1)
        machine.stop()
        site.empty()
        again = site.machine(name)
        assert charge(again.budget(limit(1_000))) == used + 1
        again.stop()
        number += STEP
    assert number > 60


@pytest.mark.parametrize("looks", [True, False], ids=["before it looks", "before it is closed"])
def test_what_a_handler_charges_while_a_process_begins_is_not_forgotten(site: Site, *, looks: bool) -> None:
    """Wherever it interrupts: the process goes on with what it has read before, and that has no such charge."""
    number, more = 0, True
    while more:
        site.empty()
        name, admitted = f"m{number}", [True] * 3
        before = site.machine(name)
        charge(before.budget(limit(1_000)), 3)
        before.stop()
        machine = site.machine(name)
        budget, mark = machine.budget(limit(1_000)), machine.high_water_mark
        if not looks:
            charge(budget)
            admitted.append(True)

        def handle() -> None:
            admitted.append(budget.charge("videos.list").admitted)  # noqa: B023

        more = at_place(number, handle, mark.expected if looks else mark.close, within=_MODULES)
        machine.stop()
        site.empty()
        again = site.machine(name)
        assert charge(again.budget(limit(1_000))) == len(admitted) + 1, number
        again.stop()
        number += 1
    assert number > 5


def test_a_slot_that_was_written_since_it_was_read_is_left_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process began, charged and ended between this one's first look and its first charge."""
    monkeypatch.setattr(high_water_mark, "LOOK_EVERY_S", 1_000.0)
    path = str(site.folder / "state" / "high-water-marks" / "p" / "1")
    assert Children(_charge_some, (site.storage.url, path, 2)).answers() == [2]
    budget, mark = resting(site, path)
    assert mark.expected().ids
    copy = site.storage.copy()
    assert Children(_charge_some, (site.storage.url, path, 3)).answers() == [5]
    site.storage.restore(copy)
    assert charge(budget) == 3, "it has not looked since"
    close(budget, mark)
    budget, mark = resting(site, path)
    assert charge(budget) == 3 + 3 + 1
    close(budget, mark)


def test_what_a_handler_charges_while_a_process_restores_is_not_forgotten(site: Site) -> None:
    """The process is killed right after that, before another decision of its own."""
    number, more, step = 0, True, min(STEP, 7)
    while more:
        site.empty()
        name, admitted = f"m{number}", [True] * 3
        machine = site.machine(name)
        budget, mark = machine.budget(limit(1_000)), machine.high_water_mark
        charge(budget, 3)
        expected = mark.expected()
        site.empty()
        asked = ChargeRequest("p", Charge(1, "units", "m", "", "", "t"), (), (), site.now_ms, 0, expected)
        behind = machine.ledger.decide(asked, commit=False)

        def handle() -> None:
            admitted.append(budget.charge("videos.list").admitted)  # noqa: B023

        def restore() -> None:
            mark.restore_missing(machine.ledger, behind, expected, "e2", MIN_RETENTION_MS)  # noqa: B023

        more = at_place(number, handle, restore, within=_MODULES)
        machine.stop()
        site.empty()
        again = site.machine(name)
        assert charge(again.budget(limit(1_000))) == len(admitted) + 1, number
        again.stop()
        number += step
    assert number > 60
