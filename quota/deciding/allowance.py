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

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quota.common.log import warn
from quota.deciding.corrections import add, correct
from quota.errors import LedgerError
from quota.ledger.log import MAX_READ
from quota.rules.entry import END, START, Entry, Id

if TYPE_CHECKING:
    from quota.deciding.project import Project
    from quota.journal.draws import Draw


class Allowance(NamedTuple):
    """Calls of at most `max_cost_units` are admitted, `allowance_units` in the longest window for the whole machine."""

    max_cost_units: int
    allowance_units: int


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
    try:
        lock = journal.locked()
    except LedgerError:
        return
    with lock:
        project.read_on()
        units = []
        for owed in journal.draws.owed():
            if owed.handed_id is not None:
                correct(project, owed.handed_id[0], [owed.entry.key], owed.entry.units)
                at = owed.handed_id
            else:
                at = _find(project, owed) or add(project, [owed.entry])
                correct(project, at[0], [owed.entry.key], owed.entry.units)
                units.append(owed.entry.units)
            journal.draws.handed_over(project.reading.epoch, [(owed, at)])

    if units:
        warn("debt_repaid", project=project.name, charges=len(units), units=sum(units))
    project.drawn.clear()


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


def settle_draw(project: Project, key: str, units: int) -> Entry | None:
    """Set what a draw of this machine counts; returns it as it was before, None where there is no such draw. The ledger
    is told with the next hand-over. Raises LedgerError."""
    if project.journal is None:
        return None
    before = project.journal.draws.settle(key, units)
    return None if before is None else before.entry


def _find(project: Project, owed: Draw) -> Id | None:
    """Where the log has the call of a draw, whose answer was lost."""
    after = owed.seen if owed.epoch == project.reading.epoch else START
    while True:
        entries = project.log.read(project.name, after, END, MAX_READ)
        for entry in entries:
            if entry.key == owed.entry.key:
                if project.journal is not None:  # whoever made it had no answer, and did not note it
                    project.journal.write(project.reading.epoch, [entry])
                return entry.id
        if len(entries) < MAX_READ:
            return None
        after = entries[-1].id
