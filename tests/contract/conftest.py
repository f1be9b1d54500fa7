"""Every ledger, one after the other: what passes here is the contract."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import redis

from quota.budget import Budget
from quota.ledger.contract import Ledger
from quota.ledger.factory import open_ledger
from quota.limits import DAY_MS, Limit, Selector, Sliding, View
from support.books import BOOK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import RedisServer


@pytest.fixture(params=["sqlite", "redis"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty ledger. Afterwards no key may be left without a lifetime."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield server.url
        immortal = [key for key in client.keys("*") if client.pttl(key) < 0]
        assert immortal == [], "keys without a lifetime"


@dataclass
class Setup:
    """A ledger under a clock that the test moves, and budgets over it."""

    ledger: Ledger
    now_ms: int = 1_793_000_000_000
    project: str = field(default_factory=lambda: f"p-{uuid.uuid4().hex[:8]}")

    def budget(self, *limits: Limit, **more: object) -> Budget:
        limits = limits or (limit(500),)
        return Budget(
            credential="main",
            project=self.project,
            book=BOOK,
            limits=limits,
            ledger=self.ledger,
            clock=lambda: self.now_ms,
            **more,  # type: ignore[arg-type]
        )


@pytest.fixture
def setup(ledger_url: str) -> Iterator[Setup]:
    setup: Setup
    ledger = open_ledger(ledger_url, clock=lambda: setup.now_ms)
    setup = Setup(ledger)
    yield setup
    ledger.close()


def limit(units: int, window_ms: int = DAY_MS, *, name: str = "day", **selector: object) -> Limit:
    """A sliding limit on the units bucket."""
    view = View(Selector(**{"buckets": ("units",), **selector}), Sliding(window_ms))  # type: ignore[arg-type]
    return Limit(name, units, view, units, 0)
