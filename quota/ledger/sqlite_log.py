"""The embedded ledger: one SQLite file, shared by the processes of one machine. The contract is `quota.ledger.log.Log`.

An append is one `BEGIN IMMEDIATE` transaction: it reads the entries that its author has not read, asks `word_of`, and
appends. The author has already added up what the limits count, so an append costs the same for any limits, units and
history.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from quota.common.clock import host_clock
from quota.common.findings import Finding, examine_folder, finding_of, obstacle, warning
from quota.common.fork import OfOneProcess
from quota.common.sqlite_file import DEADLINE_S, DamagedError, SqliteFile, checked_row
from quota.errors import LedgerError, UnusableLedger
from quota.ledger.files import IN_MEMORY, label_of, path_of, refuse_others
from quota.ledger.log import (
    BROKEN,
    EPOCH,
    MAX_PAST,
    MAX_READ,
    MAX_UNSEEN,
    PAST_MS,
    VIEW,
    Append,
    Correction,
    Fields,
    Log,
    Moment,
    Reply,
    is_closed,
    may_replace,
    next_id,
    seq_of,
    word_of,
)
from quota.rules.entry import START, Entry, Id, id_text, just_before, packed, read_id, unpacked
from quota.terms.arguments import whole_clock

SCHEMA_VERSION = 20
APPLICATION_ID = 0x51_4C_47_31
"""Marks an SQLite file as a ledger ("QLG1")."""

MAX_CHECKED_BYTES = 2**28
"""The largest file that `examine` reads whole: in about two seconds."""

TRIMMED = "trimmed"

_READ = (
    "SELECT ms, seq, line FROM {} WHERE project = ? AND (ms, seq) > (?, ?) AND (ms, seq) <= (?, ?)"
    " ORDER BY ms, seq LIMIT ?"
)
_READ_LOG, _READ_PAST = _READ.format("log"), _READ.format("past")
_READ_FROM = "SELECT ms, seq, line FROM log WHERE project = ? AND (ms, seq) >= (?, ?) ORDER BY ms, seq LIMIT ?"
_HAS = "SELECT 1 FROM log WHERE project = ? AND ms = ? AND seq = ?"
_TIP = "SELECT ms, seq FROM log WHERE project = ? ORDER BY ms DESC, seq DESC LIMIT 1"
_ADD = "INSERT INTO log VALUES (?, ?, ?, ?)"
_ADD_PAST = "INSERT OR IGNORE INTO past VALUES (?, ?, ?, ?)"
_DROP_PAST = (
    "DELETE FROM past WHERE project = ? AND (ms, seq) < "
    "(SELECT ms, seq FROM past WHERE project = ? AND ms < ? ORDER BY ms DESC, seq DESC LIMIT 1) "
    "AND EXISTS (SELECT 1 FROM past WHERE project = ? AND ms >= ?)"
)
_LEAVE_PAST = "DELETE FROM past WHERE project = ? AND (ms, seq) > (?, ?)"
_TOO_MANY = "SELECT ms, seq FROM past WHERE project = ? ORDER BY ms DESC, seq DESC LIMIT 1 OFFSET ?"
_SHORTEN_PAST = "DELETE FROM past WHERE project = ? AND (ms, seq) <= (?, ?)"
_CORRECTION = "SELECT units, ms, seq FROM corrected WHERE project = ? AND key = ?"
_FORGET_CORRECTION = "DELETE FROM corrected WHERE project = ? AND key = ? AND ms = ? AND seq = ?"
_CORRECT = "INSERT OR REPLACE INTO corrected VALUES (?, ?, ?, ?, ?)"
_PROJECTS = "SELECT project FROM log UNION SELECT project FROM past ORDER BY project"
_NAMES = "SELECT name FROM state WHERE project = ? ORDER BY name"
_GET = "SELECT value FROM state WHERE project = ? AND name = ?"
_PUT = "INSERT OR REPLACE INTO state VALUES (?, ?, ?)"


class SqliteLog(OfOneProcess, Log):
    """The log at `sqlite:///relative/path` or `sqlite:////absolute/path`, or in memory, for simulations, tests and
    programs that end with their budget. A forked child goes on with a copy of a log in memory. `clock` is the ledger's
    clock, in ms since 1970."""

    shared = False

    _deadline_s = DEADLINE_S

    def __init__(self, url: str = IN_MEMORY, *, clock: Callable[[], int] | None = None) -> None:
        path = path_of(url)
        self.label = label_of(path) if path else IN_MEMORY
        refuse_others(path, "ledger")
        self._file = SqliteFile(
            path,
            schema=("quota.ledger", "log.sql"),
            application_id=APPLICATION_ID,
            version=SCHEMA_VERSION,
            error=LedgerError,
            unusable=UnusableLedger,
            what="ledger",
            remedy="move it away, or name another file in the url",
            lost_then="this machine puts back what its journal has",
            when_full="the disk is full, and nothing was charged; free space there (df, df -i)",
            lenient=True,
            deadline_s=self._deadline_s,
        )
        self._clock = host_clock if clock is None else whole_clock(clock)

    # -- reading and appending ---------------------------------------------------------------------------------------

    def append(self, project: str, request: Append) -> Reply:
        return self._file.transact(partial(self._append, project, request), write=bool(request.entries))

    def _append(self, project: str, request: Append, db: sqlite3.Connection) -> Reply:
        seen = tip = request.seen
        clock_ms = self._clock()
        stored = db.execute(_GET, (project, EPOCH)).fetchone()
        epoch = str(stored[0]) if stored else ""
        unseen = _entries(db.execute(_READ_FROM, (project, *seen, MAX_UNSEEN + 2)))
        if unseen and unseen[0].id == seen:
            del unseen[0]
        else:
            epoch, tip = _standing(db, project)
            if seen != tip:
                return Reply("BEHIND", clock_ms, epoch)
        is_whole = all(_has(db, project, entry_id) for entry_id in request.must)
        if request.epoch not in ("", epoch) or is_closed(epoch) or not is_whole:
            return Reply("BEHIND", clock_ms, _standing(db, project)[0])
        whole = len(unseen) <= MAX_UNSEEN
        del unseen[MAX_UNSEEN:]
        word, first = word_of(request, epoch, clock_ms, unseen, whole=whole)
        if word == "APPENDED" and first is None:
            first = next_id(unseen[-1].id if unseen else tip, clock_ms, request.seq)
            epoch = _add(db, project, request.entries, first, epoch, request.new_epoch)
        return Reply(word, clock_ms, epoch, unseen, whole, first)

    def read(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        return self._read(_READ_LOG, (project, *after, *through, count))

    def _read(self, query: str, values: tuple[object, ...]) -> Sequence[Entry]:
        return self._file.transact(lambda db: _entries(db.execute(query, values)), write=None)

    def corrections(self, project: str, keys: Sequence[str]) -> Mapping[str, Correction]:
        def work(db: sqlite3.Connection) -> dict[str, Correction]:
            rows = {key: db.execute(_CORRECTION, (project, key)).fetchone() for key in keys}
            noted = {key: checked_row(row, integers=3) for key, row in rows.items() if row is not None}
            return {key: Correction(row[0], (row[1], row[2])) for key, row in noted.items()}

        return self._file.transact(work, write=False)

    # -- the state ---------------------------------------------------------------------------------------------------

    def change(self, project: str, expected: Fields, becomes: Fields, marker: Entry | None = None) -> Moment:
        names = [*expected, *becomes]

        def work(db: sqlite3.Connection) -> Moment:
            now_ms = self._clock()
            epoch, trimmed = _standing(db, project)
            tip = _tip(db, project)
            state = _fields(db, project, names)
            if EPOCH in names and epoch:
                state[EPOCH] = epoch
            is_so = all(state.get(name) == text for name, text in expected.items())
            if not becomes or not is_so or (is_closed(epoch) and EPOCH not in expected):
                return Moment(False, now_ms, epoch, state, tip, trimmed)
            _put(db, project, becomes)
            epoch = (becomes[EPOCH] or "") if EPOCH in becomes else epoch
            if marker is not None:
                tip = next_id(max(tip, trimmed), now_ms, seq_of(marker.key))
                epoch = _add(db, project, [marker], tip, epoch, marker.key)
            return Moment(True, now_ms, epoch, _fields(db, project, names), tip, trimmed)

        return self._file.transact(work, write=bool(becomes))

    def names(self, project: str) -> Sequence[str]:
        def work(db: sqlite3.Connection) -> list[str]:
            names = [name for (name,) in db.execute(_NAMES, (project,))]
            return [name for name in names if name not in (EPOCH, TRIMMED) and not name.startswith(VIEW)]

        return self._file.transact(work, write=None)

    # -- another log in its place ------------------------------------------------------------------------------------

    def replace(
        self, project: str, fence: str, tip: Id, entries: Sequence[Entry], epoch: str, trimmed: Id | None = None
    ) -> bool:
        # Prepared before the transaction, so that nobody waits for it.
        rows = [(project, *entry.id, packed(entry)) for entry in entries]
        corrections = [(project, x.of, x.units, *x.id) for x in entries if x.kind == "correction"]

        def work(db: sqlite3.Connection) -> bool:
            stands, trimmed_until_now = _standing(db, project)
            if not may_replace(fence, stands) or _tip(db, project) != tip:
                return False
            db.execute("DELETE FROM log WHERE project = ?", (project,))
            db.execute("DELETE FROM corrected WHERE project = ?", (project,))
            db.execute("DELETE FROM state WHERE project = ? AND substr(name, 1, ?) = ?", (project, len(VIEW), VIEW))
            db.executemany(_ADD, rows)
            db.executemany(_CORRECT, corrections)
            # With TRIMMED, an empty log is whole; without it, it would be BROKEN.
            has_left = trimmed_until_now if trimmed is None else trimmed
            _put(db, project, {EPOCH: epoch or stands, TRIMMED: id_text(has_left)})
            if trimmed is not None:
                db.execute(_LEAVE_PAST, (project, *trimmed))
            return True

        return self._file.transact(work, write=True)

    # -- the past ----------------------------------------------------------------------------------------------------

    def trim(self, project: str, before_ms: int, count: int = MAX_READ) -> int:
        def work(db: sqlite3.Connection) -> int:
            epoch, _ = _standing(db, project)
            leaving = _entries(db.execute(_READ_LOG, (project, *START, *just_before(before_ms), count)))
            if not leaving or is_closed(epoch):
                return 0
            through = leaving[-1].id
            self._add_past(project, [entry for entry in leaving if entry.kind != "unreadable"], db)
            corrections = [(project, entry.of, *entry.id) for entry in leaving if entry.kind == "correction"]
            db.executemany(_FORGET_CORRECTION, corrections)
            db.execute("DELETE FROM log WHERE project = ? AND (ms, seq) <= (?, ?)", (project, *through))
            _put(db, project, {TRIMMED: id_text(through)})
            return len(leaving)

        moved = self._file.transact(work, write=True)
        if moved:
            self._shorten_past(project)
        return moved

    def past(self, project: str, after: Id, through: Id, count: int) -> Sequence[Entry]:
        return self._read(_READ_PAST, (project, *after, *through, count))

    def past_length(self, project: str) -> int:
        query = "SELECT count(*) FROM past WHERE project = ?"
        return self._file.transact(lambda db: int(db.execute(query, (project,)).fetchone()[0]), write=None)

    def add_past(self, project: str, entries: Sequence[Entry]) -> None:
        for at in range(0, len(entries), MAX_READ):  # others wait for each piece
            self._file.transact(partial(self._add_past, project, entries[at : at + MAX_READ]), write=True)
        self._shorten_past(project)

    def _add_past(self, project: str, entries: Iterable[Entry], db: sqlite3.Connection) -> None:
        db.executemany(_ADD_PAST, [(project, *entry.id, packed(entry)) for entry in entries])
        since_ms = self._clock() - PAST_MS
        db.execute(_DROP_PAST, (project, project, since_ms, project, since_ms))

    def _shorten_past(self, project: str) -> None:
        """Drop the oldest entries of a long past. Nobody waits while it walks through the others to find them."""
        newest = self._file.transact(lambda db: db.execute(_TOO_MANY, (project, MAX_PAST)).fetchone(), write=None)
        if newest is not None:
            self._file.transact(lambda db: db.execute(_SHORTEN_PAST, (project, *newest)), write=True)

    # -- the ledger --------------------------------------------------------------------------------------------------

    def projects(self) -> Sequence[str]:
        rows = self._file.transact(lambda db: db.execute(_PROJECTS).fetchall(), write=None)
        return [str(project) for (project,) in rows]

    def examine(self, project: str) -> Sequence[Finding]:
        path = self._file.path
        if not path:
            return [warning("ledger", "in memory: it ends with this process", "name a file in the url")]
        findings = list(examine_folder("ledger file", os.path.dirname(path), "the charges"))
        if os.path.exists(path) and os.path.getsize(path) <= MAX_CHECKED_BYTES:
            check = "PRAGMA integrity_check(1)"  # `quick_check` does not see that rows are out of order
            if self._file.transact(lambda db: db.execute(check).fetchone()[0], write=False) != "ok":
                findings.append(finding_of("error", "ledger file", self._file.says(sqlite3.SQLITE_CORRUPT)))
        if (full := self._file.full()) and all(finding.level != "error" for finding in findings):
            findings.append(finding_of("error", "ledger file", full))
        return findings

    def unwritable(self, project: str) -> str:
        path = self._file.path
        if not os.path.exists(path):  # in memory, or not made yet
            return ""
        if obstacle(path, "-wal", "-shm", "-journal") is not None:
            return self._file.says(sqlite3.SQLITE_READONLY)
        return self._file.full()

    def now_ms(self) -> int:
        return self._clock()

    def close(self) -> None:
        self._file.close()


def _entries(rows: sqlite3.Cursor) -> list[Entry]:
    """The entries of rows. Another program may have written a line that is no text."""
    return [unpacked(_id(ms, seq), str(line)) for ms, seq, line in rows.fetchall()]


def _id(ms: object, seq: object) -> Id:
    """The id of a row. Raises DamagedError for numbers that no clock gives."""
    if type(ms) is not int or type(seq) is not int or not (0 <= ms < 2**53 and 0 <= seq < 2**53):
        raise DamagedError(f"{ms!r:.50} {seq!r:.50}")
    return ms, seq


def _standing(db: sqlite3.Connection, project: str) -> tuple[str, Id]:
    """The epoch of a log (BROKEN if its entries or its state are missing), and how far it was trimmed."""
    fields = _fields(db, project, (EPOCH, TRIMMED))
    epoch = fields.get(EPOCH, "")
    try:
        trimmed = read_id(fields.get(TRIMMED, id_text(START)))
    except ValueError as error:
        raise DamagedError(str(error)) from error
    if not is_closed(epoch):
        is_empty = _tip(db, project) == START
        if (is_empty and epoch and TRIMMED not in fields) or (not is_empty and not epoch):
            return BROKEN, trimmed
    return epoch, trimmed


def _tip(db: sqlite3.Connection, project: str) -> Id:
    """The newest entry."""
    row = db.execute(_TIP, (project,)).fetchone()
    return START if row is None else _id(*row)


def _has(db: sqlite3.Connection, project: str, entry_id: Id) -> bool:
    """Whether the log has an entry, or has trimmed it."""
    return db.execute(_HAS, (project, *entry_id)).fetchone() is not None or entry_id <= _standing(db, project)[1]


def _add(db: sqlite3.Connection, project: str, entries: Sequence[Entry], first: Id, epoch: str, new_epoch: str) -> str:
    """Append entries, the first with the id `first`. Returns the epoch: `new_epoch` if the log was empty."""
    ms, seq = first
    for n, entry in enumerate(entries):
        db.execute(_ADD, (project, ms, seq + n, packed(entry)))
        if entry.kind == "correction":
            db.execute(_CORRECT, (project, entry.of, entry.units, ms, seq + n))
    if not epoch:
        epoch = new_epoch
        _put(db, project, {EPOCH: epoch})
    return epoch


def _fields(db: sqlite3.Connection, project: str, names: Iterable[str]) -> dict[str, str]:
    """The fields with these names that exist."""
    rows = {name: db.execute(_GET, (project, name)).fetchone() for name in names}
    return {name: str(row[0]) for name, row in rows.items() if row is not None}


def _put(db: sqlite3.Connection, project: str, fields: Fields) -> None:
    """Change fields; None removes a field."""
    for name, text in fields.items():
        if text is None:
            db.execute("DELETE FROM state WHERE project = ? AND name = ?", (project, name))
        else:
            db.execute(_PUT, (project, name, text))
