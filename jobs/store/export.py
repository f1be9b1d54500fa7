"""Exports tables of the store row by row, so a table may be of any size.

to_export     a connection that lasts for a large table
Export        one table as CSV, or as JSON with one record a line
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import IO, Any
from urllib.parse import quote

from quota.common.clock import rfc3339
from quota.common.text import csv_writer, nearest, show
from quota.errors import UsageError
from quota.jobs.store.file import StoreError, is_time, wording
from quota.jobs.store.rows import columns_of, tables_of

BUILT_IN = {
    "videos": (
        "video_id, title, description, channel_id, channel_title, category_id, published_at, tags, default_language,"
        " audio_language, live_broadcast, thumbnail_url, view_count, like_count, comment_count, duration, definition,"
        " has_caption, is_licensed, first_seen_ms, refreshed_ms",
        "refreshed_ms >= :since_ms AND (:region IS NULL OR EXISTS"
        " (SELECT 1 FROM rankings r WHERE r.video_id = videos.video_id AND r.region = :region)) ORDER BY id",
    ),
    "rankings": (
        "job, region, taken_at_ms, rank, video_id, view_count",
        "taken_at_ms >= :since_ms AND (:region IS NULL OR region = :region) AND (:job IS NULL OR job = :job)"
        " ORDER BY job, region, taken_at_ms, rank",
    ),
    "channels": (
        "channel_id, title, description, custom_url, country, published_at, thumbnail_url, view_count,"
        " subscriber_count, video_count, first_seen_ms, refreshed_ms",
        "refreshed_ms >= :since_ms ORDER BY channel_id",
    ),
    "history": (
        "name, key, taken_at_ms, data",
        "taken_at_ms >= :since_ms ORDER BY name, key, taken_at_ms",
    ),
}
"""The store's own tables: their columns, the condition and the order of their rows."""

WITHOUT_REGION = ("channels", "history")
WITHOUT_JOB = ("videos", "channels", "history")

_OF_ROWS = "key, job, region, first_seen_ms, refreshed_ms, data"
_ROWS = (
    f"SELECT {_OF_ROWS} FROM rows"  # noqa: S608  # a constant
    " WHERE name = :table AND refreshed_ms >= :since_ms AND (:region IS NULL OR region = :region)"
    " AND (:job IS NULL OR job = :job) ORDER BY id"
)


@contextmanager
def to_export(path: str) -> Iterator[sqlite3.Connection]:
    """A read-only connection to one snapshot, which lasts for a large table. An error while it is read becomes a
    StoreError. `SqliteFile` does not fit: it would start again, and write the first records twice."""
    try:
        with closing(sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True)) as db:
            db.execute("BEGIN")
            yield db
    except sqlite3.OperationalError as error:
        raise StoreError(wording(path).other.replace("{reason}", str(error))) from error
    except (sqlite3.DatabaseError, ValueError, TypeError, AttributeError) as error:  # or a value that no store writes
        raise StoreError(wording(path).damaged) from error


class Export:
    """One table of a store, for one export. Raises UsageError for an unknown table."""

    def __init__(
        self,
        db: sqlite3.Connection,
        table: str,
        since_ms: int,
        region: str | None = None,
        job: str | None = None,
        limit: int | None = None,
    ) -> None:
        self._db = db
        most = -1 if limit is None else limit
        self._values = {"table": table, "since_ms": since_ms, "region": region, "job": job, "most": most}
        self._own = table not in BUILT_IN
        if self._own and table not in (of_jobs := [name for name, *_ in tables_of(db)]):
            raise UsageError(f"the store has no table {show(table)}; {nearest(table, [*BUILT_IN, *of_jobs])}")
        self._called = columns_of(db, table, -1) if self._own else {}
        columns, where = BUILT_IN.get(table, (_OF_ROWS, ""))
        self._names = columns.replace(" ", "").split(",")
        self._sql = f"{_ROWS if self._own else f'SELECT {columns} FROM {table} WHERE {where}'} LIMIT :most"  # noqa: S608 - ours
        if region is not None and table in WITHOUT_REGION:
            raise UsageError(f"{table} belong to no region; leave out --region")
        if job is not None and table in WITHOUT_JOB:
            raise UsageError(f"{table} belong to no job; leave out --job")

    def write(self, file: IO[str], to_json: Callable[[object], str] | None) -> int:
        """Write the records, with times in RFC 3339, and return their number. Each is a line of `to_json`; if that is
        None, a line of CSV, which has a header, and lists and objects as JSON."""
        columns = [_shown(name) for name in self._names]
        if self._own:
            columns[-1:] = self._called.values()  # in the place of `data`
        put = csv_writer(file, columns) if to_json is None else lambda record: file.write(f"{to_json(record)}\n")
        count = 0
        for record in self._records():
            put(record)
            count += 1
        return count

    def _records(self) -> Iterator[dict[str, Any]]:
        for row in self._db.execute(self._sql, self._values):
            record = {_shown(name): _value(name, value) for name, value in zip(self._names, row, strict=True)}
            if self._own:
                fields = record.pop("data")
                record = {**{self._called.get(name, name): value for name, value in fields.items()}, **record}
            yield record


def _shown(name: str) -> str:
    return re.sub("(_at)?_ms$", "_at", name)


def _value(name: str, value: Any) -> Any:
    if name.endswith("_ms"):
        return rfc3339(value) if is_time(value) else None
    if name in ("data", "tags"):
        return None if value is None else json.loads(value)
    return value
