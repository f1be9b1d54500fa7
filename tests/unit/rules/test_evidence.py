"""What follows from a level that an answer of upstream names, and that nothing follows from one that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quota.rules.evidence import Level, evidence_of, whole_limits
from quota.settings.books import default_limits
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.books import parse_book

BOOK = parse_book(
    """
    api = "example"
    source = "the tests"
    read_on = 2026-11-01
    [buckets.core]
    windows = [{ quota = 1_000, resets = "1h" }, { quota = 5_000, resets = { calendar = "day", zone = "UTC" } }]
    [buckets.burst]
    quota = 60
    resets = "1m"
    [default]
    get = 1
    other = 1
    [methods]
    read = 1
    write = 5
    """,
    "book",
)
LIMITS = default_limits(BOOK)
DAY = Calendar("day", "UTC")
MIDNIGHT = DAY.edges(1_793_000_000_000)[0]
NOW = MIDNIGHT + 9 * HOUR_MS


def follows(
    remaining: int, limit: int | None = None, reset_ms: int | None = None, *, took_ms: int = 50, now_ms: int = NOW
) -> tuple[int, set[str]] | None:
    """How long it holds, and which limits it concerns."""
    evidence = evidence_of(Level("core", remaining, limit, reset_ms), BOOK, LIMITS, now_ms - took_ms, now_ms)
    return None if evidence is None else (evidence.until_ms - now_ms, {limit.name for limit in evidence.limits})


def test_evidence_is_about_the_window_of_the_answers_limit_or_reset() -> None:
    of_core = [limit for limit in LIMITS if limit.view.selector.buckets == ("core",)]
    hour = {limit.name for limit in of_core if limit.view.window == Sliding(HOUR_MS)}
    day = {limit.name for limit in of_core} - hour
    assert (len(hour), len(day)) == (1, 2)
    left_ms = MIDNIGHT + DAY_MS - NOW
    # (what is said, until when it holds, whose limits)
    assert follows(900, 1_000, NOW + MINUTE_MS) == (MINUTE_MS, hour)
    assert follows(900, 5_000, NOW + MINUTE_MS) == (MINUTE_MS, day)
    assert follows(900, 1_000) == (HOUR_MS, hour)
    assert follows(900, 5_000) == (left_ms, day)
    # without a limit, or with one that no window has
    assert follows(900, None, NOW + HOUR_MS) == (HOUR_MS, hour)
    assert follows(900, None, NOW + 3 * HOUR_MS) == (3 * HOUR_MS, day)
    assert follows(900, 777_777, NOW + 3 * HOUR_MS) == (3 * HOUR_MS, day)
    assert follows(900) == (HOUR_MS, hour)
    # no longer than its period
    assert follows(900, 1_000, NOW + 400 * DAY_MS) == (HOUR_MS, hour)
    assert follows(900, 5_000, NOW + 400 * DAY_MS) == (left_ms, day)


@pytest.mark.parametrize(
    ("remaining", "limit", "reset_ms"),
    [
        pytest.param(-1, 1_000, None, id="negative"),
        pytest.param(1_001, 1_000, None, id="more than the limit"),
        pytest.param(0, 0, None, id="a limit of nothing"),
        pytest.param(10**18, None, None, id="more than anybody grants"),
        pytest.param(5, 10**18, None, id="a limit of more than anybody grants"),
        pytest.param(5, 1_000, NOW, id="over now"),
        pytest.param(5, 1_000, NOW + 50, id="over, if the answer was on its way for as long as the call took"),
    ],
)
def test_impossible_or_past_figures_are_ignored(remaining: int, limit: int | None, reset_ms: int | None) -> None:
    assert follows(remaining, limit, reset_ms) is None
    assert evidence_of(Level("search", 0, 30), BOOK, LIMITS, NOW, NOW) is None, "an unknown bucket"


def test_yesterdays_level_says_nothing_of_today() -> None:
    level = 10, 5_000
    assert follows(*level, took_ms=MINUTE_MS, now_ms=MIDNIGHT + MINUTE_MS - 1) is None, "charged yesterday"
    assert follows(*level, now_ms=MIDNIGHT + 30_000) is None, "upstream's clock may be behind"
    assert follows(*level, MIDNIGHT + 5_000, now_ms=MIDNIGHT + 1_000) is None, "it is behind"
    assert follows(*level, now_ms=MIDNIGHT + 2 * MINUTE_MS) is not None
    assert follows(*level, MIDNIGHT + DAY_MS, now_ms=MIDNIGHT + 1_000) is not None
    assert follows(10, 1_000, took_ms=HOUR_MS) is None, "charged a window ago"


def test_whole_limits_finds_limits_that_count_a_whole_bucket() -> None:
    def limit(**selector: object) -> Limit:
        return Limit("one", 10, View(Selector(**selector), Sliding(HOUR_MS)), 10, 0)  # type: ignore[arg-type]

    every, both = limit(), limit(buckets=("core", "burst"))
    others = [limit(buckets=("burst",)), limit(methods=("read",)), limit(jobs=("a",)), limit(count="calls")]
    assert list(whole_limits([every, both, *others], "core", BOOK)) == [every, both]
    evidence = evidence_of(Level("core", 5, 1_000), BOOK, [every, both, *others], NOW, NOW)
    assert evidence is not None
    assert (evidence.limits, evidence.alone) == ((every, both), ()), "each of them counts another bucket, too"
    assert [evidence.stands(NOW, NOW + ms) for ms in (36_000, 36_001)] == [True, False], "in an hour that slides"
    assert evidence._replace(since_ms=MIDNIGHT).stands(NOW, NOW + HOUR_MS)
    hour, half = (replace(every, view=View(Selector(), Calendar("hour", zone))) for zone in ("UTC", "Asia/Kolkata"))
    now_ms, trial = NOW + 45 * MINUTE_MS, replace(hour, shadow=True)
    # A limit knows when upstream's hour ends: of several, the last. A trial changes nothing, a named reset counts.
    cases = ([hour, half], None), ([trial], None), ([hour], NOW + 80 * MINUTE_MS)
    heard = [evidence_of(Level("core", 0, 1_000, ms), BOOK, [every, *more], now_ms, now_ms) for more, ms in cases]
    assert [each and (each.until_ms - NOW) // MINUTE_MS for each in heard] == [90, 105, 80]
