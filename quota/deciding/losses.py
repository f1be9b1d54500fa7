"""What a ledger has lost, and this machine has seen, is put back: with its own times, under its own keys.

A log lost something if it was emptied, if an old copy was put in its place, or if a replica that lagged took over. Who
notices keeps everybody from appending (a fence), takes the union of the log and of what this machine's processes saw
(`quota.rules.union`), and puts it in place under a new epoch. So every other machine notices, compares in its turn, and
adds what it alone has. While that is done others wait WAIT_S at most; then they are refused with "counting".

    put_back              compares the log with this machine's journal, and puts back what the log lacks
    StillCountingError    somebody else is at it, or a total has far to read
    losses                what was put back lately: a field of the state, for people
    merged                each loss once, whoever put back parts of it
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import LATEST_MS, elapsed_s
from quota.common.log import warn
from quota.common.text import listed, one_line
from quota.errors import LedgerError, UsageError
from quota.ledger.log import LEASE_MS, SLACK_MS, Beginning, fence_is_over, in_pieces, is_fence, is_seal
from quota.ledger.state import API, Change, change, check_api, moved
from quota.rules import facts as facts_rules
from quota.rules.entry import END, START, Entry, Id
from quota.rules.facts import FACTS, Facts
from quota.rules.union import missing, union
from quota.terms.arguments import MAX_NUMBER, machine_name, text, whole

if TYPE_CHECKING:
    from quota.deciding.project import Project
    from quota.journal.journal import Journal

WAIT_S = 0.3
"""How long a caller waits while somebody else puts a log together."""

LOOK_AGAIN_S = 0.005

WRITE_AT_ONCE = 1_000
"""How many entries that others made are noted in the journal at once."""


LOSSES = "losses"
"""The field of the state that has the last MAX_KEPT losses."""

MAX_KEPT = 10


class Loss(NamedTuple):
    """Charges that a ledger had lost and that a machine put back, and what they count. Each machine puts back what it
    alone has seen: `since_ms` is when the first of them did."""

    at_ms: int
    machine: str
    charges: int
    units: int
    since_ms: int


class StillCountingError(Exception):
    """The log is being put together from what machines have seen of it, or a total has far to read."""


def put_back(project: Project) -> None:
    """Compare the log with what this machine has seen, and put back what it lacks. The project then reads the log that
    came of it. Raises StillCountingError while somebody else is at it, and LedgerError."""
    ends_s, journal = elapsed_s() + WAIT_S, project.journal
    if journal is None:
        _unfenced(project, ends_s)
        _begin_anew(project)
        return
    try:
        lock = journal.locked()
    except LedgerError:  # another process of this machine is at it
        raise StillCountingError from None
    with lock:
        while not _put_back_here(project, journal, ends_s):
            if elapsed_s() > ends_s + LEASE_MS / 1_000:
                raise StillCountingError


def _put_back_here(project: Project, journal: Journal, ends_s: float) -> bool:
    """One try of `put_back`, while no other process of this machine is at it; False where the log was changed
    meanwhile."""
    beginning = _unfenced(project, ends_s)
    if _must_compare(project, journal, beginning):
        return _compare(project, journal, beginning)
    _begin_anew(project)
    return True


def _unfenced(project: Project, ends_s: float) -> Beginning:
    """The log's beginning, once no fence of somebody else stands."""
    while True:
        beginning = project.log.begin(project.name, (), (FACTS, API))
        check_api(project.log.label, project.name, project.api, beginning.state)
        if is_seal(beginning.epoch):
            raise moved(project.log.label, beginning.epoch)
        if not is_fence(beginning.epoch) or fence_is_over(beginning.epoch, beginning.clock_ms):
            return beginning
        if elapsed_s() > ends_s:
            raise StillCountingError
        time.sleep(LOOK_AGAIN_S)


def _must_compare(project: Project, journal: Journal, beginning: Beginning) -> bool:
    """Whether the log may lack what this machine has seen: nobody here has compared them since."""
    return is_fence(beginning.epoch) or bool(project.reading.pending) or is_behind(project, journal, beginning)


def is_behind(project: Project, journal: Journal, beginning: Beginning) -> bool:
    """Whether something was noted that nobody has compared with this log, or the log lacks the newest entry that this
    machine has seen of it. Others may have appended since."""
    if journal.uncompared(beginning.epoch):
        return True
    newest = journal.newest(beginning.epoch)
    if newest <= beginning.trimmed or newest == beginning.tip:
        return False
    ms, seq = newest
    before = (ms, seq - 1) if seq else (ms - 1, END[1])
    return not project.log.read(project.name, before, newest, 1)


def _begin_anew(project: Project) -> None:
    """Let the project read the log from its beginning, as a process that starts does."""

    def forget() -> None:
        project.reading.began = False

    project.in_turn(forget)


