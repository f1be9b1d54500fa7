"""Deletes what a store has had for longer than it keeps things."""

from __future__ import annotations

import sqlite3
from functools import partial

from quota.common.sqlite_file import SqliteFile
from quota.jobs.store.checkpoints import RESTART

DELETE_PER_TRANSACTION = 1_000
MAX_DELETED = 20_000
"""Rows of each table that one `delete_expired` deletes at most: several times what a run of 50 regions adds."""


def delete_expired(file: SqliteFile, cutoff_ms: int) -> int:
    """As `Store.delete_expired`, what is older than `cutoff_ms`."""
    write = partial(file.transact, write=True)
    deleted = 0
    for delete in _DELETE_OLD:
        for _ in range(MAX_DELETED // DELETE_PER_TRANSACTION):
            count = write(partial(_delete, delete, cutoff_ms))
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

    write(restart_expired)
    return deleted


def _delete(sql: str, cutoff_ms: int, db: sqlite3.Connection) -> int:
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
"""Those of work that no job does any longer."""
