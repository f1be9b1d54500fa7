"""Every ledger, one after the other: what passes here is the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from support.loops import KINDS, Run, runner
from support.setup import Setup

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


@pytest.fixture
def server(redis_server: RedisServer) -> RedisServer:
    """The shared server, empty."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def setup(ledger_url: str) -> Iterator[Setup]:
    setup = Setup.open(ledger_url)
    yield setup
    setup.ledger.close()


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in a loop of its own, of either kind."""
    return runner(request.param)
