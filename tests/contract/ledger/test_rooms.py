"""When a limit that refused has room again, as the ledger says it with the refusal.

Redis says it where no more than 250 charges must leave; else the log is read for it, as `retry_at` does for SQLite. The
former is held against the latter, decision by decision.
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import redis

from contract.ledger.test_charge_script import ALL, CORRECTIONS, LOG, MIN_RETENTION_MS, NOW, STATE, Scripts
from quota.deciding.outlook import ask
from quota.deciding.retry_at import retry_at
from quota.ledger.contract import read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.redis_ledger import RedisLedger
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Limit, Selector, Sliding, View
from support.proxy import Proxy
from support.servers import immortal
from support.setup import NOW_MS, Setup, limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.budget import Budget
    from support.servers import RedisServer

SEEDS = int(os.environ.get("QUOTA_TEST_SEEDS", "2"))


def the_slow_way(budget: Budget, method: str, units: int, job: str) -> int | None:
    """`retry_at` of such a call, from the log alone; None where it would be admitted."""
    asked = ask(budget._account, method, units, job)
    if asked.decision.reason not in ("limit", "leave"):
        return None
    occupancies = [one._replace(leaving_ms=None) for one in asked.occupancies]
    log = partial(read_entries, budget.ledger, budget.project)
    return retry_at(occupancies, asked.clocks, log, asked.clocks.now_ms)[0]


def random_limits(rng: random.Random) -> list[Limit]:
    limits = []
    for number in range(rng.choice((1, 1, 2, 3, 5))):
        selector = Selector(
            buckets=rng.choice(((), ("units",), ("units", "search"))),
            methods=rng.choice(((), (), ("search.list",))),
            jobs=rng.choice(((), (), ("nightly",))),
            count=rng.choice(("units", "units", "calls")),
        )
        window = rng.choice((Sliding(HOUR_MS), Sliding(HOUR_MS), Sliding(3 * HOUR_MS), Calendar("hour", "UTC")))
        units = rng.randrange(100, 500) if selector.count == "units" else rng.randrange(2, 60)
        limits.append(Limit(f"l{number}", units, View(selector, window), units, 0))
    return limits


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_refusal_says_what_the_whole_log_says(ledger_url: str, seed: int) -> None:
    """L9, L15. Two callers with limits of their own, charges that nobody compares, corrections, and a clock that jumps,
    so that the log is trimmed. Some of what counts is unlogged (L17)."""
    rng = random.Random(seed)
    setup = Setup.open(ledger_url)
    leave = {"nightly": {"l0": rng.randrange(50)}}
    budgets = [setup.budget(*random_limits(rng), leave=leave) for _ in range(2)]
    refused = 0
    for number in range(400):
        choice = rng.random()
        method, job = rng.choice(("search.list", "videos.list")), rng.choice(("", "nightly"))
        if choice < 0.04:
            setup.now_ms += rng.choice((-30 * MINUTE_MS, HOUR_MS // 2, 50 * HOUR_MS, HOUR_MS))
        elif choice < 0.10:
            charges = [(number * 100 + n, Charge(rng.choice((1, 1, 9)), "units", method, job, "", f"r{number}-{n}"))
                       for n in range(1, rng.choice((2, 8, 90)))]  # fmt: skip
            setup.ledger.repay(setup.project, "m", charges)
        elif choice < 0.13:
            view = rng.choice(rng.choice(budgets).limits).view
            times = sorted(setup.now_ms + rng.randrange(1, HOUR_MS) for _ in range(rng.randrange(1, 9)))
            expiries = tuple((rng.randrange(1, 90), at_ms) for at_ms in times)
            usage = UnloggedUsage(view.name, f"e{number}", expiries, (setup.now_ms, 0))
            setup.ledger.add_unlogged(setup.project, f"n{number}", [usage])
        elif choice < 0.20:
            entries = setup.ledger.read(setup.project, (setup.now_ms - 2 * HOUR_MS, 0), setup.now_ms, 1_000)
            for entry in rng.sample(list(entries), min(2, len(entries))):
                units = max(0, entry.units + rng.choice((-1, 1, -50)))
                rng.choice(budgets).settle(entry.id, units)
        setup.now_ms += rng.choice((0, 0, 1, 1_000, 20_000))
        budget, units = rng.choice(budgets), rng.choice((1, 2, 40, 90))
        if any(
            x.view.selector.cost(units) > x.limit_units - leave[job].get(x.name, 0) if job else 0 for x in budget.limits
        ):
            continue
        expected = the_slow_way(budget, method, units, job) if rng.random() < 0.5 else -1
        decide = budget.charge if rng.random() < 0.7 else budget.peek
        decision = decide(method, units=units, job=job)
        if decision.admitted:
            assert expected in (None, -1)
            continue
        if expected == -1:  # it was not asked before: what the ledger kept is not newer than this
            expected = the_slow_way(budget, method, units, job)
        assert decision.retry_at_ms == expected, f"decision {number} of seed {seed}"
        refused += 1
    assert refused > 60
    setup.ledger.close()


def full(setup: Setup, charges: int, units: int = 1, *, step_ms: int = 1_000) -> Budget:
    """A day's limit that is full."""
    budget = setup.budget(limit(charges * units))
    for _ in range(charges):
        assert budget.charge("videos.list", units=units).admitted
        setup.now_ms += step_ms
    return budget


