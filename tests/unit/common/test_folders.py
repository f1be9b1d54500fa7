"""What one machine says now and then."""

from __future__ import annotations

import os
import stat
import threading
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


@pytest.mark.parametrize("age_s", [None, 2 * HOUR_S])
def test_of_several_that_come_at_once_one_says_it(tmp_path: Path, age_s: int | None) -> None:
    """With a new file, and with one whose time is over."""

    def come(path: Path) -> None:
        barrier.wait()
        said.append(first_within(path, HOUR_S * 1_000))

    for number in range(100):
        path, said, barrier = tmp_path / str(number), [], threading.Barrier(8)
        if age_s is not None:
            path.touch(0o600)
            os.utime(path, (time.time() - age_s,) * 2)
        threads = [threading.Thread(target=come, args=(path,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == [False] * 7 + [True], number


def test_where_nothing_can_be_noted_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        first_within(tmp_path / "not there" / "told", 1)
