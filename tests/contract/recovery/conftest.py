"""What the tests of losses share: a site on each ledger, and one whose server is behind a line that can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.losses import LedgerStorage, RedisStorage, Site
from support.proxy import Proxy
from support.servers import RedisServer


@pytest.fixture
def site(ledger_place: LedgerStorage, tmp_path: Path) -> Iterator[Site]:
    made = Site(ledger_place, tmp_path)
    yield made
    made.stop()


@pytest.fixture
def line(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def far(server: RedisServer, line: Proxy, tmp_path: Path) -> Iterator[Site]:
    """A site whose ledger is at the other end of a line."""
    storage = RedisStorage(server.url)
    storage.url = line.url
    made = Site(storage, tmp_path)
    yield made
    made.stop()
    storage.client.close()
