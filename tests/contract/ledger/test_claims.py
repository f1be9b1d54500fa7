"""One of many may do a piece of work: what every ledger keeps of that."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING

import pytest
import redis

from quota.errors import LedgerError
from quota.ledger.factory import open_ledger
from support.proxy import Proxy
from support.servers import RedisServer

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

    from support.setup import Setup

HOUR_MS = 3_600_000


def test_the_first_claim_wins_and_every_later_one_loses(setup: Setup) -> None:
    claim = setup.ledger.claim
    assert [claim(setup.project, "tick:a::1000", HOUR_MS) for _ in range(3)] == [True, False, False]


def test_claims_are_apart_by_name_and_by_project(setup: Setup) -> None:
    names = ["tick:a::1000", "tick:a::2000", "tick:a:DE:1000", "tick:ä b:{x}:1000"]
    assert all(setup.ledger.claim(setup.project, name, HOUR_MS) for name in names)
    assert setup.ledger.claim(f"{setup.project}-other", names[0], HOUR_MS)
    assert not any(setup.ledger.claim(setup.project, name, HOUR_MS) for name in names)


def test_a_claim_lapses_after_its_time(setup: Setup) -> None:
    assert setup.ledger.claim(setup.project, "work", 200)
    setup.now_ms += 199
    assert not setup.ledger.claim(setup.project, "work", 200)
    setup.now_ms += 1
    time.sleep(0.25)  # Redis counts a lifetime by its own clock, whatever time the test says it is
    assert setup.ledger.claim(setup.project, "work", 200)


def test_a_claim_costs_nothing(setup: Setup) -> None:
    budget = setup.budget()
    setup.ledger.claim(setup.project, "work", HOUR_MS)
    assert [state.used_units for state in budget.usage()] == [0]


def _claim_all(url: str, names: int, barrier: Barrier, won: multiprocessing.Queue[list[int]]) -> None:
    ledger = open_ledger(url)
    barrier.wait(10)
    won.put([n for n in range(names) if ledger.claim("shared", f"tick:a::{n}", HOUR_MS)])
    ledger.close()


def test_of_many_processes_exactly_one_wins_each_claim(ledger_url: str) -> None:
    processes, names = 6, 40
    context = multiprocessing.get_context("spawn")
    barrier, won = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=_claim_all, args=(ledger_url, names, barrier, won)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    winners = [n for _ in workers for n in won.get(timeout=30)]
    for worker in workers:
        worker.join(10)
    assert sorted(winners) == list(range(names))


def test_in_redis_a_claim_is_one_key_in_the_projects_slot_with_a_lifetime(redis_server: RedisServer) -> None:
    ledger = open_ledger(redis_server.url)
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        assert ledger.claim("p", "tick:a:DE:1000", 5_000)
        assert client.keys("*") == ["quota:{p}:claim:tick:a:DE:1000"]
        assert 4_000 < client.pttl("quota:{p}:claim:tick:a:DE:1000") <= 5_000
    ledger.close()


def test_in_redis_a_lost_answer_asked_for_again_is_the_same_claim(redis_server: RedisServer) -> None:
    with Proxy(redis_server.port) as proxy:
        ledger = open_ledger(proxy.url)
        proxy.fail("drop-reply", match=b"lost")
        assert ledger.claim("p", "lost", HOUR_MS)
        assert proxy.connections == 2, "the answer was lost and asked for again"
        assert not ledger.claim("p", "lost", HOUR_MS)
        ledger.close()


def test_a_ledger_that_cannot_answer_says_so() -> None:
    server = RedisServer()
    ledger = open_ledger(server.url)
    assert ledger.claim("p", "work", HOUR_MS)
    server.kill()
    with pytest.raises(LedgerError, match="cannot be reached"):
        ledger.claim("p", "work", HOUR_MS)
    ledger.close()
    server.close()


def test_sqlite_forgets_claims_that_lapsed(tmp_path: Path) -> None:
    now_ms = 1_000
    ledger = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}", clock=lambda: now_ms)
    for n in range(50):
        now_ms = n * 1_000
        assert ledger.claim("p", f"tick:{n}", 3_000)
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        assert db.execute("SELECT count(*) FROM claims").fetchone()[0] == 3
    ledger.close()
