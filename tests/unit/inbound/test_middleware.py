"""The header fields, and when a client is told to come back."""

from __future__ import annotations

import pytest

from quota.inbound import Limit, Rule
from quota.inbound.contract import Decision, LimitState
from quota.inbound.deciding import Verdict
from quota.inbound.middleware import fields_of, problem_of

RULE = Rule("api", [Limit(100, 60_000), Limit(5_000, 86_400_000)])


def verdict(admitted: bool, *states: LimitState, rule: Rule = RULE) -> Verdict:
    return Verdict(rule, "admitted" if admitted else "refused", Decision(admitted, 0, states))


def test_ratelimit_has_what_is_left_and_the_time() -> None:
    got = dict(fields_of([verdict(True, LimitState(42, 17_001, 0), LimitState(5_000, 0, 0))], with_x=True))
    assert got == {
        "ratelimit-policy": '"api-1m";q=100;w=60, "api-24h";q=5000;w=86400',
        "ratelimit": '"api-1m";r=42;t=18, "api-24h";r=5000;t=86400',
        "x-ratelimit-limit": "100",
        "x-ratelimit-remaining": "42",
        "x-ratelimit-reset": "18",
    }


@pytest.mark.parametrize("wait_ms", [1, 999, 1_000, 1_001, 59_001, 3_600_000, 86_400_000])
def test_retry_after_is_never_too_early(wait_ms: int) -> None:
    """Nor before the end of any effective window; jitter only adds, and at most a tenth or a second."""
    refused = verdict(False, LimitState(0, 60_000, wait_ms), LimitState(7, 80_000_000, 0))
    waits = set()
    for _ in range(50):
        problem = problem_of(refused, with_x=False)
        assert problem.retry_after_s is not None
        waits.add(problem.retry_after_s)
        windows = [int(item.partition(";t=")[2]) for item in dict(problem.more)["ratelimit"].split(", ")]
        assert max(windows) <= problem.retry_after_s
        assert problem.members == {"violated-policies": ["api-1m"]}
    least_s = -(-wait_ms // 1000)
    assert least_s <= min(waits) < max(waits) <= least_s + max(1, min(60, least_s // 10))


def test_a_rule_without_an_answer_tells_its_policy_alone() -> None:
    away = Verdict(RULE, "failed_open", None)
    assert [name for name, _ in fields_of([away], with_x=True)] == ["ratelimit-policy"]
    problem = problem_of(away, with_x=True)
    assert (problem.status, [name for name, _ in problem.more]) == (503, ["ratelimit-policy"])
    assert problem.retry_after_s in (1, 2)
