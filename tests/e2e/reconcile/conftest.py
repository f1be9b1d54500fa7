"""A project whose provider is the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.losses import LEDGERS
from support.reconciling import Site


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path, state_dir: Path) -> Iterator[Site]:
    """On SQLite, or on each ledger that a test names by `each_ledger`."""
    made = Site(tmp_path, LEDGERS[getattr(request, "param", "sqlite")](request, tmp_path, 0))
    yield made
    made.close()
