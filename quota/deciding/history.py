"""Past charges, for people: the log and the past, folded. No decision uses them.

hand_in            brings the log up to date with what this machine drew and read
entries            all entries after an id
charges            the charges since a time, each with its current units
sums               the sums of all charges ever, by method and job
whole_since_ms     the time since when nothing is missing
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from quota.deciding.allowance import try_to_repay
from quota.deciding.losses import StillCountingError, restored
from quota.deciding.project import MAX_CLOCK_AHEAD_MS, Project
from quota.errors import LedgerError
from quota.ledger.log import MAX_PAST, PAST_MS, all_entries
from quota.ledger.state import begin
from quota.rules.entry import END, START, Entry, Id, just_before
from quota.rules.spent import SUMS, ChargedSum, Spent, Sums, spent
from quota.terms.limits import DAY_MS, SLACK_MS


def charges(project: Project, since_ms: int = 0) -> list[Spent]:
    """The charges of `since_ms` and later, in order, with all corrections until now. First hands over what this machine
    drew, and puts back what the ledger lost. Raises LedgerError."""
    hand_in(project)
    return spent(entries(project, just_before(since_ms)))


def hand_in(project: Project) -> None:
    """Hand over what this machine drew. A new process also puts back what the ledger lost. Never raises: else people
    read the log as it stands."""
    try_to_repay(project)
    if not project.reading.began:
        with suppress(LedgerError, StillCountingError):
            restored(project, project.read_on)


def entries(project: Project, after: Id = START) -> Iterator[Entry]:
    """All entries after an id that can be read, in order. Raises UnusableLedger if the log has moved or is of another
    API."""
    begin(project.log, project.name, api=project.api)
    return (entry for entry in all_entries(project.log, project.name, after) if entry.kind != "unreadable")


def sums(project: Project) -> Sequence[ChargedSum]:
    """The sums of all charges ever, by method and job. Adds the entries since the last call, and keeps the sums in the
    state, so the next reader need not read these entries again, and no sum falls when entries leave the past. If nobody
    calls this for longer than the past is kept, the entries that left it are missing. Raises LedgerError."""
    hand_in(project)
    stands = project.log.change(project.name, {SUMS: None}, {})
    stored = stands.state.get(SUMS)
    summed = Sums.read(stored or "")
    head = summed.head
    for entry in entries(project, head):
        summed.take(entry)
    if summed.head == head and head[0] > stands.clock_ms:  # a wrong clock dated it ahead; a repair may have fixed it
        summed.head = min(head, project.log.begin(project.name).tip)
    if summed.head != head:
        with suppress(LedgerError):  # a user who may only read keeps nothing
            project.log.change(project.name, {SUMS: stored}, {SUMS: summed.text()})
    return summed.rows()


def whole_since_ms(project: Project) -> int:
    """The time since when the history is complete; 0: it has everything. Raises LedgerError."""
    hand_in(project)
    log, name = project.log, project.name
    beginning = begin(log, name)
    past = log.past(name, START, END, 1)
    oldest_ms = next((entry.id[0] for entry in past or log.read(name, START, END, 1)), 0)
    # If the past is as old or as long as it may be, older entries were dropped.
    is_cut = oldest_ms <= beginning.clock_ms - PAST_MS + DAY_MS or log.past_length(name) >= MAX_PAST
    dropped_ms = (oldest_ms if is_cut else 0) if past else beginning.trimmed[0]
    # After a loss machines put back what their journals have. If nothing is older than that, the past was lost, too. A
    # machine whose clock is behind puts back a little more, and so does a correction, which brings back its charge.
    back = [loss.since_ms - project.longest_ms - SLACK_MS for loss in project.state.facts().losses]
    return max([dropped_ms, *(back_ms for back_ms in back if back_ms <= oldest_ms + MAX_CLOCK_AHEAD_MS)])
