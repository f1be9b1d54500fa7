"""Puts back charges that a ledger has lost and this machine has read, with their own times and keys.

A log loses entries if somebody empties it or restores an old copy, or if a lagging replica takes over. The first
process that notices fences the log, builds the union of the log and this machine's journal (`quota.rules.union`), and
replaces the log under a new epoch. So every other machine notices too, compares, and adds the entries that only it has.
Meanwhile others wait WAIT_S at most, then they are refused with "counting".

    put_back              compares the log with this machine's journal, and puts back what the log lacks
    restored              the result of a reading, during which lost entries are put back
    StillCountingError    another process is doing that, or a total has many entries to read
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar

from quota.common.clock import elapsed_s
from quota.common.log import warn
from quota.common.text import one_line
from quota.deciding.fence import Fence, FenceLostError
from quota.deciding.project import BehindError, Project
from quota.errors import LedgerError
from quota.journal.journal import Journal
from quota.ledger.log import Moment, all_between, fence_is_over, is_fence
from quota.ledger.state import LONGEST, begin, longest_of
from quota.rules.entry import START, Entry, Id
from quota.rules.facts import FACTS, Facts, Loss
from quota.rules.total import total_of
from quota.rules.union import missing, union
from quota.terms.arguments import machine_name
from quota.terms.limits import SLACK_MS

T = TypeVar("T")

MAX_LOSSES = 5
"""How often one decision, or one reading, puts back lost entries."""

WAIT_S = 0.3
"""How long a caller waits while another process rebuilds a log."""

LOOK_AGAIN_S = 0.005

WRITE_AT_ONCE = 1_000
"""The most entries of others that the journal notes at once."""

_NOUNS = {"charge": "charges", "correction": "corrections", "others": "units of others"}
"""What people call the entries of each kind. A warning names the first that was lost."""


class StillCountingError(Exception):
    """Another process is rebuilding the log from journals, or a total has many entries to read."""


def restored(project: Project, read: Callable[[], T]) -> T:
    """The result of a reading. Whenever it meets a log that lacks entries of this machine, puts these back, and reads
    again. Raises LedgerError and StillCountingError."""
    for _ in range(MAX_LOSSES):
        try:
            return read()
        except BehindError:
            put_back(project)
    raise StillCountingError


def put_back(project: Project) -> None:
    """Compare the log with this machine's journal, and put back what it lacks. The project then reads the new log.
    Raises StillCountingError while another process does that, and LedgerError."""
    ends_s, journal = elapsed_s() + WAIT_S, project.journal
    try:
        lock = nullcontext() if journal is None else journal.locked()
    except LedgerError:  # another process of this machine does it
        raise StillCountingError from None
    with lock:
        while not _put_back_here(project):
            if elapsed_s() > ends_s:
                raise StillCountingError
            time.sleep(LOOK_AGAIN_S)


def _put_back_here(project: Project) -> bool:
    """One try of `put_back`, with a journal under its lock; False if another process is at work on the log."""
    beginning = begin(project.log, project.name, (FACTS, LONGEST), project.api)
    if is_fence(beginning.epoch) and not fence_is_over(beginning.epoch, beginning.clock_ms):
        return False
    may_lack = is_fence(beginning.epoch) or project.reading.pending or project.is_behind(beginning)
    if project.journal is not None and may_lack:
        return _put_back_lost(project, project.journal, beginning)
    project.in_turn(lambda: project.reading.forget())
    return True


def _put_back_lost(project: Project, journal: Journal, beginning: Moment) -> bool:
    """Compare, and put back what is missing; False if another process changed the log meanwhile."""
    log, name = project.log, project.name
    have = all_between(log.read, name, beginning.trimmed, beginning.tip)
    clocks = beginning.clock_ms, project.wall()  # one of them may be wrong: then more comes back, and counts longer
    oldest_ms, latest_ms = min(clocks) - project.longest_ms - SLACK_MS, max(clocks)
    position = journal.position()
    seen = [entry for _, entry in journal.records()]
    lost = missing(have, seen, beginning.trimmed, oldest_ms)
    epoch, tip = beginning.epoch, beginning.tip
    # If an id is missing but no key, the same entries have other ids: a new epoch makes everybody read them again.
    noted = {journal.newest(epoch), *journal.late(epoch)}
    is_missing = not {entry.id for entry in have}.issuperset(x for x in noted if x > beginning.trimmed)
    if lost or is_missing or is_fence(beginning.epoch):
        fence = Fence(log, name, project.keys.next())
        if not fence.take_at(beginning):
            return False
        try:
            with fence.renewed():
                newer = all_between(log.read, name, tip)
                have += newer
                tip = newer[-1].id if newer else tip
                lost = missing(have, seen, beginning.trimmed, oldest_ms)
                have = union(have, lost, latest_ms, beginning.trimmed)
                epoch = project.keys.next()
                # First, so that nobody trims what comes back, whatever happens to this process.
                longest_ms = max(longest_of(log.change(name, {LONGEST: None}, {}).state), project.longest_ms)
                fence.change({LONGEST: str(longest_ms)})
                if not log.replace(name, fence.epoch, tip, have, epoch):
                    return False
        except FenceLostError:
            return False
        if entries := [entry for entry in lost if entry.kind != "marker"]:  # `whole_facts` tells of facts
            _tell(project, journal, entries, beginning.clock_ms)
    journal.note(ledger=log.label)
    # Others may have changed the facts before the fence.
    facts = Facts.read(project.whole_facts(log.begin(name, (FACTS,))))
    _note(journal, epoch, have, {(entry.key, entry.id) for entry in seen})
    journal.compared(epoch, position)
    project.in_turn(partial(_read_anew, project, epoch, have, beginning.trimmed, facts))
    project.keep()
    return True


def _tell(project: Project, journal: Journal, lost: Sequence[Entry], at_ms: int) -> None:
    """Warn of entries that came back, and note the charges that the ledger had lost, if any: none if this machine
    noted entries of another url since. Noting may fail without harm."""
    charges, label = [entry for entry in lost if entry.kind == "charge"], project.log.label
    before, kinds = journal.notes().ledger or label, {entry.kind for entry in lost}
    what = next((noun for kind, noun in _NOUNS.items() if kind in kinds), "entries")
    say = f"the ledger lost {what}, and this machine put them back"
    if before != label:
        say = f"this machine noted {what} in {before}, and they count here, too: ledger.url was changed, or a program "
        say += "still has that url and needs a restart"
    units = sum(entry.units for entry in charges)
    numbers = {"charges": len(charges), "units": units} if charges else {}
    warn("ledger_behind", say, ledger=label, project=project.name, **numbers)
    if charges and before == label:
        loss = Loss(at_ms, one_line(machine_name())[:64], len(charges), units, at_ms)
        with suppress(LedgerError):
            project.state.lose(loss, max(entry.id[0] for entry in charges))


def _read_anew(project: Project, epoch: str, have: Sequence[Entry], trimmed: Id, facts: Facts) -> None:
    """Let the project begin again at this whole log."""
    reading, project.stored_ms = project.reading, 0
    views = [total.view for total in reading.totals.values()]
    reading.begin(epoch, have[-1].id if have else START, trimmed, facts)
    now_ms = project.now_ms()
    for view in views:
        reading.totals[view.name] = total = total_of(view, have, now_ms, trimmed)
        total.take_all((), reading.seen)
    for entry in have:
        if entry.key in reading.pending:
            reading.pending[entry.key] = entry.id


def _note(journal: Journal, epoch: str, have: Sequence[Entry], seen: set[tuple[str, Id]]) -> None:
    """Note in the journal the entries of others, entries that have another time, and the newest entry of this log."""
    news = [entry for entry in have if (entry.key, entry.id) not in seen]
    for at in range(0, len(news), WRITE_AT_ONCE):
        journal.write(epoch, news[at : at + WRITE_AT_ONCE])
    if have and not news:
        journal.write(epoch, have[-1:])
