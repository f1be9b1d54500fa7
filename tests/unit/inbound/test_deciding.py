"""The breaker: who is asked while a storage is away, and what the log says of it; the header fields of an answer."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from quota.errors import StorageAway
from quota.inbound import Limit, Rule
from quota.inbound.contract import Decision, LimitState
from quota.inbound.deciding import FAILURES, SAY_AGAIN_S, TOOK, TOOK_US, Breaker, Decider, Verdict
from quota.inbound.metrics import Report, exposition
from quota.inbound.middleware import fields_of, problem_of
from quota.inbound.rules import open_storage
from quota.inbound.sqlite_storage import SqliteStorage
from support.processes import in_child

AWAY = StorageAway("redis://h: no answer 100% of the time")


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_after_three_failures_one_request_a_second_tries(clock: Clock) -> None:
    breaker = Breaker("s", clock)
    for _ in range(3):
        assert breaker.lets_through()
        breaker.failed(AWAY)
    assert [breaker.lets_through() for _ in range(3)] == [False] * 3
    clock.now_s += 1.0
    assert [breaker.lets_through() for _ in range(3)] == [True, False, False]
    breaker.failed(AWAY)
    clock.now_s += 0.999
    assert not breaker.lets_through()
    clock.now_s += 0.001
    assert breaker.lets_through()
    breaker.answered()
    for _ in range(2):
        breaker.failed(AWAY)
    assert [breaker.lets_through() for _ in range(3)] == [True] * 3


def test_an_outage_is_two_lines_also_if_it_comes_and_goes(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def outage() -> list[str]:
        caplog.clear()
        breaker.failed(AWAY)
        breaker.failed(AWAY)
        breaker.answered()
        breaker.answered()
        return [record.getMessage() for record in caplog.records]

    breaker = Breaker("redis://h", clock)
    assert outage() == [
        'inbound_storage_away storage=redis://h error="redis://h: no answer 100% of the time"',
        "inbound_storage_back storage=redis://h",
    ]
    assert outage() == []
    clock.now_s += SAY_AGAIN_S
    assert len(outage()) == 2


def test_requests_that_wait_for_a_storage_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    """50 at once meet a lock, which the loop itself lets go."""
    storage = SqliteStorage(f"sqlite:///{tmp_path / 'inbound.db'}")
    decider = Decider(storage)
    rule = Rule("open", Limit(100, 60_000))
    assert decider.decide(rule, "ann").outcome == "admitted"

    async def ask_at_once(other: sqlite3.Connection) -> list[str]:
        loop = asyncio.get_running_loop()
        asked = [asyncio.ensure_future(decider.decide_soon(loop, rule, "ann")) for _ in range(50)]
        await asyncio.sleep(0)  # each of them asks
        other.execute("COMMIT")
        return [verdict.outcome for verdict in await asyncio.gather(*asked)]

    with closing(sqlite3.connect(tmp_path / "inbound.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert asyncio.run(ask_at_once(other)) == ["admitted"] * 50
    storage.close()


def test_fail_decides_if_no_thread_can_start(tmp_path: Path) -> None:
    """A system that allows no more of them, or a process that is about to end."""
    decider = Decider(SqliteStorage(f"sqlite:///{tmp_path / 'inbound.db'}"))
    rules = [Rule("open", Limit(1, 60_000)), Rule("closed", Limit(1, 60_000), fail="closed")]

    async def ask() -> list[str]:
        loop = asyncio.get_running_loop()
        return [(await decider.decide_soon(loop, rule, "ann")).outcome for rule in rules]

    def in_this_process() -> list[str]:
        threading.stack_size(2**46)  # more than a machine has, for each thread from now on
        return asyncio.run(ask())

    assert in_child(in_this_process) == ["failed_open", "failed_closed"]


def test_a_histogram_has_the_time_of_each_decision() -> None:
    totals = {TOOK[0]: 2, TOOK[-1]: 1, TOOK_US: 300_150}
    lines = exposition(Report(totals, {})).splitlines()
    for line in ('bucket{le="0.0001"} 2', 'bucket{le="0.25"} 2', 'bucket{le="+Inf"} 3', "sum 0.30015", "count 3"):
        assert f"quota_inbound_decision_seconds_{line}" in lines


def test_a_worker_that_ends_right_after_an_outage_reports_its_totals(tmp_path: Path) -> None:
    decider = Decider(open_storage("redis://127.0.0.1:1/0"))
    outcomes = {decider.decide(Rule("a", Limit(1, 60_000)), "ann").outcome for _ in range(FAILURES)}
    decider.hand_over()
    with closing(open_storage(f"sqlite:///{tmp_path / 'inbound.db'}")) as decider.storage:
        decider.hand_over()
        assert (outcomes, decider.storage.totals()["requests|a|failed_open"]) == ({"failed_open"}, FAILURES)


RULE = Rule("api", [Limit(100, 60_000), Limit(5_000, 86_400_000)], cost=2)


def verdict(admitted: bool, *states: LimitState, rule: Rule = RULE) -> Verdict:
    return Verdict(rule, "admitted" if admitted else "refused", Decision(admitted, 0, states))


def test_ratelimit_has_the_requests_that_are_left_and_when_the_next_one_fits() -> None:
    states = LimitState(85, 17_001, 0), LimitState(1, 100_000_000, 30_000_000)
    got = dict(fields_of([verdict(True, *states)], with_x=True))
    assert got == {
        "ratelimit-policy": '"api-1m";q=50;w=60, "api-24h";q=2500;w=86400',
        "ratelimit": '"api-1m";r=42;t=18, "api-24h";r=0;t=30000',
        "x-ratelimit-limit": "2500",
        "x-ratelimit-remaining": "0",
        "x-ratelimit-reset": "30000",
    }


@pytest.mark.parametrize("wait_ms", [1, 999, 1_000, 1_001, 59_001, 3_600_000, 86_400_000])
def test_retry_after_is_never_too_early(wait_ms: int) -> None:
    """Nor before the end of the effective window; jitter only adds, and at most a tenth or a second."""
    refused = verdict(False, LimitState(0, max(60_000, wait_ms), wait_ms), LimitState(7, 80_000_000, 0))
    waits = set()
    for _ in range(50):
        problem = problem_of(refused, with_x=False)
        assert problem.retry_after_s is not None
        waits.add(problem.retry_after_s)
        full, other = dict(problem.more)["ratelimit"].split(", ")
        assert wait_ms <= 1_000 * int(full.removeprefix('"api-1m";r=0;t=')) <= 1_000 * problem.retry_after_s
        assert other == '"api-24h";r=3', "its own window would end after the wait"
        assert problem.members == {"violated-policies": ["api-1m"]}
    least_s = -(-wait_ms // 1000)
    assert least_s <= min(waits) < max(waits) <= least_s + max(1, min(60, least_s // 10))
