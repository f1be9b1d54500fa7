"""What the tests over HTTP share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than the wall to open a file, and then an open rule admits: only tests of outages
    want that."""
    if "outages" not in request.module.__name__:
        for module in ("deciding", "sqlite_storage", "redis_storage"):
            monkeypatch.setattr(f"quota.inbound.{module}.WALL_S", 10.0)
