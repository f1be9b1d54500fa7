"""The local store: fetched data, a checkpoint for each region, and the search. `schema.sql` has its tables.

    Elsewhere       a job that another machine runs
    Store           the store

One transaction writes a page's items and the checkpoint after it. A process killed at any moment leaves neither a page
without its checkpoint nor a checkpoint without its page.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from quota.common.clock import elapsed_s, host_clock
from quota.common.text import members
from quota.jobs.job import Away, Cursor, Page
from quota.jobs.store.checkpoints import (
    FIRST_PAGE,
    OF_REGION,
    Checkpoint,
    add_checkpoint,
    assigned,
    by_rotation,
    change_checkpoint,
    digest_of,
    in_round,
    is_empty,
    key_of,
    read_checkpoint,
)
from quota.jobs.store.file import StoreError, believed_ms, is_time, note_time, path_of, store_file
from quota.jobs.store.fulltext import query
from quota.jobs.store.reader import SearchResult, id_of, search
from quota.jobs.store.rows import (
    VIDEO_HISTORY,
    Row,
    TableOfRows,
    as_text,
    channel_row,
    check_keys,
    count_or_none,
    fields_of,
    keep_reading,
    part,
    save_rows,
    save_video,
    tables_of,
    text_or_none,
    upsert,
    write_views,
)
from quota.jobs.store.runs import RunHistory, Units, entries, note_page, note_units
from quota.ledger.files import refuse_others
from quota.settings.model import JobSettings, StoreSettings

T = TypeVar("T")

BUSY_TIMEOUT_MS = 5_000
PAGE_BUSY_TIMEOUT_S = 30.0
"""A page waits longer while another program locks the store, because it has cost units."""

DELETE_PER_TRANSACTION = 1_000
DELETE_WITHIN_S = 20.0
"""How long one `delete_expired` deletes: many times longer than it takes for what a run stores."""


class Elsewhere(NamedTuple):
    """A job that ran on another machine, `runs_on`, when this machine last asked, at `asked_ms`. The ledger had last
    heard of that machine at `heard_ms`. If it stays silent, another machine takes over at `until_ms`. `fetched_ms` is
    when this store last got data of the job; None if it has none."""

    job: str
    runs_on: str
    heard_ms: int
    until_ms: int
    asked_ms: int
    fetched_ms: int | None


class Store(AbstractContextManager["Store"]):
    """One SQLite file at a `sqlite:///path` URL, or a path ("": in memory). Use it from one thread; close it when done.

    `delete_expired` deletes data that no run refreshed for `retention_ms`. With `create` False, a missing file is an
    error. Tests replace the host's `clock` (ms since 1970). Every method raises StoreError if it cannot read or write
    the file.
    """

    def __init__(
        self,
        url: str,
        *,
        retention_ms: int,
        create: bool = True,
        clock: Callable[[], int] | None = None,
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
    ) -> None:
        self.path = path_of(url)
        self.retention_ms = retention_ms
        self._clock = clock or host_clock
        if not create and not os.path.exists(self.path):
            raise StoreError(f"there is no store at {self.path} yet: `quota run JOB` creates it")
        refuse_others(self.path, "store")
        self._file = store_file(self.path, busy_timeout_ms / 1_000)
        self._reading = store_file(self.path, busy_timeout_ms / 1_000, read_only=True) if self.path else self._file
        self._read(lambda db: None)  # opens the file: an unusable store is an error now

    @classmethod
    def existing(cls, settings: StoreSettings, clock: Callable[[], int] | None = None) -> Store:
        """The existing store of a configuration. Raises StoreError if there is none yet."""
        return cls(settings.url, retention_ms=settings.retention_ms, create=False, clock=clock)

    @classmethod
    def if_made(cls, settings: StoreSettings, clock: Callable[[], int] | None = None) -> Store:
        """The same; an empty store in memory, whose `path` is "", if there is none yet. Raises OSError."""
        is_made = os.path.exists(settings.file) and os.path.getsize(settings.file) > 0  # an empty file is no store
        return cls.existing(settings, clock) if is_made else cls("", retention_ms=settings.retention_ms, clock=clock)

    def close(self) -> None:
        self._reading.close()
        self._file.close()  # the last connection moves the -wal into the file

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do all of `work` in one transaction, or nothing."""
        return self._file.transact(work, write=True)

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return self._file.transact(work, write=False)

    # -- the owner of regions ----------------------------------------------------------------------------------------

    def id(self, before: str) -> str:
        """The store's id, kept in its file. A store with which no job ever ran takes the id of the store that was in
        this place `before`, unless that is empty."""
        if before and self._read(lambda db: db.execute("SELECT 1 FROM runs").fetchone()) is None:
            self._write(lambda db: db.execute("UPDATE store SET id = ?", (before,)))
        return self._read(id_of)

    def start_run(self, job: str, work: str) -> int | None:
        """Note that the job runs, here or elsewhere. Returns the time between its runs in ms, 0 if unknown; None if it
        never ran.

        This is the longer of the last two times between runs: a run by hand makes one of them short.
        """
        now_ms = self._clock()

        def write(db: sqlite3.Connection) -> int | None:
            sql = "SELECT started_ms, gap_ms FROM runs WHERE job = ? AND work = ?"
            row = db.execute(sql, (job, work)).fetchone()
            started_ms, before_ms = (int(ms) if is_time(ms) else 0 for ms in row or (now_ms, 0))
            gap_ms = max(0, now_ms - started_ms) if started_ms else 0  # 0 if the clock went back
            db.execute(
                "INSERT INTO runs (job, work, first_ms, started_ms) VALUES (:job, :work, :now_ms, :now_ms)"
                " ON CONFLICT (job, work)"
                " DO UPDATE SET started_ms = :now_ms, gap_ms = :gap_ms",
                {"job": job, "work": work, "now_ms": now_ms, "gap_ms": gap_ms},
            )
            return None if row is None else max(gap_ms, before_ms)

        return self._write(write)

    def due_since(self, checkpoint: Checkpoint) -> int | None:
        """When the region's last complete pass ended; if there is none, when the job first ran. None if the job never
        ran, or only on another machine."""
        sql = "SELECT first_ms, runs_on FROM runs WHERE job = ? AND work = ?"
        row = self._read(lambda db: db.execute(sql, (checkpoint.job, checkpoint.work)).fetchone())
        if checkpoint.completed_at_ms is not None or row is None or (row[1] and is_empty(checkpoint)):
            return checkpoint.completed_at_ms
        return int(row[0]) if is_time(row[0]) else None

    def note_elsewhere(self, job: str, work: str, away: Away | None) -> None:
        """Note the machine that runs the job instead; None: this machine."""
        where = (None, 0, 0) if away is None else (away.runs_on, away.heard_ms, away.until_ms)
        sql = "UPDATE runs SET runs_on = ?, heard_ms = ?, until_ms = ? WHERE job = ? AND work = ?"
        self._write(lambda db: db.execute(sql, (*where, job, work)))

    def elsewhere(self) -> list[Elsewhere]:
        """The jobs that ran on other machines when this machine last asked, by name."""
        sql = (
            "SELECT job, runs_on, heard_ms, until_ms, started_ms,"
            " (SELECT max(max(ifnull(started_at_ms, 0), ifnull(completed_at_ms, 0))) FROM checkpoints c"
            " WHERE c.job = runs.job AND c.work = runs.work) FROM runs WHERE runs_on IS NOT NULL ORDER BY job, work"
        )
        rows = self._read(lambda db: db.execute(sql).fetchall())
        return [
            Elsewhere(str(job), str(runs_on), heard_ms, until_ms, asked_ms, fetched_ms or None)
            for job, runs_on, heard_ms, until_ms, asked_ms, fetched_ms in rows
            if all(map(is_time, (heard_ms, until_ms, asked_ms, fetched_ms or 0)))
        ]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def start_round(self, job: str, regions: Sequence[str], work: str = "") -> list[Checkpoint]:
        """The regions that a run covers, in order: the pending regions, or all of them in a new round.

        `by_rotation` decides the order. `work` as in a Checkpoint.
        """

        def work_on(db: sqlite3.Connection) -> list[Checkpoint]:
            checkpoints = [read_checkpoint(db, job, region, work) for region in regions]
            # A damaged row reads as an empty checkpoint. Delete it, or the next page would add to its numbers.
            db.executemany(_DELETE, [key_of(checkpoint) for checkpoint in checkpoints if is_empty(checkpoint)])
            before = by_rotation(checkpoints)
            covered = list(map(in_round, before))
            if covered != before:
                for checkpoint in covered:
                    add_checkpoint(db, checkpoint)
                    fields = {name: getattr(checkpoint, name) for name in ("pending", *FIRST_PAGE)}
                    change_checkpoint(db, checkpoint, **fields)
            return covered

        return self._write(work_on)

    def checkpoint(self, job: str, region: str, work: str = "") -> Checkpoint:
        """Where the job stands in the region. A new region, or a damaged row, has an empty checkpoint."""
        return self._read(lambda db: read_checkpoint(db, job, region, work))

    def checkpoints(self, job: str, regions: Sequence[str], work: str) -> list[Checkpoint]:
        """Where the job stands in each of these regions, in their order."""
        return self._read(lambda db: [read_checkpoint(db, job, region, work) for region in regions])

    def stand(self, places: Sequence[tuple[Checkpoint, Sequence[bytes]]]) -> None:
        """Replace the store's checkpoints by these, each with digests of the cursors of its pass. If another machine
        went on with a pass, its rankings here are deleted: they would have a hole."""

        def work(db: sqlite3.Connection) -> None:
            for checkpoint, cursors in places:
                started_at_ms = checkpoint.started_at_ms
                own = read_checkpoint(db, checkpoint.job, checkpoint.region, checkpoint.work)
                of_pass = checkpoint.job, checkpoint.region, started_at_ms
                last_rank = db.execute(_LAST_RANK, of_pass).fetchone()[0] or 0
                if checkpoint.ranks > max(last_rank, own.ranks if own.started_at_ms == started_at_ms else 0):
                    db.execute(_UNRANK, of_pass)
                db.execute(_DELETE, key_of(checkpoint))
                add_checkpoint(db, checkpoint)
                for digest in cursors:
                    db.execute(_NOTE_CURSOR, {**key_of(checkpoint), "digest": digest})

        self._write(work)

    def _changed(
        self, checkpoint: Checkpoint, work: Callable[[sqlite3.Connection], object], within_s: float | None = None
    ) -> Checkpoint:
        """Where the region stands after `work`."""
        self._file.transact(work, write=True, within_s=within_s)
        return self.checkpoint(checkpoint.job, checkpoint.region, checkpoint.work)

    def check_writable(self) -> None:
        """Raise StoreError if no run could write now."""
        self._write(lambda db: None)

    def save_page(
        self,
        checkpoint: Checkpoint,
        page: Page,
        rows: Sequence[Row] = (),
        units: Units = (),
        *,
        started_at_ms: int,
        finished: bool,
    ) -> Checkpoint:
        """Store one page and the checkpoint after it, both or neither. Returns the new checkpoint.

        `rows` are the page's rows, checked by `quota.jobs.store.rows.rows_of`; `units` are those of its attempts.
        `started_at_ms` dates the pass if this is its first page. `finished` ends the pass. Raises StoreError if the
        store no longer has this checkpoint: somebody deleted the file, put another in its place, or changed it.
        """
        now_ms = self._clock()

        def work(db: sqlite3.Connection) -> None:
            stored = read_checkpoint(db, checkpoint.job, checkpoint.region, checkpoint.work)
            moved = any(getattr(stored, name) != getattr(checkpoint, name) for name in ("pending", *FIRST_PAGE))
            if is_empty(stored) or moved:
                raise StoreError(f"store {self.path}: it was replaced or changed while the job ran; run again")
            taken_at_ms = checkpoint.started_at_ms
            if taken_at_ms is None:
                taken_at_ms = _free_start(db, checkpoint, started_at_ms)
            save = partial(save_rows, db, checkpoint.job, checkpoint.region, now_ms)
            save([row for row in rows if row.table in page.places])
            before = entries(db)
            for video in page.videos:
                row = save_video(db, video, now_ms, again=page.again)
                if row is not None:
                    reading = {name: row[name] for name in VIDEO_HISTORY}
                    keep_reading(db, "videos", str(row["video_id"]), json.dumps(reading, ensure_ascii=False), now_ms)
            for channel in page.channels:
                upsert(db, "channels", channel_row(channel, now_ms))
            save([row for row in rows if row.table not in page.places])
            new, number = entries(db) - before, checkpoint.pages + 1
            note_page(db, checkpoint.job, number, page, new, now_ms)
            note_units(db, checkpoint.job, units, now_ms)
            if page.ranked:
                of_pass = checkpoint.job, checkpoint.region, taken_at_ms
                ranked = [
                    (*of_pass, rank, as_text(video["id"]), count_or_none(part(video, "statistics").get("viewCount")))
                    for rank, video in enumerate(page.videos, checkpoint.ranks + 1)
                ]
                db.executemany("INSERT INTO rankings VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", ranked)
            change_checkpoint(
                db,
                checkpoint,
                pending=not finished,
                cursor=None if finished else page.cursor,
                pages=number if page.complete else checkpoint.pages,
                items=checkpoint.items + page.items,
                ranks=checkpoint.ranks + (len(page.videos) if page.ranked else 0),
                started_at_ms=taken_at_ms,
                # A clock may go back.
                completed_at_ms=max(now_ms, taken_at_ms) if finished else checkpoint.completed_at_ms,
            )
            if not finished:
                db.execute(_NOTE_CURSOR, {**key_of(checkpoint), "digest": digest_of(page.cursor)})

        return self._changed(checkpoint, work, PAGE_BUSY_TIMEOUT_S)

    def was_at(self, checkpoint: Checkpoint, cursor: Cursor | None) -> bool:
        """Whether an earlier step of the current pass, in this run or another, left this very cursor."""
        sql = f"SELECT 1 FROM cursors WHERE {OF_REGION} AND digest = :digest"  # noqa: S608  # a constant
        values = {**key_of(checkpoint), "digest": digest_of(cursor)}
        return self._read(lambda db: db.execute(sql, values).fetchone()) is not None

    def reset(self, checkpoint: Checkpoint, table: str = "", lists: Sequence[str] = ()) -> None:
        """Reset the region to its first page, in the current round or in the next one, and forget the places of these
        lists in a table."""

        def work(db: sqlite3.Connection) -> None:
            change_checkpoint(db, checkpoint, pending=True, **FIRST_PAGE)
            db.execute(_FORGET, (table, json.dumps(lists)))

        self._write(work)

    def finish(self, job: str, regions: Sequence[str], work: str, pages: int) -> list[Checkpoint]:
        """End the passes that have all of these pages: the job asked for more when they began. Returns where these
        regions stand."""
        complete = [place.completed() for place in self.checkpoints(job, regions, work) if place.is_complete(pages)]
        return [self.change(place, **members(place, "pending cursor completed_at_ms")) for place in complete]

    def fail(self, checkpoint: Checkpoint, *, keep_cursor: bool) -> Checkpoint:
        """End a pass with an error. The round counts the region as covered, so that it does not hold up the others.

        With `keep_cursor` the next round continues from the cursor, otherwise it begins with the first page.
        """
        afresh = {} if keep_cursor else FIRST_PAGE
        return self.change(checkpoint, pending=False, failed_at_ms=self._clock(), **afresh)

    def change(self, checkpoint: Checkpoint, **fields: Any) -> Checkpoint:
        """Give the region's checkpoint these fields."""
        return self._changed(checkpoint, lambda db: change_checkpoint(db, checkpoint, **fields))

    def restart(self, checkpoint: Checkpoint) -> Checkpoint:
        """Start a pass again from its first page, and delete the rankings that it has stored."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(_UNRANK, (checkpoint.job, checkpoint.region, checkpoint.started_at_ms))
            change_checkpoint(db, checkpoint, **FIRST_PAGE)

        return self._changed(checkpoint, work)

    # -- reading -----------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The time with which the store dates new data."""
        return self._clock()

    def select(self, sql: str, **values: object) -> list[Any]:
        """The rows of a query, for a fetch function. `docs/data.md` has the tables. Raises ValueError for an invalid
        query, also after MATCH, for a statement that writes, and for a number that SQLite cannot hold."""

        def work(db: sqlite3.Connection) -> list[Any]:
            db.set_authorizer(_allow)
            try:
                return db.execute(sql, values).fetchall()
            except (sqlite3.ProgrammingError, sqlite3.Warning, OverflowError) as error:
                raise ValueError(f"store.select: {error}") from error
            except sqlite3.DatabaseError as error:
                code = getattr(error, "sqlite_errorcode", None)
                if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH):
                    raise ValueError("store.select only reads; a Page has what the store is to keep") from error
                if code != sqlite3.SQLITE_ERROR:
                    raise
                raise ValueError(f"store.select: {error}") from error
            finally:
                db.set_authorizer(None)

        return self._reading.transact(work, write=False)

    @property
    def runs(self) -> RunHistory:
        """The runs of this machine, and what their pages brought."""
        return RunHistory(self._file, self._clock)

    def search(
        self, words: str, region: str | None = None, limit: int = 20, *, since_ms: int = 0, job: str | None = None
    ) -> list[SearchResult]:
        """Videos that have all these words in title, description, channel or tags, best match first.

        Case and accents do not matter. `word*` matches every word that begins with it; there is no other query syntax.
        Among equally good matches the most viewed comes first. If more than MAX_RANKED match, only the latest of them
        are ranked. `region` and `job` select videos with a rank there, and `since_ms` videos fetched, and ranked there,
        since then. Raises UsageError for no words or too many.
        """
        phrases = query(as_text(words))
        filters = {"query": phrases, "region": text_or_none(region), "job": text_or_none(job), "since_ms": since_ms}
        return self._read(lambda db: search(db, filters, limit, self._clock()))

    def tables(self) -> list[TableOfRows]:
        """The tables of rows that jobs have named, by name."""
        return self._read(
            lambda db: [TableOfRows(*table, tuple(fields_of(db, str(table[0]), -1))) for table in tables_of(db)]
        )

    def check_keys(self, job: JobSettings, *, declared: bool = False) -> None:
        """Raise StoreError if a table of the job has rows by another key: one that it declares or, unless `declared`,
        whose rows it has fetched."""
        keys = {name: ", ".join(table.key) for name, table in job.tables.items()}
        own = [(name, keys[name]) for name in sorted(job.own_tables)]
        others = [(name, key) for name, key in keys.items() if name not in job.own_tables]
        self._read(lambda db: check_keys(db, own))
        if others and not declared:
            self._read(lambda db: check_keys(db, others, job.name))

    def write_views(self) -> None:
        """Remake a view of each table of rows, with a column for each of its fields."""
        self._write(write_views)

    # -- retention ---------------------------------------------------------------------------------------------------

    def cutoff_ms(self) -> int:
        """The time before which `delete_expired` would delete data now."""
        now_ms = self._clock()
        return self._read(lambda db: believed_ms(db, now_ms)[0]) - self.retention_ms

    def delete_expired(self) -> int:
        """Delete data that no run refreshed within the retention, and videos that no list had. Returns the number of
        rows.

        It works in small transactions. After DELETE_WITHIN_S it does one of each table, and the next run goes on. A
        pass that began before the retention starts over: its first pages are gone. The store does not believe at once a
        time that is days after the last run (`note_time`): a wrong clock must not delete data that has cost units.
        """
        now_ms, end_s = self._clock(), elapsed_s() + DELETE_WITHIN_S
        cutoff_ms = self._write(lambda db: note_time(db, now_ms)) - self.retention_ms
        deleted = 0
        for table, (key, is_old) in _EXPIRING.items():
            sql = f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {is_old} LIMIT :most)"  # noqa: S608
            while True:
                count = self._write(partial(_delete_some, sql, cutoff_ms))
                deleted += count
                if count < DELETE_PER_TRANSACTION or elapsed_s() > end_s:
                    break
        expired = {**FIRST_PAGE, "cutoff_ms": cutoff_ms}
        self._write(lambda db: [db.execute(sql, expired) for sql in _EXPIRE])
        return deleted


