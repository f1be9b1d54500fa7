"""A log of each kind, empty, with a clock that the test moves: what passes here is the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.log.logs import Clock, Place
from quota.ledger.log import Log
from support.losses import KINDS, LEDGERS


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(LEDGERS[request.param](request, tmp_path, 0))
    yield place
    place.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(place: Place, clock: Clock) -> Log:
    return place.open(clock)
