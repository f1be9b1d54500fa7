"""Reads a store: its videos for `quota search` and for the API, and whole tables for `quota export`.

    search          finds the videos that have some words
    SearchResult    one result
    Reader          the store for the API: read-only, each answer from one snapshot of the file
    Chart           part of a region's newest complete ranking
    Hits            part of the results of a search
    records_of      the records of a table; `to_export` is a connection that lasts for a large one

A ranking is complete when its pass has ended; until then, the ranking before it is the newest. Its `version` names the
ranking, and the `version` of Hits the state of the store, so that a client never continues a page in another state.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from quota.common.clock import host_clock, rfc3339
from quota.common.sqlite_file import DamagedError
from quota.common.text import members, nearest, show
from quota.errors import UsageError
from quota.jobs.store.checkpoints import AHEAD_MS
from quota.jobs.store.file import MAX_COUNT, StoreError, is_time, path_of, store_file
from quota.jobs.store.fulltext import query
from quota.jobs.store.rows import (
    CHANNEL_FIELDS,
    VIDEO_FIELDS,
    as_text,
    columns_of,
    count_or_none,
    tables_of,
    text_or_none,
)

MAX_RANKED = 50_000
"""The most videos that a search ranks: to rank 645,000 took 1.6 s."""


class Ranking(NamedTuple):
    """The newest rank of a video in one region's ranking of one job."""

    job: str
    region: str
    rank: int
    taken_at_ms: int


class SearchResult(NamedTuple):
    """One search result and its rankings. Texts and counts are None if upstream left them out."""

    video_id: str
    title: str | None
    channel_title: str | None
    published_at: str | None
    view_count: int | None
    rankings: tuple[Ranking, ...]

    def as_json(self) -> dict[str, object]:
        rankings = [members(ranking, "job region rank taken_at") for ranking in self.rankings]
        return {**members(self, "video_id title channel_title published_at view_count"), "rankings": rankings}


def search(db: sqlite3.Connection, filters: Mapping[str, Any], limit: int, now_ms: int) -> list[SearchResult]:
    """Like `Store.search`: `filters` are the query, `region`, `job` and `since_ms`."""
    values = {**filters, "most": MAX_RANKED, "limit": limit, "skip": 0, "by_views": False}
    sql = _RANKED.format(columns="v.video_id, v.title, v.channel_title, v.published_at, v.view_count")
    return [
        SearchResult(
            str(video_id),
            text_or_none(title),
            text_or_none(channel),
            text_or_none(published),
            count_or_none(views),
            _rankings(db, {**filters, "video_id": video_id}, now_ms),
        )
        for video_id, title, channel, published, views in db.execute(sql, values).fetchall()
    ]


# The weights: a word in the title counts for more than a word in the description. With `by_views`, only views
# count. The query reads only the videos that it may show: with long descriptions, reading is slower than ranking.
_RANKED = """
WITH ranked AS (
    SELECT rowid AS id, iif(:by_views, 0, bm25(videos_text, 10, 1, 4, 4)) AS score FROM videos_text
    WHERE videos_text MATCH :query
        AND (:since_ms = 0 OR :since_ms <= (SELECT refreshed_ms FROM videos v WHERE v.id = videos_text.rowid))
        AND (:region IS NULL AND :job IS NULL OR EXISTS (
            SELECT 1 FROM rankings r WHERE ifnull(r.region = :region, 1) AND ifnull(r.job = :job, 1)
                AND r.taken_at_ms >= :since_ms
                AND r.video_id = (SELECT video_id FROM videos v WHERE v.id = videos_text.rowid)))
    ORDER BY videos_text.rowid DESC LIMIT :most
)
SELECT {columns} FROM ranked JOIN videos v ON v.id = ranked.id
WHERE score <= ifnull((SELECT score FROM ranked ORDER BY score LIMIT 1 OFFSET :skip + :limit - 1), 0)
ORDER BY score, v.view_count DESC, v.video_id LIMIT :limit OFFSET :skip
"""


