"""`quota ledger move`: a project's log goes to another ledger of any kind, with all that counts, and nobody is granted
anything twice, wherever it is stopped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.log.logs import (
    NOW_MS,
    Clock,
    P,
    Place,
    add,
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
from quota.deciding import fence as fences
from quota.deciding.fence import FenceLostError
from quota.deciding.moves import Step, carry_out, plan_move
from quota.errors import LedgerError, QuotaError
from quota.ledger.log import LEASE_MS, Log, is_closed, is_fence, is_seal
from quota.ledger.state import LONGEST, State
from quota.rules.claims import Claim
from quota.rules.entry import Entry
from quota.rules.facts import FACTS, Exhaustion, Facts
from quota.rules.refusals import RefusalCount
from quota.rules.spent import SUMS, ChargedSum, Sums
from quota.terms.limits import DAY_MS, HOUR_MS
from support.losses import KINDS, LEDGERS
from support.processes import in_threads
from support.servers import until

CLAIM = Claim("job", "store", "run", "web1", "web1", ("DE",), HOUR_MS, HOUR_MS)
WRITES = ("fence", "change", "replace", "seal", "add_past")
WRITES_OF_A_MOVE = 7
"""The past, two fences, the state, the log, the seal, and the new log is opened."""


@dataclass
class Pair:
    places: tuple[Place, Place]
    clock: Clock

    def __post_init__(self) -> None:
        self.old, self.new = self.open(0), self.open(1)

    def open(self, number: int) -> Log:
        """One of the two ledgers, as one more process opens it."""
        return self.places[number].open(self.clock)


def _place(request: pytest.FixtureRequest, number: int, folder: Path) -> Place:
    (folder / str(number)).mkdir()
    return Place(LEDGERS[request.param[number]](request, folder / str(number), number))


BETWEEN = [*itertools.permutations(KINDS, 2)]


@pytest.fixture(params=BETWEEN, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    here, there = (_place(request, number, tmp_path) for number in (0, 1))
    yield Pair((here, there), Clock())
    here.close()
    there.close()


each_target = pytest.mark.parametrize("pair", [("sqlite", kind) for kind in KINDS], indirect=True, ids="-".join)
in_files = pytest.mark.parametrize("pair", [("sqlite", "sqlite")], indirect=True, ids="-".join)


def move(old: Log, new: Log) -> Step:
    (step,) = plan_move(old, new, [P])
    return carry_out(old, new, step, lambda *_: None)


def state_of(log: Log) -> dict[str, str]:
    return dict(log.change(P, dict.fromkeys(log.names(P)), {}).state)


def content(log: Log) -> dict[str, Any]:
    """All that anybody can see of a project, but the epoch."""
    entries = entries_of(log)
    return {
        "log": entries,
        "past": past_of(log),
        "trimmed": log.begin(P).trimmed,
        "corrections": dict(log.corrections(P, [entry.key for entry in entries])),
        "state": state_of(log),
    }


def used(log: Log, clock: Clock) -> None:
    """Fill a log with something of everything that it can hold."""
    old = added(log, charge(100), charge(50), others(7))
    added(log, correction(old[0], 60))
    clock.now_ms += DAY_MS
    log.trim(P, clock.now_ms - HOUR_MS)
    new = added(log, charge(10), charge(20), marker(), others(9, of="usage", at=(NOW_MS, NOW_MS + 3 * DAY_MS)))
    clock.now_ms += 1_000
    added(log, correction(new[0], 5), charge(30))
    added(log, correction(new[0], 8, before_units=5))
    keys = (f"k{n}" for n in itertools.count())
    state = State(log, P, lambda: next(keys))
    state.exhaust(Exhaustion("search", NOW_MS, NOW_MS + 2 * DAY_MS, "quota", "web1"))
    state.claim(CLAIM)
    state.keep_places(CLAIM, "job", {"DE": "page 2\n'\"é\t"})
    state.add_refusals([RefusalCount(clock.now_ms, "day", "job", "limit", 3)], ["{}"])
    log.change(P, {}, {LONGEST: str(DAY_MS), SUMS: Sums(new[0].id, [ChargedSum("search.list", "job", 3, 9, 0)]).text()})
    log.keep_views(P, log.begin(P).epoch, {"v": f"{log.begin(P).epoch} 1 0-0 0-0 -"})


def in_use(pair: Pair, *entries: Entry) -> list[Entry]:
    """Entries that somebody else has added to the new ledger, which has begun another log."""
    assert ask(pair.new, *entries, epoch="", new_epoch="theirs", seq=7).word == "APPENDED"
    return entries_of(pair.new)


def is_open(log: Log) -> bool:
    """Whether somebody may append to a log that is in use."""
    epoch = log.begin(P).epoch
    return bool(epoch) and not is_closed(epoch)


# -- what moves --------------------------------------------------------------------------------------------------------


def test_a_move_there_and_back_keeps_all_that_counts(pair: Pair) -> None:
    used(pair.old, pair.clock)
    held = content(pair.old)
    assert move(pair.old, pair.new) == Step(P, "move", 5)
    assert content(pair.new) == held
    assert pair.old.begin(P).epoch == f"!{pair.new.label}"
    assert is_open(pair.new)
    assert move(pair.old, pair.new) == Step(P, "moved already", 5)

    added(pair.new, charge(40))
    held = content(pair.new)
    assert move(pair.new, pair.old) == Step(P, "move", 6)
    assert content(pair.old) == held
    assert (is_open(pair.old), pair.new.begin(P).epoch) == (True, f"!{pair.old.label}")
    assert move(pair.old, pair.new).kind == "move"
    assert content(pair.new) == held


def test_a_moved_log_has_a_new_epoch_and_no_kept_views(pair: Pair) -> None:
    """So every machine compares it with what it has seen."""
    used(pair.old, pair.clock)
    epoch = pair.old.begin(P).epoch
    move(pair.old, pair.new)
    beginning = pair.new.begin(P, ("view:v",))
    assert (beginning.epoch != epoch, dict(beginning.state)) == (True, {})


def test_a_project_that_holds_nothing_is_closed(pair: Pair) -> None:
    """A machine that still has the old url must not begin it there."""
    used(pair.old, pair.clock)
    steps = plan_move(pair.old, pair.new, [P, "q"])
    assert [step.kind for step in steps] == ["move", "nothing"]
    for step in steps:
        carry_out(pair.old, pair.new, step, lambda *_: None)
    assert pair.old.begin("q").epoch == f"!{pair.new.label}"
    assert pair.new.begin("q").epoch == ""
    assert [step.kind for step in plan_move(pair.old, pair.new, [P, "q"])] == ["moved already"] * 2
    for step in plan_move(pair.new, pair.old, [P, "q"]):
        carry_out(pair.new, pair.old, step, lambda *_: None)
    assert (is_open(pair.old), pair.new.begin("q").epoch) == (True, f"!{pair.old.label}")
    assert not is_closed(pair.old.begin("q").epoch), "moved back, it is open again"


# -- a target that is in use -------------------------------------------------------------------------------------------


def test_a_target_that_is_in_use_gets_the_union(pair: Pair) -> None:
    theirs = in_use(pair, charge(1), charge(2))
    added(pair.new, correction(theirs[1], 9))
    pair.clock.now_ms += 5
    ours = added(pair.old, charge(3), charge(4))
    added(pair.old, correction(ours[0], 8))
    both = sorted([*entries_of(pair.new), *entries_of(pair.old)])
    move(pair.old, pair.new)
    assert entries_of(pair.new) == both
    corrections = pair.new.corrections(P, [theirs[1].key, ours[0].key])
    assert [correction.units for correction in corrections.values()] == [9, 8]


def test_the_facts_of_both_states_are_united(pair: Pair) -> None:
    keys = (f"k{n}" for n in itertools.count())
    ours, theirs = (State(log, P, lambda: next(keys)) for log in (pair.old, pair.new))
    ours.exhaust(Exhaustion("search", NOW_MS, NOW_MS + DAY_MS, "quota", "web1"))
    theirs.exhaust(Exhaustion("uploads", NOW_MS, NOW_MS + DAY_MS, "quota", "web2"))
    ours.add_refusals([RefusalCount(NOW_MS, "day", "a", "limit", 3), RefusalCount(NOW_MS, "day", "b", "limit", 2)])
    theirs.add_refusals([RefusalCount(NOW_MS, "day", "a", "limit", 5)])
    theirs.claim(CLAIM._replace(hold_ms=2 * HOUR_MS))
    ours.claim(CLAIM)
    theirs.claim(CLAIM._replace(name="other"))
    for log, longest_ms, charges in ((pair.old, HOUR_MS, 4), (pair.new, DAY_MS, 7)):
        sums = Sums((NOW_MS, charges), [ChargedSum("search.list", "job", charges, 10, charges)])
        log.change(P, {}, {LONGEST: str(longest_ms), SUMS: sums.text(), "only": log.label})
    claimed = state_of(pair.new)["claim:job"]
    move(pair.old, pair.new)
    state = state_of(pair.new)
    assert [each.bucket for each in Facts.read(state[FACTS]).exhaustions] == ["search", "uploads"]
    assert state[LONGEST] == str(DAY_MS), "the log is kept for the longest window of both"
    assert (state["claim:job"], "claim:other" in state) == (claimed, True)
    refusals = State(pair.new, P, lambda: "k").refusals()
    assert {(count.job, count.calls) for count in refusals.counts} == {("a", 5), ("b", 2)}
    assert {(count.job, count.calls) for count in refusals.sums} == {("a", 5), ("b", 2)}
    assert Sums.read(state[SUMS]).rows() == [ChargedSum("search.list", "job", 7, 10, 7)]
    assert state["only"] == pair.old.label


def test_a_field_that_nobody_can_read_keeps_nothing_from_moving(pair: Pair) -> None:
    names = (FACTS, LONGEST, SUMS, "refusals", "refused:1", "refused_sums", "claim:job", "place:job|DE")
    pair.old.change(P, {}, {**dict.fromkeys(names, "[1"), "refused:2": "[" * 50_000})
    pair.new.change(P, {}, {"refused:2": "["})
    pair.new.change(P, {}, dict.fromkeys(names, "?"))
    add(pair.old, charge(3))
    move(pair.old, pair.new)
    assert len(entries_of(pair.new)) == 1


@pytest.mark.parametrize("longer", ["old", "new"])
def test_entries_for_the_longer_window_stay_in_the_log(pair: Pair, longer: str) -> None:
    """Each entry is there once, also after the log has moved back."""
    (theirs,) = in_use(pair, charge(1))
    (ours,) = added(pair.old, charge(2))
    pair.clock.now_ms += 3 * DAY_MS
    late = added(pair.new, charge(4)) + added(pair.old, charge(8))
    shorter = pair.new if longer == "old" else pair.old
    shorter.trim(P, pair.clock.now_ms - DAY_MS)
    move(pair.old, pair.new)
    kept = {entry.key: entry.units for entry in entries_of(pair.new)}
    assert kept == {entry.key: entry.units for entry in (theirs, ours, *late)}
    for old, new in ((pair.new, pair.old), (pair.old, pair.new)):
        move(old, new)
        entries = entries_of(new)
        assert {entry.key: entry.units for entry in entries} == kept
        assert len(entries) == len(kept)


# -- what cannot be moved ----------------------------------------------------------------------------------------------


def test_an_impossible_move_is_one_line_and_changes_nothing(pair: Pair) -> None:
    def refuses(old: Log, new: Log, why: str) -> None:
        before = [(content(log), log.begin(P).epoch) for log in (pair.old, pair.new)]
        with pytest.raises(QuotaError) as raised:
            plan_move(old, new, [P])
        assert why in str(raised.value)
        assert "\n" not in str(raised.value)
        assert [(content(log), log.begin(P).epoch) for log in (pair.old, pair.new)] == before

    refuses(pair.old, pair.new, "holds nothing of project p")
    refuses(pair.old, pair.old, "is both the old ledger and the new one")
    add(pair.old, charge())
    assert pair.old.seal(P, fence(pair.old), "redis://third/0")
    refuses(pair.old, pair.new, "has moved to redis://third/0 already")
    add(pair.new, charge())
    refuses(pair.new, pair.old, "has moved to redis://third/0; name another ledger")


def test_a_move_distinguishes_a_copy_from_another_log(pair: Pair) -> None:
    """Both have one epoch, as after a copy by hand: nobody can say which of them is in use."""
    add(pair.old, charge())
    add(pair.new, charge())
    with pytest.raises(QuotaError, match="hold one log, or are one ledger: nothing was changed"):
        plan_move(pair.old, pair.new, [P])


@pytest.mark.parametrize("holds", ["charges", "claims", "nothing"])
@pytest.mark.parametrize("pair", BETWEEN, indirect=True, ids="-".join)
def test_one_ledger_under_two_urls_stays_as_it_is(pair: Pair, holds: str) -> None:
    other = pair.open(0)
    other.label += "?"
    if holds == "charges":
        used(pair.old, pair.clock)
    elif holds == "claims":
        State(pair.old, P, lambda: "k").claim(CLAIM)
    before, epoch = content(pair.old), pair.old.begin(P).epoch

    def move_there() -> None:
        steps = [Step(P, "nothing")] if holds == "nothing" else plan_move(pair.old, other, [P])
        carry_out(pair.old, other, steps[0], lambda *_: None)

    with pytest.raises(QuotaError, match=r"one ledger|behind both urls"):
        move_there()
    assert (content(pair.old), pair.old.begin(P).epoch) == (before, epoch)


# -- stopped, and taken back -------------------------------------------------------------------------------------------


class Mover:
    """The two logs of one mover, which is stopped after so many writes. With `unheard` it gets no answer to the last
    write."""

    def __init__(self, pair: Pair, writes: int, *, unheard: bool = False) -> None:
        self.left, self.unheard = writes, unheard
        self.old: Any = _Stopping(self, pair.old)
        self.new: Any = _Stopping(self, pair.new)


class _Stopping:
    def __init__(self, mover: Mover, log: Log) -> None:
        self._mover, self._log = mover, log

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._log, name)
        if not callable(asked):
            return asked

        def ask_until_stopped(*args: Any, **more: Any) -> Any:
            writes = name in WRITES and not (name == "change" and not args[2])
            if self._mover.left < writes or self._mover.left < 0:
                self._mover.left = -1
                raise LedgerError("stopped")
            answer = asked(*args, **more)
            self._mover.left -= writes
            if self._mover.unheard and writes and not self._mover.left:
                self._mover.left = -1
                raise LedgerError("stopped")
            return answer

        return ask_until_stopped


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("place", range(WRITES_OF_A_MOVE + 1))
@in_files
def test_a_move_stopped_anywhere_goes_on_or_has_done_nothing(pair: Pair, place: int, back: bool, unheard: bool) -> None:
    """Like a kill, a stop gives nothing back. The logs are never open together, and each charge is there once."""
    used(pair.old, pair.clock)
    held = content(pair.old)
    mover = Mover(pair, place, unheard=unheard)
    with pytest.raises(LedgerError) if place < WRITES_OF_A_MOVE or unheard else nullcontext():
        move(mover.old, mover.new)
    assert is_open(pair.old) + is_open(pair.new) <= 1
    if is_seal(pair.old.begin(P).epoch):
        assert content(pair.new) == held, "it is there before the old one is closed"
    pair.clock.now_ms += LEASE_MS
    if back and not is_open(pair.new):
        if not is_seal(pair.old.begin(P).epoch) and not pair.new.names(P):
            return  # nothing is there, and the fence around the old one is over
        move(pair.new, pair.old)
        assert (is_open(pair.old), content(pair.old)) == (True, held)
        assert is_seal(pair.new.begin(P).epoch)
        return
    move(pair.old, pair.new)
    assert (content(pair.new), is_open(pair.new)) == (held, True)
    assert pair.old.begin(P).epoch == f"!{pair.new.label}"


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("place", range(WRITES_OF_A_MOVE + 1))
@in_files
def test_a_move_back_stopped_anywhere_leaves_at_most_one_log_that_opens(pair: Pair, place: int, unheard: bool) -> None:
    """The seal of the log that it moves back to is no lease, so nobody charges there before the other log is closed."""
    used(pair.old, pair.clock)
    move(pair.old, pair.new)
    held = content(pair.new)
    mover = Mover(pair, place, unheard=unheard)
    with pytest.raises(LedgerError) if place < WRITES_OF_A_MOVE or unheard else nullcontext():
        move(mover.new, mover.old)
    pair.clock.now_ms += LEASE_MS
    logs = (pair.old, pair.new)
    assert sum(log.fence(P, log.begin(P).epoch, "somebody's", 0)[0] for log in logs) <= 1
    move(pair.new, pair.old)
    assert (content(pair.old), is_open(pair.old)) == (held, True)
    assert pair.new.begin(P).epoch == f"!{pair.old.label}"


def test_a_move_has_as_many_writes_as_the_test_of_stopping_tries(pair: Pair) -> None:
    used(pair.old, pair.clock)
    mover = Mover(pair, 100)
    move(mover.old, mover.new)
    assert 100 - mover.left == WRITES_OF_A_MOVE


@each_target
def test_a_move_that_fails_gives_the_old_log_back_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    used(pair.old, pair.clock)
    held, epoch = content(pair.old), pair.old.begin(P).epoch

    def fails(*_: Any, **more: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pair.new), "replace", fails)
    with pytest.raises(KeyboardInterrupt):
        move(pair.old, pair.new)
    assert (content(pair.old), pair.old.begin(P).epoch) == (held, epoch)
    assert pair.new.begin(P).epoch == ""
    add(pair.old, charge())


@each_target
def test_a_way_back_that_fails_leaves_the_seal(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    used(pair.old, pair.clock)
    move(pair.old, pair.new)

    with monkeypatch.context() as patched:
        patched.setattr(type(pair.old), "replace", no_answer)
        with pytest.raises(LedgerError, match="no answer"):
            move(pair.new, pair.old)
    assert pair.old.begin(P).epoch == f"!{pair.new.label}"
    assert is_open(pair.new)
    assert move(pair.new, pair.old).kind == "move"


@each_target
def test_a_way_back_whose_last_step_fails_seals_the_log_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other log is closed by then, so both wait for the next move."""
    used(pair.old, pair.clock)
    move(pair.old, pair.new)
    held = content(pair.new)
    with monkeypatch.context() as patched:
        patched.setattr(fences.Fence, "open", no_answer)
        with pytest.raises(LedgerError, match="no answer"):
            move(pair.new, pair.old)
    assert (pair.old.begin(P).epoch, pair.new.begin(P).epoch) == (f"!{pair.new.label}", f"!{pair.old.label}")
    assert move(pair.new, pair.old).kind == "go on"
    assert (content(pair.old), is_open(pair.old)) == (held, True)


