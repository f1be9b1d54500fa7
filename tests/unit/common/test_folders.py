"""What one machine says now and then."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

import pytest

from quota.common.folders import first_within

if TYPE_CHECKING:
    from pathlib import Path

HOUR_S = 3_600


@pytest.mark.parametrize(("age_s", "first"), [(0, False), (HOUR_S - 5, False), (HOUR_S + 5, True), (-HOUR_S, True)])
def test_a_file_notes_when_a_thing_was_said_last(tmp_path: Path, age_s: int, first: bool) -> None:
    path = tmp_path / "told"
    assert first_within(path, HOUR_S * 1_000), "nobody has said it yet"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.utime(path, (time.time() - age_s,) * 2)
    assert first_within(path, HOUR_S * 1_000) == first, "a time of the future, by a wrong clock, silences nobody"
    assert not first_within(path, HOUR_S * 1_000)


def test_where_nothing_can_be_noted_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        first_within(tmp_path / "not there" / "told", 1)
