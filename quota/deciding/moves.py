"""Moves the logs of projects to another ledger, with all that counts: `quota ledger move`.

    1   both logs are fenced: nobody appends, and whoever asks waits for a moment
    2   the new one gets the past, the state and the union of both logs (`quota.rules.union`), and stays fenced
    3   the old one is sealed: it names the new one for 400 days, and never opens again by itself
    4   the new one opens, under an epoch of its own, so every machine compares it with what it has seen

Each fence is a lease that the mover renews. A mover that is stopped before step 3 has done nothing: the leases end, and
both logs go on as they were. After step 3 all of it is in the new log, which opens with the next call. Running the same
command again completes either. What is copied twice is there once, because entries are known by their keys.

    plan_move    what is to be done for each project; changes nothing
    carry_out    does it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple

from quota.deciding.fence import Fence, FenceLostError, given_back, of
from quota.errors import MoveRefused
from quota.ledger.log import (
    MAX_READ,
    SEAL,
    Log,
    is_closed,
    is_fence,
    is_seal,
)
from quota.rules import facts
from quota.rules.entry import END, START, Entry, Id, just_before
from quota.rules.facts import FACTS, Facts
from quota.rules.union import missing, union

FIELDS_AT_ONCE = 20
"""The most fields of a state that are copied at once. A place has up to 70 kB."""

PAST_AT_ONCE = 50_000
"""The most entries that are added to a past at once. One that is in use may be put together anew each time."""

MAX_TRIES = 3
"""How often a move begins again because somebody else was quicker."""

Progress = Callable[[str, int], None]
"""Told of the project, and how many entries were read of it."""

Kind = Literal["nothing", "move", "go on", "moved already"]


class Step(NamedTuple):
    """What is to be done for one project."""

    project: str
    kind: Kind


class Moved(NamedTuple):
    """What became of one project, and how many charges the old ledger has of it."""

    project: str
    kind: Kind
    charges: int


# -- what is to be done ------------------------------------------------------------------------------------------------


def plan_move(old: Log, new: Log, projects: Sequence[str]) -> list[Step]:
    """What a move of these projects has to do. Changes nothing. Raises MoveRefused where it cannot be done."""
    if old.label == new.label:
        raise MoveRefused(f"{old.label} is both the old ledger and the new one")
    steps = [Step(project, _kind(old, new, project)) for project in projects]
    if all(step.kind == "nothing" for step in steps):
        named = ", ".join(projects[:3]) + (", ..." if len(projects) > 3 else "")
        held = old.projects()
        holds = f"; it holds {', '.join(held[:5])}" if held else ""
        raise MoveRefused(f"ledger {old.label} holds nothing of project {named or '(none)'}{holds}: nothing was moved")
    return steps


def _kind(old: Log, new: Log, project: str) -> Kind:
    ours, theirs = old.begin(project).epoch, new.begin(project).epoch
    if is_seal(ours):
        if ours != SEAL + new.label:
            raise MoveRefused(f"{of(old, project)} has moved to {ours[1:]} already: nothing was changed")
        is_unfinished = not theirs or is_fence(theirs)  # or it has lost what was moved to it
        return "go on" if is_unfinished and _holds_anything(old, project) else "moved already"
    if is_seal(theirs) and theirs != SEAL + old.label:
        raise MoveRefused(f"{of(new, project)} has moved to {theirs[1:]}; name another ledger: nothing was changed")
    if ours and ours == theirs and not is_closed(ours):
        raise _one_ledger(old, new, project)
    return "move" if _holds_anything(old, project) else "nothing"


def _holds_anything(log: Log, project: str) -> bool:
    beginning = log.begin(project)
    return bool(max(beginning.tip, beginning.trimmed) > START or log.names(project) or log.past(project, START, END, 1))


def _one_ledger(old: Log, new: Log, project: str) -> MoveRefused:
    return MoveRefused(f"{of(old, project)} and {new.label} hold one log, or are one ledger: nothing was changed")


# -- doing it ----------------------------------------------------------------------------------------------------------


def carry_out(old: Log, new: Log, step: Step, progress: Progress) -> Moved:
    """Do one step of a plan. What another process does meanwhile of the same move need not be done again.

    Raises LedgerError where a ledger does not answer, FenceLostError where somebody else is at work on one of the
    logs, and MoveRefused where that one has moved elsewhere.
    """
    project, kind = step
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            if kind == "nothing":
                _close(old, new, project)
            elif kind != "moved already":
                _move(old, new, project, kind, progress)
            return Moved(project, step.kind if kind != "moved already" else kind, _charges(old, project))
        except FenceLostError:
            kind = _kind(old, new, project)
            if not tries_left and kind != "moved already":
                raise
    return Moved(project, kind, _charges(old, project))


def _close(old: Log, new: Log, project: str) -> None:
    """Seal the log of a project that holds nothing: a machine that still has the old url must not begin one there."""
    source = Fence(old, project, os.urandom(8).hex())
    with given_back(source):
        source.take()
        if new.begin(project).epoch == source.epoch:
            raise _one_ledger(old, new, project)
        source.seal(new.label)


def _move(old: Log, new: Log, project: str, kind: Kind, progress: Progress) -> None:
    token = os.urandom(8).hex()
    source, target = Fence(old, project, token), Fence(new, project, token, lifts=SEAL + old.label)
    past = _copy_past(old, new, project, START, progress)  # no decision reads it, so it may change meanwhile
    # Of two movers, there and back, the one with the first fence goes on. A sealed log needs none.
    fenced = [target] if kind == "go on" else sorted((source, target), key=lambda side: side.log.label)
    with given_back(*fenced), ExitStack() as source_stands:
        for side in fenced:
            side.take()
        if kind != "go on":
            source_stands.enter_context(source.renewed())
        with target.renewed():
            _copy_past(old, new, project, past, progress)
            _copy_state(old, target)
            entries, trimmed = _united(old, new, project, progress)
        target.replace(entries, trimmed)
        source_stands.close()
        if kind != "go on":
            source.seal(new.label)
        target.open()


# -- what is copied ----------------------------------------------------------------------------------------------------


def _copy_past(old: Log, new: Log, project: str, after: Id, progress: Progress) -> Id:
    """Copy what has left the log behind an entry; returns the newest."""
    while True:
        entries = _entries(old.past, project, after, END, PAST_AT_ONCE, progress)
        if entries:
            new.add_past(project, entries)
            after = entries[-1].id
        if len(entries) < PAST_AT_ONCE:
            return after


def _copy_state(old: Log, target: Fence) -> None:
    """Copy facts, claims, places and refusals, and unite them with those that the target has."""
    names, project = old.names(target.project), target.project
    for at in range(0, len(names), FIELDS_AT_ONCE):
        piece = dict.fromkeys(names[at : at + FIELDS_AT_ONCE])
        ours, theirs = old.change(project, piece, {}).state, target.log.change(project, piece, {}).state
        becomes = {name: _state_of(name, text, theirs.get(name)) for name, text in ours.items()}
        if changed := {name: text for name, text in becomes.items() if text != theirs.get(name)}:
            target.change({**changed})


def _state_of(name: str, ours: str, theirs: str | None) -> str:
    """What becomes of a field. The old ledger served last; only facts are told to each by whoever hears of them."""
    if name != FACTS or theirs is None:
        return ours
    return facts.union(Facts.read(ours), Facts.read(theirs)).text()


def _united(old: Log, new: Log, project: str, progress: Progress) -> tuple[list[Entry], Id]:
    """The union of both logs, and up to where all has left it. Whatever one of them still has, the union has: somebody
    may have a window that is as long."""
    theirs = new.begin(project)
    trimmed = min(_edge(old, project), _edge(new, project))
    trimmed = START if trimmed == END else trimmed
    have, seen = [
        [
            entry
            for read in (log.past, log.read)
            for entry in _entries(read, project, trimmed, END, END[0], progress)
            if entry.kind != "unreadable"
        ]
        for log in (new, old)
    ]
    return union(have, missing(have, seen, trimmed, 0), theirs.clock_ms, trimmed), trimmed


def _edge(log: Log, project: str) -> Id:
    """Behind which entry a log has all; END where it has had none."""
    beginning = log.begin(project)
    if beginning.trimmed != START:
        return beginning.trimmed
    first = log.read(project, START, END, 1)
    return just_before(first[0].id[0]) if first else END


def _entries(
    read: Callable[[str, Id, Id, int], Sequence[Entry]],
    project: str,
    after: Id,
    through: Id,
    most: int,
    progress: Progress,
) -> list[Entry]:
    """At most so many entries, read in pieces."""
    entries: list[Entry] = []
    while len(entries) < most:
        piece = read(project, after, through, min(MAX_READ, most - len(entries)))
        entries += piece
        progress(project, len(entries))
        if len(piece) < MAX_READ:
            break
        after = piece[-1].id
    return entries


def _charges(log: Log, project: str) -> int:
    """How many charges a ledger has of a project, past ones too."""
    reads = [_entries(read, project, START, END, END[0], lambda *_: None) for read in (log.past, log.read)]
    return sum(entry.kind == "charge" for entries in reads for entry in entries)
