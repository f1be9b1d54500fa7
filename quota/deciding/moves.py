"""Moves the logs of projects to another ledger: `quota ledger move`.

    1   the new ledger gets the past, while calls go on: no decision reads it
    2   the mover fences both logs: nobody appends, and callers wait for a moment
    3   the new ledger gets the state and the union of both logs (`quota.rules.union`), still fenced
    4   the mover seals the old log: the seal names the new ledger for 400 days, and does not end before by itself
    5   the new log opens under its own epoch, so every machine compares it with its journal

Each fence is a lease that the mover renews. If the mover is stopped before step 4, nothing has changed: the leases end,
and both logs go on as they were. After step 4 the new log has everything, and opens with the next call. A log that
moves back stays sealed until step 5. In each case, the same command completes the move. Entries that are copied twice
are there once, because their keys identify them.

    plan_move    lists what to do for each project; changes nothing
    carry_out    does one step of it
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

from quota.deciding.fence import Fence, FenceLostError, given_back, place
from quota.errors import QuotaError
from quota.ledger.log import SEAL, Log, Progress, edge_of, entries_held, in_pieces, is_closed, is_fence, is_seal
from quota.ledger.state import API, LONGEST, check_api
from quota.rules import facts
from quota.rules.claims import CLAIM, PLACE
from quota.rules.entry import END, START, Entry, Id, read_id
from quota.rules.facts import FACTS, Facts
from quota.rules.refusals import MAX_KEYS, REFUSALS, REFUSED_SUMS
from quota.rules.spent import SUMS
from quota.rules.union import missing, union

FIELDS_AT_ONCE = 20
"""The most fields of a state that are copied at once. A place has up to 70 kB."""

MAX_TRIES = 3
"""How often a move begins again because another process was quicker."""

Kind = Literal["nothing", "move", "go on", "moved already"]


class Step(NamedTuple):
    """The task for one project, or what was done, with the number of its charges in the old ledger."""

    project: str
    kind: Kind
    charges: int = 0


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan_move(old: Log, new: Log, projects: Sequence[str]) -> list[Step]:
    """The steps of a move of these projects. Changes nothing. Raises QuotaError if the move cannot be done."""
    if old.label == new.label:
        raise QuotaError(f"{old.label} is both the old ledger and the new one")
    steps = [Step(project, _kind(old, new, project)) for project in projects]
    if all(step.kind == "nothing" for step in steps):
        named = ", ".join(projects[:3]) + (", ..." if len(projects) > 3 else "")
        held = old.projects()
        holds = f"; it holds {', '.join(held[:5])}" if held else ""
        raise QuotaError(f"ledger {old.label} holds nothing of project {named or '(none)'}{holds}: nothing was moved")
    return steps


def _kind(old: Log, new: Log, project: str) -> Kind:
    source, target = (log.begin(project, (API,)) for log in (old, new))
    check_api(new.label, project, source.state.get(API, ""), target.state)
    ours, theirs = source.epoch, target.epoch
    moves_back = theirs == SEAL + old.label
    if is_seal(ours):
        if ours != SEAL + new.label:
            raise QuotaError(f"{place(old, project)} has moved to {ours[1:]} already: nothing was changed")
        is_unfinished = not theirs or is_fence(theirs)  # or the new ledger lost the moved entries
        return "go on" if moves_back or (is_unfinished and _holds_anything(old, project)) else "moved already"
    if is_seal(theirs) and not moves_back:
        raise QuotaError(f"{place(new, project)} has moved to {theirs[1:]}; name another ledger: nothing was changed")
    if ours and ours == theirs and not is_closed(ours):
        raise _one_ledger(old, new, project)
    return "move" if moves_back or _holds_anything(old, project) else "nothing"


def _holds_anything(log: Log, project: str) -> bool:
    beginning = log.begin(project)
    return bool(max(beginning.tip, beginning.trimmed) > START or log.names(project) or log.past(project, START, END, 1))


def _one_ledger(old: Log, new: Log, project: str) -> QuotaError:
    return QuotaError(f"{place(old, project)} and {new.label} hold one log, or are one ledger: nothing was changed")


# -- doing it ----------------------------------------------------------------------------------------------------------


def carry_out(old: Log, new: Log, step: Step, progress: Progress) -> Step:
    """Do one step of a plan, unless another process does it meanwhile.

    Raises LedgerError if a ledger does not answer, FenceLostError if another process works on one of the logs, and
    QuotaError if that process has moved it elsewhere.
    """
    project, kind, _ = step
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            if kind == "nothing":
                _close(old, new, project)
            elif kind != "moved already":
                _move(old, new, project, kind, progress)
            break
        except FenceLostError:
            kind = _kind(old, new, project)
            if not tries_left and kind != "moved already":
                raise
    return Step(project, kind, charges_in(old, project))


def _close(old: Log, new: Log, project: str) -> None:
    """Seal the empty log of a project, so that no machine with the old url begins a log there."""
    source = Fence(old, project, os.urandom(8).hex())
    with given_back(source):
        source.take()
        if new.begin(project).epoch == source.epoch:
            raise _one_ledger(old, new, project)
        source.seal(new.label)


def _move(old: Log, new: Log, project: str, kind: Kind, progress: Progress) -> None:
    token, was_sealed = os.urandom(8).hex(), kind == "go on"
    source, target = Fence(old, project, token), Fence(new, project, token, lifts=SEAL + old.label)
    # Of two moves in opposite directions, the first to fence goes on. A sealed log needs no fence.
    fenced = [target] if was_sealed else sorted((source, target), key=lambda side: side.log.label)
    edge, epoch = edge_of(old, project), old.begin(project).epoch
    _copy_past(old, new, project, progress)
    with given_back(*fenced):
        for side in fenced:
            side.take()
        if not was_sealed and source.stood != epoch:  # another move may have brought more of a past
            raise source.overtaken()
        with nullcontext() if was_sealed else source.renewed(), target.renewed():
            _copy_state(old, target)
            entries, trimmed = _united(old, new, project, edge, progress)
            target.replace(entries, trimmed)
        if not was_sealed:
            source.seal(new.label)
        target.lift()
        if old.begin(project).epoch != SEAL + new.label:  # another move takes the log back
            raise target.overtaken()
        target.open()


# -- what is copied ----------------------------------------------------------------------------------------------------


def _copy_past(old: Log, new: Log, project: str, progress: Progress) -> None:
    entries: list[Entry] = []
    for piece in in_pieces(old.past, project, START):
        progress(project, len(piece))
        entries += [entry for entry in piece if entry.kind != "unreadable"]
    new.add_past(project, entries)


def _united(old: Log, new: Log, project: str, edge: Id, progress: Progress) -> tuple[list[Entry], Id]:
    """The union of both logs, and the id up to which it is trimmed. The union has every entry that either log still
    has, because a window of some configuration may be as long, and what left the old log since it had this `edge`."""
    edge = min(edge, edge_of(old, project), edge_of(new, project))
    is_whole = all(log.begin(project).trimmed == START for log in (old, new))
    trimmed = START if is_whole else edge
    have, seen = (entries_held(log, project, trimmed, progress) for log in (new, old))
    return union(have, missing(have, seen, trimmed, 0), new.now_ms(), trimmed), trimmed


def charges_in(log: Log, project: str) -> int:
    """How many charges of a project a ledger has, in its log and its past."""
    return sum(entry.kind == "charge" for entry in entries_held(log, project, START))


# -- the state ---------------------------------------------------------------------------------------------------------


def _copy_state(old: Log, target: Fence) -> None:
    """Copy facts, claims, places and refusals, and unite them with the target's."""
    names, project = old.names(target.project), target.project
    for at in range(0, len(names), FIELDS_AT_ONCE):
        piece = dict.fromkeys(names[at : at + FIELDS_AT_ONCE])
        ours, theirs = old.change(project, piece, {}).state, target.log.change(project, piece, {}).state
        target.change({name: _together(name, text, theirs.get(name, text)) for name, text in ours.items()})


