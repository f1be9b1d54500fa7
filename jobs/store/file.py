"""The file of a store: its path, its marks, and its errors.

StoreError      one line: what is wrong with the file and what to do
path_of         the path of the file
lack_of_space   the StoreError of a full disk
store_file      opens the file
is_time         whether a value from the file is a time
note_time       the time by which a run may delete old data; `believed_ms` notes nothing
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Sequence
from typing import Any

import quota
from quota.common.files import lack_of_room, remedy_for
from quota.common.sqlite_file import DEADLINE_S, SqliteFile
from quota.terms.limits import DAY_MS

SCHEMA_VERSION = 13
APPLICATION_ID = 0x766964A1
"""Marks the file as ours: a version number alone would let any other program's database pass."""

PAGE_BYTES = 4096
"""SQLite's default: a video is as long as many charges."""

MAX_COUNT = 2**53
"""A file with a larger count is damaged."""

MIN_FREE_BYTES = 4_000_000
"""More than a full page needs, in the write-ahead log and in the file."""

NO_SPACE = f"no space is left for it; free {MIN_FREE_BYTES // 1_000_000} MB more (df, df -i), then run again"


class StoreError(quota.QuotaError):
    """The local store cannot be used. The message names the file and the remedy."""


def store_file(path: str, waited_s: float = DEADLINE_S, *, read_only: bool = False) -> SqliteFile:
    """The file of a store. It waits `waited_s` for other programs. Other users may read it."""
    return SqliteFile(
        path,
        schema=("quota.jobs.store", "schema.sql"),
        application_id=APPLICATION_ID,
        version=SCHEMA_VERSION,
        error=StoreError,
        what="store",
        remedy="move it away, or give [store] url another file",
        lost_then="the next runs fetch the data again",
        when_full=f"{NO_SPACE}; nothing half-written was kept",
        private=False,
        lenient=True,
        read_only=read_only,
        deadline_s=waited_s,
        page_bytes=PAGE_BYTES,
    )


def path_of(url: str) -> str:
    """The path of a URL, or a plain path. The configuration allows only URLs of SQLite files."""
    return url.removeprefix("sqlite:///")


def lack_of_space(path: str) -> StoreError | None:
    """The error of a disk that cannot hold another page: the page would cost units and be lost. None if it can."""
    code = lack_of_room(path, MIN_FREE_BYTES)
    why = NO_SPACE if code == errno.ENOSPC else f"{os.strerror(code)}; {remedy_for(code, '')}"
    return StoreError(f"store {path}: {why}") if code else None


def is_time(value: object) -> bool:
    """Whether a value is a time in ms, up to the year 9999."""
    return isinstance(value, int) and 0 <= value < 253_402_300_800_000


MAX_AHEAD_MS = 2 * DAY_MS
"""The longest time between two runs that the store believes at once. It believes a longer one after DOUBTED_MS."""

DOUBTED_MS = DAY_MS


def note_time(db: sqlite3.Connection, now_ms: int) -> int:
    """The time by which a run may delete old data: now, or the time of the last run if now is days after it. Either the
    machine was off, or its clock is wrong. When runs have had such a time for a day, the store believes it."""
    time_ms, doubted_ms = believed_ms(db, now_ms)
    db.execute("UPDATE store SET time_ms = ?, doubted_ms = ?", (time_ms, doubted_ms))
    return time_ms


def believed_ms(db: sqlite3.Connection, now_ms: int) -> tuple[int, int | None]:
    """That time, and since when the store has doubted later ones."""
    row: Sequence[Any] = db.execute("SELECT time_ms, doubted_ms FROM store").fetchone() or (None, None)
    time_ms, doubted_ms = (int(ms) if is_time(ms) else None for ms in row)
    since_ms = now_ms if doubted_ms is None else min(doubted_ms, now_ms)
    if time_ms is None or now_ms - time_ms <= MAX_AHEAD_MS or now_ms - since_ms >= DOUBTED_MS:
        return now_ms, None
    return time_ms, since_ms
