"""`quota ledger repair`: after a clock that was wrong, what is dated ahead is dated now, and counts for one window."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
    Place,
    added,
    ask,
    charge,
    correction,
    entries_of,
    fence,
    marker,
    no_answer,
    others,
    past_of,
)
from quota.deciding.repairs import SAME_CLOCK_MS, Ahead, ahead, repair
from quota.errors import LedgerError, QuotaError, UnusableLedger
from quota.ledger.log import Log
from quota.ledger.state import LONGEST, State
from quota.rules.claims import Claim
from quota.rules.entry import START, Entry
from quota.rules.facts import FACTS, Exhaustion
from quota.rules.spent import SUMS, ChargedSum, Sums
from quota.terms.limits import DAY_MS, HOUR_MS, SLACK_MS
from support.setup import budget_of, limit

YEAR_MS = 365 * DAY_MS
LATER_MS = NOW_MS + HOUR_MS
"""When the clock is right again."""


def at(clock: Clock, ms: int, log: Log, *entries: Entry) -> list[Entry]:
    """Entries that were added while the clock read this."""
    clock.now_ms = ms
    made = added(log, *entries)
    clock.now_ms = LATER_MS
    return made


def repaired(log: Log) -> list[Entry]:
    repair(log, P, LATER_MS)
    return entries_of(log)


def nothing_ahead(log: Log) -> bool:
    return not ahead(log, P).needs_repair


def test_a_repair_dates_future_entries_now_and_keeps_order_and_keys(log: Log, clock: Clock) -> None:
    sound = added(log, charge(1), charge(2))
    before = at(clock, NOW_MS + YEAR_MS, log, charge(3), marker(), charge(4))
    before += at(clock, NOW_MS + YEAR_MS + 5, log, charge(5))
    before += added(log, charge(6))
    entries = repaired(log)
    assert entries[:2] == sound
    assert [entry.key for entry in entries[2:]] == [entry.key for entry in before]
    assert {entry.id[0] for entry in entries[2:]} == {LATER_MS}
    assert [entry._replace(id=START) for entry in entries[2:]] == [entry._replace(id=START) for entry in before]
    assert nothing_ahead(log)
    assert repaired(log) == entries, "right dates stay"


def test_a_repaired_charge_keeps_its_corrections(log: Log, clock: Clock) -> None:
    (sound,) = added(log, charge(10))
    first, second = at(clock, NOW_MS + YEAR_MS, log, charge(20), charge(30))
    added(log, correction(sound, 11), correction(first, 21))
    added(log, correction(first, 0, before_units=21))
    entries = repaired(log)
    places = {entry.key: entry.id for entry in entries}
    corrections = [entry for entry in entries if entry.kind == "correction"]
    assert [(entry.of, entry.at) for entry in corrections] == [
        (sound.key, sound.id),
        (first.key, places[first.key]),
        (first.key, places[first.key]),
    ]
    assert [(entry.before_units, entry.units) for entry in corrections] == [(10, 11), (20, 21), (21, 0)]
    noted = log.corrections(P, [sound.key, first.key, second.key])
    assert {key: each.units for key, each in noted.items()} == {sound.key: 11, first.key: 0}


def test_a_repair_keeps_the_length_of_future_upstream_counts(log: Log, clock: Clock) -> None:
    past, future = (NOW_MS, NOW_MS + DAY_MS), (NOW_MS + YEAR_MS, NOW_MS + YEAR_MS + DAY_MS)
    at(clock, NOW_MS + YEAR_MS, log, others(5, at=past), others(6, at=future))
    assert [entry.at for entry in repaired(log)] == [past, (LATER_MS, LATER_MS + DAY_MS)]


def test_a_repair_counts_entries_again_that_a_clock_ahead_moved_to_the_past(log: Log, clock: Clock) -> None:
    """Only what some window may still count comes back."""
    log.change(P, {}, {LONGEST: str(DAY_MS)})
    clock.now_ms = NOW_MS - 3 * DAY_MS
    old = added(log, charge(1))
    clock.now_ms = NOW_MS
    kept = added(log, charge(100))
    kept += added(log, correction(kept[0], 60))
    kept += at(clock, NOW_MS + 100 * DAY_MS, log, charge(7))
    clock.now_ms = NOW_MS + 200 * DAY_MS
    kept += added(log, charge(8))
    assert log.trim(P, clock.now_ms - DAY_MS - SLACK_MS) == 4
    clock.now_ms = LATER_MS
    assert ahead(log, P) == Ahead(LATER_MS, kept[-1].id[0], 2, 15, 0, 0)
    entries = repaired(log)
    assert [entry.key for entry in entries] == [entry.key for entry in kept]
    assert past_of(log) == old
    assert [entry.id[0] for entry in entries] == [NOW_MS, NOW_MS, LATER_MS, LATER_MS]
    assert log.corrections(P, [kept[0].key])[kept[0].key].units == 60
    assert old[0].id < log.begin(P).trimmed < kept[0].id
    reply = ask(log, charge(), seen=entries[-1].id, room=9)
    assert (reply.word, reply.id and reply.id[0]) == ("APPENDED", LATER_MS)


def test_a_repair_keeps_a_past_that_the_state_no_longer_names(place: Place, log: Log, clock: Clock) -> None:
    old = added(log, charge(1))
    log.trim(P, NOW_MS + 1)
    at(clock, NOW_MS + YEAR_MS, log, charge(2))
    place.lose("state")
    assert repaired(log)[:1] == old


def test_sums_continue_after_a_repair(log: Log, clock: Clock) -> None:
    """No charge is summed twice, and no later charge counts as summed already."""
    made = at(clock, NOW_MS + YEAR_MS, log, charge(), charge(), charge())
    rows = [ChargedSum("videos.list", "job", 2, 2, 0)]
    log.change(P, {}, {SUMS: Sums(made[1].id, rows).text()})
    entries = repaired(log)
    sums = Sums.read(log.begin(P, (SUMS,)).state[SUMS])
    assert (sums.head, sums.rows()) == (entries[1].id, rows)


def test_a_repair_removes_future_exhaustions_only(log: Log, clock: Clock) -> None:
    clock.now_ms = NOW_MS + YEAR_MS
    state = State(log, P, lambda: "k")
    state.exhaust(Exhaustion("search", clock.now_ms, clock.now_ms + DAY_MS, "quota", "web1"))
    state.exhaust(Exhaustion("units", NOW_MS, NOW_MS + 2 * YEAR_MS, "quota", "web1"))
    state.exhaust(Exhaustion("uploads", NOW_MS, NOW_MS + 2 * YEAR_MS, "quota", "web1"))
    state.reopen("uploads")
    clock.now_ms = LATER_MS
    assert ahead(log, P).exhaustions == 2
    repair(log, P, LATER_MS)
    assert [each.bucket for each in state.facts().exhaustions] == ["units"]
    assert nothing_ahead(log)


def test_future_claims_lapse_like_present_claims(log: Log, clock: Clock) -> None:
    """Without a repair, each reading would date them now, and they would never lapse."""
    sound = Claim("sound", "store", "run", "web1", "web1", ("DE",), HOUR_MS, HOUR_MS)
    state = State(log, P, lambda: "k")
    state.claim(sound._replace(hold_ms=2 * HOUR_MS))
    before = dict(log.begin(P, ("claim:sound",)).state)
    clock.now_ms = NOW_MS + YEAR_MS
    state.claim(sound._replace(name="ahead"))
    clock.now_ms = LATER_MS
    assert ahead(log, P) == Ahead(LATER_MS, 0, 0, 0, 0, claims=1)
    repair(log, P, LATER_MS)
    assert nothing_ahead(log)
    assert dict(log.begin(P, ("claim:sound",)).state) == before
    other = sound._replace(name="ahead", owner="other", run="other", machine="web2")
    clock.now_ms = LATER_MS + HOUR_MS - 1
    assert "DE" in state.claim(other).elsewhere
    clock.now_ms += 1
    assert state.claim(other).elsewhere == {}


def test_an_unreadable_claim_stops_no_repair(log: Log, clock: Clock) -> None:
    log.change(P, {}, {"claim:a": "9" * 5_000, "claim:c": f"{NOW_MS + YEAR_MS} ?", FACTS: "?", SUMS: "?"})
    at(clock, NOW_MS + YEAR_MS, log, charge())
    assert {entry.id[0] for entry in repaired(log)} == {LATER_MS}
    assert nothing_ahead(log)


def test_an_owner_sees_how_much_is_dated_ahead(log: Log, clock: Clock) -> None:
    (sound,) = added(log, charge(1))
    first, _ = at(clock, NOW_MS + YEAR_MS, log, charge(100), charge(50))
    added(log, correction(first, 40), correction(sound, 5))
    assert ahead(log, P) == Ahead(LATER_MS, NOW_MS + YEAR_MS, charges=2, units=90, exhaustions=0, claims=0)
    clock.now_ms = NOW_MS + YEAR_MS
    assert ahead(log, P) == Ahead(NOW_MS + YEAR_MS, NOW_MS + YEAR_MS, 0, 0, 0, 0)
    assert nothing_ahead(log)


@pytest.mark.parametrize("apart_ms", [SAME_CLOCK_MS + 1, -SAME_CLOCK_MS - 1])
def test_a_repair_does_nothing_while_the_clocks_disagree(log: Log, clock: Clock, apart_ms: int) -> None:
    at(clock, NOW_MS + YEAR_MS, log, charge())
    before, epoch = entries_of(log), log.begin(P).epoch
    with pytest.raises(QuotaError, match="this machine's clock reads 20"):
        repair(log, P, LATER_MS + apart_ms)
    assert (entries_of(log), log.begin(P).epoch) == (before, epoch)
    repair(log, P, LATER_MS + (SAME_CLOCK_MS if apart_ms > 0 else -SAME_CLOCK_MS))
    assert nothing_ahead(log)


def test_a_log_that_has_moved_is_repaired_where_it_has_moved_to(log: Log, clock: Clock) -> None:
    at(clock, NOW_MS + YEAR_MS, log, charge())
    before = entries_of(log)
    log.seal(P, fence(log), "redis://elsewhere/0")
    with pytest.raises(UnusableLedger, match="has moved to redis://elsewhere/0"):
        repair(log, P, LATER_MS)
    assert (entries_of(log), log.begin(P).epoch) == (before, "!redis://elsewhere/0")


def test_a_repair_that_fails_leaves_the_log_as_it_was(log: Log, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    at(clock, NOW_MS + YEAR_MS, log, charge())
    before, epoch = entries_of(log), log.begin(P).epoch

    with monkeypatch.context() as patched:
        patched.setattr(type(log), "replace", no_answer)
        with pytest.raises(LedgerError, match="no answer"):
            repair(log, P, LATER_MS)
    assert (entries_of(log), log.begin(P).epoch) == (before, epoch)
    repair(log, P, LATER_MS)
    assert nothing_ahead(log)


def test_machines_that_read_future_entries_put_nothing_back(log: Log, clock: Clock, tmp_path: Path) -> None:
    """Their journals have each entry under its key. It counts once, for a window from the repair."""
    budgets = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        budgets.append(budget_of(log, limit(100), project=P, clock=clock, folder=folder))
    for clock.now_ms, units in ((NOW_MS, 10), (NOW_MS + YEAR_MS, 20)):
        for budget in budgets:
            assert budget.charge("videos.list", units=units).admitted
    clock.now_ms = LATER_MS
    repair(log, P, LATER_MS)
    keys = [entry.key for entry in entries_of(log)]
    for budget in budgets:
        assert budget.usage()[0].used_units == 60
    assert [entry.key for entry in entries_of(log)] == keys
    assert budgets[0].charge("videos.list", units=40).admitted
    refused = budgets[1].charge("videos.list", units=50)
    assert (refused.admitted, refused.retry_at_ms) == (False, LATER_MS + DAY_MS)
    clock.now_ms = NOW_MS + DAY_MS
    assert budgets[1].usage()[0].used_units == 80
    clock.now_ms = LATER_MS + DAY_MS
    assert [budget.usage()[0].used_units for budget in budgets] == [0, 0]
