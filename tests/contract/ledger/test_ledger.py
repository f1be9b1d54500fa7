"""What every ledger keeps, rule by rule. Time is an argument: nothing here waits."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from quota.budget import Budget
from quota.common.clock import NEVER
from quota.errors import UnknownCharge, UsageError
from quota.ledger.contract import MIN_RETENTION_MS, Exhaustion, read_entries
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.books import BOOK
from support.processes import Children
from support.setup import limit

if TYPE_CHECKING:
    from support.setup import Setup

PACIFIC = Calendar("day", "America/Los_Angeles")


def pacific(units: int) -> Limit:
    return Limit("pacific-day", units, View(Selector(buckets=("units",)), PACIFIC), units, 0)


def at(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type,misc]


# -- windows -----------------------------------------------------------------------------------------------------------

# One limit of 3 units over 1,000 ms; rows of (at, cost) -> (admitted, remaining, retry_at).
EDGE_ROWS = [
    # the window fills
    (0, 1, True, 2, None),
    (10, 1, True, 1, None),
    (999, 1, True, 0, None),
    # full: 1 unit must wait for the first charge, 2 for the second, 3 for the third
    (999, 1, False, 0, 1000),
    (999, 2, False, 0, 1010),
    (999, 3, False, 0, 1999),
    # a charge at t is free at exactly t + window
    (1000, 2, False, 1, 1010),
    (1000, 1, True, 0, None),
    (1009, 1, False, 0, 1010),
    (1010, 1, True, 0, None),
    # idle for longer than the window: everything is free
    (5000, 3, True, 0, None),
]


def test_a_sliding_window_is_exact_to_the_millisecond(setup: Setup) -> None:
    """L5."""
    budget = setup.budget(limit(3, 1_000))
    start = setup.now_ms
    for offset, cost, admitted, remaining, retry_at in EDGE_ROWS:
        setup.now_ms = start + offset
        decision = budget.charge("videos.list", units=cost)
        got = (decision.admitted, decision.remaining_units, decision.retry_at_ms and decision.retry_at_ms - start)
        assert got == (admitted, remaining, retry_at), f"at {offset} for {cost}"


def test_no_burst_around_an_edge_admits_more_than_the_limit_in_any_window(setup: Setup) -> None:
    """Bursts just before and after every edge: a fixed window would admit twice its limit here."""
    budget = setup.budget(limit(20, 1_000))
    start = setup.now_ms
    spent: list[int] = []
    for edge in range(1_000, 6_000, 1_000):
        for offset in (-2, -1, 0, 1, 2):
            setup.now_ms = start + edge + offset
            spent += [setup.now_ms for _ in range(8) if budget.charge("videos.list").admitted]
    assert len(spent) >= 60
    for moment in spent:
        assert sum(moment - 1_000 < other <= moment for other in spent) <= 20


@pytest.mark.parametrize(
    ("midnight", "next_midnight", "hours"),
    [
        (at(2026, 3, 8, 8), at(2026, 3, 9, 7), 23),
        (at(2026, 7, 1, 7), at(2026, 7, 2, 7), 24),
        (at(2026, 11, 1, 7), at(2026, 11, 2, 8), 25),
    ],
)
def test_a_pacific_day_has_23_24_or_25_hours(setup: Setup, midnight: int, next_midnight: int, hours: int) -> None:
    """L5."""
    assert next_midnight - midnight == hours * HOUR_MS
    budget = setup.budget(pacific(100))
    setup.now_ms = midnight - 1
    assert budget.charge("search.list").admitted
    setup.now_ms = midnight
    assert budget.charge("search.list").admitted, "a new day at midnight sharp"
    setup.now_ms = next_midnight - 1
    refused = budget.charge("search.list")
    assert refused.retry_at_ms == next_midnight
    setup.now_ms = next_midnight
    assert budget.charge("search.list").admitted


def test_the_sliding_day_alone_would_overspend_the_day_of_25_hours(setup: Setup) -> None:
    """Both default limits together hold 100 in the long Pacific day; the sliding one alone admits 200."""
    midnight = at(2026, 11, 1, 7)
    both, alone = setup.budget(limit(100), pacific(100)), limit(100)
    admitted = 0
    for moment in (midnight, midnight + 24 * HOUR_MS):
        setup.now_ms = moment
        admitted += both.charge("search.list").admitted
    assert admitted == 1
    setup.project += "-alone"
    sliding_only = setup.budget(alone)
    for moment in (midnight, midnight + 24 * HOUR_MS):
        setup.now_ms = moment
        assert sliding_only.charge("search.list").admitted


def test_the_latest_of_all_refusing_limits_says_when(setup: Setup) -> None:
    budget = setup.budget(limit(100), limit(100, HOUR_MS, name="hour"))
    start = setup.now_ms
    budget.charge("search.list")
    refused = budget.charge("search.list")
    assert (refused.refused_by, refused.retry_at_ms) == ("day", start + DAY_MS)


def test_retry_at_looks_past_a_thousand_small_charges(setup: Setup) -> None:
    """The walk reads the log in chunks; charges given back free nothing."""
    budget = setup.budget(limit(3_000))
    ids = []
    for _ in range(3_000):
        setup.now_ms += 1
        ids.append(budget.charge("videos.list").id)
    for charge_id in ids[:10]:
        assert charge_id is not None
        budget.refund(charge_id)
    want = int(str(ids[2_599 + 10]).split("-")[0]) + DAY_MS
    assert budget.charge("videos.list", units=2_610).retry_at_ms == want


# -- who counts what ---------------------------------------------------------------------------------------------------


def test_callers_with_different_limits_share_one_truth(setup: Setup) -> None:
    """L2, L3. A limit raised in mid-day admits exactly the difference; a new limit is computed from the log."""
    old, new = setup.budget(limit(500)), setup.budget(limit(600))
    for _ in range(5):
        assert old.charge("search.list").admitted
    assert not old.charge("search.list").admitted
    assert new.charge("search.list").admitted
    assert not new.charge("search.list").admitted
    late = setup.budget(limit(700, name="renamed"), limit(650, 2 * HOUR_MS, name="new window"))
    assert [state.used_units for state in late.usage()] == [600, 600]


def test_limits_select_by_bucket_method_and_job_and_count_units_or_calls(setup: Setup) -> None:
    """L2."""
    budget = setup.budget(
        limit(10_000),
        limit(10_000, name="search bucket", buckets=("search",)),
        limit(10_000, name="search calls", methods=("search.list",), count="calls"),
        limit(10_000, name="job", jobs=("nightly, a|b*%",)),
        limit(10_000, name="everything", buckets=()),
    )
    budget.charge("search.list")
    budget.charge("search.list", job="nightly, a|b*%")
    budget.charge("suggest.list", job="nightly, a|b*%")
    budget.charge("videos.list", job="nightly")
    fresh = setup.budget(*budget.limits)
    assert [s.used_units for s in fresh.usage()] == [201, 1, 2, 100, 202]


def test_a_refunded_call_is_no_call(setup: Setup) -> None:
    """L2, L15."""
    budget = setup.budget(limit(2, name="calls", count="calls"))
    first, second = budget.charge("search.list").id, budget.charge("search.list").id
    assert first is not None
    assert second is not None
    assert not budget.charge("videos.list").admitted
    budget.settle(second, 7)
    assert budget.usage()[0].used_units == 2, "a call that cost less is still a call"
    budget.refund(first)
    assert budget.usage()[0].used_units == 1


def test_what_a_job_leaves_for_others_lowers_its_limit_only(setup: Setup) -> None:
    budget = setup.budget(limit(300), leave={"backfill": {"day": 200}})
    assert budget.charge("search.list", job="backfill").admitted
    refused = budget.charge("search.list", job="backfill")
    assert (refused.reason, refused.limits[0].limit_units) == ("leave", 100)
    assert budget.charge("search.list", job="main").admitted
    assert budget.charge("search.list", job="main").admitted
    assert budget.charge("search.list", job="main").reason == "limit"


def test_the_remaining_units_are_those_of_the_tightest_limit(setup: Setup) -> None:
    budget = setup.budget(limit(1_000), limit(5, name="calls", count="calls"))
    decision = budget.charge("search.list")
    assert decision.remaining_units == 4, "4 more calls fit there, 9 in the other"


def test_projects_do_not_see_each_other(setup: Setup) -> None:
    assert setup.budget(limit(100)).charge("search.list").admitted
    setup.project += "-other"
    assert setup.budget(limit(100)).charge("search.list").admitted


# -- corrections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("charge_id", ["", "x", "1-", "-1", "12", "1-1", "\u0661-\u0662", "9" * 40 + "-1", "1;drop-0"])
def test_an_unknown_id_is_said_so(setup: Setup, charge_id: str) -> None:
    with pytest.raises(UnknownCharge):
        setup.budget().refund(charge_id)
    assert setup.ledger.settle(setup.project, charge_id, 0, ()) is None


def test_an_id_is_that_of_a_charge_to_the_letter(setup: Setup) -> None:
    charge_id = setup.budget().charge("videos.list").id
    for odd in (f"0{charge_id}", f"{charge_id} ", str(charge_id).replace("-", "-0")):
        assert setup.ledger.settle(setup.project, odd, 0, ()) is None
    assert setup.budget().usage()[0].used_units == 1


def test_a_charge_settled_above_the_limit_is_not_refused(setup: Setup) -> None:
    """L15."""
    budget = setup.budget(limit(100))
    charge_id = budget.charge("videos.list").id
    assert charge_id is not None
    assert budget.settle(charge_id, 5_000).units == 1
    state = budget.usage()[0]
    assert (state.used_units, state.remaining_units) == (5_000, 0)
    with pytest.raises(UsageError):
        budget.settle(charge_id, -1)


@pytest.mark.topology
def test_a_correction_reaches_limits_that_its_caller_does_not_know(setup: Setup) -> None:
    """L15."""
    one, other = setup.budget(limit(500)), setup.budget(limit(400, HOUR_MS))
    charge_id = one.charge("search.list").id
    assert charge_id is not None
    assert other.usage()[0].used_units == 100
    one.settle(charge_id, 10)
    assert other.usage()[0].used_units == 10
    assert one.usage()[0].used_units == 10


def test_entries_carry_who_spent_what(setup: Setup) -> None:
    """L1."""
    budget = setup.budget(limit(500))
    first = budget.charge("search.list", job="backfill", region="DE").id
    setup.now_ms += 5
    budget.charge("suggest.list", job="trending", region="IN")
    assert first is not None
    budget.settle(first, 40)
    entries = list(read_entries(setup.ledger, setup.project, 0, NEVER))
    assert [(e.units, e.charged_units, e.bucket, e.method, e.job, e.region) for e in entries] == [
        (40, 100, "units", "search.list", "backfill", "DE"),
        (1, 1, "search", "suggest.list", "trending", "IN"),
    ]
    assert all(e.idempotency_key.startswith(budget._account.attempt_keys.run) for e in entries)


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_does_not_forget_and_does_not_double(setup: Setup) -> None:
    """L6."""
    budget = setup.budget(limit(300))
    start = setup.now_ms
    assert budget.charge("search.list").admitted
    setup.now_ms = start + 30 * HOUR_MS
    assert budget.charge("search.list").admitted, "the first has left the window, and the view has dropped it"
    setup.now_ms = start + HOUR_MS
    assert [s.used_units for s in budget.usage()] == [200], "the first counts again"
    assert budget.charge("search.list").admitted
    assert not budget.charge("search.list").admitted


def test_ids_never_go_back(setup: Setup) -> None:
    """L10."""
    budget = setup.budget(limit(300))
    first = budget.charge("videos.list").id
    setup.now_ms -= HOUR_MS
    second = budget.charge("videos.list").id
    assert first is not None
    assert second == f"{first.split('-')[0]}-1"


def test_a_calendar_refusal_after_the_clock_went_back_names_the_edge_that_frees(setup: Setup) -> None:
    """Charges dated behind the next midnight still count after it: the edge after that frees them."""
    budget = setup.budget(pacific(100))
    setup.now_ms = at(2026, 7, 3, 12)
    budget.charge("search.list")
    setup.now_ms = at(2026, 7, 2, 12)
    assert budget.charge("search.list").retry_at_ms == at(2026, 7, 4, 7)


@pytest.mark.parametrize("ahead_ms", [5_001, HOUR_MS, DAY_MS])
def test_a_caller_far_ahead_of_the_ledger_is_refused_for_its_clock(setup: Setup, ahead_ms: int) -> None:
    """L11."""
    budget = Budget(
        credential="main",
        project=setup.project,
        book=BOOK,
        limits=(limit(500),),
        ledger=setup.ledger,
        clock=lambda: setup.now_ms + ahead_ms,
    )
    decision = budget.charge("videos.list")
    assert (decision.admitted, decision.reason) == (False, "clock")
    assert setup.budget(limit(500)).usage()[0].used_units == 0


def test_a_caller_within_five_seconds_is_served(setup: Setup) -> None:
    """L11."""
    now = setup.now_ms
    budget = Budget(
        credential="main",
        project=setup.project,
        book=BOOK,
        limits=(limit(100), pacific(100)),
        ledger=setup.ledger,
        clock=lambda: now + 5_000,
    )
    assert budget.charge("search.list").admitted


def test_a_ledger_clock_that_runs_ahead_frees_nothing(setup: Setup) -> None:
    """L11. Charges expire by the earlier of the two clocks, so one of them alone mints no budget."""
    caller_ms = setup.now_ms
    budget = Budget(
        credential="main",
        project=setup.project,
        book=BOOK,
        limits=(limit(100),),
        ledger=setup.ledger,
        clock=lambda: caller_ms,
    )
    assert budget.charge("search.list").admitted
    setup.now_ms += 30 * HOUR_MS
    assert not budget.charge("search.list").admitted
    caller_ms += 30 * HOUR_MS
    assert budget.charge("search.list").admitted


# -- exhaustion --------------------------------------------------------------------------------------------------------


def exhaustion(setup: Setup, bucket: str = "units", until_ms: int | None = None) -> Exhaustion:
    until_ms = setup.now_ms + HOUR_MS if until_ms is None else until_ms
    return Exhaustion(bucket, setup.now_ms, until_ms, "quotaExceeded", "a test")


@pytest.mark.topology
def test_an_exhausted_bucket_closes_for_everybody_and_only_it(setup: Setup) -> None:
    """L9, L20."""
    setup.ledger.exhaust(setup.project, exhaustion(setup))
    budget = setup.budget(limit(500), limit(50, name="search bucket", buckets=("search",)))
    refused = budget.charge("videos.list")
    assert (refused.reason, refused.refused_by) == ("exhausted", "units")
    assert refused.retry_at_ms == setup.now_ms + HOUR_MS
    assert budget.charge("suggest.list").admitted, "another bucket"
    setup.now_ms += HOUR_MS - 1
    assert not budget.charge("videos.list").admitted
    setup.now_ms += 1
    assert budget.charge("videos.list").admitted


def test_an_upstream_pool_closes_its_methods_whatever_bucket_prices_them(setup: Setup) -> None:
    setup.ledger.exhaust(setup.project, exhaustion(setup, "search"))
    budget = setup.budget(limit(500))
    assert budget.charge("search.list").refused_by == "search"
    assert budget.charge("videos.list").admitted


@pytest.mark.parametrize("buckets", [("units", "search"), ("search", "units")])
def test_of_two_that_close_a_call_as_long_both_ledgers_name_the_same(setup: Setup, buckets: tuple[str, ...]) -> None:
    for bucket in buckets:
        setup.ledger.exhaust(setup.project, exhaustion(setup, bucket))
    budget = setup.budget(limit(500))
    assert budget.charge("search.list").refused_by == budget.book.closed_by("search.list", "units")[0]


def test_a_repeat_never_extends_an_exhaustion(setup: Setup) -> None:
    """L20."""
    first = setup.ledger.exhaust(setup.project, exhaustion(setup))
    later = exhaustion(setup, until_ms=setup.now_ms + DAY_MS)
    assert setup.ledger.exhaust(setup.project, later) == first
    assert list(setup.ledger.notes(setup.project).exhaustions) == [first]


def test_reopening_lifts_it_and_keeps_why(setup: Setup) -> None:
    stood = setup.ledger.exhaust(setup.project, exhaustion(setup))
    setup.now_ms += 5
    assert setup.ledger.reopen(setup.project, "units", 'raised to "50,000"\né 東京')
    assert not setup.ledger.reopen(setup.project, "units", "again")
    assert setup.budget().charge("videos.list").admitted
    lifted = stood._replace(reopened_ms=setup.now_ms, reopened_because='raised to "50,000"\né 東京')
    assert list(setup.ledger.notes(setup.project).exhaustions) == [lifted]


def test_what_upstream_said_before_the_reopening_does_not_close_it_again(setup: Setup) -> None:
    """L20. The answer to a call that left before may come after; one to a call that left later is news."""
    before = exhaustion(setup)
    setup.ledger.exhaust(setup.project, before)
    setup.now_ms += 5
    late = exhaustion(setup)
    setup.now_ms += 5
    setup.ledger.reopen(setup.project, "units", "raised")
    reopened_ms = setup.now_ms
    (lifted,) = setup.ledger.notes(setup.project).exhaustions
    setup.now_ms += 5
    for said in (before, late):
        assert setup.ledger.exhaust(setup.project, said) == lifted
    assert setup.budget().charge("videos.list").admitted
    news = exhaustion(setup)._replace(since_ms=reopened_ms)
    assert setup.ledger.exhaust(setup.project, news) == news, "in doubt it is"
    assert list(setup.ledger.notes(setup.project).exhaustions) == [news], "and the reason did not hold"
    assert not setup.budget().charge("videos.list").admitted
    assert setup.ledger.reopen(setup.project, "units", "once more")


def test_a_reopening_in_the_clocks_future_or_of_a_day_that_is_over_holds_nothing_open(setup: Setup) -> None:
    setup.ledger.exhaust(setup.project, exhaustion(setup))
    setup.ledger.reopen(setup.project, "units", "raised")
    setup.now_ms -= 3 * HOUR_MS
    news = exhaustion(setup)
    assert setup.ledger.exhaust(setup.project, news) == news
    setup.now_ms += 5
    setup.ledger.reopen(setup.project, "units", "raised")
    earlier = exhaustion(setup)._replace(since_ms=setup.now_ms - 1, until_ms=setup.now_ms + DAY_MS)
    setup.now_ms += HOUR_MS
    assert setup.ledger.exhaust(setup.project, earlier) == earlier


def test_a_project_that_gets_nothing_is_told_so_without_a_time(setup: Setup) -> None:
    setup.ledger.exhaust(setup.project, exhaustion(setup, until_ms=NEVER))
    setup.now_ms += 40 * DAY_MS
    refused = setup.budget().charge("videos.list")
    assert (refused.reason, refused.retry_at_ms) == ("closed", None)


def test_each_machine_returns_after_a_jitter_of_its_own(setup: Setup) -> None:
    setup.ledger.exhaust(setup.project, exhaustion(setup))
    late = setup.budget(limit(500), jitter_ms=30_000)
    setup.now_ms += HOUR_MS
    assert setup.budget().charge("videos.list").admitted
    refused = late.charge("videos.list")
    assert refused.retry_at_ms == setup.now_ms + 30_000
    setup.now_ms += 30_000
    assert late.charge("videos.list").admitted


# -- growth ------------------------------------------------------------------------------------------------------------


def test_the_log_keeps_what_the_longest_window_needs_and_forgets_the_rest(setup: Setup) -> None:
    """L12, L13."""
    budget = setup.budget(limit(10**6))
    for _ in range(120):
        setup.now_ms += HOUR_MS
        charge_id = budget.charge("videos.list").id
        assert charge_id is not None
        budget.settle(charge_id, 2)
    entries = list(read_entries(setup.ledger, setup.project, 0, NEVER))
    assert MIN_RETENTION_MS <= setup.now_ms - entries[0].ms + HOUR_MS <= MIN_RETENTION_MS + 2 * HOUR_MS


def test_a_short_windows_caller_does_not_shorten_the_log_of_a_long_one(setup: Setup) -> None:
    """L12."""
    month = setup.budget(limit(10**6, 30 * DAY_MS))
    day = setup.budget(limit(10**6))
    month.charge("search.list")
    for _ in range(20):
        setup.now_ms += DAY_MS
        day.charge("videos.list")
    assert month.usage()[0].used_units == 120


def test_a_view_that_rests_while_the_log_is_trimmed_still_counts_right(setup: Setup) -> None:
    """L13. What it had counted is gone from the log, so it cannot be taken off entry by entry any more."""
    month, day = setup.budget(limit(10**6, 30 * DAY_MS)), setup.budget(limit(10**6))
    for budget, days in ((month, 30), (day, 20)):
        for _ in range(days):
            setup.now_ms += DAY_MS
            budget.charge("videos.list")
    assert month.usage()[0].used_units == 30


# -- contention --------------------------------------------------------------------------------------------------------


def _spend_all(url: str, project: str, seed: int) -> tuple[int, int]:
    """Charge mixed costs until even one unit is refused: what was admitted, and spurious refusals."""
    ledger = open_ledger(url)
    budget = Budget(credential="main", project=project, book=BOOK, limits=(limit(500),), ledger=ledger)
    costs = random.Random(seed)
    admitted = spurious = 0
    while True:
        units = costs.choice((1, 1, 3, 7, 20))
        decision = budget.charge("videos.list", units=units)
        if decision.admitted:
            admitted += units
            continue
        spurious += decision.limits[0].used_units + units <= 500
        if units == 1:
            break
    ledger.close()
    return admitted, spurious


def test_eight_processes_admit_exactly_the_limit_and_refuse_nothing_that_fits(ledger_url: str) -> None:
    """L4."""
    outcomes = Children(_spend_all, *[(ledger_url, "race", n) for n in range(8)], start="anew").answers()
    assert sum(admitted for admitted, _ in outcomes) == 500
    assert sum(spurious for _, spurious in outcomes) == 0


def test_one_budget_serves_eight_threads(setup: Setup) -> None:
    budget = setup.budget(limit(500))
    admitted: list[str | None] = []

    def work() -> None:
        while (decision := budget.charge("videos.list")).admitted:
            admitted.append(decision.id)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == len(set(admitted)) == 500


def test_a_view_over_thousands_of_foreign_charges_is_exact(setup: Setup) -> None:
    """L7, L8. More entries than one script call may touch: it calls again until it has seen all, coming and going."""
    writer = setup.budget(limit(10**6))
    start = setup.now_ms
    for number in range(3_300):
        setup.now_ms = start + number
        writer.charge("videos.list")
    reader = setup.budget(limit(3_299, name="late", methods=("videos.list",)))
    assert not reader.charge("videos.list").admitted
    assert reader.usage()[0].used_units == 3_300
    setup.now_ms = start + DAY_MS + 3_200
    assert reader.usage()[0].used_units == 99
    assert reader.charge("videos.list").remaining_units == 3_199


def test_a_sliding_window_and_a_minute_calendar_agree_with_the_clock(setup: Setup) -> None:
    hour = Limit("hour", 100, View(Selector(buckets=("units",)), Calendar("hour", "Asia/Kolkata")), 100, 0)
    budget = setup.budget(hour, Limit("minute", 100, View(Selector(), Sliding(MINUTE_MS)), 100, 0))
    setup.now_ms = at(2026, 7, 1, 6, 29, 59) + 999
    assert budget.charge("search.list").admitted
    setup.now_ms += 1
    refused = budget.charge("search.list")
    assert (refused.refused_by, refused.retry_at_ms) == ("minute", at(2026, 7, 1, 6, 30, 59) + 999)
