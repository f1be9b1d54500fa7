"""An upstream, and a folder for the proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.plain_http import Upstream
from support.proxying import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with Upstream() as upstream:
        yield House(tmp_path, upstream)
