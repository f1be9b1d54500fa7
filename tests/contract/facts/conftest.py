"""An empty log, and a state over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quota.ledger.memory_log import MemoryLog
from support.setup import Clocked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.ledger.log import Log


@pytest.fixture
def log() -> Iterator[Log]:
    log = MemoryLog()
    yield log
    log.close()


@pytest.fixture
def here(log: Log) -> Clocked:
    return Clocked(log)
