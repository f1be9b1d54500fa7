"""A ledger for the budget of a client, and the kinds of clients."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quota.ledger.factory import open_ledger
from quota.ledger.log import Log
from support.http_clients import CLIENTS


@pytest.fixture(scope="package", autouse=True)
def small_heap() -> Iterator[None]:
    """`gc.collect` looks only at what the tests here make: they call it often."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Log]:
    ledger = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield ledger
    ledger.close()


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param
