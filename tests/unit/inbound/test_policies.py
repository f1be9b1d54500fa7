"""Policies say what they want in one line, and cannot be made otherwise."""

from __future__ import annotations

import pytest

from quota.errors import ConfigError
from quota.inbound.contract import MAX_SCALE, Limit, Policy
from quota.inbound.names import outdated, plan, salt_names
from quota.inbound.storage import open_storage

MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("rule", "limits", "algorithm", "says"),
    [
        ("", (Limit(1, MINUTE_MS),), "counter", "rule '': a name is 1 to 64"),
        ("a" * 65, (Limit(1, MINUTE_MS),), "counter", "a name is 1 to 64"),
        ("a:b", (Limit(1, MINUTE_MS),), "counter", "a name is 1 to 64"),
        ("a", (Limit(1, MINUTE_MS),), "sliding", "algorithm: 'sliding': known: counter, gcra, log"),
        ("a", (), "counter", "give it 1 to 8 limits, not 0"),
        ("a", tuple(Limit(1, MINUTE_MS + n) for n in range(9)), "counter", "give it 1 to 8 limits, not 9"),
        ("a", (Limit(1, MINUTE_MS), Limit(2, MINUTE_MS)), "counter", "two limits have the same window"),
        ("a", (Limit(0, MINUTE_MS),), "counter", "from 1 to"),
        ("a", (Limit(1, 999),), "counter", "from 1,000 to 2,678,400,000"),
        ("a", (Limit(1, 2_678_400_001),), "counter", "from 1,000 to 2,678,400,000"),
        ("a", (Limit(1.5, MINUTE_MS),), "counter", "whole number"),
        ("a", (Limit(True, MINUTE_MS),), "counter", "whole number"),
        ("a", (Limit(MAX_SCALE // MINUTE_MS + 1, MINUTE_MS),), "counter", "too much to count"),
        ("a", (Limit(1_001, MINUTE_MS),), "log", "use counter for 1001"),
        ("a", (Limit(10, MINUTE_MS),), "gcra", "needs a burst, from 1 up to its limit of 10"),
        ("a", (Limit(10, MINUTE_MS, 11),), "gcra", "needs a burst, from 1 up to its limit of 10"),
        ("a", (Limit(10, MINUTE_MS, 1),), "log", "only the algorithm gcra has a burst"),
    ],
)
def test_what_cannot_be_held_is_refused_when_it_is_written(
    rule: str, limits: tuple[Limit, ...], algorithm: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        Policy(rule, limits, algorithm)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_the_largest_limits_can_be_held() -> None:
    assert Policy("a", (Limit(MAX_SCALE // MINUTE_MS, MINUTE_MS),)).most == MAX_SCALE // MINUTE_MS
    assert Policy("a" * 64, (Limit(1_000, 1_000), Limit(10, 2_678_400_000)), "log").most == 10
    assert Policy("a", (Limit(10, 1_000, 3),), "gcra").most == 3


def test_another_scheme_is_no_storage() -> None:
    with pytest.raises(ConfigError, match="inbound storage of kind 'mysql' is not known"):
        open_storage("mysql://db")
    with pytest.raises(ConfigError, match=r"^inbound storage redis://h:0/x: its database is not a number"):
        open_storage("redis://secret:password@h:0/x")


# -- salts (I4) --------------------------------------------------------------------------------------------------------

DAY_MS = 86_400_000


def test_a_window_uses_the_salt_of_the_day_in_which_it_began() -> None:
    policy = Policy("a", (Limit(1, 7 * 3_600_000),))  # no divisor of a day
    at_ms = 20_000 * DAY_MS + 60_000
    needed = salt_names(policy, at_ms)
    begun_ms = at_ms - at_ms % (7 * 3_600_000)
    assert begun_ms // DAY_MS == 19_999
    assert needed == {"25200000:19999": 20_000 * DAY_MS + 14 * 3_600_000}, "and it is needed for two windows more"


def test_a_permanent_salt_is_used_by_the_windows_that_begin_after_it() -> None:
    policy = Policy("a", (Limit(1, 10_000),), "log")
    fixed = {"shard": "00", "0": "01", "1005000": "02", "1025000": "03"}
    seen = {at_ms: plan(policy, at_ms, fixed, {}).windows[0] for at_ms in range(1_000_000, 1_050_000, 10_000)}
    assert [(salt.hex(), before.hex()) for _, salt, before in seen.values()] == [
        ("01", "01"),
        ("02", "01"),
        ("02", "02"),
        ("03", "02"),
        ("03", "03"),
    ]


def test_a_permanent_salt_is_kept_for_two_of_the_longest_windows() -> None:
    fixed = {"shard": "00", "0": "01", "1000": "02", "2000": "03"}
    assert outdated(fixed, 1_000 + 62 * DAY_MS) == []
    assert outdated(fixed, 1_001 + 62 * DAY_MS) == ["0"]
    assert outdated(fixed, 10**13) == ["0", "1000"], "the newest stays"
