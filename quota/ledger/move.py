"""Moves what a ledger holds of a project to another ledger, with ids, corrections and all that counts (L27).

    1   NEW is reserved: `filling`, so that it admits nobody before everything is there
    2   OLD is `fenced`: from now on it refuses every decision and every other write, and names NEW. What was in flight
        is in its log, or was refused
    3   the log and the state are copied, a piece at a time
    4   OLD is `sealed`: from now on only a move back can open it again
    5   NEW is opened, with OLD's epoch: a machine that has seen OLD finds nothing missing

Each step is atomic, and changes nothing unless the step before it still stands. A move that is stopped anywhere is
taken up where it stopped by the same command. Until step 4 it can be taken back: by a move from NEW to OLD.

The log of a fenced ledger does not change, so a piece can be copied twice: it is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from quota.common.clock import NEVER
from quota.common.text import many, show
from quota.errors import LedgerError, MoveRefused
from quota.ledger.contract import MIN_RETENTION_MS, following_epoch, read_entries, root_of
from quota.ledger.entry import counted
from quota.ledger.fence import Field, Movable, OvertakenError, Role, Standing, Wanted
from quota.ledger.state_fields import checked_count, read_id, read_usages, usages_text
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import calendar_of, parse_duration, selector_of

PIECE = 500
"""The most charges that are copied at once: a few milliseconds of the server's time."""

Progress = Callable[[str, int, int], None]
"""Told of the project, how many charges are copied, and of how many."""

Kind = Literal["nothing", "move", "go on", "moved already", "take back"]


class Step(NamedTuple):
    """What is to be done for one project, from these standings."""

    project: str
    kind: Kind
    old: Standing
    new: Standing


class Moved(NamedTuple):
    """What became of one project."""

    project: str
    kind: Kind
    charges: int


# -- what is to be done ------------------------------------------------------------------------------------------------


def plan_move(old: Movable, new: Movable, projects: Sequence[str]) -> list[Step]:
    """What a move of these projects has to do. Changes nothing. Raises MoveRefused where it cannot be done."""
    if old.label == new.label:
        raise MoveRefused(f"{old.label} is both the old ledger and the new one")
    steps = [_plan(old, new, project) for project in projects]
    if all(step.kind == "nothing" for step in steps):
        named = ", ".join(projects[:3]) + (", ..." if len(projects) > 3 else "")
        held = old.projects()
        told = f"; it holds {', '.join(held[:5])}" if held else ""
        raise MoveRefused(f"ledger {old.label} holds nothing of project {named or '(none)'}{told}: nothing was moved")
    return steps


def _plan(old: Movable, new: Movable, project: str) -> Step:
    ours, theirs = _standing_for_taking_back(old, new, project)
    while True:
        try:
            return Step(project, _kind(old, new, project, ours, theirs), ours, theirs)
        except MoveRefused:
            # Another move may have come between the two looks, so the standings may be of different moments.
            before = ours.role, ours.move, theirs.role, theirs.move
            ours, theirs = _standing_for_taking_back(old, new, project)
            if before == (ours.role, ours.move, theirs.role, theirs.move):
                raise


def _standing_for_taking_back(old: Movable, new: Movable, project: str) -> tuple[Standing, Standing]:
    try:
        theirs = new.standing(project)
    except LedgerError as error:
        _name_the_way_back(old, new, project, error)
        raise
    try:
        return old.standing(project), theirs
    except LedgerError:
        # A move that cannot reach its target any more is taken back from the side that answers.
        if theirs.role == "fenced" and theirs.peer == old.label:
            return theirs._replace(role="filling", peer=new.label), theirs
        raise


def _name_the_way_back(old: Movable, new: Movable, project: str, error: LedgerError) -> None:
    """Raises the error anew if `old` waits for `new`, which does not answer any more."""
    try:
        ours = old.standing(project)
    except LedgerError:
        return
    if ours.role == "fenced" and ours.peer == new.label:
        raise LedgerError(
            f"{error}; or take the unfinished move back: quota ledger move {new.label} {old.label}"
        ) from error


