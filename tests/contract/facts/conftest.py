"""A log of each kind, empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quota.ledger.memory_log import MemoryLog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.ledger.log import Log


@pytest.fixture
def log() -> Iterator[Log]:
    log = MemoryLog()
    yield log
    log.close()
