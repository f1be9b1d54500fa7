"""A real cluster: one slot a visitor, no hot node, a failover survived."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from quota.errors import StorageAway
from quota.inbound.contract import Limit, Policy
from quota.inbound.storage import open_storage
from support.clusters import Nodes
from support.servers import until

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICIES = (
    Policy("a", (Limit(5, 3_600_000), Limit(6, 86_400_000))),
    Policy("a", (Limit(5, 3_600_000, 5),), "gcra"),
    Policy("a", (Limit(5, 3_600_000),), "log"),
)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as nodes:
        yield nodes


def test_a_cluster_decides_and_survives_a_failover(nodes: Nodes) -> None:
    storage, other = open_storage(nodes.url), open_storage(nodes.url)

    # Several limits of a visitor are decided in one script: their keys lie in one slot, or this would be an error.
    for n in range(60):
        for policy in POLICIES:
            for worker in (storage, other):
                assert worker.decide(policy, f"visitor {n}").admitted
    assert storage.decide(POLICIES[2], "visitor 0", 3).limits[0].remaining == 0
    assert not other.decide(POLICIES[2], "visitor 0").admitted

    # No hot node. Each visitor's node is drawn by chance: one in ten millions of draws leaves a node so few.
    held = []
    for node in nodes.servers[:3]:
        with nodes.client(node) as client:
            held.append(sum("{salts}" not in key for key in client.keys("quota:inbound:*")))
    assert min(held) > 0.05 * sum(held), held

    # Totals and names are those of the whole cluster.
    for worker in (storage, other):
        worker.add_totals({"requests": 60})
    assert storage.totals() == {"requests": 120}
    for policy in POLICIES:
        assert len(storage.top(policy, 100)) == 60
    assert Counter(one.used for one in storage.top(POLICIES[0], 100)) == {2: 60}

    # The first node dies, and its replica takes over.
    first, replica = nodes.servers[0], nodes.servers[3]
    with nodes.client(replica) as asked, nodes.client(first) as client:
        client.wait(1, 5_000)
        first.kill()
        until(lambda: asked.info("replication")["role"] == "master", "the replica did not take over")
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