def test_corrections_that_cancel_each_other_move_it(setup: Setup) -> None:
    """L15. The sum is as before, and the charge that must leave is another."""
    budget = full(setup, 10, 10)
    assert budget.charge("videos.list", units=10).retry_at_ms == NOW_MS + DAY_MS
    budget.settle(f"{NOW_MS}-0", 9)
    budget.settle(f"{NOW_MS + 1_000}-0", 11)
    assert budget.charge("videos.list", units=10).retry_at_ms == NOW_MS + DAY_MS + 1_000
    budget.settle(f"{NOW_MS}-0", 20)
    budget.settle(f"{NOW_MS + 1_000}-0", 0)
    assert budget.charge("videos.list", units=20).retry_at_ms == NOW_MS + DAY_MS
    assert budget.charge("videos.list", units=10).retry_at_ms == NOW_MS + DAY_MS


def test_corrections_by_another_process_move_it(setup: Setup, ledger_url: str) -> None:
    budget = full(setup, 10, 10)
    for _ in range(2):
        assert budget.charge("videos.list", units=10).retry_at_ms == NOW_MS + DAY_MS
    other = open_ledger(ledger_url, clock=lambda: setup.now_ms)
    other.settle(setup.project, f"{NOW_MS}-0", 9, [budget.limits[0].view])
    other.settle(setup.project, f"{NOW_MS + 1_000}-0", 11, [budget.limits[0].view])
    other.close()
    for _ in range(2):
        assert budget.charge("videos.list", units=10).retry_at_ms == NOW_MS + DAY_MS + 1_000


def test_charges_of_others_move_it_on(setup: Setup) -> None:
    """Some of them count in the limit, and some do not."""
    budget, others = full(setup, 10, 10), setup.budget(limit(10**6, jobs=("other",)))
    for number, units in enumerate((5, 5, 20, 1)):
        assert others.charge("videos.list", units=units, job="other").admitted
        due = (0, 1, 3, 3)[number]  # of the ten, so many must leave before the one that lets 5 more in
        assert budget.charge("videos.list", units=5).retry_at_ms == NOW_MS + DAY_MS + due * 1_000


def test_a_day_that_another_day_has_pushed_out_is_not_looked_at(setup: Setup) -> None:
    budget = full(setup, 5, 10)
    assert budget.charge("videos.list", units=20).retry_at_ms == NOW_MS + DAY_MS + 1_000
    setup.now_ms += 2 * DAY_MS
    began_ms = setup.now_ms
    for _ in range(5):
        assert budget.charge("videos.list", units=10).admitted
        setup.now_ms += 1_000
    assert budget.charge("videos.list", units=20).retry_at_ms == began_ms + DAY_MS + 1_000


