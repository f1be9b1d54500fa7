"""What is appended whatever the limits say: corrections of charges, what others used, what this machine drew.

correct    let a charge count so many units from now on
add        append entries
insist     do one of these, also while what a ledger has lost is put back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from quota.common.clock import elapsed_s
from quota.deciding.losses import StillCountingError, put_back
from quota.decision import COUNTING, SET_THE_CLOCK
from quota.errors import LedgerError
from quota.ledger.log import ANY, LEASE_MS, in_pieces
from quota.rules.entry import END, START, Entry, Id, is_reservation, just_before
from quota.rules.reading import Mark

if TYPE_CHECKING:
    from quota.deciding.project import Project

T = TypeVar("T")

INSIST_S = 2 * LEASE_MS / 1_000
"""So long a caller waits while a log is put together, also by a process that was killed in the middle."""

MAX_TRIES = 100
"""How often an entry is appended again, while others correct the same charge."""


def correct(project: Project, ms: int, keys: Sequence[str], units: int) -> Entry | None:
    """Let the first of these charges of `ms` count so many units from now on, and the others none. Never refused,
    and idempotent. Returns the first with what it counted before; None, and nothing is done, where the log has not
    all of them. Raises LedgerError."""
    charges = _charges(project, ms, keys)
    if len(charges) < len(keys):
        put_back(project)  # the ledger may just have lost it
        charges = _charges(project, ms, keys)
    if len(charges) < len(keys):
        return None

    def corrections() -> tuple[Entry, list[Entry]]:
        standing = project.log.corrections(project.name, keys)
        entries = []
        for key in keys:
            charge, wanted = charges[key], units if key == keys[0] else 0
            counts = standing[key].units if key in standing else charge.units
            if wanted != counts or (key not in standing and is_reservation(key)):
                correction = charge._replace(
                    units=wanted, key=project.keys.next(), kind="correction", of=key, at=charge.id, before_units=counts
                )
                entries.append(correction)
        first = charges[keys[0]]
        return first._replace(units=standing[first.key].units if first.key in standing else first.units), entries

    return _append_until_done(project, corrections)


def add(project: Project, entries: Sequence[Entry]) -> Id:
    """Append entries, whatever the limits say; the id of the first. Raises LedgerError."""
    return _append_until_done(project, lambda: (entries[0], entries)).id


def insist(project: Project, work: Callable[[], T]) -> T:
    """Do what is never refused. Raises LedgerError, also where a log is put together for too long."""
    ends_s = elapsed_s() + INSIST_S
    while True:
        try:
            return work()
        except StillCountingError:
            if elapsed_s() > ends_s:
                raise LedgerError(f"ledger {project.log.label}: {COUNTING}; try again") from None


def _append_until_done(project: Project, entries_of_now: Callable[[], tuple[Entry, Sequence[Entry]]]) -> Entry:
    """Append what follows from the log as it is, again where something unread contradicts it. Returns the entry
    that was named beside it, with the id of the first one that was appended, if that is the same."""
    for _ in range(MAX_TRIES):
        if not project.reading.began:
            project.begin(())
        mark = project.in_turn(lambda: Mark(project.reading.epoch, project.reading.seen))
        before, entries = entries_of_now()
        if not entries:
            return before
        written = project.reading.pending.get(entries[0].key)  # by an earlier try, whose answer was lost
        if written is None:
            reply, _ = project.ask(project.request(project.look_at(mark), entries, ANY))
            written = reply.id or project.reading.pending.get(entries[0].key)
        if written is not None:
            project.reading.pending.pop(entries[0].key, None)
            return before._replace(id=written) if before is entries[0] else before
        if reply.word == "BEHIND":
            put_back(project)
        elif reply.word == "CLOCK":
            break
    raise LedgerError(f"ledger {project.log.label}: its clock is an hour ahead of this machine's; {SET_THE_CLOCK}")


def _charges(project: Project, ms: int, keys: Sequence[str]) -> dict[str, Entry]:
    """The charges of these keys: at their time, or, where a repair has dated them anew, wherever they stand."""
    charges: dict[str, Entry] = {}
    for after, through in ((just_before(ms), (ms, END[1])), (START, END)):
        for entries in in_pieces(project.log.read, project.name, after, through):
            charges |= {entry.key: entry for entry in entries if entry.key in keys and entry.kind == "charge"}
            if len(charges) == len(keys):
                return charges
    return charges