@each_target
def test_a_replaced_log_does_not_stand_under_its_old_epoch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has read it under that epoch would not read its new entries."""
    used(pair.old, pair.clock)
    in_use(pair, charge())

    monkeypatch.setattr(type(pair.old), "seal", no_answer)
    with pytest.raises(LedgerError, match="no answer"):
        move(pair.old, pair.new)
    assert is_fence(pair.new.begin(P).epoch)
    assert is_open(pair.old)


@pytest.mark.parametrize("pair", BETWEEN, indirect=True, ids="-".join)
def test_a_second_move_restores_what_the_new_ledger_lost(pair: Pair) -> None:
    used(pair.old, pair.clock)
    held = content(pair.old)
    move(pair.old, pair.new)
    pair.places[1].lose("log", "state")
    assert move(pair.old, pair.new).kind == "go on"
    assert content(pair.new) == held
    assert is_open(pair.new)
    assert is_seal(pair.old.begin(P).epoch)


# -- others meanwhile --------------------------------------------------------------------------------------------------


def test_nobody_appends_to_either_log_while_it_moves(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    used(pair.old, pair.clock)
    (theirs,) = in_use(pair, charge())
    epochs = [(log, log.begin(P).epoch, log.begin(P).tip) for log in (pair.old, pair.new)]
    words: list[str] = []
    replace = fences.Fence.replace

    def beside(fence: fences.Fence, *args: Any) -> None:
        for log, epoch, tip in epochs:
            words.append(ask(log, charge(), epoch=epoch, seen=tip, room=99).word)
            words.append(str(log.change(P, {}, {"facts": "x"}).done))
        replace(fence, *args)

    monkeypatch.setattr(fences.Fence, "replace", beside)
    move(pair.old, pair.new)
    assert words == ["BEHIND", "False"] * 2
    assert theirs in entries_of(pair.new)


@each_target
def test_the_past_is_copied_before_the_fence_and_new_entries_after(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    used(pair.old, pair.clock)
    pair.old.add_past(P, [charge(id=(pair.clock.now_ms, 0))])  # by a move that was stopped
    before, take = past_of(pair.old), fences.Fence.take

    def late(fence: fences.Fence) -> None:
        if is_open(pair.old):
            assert past_of(pair.new) == before
            pair.old.trim(P, pair.clock.now_ms)
        take(fence)

    monkeypatch.setattr(fences.Fence, "take", late)
    move(pair.old, pair.new)
    assert past_of(pair.new) == before[:-1]
    assert len(past_of(pair.old)) > len(before)
    ours, theirs = (sorted([*past_of(log), *entries_of(log)]) for log in (pair.old, pair.new))
    assert ours == theirs


@pytest.mark.parametrize("parts", [["state"], ["log", "state"]])
def test_a_past_moves_even_if_the_state_no_longer_names_it(pair: Pair, parts: list[str]) -> None:
    used(pair.old, pair.clock)
    pair.places[0].lose(*parts)
    move(pair.old, pair.new)
    ours, theirs = (sorted([*past_of(log), *entries_of(log)]) for log in (pair.old, pair.new))
    assert ours == theirs


@in_files
def test_the_fences_are_renewed_for_as_long_as_the_copy_takes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "RENEW_S", 0.005)
    used(pair.old, pair.clock)
    read, renewed = pair.old.read, list[str]()

    def slow(*args: Any) -> Any:
        if is_fence(pair.new.begin(P).epoch):
            pair.clock.now_ms += LEASE_MS // 2
            renewed.append(f":{pair.clock.now_ms + LEASE_MS}")
            for log in (pair.old, pair.new):
                until(lambda log=log: log.begin(P).epoch.endswith(renewed[-1]), "its fence is not renewed")
        return read(*args)

    monkeypatch.setattr(pair.old, "read", slow)
    move(pair.old, pair.new)
    assert renewed
    assert is_open(pair.new)


@in_files
def test_a_mover_waits_for_another_fence_and_then_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "WAIT_S", 0.05)
    used(pair.old, pair.clock)
    held, standing = content(pair.old), fence(pair.old, "theirs")
    with pytest.raises(FenceLostError, match=r"another `quota ledger move`, .*run this again"):
        move(pair.old, pair.new)
    assert (content(pair.old), pair.old.begin(P).epoch) == (held, standing)
    assert not is_fence(pair.new.begin(P).epoch), "the other fence is given back"
    pair.clock.now_ms += LEASE_MS
    assert move(pair.old, pair.new).kind == "move"
    monkeypatch.setattr(pair.new, "fence", lambda project, epoch, *_: (False, epoch))  # others are quicker each time
    with pytest.raises(FenceLostError):
        move(pair.new, pair.old)


@in_files
def test_a_log_that_somebody_else_fenced_meanwhile_is_not_sealed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mover was held up for longer than its lease, and others have charged since: it begins again."""
    used(pair.old, pair.clock)
    replace, late = fences.Fence.replace, list[Entry]()

    def held_up(fence: fences.Fence, *args: Any) -> None:
        replace(fence, *args)
        if not late:
            pair.clock.now_ms += LEASE_MS
            done, stands = pair.old.fence(P, "", "theirs")
            assert done
            assert pair.old.replace(P, stands, pair.old.begin(P).tip, entries_of(pair.old), "second")
            late.extend(added(pair.old, charge(77)))

    monkeypatch.setattr(fences.Fence, "replace", held_up)
    pair.clock.now_ms += 1
    assert move(pair.old, pair.new).kind == "move"
    assert late[0] in entries_of(pair.new)
    assert len(entries_of(pair.new)) == len({entry.key for entry in entries_of(pair.new)})


@pytest.mark.parametrize("there_and_back", [False, True])
def test_one_of_two_movers_wins_and_nothing_is_lost(pair: Pair, there_and_back: bool) -> None:
    used(pair.old, pair.clock)
    (theirs,) = in_use(pair, charge(1))
    keys = {entry.key for entry in [theirs, *entries_of(pair.old)]}
    errors: list[str] = []

    def mover(old: Log, new: Log) -> None:
        try:
            move(old, new)
        except QuotaError as error:
            errors.append(str(error))

    ways = [(pair.open(0), pair.open(1)) for _ in range(2)]
    if there_and_back:
        ways[1] = ways[1][1], ways[1][0]
    in_threads(mover, *ways)
    assert there_and_back or errors == []
    assert [is_open(pair.old), is_open(pair.new)].count(True) == 1
    entries = [entry.key for entry in entries_of(pair.old if is_open(pair.old) else pair.new)]
    assert keys <= {*entries}
    assert len(entries) == len({*entries})
