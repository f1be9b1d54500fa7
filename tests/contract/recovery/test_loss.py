"""A ledger that lost something: emptied, restored from an old copy, deleted. It gives no budget back."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import pytest

from quota.common.clock import NEVER
from quota.ledger.contract import MIN_RETENTION_MS, ChargeRequest, ChargeResult, read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.unlogged import UnloggedUsage
from quota.recovery import high_water_mark as high_water_mark
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.setup import limit
from support.site import NOW, Site, charge, full_hour, unguarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quota.ledger.contract import LimitCheck
    from quota.ledger.entry import Entry, Id


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


def test_what_was_compared_with_one_log_is_told_to_no_other(site: Site) -> None:
    """A copy is put back, and is emptied while a machine reads what it lacks."""
    machine = site.machine()
    budget = machine.budget(limit(100))
    charge(budget, units=10)
    copy = site.storage.copy()
    site.empty()
    charge(budget, units=5)
    site.restore(copy)
    read, emptied = machine.ledger.read, []

    def read_late(*args: Any) -> Sequence[Entry]:
        if not emptied:
            emptied.append(site.empty())
        return read(*args)

    machine.ledger.read = read_late  # type: ignore[method-assign]
    assert charge(budget) == 16
    assert emptied
    for used in (17, 18):
        site.empty()
        assert charge(budget) == used


def test_what_was_lost_leaves_its_window_hour_by_hour(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    charge(budget, 4)
    site.now_ms += HOUR_MS
    charge(budget, 4)
    site.empty()
    for needs, at_ms, used in ((3, full_hour(NOW) + DAY_MS, 4), (7, NOW + HOUR_MS + DAY_MS, 0)):
        refused = budget.charge("videos.list", units=needs)
        assert not refused.admitted
        assert refused.retry_at_ms == at_ms
        site.now_ms = at_ms - 1
        assert not budget.charge("videos.list", units=needs).admitted
        site.now_ms += 1
        assert budget.usage()[0].used_units == used


def test_within_an_hour_all_counts_as_long_as_the_newest(site: Site) -> None:
    budget = site.machine().budget(limit(10))
    site.now_ms = full_hour(NOW) + 1
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
    site.now_ms = full_hour(NOW)
    for _ in range(60):
        charge(budget)
        site.now_ms += HOUR_MS // 6
    since_ms = full_hour(NOW) - HOUR_MS
    hours = [(at_ms + 1, at_ms + HOUR_MS) for at_ms in range(since_ms, site.now_ms - HOUR_MS, HOUR_MS)]
    assert spans[1:] == hours, "the first read what there was"


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


# -- the contract of `add_unlogged` -----------------------------------------------------------------------------------


def test_reports_of_one_loss_are_merged_and_losses_are_added(site: Site) -> None:
    """L17, L18."""
    ledger, view = site.machine().ledger, limit(100).view.name
    budget = unguarded(ledger, lambda: site.now_ms, limit(100))
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
    unguarded(budget.ledger, lambda: site.now_ms).settle(admitted.id, 3)
    assert [state.used_units for state in budget.usage()] == [7, 7]
