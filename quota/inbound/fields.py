"""The header fields that tell a client its limits. Their syntax is here and nowhere else.

`RateLimit-Policy` and `RateLimit` follow draft-ietf-httpapi-ratelimit-headers-11 of 23 May 2026, which is not an RFC
yet. Both are lists of structured fields (RFC 9651); one item is one limit:

    RateLimit-Policy: "api-60s";q=100;w=60, "api-1d";q=5000;w=86400      what is granted: q in w seconds
    RateLimit: "api-60s";r=42;t=18, "api-1d";r=4100;t=75600              what is left: at most r within t seconds

In that revision `t` is the "effective window": the seconds within which no more than `r` can be used. It promises
nothing about what comes after. `Retry-After` should not lie before its end, so in a refusal no `t` is longer.

The `X-RateLimit-*` fields have no specification. Here they describe the limit with the fewest requests left, and
`X-RateLimit-Reset` is in seconds from now, as `Retry-After` is.
"""

from __future__ import annotations

from collections.abc import Sequence

from quota.inbound.contract import Limit, LimitState
from quota.web.problem import seconds

QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
"""The draft asks IANA to register it; that has not happened yet."""

POLICY, CURRENT = "ratelimit-policy", "ratelimit"

Fields = list[tuple[str, str]]


def current_field(
    names: Sequence[str], limits: Sequence[Limit], states: Sequence[LimitState], retry_after_s: int | None = None
) -> str:
    """The value of `RateLimit` for limits of these names. `retry_after_s` is what a refusal says."""
    items = []
    for name, limit, state in zip(names, limits, states, strict=True):
        effective_s = seconds(min(state.reset_ms or limit.window_ms, limit.window_ms))
        if retry_after_s is not None:
            effective_s = min(effective_s, retry_after_s)
        items.append(f'"{name}";r={max(0, state.remaining)};t={effective_s}')
    return ", ".join(items)


def policy_field(names: Sequence[str], limits: Sequence[Limit]) -> str:
    """The value of `RateLimit-Policy` for limits of these names."""
    return ", ".join(
        f'"{name}";q={limit.number};w={seconds(limit.window_ms)}' for name, limit in zip(names, limits, strict=True)
    )


def x_fields(limits: Sequence[Limit], states: Sequence[LimitState]) -> Fields:
    """The `X-RateLimit-*` fields, for clients that know only those."""
    limit, state = min(zip(limits, states, strict=True), key=lambda pair: pair[1].remaining)
    return [
        ("x-ratelimit-limit", str(limit.number)),
        ("x-ratelimit-remaining", str(max(0, state.remaining))),
        ("x-ratelimit-reset", str(seconds(state.reset_ms))),
    ]