_NO_QUERIES = frozenset(
    (
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_CREATE_TEMP_TABLE,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
    )
)
"""Actions of a read-only connection that no query may take: through ATTACH it could write to this file."""


def _allow(action: int, *_: object) -> int:
    """SQLite asks this of each part of a statement."""
    return sqlite3.SQLITE_DENY if action in _NO_QUERIES else sqlite3.SQLITE_OK


_UNRANK = "DELETE FROM rankings WHERE job = ? AND region = ? AND taken_at_ms = ?"

_FORGET = "DELETE FROM rows WHERE name = ? AND key IN (SELECT value FROM json_each(?))"

_LAST_RANK = "SELECT max(rank) FROM rankings WHERE job = ? AND region = ? AND taken_at_ms = ?"

_DELETE = f"DELETE FROM checkpoints WHERE {OF_REGION}"  # noqa: S608  # a constant

_NOTE_CURSOR = "INSERT OR IGNORE INTO cursors VALUES (:job, :work, :region, :digest)"


def _delete_some(sql: str, cutoff_ms: int, db: sqlite3.Connection) -> int:
    return db.execute(sql, {"cutoff_ms": cutoff_ms, "most": DELETE_PER_TRANSACTION}).rowcount


def _free_start(db: sqlite3.Connection, checkpoint: Checkpoint, started_at_ms: int) -> int:
    """The start of the pass, moved on while an earlier ranking has the same one: a clock may go back."""
    sql = "SELECT 1 FROM rankings WHERE job = ? AND region = ? AND taken_at_ms = ?"
    while db.execute(sql, (checkpoint.job, checkpoint.region, started_at_ms)).fetchone():
        started_at_ms += 1
    return started_at_ms


