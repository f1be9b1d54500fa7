"""An empty log, and a state over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quota.ledger.log import Log
from quota.ledger.sqlite_log import SqliteLog
from support.setup import Clocked


@pytest.fixture
def log() -> Iterator[Log]:
    log = SqliteLog()
    yield log
    log.close()


@pytest.fixture
def here(log: Log) -> Clocked:
    return Clocked(log)
