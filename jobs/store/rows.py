"""What upstream and fetch functions return, as rows of the store.

    video_row, channel_row          one resource as a row: the value under each name, or null if the value is invalid
    upsert                          put a row into its table
    save_video                      put a video into its table, or note that a list had it or a call asked for it
    part                            an object inside a resource
    as_text, text_or_none           text that SQLite can hold
    count_or_none                   a count
    Field                           how a column is read from a resource, and shown in one

No value from upstream raises an error here, except a resource without an id.

Rows of a job's own tables are JSON:

    Row             one checked row
    TableOfRows     a table and its numbers
    rows_of         the rows of a page, all valid
    save_rows       inserts or refreshes rows in the store
    keep_reading    keeps values that change over time
    columns_of      the column names of a table's fields
    write_views     makes a view of each table with a column for each field
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from quota.common.text import listed, show
from quota.errors import BadAnswer
from quota.jobs.job import MAX_DEPTH, is_deep
from quota.jobs.store.file import StoreError
from quota.jobs.store.fulltext import indexed
from quota.settings.model import PLACES_OF_THE_STORE, TableSettings


def upsert(db: sqlite3.Connection, table: str, row: Mapping[str, object], keys: int = 1) -> None:
    """Insert a row, or refresh the row with the same key. The first columns are the key."""
    columns = list(row)
    fresh = ", ".join(f"{column} = excluded.{column}" for column in columns[keys:] if column != "first_seen_ms")
    db.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{column}' for column in row)})"  # noqa: S608 - ours
        f" ON CONFLICT ({', '.join(columns[:keys])}) DO UPDATE SET {fresh}",
        row,
    )


def save_video(
    db: sqlite3.Connection, video: Mapping[str, Any], now_ms: int, *, again: bool
) -> dict[str, object] | None:
    """Store a video of a page. Returns its row; None if the video tells nothing new.

    A video that is read `again` does not count as listed, and stays away if it has expired meanwhile. If the page has
    only the id of a stored video, its details stay.
    """
    times = "asked_ms = :now_ms" if again else "asked_ms = :now_ms, listed_ms = :now_ms"
    values = {"video_id": as_text(video["id"]), "now_ms": now_ms}
    stored = db.execute(f"UPDATE videos SET {times} WHERE video_id = :video_id", values).rowcount  # noqa: S608 - ours
    if (again and not stored) or (stored and len(video) == 1):
        return None
    row = video_row(video, now_ms)
    upsert(db, "videos", row if again else {**row, "listed_ms": now_ms, "asked_ms": now_ms})
    return row


def video_row(video: Mapping[str, Any], now_ms: int) -> dict[str, object]:
    row: dict[str, object] = {"video_id": as_text(video["id"]), **_values(video, VIDEO_FIELDS)}
    for column, of_index in _WORDS_OF.items():
        text = row[column]
        words = indexed(text) if isinstance(text, str) else None
        row[of_index] = None if words == text else words
    return {**row, "first_seen_ms": now_ms, "refreshed_ms": now_ms}


_WORDS_OF = {
    "title": "title_words",
    "description": "description_words",
    "channel_title": "channel_words",
    "tags": "tags_words",
}
"""The columns that the index reads, each with the column of its words: null if they equal the text itself."""


def channel_row(channel: Mapping[str, Any], now_ms: int) -> dict[str, object]:
    hidden = {"subscriber_count": None} if part(channel, "statistics").get("hiddenSubscriberCount") is True else {}
    playlists = part(part(channel, "contentDetails"), "relatedPlaylists")
    return {
        "channel_id": as_text(channel["id"]),
        **_values(channel, CHANNEL_FIELDS),
        **hidden,
        "uploads_id": text_or_none(playlists.get("uploads")),
        "first_seen_ms": now_ms,
        "refreshed_ms": now_ms,
    }


def _values(resource: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    return {column: field.read(part(resource, field.part).get(field.name)) for column, field in fields.items()}


def part(resource: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = resource.get(name)
    return value if isinstance(value, dict) else {}


def as_text(text: str) -> str:
    """The text, with U+FFFD for half a surrogate pair, which no encoding allows."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_or_none(value: object) -> str | None:
    return as_text(value) if isinstance(value, str) else None


