"""What upstream's answers say remains is evidence of what others use: `quota.clients.metering`."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from quota.budget import Budget, project_of
from quota.clients.metering import charged_ms, news, observe
from quota.decision import Decision
from quota.rules.entry import others_units
from quota.settings.books import default_limits
from quota.terms.costs import CostBook
from quota.terms.evidence import Level
from quota.terms.limits import HOUR_MS, MINUTE_MS, SECOND_MS, Limit, Selector, Sliding, View
from support.books import parse_book
from support.processes import in_threads
from support.setup import Setup, budget_of

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


@dataclass
class Call:
    """One call of ours: what it really costs, when it was charged, and in which of upstream's periods it counted."""

    decision: Decision
    units: int
    charged_units: int
    counted_in: int | None = None


@dataclass
class Upstream:
    """Counts 1,000 units in each period. By the calendar, or in an hour that the first call begins."""

    skew_ms: int
    calendar: bool
    period: int = 0
    ends_ms: int = 0
    turned_ms: int = 0
    used: Counter[int] = field(default_factory=Counter)

    def count(self, units: int, true_ms: int) -> tuple[int, int, int, int]:
        """The period, what remains in it, its end and the time, by upstream's clock and in whole seconds."""
        now_ms = true_ms + self.skew_ms
        self.turn(now_ms)
        if not self.calendar and not self.ends_ms:
            self.ends_ms = now_ms + HOUR_MS
        self.used[self.period] += units
        left = max(0, 1_000 - self.used[self.period])
        return self.period, left, -(-self.ends_ms // SECOND_MS) * SECOND_MS, now_ms // SECOND_MS * SECOND_MS

    def turn(self, now_ms: int) -> None:
        if self.calendar:
            self.period, self.ends_ms = now_ms // HOUR_MS, (now_ms // HOUR_MS + 1) * HOUR_MS
        elif self.ends_ms and self.ends_ms <= now_ms:
            self.period, self.ends_ms, self.turned_ms = self.period + 1, 0, self.ends_ms


@dataclass
class World:
    """Three processes with clocks of their own, upstream and others that spend there, and what happens next."""

    setup: Setup
    book: CostBook
    rng: random.Random
    upstream: Upstream
    says_reset: bool = True
    calls: list[Call] = field(default_factory=list)
    others: Counter[int] = field(default_factory=Counter)
    budgets: list[Budget] = field(default_factory=list)
    given_back: list[tuple[int, int]] = field(default_factory=list)
    _next: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.budgets = [self.budget(self.rng.randint(-2_000, 2_000)) for _ in range(3)]
        self.onlooker = self.budget(0)

    def budget(self, skew_ms: int) -> Budget:
        project = self.setup.opened(wall=lambda: self.setup.now_ms + skew_ms)
        return Budget(credential="main", book=self.book, limits=default_limits(self.book), project=project)

    def later(self, in_ms: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._next, (self.setup.now_ms + in_ms, next(self._numbers), what))

    def run(self, until_ms: int) -> None:
        while self._next and self._next[0][0] < until_ms:
            self.setup.now_ms, _, what = heapq.heappop(self._next)
            what()
            self.check()

    # -- what happens ------------------------------------------------------------------------------------------------

    def others_spend(self) -> None:
        units = self.rng.choice((1, 3, 8, 40))
        period, *_ = self.upstream.count(units, self.setup.now_ms)
        self.others[period] += units
        self.later(self.rng.randint(1, 300_000), self.others_spend)

    def call(self) -> None:
        self.later(self.rng.choice((50, 400, 3_000, 90_000)), self.call)
        budget = self.rng.choice(self.budgets)
        charged_units = self.rng.choice((1, 2, 12))
        decision = budget.charge("read", units=charged_units)
        if not decision.admitted:
            return
        call = Call(decision, self.rng.randint(1, charged_units), charged_units)
        self.calls.append(call)
        self.later(self.delay_ms(), lambda: self.arrive(budget, call))

    def delay_ms(self) -> int:
        return self.rng.choice((1, 30, 500, 8_000, 120_000))

    def arrive(self, budget: Budget, call: Call) -> None:
        if self.rng.random() < 0.1:  # it never does
            if self.rng.random() < 0.5:
                self.settle(budget, call, 0)
            return
        call.counted_in, left, ends_ms, date_ms = self.upstream.count(call.units, self.setup.now_ms)
        said = left, ends_ms, date_ms
        if self.rng.random() < 0.9:
            self.later(self.delay_ms(), lambda: self.answered(budget, call, *said))

    def settle(self, budget: Budget, call: Call, units: int) -> None:
        self.given_back.append((self.setup.now_ms, call.charged_units - units))
        budget.settle(str(call.decision.id), units)
        call.charged_units = units

    def answered(self, budget: Budget, call: Call, left: int, ends_ms: int, date_ms: int) -> None:
        self.settle(budget, call, call.units)
        now_ms = project_of(budget).now_ms()
        reset_ms = ends_ms - date_ms + now_ms if self.says_reset else None
        level = Level("core", left, 1_000, reset_ms)
        before = self.used()
        heard_ms = max(budget.heard_ms.values(), default=0)
        worth = hear(budget, call.decision, level)
        after = self.used()
        for name, units in before.items():
            assert after[name] >= units, "a header freed units"
        self.check()
        if not worth and now_ms - heard_ms < SECOND_MS:
            return  # the ledger was asked within this second
        self.follows(call, after, 1_000 - left, reset_ms)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def used(self) -> dict[str, int]:
        return {state.name: state.used_units for state in self.onlooker.usage()}

    def follows(self, call: Call, used: dict[str, int], upstream_units: int, reset_ms: int | None) -> None:
        """Our count is not below upstream's by more than 1 percent, but for what has left ours since the call was
        charged: others were hidden by that."""
        since_ms, now_ms = charged_ms(call.decision), self.setup.now_ms
        gone = sum(units for at_ms, units in self.given_back if at_ms >= since_ms)
        for one in self.calls:
            if since_ms - HOUR_MS < charged_ms(one.decision) <= now_ms - HOUR_MS:
                gone += one.charged_units
        since_edge_ms = min(self.setup.now_ms, charged_ms(call.decision)) % HOUR_MS
        same_hour = self.setup.now_ms // HOUR_MS == charged_ms(call.decision) // HOUR_MS == call.counted_in
        near = since_edge_ms < MINUTE_MS + 5_000 or not same_hour
        took_ms = now_ms - since_ms + 4_000  # by clocks that differ
        if (self.upstream.calendar and near) or (reset_ms is not None and reset_ms - now_ms <= took_ms):
            return  # void
        for units in used.values():
            assert units + gone >= upstream_units - 10, "our count does not follow upstream's"

    def check(self) -> None:
        """What counts here for others is no more than they used, in the period of upstream that is ours."""
        now_ms = self.setup.now_ms
        self.upstream.turn(now_ms + self.upstream.skew_ms)
        if self.upstream.calendar:
            hour = now_ms // HOUR_MS
            periods = {hour, self.upstream.period} if self.upstream.period > hour else {hour}
            least_ms = hour * HOUR_MS
        else:
            # A reset is reckoned when the answer comes, and so may lie as much later as that took.
            late = now_ms < self.upstream.turned_ms + 2 * MINUTE_MS + 5 * SECOND_MS
            periods = {self.upstream.period, self.upstream.period - late}
            least_ms = now_ms - HOUR_MS + 1
        most = 0
        for period in periods:
            missed = [c for c in self.calls if c.counted_in == period and charged_ms(c.decision) < least_ms]
            most = max(most, self.others[period] + sum(call.units for call in missed))
        for name, units in others_in(self.onlooker).items():
            assert units <= most, (name, units, most, periods)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["calendar", "calendar without reset", "hour from the first call"])
