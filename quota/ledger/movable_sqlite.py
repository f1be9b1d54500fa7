"""An SQLite ledger that can move, or be moved to: `quota.ledger.fence.Movable`.

Every step is one short transaction, and each waits for the disk: a crash of the machine that took a fence back would
leave two open ledgers.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any
from urllib.parse import unquote

from quota.common.sqlite_file import DamagedError, checked_row
from quota.ledger.contract import MIN_RETENTION_MS
from quota.ledger.entry import Entry, Id
from quota.ledger.fence import (
    FENCE,
    FILLING,
    NOT_MOVED,
    ONLY_IN_REDIS,
    ROLES,
    UNSEALED,
    Field,
    OvertakenError,
    Standing,
    Wanted,
    fence_to,
    peer_of,
)
from quota.ledger.sqlite_fields import drop_fields, newest_id, put_fields, read_fields
from quota.ledger.sqlite_history import ROLLED_UP
from quota.ledger.sqlite_ledger import SqliteLedger
from quota.ledger.state_fields import id_text, read_id

TABLES = ("charges", "state")
"""All tables. Each has the column `project`."""

PIECE = 1_000
FIELDS_AT_ONCE = 500

_KEPT = ("epoch", "retention_ms", "fence", "move", "fenced_epoch")
"""What a ledger that is to be filled keeps when it is cleared."""


class MovableSqliteLedger(SqliteLedger):
    """See `quota.ledger.fence.Movable`."""

    _durable = True
    _deadline_s = 10.0  # callers that are refused take the file's lock again and again

    def counts_lost(self) -> bool:
        return False

    def projects(self) -> list[str]:
        if not os.path.exists(self._file.path):
            return []
        sql = " UNION ".join(f"SELECT project FROM {table}" for table in TABLES)  # noqa: S608  # constants

        def work(db: sqlite3.Connection) -> list[str]:
            return sorted(checked_row(row, integers=0)[0] for row in db.execute(sql))

        return self._run(work, write=False)

    def standing(self, project: str) -> Standing:
        if not os.path.exists(self._file.path):
            return Standing("empty", "", "", "", None, 0, (0, 0))
        return self._run(lambda db: _standing(db, project), write=False)

    def change(self, project: str, before: Standing, wanted: Wanted) -> Standing:
        def work(db: sqlite3.Connection) -> None:
            now = _standing(db, project, count=wanted.charges is not None)
            if (now.role, now.move) == (before.role, before.move) and wanted.charges in (None, now.charges):
                _become(db, project, now, wanted)

        self._run(work, write=True)
        return self.standing(project)

    def clear(self, project: str, move: str) -> Iterator[None]:
        while self._in_move(project, move, lambda db: _clear(db, project)):
            yield

    def fill(self, project: str, move: str, after: Id, entries: Sequence[Entry], retention_ms: int) -> Id:
        def work(db: sqlite3.Connection) -> Id:
            filled = _filled(db, project)
            if filled != after:
                return filled or (-1, 0)
            db.executemany(
                "REPLACE INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(project, *entry) for entry in entries],
            )
            _raise_retention(db, project, retention_ms)
            last = (entries[-1].ms, entries[-1].seq)
            put_fields(db, project, [("filled", id_text(last))])
            return last

        filled: Id = self._in_move(project, move, work)
        return filled

    def put_state(self, project: str, move: str, after: Id, fields: Sequence[Field], retention_ms: int) -> None:
        def work(db: sqlite3.Connection) -> None:
            if _filled(db, project) == after:
                _raise_retention(db, project, retention_ms)
                ours = [field for field in fields if not {field[0], field[0].partition(":")[0]} & ONLY_IN_REDIS]
                put_fields(db, project, ours)

        self._in_move(project, move, work)

    def state(self, project: str) -> Iterator[list[Field]]:
        fields = iter(self._run(lambda db: _fields(db, project), write=False))
        while piece := list(islice(fields, FIELDS_AT_ONCE)):
            yield piece

    def _in_move(self, project: str, move: str, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """`work` in one transaction, if this move is filling the ledger."""

        def guarded(db: sqlite3.Connection) -> Any:
            now = _standing(db, project, count=False)
            if (now.role, now.move) != ("filling", move):
                raise OvertakenError(f"ledger {self.label}: another move has begun, or this one has ended")
            return work(db)

        return self._run(guarded, write=True)


# -- the standing ------------------------------------------------------------------------------------------------------


def _standing(db: sqlite3.Connection, project: str, *, count: bool = True) -> Standing:
    """Without `count` the number of charges is 0, or 1 where there are any."""
    limit = "" if count else " LIMIT 1"
    sql = f"SELECT COUNT(*) FROM (SELECT 1 FROM charges WHERE project = ?{limit})"  # noqa: S608  # constants
    (charges,) = db.execute(sql, (project,)).fetchone()
    last = newest_id(db, project)
    names = ("fence", "move", "fenced_epoch", "epoch")
    role, move, kept, epoch = map(read_fields(db, project, names).get, names, ("open", "", "", ""))
    if role not in ROLES:
        raise DamagedError(role)
    if not epoch.startswith(FENCE):
        any_field = "SELECT 1 FROM state WHERE project = ? LIMIT 1"
        anything = charges or db.execute(any_field, (project,)).fetchone()
        return Standing("open" if anything else "empty", move, epoch, "", None, charges, last)
    return Standing(ROLES[role], move, kept, unquote(peer_of(epoch)), _filled(db, project), charges, last)


def _filled(db: sqlite3.Connection, project: str) -> Id | None:
    text = read_fields(db, project, ("filled",)).get("filled")
    return None if text is None else read_id(text)


def _become(db: sqlite3.Connection, project: str, now: Standing, wanted: Wanted) -> None:
    role, move, peer, epoch, _ = wanted
    real = epoch if role == "filling" else now.epoch or epoch
    ways = {"fenced": UNSEALED, "sealed": "", "filling": FILLING}
    shown = FENCE + ways[role] + fence_to(peer) if role in ways else real
    drop_fields(db, project, ("filled",))
    put_fields(db, project, [("fence", role), ("move", move), ("fenced_epoch", real), ("epoch", shown)])
    _raise_retention(db, project, MIN_RETENTION_MS)


# -- filling -----------------------------------------------------------------------------------------------------------


def _clear(db: sqlite3.Connection, project: str) -> bool:
    """Delete a piece; whether there is more. Only before the first piece is filled: a mover may be late."""
    if _filled(db, project) is not None:
        return False
    sql = (
        "DELETE FROM charges WHERE project = ? AND (ms, seq) IN"
        " (SELECT ms, seq FROM charges WHERE project = ? ORDER BY ms, seq LIMIT ?)"
    )
    if db.execute(sql, (project, project, PIECE)).rowcount == PIECE:
        return True
    kept = read_fields(db, project, _KEPT)
    db.execute("DELETE FROM state WHERE project = ?", (project,))
    put_fields(db, project, [*kept.items(), ("filled", id_text((0, 0)))])
    return False


def _raise_retention(db: sqlite3.Connection, project: str, retention_ms: int) -> None:
    known_ms = int(read_fields(db, project, ("retention_ms",)).get("retention_ms", 0))
    put_fields(db, project, [("retention_ms", max(known_ms, retention_ms))])


# -- reading -----------------------------------------------------------------------------------------------------------


def _fields(db: sqlite3.Connection, project: str) -> list[Field]:
    """The state, and what Redis has of it beside."""
    rows = db.execute("SELECT name, value FROM state WHERE project = ? ORDER BY name", (project,)).fetchall()
    fields = dict(checked_row(row, integers=0) for row in rows)
    last = newest_id(db, project)
    if last != (0, 0):
        fields["last"] = id_text(last)
    if ROLLED_UP in fields:
        fields["rolled_up"] = fields[ROLLED_UP]
    oldest = [int(name.rpartition(":")[2]) for name in fields if name.startswith(("history:hour:", "history:refused:"))]
    if oldest:
        fields["history:swept_hour"] = str(min(oldest) - 1)
    return [field for field in fields.items() if field[0] not in NOT_MOVED]
