"""The responses to clients: header fields for every answer, and problem documents for refused requests.

`RateLimit-Policy` and `RateLimit` follow draft-ietf-httpapi-ratelimit-headers-11 of 23 May 2026, which is not an RFC
yet. Both are lists of structured fields (RFC 9651), with one item per limit:

    RateLimit-Policy: "api-60s";q=100;w=60, "api-1d";q=5000;w=86400      the grant: q requests in w seconds
    RateLimit: "api-60s";r=42;t=18, "api-1d";r=4100;t=75600              the rest: at most r within t seconds

The draft calls `t` the "effective window": a client can use at most `r` within these seconds. It says nothing about the
time after them. The draft wants `Retry-After` not to be earlier than `t`, so a refusal shortens `t` to the wait.

The `X-RateLimit-*` fields have no specification. Here they describe the limit with the fewest requests left, and
`X-RateLimit-Reset` has seconds from now, as `Retry-After` has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from quota.inbound.contract import Decision, Limit, LimitState
from quota.inbound.deciding import Verdict
from quota.inbound.rules import Rule
from quota.web.documents import Problem, seconds

QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
"""The draft asks IANA to register it. IANA has not done so yet."""

POLICY, CURRENT = "ratelimit-policy", "ratelimit"

Fields = list[tuple[str, str]]

MAX_JITTER_S = 60
AWAY_S = 1
"""When a client should come back during an outage: the breaker tries the storage after a second."""


def fields_of(verdicts: Sequence[Verdict], *, with_x: bool) -> Fields:
    """The fields to add to the application's own answer. Without the storage's answer, only the policy."""
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
    return [*fields, *_x_fields(limits, states)] if with_x and states else fields


def _fields(rule: Rule, decision: Decision, retry_after_s: int | None) -> Fields:
    """Both fields for one rule. `retry_after_s` is the wait of a refusal."""
    items = []
    for name, limit, state in zip(rule.policies, rule.limits, decision.limits, strict=True):
        effective_s = seconds(min(state.reset_ms or limit.window_ms, limit.window_ms))
        if retry_after_s is not None:
            effective_s = min(effective_s, retry_after_s)
        items.append(f'"{name}";r={max(0, state.remaining)};t={effective_s}')
    return [(POLICY, rule.policy_field), (CURRENT, ", ".join(items))]


def _x_fields(limits: Sequence[Limit], states: Sequence[LimitState]) -> Fields:
    """The `X-RateLimit-*` fields, for clients that know only those."""
    limit, state = min(zip(limits, states, strict=True), key=lambda pair: pair[1].remaining)
    return [
        ("x-ratelimit-limit", str(limit.number)),
        ("x-ratelimit-remaining", str(max(0, state.remaining))),
        ("x-ratelimit-reset", str(seconds(state.reset_ms))),
    ]


def problem_of(verdict: Verdict, *, with_x: bool) -> Problem:
    """The answer to a refused request."""
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
        more=(*_fields(rule, decision, wait_s), *(_x_fields(rule.limits, decision.limits) if with_x else ())),
    )


def _jitter_s(wait_s: int) -> int:
    """Up to a tenth more, so that clients who were refused together do not come back together."""
    return random.randint(0, max(1, min(MAX_JITTER_S, wait_s // 10)))  # noqa: S311  # no secret depends on it