def test_what_is_unlogged_expires_among_the_charges(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """L17. Of Redis the log is not read for it."""
    if isinstance(setup.ledger, RedisLedger):
        monkeypatch.setattr("quota.deciding.account.COUNT_WITHIN_S", -1)
    budget = full(setup, 10, 10)
    view, day_later_ms = budget.limits[0].view.name, NOW_MS + DAY_MS
    expiries = ((5, day_later_ms - 60_000), (20, day_later_ms + 2_500), (1, day_later_ms + 20_000))
    setup.ledger.add_unlogged(setup.project, "n", [UnloggedUsage(view, "e", expiries, (setup.now_ms, 0))])
    for _ in range(2):
        for units, seconds in ((9, 2), (10, 2.5), (29, 2.5), (30, 3), (39, 3), (40, 4), (99, 9), (100, 20)):
            decision = budget.charge("videos.list", units=units)
            assert (decision.reason, decision.retry_at_ms) == ("limit", day_later_ms + seconds * 1_000), units
    setup.now_ms = day_later_ms + 2_499
    refused = budget.charge("videos.list", units=20)
    assert (refused.admitted, refused.retry_at_ms) == (False, setup.now_ms + 1)
    setup.now_ms += 1
    assert budget.charge("videos.list", units=20).admitted


# -- Redis -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripts(redis_server: RedisServer) -> Iterator[Scripts]:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        yield Scripts(client)
        assert immortal(client) == [], "keys without a lifetime"


def test_it_takes_no_trip_of_its_own(redis_server: RedisServer) -> None:
    """Three limits, a call of 100 units, and a window full of single ones: one call of one script. Where more must
    leave, the log is read for it."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    with Proxy(redis_server.port) as proxy:
        setup = Setup.open(proxy.url)
        charges = [Charge(1, "units", "videos.list", "", "", f"k{n}") for n in range(2_000)]
        for first in range(0, 2_000, 100):
            numbered = [(first + n + 1, charge) for n, charge in enumerate(charges[first : first + 100])]
            setup.ledger.repay(setup.project, "m", numbered)
            setup.now_ms += 1_000
        search = Selector(buckets=("units",), methods=("videos.list",))
        pacific = Limit("pacific", 2_000, View(search, Calendar("day", "America/Los_Angeles")), 2_000, 0)
        budget = setup.budget(limit(2_000), pacific, limit(2_000, 2 * DAY_MS, name="two"))
        budget.usage()
        for _ in range(3):
            before = proxy.requests
            decision = budget.charge("videos.list", units=100)
            assert (decision.reason, decision.retry_at_ms) == ("limit", NOW_MS + 2 * DAY_MS)
            assert proxy.requests == before + 1
        before = proxy.requests
        assert budget.charge("videos.list", units=1_600).retry_at_ms == NOW_MS + 2 * DAY_MS + 15_000
        assert proxy.requests == before + 21, "2,000 entries for each of two windows"
        setup.ledger.close()


def test_a_refusal_stands_where_the_server_goes_away_before_all_is_read(redis_server: RedisServer) -> None:
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    with Proxy(redis_server.port) as proxy:
        setup = Setup.open(proxy.url)
        budget = full(setup, 1_500, step_ms=1)
        proxy.pass_next()
        proxy.fail("drop-request", times=4)
        decision = budget.charge("videos.list", units=1_400)
        assert (decision.admitted, decision.reason, decision.retry_at_ms) == (False, "limit", None)
        proxy.heal()
        assert budget.charge("videos.list", units=1_400).retry_at_ms == NOW_MS + DAY_MS + 1_399
        setup.ledger.close()


def test_a_long_log_is_read_no_longer_than_a_decision_may_take(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the ledger cannot say it, because its log lacks corrections."""
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        setup = Setup.open(redis_server.url)
        budget = full(setup, 10, 10)
        budget.settle(f"{NOW_MS}-0", 11)
        assert budget.peek("videos.list").reason == "limit"
        client.delete(f"quota:{{{setup.project}}}:corrections")
        assert budget.charge("videos.list").retry_at_ms == NOW_MS + DAY_MS
        monkeypatch.setattr("quota.deciding.account.COUNT_WITHIN_S", -1)
        decision = budget.charge("videos.list")
        assert (decision.reason, decision.refused_by, decision.retry_at_ms) == ("limit", "day", None)
        for setup.now_ms in (NOW_MS + 10_000, NOW_MS + 10_001, NOW_MS + 69_999, NOW_MS + 70_000):
            assert budget.charge("videos.list").retry_at_ms is None
        said = [record.getMessage() for record in caplog.records if "retry_at_unknown project=" in record.getMessage()]
        assert len(said) == 2, "once a minute, however often it is refused"
        assert "limit=day: the log is too long to be read for it" in caplog.text
        setup.ledger.close()


@pytest.mark.parametrize("entries", [300, 500])
def test_no_more_than_250_charges_are_looked_at(scripts: Scripts, entries: int) -> None:
    """L21. Whether they are new to the view, or leave it, or must leave before the call fits."""
    scripts.fill(entries)
    assert scripts.used() == entries
    for cost in (1, 100, 250):
        assert scripts.charge((ALL, entries, cost, DAY_MS), u=cost)[4] == str(NOW + cost)
    assert scripts.charge((ALL, entries, 251, DAY_MS), u=251)[4] == "-"
    two = scripts.charge((ALL, entries, 120, DAY_MS), (ALL, entries - 40, 120, DAY_MS), u=120)
    assert two[4] == f"{NOW + 120} -", "of both together"
    scripts.now_ms = NOW + DAY_MS + 10
    assert scripts.charge((ALL, entries, 230, DAY_MS), u=230)[4] == f"{NOW + 230}", "ten have left"
    scripts.now_ms += 100
    assert scripts.charge((ALL, entries, 290, DAY_MS), u=290)[4] == "-", "a hundred more leave with this one"


def test_it_is_another_one_with_what_is_unlogged(scripts: Scripts) -> None:
    """L17."""
    scripts.fill(10)
    day = (ALL, 10, 1, DAY_MS)
    until_ms = scripts.now_ms + DAY_MS // 2
    scripts.lose(ALL, (3, until_ms), (2, NOW + 5 + DAY_MS), (1, until_ms + 2 * DAY_MS))
    assert scripts.client.hget(STATE, f"unlogged:{ALL}")
    for _ in range(2):
        assert scripts.charge(day)[4] == str(NOW + 4), "of 16 seven must go: three in between, and then the first four"
    scripts.client.hdel(STATE, f"unlogged:{ALL}", "unlogged_until_ms")
    assert scripts.charge(day)[4] == str(NOW + 1)


def test_what_was_corrected_counts_as_it_does_now(scripts: Scripts) -> None:
    """L15."""
    scripts.fill(5)
    assert scripts.charge((ALL, 5, 1, DAY_MS))[4] == str(NOW + 1)
    scripts.run("settle", f"{NOW + 1}-0", 0)
    scripts.run("settle", f"{NOW + 2}-0", 2)
    assert scripts.charge((ALL, 5, 1, DAY_MS))[4] == str(NOW + 2)


def test_where_the_log_lacks_something_nothing_is_said(scripts: Scripts) -> None:
    """L14."""
    scripts.fill(5)
    day = (ALL, 5, 1, DAY_MS)
    scripts.charge(day)
    scripts.run("settle", f"{NOW + 1}-0", 2)
    scripts.client.delete(CORRECTIONS)
    assert scripts.charge(day)[4] == "-"
    scripts.client.delete(LOG)
    assert scripts.charge(day)[4] == "-"


def test_it_is_right_in_a_log_that_was_trimmed(scripts: Scripts) -> None:
    """L13."""
    scripts.fill(200)
    day = (ALL, 200, 1, DAY_MS)
    assert scripts.charge(day)[4] == str(NOW + 1)
    for _ in range(4):
        scripts.now_ms += MIN_RETENTION_MS // 2
        began_ms = scripts.now_ms
        scripts.fill(200)
        assert scripts.charge(day)[4] == str(began_ms + 1)