def _rankings(db: sqlite3.Connection, filters: Mapping[str, Any], now_ms: int) -> tuple[Ranking, ...]:
    """The newest ranking of each job and region. A ranking that a wrong clock dated ahead counts only if it is
    alone."""
    rows = db.execute(
        # With max(), SQLite takes the other columns from the row that has the maximum.
        "SELECT job, region, rank, taken_at_ms, max(taken_at_ms - iif(taken_at_ms > :ahead_ms, :far_ms, 0)) FROM"
        " rankings WHERE video_id = :video_id AND ifnull(region = :region, 1) AND ifnull(job = :job, 1)"
        " GROUP BY job, region ORDER BY rank, region, job",
        {**filters, "ahead_ms": now_ms + AHEAD_MS, "far_ms": MAX_COUNT},
    ).fetchall()
    return tuple(Ranking(*row[:4]) for row in rows if count_or_none(row[2]) is not None and is_time(row[3]))


# -- the store for an API ----------------------------------------------------------------------------------------------

BUSY_TIMEOUT_S = 0.2
"""In WAL mode, writers never block a reader; only a program with an exclusive lock does."""

MAX_HITS = 500
"""The most videos that a search ranks by relevance. To rank 100,000 videos takes 100 ms, because the relevance of a
word depends on how many videos have it. A word that frequent says little, so then the views decide."""

MAX_RANK = 2**31
"""The highest valid rank. No upstream has as many rows; a damaged file may."""

StoredRow = Mapping[str, Any]
"""Columns of a video or a channel, by name. In a damaged file, a value may have any type."""


class Chart(NamedTuple):
    """Ranks of one ranking. `rows` have the rank and the video, with None for all that the store lacks.

    `completed_ms` is the end of the job's last pass. `more`: the ranking has further ranks.
    """

    version: str
    job: str
    region: str
    taken_ms: int
    completed_ms: int
    total: int
    rows: Sequence[tuple[int, StoredRow]]
    more: bool


class Hits(NamedTuple):
    """The videos that a search found, the best first. `total` counts at most MAX_HITS. `changed_ms` is when the store
    last got a video."""

    version: str
    changed_ms: int
    total: int
    rows: Sequence[StoredRow]


_VIDEO_COLUMNS = ("video_id", *VIDEO_FIELDS, "refreshed_ms")
_VIDEO = ", ".join(f"v.{name}" for name in _VIDEO_COLUMNS)
_CHANNEL_COLUMNS = ("channel_id", *CHANNEL_FIELDS, "refreshed_ms")

_CHARTS = """
    SELECT NOT EXISTS (SELECT 1 FROM checkpoints p WHERE p.job = c.job AND p.region = c.region
        AND p.completed_at_ms >= c.completed_at_ms AND p.work || '|' LIKE '%|trending|%'),
        job, taken_at_ms, completed_at_ms FROM charts c WHERE region = ? ORDER BY job
"""
"""The complete rankings of a region, each with 0 if a `trending` job made it, else 1."""

_MATCHES = "SELECT count(*) FROM (SELECT 1 FROM videos_text WHERE videos_text MATCH :query LIMIT :most + 1)"


