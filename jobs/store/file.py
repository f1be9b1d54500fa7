"""The file of a store: where it is, how it is known, and what its errors say.

StoreError      one line: what is wrong with the file and what to do
path_of         where the file is
is_made         whether it is there
wording         what its errors say
is_time         whether a value that was read is a time
"""

from __future__ import annotations

import os

import quota
from quota.common.sqlite_file import Wording

SCHEMA_VERSION = 9
APPLICATION_ID = 0x766964A1
"""Marks the file as ours: a version number alone would let any other program's database pass."""

MAX_COUNT = 2**53
"""A file that has more in a column was damaged."""

NO_SPACE = "no space is left for it: free some, then run again"


class StoreError(quota.QuotaError):
    """The local store cannot be used. The message names the file and the remedy."""


def wording(path: str) -> Wording:
    """What the errors of a store say."""
    store = f"store {path}"
    closed = f"{store}: it cannot be opened: check that its folder exists and may be written"
    return Wording(
        foreign=f"{store} belongs to another program: give [store] url a file of its own",
        newer=f"{store} has schema version {{version}}, written by a newer quota-ledger; this one reads up to "
        f"{SCHEMA_VERSION}: upgrade it",
        older=f"{store} has schema version {{version}}, written by an older quota-ledger; this one reads only "
        f"{SCHEMA_VERSION}: move the file away, and the next runs fetch the data again",
        locked=f"{store}: another program holds it locked: close that program, then run again",
        not_a_database=f"{store}: the file is not a database: move the file away, or give [store] url another one",
        read_only=f"{store}: it cannot be written: check the owner and mode of the file, its -wal and -shm, and their "
        "folder",
        cannot_open=closed,
        no_file=closed,
        disk_full=f"{store}: {NO_SPACE}; nothing half-written was kept",
        damaged=f"{store}: the file is damaged: move it away (the next runs fetch the data again) or restore a copy",
        disk_fails=f"{store}: reading or writing it failed: check the disk and its space; "
        "nothing half-written was kept",
        other=f"{store}: {{reason}}",
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
