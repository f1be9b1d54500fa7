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
from topologies.charging import PROJECT, Crew, holding
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
        until(lambda: {answer.name for answer in crew.answers()} == set(MACHINES), "not all began")
        for here, there in itertools.pairwise(itertools.islice(itertools.cycle(nodes.servers[:3]), ROUNDS + 1)):
            move(nodes, here, there)
        crew.__exit__()
        answers = crew.answers()
        admitted = [answer.id for answer in answers if answer.id is not None]
        held = holding(nodes.url, folder, crew.units)
        outcome.put_back, outcome.missing = held.put_back, len(set(admitted) - set(held.ids))
        outcome.longest_s = max(answer.took_s for answer in answers)
        outcome.wrong += crew.died
        outcome.check(outcome.lost == 0, f"{outcome.lost} charges were lost, {outcome.put_back} of them put back")
        # A call whose answer was lost on the way may have been charged: then it is refused, and in the log.
        more = len(held.ids) - len(admitted)
        refused = sum(answer.id is None for answer in answers)
        outcome.check(0 <= more <= refused, f"{more} charges more than were admitted, and {refused} calls were refused")
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
