"""When a refused call is worth another try, as a scheduler is told."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest

import quota
from quota.common.clock import host_clock, utc
from quota.decision import UNKNOWN_WAIT_MS, Decision, Reason

HOUR_MS = 3_600_000


def refused(reason: Reason, retry_at_ms: int | None = None, **more: object) -> Decision:
    return Decision(
        False, None, None, "main", "project", "search.list", 100, reason, "day", 0, host_clock(), retry_at_ms, ()
    )._replace(**more)  # type: ignore[arg-type]


def test_when_has_the_time_and_the_seconds_until_then() -> None:
    at_ms = host_clock() + HOUR_MS
    when = refused("limit", at_ms).when()
    assert when is not None
    assert (when.at, when.at.tzinfo) == (utc(at_ms), UTC)
    assert 0 < when.seconds <= HOUR_MS / 1_000


def test_a_past_time_is_a_wait_of_zero() -> None:
    when = refused("exhausted", 1_000).when()
    assert when == (utc(1_000), 0)


@pytest.mark.parametrize("reason", ["limit", "run", "ledger-unavailable"])
def test_when_is_soon_if_the_time_is_unknown(reason: Reason) -> None:
    before = datetime.now(UTC)
    when = refused(reason).when()
    assert when is not None
    wait = timedelta(milliseconds=UNKNOWN_WAIT_MS)
    assert before - timedelta(milliseconds=1) <= when.at - wait <= datetime.now(UTC)
    assert when.seconds == UNKNOWN_WAIT_MS / 1_000


@pytest.mark.parametrize("decision", [refused("closed"), refused("clock"), refused("ledger-unavailable", lasting=True)])
def test_when_is_none_if_somebody_must_act(decision: Decision) -> None:
    assert decision.when() is None


def test_a_call_that_was_admitted_is_worth_a_try_now() -> None:
    when = refused("ok", admitted=True).when()
    assert when is not None
    assert when.seconds == 0


def test_every_reason_has_a_time_or_none() -> None:
    told = {reason: refused(reason).when() is None for reason in get_args(Reason)}
    assert {reason for reason, never in told.items() if never} == {"closed", "clock"}


def test_a_refusal_goes_from_process_to_process() -> None:
    """Workers hand exceptions to their masters."""
    error = quota.Refused(refused("limit", host_clock() + HOUR_MS))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (again.decision, str(again)) == (error.decision, str(error))
