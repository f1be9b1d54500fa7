"""A project on each ledger, whose provider is the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.reconciling import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.servers import RedisServer


@pytest.fixture(params=["sqlite", "redis"])
def site(request: pytest.FixtureRequest, tmp_path: Path, state_dir: Path) -> Iterator[Site]:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.url
    made = Site(tmp_path, url)
    if request.param == "redis":
        made.empty_ledger()
    yield made
    made.close()