def _together(name: str, ours: str, theirs: str) -> str:
    """The union of a field that both states have. The target's may be an earlier copy of ours, so this adds nothing up:
    of two counts it takes the larger."""
    try:
        if name == FACTS:
            return facts.union(Facts.read(ours), Facts.read(theirs)).text()
        if name == LONGEST:
            return str(max(int(ours), int(theirs)))
        if name.startswith((CLAIM, PLACE)):  # UNTIL_MS TEXT
            return max(ours, theirs, key=lambda text: int(text.partition(" ")[0]))
        if name == SUMS:
            (head, rows), (their_head, their_rows) = json.loads(ours), json.loads(theirs)
            return _json([max(head, their_head, key=read_id), _larger(rows, their_rows)])
        if name == REFUSED_SUMS or name.startswith("refused:"):
            return _json(_larger(json.loads(ours), json.loads(theirs)))
        if name == REFUSALS:
            (kept, hours, keys), (their_kept, their_hours, their_keys) = json.loads(ours), json.loads(theirs)
            all_keys = [*dict.fromkeys([*their_keys, *keys])][-MAX_KEYS:]
            return _json([max(kept, their_kept), sorted({*hours, *their_hours}), all_keys])
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # one of them cannot be read
    return ours


def _larger(ours: list[list[Any]], theirs: list[list[Any]]) -> list[list[Any]]:
    """The union of rows of names and numbers, with the larger numbers."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for row in [*theirs, *ours]:
        names, numbers = tuple(x for x in row if isinstance(x, str)), [x for x in row if not isinstance(x, str)]
        rows[names] = [*map(max, numbers, rows.get(names, numbers))]
    return [[*names, *numbers] for names, numbers in rows.items()]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
