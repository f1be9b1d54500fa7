"""The slot of a project moves from node to node of a cluster, key by key, while four machines charge."""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from redis.crc import key_slot

from support.clusters import Nodes
from support.servers import executables, until
from support.topologies import PATIENT_MS
from topologies.charging import PROJECT, Crew, found_at
from topologies.failover import LONGEST_S, MACHINES, Outcome

if TYPE_CHECKING:
    from support.servers import RedisServer

ROUNDS = 6
PAUSE_S = 0.15
"""Between two steps of a move, so that many decisions meet each state."""


def run(server: str) -> Outcome:
    outcome = Outcome()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(Nodes(executable=executables()[server], node_timeout_ms=PATIENT_MS))
        crew = stack.enter_context(Crew(nodes.url, folder, 1_000_000))
        crew.start(*MACHINES)
        until(lambda: {one.name for one in crew.told()} == set(MACHINES), "not all began")
        for here, there in itertools.pairwise(itertools.islice(itertools.cycle(nodes.servers[:3]), ROUNDS + 1)):
            move(nodes, here, there)
        crew.__exit__()
        told = crew.told()
        admitted = [one.id for one in told if one.id is not None]
        found = found_at(nodes.url, folder, crew.units)
        outcome.lost = len(set(admitted) - set(found.ids))
        outcome.counted_on = found.used_units - len(found.ids)
        outcome.longest_s = max(one.took_s for one in told)
        outcome.wrong += crew.died
        outcome.check(outcome.lost == 0 and outcome.counted_on == 0, f"{outcome.lost} charges were lost")
        # A call whose answer was lost on the way may have been charged: then it is refused, and in the log.
        unsaid = len(found.ids) - len(admitted)
        outcome.check(0 <= unsaid <= sum(one.id is None for one in told), f"{unsaid} charges more than were asked for")
        outcome.check(outcome.longest_s < LONGEST_S, f"a decision took {outcome.longest_s:.2f} s")
    return outcome


def move(nodes: Nodes, here: RedisServer, there: RedisServer) -> None:
    """The project's slot, if `here` has it."""
    slot = key_slot(f"{{{PROJECT}}}".encode())
    if nodes.owner(f"{{{PROJECT}}}") is not here:
        here = nodes.owner(f"{{{PROJECT}}}")
    with nodes.client(here) as old, nodes.client(there) as new:
        if here is there:
            return
        ids = old.execute_command("CLUSTER MYID"), new.execute_command("CLUSTER MYID")
        new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            time.sleep(PAUSE_S)
            old.execute_command("MIGRATE", "127.0.0.1", there.port, keys[0], 0, 5_000)
        time.sleep(PAUSE_S)
        for node in (new, old):
            node.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        time.sleep(2 * PAUSE_S)
