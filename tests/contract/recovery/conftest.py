"""What the tests of recovery share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.losses import LedgerStorage


@pytest.fixture
def site(ledger_place: LedgerStorage, tmp_path: Path) -> Iterator[Site]:
    made = Site(ledger_place, tmp_path)
    yield made
    for machine in made.machines:
        machine.stop()
