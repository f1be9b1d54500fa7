"""Sentinels and nodes that are silent: a decision ends all the same, and finds the one that answers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from redis.crc import key_slot

import quota
from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget
from quota.dashboard.reading import read_now, read_samples
from quota.decision import Decision
from quota.errors import LedgerError, StorageAway
from quota.inbound.rules import open_storage
from quota.ledger import redis_needs
from quota.ledger.factory import open_ledger
from support.clusters import Nodes, Sentinels
from support.inbound import policy
from support.servers import black_hole, stopped, until
from support.setup import budget_of, limit
from support.topologies import PATIENT_MS

MANY = 20
"""Silent ones, each of which alone could take a second."""

DEADLINE_S = 10.0
KEY = "quota:{p}:ledger:log"


@contextmanager
def silent() -> Iterator[int]:
    """The port of somebody who accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1_000) as listener:
        yield listener.getsockname()[1]


def url_of(scheme: str, *ports: int) -> str:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return f"{scheme}://{hosts}{'/main' if scheme.endswith('sentinel') else ''}"


@contextmanager
def opened(url: str) -> Iterator[Budget]:
    with closing(open_ledger(url)) as ledger:
        yield budget_of(ledger, limit(500))


def charged(budget: Budget) -> Decision:
    return budget.charge("videos.list")


def charged_on_a_loop(budget: Budget) -> Decision:
    async def charge() -> Decision:
        with closing(Awaiter(budget.ledger)) as awaiter:
            return await AsyncBudget(budget, awaiter).charge("videos.list")

    return asyncio.run(charge())


WAYS = pytest.mark.parametrize("charge", [charged, charged_on_a_loop])
SILENT = pytest.mark.parametrize("silence", [silent, black_hole])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes(node_timeout_ms=PATIENT_MS) as started:
        yield started


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    with Sentinels(down_after_ms=PATIENT_MS) as started:
        yield started


@pytest.mark.usefixtures("real_walls")
@pytest.mark.parametrize(
    ("scheme", "silence", "charge"),
    [
        ("redis+cluster", silent, charged),
        ("rediss+cluster", black_hole, charged_on_a_loop),
        ("redis+sentinel", black_hole, charged),
        ("rediss+sentinel", silent, charged_on_a_loop),
    ],
)
def test_a_decision_ends_although_nobody_answers(
    scheme: str, silence: Callable[[], Iterator[int]], charge: Callable[[Budget], Decision]
) -> None:
    with silence() as port, opened(url_of(scheme, *[port] * MANY)) as budget:  # type: ignore[attr-defined]
        began_s = time.monotonic()
        decision = charge(budget)
        took_s = time.monotonic() - began_s
    assert decision.reason == "ledger-unavailable"
    assert decision.detail.endswith(
        f"{scheme}://{budget.ledger.label.partition('://')[2]} did not answer within 0.35 s; see whether the server is "
        "busy or the network slow"
    )
    assert took_s < DEADLINE_S


@pytest.mark.usefixtures("real_walls")
@SILENT
@pytest.mark.parametrize("scheme", ["redis+cluster", "rediss+sentinel"])
def test_an_inbound_decision_ends_too(scheme: str, silence: Callable[[], Iterator[int]]) -> None:
    with silence() as port, closing(open_storage(url_of(scheme, *[port] * MANY))) as storage:  # type: ignore[attr-defined]
        began_s = time.monotonic()
        with pytest.raises(StorageAway, match="did not answer within"):
            storage.decide(policy("counter", 1), "ann")
        assert time.monotonic() - began_s < DEADLINE_S