def _kind(old: Movable, new: Movable, project: str, ours: Standing, theirs: Standing) -> Kind:
    same_root = bool(ours.epoch) and root_of(ours.epoch) == root_of(theirs.epoch)
    same_move = ours.move == theirs.move
    if not same_root:
        _check_not_emptied(old, new, project, theirs, ours)
        _check_not_emptied(new, old, project, ours, theirs)
    if ours.role == "empty":  # it may have lost what was filled
        return "take back" if theirs.role == "fenced" and theirs.epoch and theirs.peer == old.label else "nothing"
    if ours.role == "filling":
        if theirs.role == "fenced" and same_move:
            return "take back"
        if theirs.role == "open" and same_root:
            return "take back"
        raise MoveRefused(
            f"{_of(old, project)} is being filled from {ours.peer}; finish that first: quota ledger move "
            f"{ours.peer} {old.label}"
        )
    if ours.role in ("fenced", "sealed") and theirs.role == "filling" and same_move:
        return "go on"
    if ours.role in ("fenced", "sealed") and not ours.epoch:  # of a project that had nothing here
        return "moved already" if ours.role == "sealed" else "nothing"
    if ours.role == "sealed":
        if theirs.role == "open" and same_root:
            return "moved already"
        lost = _LOST.get(theirs.role, "") if ours.peer == new.label else ""
        raise MoveRefused(f"{_of(old, project)} has moved to {ours.peer} already{lost}: nothing was changed")
    if ours.role == "fenced" and ours.peer != new.label:
        raise MoveRefused(
            f"{_of(old, project)} is being moved to {ours.peer}; finish that, or take it back: quota ledger move "
            f"{ours.peer} {old.label}"
        )
    _check_new(old, new, project, theirs, same_root)
    return "move"


_LOST: dict[Role, str] = {"empty": ", which has lost it", "open": ", which has lost it, and stays in use"}


def _check_not_emptied(source: Movable, target: Movable, project: str, now: Standing, fenced: Standing) -> None:
    """Raises MoveRefused where a target was emptied in the middle of a move, and somebody charged it since."""
    if fenced.role == "fenced" and fenced.epoch and fenced.peer == target.label and now.role == "open":
        raise MoveRefused(
            f"{_of(target, project)} lost what was being moved there, and was charged since "
            f"({many(now.charges, 'charge')}): nothing was changed; delete its file, or its keys "
            f"quota:{{{project}}}:*, and run this again: machines that charged it tell the ledger that remains"
        )


def _check_new(old: Movable, new: Movable, project: str, theirs: Standing, same_root: bool) -> None:
    if theirs.role == "empty" or (theirs.role == "filling" and (same_root or not theirs.charges)):
        return
    if theirs.role in ("fenced", "sealed") and not theirs.charges:
        return
    if theirs.role == "open" and same_root:
        raise MoveRefused(f"{_of(old, project)} and {new.label} hold one log, or are one ledger: nothing was changed")
    if theirs.role == "open":
        raise MoveRefused(
            f"{_of(new, project)} is in use ({many(theirs.charges, 'charge')}); name an empty ledger: nothing was "
            "changed"
        )
    if theirs.role == "filling":
        raise MoveRefused(f"{_of(new, project)} is being filled from {theirs.peer}: nothing was changed")
    if not (same_root and theirs.role == "sealed"):
        raise MoveRefused(f"{_of(new, project)} has moved to {theirs.peer}; name an empty ledger: nothing was changed")
    ms, seq = theirs.last
    there = old.read(project, (ms, seq - 1) if seq else (ms - 1, NEVER), ms, 1)
    if not any((entry.ms, entry.seq) == theirs.last for entry in there) and not _is_trimmed(old, project, ms):
        raise MoveRefused(
            f"{_of(new, project)} holds charges that {old.label} lacks; name an empty ledger: nothing was changed"
        )


def _is_trimmed(old: Movable, project: str, ms: int) -> bool:
    fields = {name: value for piece in old.state(project) for name, value in piece if name == "trimmed_through_ms"}
    return ms <= _number(old, fields.get("trimmed_through_ms", "0"))


def _of(ledger: Movable, project: str) -> str:
    return f"project {show(project)} of ledger {ledger.label}"


# -- doing it ----------------------------------------------------------------------------------------------------------


def carry_out(old: Movable, new: Movable, step: Step, progress: Progress) -> Moved:
    """Do one step of a plan. What another process does meanwhile of the same move need not be done again.

    Raises LedgerError where a ledger does not answer, OvertakenError where another move is under way, MoveRefused where
    that one goes elsewhere.
    """
    try:
        return _carry_out(old, new, step, progress)
    except OvertakenError as error:
        now = _plan(old, new, step.project)  # raises MoveRefused
        if now.kind == "moved already":
            return Moved(step.project, now.kind, now.old.charges)
        raise OvertakenError(_who_else(old, new, step, now)) from error


