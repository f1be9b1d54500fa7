"""A log of each kind, empty, with a clock that the test moves: what passes here is the contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.log.logs import Clock, Place
from quota.ledger.log import Log
from quota.ledger.redis_log import RedisLog
from quota.ledger.sqlite_log import SqliteLog
from support.losses import KINDS, LEDGERS
from support.patience import PATIENCE_S


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a log runs on each kind, and one that names its places on these."""
    named = any("place" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "place" in metafunc.fixturenames and not named:
        metafunc.parametrize("place", KINDS, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(SqliteLog, "_deadline_s", PATIENCE_S)
    monkeypatch.setattr(RedisLog, "_timeout_s", PATIENCE_S)
    place = Place(LEDGERS[request.param](request, tmp_path, 0))
    yield place
    place.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(place: Place, clock: Clock) -> Log:
    return place.open(clock)
