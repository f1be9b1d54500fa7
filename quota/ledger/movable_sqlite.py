"""An SQLite ledger that can move, or be moved to: `quota.ledger.fence.Movable`.

Every step is one short transaction, and each waits for the disk: a crash of the machine that took a fence back would
leave two open ledgers.
"""

from __future__ import annotations

import os
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from quota.common.sqlite_file import DamagedError, checked_row
from quota.errors import LedgerError
from quota.ledger import sqlite_history
from quota.ledger.compared import compared_text, read_compared
from quota.ledger.contract import MIN_RETENTION_MS
from quota.ledger.fence import FENCE, FILLING, ROLES, UNSEALED, Field, OvertakenError, Role, Standing, fence_to, peer_of
from quota.ledger.grants import grants_text, read_grants
from quota.ledger.sqlite_ledger import SqliteLedger
from quota.ledger.sqlite_rows import exhaustions_of, usages_of
from quota.ledger.state_fields import exhaustion_text, id_text, read_exhaustion, read_id, read_usages, usages_text
from quota.ledger.unlogged import expiries_text

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quota.ledger.entry import Entry, Id

HISTORY = ("histories", "hours", "sums", "refused", "refused_sums", "refusals")
CLEARED = ("charges", "views", "exhaustions", "repaid", "claims", "unlogged", "repairs", *HISTORY)
"""The tables that hold what a project's ledger is cleared of before it is filled."""

TABLES = (*CLEARED, "projects", "moves")
"""All tables. Each has the column `project`."""

PIECE = 1_000
FIELDS_AT_ONCE = 500

