"""A paced limit gives its number out over its window, and says exactly when there is more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from quota.errors import ConfigError, UsageError
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, Sliding, View, paced_units, paced_until
from support.setup import Setup

if TYPE_CHECKING:
    from pathlib import Path

    from quota.budget import Budget

PACIFIC = Calendar("day", "America/Los_Angeles")


def at(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type,misc]


MIDNIGHT = at(2026, 7, 1, 7)


def paced(units: int) -> Limit:
    return Limit("pacific-day", units, View(Selector(buckets=("units",)), PACIFIC), units, 0, paced=True)


def start(
    *limits: Limit, leave: dict[str, dict[str, int]] | None = None, now_ms: int = MIDNIGHT
) -> tuple[Setup, Budget]:
    """A budget with these limits, and the clock that moves it."""
    setup = Setup.open("sqlite://", now_ms=now_ms)
    return setup, setup.budget(*limits, leave=leave)


def spend_all(budget: Budget, units: int, job: str = "") -> int:
    """Charge until refused; what was admitted."""
    total = 0
    while budget.charge("videos.list", units=units, job=job).admitted:
        total += units
    return total


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hour", "units"),
    # An eighth of the day ahead of an even spending of 2,400 units, 100 an hour.
    [(0, 300), (1, 400), (12, 1_500), (20, 2_300), (21, 2_400), (23, 2_400)],
)
def test_the_pace_is_even_and_complete_three_hours_before_the_end(hour: int, units: int) -> None:
    assert paced_units(2_400, PACIFIC.edges(MIDNIGHT), MIDNIGHT + hour * HOUR_MS) == units


@pytest.mark.parametrize("midnight", [at(2026, 3, 8, 8), at(2026, 7, 1, 7), at(2026, 11, 1, 7)], ids=["23", "24", "25"])
@pytest.mark.parametrize("units", [1, 2, 7, 95, 9_500, 10**9])
def test_a_pace_releases_units_at_their_first_millisecond(midnight: int, units: int) -> None:
    """On days of 23, 24 and 25 hours. Whoever asks for the millisecond before gets less."""
    edges = PACIFIC.edges(midnight)
    for wanted in {0, 1, units // 8, units // 3, units - 1, units}:
        reached_ms = paced_until(units, edges, wanted)
        assert edges[0] <= reached_ms < edges[1]
        assert paced_units(units, edges, reached_ms) >= wanted
        assert reached_ms == edges[0] or paced_units(units, edges, reached_ms - 1) < wanted


# -- decisions ---------------------------------------------------------------------------------------------------------


def test_a_refusal_by_pace_names_the_millisecond_of_the_next_call() -> None:
    setup, budget = start(paced(2_400))
    assert spend_all(budget, 100) == 300
    refused = budget.charge("search.list")
    assert (refused.reason, refused.refused_by, refused.limits[0].limit_units) == ("limit", "pacific-day", 300)
    assert "300 of 300 units used, of 2,400 by the end of the day" in refused.sentence()
    assert refused.retry_at_ms == MIDNIGHT + HOUR_MS
    setup.now_ms = refused.retry_at_ms - 1
    assert not budget.charge("search.list").admitted
    setup.now_ms += 1
    assert budget.charge("search.list").admitted


def test_a_paced_day_spends_its_whole_limit() -> None:
    """Demand without end, every half hour: the whole number is spent, and never more than the pace allows."""
    setup, budget = start(paced(9_500))
    spent = 0
    for tick in range(48):
        setup.now_ms = MIDNIGHT + tick * HOUR_MS // 2
        spent += spend_all(budget, 1 if tick == 47 else 50)
        assert spent <= paced_units(9_500, PACIFIC.edges(MIDNIGHT), setup.now_ms)
    assert spent == 9_500


def test_a_job_with_leave_has_its_own_pace() -> None:
    """It spends its half as evenly as the others spend all, and what it leaves is free at any time."""
    setup, budget = start(paced(2_400), leave={"backfill": {"pacific-day": 1_200}})
    assert spend_all(budget, 10, "backfill") == 150
    refused = budget.charge("videos.list", job="backfill")
    assert (refused.reason, refused.limits[0].limit_units) == ("leave", 150)
    assert spend_all(budget, 10) == 150, "the rest of the first 300"
    setup.now_ms += 12 * HOUR_MS
    assert spend_all(budget, 10, "backfill") == 450
    assert spend_all(budget, 10) == 750
    setup.now_ms += 10 * HOUR_MS
    assert spend_all(budget, 10, "backfill") == 0
    assert spend_all(budget, 10) == 900


def test_a_limit_that_has_room_now_and_less_after_its_reset_moves_the_time() -> None:
    """The sliding limit has room at 02:00 of the next day. By then a charge dated there (the clock went back) has used
    up the paced limit's first hours: the time given is when both have room."""
    sliding = Limit("day", 1_000, View(Selector(buckets=("units",)), Sliding(DAY_MS)), 1_000, 0)
    setup, budget = start(sliding, paced(2_400), now_ms=MIDNIGHT + 2 * HOUR_MS)
    assert budget.charge("videos.list", units=500).admitted
    setup.now_ms = MIDNIGHT + DAY_MS + HOUR_MS
    assert budget.charge("videos.list", units=380).admitted
    setup.now_ms = MIDNIGHT + 22 * HOUR_MS
    refused = budget.peek("videos.list", units=600)
    assert refused.refused_by == "day"
    # 380 + 600 = 980 of 2,400 units are given out 6 h 48 min into the day.
    assert refused.retry_at_ms == MIDNIGHT + DAY_MS + 6 * HOUR_MS + 48 * 60_000
    setup.now_ms = refused.retry_at_ms - 1
    assert not budget.peek("videos.list", units=600).admitted
    setup.now_ms += 1
    assert budget.peek("videos.list", units=600).admitted


# -- where there may be one --------------------------------------------------------------------------------------------

CONFIG = """
[credentials.main]
api = "youtube-v3"
[[credentials.main.limits]]
name = "day"
units = 2_400
window = {window}
pacing = {pacing}
"""


def test_pacing_is_an_option_of_a_calendar_limit(tmp_path: Path, state_dir: Path) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(CONFIG.format(window='{ calendar = "day", zone = "UTC" }', pacing="true"))
    assert load_settings(path).credentials["main"].limits[0].paced
    path.write_text(CONFIG.format(window='"24h"', pacing="false"))
    assert not load_settings(path).credentials["main"].limits[0].paced


@pytest.mark.parametrize(
    ("window", "pacing", "says"),
    [
        ('"24h"', "true", "only a calendar window can be paced"),
        ('{ calendar = "day", zone = "UTC" }', '"yes"', "a string where true or false is needed"),
    ],
)
def test_wrong_pacing_is_one_line(tmp_path: Path, state_dir: Path, window: str, pacing: str, says: str) -> None:
    path = tmp_path / "quota.toml"
    path.write_text(CONFIG.format(window=window, pacing=pacing))
    with pytest.raises(ConfigError, match=says) as error:
        load_settings(path)
    assert "\n" not in str(error.value)
    assert "limits[0].pacing" in str(error.value)


def test_a_paced_sliding_limit_cannot_be_made() -> None:
    with pytest.raises(UsageError, match="no reset to pace towards"):
        Limit("day", 10, View(Selector(), Sliding(DAY_MS)), 10, 0, paced=True)