def count_or_none(value: object) -> int | None:
    """Upstream sends counts as decimal text. Anything else, or a number too long for the column, is None."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        number = int(value)
    else:
        return None
    return number if 0 <= number < 2**63 else None


_SIZES = ("maxres", "standard", "high", "medium", "default")
_THUMBNAILS = {"maxresdefault": "maxres", "sddefault": "standard", "hqdefault": "high", "mqdefault": "medium"}


class Field(NamedTuple):
    """Upstream's field for a column: its part of the resource, its name, and the kind of its value. A "flag" is true
    or false, a "flag_text" the word for it."""

    part: str
    name: str
    kind: Literal["text", "count", "tags", "thumbnail", "flag_text", "flag"] = "text"

    def read(self, value: Any) -> str | int | None:
        """Upstream's value for the column; None for an invalid one."""
        match self.kind:
            case "count":
                return count_or_none(value)
            case "flag_text" | "flag":
                flags = {True: 1, False: 0, "true": 1, "false": 0}
                return flags.get(value) if isinstance(value, (bool, str)) else None
            case "tags" if isinstance(value, list):
                # Without \u escapes: the index reads this text too.
                return as_text(json.dumps([str(tag) for tag in value], ensure_ascii=False))
            case "thumbnail" if isinstance(value, dict):  # the largest that upstream has
                urls = (part(value, size).get("url") for size in _SIZES)
                return next((as_text(url) for url in urls if isinstance(url, str)), None)
            case "text":
                return text_or_none(value)
        return None

    def show(self, value: Any) -> Any:
        """The column's value as upstream sends it; None for a value that no store writes."""
        match self.kind:
            case "count":
                number = count_or_none(value)
                return None if number is None else str(number)
            case "flag_text" if isinstance(value, int):
                return {0: "false", 1: "true"}.get(value)
            case "flag" if value in (0, 1):
                return bool(value)
            case "tags" if isinstance(value, str):
                try:
                    tags = json.loads(value)
                except (ValueError, RecursionError):
                    return None
                return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else None
            case "thumbnail" if isinstance(value, str):  # its file name tells its size
                name = value.rpartition("/")[2].partition(".")[0]
                return {_THUMBNAILS.get(name, "default"): {"url": value}}
            case "text":
                return text_or_none(value)
        return None


VIDEO_FIELDS = {
    "published_at": Field("snippet", "publishedAt"),
    "channel_id": Field("snippet", "channelId"),
    "title": Field("snippet", "title"),
    "description": Field("snippet", "description"),
    "thumbnail_url": Field("snippet", "thumbnails", "thumbnail"),
    "channel_title": Field("snippet", "channelTitle"),
    "live_broadcast": Field("snippet", "liveBroadcastContent"),
    "tags": Field("snippet", "tags", "tags"),
    "category_id": Field("snippet", "categoryId"),
    "default_language": Field("snippet", "defaultLanguage"),
    "audio_language": Field("snippet", "defaultAudioLanguage"),
    "duration": Field("contentDetails", "duration"),
    "definition": Field("contentDetails", "definition"),
    "has_caption": Field("contentDetails", "caption", "flag_text"),
    "is_licensed": Field("contentDetails", "licensedContent", "flag"),
    "view_count": Field("statistics", "viewCount", "count"),
    "like_count": Field("statistics", "likeCount", "count"),
    "comment_count": Field("statistics", "commentCount", "count"),
}
"""The columns of a video, in the order of upstream's resource."""

CHANNEL_FIELDS = {
    "title": Field("snippet", "title"),
    "description": Field("snippet", "description"),
    "custom_url": Field("snippet", "customUrl"),
    "published_at": Field("snippet", "publishedAt"),
    "thumbnail_url": Field("snippet", "thumbnails", "thumbnail"),
    "country": Field("snippet", "country"),
    "view_count": Field("statistics", "viewCount", "count"),
    "subscriber_count": Field("statistics", "subscriberCount", "count"),
    "video_count": Field("statistics", "videoCount", "count"),
}


# -- rows of a job's own tables ----------------------------------------------------------------------------------------

