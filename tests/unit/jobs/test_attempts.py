"""What the calls of one step of a fetch function cost together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quota.decision import Decision, LimitState
from quota.jobs.attempts import Attempts
from support.setup import limit

NOW_MS = 1_795_233_255_077
WINDOW_MS = 2_000


ADMITTED = Decision(
    True, None, "ledger", "main", "p", "read", 3, "ok", None, 0, NOW_MS, None, (LimitState("day", 3, 5, 5, 0),)
)


def refused(at_ms: int) -> Decision:
    return ADMITTED._replace(admitted=False, source=None, reason="limit", refused_by="day", decided_at_ms=at_ms)


@pytest.fixture
def attempts() -> Attempts:
    attempts: Any = object.__new__(Attempts)
    attempts.job = SimpleNamespace(name="t")
    attempts.watcher = SimpleNamespace(decided=lambda decision: None)
    attempts._budget = SimpleNamespace(limits_of=lambda job: (limit(5, WINDOW_MS),))
    attempts._admitted, attempts._page, attempts._step, attempts._any_refused = {}, ("", 1), [], False
    made: Attempts = attempts
    return made


def test_a_call_that_has_left_the_window_does_not_count(attempts: Attempts) -> None:
    attempts._decided(ADMITTED._replace(id="a"))
    assert attempts.too_dear(refused(NOW_MS + WINDOW_MS)) is None


def test_a_call_whose_cost_was_corrected_does_not_count(attempts: Attempts) -> None:
    attempts._decided(ADMITTED._replace(id="a"))
    attempts._corrected("a", -2)
    assert attempts.too_dear(refused(NOW_MS + 1)) is None
