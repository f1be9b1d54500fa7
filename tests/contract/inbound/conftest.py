"""Every storage, one after the other: what passes here is the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from quota.inbound.contract import Storage
from quota.inbound.rules import open_storage
from support.inbound import Clock
from support.servers import RedisServer


@pytest.fixture
def url(ledger_url: str) -> str:
    """An empty storage."""
    return ledger_url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(url: str, clock: Clock) -> Iterator[Storage]:
    storage = open_storage(url, clock=clock)
    yield storage
    storage.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of `on_sqlite`."""
    return tmp_path / "inbound.db"


@pytest.fixture
def on_sqlite(path: Path, clock: Clock) -> Storage:
    return open_storage(f"sqlite:///{path}", clock=clock)


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """The administrator of the shared server, which is empty before and afterwards."""
    with redis.Redis(port=server.port) as client:
        yield client
        client.flushall()


@pytest.fixture
def on_redis(client: redis.Redis, server: RedisServer, clock: Clock) -> Iterator[Storage]:
    storage = open_storage(server.url, clock=clock)
    yield storage
    storage.close()
