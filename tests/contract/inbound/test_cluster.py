"""A real cluster of three nodes, one of them with a replica: one slot a visitor, no hot node, a failover survived."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import redis

from quota.errors import StorageAway
from quota.inbound.contract import Decision, Limit, Policy
from quota.inbound.storage import open_storage
from support.servers import RedisServer, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOTS = 16_384
POLICIES = (
    Policy("a", (Limit(5, 3_600_000), Limit(6, 86_400_000))),
    Policy("a", (Limit(5, 3_600_000, 5),), "gcra"),
    Policy("a", (Limit(5, 3_600_000),), "log"),
)


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def port_of_a_node() -> int:
    """The nodes talk to each other 10,000 ports higher."""
    return next(port for port in iter(free_port, 0) if port <= 55_535)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RedisServer]]:
    """Three primaries and a replica of the first."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--cluster-replica-validity-factor", "0")
    nodes = [RedisServer(*options, port=port_of_a_node()) for _ in range(4)]
    clients = [redis.Redis(port=node.port, decode_responses=True) for node in nodes]
    try:
        for number, client in enumerate(clients[:3]):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS * number // 3, SLOTS * (number + 1) // 3))
        for node in nodes[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        first = clients[0].execute_command("CLUSTER", "MYID")
        until(lambda: all(_knows(client, 4) for client in clients), "the nodes do not know each other")
        clients[3].execute_command("CLUSTER", "REPLICATE", first)
        until(lambda: all(_is_well(client) for client in clients), "the cluster is not up")
        until(lambda: clients[3].info("replication").get("master_link_status") == "up", "the replica has no link")
        yield nodes
    finally:
        for client in clients:
            client.close()
        for node in nodes:
            node.close()


def _knows(client: redis.Redis, count: int) -> bool:
    return len(str(client.execute_command("CLUSTER", "NODES")).splitlines()) == count


def _is_well(client: redis.Redis) -> bool:
    return "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO"))


def test_a_cluster_decides_and_survives_a_failover(nodes: list[RedisServer]) -> None:
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:3])
    storage, other = open_storage(url), open_storage(url)

    # Several limits of a visitor are decided in one script: their keys lie in one slot, or this would be an error.
    for n in range(60):
        for policy in POLICIES:
            for worker in (storage, other):
                answer = worker.attempt(policy, f"visitor {n}")
                assert not isinstance(answer, Decision), "it may have to ask the nodes"
                assert answer.finish().admitted
    assert storage.decide(POLICIES[2], "visitor 0", 3).limits[0].remaining == 0
    assert not other.decide(POLICIES[2], "visitor 0").admitted

    # No hot node.
    held = []
    for node in nodes[:3]:
        with redis.Redis(port=node.port) as client:
            held.append(sum(b"{salts}" not in key for key in client.keys("quota:inbound:*")))
    assert min(held) > 0.15 * sum(held), held

    # Totals and names are those of the whole cluster.
    for worker in (storage, other):
        worker.add_totals({"requests": 60})
    assert storage.totals() == {"requests": 120}
    for policy in POLICIES:
        assert len(storage.top(policy, 100)) == 60
    assert Counter(one.used for one in storage.top(POLICIES[0], 100)) == {2: 60}

    # The first node dies, and its replica takes over.
    with redis.Redis(port=nodes[3].port) as replica, redis.Redis(port=nodes[0].port) as first:
        first.wait(1, 5_000)
        nodes[0].kill()
        until(lambda: replica.info("replication")["role"] == "master", "the replica did not take over")
    deadline = time.monotonic() + 100
    admitted = []
    for n in range(60):
        while True:
            try:
                admitted.append(storage.decide(POLICIES[2], f"visitor {n}").admitted)
            except StorageAway:  # until the client has asked the nodes again
                assert time.monotonic() < deadline
                time.sleep(0.05)
                continue
            break
    assert admitted == [False] + [True] * 59, "and nothing that was counted is lost"
    storage.close()
    other.close()
