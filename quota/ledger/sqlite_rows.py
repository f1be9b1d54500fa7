"""What stands in the tables of the SQLite ledger: rows as values, and values as rows.

Whatever none of us wrote there raises DamagedError. Each function works in a transaction of
`quota.ledger.sqlite_ledger`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.common.clock import LATEST_MS, NEVER
from quota.common.sqlite_file import DamagedError, checked_row
from quota.ledger.contract import Exhaustion, Repair
from quota.ledger.entry import Entry
from quota.ledger.grants import read_grants
from quota.ledger.unlogged import UnloggedUsage, read_expiries

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from quota.ledger.contract import ChargeRequest
    from quota.ledger.entry import Charge, Id
    from quota.ledger.grants import Grant

COLUMNS = "ms, seq, units, charged_units, bucket, method, job, region, idempotency_key"
UNLOGGED = "view, epoch, expiries, last_ms, last_seq, kept_units, kept_since_ms, kept_last_ms, logged_units, since_ms"
EXHAUSTION = "bucket, since_ms, until_ms, evidence, reported_by, reopened_ms, reopened_because"


def append_charge(db: sqlite3.Connection, project: str, at: Id, charge: Charge) -> None:
    db.execute(
        "INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            project,
            *at,
            charge.units,
            charge.units,
            charge.bucket,
            charge.method,
            charge.job,
            charge.region,
            charge.idempotency_key,
        ),
    )


def following_id(last: Id, clock_ms: int) -> Id:
    """L10. The id of a charge made now: ids never go back, whatever the clock does."""
    return (clock_ms, 0) if clock_ms > last[0] else (last[0], last[1] + 1)


def entry_of(row: tuple[int, int, int, int, str, str, str, str, str]) -> Entry:
    if checked_row(row, integers=4)[0] >= LATEST_MS:
        raise DamagedError("a charge in the far future")
    return Entry(*row)


def set_project(db: sqlite3.Connection, project: str, epoch: str, unlogged_until_ms: int, retention_ms: int) -> None:
    db.execute(
        "INSERT INTO projects VALUES (?, ?, ?, ?, 0, '', '') ON CONFLICT (project) DO UPDATE"
        " SET epoch = excluded.epoch, unlogged_until_ms = excluded.unlogged_until_ms,"
        " retention_ms = excluded.retention_ms",
        (project, epoch, unlogged_until_ms, retention_ms),
    )


def unlogged_of(db: sqlite3.Connection, request: ChargeRequest, now_ms: int) -> tuple[tuple[UnloggedUsage, ...], ...]:
    sql = f"SELECT {UNLOGGED} FROM unlogged WHERE project = ? AND view = ? AND until_ms > ?"  # noqa: S608  # a constant
    rows = [db.execute(sql, (request.project, check.view.name, now_ms)).fetchall() for check in request.checks]
    return tuple(tuple(map(usage_of, of_view)) for of_view in rows)


def usages_of(db: sqlite3.Connection, project: str) -> list[UnloggedUsage]:
    """All unlogged usage of a project, by view."""
    sql = f"SELECT {UNLOGGED} FROM unlogged WHERE project = ? ORDER BY 1, 2"  # noqa: S608  # a constant
    return [usage_of(row) for row in db.execute(sql, (project,)).fetchall()]


def usage_of(row: tuple[str, str, str, int, int, int, int, int, int, int]) -> UnloggedUsage:
    view, epoch, expiries, last_ms, last_seq, *kept = row
    checked_row((last_ms, last_seq, *kept, view, epoch, expiries), integers=len(kept) + 2)
    try:
        return UnloggedUsage(view, epoch, read_expiries(expiries), (last_ms, last_seq), *kept)
    except (ValueError, AttributeError) as error:
        raise DamagedError(f"{expiries!r:.100}") from error


def exhaustions_of(db: sqlite3.Connection, project: str) -> dict[str, Exhaustion]:
    """The recorded exhaustions by bucket, those that were lifted too."""
    sql = f"SELECT {EXHAUSTION} FROM exhaustions WHERE project = ? ORDER BY 1"  # noqa: S608  # a constant
    return {row[0]: exhaustion_of(row) for row in db.execute(sql, (project,)).fetchall()}


def exhaustion_of(row: tuple[str, int, int, str, str, int, str]) -> Exhaustion:
    bucket, since_ms, until_ms, evidence, reported_by, reopened_ms, because = row
    times = since_ms, 0 if until_ms == NEVER else until_ms, reopened_ms
    checked_row((*times, bucket, evidence, reported_by, because), integers=3, below=LATEST_MS)
    return Exhaustion(*row)


def granted_of(text: object) -> tuple[Grant, ...]:
    try:
        return read_grants(str(text))
    except ValueError as error:
        raise DamagedError(f"{text!r:.100}") from error


def repair_of(row: tuple[int, int, int, int, int, int]) -> Repair:
    newest_ms, newest_seq, begun_ms, at_ms, through_ms, through_seq = checked_row(row, integers=6)
    checked_row((newest_ms, begun_ms, at_ms, through_ms), integers=4, below=LATEST_MS)
    return Repair((newest_ms, newest_seq), begun_ms, at_ms, (through_ms, through_seq))


def marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