def _who_else(old: Movable, new: Movable, step: Step, now: Step) -> str:
    """What has become of a ledger that was not as a step expected it, and what to do."""
    if step.kind == "take back":
        if now.old.role == "open":
            return (
                f"another process has just finished the move to {old.label}, so it could not be taken back; nothing "
                f"was changed; to move {_of(old, step.project)} to {new.label}, run this again"
            )
        return f"another `quota ledger move` is at work on {_of(old, step.project)}; run this again when it has ended"
    if now.kind in ("move", "nothing"):
        what = "has begun with" if now.new.role == "filling" else "was taken back for"
        return (
            f"another `quota ledger move` {what} {_of(old, step.project)}, which takes charges as before; run this "
            "again in a moment"
        )
    return (
        f"another `quota ledger move` of {_of(old, step.project)} is under way, or {new.label} lost data; run this "
        "again when that move has ended: it finishes what is left"
    )


def _carry_out(old: Movable, new: Movable, step: Step, progress: Progress) -> Moved:
    project, kind = step.project, step.kind
    ours, theirs = step.old, step.new
    if kind == "nothing":
        _close_empty(old, new, step)
    elif kind == "take back":
        _take_back(old, new, step)
    elif kind != "moved already":
        if kind == "move":
            ours, theirs = _fence(old, new, step)
        # Also where OLD is sealed: NEW may have lost some of it since.
        theirs = _copy(old, new, project, ours, theirs, progress)
        ours = _changed(old, project, ours, Wanted("sealed", ours.move, peer=new.label, charges=theirs.charges))
        _changed(new, project, theirs, Wanted("open", ours.move, charges=ours.charges))
    return Moved(project, kind, ours.charges)


def _changed(ledger: Movable, project: str, before: Standing, wanted: Wanted) -> Standing:
    now = ledger.change(project, before, wanted)
    if (now.role, now.move) != (wanted.role, wanted.move):
        raise OvertakenError(f"{_of(ledger, project)} is not as this move left it: it is {now.role} now")
    return now


def _fence(old: Movable, new: Movable, step: Step) -> tuple[Standing, Standing]:
    project, move = step.project, os.urandom(8).hex()
    epoch = step.old.epoch or move
    theirs = _changed(new, project, step.new, Wanted("filling", move, peer=old.label, epoch=epoch))
    ours = _changed(old, project, step.old, Wanted("fenced", move, peer=new.label, epoch=epoch))
    return ours, theirs


def _close_empty(old: Movable, new: Movable, step: Step) -> None:
    """Fence a project that holds nothing: a machine that still has the old url must not begin one here."""
    ours, move = step.old, os.urandom(8).hex()
    if ours.role == "empty":
        ours = _changed(old, step.project, ours, Wanted("fenced", move, peer=new.label))
    _changed(old, step.project, ours, Wanted("sealed", ours.move, peer=new.label))


def _take_back(old: Movable, new: Movable, step: Step) -> None:
    """`old` is what was being filled, `new` where that came from.

    Afterwards `old` names `new`: it may have been the ledger before, and machines may still have its url.
    """
    project, ours, theirs = step.project, step.old, step.new
    if theirs.role == "fenced":
        _changed(new, project, theirs, Wanted("open", theirs.move))
    try:
        # Nothing is filled: what it has been filled with, it may have lost.
        ours = _changed(old, project, ours, Wanted("filling", theirs.move, peer=new.label, epoch=theirs.epoch))
        for _ in old.clear(project, ours.move):
            pass
        _changed(old, project, ours, Wanted("sealed", ours.move, peer=new.label, charges=0))
    except LedgerError:  # it may be gone for good; what is left in it can never be opened
        if theirs.role != "fenced":
            raise


# -- the copy ----------------------------------------------------------------------------------------------------------


