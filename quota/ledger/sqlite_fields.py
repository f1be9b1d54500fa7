"""What stands in the two tables of the SQLite ledger: charges as rows, all else as named fields.

Whatever none of us wrote there raises DamagedError, or one of UNREADABLE. Each function works in a transaction of
`quota.ledger.sqlite_ledger`. The fields are listed in `schema.sql`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import lru_cache

from quota.common.clock import LATEST_MS
from quota.common.sqlite_file import DamagedError, checked_row
from quota.ledger.contract import Exhaustion
from quota.ledger.entry import Charge, Entry, Id
from quota.ledger.state_fields import read_exhaustion, read_ms, read_usages
from quota.ledger.unlogged import UnloggedUsage

UNREADABLE = (ValueError, LookupError, AttributeError, RecursionError)
"""What is raised where a field is none of ours. Python reads no JSON that is nested very deep."""

COLUMNS = "ms, seq, units, charged_units, bucket, method, job, region, idempotency_key, settled"

_NEWEST = "SELECT ms, seq FROM charges WHERE project = ? ORDER BY ms DESC, seq DESC LIMIT 1"
_APPEND = "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"
_BEGINNING = "FROM state WHERE project = ? AND name >= ? AND name < ?"


# -- the log -----------------------------------------------------------------------------------------------------------


def append_charge(db: sqlite3.Connection, project: str, at: Id, charge: Charge) -> None:
    units, *names = charge
    db.execute(_APPEND, (project, *at, units, units, *names))


def newest_id(db: sqlite3.Connection, project: str) -> Id:
    """The id of the newest entry; (0, 0) if there is none."""
    row: Id = db.execute(_NEWEST, (project,)).fetchone() or (0, 0)
    ms, seq = row
    if not (type(ms) is type(seq) is int and 0 <= ms < LATEST_MS and seq >= 0):
        raise DamagedError("a charge in the far future")
    return row


def following_id(last: Id, clock_ms: int) -> Id:
    """L10. The id of a charge made now: ids never go back, whatever the clock does."""
    return (clock_ms, 0) if clock_ms > last[0] else (last[0], last[1] + 1)


def entry_of(row: tuple[int, int, int, int, str, str, str, str, str, int]) -> Entry:
    checked_row(row[:-1], integers=4)
    checked_row(row[-1:], integers=1, below=2)
    if row[0] >= LATEST_MS:
        raise DamagedError("a charge in the far future")
    return Entry(*row[:-1], bool(row[-1]))


# -- the fields --------------------------------------------------------------------------------------------------------


def read_fields(db: sqlite3.Connection, project: str, names: Sequence[str]) -> dict[str, str]:
    """Those of these fields that there are."""
    return _checked(db.execute(_reading(len(names)), (project, *names)).fetchall())


@lru_cache
def _reading(names: int) -> str:
    return f"SELECT name, value FROM state WHERE project = ? AND name IN ({marks(range(names))})"  # noqa: S608


def fields_of(db: sqlite3.Connection, project: str, kind: str) -> dict[str, str]:
    """All fields `KIND:...`, by what follows the colon, in order."""
    begins = f"{kind}:"
    found = _checked(db.execute(f"SELECT name, value {_BEGINNING}", (project, begins, f"{kind};")).fetchall())
    return {name.removeprefix(begins): value for name, value in found.items()}


def _checked(rows: Sequence[tuple[str, str]]) -> dict[str, str]:
    for name, value in rows:
        if type(value) is not str:
            raise DamagedError(f"{name!r:.100}: {value!r:.100}")
    return dict(rows)


def put_fields(db: sqlite3.Connection, project: str, fields: Iterable[tuple[str, str | int]]) -> None:
    for name, value in fields:
        db.execute("REPLACE INTO state VALUES (?, ?, ?)", (project, name, str(value)))


def drop_fields(db: sqlite3.Connection, project: str, names: Iterable[str]) -> None:
    db.executemany("DELETE FROM state WHERE project = ? AND name = ?", [(project, name) for name in names])


def drop_kind(db: sqlite3.Connection, project: str, kind: str) -> None:
    """Drop all fields `KIND:...`."""
    db.execute(f"DELETE {_BEGINNING}", (project, f"{kind}:", f"{kind};"))  # a constant


def trimmed_through_ms(db: sqlite3.Connection, project: str) -> int:
    """The time of the newest charge that was trimmed (L13); 0: none was."""
    return read_ms(read_fields(db, project, ("trimmed_through_ms",)).get("trimmed_through_ms", "0"))


def drop_lapsed(db: sqlite3.Connection, project: str, kind: str, now_ms: int) -> None:
    """Drop those of the fields `KIND:...` that begin with a time up to `now_ms`."""
    lapsed = f"DELETE {_BEGINNING} AND CAST(value AS INTEGER) <= ?"  # a constant
    db.execute(lapsed, (project, f"{kind}:", f"{kind};", now_ms))


def exhaustions_of(db: sqlite3.Connection, project: str) -> dict[str, Exhaustion]:
    """The recorded exhaustions by bucket, those that were lifted too."""
    texts = fields_of(db, project, "closed") | fields_of(db, project, "reopened")
    return {bucket: read_exhaustion(texts[bucket]) for bucket in sorted(texts)}


def usages_of(db: sqlite3.Connection, project: str) -> dict[str, tuple[UnloggedUsage, ...]]:
    """All unlogged usage of a project, by view."""
    return {view: read_usages(view, text) for view, text in fields_of(db, project, "unlogged").items()}


def marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
