"""Deletes data that is older than the retention, by a time that the store believes (`believed_ms`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any

from quota.common.sqlite_file import SqliteFile
from quota.jobs.store.checkpoints import RESTART
from quota.jobs.store.file import is_time
from quota.terms.limits import DAY_MS

MAX_AHEAD_MS = 2 * DAY_MS
"""The longest time between two runs that the store believes at once. It believes a longer one after DOUBTED_MS."""

DOUBTED_MS = DAY_MS

DELETE_PER_TRANSACTION = 1_000
MAX_DELETED = 20_000
"""The most rows of a table that one `delete_expired` deletes: several times what a run of 50 regions adds."""


def believed_ms(db: sqlite3.Connection, now_ms: int) -> int:
    """The time by which a run may delete old data: now, or the time of the last run if now is days after it. Either the
    machine was off, or its clock is wrong. When runs have had such a time for a day, the store believes it."""
    row: Sequence[Any] = db.execute("SELECT time_ms, doubted_ms FROM store").fetchone() or (None, None)
    time_ms, doubted_ms = (int(ms) if is_time(ms) else None for ms in row)
    since_ms = now_ms if doubted_ms is None else min(doubted_ms, now_ms)
    if time_ms is None or now_ms - time_ms <= MAX_AHEAD_MS or now_ms - since_ms >= DOUBTED_MS:
        time_ms, doubted_ms = now_ms, None
    else:
        doubted_ms = since_ms
    db.execute("UPDATE store SET time_ms = ?, doubted_ms = ?", (time_ms, doubted_ms))
    return time_ms


def delete_expired(file: SqliteFile, cutoff_ms: int) -> int:
    """Delete data older than `cutoff_ms`, as in `Store.delete_expired`."""
    deleted = 0
    for sql in _DELETE_OLD:
        delete = partial(_delete_some, sql, cutoff_ms)
        for _ in range(MAX_DELETED // DELETE_PER_TRANSACTION):
            count = file.transact(delete, write=True)
            deleted += count
            if count < DELETE_PER_TRANSACTION:
                break

    def restart_expired(db: sqlite3.Connection) -> None:
        expired = db.execute(
            "SELECT job, work, region FROM checkpoints WHERE cursor IS NOT NULL AND started_at_ms < ?",
            (cutoff_ms,),
        ).fetchall()
        db.executemany(RESTART, expired)
        db.execute(
            "DELETE FROM checkpoints WHERE pending = 0 AND cursor IS NULL"
            " AND max(ifnull(completed_at_ms, 0), ifnull(failed_at_ms, 0)) < ?",
            (cutoff_ms,),
        )
        db.execute("DELETE FROM runs WHERE started_ms < ?", (cutoff_ms,))
        db.execute("DELETE FROM charts WHERE taken_at_ms < ?", (cutoff_ms,))
        db.execute("DELETE FROM bought WHERE day_ms < ?", (cutoff_ms,))
        db.execute(_DELETE_GIVEN_UP, (cutoff_ms,))

    file.transact(restart_expired, write=True)
    return deleted


def _delete_some(sql: str, cutoff_ms: int, db: sqlite3.Connection) -> int:
    return db.execute(sql, (cutoff_ms, DELETE_PER_TRANSACTION)).rowcount


_DELETE_OLD = (
    "DELETE FROM rankings WHERE (job, region, taken_at_ms, rank) IN"
    " (SELECT job, region, taken_at_ms, rank FROM rankings WHERE taken_at_ms < ? LIMIT ?)",
    "DELETE FROM videos WHERE id IN (WITH cutoff(ms) AS (VALUES (?))"
    " SELECT id FROM videos, cutoff WHERE refreshed_ms < ms OR listed_ms < ms LIMIT ?)",
    "DELETE FROM channels WHERE channel_id IN (SELECT channel_id FROM channels WHERE refreshed_ms < ? LIMIT ?)",
    "DELETE FROM rows WHERE id IN (SELECT id FROM rows WHERE refreshed_ms < ? LIMIT ?)",
    "DELETE FROM history WHERE (name, key, taken_at_ms) IN"
    " (SELECT name, key, taken_at_ms FROM history WHERE taken_at_ms < ? LIMIT ?)",
)

_DELETE_GIVEN_UP = (
    "DELETE FROM checkpoints"
    " WHERE max(ifnull(started_at_ms, 0), ifnull(completed_at_ms, 0), ifnull(failed_at_ms, 0)) < ?"
    " AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.job = checkpoints.job AND runs.work = checkpoints.work)"
)
"""Deletes checkpoints of work that no job does any longer."""
