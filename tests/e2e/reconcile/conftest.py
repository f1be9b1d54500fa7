"""A project whose provider is the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.reconciling import Site
from support.servers import RedisServer


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, state_dir: Path) -> Iterator[Site]:
    """On SQLite, or on each ledger that a test names by `each_ledger`."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if getattr(request, "param", "sqlite") == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.url
    made = Site(tmp_path, url)
    made.empty_ledger()
    yield made
    made.close()
