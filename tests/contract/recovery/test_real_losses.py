"""Servers that really lose what they had: a process that dies, a replica that takes over too early."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import redis

from quota.ledger.factory import open_ledger
from support.servers import RedisServer, until
from support.setup import budget_of, charges_at, limit
from support.torture import torture

LIMIT = limit(100)


@pytest.mark.parametrize("dumped", [True, False], ids=["with an old dump", "with nothing"])
def test_a_server_that_was_killed_comes_back_and_lacks_nothing(
    own_server: RedisServer, tmp_path: Path, dumped: bool
) -> None:
    with closing(open_ledger(own_server.url)) as ledger, redis.Redis(port=own_server.port) as client:
        budget = budget_of(ledger, LIMIT, folder=tmp_path)
        budget.charge("videos.list", units=5)
        if dumped:
            client.save()
        budget.charge("videos.list", units=3)
        before = charges_at(ledger)
        own_server.kill()
        own_server.start()
        assert len(charges_at(ledger)) == dumped
        assert budget.charge("videos.list").limits[0].used_units == 9
        assert charges_at(ledger)[:2] == before


def test_a_replica_that_lagged_takes_over_and_lacks_nothing(tmp_path: Path) -> None:
    first, other = RedisServer("--repl-diskless-sync-delay", "0"), RedisServer()
    with first, other, closing(open_ledger(first.url)) as ledger, closing(open_ledger(other.url)) as then:
        budget = budget_of(ledger, LIMIT, folder=tmp_path)
        budget.charge("videos.list", units=5)
        with redis.Redis(port=other.port) as replica:
            replica.replicaof("127.0.0.1", str(first.port))
            until(lambda: replica.exists("quota:{p}:ledger:log"), "the replica has no log")
            replica.replicaof("NO", "ONE")
        budget.charge("videos.list", units=3)
        before = charges_at(ledger)
        assert [charge.units for charge in charges_at(then)] == [5]
        assert budget_of(then, LIMIT, folder=tmp_path).charge("videos.list").limits[0].used_units == 9
        assert charges_at(then)[:2] == before


@pytest.mark.parametrize(("kind", "machines"), [("redis", 3), ("redis", 1), ("sqlite", 3)])
def test_no_machine_is_granted_units_that_it_had_read(kind: str, machines: int, tmp_path: Path) -> None:
    outcome = torture("all of it", tmp_path, 4, 1.0, seed=3, on_redis=kind == "redis", machines=machines)
    assert outcome.strikes
    assert outcome.granted
    assert [*outcome.broken] == []
    assert (outcome.missing, outcome.twice, outcome.moved) == (set(), set(), set())
