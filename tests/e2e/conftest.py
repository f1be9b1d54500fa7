"""What the tests of the programs in lua/README.md share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A server that knows no key and no script. What a test leaves there expires."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        client.script_flush()
        yield redis_server
        assert [key for key in client.keys("*") if client.pttl(key) == -1] == [], "keys without a lifetime"
