"""Processes of three machines charge at full speed while everything is lost that can be: see `support.torture`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.torture import torture

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("kind", "machines"), [("redis", 3), ("redis", 1), ("sqlite", 3)])
def test_nobody_is_granted_what_its_machine_had_read_and_nothing_is_lost(
    kind: str, machines: int, tmp_path: Path
) -> None:
    outcome = torture("all of it", tmp_path, 4, 1.0, seed=3, on_redis=kind == "redis", machines=machines)
    assert outcome.strikes
    assert outcome.granted
    assert [*outcome.broken] == []
    assert (outcome.missing, outcome.twice, outcome.moved) == (set(), set(), set())
