"""What the tests of the programs in lua/README.md share."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import redis

from support.servers import immortal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import RedisServer


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A server that knows no key and no script. What a test leaves there expires."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        client.script_flush()
        yield redis_server
        assert immortal(client) == [], "keys without a lifetime"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which somebody ran `quota ledger scripts scripts`."""
    folder = tmp_path_factory.mktemp("home")
    command = [sys.executable, "-m", "quota", "ledger", "scripts", "scripts"]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=300, check=True)
    return folder