class Reader:
    """A store at this URL, for one thread. The first method call opens the file.

    Every method raises StoreError if the file is missing, locked or unreadable.
    """

    def __init__(self, url: str) -> None:
        self._file = store_file(path_of(url), BUSY_TIMEOUT_S, read_only=True)

    def close(self) -> None:
        self._file.close()

    def chart(self, region: str, jobs: Sequence[str], after: int, count: int) -> Chart | None:
        """At most `count` ranks after the rank `after`; None if no ranking of the region is complete.

        If several jobs rank the region, the rankings of `trending` count before others, by the work that made them: the
        configuration may have changed since. Among these, the first of `jobs` counts, then any other job.
        """

        def work(db: sqlite3.Connection) -> Chart | None:
            charts = [chart for chart in db.execute(_CHARTS, (region,)) if all(map(is_time, chart[2:]))]
            charts.sort(key=lambda chart: (chart[0], jobs.index(chart[1]) if chart[1] in jobs else len(jobs)))
            for _, job, *times in charts:
                if chart := _chart(db, job, region, after, count, *times):
                    return chart
            return None

        return self._file.transact(work, write=False)

    def search(self, words: str, skip: int, count: int) -> Hits:
        """At most `count` of the videos that have all these words, after the first `skip`, in the order of
        `Store.search`. If more than MAX_HITS match: the latest of them, the most viewed first. Raises UsageError."""
        filters = {"query": query(as_text(words)), "region": None, "job": None, "since_ms": 0, "most": MAX_HITS}

        def work(db: sqlite3.Connection) -> Hits:
            newest_ms, state = _state(db)
            (matches,) = db.execute(_MATCHES, filters).fetchone()
            page = {"by_views": matches > MAX_HITS, "skip": skip, "limit": count}
            rows = db.execute(_RANKED.format(columns=_VIDEO), {**filters, **page}).fetchall()
            total = min(matches, MAX_HITS)
            if len(rows) != len(range(skip, total)[:count]):
                raise DamagedError("the index names videos that are not there")
            return Hits(state, newest_ms, total, list(map(_video, rows)))

        return self._file.transact(work, write=False)

    def video(self, video_id: str) -> StoredRow | None:
        """A video; None if the store has no such video."""
        sql = f"SELECT {_VIDEO} FROM videos v WHERE video_id = ?"  # noqa: S608  # constants
        row = self._file.transact(lambda db: db.execute(sql, (video_id,)).fetchone(), write=False)
        return _video(row) if row else None

    def channel(self, channel_id: str) -> StoredRow | None:
        """A channel as upstream sent it, or as its newest video names it, with just its id, title and `refreshed_ms`;
        None if the store has neither."""

        def work(db: sqlite3.Connection) -> StoredRow | None:
            sql = f"SELECT {', '.join(_CHANNEL_COLUMNS)} FROM channels WHERE channel_id = ?"  # noqa: S608  # constants
            if row := db.execute(sql, (channel_id,)).fetchone():
                return dict(zip(_CHANNEL_COLUMNS, row, strict=True))
            sql = (
                "SELECT channel_id, channel_title, refreshed_ms FROM videos WHERE channel_id = ?"
                " ORDER BY refreshed_ms DESC, id DESC LIMIT 1"
            )
            row = db.execute(sql, (channel_id,)).fetchone()
            return dict(zip(("channel_id", "title", "refreshed_ms"), row, strict=True)) if row else None

        return self._file.transact(work, write=False)

    def completed(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """When each region of each job was last complete; and when each job first ran, without jobs that run on another
        machine."""
        of_regions = "SELECT job, region, max(completed_at_ms) FROM checkpoints GROUP BY job, region"
        regions = self._file.transact(lambda db: db.execute(of_regions).fetchall(), write=False)
        first_runs = "SELECT job, min(first_ms) FROM runs WHERE runs_on IS NULL GROUP BY job"
        jobs = self._file.transact(lambda db: db.execute(first_runs).fetchall(), write=False)
        completed = {(str(job), str(region)): ms for job, region, ms in regions if is_time(ms)}
        return completed, {str(job): ms for job, ms in jobs if is_time(ms)}


def _chart(
    db: sqlite3.Connection, job: str, region: str, after: int, count: int, taken_ms: int, completed_ms: int
) -> Chart | None:
    """Part of a complete ranking; None if it has expired."""
    of_ranking = "job = :job AND region = :region AND taken_at_ms = :taken_ms"
    values = {"job": job, "region": region, "taken_ms": taken_ms, "after": after, "count": count + 1}
    (total,) = db.execute(f"SELECT count(*) FROM rankings WHERE {of_ranking}", values).fetchone()  # noqa: S608  # constants
    if not total:
        return None
    rows = db.execute(
        f"SELECT r.rank, r.video_id, {_VIDEO} FROM rankings r LEFT JOIN videos v ON v.video_id = r.video_id"  # noqa: S608  # constants
        f" WHERE {of_ranking} AND rank > :after AND rank <= {MAX_RANK} AND typeof(rank) = 'integer'"
        " ORDER BY rank LIMIT :count",
        values,
    ).fetchall()
    version = f"{id_of(db)} {taken_ms} {job}"
    listed = [(rank, {**_video(row), "video_id": video_id}) for rank, video_id, *row in rows[:count]]
    return Chart(version, job, region, taken_ms, completed_ms, total, listed, len(rows) > count)


def _video(row: Sequence[Any]) -> StoredRow:
    return dict(zip(_VIDEO_COLUMNS, row, strict=True))


def _state(db: sqlite3.Connection) -> tuple[int, str]:
    """When the store last got a video, and a name for the state of its videos."""
    newest_ms, mark, last, count = db.execute(
        "SELECT (SELECT max(refreshed_ms) FROM videos), (SELECT min(refreshed_ms) FROM videos),"
        " (SELECT max(id) FROM videos), (SELECT count(*) FROM videos)"
    ).fetchone()
    if not is_time(newest_ms):
        newest_ms = 0
    elif newest_ms > host_clock():
        # A clock was ahead, so a refresh may change neither end. To read all takes 10 ms for 100,000 videos.
        (mark,) = db.execute("SELECT sum(refreshed_ms % 4294967296) FROM videos").fetchone()
    return newest_ms, f"{id_of(db)} {newest_ms} {mark} {last} {count}"


def id_of(db: sqlite3.Connection) -> str:
    """The store's id; empty if a damaged file has none."""
    row = db.execute("SELECT id FROM store").fetchone()
    return str(row[0]) if row else ""


# -- exports: any table, row by row, so it may be of any size ----------------------------------------------------------

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
        "name, key, taken_at_ms, refreshed_ms, data",
        "taken_at_ms >= :since_ms ORDER BY name, key, taken_at_ms",
    ),
}
"""The store's own tables: their columns, the condition and the order of their rows."""

