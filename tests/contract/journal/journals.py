"""What the tests of journals share: entries, journals, and processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from quota.journal.journal import FOLDER, Journal
from quota.ledger.factory import Identity
from quota.rules.entry import Entry, Id
from quota.terms.limits import DAY_MS

IDENTITY = Identity("ledger", "p")
NOW_MS = 1_795_867_200_000
"""A noon, in UTC."""

_numbers = count()


def entry(ms: int = NOW_MS, seq: int = 0, units: int = 1, key: str = "") -> Entry:
    key = key or f"{os.getpid()}-{next(_numbers)}"
    return Entry((ms, seq), units, "units", "videos.list", "job", "DE", key)


def journal(state: Path, now_ms: int = NOW_MS, keep_ms: int = DAY_MS, identity: Identity = IDENTITY) -> Journal:
    """A journal as another process would open it."""
    return Journal(state, identity, keep_ms=keep_ms, clock=lambda: now_ms)


def day_files(state: Path) -> list[Path]:
    return sorted((state / FOLDER).glob("*/*/[0-9]*-*"))


def ids(noted: Journal, epoch: str = "e") -> list[Id]:
    return [noted_entry.id for noted_epoch, noted_entry in noted.records() if noted_epoch == epoch]


def keys(noted: Journal) -> set[tuple[str, str]]:
    return {(epoch, noted_entry.key) for epoch, noted_entry in noted.records()}


@contextmanager
def forked(*works: Callable[[], object]) -> Iterator[list[int]]:
    """Processes that do this at once; they must end well, or by a signal."""
    children = []
    for work in works:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work()
                status = 0
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            finally:
                os._exit(status)
        children.append(child)
    try:
        yield children
    finally:
        statuses = [os.waitpid(child, 0)[1] for child in children]
    assert all(status in (0, 9) for status in statuses), statuses
