"""What a client is told: the fields of every answer, and the answers to requests that do not pass."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quota.inbound.contract import Decision, Limit, LimitState
from quota.inbound.deciding import Verdict
from quota.inbound.fields import CURRENT, POLICY, QUOTA_EXCEEDED, Fields, current_field, x_fields
from quota.inbound.rules import Rule
from quota.web.problem import Problem, seconds

MAX_JITTER_S = 60
AWAY_S = 1
"""When to come back while the storage is away: a breaker tries it again after a second."""


def fields_of(verdicts: Sequence[Verdict], *, with_x: bool) -> Fields:
    """The fields to add to the application's own answer. Of a storage that is away only the policy is known."""
    fields: Fields = []
    limits: list[Limit] = []
    states: list[LimitState] = []
    for rule, _, decision in verdicts:
        if decision is None:
            fields.append((POLICY, rule.policy_field))
        else:
            fields += _fields(rule, decision, None)
            limits += rule.limits
            states += decision.limits
    return [*fields, *x_fields(limits, states)] if with_x and states else fields


def _fields(rule: Rule, decision: Decision, retry_after_s: int | None) -> Fields:
    current = current_field(rule.policies, rule.limits, decision.limits, retry_after_s)
    return [(POLICY, rule.policy_field), (CURRENT, current)]


def problem_of(verdict: Verdict, *, with_x: bool) -> Problem:
    """The answer to a request that does not pass."""
    rule, _, decision = verdict
    if decision is None:
        return Problem(
            503,
            "The limits of this service cannot be checked now.",
            retry_after_s=AWAY_S + _jitter_s(AWAY_S),
            more=((POLICY, rule.policy_field),),
        )
    wait_s = seconds(decision.retry_after_ms)
    retry_after_s = wait_s + _jitter_s(wait_s)
    violated = [
        name for name, state in zip(rule.policies, decision.limits, strict=True) if state.retry_after_ms > 0
    ] or list(rule.policies)
    return Problem(
        429,
        f"Too many requests. Come back in {retry_after_s} s.",
        type=QUOTA_EXCEEDED,
        title="Request cannot be satisfied as assigned quota has been exceeded",
        members={"violated-policies": violated},
        retry_after_s=retry_after_s,
        more=(*_fields(rule, decision, wait_s), *(x_fields(rule.limits, decision.limits) if with_x else ())),
    )


def _jitter_s(wait_s: int) -> int:
    """Up to a tenth more, so that those who were refused together do not come back together. It only adds."""
    return random.randint(0, max(1, min(MAX_JITTER_S, wait_s // 10)))  # noqa: S311  # nothing secret hangs on it