@pytest.mark.usefixtures("real_walls")
@WAYS
@SILENT
@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_a_node_that_answers_is_found_behind_silent_nodes(
    nodes: Nodes,
    sentinels: Sentinels,
    scheme: str,
    silence: Callable[[], Iterator[int]],
    charge: Callable[[Budget], Decision],
) -> None:
    well = (nodes.servers[2] if scheme.endswith("cluster") else sentinels.sentinels[2]).port
    with silence() as port, opened(url_of(scheme, port, port, well)) as budget:  # type: ignore[attr-defined]
        until(lambda: charge(budget).admitted, "the one that is well is not found")
        assert charge(budget).admitted


@pytest.mark.usefixtures("real_walls")
@WAYS
def test_a_cluster_with_silent_nodes_decides_in_time(nodes: Nodes, charge: Callable[[Budget], Decision]) -> None:
    """All but the one that has the slot, then that one, then all."""
    owner = nodes.owner(KEY)
    others = [node for node in nodes.servers if node is not owner]
    with opened(url_of("redis+cluster", *(node.port for node in (*others, owner)))) as budget:
        assert charge(budget).admitted
        for silent_ones, admitted in ((others, True), ([owner], False), (nodes.servers, False)):
            with stopped(*silent_ones):
                began_s = time.monotonic()
                if admitted:
                    until(lambda: charge(budget).admitted, "it is not asked")
                else:
                    assert charge(budget).reason == "ledger-unavailable"
                    assert time.monotonic() - began_s < DEADLINE_S
            until(lambda: charge(budget).admitted, "nobody comes back")


@pytest.mark.usefixtures("real_walls", "state_dir")
def test_a_silent_node_hides_no_project_of_another_node(nodes: Nodes) -> None:
    owner = nodes.owner("TIME")  # this command has no key
    mine, other = (
        next(name for name in "abcdefghij" if (nodes.owner(f"quota:{{{name}}}:ledger:log") is owner) == is_silent)
        for is_silent in (True, False)
    )
    credentials = {name: {"api": "youtube-v3"} for name in (mine, other)}
    with quota.open(settings={"ledger": {"url": nodes.url}, "credentials": credentials}) as session, stopped(owner):

        def seen() -> list[tuple[bool, bool]]:
            with suppress(LedgerError):
                status = read_now(session).status
                up = [each.value for each in read_samples(session, status) if each.family == "quota_ledger_up"]
                return [(row.open, value == 1) for row, value in zip(status.credentials, up, strict=True)]
            return []

        until(lambda: seen() == [(False, False), (True, True)], "both look silent")


def test_a_user_of_the_least_rights_follows_a_slot_on_its_way(nodes: Nodes) -> None:
    """All keys have moved, and the nodes have not agreed yet whose the slot is."""
    owner, slot = nodes.owner(KEY), key_slot(KEY.encode())
    other = next(node for node in nodes.servers[:3] if node is not owner)
    commands = (*redis_needs.COMMANDS, *redis_needs.OF_A_CLUSTER)
    line = redis_needs.acl_line("some", [redis_needs.pattern_of("*")], commands)
    url = url_of("redis+cluster", owner.port).replace("//", f"//some:{redis_needs.PASSWORD}@")
    with nodes.client(owner) as here, nodes.client(other) as there:
        for client in (here, there):
            client.execute_command(*line.split())
        ours, theirs = (client.execute_command("CLUSTER MYID") for client in (here, there))
        with opened(url) as budget:
            first = budget.charge("videos.list")
            assert first.id is not None
            budget.settle(first.id, 0)  # where a key is missing, a node that gets a slot runs no script over it
            there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ours)
            here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", theirs)
            while keys := here.execute_command("CLUSTER GETKEYSINSLOT", slot, 10):
                here.execute_command("MIGRATE", "127.0.0.1", other.port, "", 0, 5_000, "KEYS", *keys)
            on_its_way = [budget.charge("videos.list") for _ in range(3)]
            for client in (there, here):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", theirs)
            assert [decision.detail for decision in on_its_way if not decision.admitted] == []
            assert budget.charge("videos.list").admitted
            assert there.xlen(KEY) >= 5
        for client in (here, there):
            client.acl_deluser("some")