MAX_ROW_BYTES = 1_000_000
"""The largest row, as JSON."""

MAX_KEY_CHARACTERS = 1_000
MAX_COLUMNS = 200
"""The most columns of a view. The most frequent fields come first."""

OURS = ("key", "job", "region", "first_seen_ms", "refreshed_ms", "first_seen_at", "refreshed_at")
"""Names that are reserved for our columns in views and exports."""

VIDEO_HISTORY = ("view_count", "like_count", "comment_count", "title")
"""The fields in the history of a video. A new reading has a change in one of them."""


class TableOfRows(NamedTuple):
    """A job's own table: the number of rows, when the oldest and the newest row were refreshed, and the fields of
    rows."""

    name: str
    rows: int
    oldest_ms: int
    newest_ms: int
    fields: tuple[str, ...]


class Row(NamedTuple):
    """One row: its table, its key as text, the object as JSON, and the names of the fields that are its key. `reading`
    goes into the history; "" for none."""

    table: str
    key: str
    data: str
    key_fields: str
    reading: str


def rows_of(fetch: str, tables: Mapping[str, TableSettings], rows: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The rows of a page. Raises BadAnswer, which names function, table and row, if the store cannot take a row."""
    checked: list[Row] = []
    for table, objects in rows.items():
        settings = tables.get(table, TableSettings())
        keys: set[str] = set()
        for number, item in enumerate(objects, 1):
            try:
                row = _row(table, item, settings.key, settings.history)
                if row.key in keys:
                    raise ValueError(f"its key {show(row.key)} stands twice in this page")
            except (TypeError, ValueError) as error:
                raise BadAnswer(f"fetch = {fetch!r}: table {table!r}, row {number}: {error}") from None
            keys.add(row.key)
            checked.append(row)
    return checked


def _row(table: str, row: Any, by: tuple[str, ...], history: Sequence[str]) -> Row:
    if not isinstance(row, dict) or not all(isinstance(field, str) for field in row):
        raise TypeError(f"it is no object with text names, but {show(row)}")
    if is_deep(row):
        raise ValueError(f"it is nested over {MAX_DEPTH} deep")
    data = as_text(json.dumps(row, ensure_ascii=False, allow_nan=False))
    json.loads(data, parse_int=_checked_number)
    if len(data.encode()) > MAX_ROW_BYTES:
        raise ValueError(f"it has {len(data.encode()):,} bytes, over {MAX_ROW_BYTES:,}")
    key = _key_of(row, by)
    if len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(f"its key has {len(key):,} characters, over {MAX_KEY_CHARACTERS:,}")
    reading = json.dumps({field: row.get(field) for field in history}, ensure_ascii=False) if history else ""
    return Row(table, key, data, ", ".join(by), as_text(reading))


def _key_of(row: Mapping[str, Any], by: Sequence[str]) -> str:
    parts = []
    for field in by:
        if field not in row:
            raise ValueError(f"it has no {field!r}, which is its key")
        value = row[field]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise ValueError(f"its key {field!r} is {show(value)}, and must be text (not empty) or a whole number")
        parts.append(as_text(str(value)))
    return parts[0] if len(parts) == 1 else json.dumps(parts, ensure_ascii=False)


def _checked_number(digits: str) -> None:
    """Raises ValueError for a whole number of more than 64 bits: SQLite would read another number."""
    if not -(2**63) <= int(digits) < 2**63:
        raise ValueError("it holds a whole number of more than 64 bits; send it as text")


def save_rows(db: sqlite3.Connection, job: str, region: str, now_ms: int, rows: Sequence[Row]) -> None:
    """Raises StoreError if a table has rows by another key: each row would stand there twice."""
    check_keys(db, {(row.table, row.key_fields) for row in rows})
    of_page = {"job": job, "region": region, "first_seen_ms": now_ms, "refreshed_ms": now_ms}
    for row in rows:
        stored = {"name": row.table, "key": row.key, "key_fields": row.key_fields, "data": row.data, **of_page}
        upsert(db, "rows", stored, keys=2)
        if row.reading:
            keep_reading(db, row.table, row.key, row.reading, now_ms)


def check_keys(db: sqlite3.Connection, tables: Iterable[tuple[str, str]], job: str | None = None) -> None:
    """The same for these tables, each with the fields of its key. With a `job`, only for tables whose rows it has
    fetched."""
    for table, key_fields in tables:
        stored = db.execute("SELECT key_fields FROM rows WHERE name = ? LIMIT 1", (table,)).fetchone()
        if stored is None or stored[0] == key_fields:
            continue
        fetched_by = [name for (name,) in db.execute("SELECT DISTINCT job FROM rows WHERE name = ?", (table,))]
        if job is None or job in fetched_by:
            why = f"table {show(table)} has rows of {listed(fetched_by)} by {stored[0]}, not by {key_fields}"
            raise StoreError(f"{why}; set the `key` that it had, or give the table another name")


def keep_reading(db: sqlite3.Connection, table: str, key: str, reading: str, now_ms: int) -> None:
    """Keep a reading if it differs from the last one; else note that the last one still holds."""
    last = db.execute(
        "SELECT data, taken_at_ms FROM history WHERE name = ? AND key = ? AND taken_at_ms <= ?"
        " ORDER BY taken_at_ms DESC LIMIT 1",
        (table, key, now_ms),  # a clock that was ahead may have left later ones
    ).fetchone()
    taken_at_ms = last[1] if last is not None and last[0] == reading else now_ms
    db.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?, ?)", (table, key, taken_at_ms, reading, now_ms))


def fields_of(db: sqlite3.Connection, table: str, most: int) -> list[str]:
    """The names of the fields in a table's rows, the most frequent first. SQLite would keep the fields of all rows to
    count them, and all rows to sort them (the `+` keeps it from an index with another order)."""
    sql = "SELECT j.key FROM rows, json_each(rows.data) j WHERE +rows.name = ? ORDER BY rows.id"
    counted = Counter(str(name) for (name,) in db.execute(sql, (table,)))
    return [name for name, _ in counted.most_common(None if most < 0 else most)]


def tables_of(db: sqlite3.Connection) -> list[tuple[str, int, int, int]]:
    """Each table that jobs have named: its name, the number of rows, and when the oldest and the newest row were
    refreshed."""
    sql = "SELECT name, count(*), min(refreshed_ms), max(refreshed_ms) FROM rows GROUP BY name ORDER BY name"
    return [table for table in db.execute(sql) if table[0] not in PLACES_OF_THE_STORE]


def columns_of(db: sqlite3.Connection, table: str, most: int) -> dict[str, str]:
    """The column name of each field of a table, in a view or an export that also has our columns."""
    return distinct(fields_of(db, table, most), OURS)


def distinct(names: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """A unique name for each of `names`: a taken name gets `_` at its end. SQLite's names ignore case."""
    lowered, called = set(taken), {}
    for name in names:
        called[name] = name
        while called[name].lower() in lowered:
            called[name] += "_"
        lowered.add(called[name].lower())
    return called


def write_views(db: sqlite3.Connection) -> None:
    """Remake the view of each table, with a column for each of its fields. Of two names that SQLite takes for one, that
    of the older table stays."""
    by_age = [name for (name,) in db.execute("SELECT name FROM rows GROUP BY name ORDER BY min(id)")]
    for table, view in distinct([name for name in by_age if name not in PLACES_OF_THE_STORE], ()).items():
        columns = ["key", "job", "region"]
        for field, column in columns_of(db, table, MAX_COLUMNS).items():
            value = f"json_extract(data, {_literal(f'$.{quoted(field)}')})"
            if not re.fullmatch(r'[^"\\\x00-\x1f]+', field):  # the paths of SQLite's JSON functions cannot express it
                value = f"(SELECT value FROM json_each(data) WHERE json_each.key = {_literal(field)})"  # noqa: S608 - quoted
            columns.append(f"{value} AS {quoted(column)}")
        columns += ["first_seen_ms", "refreshed_ms"]
        db.execute(f"DROP VIEW IF EXISTS {quoted(view)}")
        of_table = f"FROM rows WHERE name = {_literal(table)}"
        db.execute(f"CREATE VIEW {quoted(view)} AS SELECT {', '.join(columns)} {of_table}")


def quoted(name: str) -> str:
    """A name of a table or column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
