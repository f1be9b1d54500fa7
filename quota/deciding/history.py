"""What was charged, for people: the log and the past beside it, folded. Nothing is decided by it.

entries            the entries behind a place
charges            the charges of a time, each with what it counts now
sums               all that was ever charged, by method and job
whole_since_ms     since when nothing is missing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from quota.deciding.project import Project
from quota.errors import LedgerError
from quota.ledger.log import MAX_PAST, MAX_READ, PAST_MS
from quota.rules.entry import END, START, Entry, Id, just_before
from quota.rules.spent import SUMS, ChargedSum, Spent, Sums, spent
from quota.terms.limits import DAY_MS


def charges(
    project: Project, since_ms: int = 0, until_ms: int = END[0], progress: Callable[[int], None] | None = None
) -> list[Spent]:
    """The charges with since_ms <= ms <= until_ms, in order, with all corrections until now. `progress` gets how many
    entries were read. What this machine drew and still owes comes with them. Raises LedgerError."""
    project.repay()
    behind = entries(project, just_before(since_ms), progress)
    return [charge for charge in spent(behind) if charge.id[0] <= until_ms]


def entries(project: Project, after: Id = START, progress: Callable[[int], None] | None = None) -> Iterator[Entry]:
    """All entries behind one, in order: of the past up to where the log was trimmed, then of the log. What is trimmed
    meanwhile comes once."""
    count, log, name = 0, project.log, project.name
    trimmed = project.reading.trimmed
    while True:
        is_past = after < trimmed
        piece = log.past(name, after, trimmed, MAX_READ) if is_past else log.read(name, after, END, MAX_READ)
        if not is_past:
            trimmed = log.begin(name).trimmed
            if after < trimmed:
                continue  # what was to be read next is in the past
        yield from piece
        count += len(piece)
        if progress is not None and piece:
            progress(count)
        if piece and len(piece) == MAX_READ:
            after = piece[-1].id
        elif is_past:
            after = trimmed
        else:
            return


def sums(project: Project) -> Sequence[ChargedSum]:
    """All that was ever charged, by method and job. What nobody has summed yet is added, and kept in the state, so that
    the next reader need not read it again, and nothing falls when entries leave the past. Where nobody asks for as long
    as the past is kept, what has left it is missing. Raises LedgerError."""
    project.repay()
    stands = project.log.change(project.name, {SUMS: None}, {})
    stored = stands.state.get(SUMS)
    summed = Sums.read(stored or "")
    head = summed.head
    for entry in entries(project, head):
        summed.take(entry)
    if summed.head == head and head[0] > stands.clock_ms:  # a wrong clock had dated it ahead: it may be mended now
        summed.head = min(head, project.log.begin(project.name).tip)
    if summed.head != head:
        with suppress(LedgerError):  # who may only read keeps nothing
            project.log.change(project.name, {SUMS: stored}, {SUMS: summed.text()})
    return summed.rows()


def whole_since_ms(project: Project) -> int:
    """Since when nothing is missing in the history; 0: it has all. Raises LedgerError."""
    log, name = project.log, project.name
    beginning = log.begin(name)
    if beginning.trimmed == START:
        return 0
    oldest = log.past(name, START, beginning.trimmed, 1)
    if not oldest:
        return beginning.trimmed[0]
    # What reaches back as far as the past is kept, or fills it, has lost what was older.
    oldest_ms = oldest[0].id[0]
    is_cut = oldest_ms <= beginning.clock_ms - PAST_MS + DAY_MS or log.past_length(name) >= MAX_PAST
    return oldest_ms if is_cut else 0
