"""What a machine may spend while the ledger does not answer, and how the ledger gets it afterwards.

    Allowance    what the configuration allows: `unavailable = { max_cost, allowance, machines }`
    draw         calls that are cheap enough are admitted, and on the disk (`quota.journal.draws`) before they leave
    hand_over    the ledger is given what was drawn, as soon as any process of this machine reaches it

A draw is a charge under its own key, and counts from the time at which it is handed over. Its call may have reached the
ledger before its answer was lost, so the log is searched for the key first: from where its first try had read on, or,
in the log of another epoch, everywhere.

An outage is two lines of a process's log, however many calls are drawn: `allowance_drawn` at the first one, with what
is wrong with the ledger, and then `debt_repaid`, or `allowance_used` if the process ends before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quota.common.log import warn
from quota.deciding.corrections import add, correct
from quota.decision import AllowanceState
from quota.errors import LedgerError
from quota.ledger.log import in_pieces
from quota.rules.entry import END, START, Entry, Id, is_reservation

if TYPE_CHECKING:
    from quota.deciding.project import Project
    from quota.journal.draws import Draw
    from quota.journal.journal import Journal

HANDED_AT_ONCE = 500
"""So many draws are handed over in one step."""


class Allowance(NamedTuple):
    """Calls of at most `max_cost_units` are admitted, `allowance_units` in the longest window for the whole machine."""

    max_cost_units: int
    allowance_units: int


def stand(project: Project, allowance: Allowance, units: int = 0) -> AllowanceState | None:
    """How much of the allowance is drawn, and from when on it has room for so many units; without them, for more than
    now. None where nothing can be drawn. Raises LedgerError."""
    if project.journal is None:
        return None
    now_ms, window_ms = project.wall(), project.longest_ms
    drawn = [draw.entry for draw in project.journal.draws.drawn(now_ms, window_ms) if draw.entry.units]
    drawn_units = sum(entry.units for entry in drawn)
    left_units, frees_ms = allowance.allowance_units - drawn_units, None
    wanted_units = units if 0 < units <= allowance.allowance_units else left_units + 1
    for entry in sorted(drawn, key=lambda entry: entry.id):
        if left_units >= wanted_units:
            break
        left_units, frees_ms = left_units + entry.units, entry.id[0] + window_ms
    return AllowanceState(allowance.max_cost_units, allowance.allowance_units, drawn_units, frees_ms)


def draw(project: Project, allowance: Allowance, charges: Sequence[Entry], because: str, *, commit: bool) -> int | None:
    """Admit these calls without the ledger, if each is cheap enough and the allowance has room for all of them; returns
    the units that remain. None: refused. Without `commit` nothing is drawn. Raises LedgerError where the disk does not
    take it."""
    if project.journal is None or any(charge.units > allowance.max_cost_units for charge in charges):
        return None
    draws, now_ms, window_ms = project.journal.draws, project.wall(), project.longest_ms
    units = sum(charge.units for charge in charges)
    left_units = allowance.allowance_units - draws.drawn_units(now_ms, window_ms) - units
    if not commit:
        return left_units if left_units >= 0 else None
    epoch, seen = project.reading.epoch, project.reading.seen
    limits = {"now_ms": now_ms, "window_ms": window_ms, "allowance_units": allowance.allowance_units}
    if not draws.draw(charges, epoch, seen, **limits):
        return None
    left_units = max(0, left_units)
    if not project.drawn:
        warn("allowance_drawn", because, project=project.name, units=units, left=left_units)
    project.drawn.append((units, left_units))
    return left_units


def hand_over(project: Project) -> None:
    """Give the ledger what this machine drew, and what became of that. Where another process is at it, that one does.
    Raises LedgerError."""
    journal = project.journal
    if journal is None or not journal.draws.owed():
        return
    project.read_on()  # while the ledger does not answer, nobody waits for it with the lock
    try:
        lock = journal.locked()
    except LedgerError:
        return
    units: list[int] = []
    with lock:
        owed = journal.draws.owed()
        for at in range(0, len(owed), HANDED_AT_ONCE):
            units += _hand_over(project, journal, owed[at : at + HANDED_AT_ONCE])
    if units:
        warn("debt_repaid", project=project.name, charges=len(units), units=sum(units))
    project.drawn.clear()


def _hand_over(project: Project, journal: Journal, owed: Sequence[Draw]) -> list[int]:
    """Hand over some draws; returns their units, as far as that was noted."""
    new = [draw for draw in owed if draw.handed_id is None]
    places = {draw.entry.key: draw.handed_id for draw in owed if draw.handed_id is not None}
    places |= _find(project, journal, new)
    corrected = [draw for draw in owed if draw.entry.key in places or is_reservation(draw.entry.key)]
    missing = [draw.entry for draw in new if draw.entry.key not in places]
    if missing:
        ms, seq = add(project, missing)
        places |= {entry.key: (ms, seq + n) for n, entry in enumerate(missing)}
    for draw in corrected:
        correct(project, places[draw.entry.key][0], [draw.entry.key], draw.entry.units)
    handed = [(draw, places[draw.entry.key]) for draw in owed]
    is_noted = journal.draws.handed_over(project.reading.epoch, handed)
    return [draw.entry.units for draw in new] if is_noted else []


def say_used(project: Project) -> None:
    """Say at its end what a process drew and did not hand over itself. `allowance_drawn` has said all of a single
    draw."""
    if len(project.drawn) > 1:
        _, left_units = project.drawn[-1]
        units = sum(units for units, _ in project.drawn)
        warn("allowance_used", project=project.name, charges=len(project.drawn), units=units, left=left_units)


def owed_units(project: Project) -> int:
    """The units that were drawn, and that the ledger does not have yet."""
    if project.journal is None:
        return 0
    return sum(owed.entry.units for owed in project.journal.draws.owed() if owed.handed_id is None)


def settle_draws(project: Project, units: Mapping[str, int]) -> Entry | None:
    """Set what draws of this machine count, by their keys; returns the first as it was before. None, and nothing is
    set, where not all of them are here. The ledger is told with the next hand-over. Raises LedgerError."""
    if project.journal is None:
        return None
    before = project.journal.draws.settle(units)
    return None if before is None else before.entry


def _find(project: Project, journal: Journal, draws: Sequence[Draw]) -> dict[str, Id]:
    """Where the log has calls whose answers were lost before they were drawn."""
    places: dict[str, Id] = {}
    keys = {draw.entry.key for draw in draws}
    after = min((draw.seen if draw.epoch == project.reading.epoch else START for draw in draws), default=END)
    for entries in in_pieces(project.log.read, project.name, after) if keys else ():
        there = [entry for entry in entries if entry.key in keys]
        places |= {entry.key: entry.id for entry in there}
        journal.write(project.reading.epoch, there)  # whoever made them had no answer, and did not note them
    return places