def _compare(project: Project, journal: Journal, beginning: Beginning) -> bool:
    """Compare, and put back what is missing; False where somebody else changed the log meanwhile."""
    log, name = project.log, project.name
    fence = beginning.epoch if is_fence(beginning.epoch) else ""
    have = _read(project, beginning.trimmed, beginning.tip)
    oldest_ms = beginning.clock_ms - project.longest_ms - SLACK_MS
    position = journal.position()
    seen = [entry for _, entry in journal.records()]
    lost = missing(have, seen, beginning.trimmed, oldest_ms)
    stand = Facts.read(beginning.state.get(FACTS, ""))
    facts = facts_rules.union(stand, Facts.read(journal.facts()).happened(beginning.clock_ms))
    epoch, tip = beginning.epoch, beginning.tip
    # Where no key is missing, but an id is, the same entries stand in other places: a new epoch says so to everybody.
    newest = journal.newest(epoch)
    is_missing = newest > beginning.trimmed and all(entry.id != newest for entry in have)
    if lost or fence or is_missing:
        done, fence = log.fence(name, beginning.epoch, project.keys.next())
        if not done:
            return False
        newer = _read(project, tip, END)
        have += newer
        tip = newer[-1].id if newer else tip
        lost = missing(have, seen, beginning.trimmed, oldest_ms)
        have = union(have, lost, beginning.clock_ms, beginning.trimmed)
        epoch = project.keys.next()
        if not log.replace(name, fence, tip, have, epoch):
            return False
        if lost:
            charges = [entry for entry in lost if entry.kind == "charge"]
            units = [entry.units for entry in charges]
            say = "charges that this machine saw were lost by the ledger, and are put back"
            warn("ledger_behind", say, ledger=log.label, project=name, charges=len(units), units=sum(units))
            if units:
                at_ms, machine = beginning.clock_ms, one_line(machine_name())[:64]
                loss = Loss(at_ms, machine, len(units), sum(units), at_ms)
                _tell(project, loss, newest_ms=max(entry.id[0] for entry in charges))
    if facts != stand:
        facts = project.state.unite(facts)
    _note(journal, epoch, have, {entry.key for entry in seen})
    journal.compared(epoch, position)

    def begin() -> None:
        reading, project.named_ms = project.reading, 0
        views = [*reading.totals]
        reading.begin(epoch, have[-1].id if have else START, beginning.trimmed, facts)
        now_ms = project.now_ms()
        for view in views:
            reading.open(view, None, now_ms, START, None)
            total = reading.totals[view]
            for entry in have:
                if entry.id > total.head:
                    total.take(entry)
            total.skip_to(reading.seen)
        for entry in have:
            if entry.key in reading.pending:
                reading.pending[entry.key] = entry.id

    project.in_turn(begin)
    project.keep()
    return True


def _read(project: Project, after: Id, through: Id) -> list[Entry]:
    return [entry for piece in in_pieces(project.log.read, project.name, after, through) for entry in piece]


def _note(journal: Journal, epoch: str, have: Sequence[Entry], seen: set[str]) -> None:
    """Note in the journal what was read of others, and which entry is the newest of this log."""
    news = [entry for entry in have if entry.key not in seen]
    for at in range(0, len(news), WRITE_AT_ONCE):
        journal.write(epoch, news[at : at + WRITE_AT_ONCE])
    if have and not news:
        journal.write(epoch, have[-1:])


# -- what is told of it ------------------------------------------------------------------------------------------------


def losses(project: Project) -> Sequence[Loss]:
    """What was put back lately, the oldest first. Raises LedgerError."""
    return change(project.log, project.name, (LOSSES,), lambda _, fields: Change(_read_losses(fields)))


def merged(losses: Sequence[Loss]) -> list[Loss]:
    """Each loss once, with all that machines put back of it, dated by the first of them."""
    parts: dict[int, list[Loss]] = {}
    for loss in losses:
        parts.setdefault(loss.since_ms, []).append(loss)
    return [
        Loss(
            since_ms,
            listed(dict.fromkeys(loss.machine for loss in of_it)),
            sum(loss.charges for loss in of_it),
            sum(loss.units for loss in of_it),
            since_ms,
        )
        for since_ms, of_it in parts.items()
    ]


def _tell(project: Project, loss: Loss, newest_ms: int) -> None:
    """Note a loss, whose newest charge is of `newest_ms`. It may fail without harm. Where all charges are older than
    the last loss that is noted, they are a part of that: a ledger that was emptied again has no note."""

    def rule(_: int, fields: Mapping[str, str]) -> Change[None]:
        before = _read_losses(fields)
        noted = loss
        if before and newest_ms <= before[-1].since_ms:
            noted = loss._replace(since_ms=before[-1].since_ms)
        return Change(None, {} if noted in before else {LOSSES: json.dumps([*before, noted][-MAX_KEPT:])})

    with suppress(LedgerError):
        change(project.log, project.name, (LOSSES,), rule)


def _read_losses(fields: Mapping[str, str]) -> list[Loss]:
    """Never raises: what nobody can read is begun anew."""
    try:
        return [
            Loss(
                at_ms=whole(at_ms, "ms: a time", 0, LATEST_MS - 1),
                machine=text(machine, "machine"),
                charges=whole(charges, "charges", 0, MAX_NUMBER),
                units=whole(units, "units", 0, MAX_NUMBER),
                since_ms=whole(since_ms, "ms: a time", 0, LATEST_MS - 1),
            )
            for at_ms, machine, charges, units, since_ms in json.loads(fields.get(LOSSES, "[]"))
        ]
    except (ValueError, TypeError, RecursionError, UsageError):
        return []