def test_our_count_follows_and_counts_nothing_twice(setup: Setup, kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    setup.now_ms -= setup.now_ms % HOUR_MS - 52 * MINUTE_MS
    calendar, skew_ms = kind.startswith("calendar"), rng.randint(-3_000, 3_000)
    upstream = Upstream(skew_ms, calendar, ends_ms=setup.now_ms + skew_ms + 8 * MINUTE_MS)
    book = HOURLY if calendar else SLIDING
    world = World(setup, book, rng, upstream, says_reset=not kind.endswith("without reset"))
    world.later(0, world.call)
    world.later(0, world.others_spend)
    world.run(setup.now_ms + 20 * MINUTE_MS)
    assert len(world.calls) > 10
    assert len(world.others) == 2


def made(setup: Setup, book: CostBook = HOURLY, *more: Limit) -> Budget:
    """A budget, as each process has one."""
    return budget_of(
        setup.ledger, *default_limits(book), *more, project=setup.project, book=book, clock=lambda: setup.now_ms
    )


def hear(budget: Budget, decision: Decision, *levels: Level) -> int:
    """What an answer says; how many levels of it were worth a question."""
    project = project_of(budget)
    worth = news(budget, decision, levels, project.now_ms())
    if worth:
        observe(budget, project, decision, [heard.level for heard in worth])
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


def test_a_call_of_two_buckets_gets_evidence_for_each(setup: Setup) -> None:
    book = parse_book(
        """
        api = "example"
        source = "the tests"
        read_on = 2026-11-01
        [buckets.core]
        quota = 1_000
        resets = "1h"
        [buckets.points]
        windows = [{ quota = 900, resets = "1m" }, { quota = 9_000, resets = "1h" }]
        [default]
        get = 1
        other = 1
        [methods]
        read = [{ bucket = "core", units = 1 }, { bucket = "points", units = 5 }]
        """,
        "two",
    )
    budget = made(setup, book)
    decision = budget.charge("read")
    levels = Level("core", 899, 1_000, setup.now_ms + HOUR_MS), Level("points", 795, 900, setup.now_ms + SECOND_MS)
    assert hear(budget, decision, *levels) == 2
    others = others_in(budget)
    assert sorted((state.used_units, others[state.name]) for state in budget.usage()) == [
        (5, 0),
        (101, 100),
        (105, 100),
    ]


def test_each_window_of_a_bucket_is_heard_while_the_other_changes(setup: Setup) -> None:
    budget = made(setup, TWO_WINDOWS)
    for hour, day in ((900, 8_000), (800, 7_000), (700, 5_000)):
        setup.now_ms += SECOND_MS
        decision = budget.charge("read")
        assert hear(budget, decision, Level("core", hour, 1_000, None), Level("core", day, 9_000, None)) == 2
        (hours, days) = (state.used_units for state in budget.usage())
        assert (hours, days) == (1_000 - hour, 9_000 - day)


def test_the_larger_of_two_levels_of_one_window_counts(setup: Setup) -> None:
    budget = made(setup, SLIDING)
    assert hear(budget, budget.charge("read"), Level("core", 900, 1_000), Level("core", 880, 1_000)) == 2
    assert [state.used_units for state in budget.usage()] == [120]


def test_a_level_of_a_bucket_that_the_call_does_not_spend_is_heard(setup: Setup) -> None:
    book = parse_book(
        CORE.format(resets='"1h"').replace("[default]", '[buckets.search]\nquota = 30\nresets = "1m"\n[default]'), "x"
    )
    budget = made(setup, book)
    assert hear(budget, budget.charge("read"), Level("search", 12, 30, None)) == 1
    assert {state.name: state.used_units for state in budget.usage()} == {"hour": 1, "search-minute": 18}
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
    for budget in (made(setup, SLIDING, day), made(setup, TWO_WINDOWS)):
        before = {state.limit_units for state in budget.usage()}
        hear(budget, budget.charge("read"), Level("core", 399, 400, None))
        assert {state.limit_units for state in budget.usage()} == before


def test_the_budget_hears_two_windows_right_after_each_other(setup: Setup) -> None:
    budget = made(setup, TWO_WINDOWS)
    assert hear(budget, budget.charge("read"), Level("core", 900, 1_000, None)) == 1
    assert hear(budget, budget.charge("read"), Level("core", 8_000, 9_000, None)) == 1
    assert [state.used_units for state in budget.usage()] == [101, 1_000]
