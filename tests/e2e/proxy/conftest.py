"""An upstream, and a folder for the proxy in front of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.plain_http import Upstream
from support.proxying import House

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with Upstream() as upstream:
        yield House(tmp_path, upstream)
