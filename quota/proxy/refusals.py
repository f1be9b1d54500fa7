"""What the caller of a request is told that does not leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.web.problem import Problem

if TYPE_CHECKING:
    from quota.decision import Decision


def refusal(decision: Decision) -> Problem:
    """The answer to a refused request: 429, or 503 where nobody decided. It never says to come back early."""
    after_ms = decision.retry_after_ms
    return Problem(
        503 if decision.reason == "ledger-unavailable" else 429,
        decision.sentence(),
        members={"decision": decision.as_json()},
        retry_after_s=None if after_ms is None else -(-after_ms // 1_000),
    )
