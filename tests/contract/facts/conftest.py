"""An empty log, and a state over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quota.ledger.log import Log
from quota.ledger.memory_log import MemoryLog
from support.setup import Clocked


@pytest.fixture
def log() -> Iterator[Log]:
    log = MemoryLog()
    yield log
    log.close()


@pytest.fixture
def here(log: Log) -> Clocked:
    return Clocked(log)
