"""Appends entries that no limit refuses: corrections of charges, units that others used, draws of this machine.

correct       sets the units that a charge counts
add           appends entries
count_others  appends units that only upstream has counted
find          looks for charges by their keys
insist        does any of these, and waits while lost charges are put back
catch_up      reads all new entries, once the log has all that this machine has read
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from quota.common.clock import elapsed_s
from quota.deciding.losses import StillCountingError, put_back, restored
from quota.deciding.project import BehindError, Project
from quota.decision import COUNTING, SET_THE_CLOCK
from quota.errors import LedgerError
from quota.ledger.log import ANY, LEASE_MS, MAX_READ, all_between, in_pieces
from quota.rules.entry import END, START, Entry, Id, just_before

T = TypeVar("T")

INSIST_S = 2 * LEASE_MS / 1_000
"""How long a caller waits while another process rebuilds a log, even if that process was killed meanwhile."""

MAX_TRIES = 100
"""How often an append is tried while others correct the same charge, and a charge is sought in logs that get lost."""


def correct(
    project: Project, charged_ms: int, keys: Sequence[str], units: int, settled_at: Id = END
) -> list[Entry] | None:
    """Set the first of these charges of `charged_ms` to so many units, and the others to 0, unless another machine has
    corrected them after `settled_at`. Never refused, and idempotent. Returns the charges with their units before.
    Returns None, and does nothing, if the log lacks any of them. Raises LedgerError."""
    restored(project, project.mark)
    of_then = all_between(project.log.read, project.name, just_before(charged_ms), (charged_ms, END[1]))
    charges = _among(keys, of_then)
    if len(charges) < len(keys):
        put_back(project)  # the ledger may have just lost them
        charges = find(project, keys)  # a repair may have dated them anew
    if len(charges) < len(keys):
        return None
    if project.journal is not None:  # if the ledger loses a charge now, its correction must not come back alone
        if any(charge.id > project.reading.seen for charge in charges.values()):
            # An old copy of the log may have new charges, but lack others that this machine has read.
            restored(project, project.read_on)
        project.journal.write(project.reading.epoch, [*charges.values()])
    counted = dict[str, int]()

    def corrections() -> list[Entry]:
        standing = project.log.corrections(project.name, keys)
        entries = []
        for key in keys:
            wanted = units if key == keys[0] else 0
            counted[key] = standing[key].units if key in standing else charges[key].units
            if key in standing and standing[key].id > settled_at and not _note_if_ours(project, standing[key].id):
                continue
            # Also of the same units: an older correction, which the log has lost, may come back.
            if key not in standing or wanted != counted[key] or not _note_if_ours(project, standing[key].id):
                correction = charges[key]._replace(
                    units=wanted,
                    key=project.keys.next(),
                    kind="correction",
                    of=key,
                    at=charges[key].id,
                    before_units=counted[key],
                )
                entries.append(correction)
        return entries

    add(project, corrections)
    return [charges[key]._replace(units=counted[key]) for key in keys]


def add(project: Project, entries_of_now: Callable[[], Sequence[Entry]]) -> Id | None:
    """Append the entries that `entries_of_now` makes, without comparing limits. If unread entries contradict them, or
    the log was lost, make them again. Returns the id of the first; None: there were none, and the log is whole. Raises
    LedgerError and StillCountingError."""
    tried: set[str] = set()
    try:
        for _ in range(MAX_TRIES):
            mark = restored(project, project.mark)
            entries = entries_of_now()
            tried.update(entry.key for entry in entries[:1])
            first = project.reading.appended(entries)
            if first is None:
                try:
                    reply, _ = project.ask(project.request(mark, 0, entries, ANY))
                except BehindError:
                    put_back(project)
                    continue
                first = reply.id or project.reading.appended(entries)
            if first is not None:
                return first
            if reply.word == "READ":
                return None
            if reply.word == "CLOCK":
                label = project.log.label
                raise LedgerError(f"ledger {label}: its clock is an hour ahead of this machine's; {SET_THE_CLOCK}")
        raise StillCountingError
    finally:
        for key in tried:
            project.reading.pending.pop(key, None)


def insist(project: Project, work: Callable[[], T]) -> T:
    """Do work that is never refused. Raises LedgerError, also if rebuilding a log takes too long."""
    ends_s = elapsed_s() + INSIST_S
    while True:
        try:
            return work()
        except StillCountingError:
            if elapsed_s() > ends_s:
                raise LedgerError(f"ledger {project.log.label}: {COUNTING}; try again") from None


def count_others(project: Project, others: Entry) -> None:
    """Append units that only upstream has counted. Raises LedgerError."""
    insist(project, lambda: add(project, lambda: [others]))


def catch_up(project: Project) -> None:
    """Read all new entries of the log, once it has all that this machine has read. Raises LedgerError."""
    insist(project, partial(restored, project, project.read_on))


def find(project: Project, keys: Collection[str], after: Id = START) -> dict[str, Entry]:
    """The charges with these keys after an entry. If the log is lost or replaced meanwhile, looks through the new log.
    Raises LedgerError and StillCountingError."""
    restored(project, project.read_on)
    for _ in range(MAX_TRIES):
        epoch, seen, newest = project.reading.epoch, project.reading.seen, after
        charges: dict[str, Entry] = {}
        for entries in in_pieces(project.log.read, project.name, after):
            newest = entries[-1].id
            charges |= _among(keys, entries)
            if len(charges) == len(keys):
                return charges
        was_lost = project.reading.note_missing(seen, newest)
        restored(project, project.read_on)
        if not was_lost and project.reading.epoch == epoch:
            return charges
        after = START
    raise StillCountingError


def _note_if_ours(project: Project, correction: Id) -> bool:
    """Whether this machine made a correction. Notes it then: its process may have got no answer."""
    entries = project.log.read(project.name, just_before(correction[0]), correction, MAX_READ)
    ours = [entry for entry in entries if entry.id == correction and project.keys.is_of_this_machine(entry.key)]
    if project.journal is not None:
        project.journal.write(project.reading.epoch, ours)
    return bool(ours)


def _among(keys: Collection[str], entries: Sequence[Entry]) -> dict[str, Entry]:
    """The charges among these entries that have these keys."""
    return {entry.key: entry for entry in entries if entry.key in keys and entry.kind == "charge"}