def _copy(old: Movable, new: Movable, project: str, ours: Standing, theirs: Standing, progress: Progress) -> Standing:
    survey = _survey(old, new, project, ours)
    move = ours.move
    filling = Wanted("filling", move, peer=old.label, epoch=survey.epoch)
    if theirs.epoch != survey.epoch:  # it was reserved before the fence
        theirs = _changed(new, project, theirs, filling)
    if theirs.filled is None:
        for _ in new.clear(project, move):
            progress(project, 0, ours.charges)
    after, copied = theirs.filled or (0, 0), theirs.charges if theirs.filled else 0
    while True:
        progress(project, copied, ours.charges)
        entries = old.read(project, after, NEVER, PIECE)
        if not entries:
            break
        last = (entries[-1].ms, entries[-1].seq)
        after = new.fill(project, move, after, entries, survey.retention_ms)
        copied += len(entries)
        if after != last:  # the same move in another process has come further
            theirs = new.standing(project)
            if theirs.filled is None:
                raise OvertakenError(f"{_of(new, project)} is being cleared by another process")
            after, copied = theirs.filled, theirs.charges
    for fields in _fields_with_lost_units(old, project, survey):
        new.put_state(project, move, after, fields, survey.retention_ms)
    theirs = new.standing(project)
    if theirs.charges != ours.charges or theirs.filled != after:
        _changed(new, project, theirs, filling)  # from the beginning
        raise LedgerError(
            f"{_of(new, project)} has {theirs.charges} of {many(ours.charges, 'charge')} after the copy: it lost some; "
            "see its server's log, and run the move again"
        )
    return theirs


class _Survey(NamedTuple):
    """What the copy must know of a state beforehand.

    `lost` are units that views of OLD count though its log has lost them (L14), where NEW's views could not: unlogged
    usage there, and a new epoch, so that every machine is asked for what it knows (L18).
    """

    retention_ms: int
    epoch: str
    lost: dict[str, UnloggedUsage]


def _survey(old: Movable, new: Movable, project: str, ours: Standing) -> _Survey:
    retention_ms, trimmed_through_ms, views = MIN_RETENTION_MS, 0, dict[str, str]()
    for piece in old.state(project):
        for name, value in piece:
            if name == "retention_ms":
                retention_ms = max(retention_ms, _number(old, value))
            elif name == "trimmed_through_ms":
                trimmed_through_ms = max(trimmed_through_ms, _number(old, value))
            elif name.startswith("view:") and old.counts_lost() and not new.counts_lost():
                views[name.removeprefix("view:")] = value
    lost = dict(_lost_units(old, project, ours, views, trimmed_through_ms))
    epoch = following_epoch(ours.epoch, ours.move) if lost else ours.epoch
    return _Survey(retention_ms, epoch, lost)


def _number(old: Movable, value: str) -> int:
    """A number of a state."""
    try:
        return checked_count(int(value))
    except ValueError:
        raise LedgerError(f"ledger {old.label} holds what no quota program writes: {value!r:.200}") from None


def _lost_units(
    old: Movable, project: str, ours: Standing, views: dict[str, str], trimmed_through_ms: int
) -> Iterator[tuple[str, UnloggedUsage]]:
    now_ms = old.now_ms()
    for view, value in views.items():
        try:
            units, tail, head, _ = value.split(" ")
            total, (tail_ms, tail_seq), head_id, selector = int(units), read_id(tail), read_id(head), selector_of(view)
            until_ms = _counts_until(view, trimmed_through_ms)
        except ValueError:  # it cannot be right, and is taken from the log again (L6)
            continue
        if tail_ms > trimmed_through_ms or until_ms <= now_ms:
            continue
        entries = read_entries(old, project, tail_ms, head_id[0])
        logged = sum(
            counted(selector, entry) for entry in entries if (tail_ms, tail_seq) <= (entry.ms, entry.seq) <= head_id
        )
        if logged < total <= NEVER:
            yield view, UnloggedUsage(view, ours.epoch, ((total - logged, until_ms),), ours.last)


def _counts_until(view: str, at_ms: int) -> int:
    """When a charge made at `at_ms` has left the view's window."""
    window = view.split("|")[3]
    return calendar_of(window).edges(at_ms)[1] if "@" in window else at_ms + parse_duration(window)


def _fields_with_lost_units(old: Movable, project: str, survey: _Survey) -> Iterator[list[Field]]:
    """The state, and in it the units that NEW's views could not count."""
    told = {f"unlogged:{view}": [usage] for view, usage in survey.lost.items()}
    until_ms = max([usage.until_ms for usage in survey.lost.values()], default=0)
    for piece in old.state(project):
        kept = []
        for name, value in piece:
            view = name.partition(":")[2]
            if name in told:
                told[name] = [*read_usages(view, value), *told[name]]
            elif name == "unlogged_until_ms":
                until_ms = max(until_ms, _number(old, value))
            elif not (name.startswith("view:") and view in survey.lost):
                kept.append((name, value))
        if kept:
            yield kept
    if until_ms:
        yield [("unlogged_until_ms", str(until_ms)), *((name, usages_text(found)) for name, found in told.items())]