_OF_PROJECT = ("unlogged_until_ms", "retention_ms", "trimmed_through_ms")
"""Columns of `projects` that are fields of the state under the same name."""


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

        return self._file.transact(work, write=False)

    def standing(self, project: str) -> Standing:
        if not os.path.exists(self._file.path):
            return Standing("empty", "", "", "", None, 0, (0, 0))
        return self._file.transact(lambda db: _standing(db, project), write=False)

    def change(
        self,
        project: str,
        before: Standing,
        role: Role,
        move: str,
        *,
        peer: str = "",
        epoch: str = "",
        charges: int | None = None,
    ) -> Standing:
        # A fenced log stays as it is, so it can be counted before others have to wait for the transaction.
        if charges is not None and self.standing(project).charges != charges:
            return self.standing(project)

        def work(db: sqlite3.Connection) -> None:
            now = _standing(db, project, count=False)
            if (now.role, now.move) == (before.role, before.move):
                _become(db, project, now, role, move, fence_to(peer), epoch)

        self._file.transact(work, write=True)
        return self.standing(project)

    def clear(self, project: str, move: str) -> Iterator[None]:
        for table in CLEARED:
            while self._in_move(project, move, lambda db, table=table: _clear(db, table, project)) == PIECE:  # type: ignore[misc]
                yield
        yield self._in_move(project, move, lambda db: _cleared(db, project))

    def fill(self, project: str, move: str, after: Id, entries: Sequence[Entry], retention_ms: int) -> Id:
        def work(db: sqlite3.Connection) -> Id:
            filled = _filled(db, project)
            if filled != after:
                return filled or (-1, 0)
            db.executemany(
                "REPLACE INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [(project, *entry) for entry in entries]
            )
            _raise_retention(db, project, retention_ms)
            last = (entries[-1].ms, entries[-1].seq)
            db.execute("UPDATE moves SET filled_ms = ?, filled_seq = ? WHERE project = ?", (*last, project))
            return last

        filled: Id = self._in_move(project, move, work)
        return filled

    def put_state(self, project: str, move: str, after: Id, fields: Sequence[Field], retention_ms: int) -> None:
        def work(db: sqlite3.Connection) -> None:
            if _filled(db, project) == after:
                _raise_retention(db, project, retention_ms)
                for name, value in fields:
                    _put(db, project, name, value)

        try:
            self._in_move(project, move, work)
        except (ValueError, KeyError, AttributeError) as error:
            raise LedgerError(f"what moves to {self.label} holds what no quota program writes: {error}") from error

    def state(self, project: str) -> Iterator[list[Field]]:
        fields = iter(self._file.transact(lambda db: list(_fields(db, project)), write=False))
        while piece := list(islice(fields, FIELDS_AT_ONCE)):
            yield piece

    def _in_move(self, project: str, move: str, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """`work` in one transaction, if this move is filling the ledger."""

        def guarded(db: sqlite3.Connection) -> Any:
            now = _standing(db, project, count=False)
            if (now.role, now.move) != ("filling", move):
                raise OvertakenError(f"ledger {self.label}: another move has begun, or this one has ended")
            return work(db)

        return self._file.transact(guarded, write=True)


# -- the standing ------------------------------------------------------------------------------------------------------


def _standing(db: sqlite3.Connection, project: str, *, count: bool = True) -> Standing:
    """Without `count` the number of charges is 0, or 1 where there are any."""
    limit = "" if count else " LIMIT 1"
    sql = f"SELECT COUNT(*) FROM (SELECT 1 FROM charges WHERE project = ?{limit})"  # noqa: S608  # constants
    (charges,) = db.execute(sql, (project,)).fetchone()
    newest = "SELECT ms, seq FROM charges WHERE project = ? ORDER BY ms DESC, seq DESC LIMIT 1"
    last = checked_row(db.execute(newest, (project,)).fetchone() or (0, 0), integers=2)
    row = db.execute("SELECT epoch FROM projects WHERE project = ?", (project,)).fetchone()
    (epoch,) = checked_row(row or ("",), integers=0)
    moved = db.execute("SELECT role, move, epoch FROM moves WHERE project = ?", (project,)).fetchone()
    role, move, kept = checked_row(moved or ("open", "", ""), integers=0)
    if role not in ROLES:
        raise DamagedError(role)
    if not epoch.startswith(FENCE):
        anything = any(
            db.execute(f"SELECT 1 FROM {table} WHERE project = ? LIMIT 1", (project,)).fetchone()  # noqa: S608
            for table in TABLES
        )
        return Standing("open" if anything else "empty", move, epoch, "", None, charges, last)
    return Standing(ROLES[role], move, kept, unquote(peer_of(epoch)), _filled(db, project), charges, last)


def _filled(db: sqlite3.Connection, project: str) -> Id | None:
    row = db.execute("SELECT filled_ms, filled_seq FROM moves WHERE project = ?", (project,)).fetchone()
    return None if row is None or row[0] is None else checked_row(row, integers=2)


def _become(db: sqlite3.Connection, project: str, now: Standing, role: Role, move: str, peer: str, epoch: str) -> None:
    real = epoch if role == "filling" else now.epoch or epoch
    ways = {"fenced": UNSEALED, "sealed": "", "filling": FILLING}
    shown = FENCE + ways[role] + peer if role in ways else real
    db.execute("REPLACE INTO moves VALUES (?, ?, ?, ?, NULL, NULL)", (project, role, move, real))
    db.execute(
        "INSERT INTO projects (project, epoch, unlogged_until_ms, retention_ms, trimmed_through_ms)"
        " VALUES (?, ?, 0, ?, 0) ON CONFLICT (project) DO UPDATE SET epoch = excluded.epoch",
        (project, shown, MIN_RETENTION_MS),
    )


# -- filling -----------------------------------------------------------------------------------------------------------


def _clear(db: sqlite3.Connection, table: str, project: str) -> int:
    """Delete a piece; returns how many rows."""
    if table != "charges":  # a row for each limit, bucket, machine or job: few; and some thousand of the history
        db.execute(f"DELETE FROM {table} WHERE project = ?", (project,))  # noqa: S608  # a constant
        return 0
    sql = (
        "DELETE FROM charges WHERE project = ? AND (ms, seq) IN"
        " (SELECT ms, seq FROM charges WHERE project = ? ORDER BY ms, seq LIMIT ?)"
    )
    return db.execute(sql, (project, project, PIECE)).rowcount


def _cleared(db: sqlite3.Connection, project: str) -> None:
    columns = "unlogged_until_ms = 0, trimmed_through_ms = 0, granted = '', compared = ''"
    db.execute(f"UPDATE projects SET {columns} WHERE project = ?", (project,))  # noqa: S608  # constants
    db.execute("UPDATE moves SET filled_ms = 0, filled_seq = 0 WHERE project = ?", (project,))


def _raise_retention(db: sqlite3.Connection, project: str, retention_ms: int) -> None:
    sql = "UPDATE projects SET retention_ms = MAX(retention_ms, ?) WHERE project = ?"
    db.execute(sql, (retention_ms, project))


def _put(db: sqlite3.Connection, project: str, name: str, value: str) -> None:
    """One field of the state as rows. The keys of retries (L16) have no use here, and `last` is the log's."""
    kind, colon, rest = name.partition(":")
    if kind in _OF_PROJECT and not colon:
        db.execute(f"UPDATE projects SET {kind} = ? WHERE project = ?", (int(value), project))  # noqa: S608  # known
    elif name == "granted":
        db.execute("UPDATE projects SET granted = ? WHERE project = ?", (grants_text(read_grants(value)), project))
    elif name == "compared":
        db.execute("UPDATE projects SET compared = ? WHERE project = ?", (compared_text(read_compared(value)), project))
    elif kind == "view":
        total, tail, head, dropped_through_ms = value.split(" ")
        ids = (int(part) for at in (tail, head) for part in at.split("-"))
        row = (project, rest, int(total), *ids, int(dropped_through_ms))
        db.execute("REPLACE INTO views VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    elif kind in ("closed", "reopened"):
        db.execute("REPLACE INTO exhaustions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (project, *read_exhaustion(value)))
    elif kind == "unlogged":
        for usage in read_usages(rest, value):
            row = (project, rest, usage.epoch, expiries_text(usage.expiries), usage.until_ms, *usage.last, *usage.kept)
            db.execute("REPLACE INTO unlogged VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    elif kind == "repaid":
        sql = "INSERT INTO repaid VALUES (?, ?, ?, 0) ON CONFLICT DO UPDATE SET number = excluded.number"
        db.execute(sql, (project, rest, int(value)))
    elif kind == "repaid_at":
        sql = "INSERT INTO repaid VALUES (?, ?, 0, ?) ON CONFLICT DO UPDATE SET at_ms = excluded.at_ms"
        db.execute(sql, (project, rest, int(value)))
    elif kind == "repaired":
        for line in value.splitlines():
            newest, begun_ms, at_ms, through = line.split(" ")
            row = (project, *read_id(newest), int(begun_ms), int(at_ms), *read_id(through))
            db.execute("REPLACE INTO repairs VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    elif kind == "history":
        sqlite_history.put(db, project, rest, value)
    elif kind == "claim":
        until_ms, _, record = value.partition(" ")
        db.execute("REPLACE INTO claims VALUES (?, ?, ?, ?)", (project, rest, int(until_ms), record))


# -- reading -----------------------------------------------------------------------------------------------------------


def _fields(db: sqlite3.Connection, project: str) -> Iterator[Field]:
    """The rows of a project as fields of the state, the inverse of `_put`."""

    def rows(columns: str, table: str, integers: int = 0) -> Iterable[Any]:
        sql = f"SELECT {columns} FROM {table} WHERE project = ? ORDER BY 1"  # noqa: S608  # constants
        return [checked_row(row, integers=integers) for row in db.execute(sql, (project,))]

    for row in rows(", ".join(_OF_PROJECT), "projects", len(_OF_PROJECT)):
        yield from zip(_OF_PROJECT, map(str, row), strict=True)
    last = _standing(db, project, count=False).last
    if last != (0, 0):
        yield "last", id_text(last)
    for column in ("granted", "compared"):
        yield from ((column, text) for (text,) in rows(column, "projects") if text)
    views = rows("total, tail_ms, tail_seq, head_ms, head_seq, dropped_through_ms, name", "views", 6)
    for total, t_ms, t_seq, h_ms, h_seq, dropped_through_ms, name in views:
        yield f"view:{name}", f"{total} {t_ms}-{t_seq} {h_ms}-{h_seq} {dropped_through_ms}"
    for exhaustion in exhaustions_of(db, project).values():
        kind = "reopened" if exhaustion.reopened_ms else "closed"
        yield f"{kind}:{exhaustion.bucket}", exhaustion_text(exhaustion)
    for view, usages in groupby(usages_of(db, project), key=lambda usage: usage.view):
        yield f"unlogged:{view}", usages_text(list(usages))
    for number, at_ms, machine in rows("number, at_ms, machine", "repaid", 2):
        yield f"repaid:{machine}", str(number)
        if at_ms:
            yield f"repaid_at:{machine}", str(at_ms)
    marks = rows("at_ms, newest_ms, newest_seq, begun_ms, through_ms, through_seq", "repairs", 6)
    lines = [f"{n_ms}-{n_seq} {begun_ms} {at_ms} {t_ms}-{t_seq}" for at_ms, n_ms, n_seq, begun_ms, t_ms, t_seq in marks]
    if lines:
        yield "repaired", "\n".join(reversed(lines))
    for until_ms, name, record in rows("until_ms, name, record", "claims", 1):
        yield f"claim:{name}", f"{until_ms} {record}"
    yield from sqlite_history.fields(db, project)
