"""What the store has, out of it again: row by row, so that its size does not matter.

to_export     a connection for as long as a large table takes
Export        one table, as CSV or as JSON, one record a line
csv_writer    what writes one record as CSV
"""

from __future__ import annotations

import csv
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import IO, Any
from urllib.parse import quote

from quota.common.clock import rfc3339
from quota.common.text import nearest, show
from quota.errors import UsageError
from quota.jobs.store.file import StoreError, is_time, wording
from quota.jobs.store.tables import columns_of, tables_of

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
        "taken_at_ms >= :since_ms AND (:region IS NULL OR region = :region) ORDER BY job, region, taken_at_ms, rank",
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
"""The store's own tables: their columns, and which rows in which order."""

WITHOUT_REGION = ("channels", "history")

_OF_ROWS = "key, job, region, first_seen_ms, refreshed_ms, data"
_ROWS = (
    f"SELECT {_OF_ROWS} FROM rows"  # noqa: S608  # a constant
    " WHERE name = :table AND refreshed_ms >= :since_ms AND (:region IS NULL OR region = :region) ORDER BY id"
)


@contextmanager
def to_export(path: str) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, all of it from one snapshot, for as long as a large table takes. What goes wrong
    while it is read is a StoreError; `SqliteFile` would begin again, and write the first records twice."""
    try:
        with closing(sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True)) as db:
            db.execute("BEGIN")
            yield db
    except sqlite3.OperationalError as error:
        raise StoreError(wording(path).other.replace("{reason}", str(error))) from error
    except (sqlite3.DatabaseError, ValueError, TypeError, AttributeError) as error:  # or a value that no store writes
        raise StoreError(wording(path).damaged) from error


class Export:
    """One table of a store, to be read once. Raises UsageError for a table that is not there."""

    def __init__(self, db: sqlite3.Connection, table: str, since_ms: int, region: str | None) -> None:
        self._db = db
        self._values = {"table": table, "since_ms": since_ms, "region": region}
        self._own = table not in BUILT_IN
        if self._own and table not in (of_jobs := [name for name, *_ in tables_of(db)]):
            raise UsageError(f"the store has no table {show(table)}; {nearest(table, [*BUILT_IN, *of_jobs])}")
        self._called = columns_of(db, table, -1) if self._own else {}
        columns, where = BUILT_IN.get(table, (_OF_ROWS, ""))
        self._names = columns.replace(" ", "").split(",")
        self._sql = _ROWS if self._own else f"SELECT {columns} FROM {table} WHERE {where}"  # noqa: S608 - ours
        if region is not None and table in WITHOUT_REGION:
            raise UsageError(f"{table} belong to no region; leave out --region")

    def write(self, file: IO[str], to_json: Callable[[object], str] | None) -> int:
        """Write the records, times in RFC 3339; returns how many. Each is a line of `to_json`; without it of CSV, which
        has a header, and a list or an object as JSON."""
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


class _Lines:
    """A file in which records end with a line feed. A writer that is told so leaves a carriage return unquoted."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, record: str) -> int:
        return self._file.write(record.removesuffix("\r\n") + "\n")


def csv_writer(file: IO[str], columns: Sequence[str]) -> Callable[[Mapping[str, Any]], object]:
    """Writes the header. Returns what writes one record; a list or an object becomes JSON."""
    writer = csv.DictWriter(_Lines(file), columns, restval="", extrasaction="ignore", lineterminator="\r\n")
    writer.writeheader()
    return lambda record: writer.writerow({name: _cell(value) for name, value in record.items()})


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else value
