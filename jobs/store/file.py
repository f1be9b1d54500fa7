"""The file of a store: where it is, how it is known, and what its errors say.

StoreError      one line: what is wrong with the file and what to do
path_of         where the file is
is_made         whether it is there
store_file      the file itself
wording         what its errors say
is_time         whether a value that was read is a time
"""

from __future__ import annotations

import os

import quota
from quota.common.sqlite_file import DEADLINE_S, SqliteFile, Wording
from quota.ledger.files import file_wording

SCHEMA_VERSION = 10
APPLICATION_ID = 0x766964A1
"""Marks the file as ours: a version number alone would let any other program's database pass."""

PAGE_BYTES = 4096
"""SQLite's own: a video is as long as many charges."""

MAX_COUNT = 2**53
"""A file that has more in a column was damaged."""

NO_SPACE = "no space is left for it: free some, then run again"


class StoreError(quota.QuotaError):
    """The local store cannot be used. The message names the file and the remedy."""


def wording(path: str, waited_s: float = DEADLINE_S) -> Wording:
    """What the errors of a store say."""
    then, remedy = "the next runs fetch the data again", "move it away, or give [store] url another file"
    words = file_wording(path, "store", version=SCHEMA_VERSION, lost_then=then, remedy=remedy, waited_s=waited_s)
    return words._replace(disk_full=f"store {path}: {NO_SPACE}; nothing half-written was kept")


def store_file(path: str, waited_s: float, *, read_only: bool = False) -> SqliteFile:
    """The file of a store, which waits so long for other programs. Others than this user may read it."""
    return SqliteFile(
        path,
        schema=("quota.jobs.store", "schema.sql"),
        application_id=APPLICATION_ID,
        version=SCHEMA_VERSION,
        error=StoreError,
        wording=wording(path, waited_s),
        private=False,
        lenient=True,
        read_only=read_only,
        deadline_s=waited_s,
        page_bytes=PAGE_BYTES,
    )


def path_of(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    if scheme != "sqlite" or not rest.removeprefix("/"):
        raise quota.ConfigError(f"[store] url {url!r}: the store is a file; write sqlite:///PATH")
    return rest.removeprefix("/")


def is_made(url: str) -> bool:
    """Whether there is a store. To open an empty file would make it one. Raises OSError."""
    path = path_of(url)
    return os.path.exists(path) and os.path.getsize(path) > 0


def is_time(value: object) -> bool:
    """Whether it is a time in ms, up to the year 9999."""
    return isinstance(value, int) and 0 <= value < 253_402_300_800_000
