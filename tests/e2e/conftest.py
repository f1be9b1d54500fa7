"""What several folders of these tests share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from support.commands import Quota
from support.emulator import Emulator
from support.losses import KINDS, LEDGERS
from support.servers import RedisServer, immortal


@pytest.fixture
def quota(tmp_path: Path) -> Quota:
    """The command line, in a folder without a configuration."""
    return Quota(tmp_path)


@pytest.fixture
def upstream() -> Iterator[Emulator]:
    with Emulator() as emulator:
        yield emulator


@pytest.fixture(params=KINDS)
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty ledger of each kind is."""
    return LEDGERS[request.param](request, tmp_path, 0).url


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A server that knows no key and no script. What a test leaves there expires."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        client.script_flush()
        yield redis_server
        assert immortal(client) == [], "keys without a lifetime"


@pytest.fixture
def shared(server: RedisServer) -> str:
    """The url of that server."""
    return server.url


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which somebody ran `quota ledger scripts scripts`."""
    folder = tmp_path_factory.mktemp("home")
    assert Quota(folder)("ledger", "scripts", "scripts").returncode == 0
    return folder


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Has a function fill a folder, once for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    folders = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, fill: Callable[[Path], None]) -> Path:
        folder, new = folders / name, folders / f"{name}-new"
        with (folders / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                new.mkdir()
                fill(new)
                new.rename(folder)
        return folder

    return made