_OF_ROWS = (
    "key, job, region, first_seen_ms, refreshed_ms, data",
    "name = :table AND refreshed_ms >= :since_ms AND (:region IS NULL OR region = :region)"
    " AND (:job IS NULL OR job = :job) ORDER BY id",
)
"""The same for a table of rows that a job has named."""


@contextmanager
def to_export(path: str) -> Iterator[sqlite3.Connection]:
    """A read-only connection to one snapshot, which lasts for a large table. An error while it is read becomes a
    StoreError. `SqliteFile` does not fit: it would start again, and write the first records twice."""
    try:
        with closing(_snapshot(path, "?mode=ro")) as db:
            yield db
    except sqlite3.OperationalError as error:
        raise StoreError(store_file(path).says("other", error)) from error
    except (sqlite3.DatabaseError, ValueError, TypeError, AttributeError) as error:  # or a value that no store writes
        raise StoreError(store_file(path).says(sqlite3.SQLITE_CORRUPT)) from error


def _snapshot(path: str, mode: str) -> sqlite3.Connection:
    """A connection whose snapshot has begun. On a full disk it keeps all others out: see `SqliteFile`."""
    db = sqlite3.connect(f"file:{quote(os.fsencode(os.path.abspath(path)))}{mode}", uri=True)
    try:
        db.execute("PRAGMA locking_mode = NORMAL" if mode else "PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN")
        db.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.Error as error:
        db.close()
        if mode and error.sqlite_errorcode == sqlite3.SQLITE_IOERR_SHMSIZE:
            return _snapshot(path, "")
        raise
    return db


def records_of(
    db: sqlite3.Connection, table: str, since_ms: int, region: str | None, job: str | None, limit: int | None
) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """The columns of one table and its records, with times in RFC 3339. Raises UsageError for an unknown table."""
    own = table not in BUILT_IN
    if own and table not in (of_jobs := [name for name, *_ in tables_of(db)]):
        raise UsageError(f"no table {show(table)} can be exported; {nearest(table, [*BUILT_IN, *of_jobs])}")
    columns, where = BUILT_IN.get(table, _OF_ROWS)
    if region is not None and ":region" not in where:
        raise UsageError(f"table {table} has no regions; leave out --region")
    if job is not None and ":job" not in where:
        raise UsageError(f"table {table} has no jobs; leave out --job")
    names = columns.replace(" ", "").split(",")
    headings = [re.sub("(_at)?_ms$", "_at", name) for name in names]
    called = columns_of(db, table, -1) if own else {}
    sql = f"SELECT {columns} FROM {'rows' if own else table} WHERE {where} LIMIT :most"  # noqa: S608 - ours
    most = -1 if limit is None else limit
    values = {"table": table, "since_ms": since_ms, "region": region, "job": job, "most": most}

    def records() -> Iterator[dict[str, Any]]:
        for row in db.execute(sql, values):
            shown = [_value(name, value) for name, value in zip(names, row, strict=True)]
            record = dict(zip(headings, shown, strict=True))
            fields = record.pop("data") if own else {}
            yield {**{called.get(name, name): value for name, value in fields.items()}, **record}

    # The fields stand in the place of `data`.
    return ([*headings[:-1], *called.values()] if own else headings), records()


def _value(name: str, value: Any) -> Any:
    if name.endswith("_ms"):
        return rfc3339(value) if is_time(value) else None
    if name in ("data", "tags"):
        return None if value is None else json.loads(value)
    return value
