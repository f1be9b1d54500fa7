"""Walls so far away that a machine that stalls for seconds fails no test of something else.

A decision waits for a second at most, in places for a tenth of it. What a test says of limits, losses or processes has
to hold on a disk that stalls for longer, too. The tests of the walls themselves have `real_walls`.

Not here is `redis_errors.TLS_WAIT_S`: each failed connection waits it out, so tests of lost answers would take 20 s
each. The tests that need it set it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quota import async_budget
from quota.deciding import decide, losses, recorder
from quota.inbound import deciding, redis_storage, sqlite_storage
from quota.journal import draws, journal
from quota.ledger import redis_connection, state
from quota.ledger.redis_log import RedisLog
from quota.ledger.sqlite_log import SqliteLog

PATIENCE_S = 20.0

WALLS: list[tuple[Any, str]] = [
    (SqliteLog, "_deadline_s"),
    (RedisLog, "_timeout_s"),
    (redis_connection, "DISCOVERY_S"),
    (state, "CHANGE_WITHIN_S"),
    (state, "FENCED_WITHIN_S"),
    (decide, "COUNT_WITHIN_S"),
    (losses, "WAIT_S"),
    (journal, "WAIT_S"),
    (draws, "WAIT_S"),
    (recorder, "ALL_END_WITHIN_S"),
    (async_budget, "WAIT_S"),
    (deciding, "WALL_S"),
    (sqlite_storage, "WALL_S"),
    (redis_storage, "WALL_S"),
    (redis_storage, "TIMEOUT_S"),
]

REAL = [getattr(owner, name) for owner, name in WALLS]


def be_patient() -> None:
    """For this process, and for those that it forks."""
    for owner, name in WALLS:
        setattr(owner, name, PATIENCE_S)


def be_impatient() -> None:
    """As for users: for a process of a patient test that is to show how long they wait."""
    for (owner, name), wall_s in zip(WALLS, REAL, strict=True):
        setattr(owner, name, wall_s)


def without_waits() -> AbstractContextManager[object]:
    """No waits between the attempts of a step, in this process."""
    return patch("quota.jobs.attempts.MAX_WAIT_S", 0.0)


def patient(code: str, *args: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command of a process of its own that runs this code, as patient, with these arguments. `options` are
    Python's."""
    first = f"import sys; sys.path.append({str(Path(__file__).parents[1])!r}); "
    first += "from support.patience import be_patient; be_patient()\n"
    return [sys.executable, *options, "-c", first + code, *args]
