"""What upstream's answers say remains is evidence of what others use: `quota.deciding.levels`."""

from __future__ import annotations

from quota.budget import Budget, project_of
from quota.decision import Decision
from quota.rules.entry import others_units
from quota.rules.evidence import Level
from quota.settings.books import default_limits
from quota.terms.costs import CostBook
from quota.terms.limits import HOUR_MS, MINUTE_MS, SECOND_MS, Limit, Selector, Sliding, View
from support.books import parse_book
from support.processes import in_threads
from support.setup import Setup

CORE = """
api = "example"
source = "the tests"
read_on = 2026-11-01
[buckets.core]
quota = 1_000
resets = {resets}
[default]
get = 1
other = 1
[methods]
read = 1
"""

HOURLY = parse_book(CORE.format(resets='{ calendar = "hour", zone = "UTC" }'), "hourly")
SLIDING = parse_book(CORE.format(resets='"1h"'), "sliding")
WINDOWS = '[{ quota = 1_000, resets = "1h" }, { quota = 9_000, resets = "24h" }]'
TWO_WINDOWS = parse_book(CORE.replace("quota = 1_000\nresets = {resets}", f"windows = {WINDOWS}"), "two")


def made(setup: Setup, book: CostBook = HOURLY, *more: Limit) -> Budget:
    return setup.budget(*default_limits(book), *more, book=book)


def hear(budget: Budget, decision: Decision, *levels: Level) -> int:
    """Hear what an answer says. Returns how many of its levels were worth a question."""
    worth = budget.levels.news(decision, levels, project_of(budget).now_ms())
    if worth:
        budget.levels.observe(worth)
    return len(worth)


def others_in(budget: Budget) -> dict[str, int]:
    """What only upstream has counted, by limit."""
    budget.usage()
    return {limit.name: others_units(project_of(budget).others(limit.view)) for limit in budget.limits}


def test_a_level_that_many_processes_report_counts_once(setup: Setup) -> None:
    setup.now_ms -= setup.now_ms % HOUR_MS - 30 * MINUTE_MS
    budgets = [made(setup) for _ in range(8)]
    decisions = [budget.charge("read", units=10) for budget in budgets]

    def hears(budget: Budget, decision: Decision) -> None:
        hear(budget, decision, Level("core", 620, 1_000, setup.now_ms + MINUTE_MS))

    in_threads(hears, *zip(budgets, decisions, strict=True))
    assert {*others_in(budgets[0]).values()} == {300}
    setup.now_ms += MINUTE_MS
    assert {*others_in(budgets[0]).values()} == {0}, "upstream has reset"


def test_a_process_asks_once_a_second_and_only_for_more_than_one_percent(setup: Setup) -> None:
    setup.now_ms -= setup.now_ms % HOUR_MS - 30 * MINUTE_MS
    budget = made(setup)
    reset_ms = setup.now_ms + MINUTE_MS

    def call(left: int) -> int:
        return hear(budget, budget.charge("read"), Level("core", left, 1_000, reset_ms))

    assert call(999) == 0, "all of it was ours"
    assert call(989) == 0, "9 of others are less than 1 percent of 950"
    assert call(987) == 1, "10 are more"
    assert {*others_in(budget).values()} == {10}
    assert call(800) == 0, "told within this second"
    assert call(0) == 1, "but not that nothing remains"
    setup.now_ms += SECOND_MS
    assert call(800) == 0, "less than was told"
    assert {*others_in(budget).values()} == {995}, "what nothing remains of counts as used up, and is not freed"


def test_each_window_of_a_bucket_is_heard_while_the_other_changes(setup: Setup) -> None:
    budget = made(setup, TWO_WINDOWS)
    for hour, day in ((900, 8_000), (800, 7_000), (700, 5_000)):
        setup.now_ms += SECOND_MS
        decision = budget.charge("read")
        assert hear(budget, decision, Level("core", hour, 1_000, None), Level("core", day, 9_000, None)) == 2
        (hours, days) = (state.used_units for state in budget.usage())
        assert (hours, days) == (1_000 - hour, 9_000 - day)


def test_a_level_is_heard_of_each_bucket_also_of_one_that_the_call_does_not_spend(setup: Setup) -> None:
    book = parse_book(
        CORE.format(resets='"1h"').replace("[default]", '[buckets.search]\nquota = 30\nresets = "1m"\n[default]'), "x"
    )
    budget = made(setup, book)
    assert hear(budget, budget.charge("read"), Level("search", 12, 30, None), Level("core", 899, 1_000, None)) == 2
    assert {state.name: state.used_units for state in budget.usage()} == {"hour": 101, "search-minute": 18}
    assert hear(budget, budget.charge("read"), Level("search", 11, 30, None)) == 0, "told within this second"


def test_a_smaller_limit_of_an_answer_lowers_ours_until_another_answer(setup: Setup) -> None:
    budget, other = made(setup), made(setup)

    def held(limit_units: int | None) -> int:
        """What every process is held to, once an answer has said this."""
        setup.now_ms += SECOND_MS
        hear(budget, budget.charge("read"), Level("core", (limit_units or 1_000) - 1, limit_units, None))
        (enforced,) = {state.limit_units for state in other.usage()}
        return enforced

    setup.now_ms -= setup.now_ms % HOUR_MS - 30 * MINUTE_MS
    assert held(1_000) == 950
    assert held(400) == 350
    assert {*others_in(other).values()} == {0}, "upstream grants less: what it has counted is no more for that"
    assert held(None) == 350, "it stands"
    assert held(700) == 650
    assert held(5_000) == 950, "none is raised"
    assert held(400) == 350
    for absurd in (50, 1):  # no more than what the limit leaves unspent
        assert held(absurd) == 350
    setup.now_ms += 24 * HOUR_MS
    assert {state.limit_units for state in other.usage()} == {950}, "it is old"


def test_a_grant_per_hour_changes_no_limit_of_a_day(setup: Setup) -> None:
    day = Limit("long", 9_000, View(Selector(buckets=("core",)), Sliding(24 * HOUR_MS)), 9_000, 0)
    for left, budget in ((399, made(setup, SLIDING, day)), (299, made(setup, TWO_WINDOWS))):
        before = {state.limit_units for state in budget.usage()}
        hear(budget, budget.charge("read"), Level("core", left, 400, None))
        assert {state.limit_units for state in budget.usage()} == before
        assert budget.usage()[0].used_units == 1_000 - left, "upstream says what remains"