_EXPIRING = {
    "rankings": ("job, region, taken_at_ms, rank", "taken_at_ms < :cutoff_ms"),
    "videos": ("id", "refreshed_ms < :cutoff_ms OR listed_ms < :cutoff_ms"),
    "channels": ("channel_id", "refreshed_ms < :cutoff_ms"),
    "rows": ("id", "refreshed_ms < :cutoff_ms"),
    "history": ("name, key, taken_at_ms", "refreshed_ms < :cutoff_ms"),
}
"""The tables of fetched data: their key, and which rows are expired."""

_EXPIRE = (
    f"UPDATE checkpoints SET {assigned(FIRST_PAGE)} WHERE cursor IS NOT NULL AND started_at_ms < :cutoff_ms",  # noqa: S608
    "DELETE FROM checkpoints WHERE pending = 0 AND cursor IS NULL"
    " AND max(ifnull(completed_at_ms, 0), ifnull(failed_at_ms, 0)) < :cutoff_ms",
    "DELETE FROM runs WHERE started_ms < :cutoff_ms",
    "DELETE FROM charts WHERE taken_at_ms < :cutoff_ms",
    "DELETE FROM bought WHERE day_ms < :cutoff_ms",
    # Of work that no job does any longer.
    "DELETE FROM checkpoints"
    " WHERE max(ifnull(started_at_ms, 0), ifnull(completed_at_ms, 0), ifnull(failed_at_ms, 0)) < :cutoff_ms"
    " AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.job = checkpoints.job AND runs.work = checkpoints.work)",
)
