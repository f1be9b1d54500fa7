"""A primary dies under load, while its replicas lag: by sentinels, and in a cluster.

Four machines charge. The replicas are held off for a while, then the primary is killed: what was charged meanwhile is
lost, and only machines that read it there have seen it. Two runs, and what they have to show:

    as it comes     all four go on at once. Every lost charge is put back, and nothing is overspent
    a cold one      the budget is used up, and the first to ask is a machine that has seen nothing: it may be granted
                    what was lost, until the others ask
"""

from __future__ import annotations

import itertools
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis.crc import key_slot
from redis.exceptions import RedisError

from quota.ledger.redis_log import keys_of
from support.certificates import Certificates
from support.clusters import Nodes, Sentinels
from support.servers import RedisServer, executables, until
from support.topologies import PATIENT_MS
from topologies.charger import PROJECT
from topologies.charging import COLD, MACHINES, Crew, Outcome

BEFORE_S, LAG_S = 1.5, 0.7
BACK_WITHIN_S = 2.0
"""After the servers have noticed."""

DOWN_AFTER_MS = 1_000
"""With less, Valkey's sentinels take the new primary for dead as well, before they are connected to it."""

LONGEST_S = 1.0
"""A decision takes a second at most."""


def started(name: str, server: str, folder: Path) -> Sentinels | Nodes:
    """Servers with replicas; with TLS if the name begins so."""
    executable = executables()[server]
    certificates = Certificates(folder / "certificates") if name.startswith("tls_") else None
    if name.endswith("sentinel"):
        return Sentinels(executable=executable, certificates=certificates, down_after_ms=DOWN_AFTER_MS)
    return Nodes(executable=executable, certificates=certificates)


def primary_of(group: Sentinels | Nodes) -> RedisServer:
    return group.primary() if isinstance(group, Sentinels) else group.owner(keys_of(PROJECT).log)


def hold_replicas_off(group: Sentinels | Nodes, primary: RedisServer) -> None:
    """They lose the connection and cannot come back: its clients have theirs already."""
    with group.client(primary) as client:
        client.config_set("requirepass", "nobody knows it")
        client.execute_command("CLIENT", "KILL", "TYPE", "replica")


def until_another(group: Sentinels | Nodes, primary: RedisServer) -> RedisServer:
    """Who takes over."""

    def another() -> bool:
        try:
            return primary_of(group) is not primary
        except (RedisError, StopIteration):
            return False

    until(another, "nobody takes over")
    return primary_of(group)


def run(name: str, server: str) -> Outcome:
    outcome = Outcome()
    as_it_comes(name, server, outcome)
    cold = a_cold_one(name, server)
    outcome.cold_overspent = cold.overspent
    outcome.wrong += cold.wrong
    return outcome


@contextmanager
def crewed(name: str, server: str, units: int) -> Iterator[tuple[Sentinels | Nodes, Crew]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        group = stack.enter_context(started(name, server, folder))
        crew = stack.enter_context(Crew(group.url, folder, units))
        crew.start(*MACHINES)
        yield group, crew


def as_it_comes(name: str, server: str, outcome: Outcome) -> None:
    with crewed(name, server, 1_500) as (group, crew):
        time.sleep(BEFORE_S)
        primary = primary_of(group)
        hold_replicas_off(group, primary)
        time.sleep(LAG_S)
        killed_s = time.time()
        primary.kill()
        second = until_another(group, primary)
        time.sleep(3)
        crew.start(COLD)
        until(crew.refused, "the budget is never used up")
        time.sleep(1)
        outcome.take(crew, group.url)
        back_ms = [e["ms"] for _, e in crew.decisions() if e["admitted"] and e["asked_ms"] > killed_s * 1_000]
        outcome.back_s = min(back_ms) / 1_000 - killed_s
        outcome.check(
            primary_of(group) is second, "one more failover, of a primary that lived: the machine is too busy"
        )
        outcome.check(outcome.lost > 0, "the replicas did not lag")
        outcome.check(outcome.overspent == 0, "overspent, though all had seen what was lost")
        detected_s = (DOWN_AFTER_MS if isinstance(group, Sentinels) else group.node_timeout_ms) / 1_000
        outcome.check(outcome.back_s < detected_s + BACK_WITHIN_S, f"back after {outcome.back_s:.1f} s")
        outcome.check(outcome.longest_s < LONGEST_S, f"a decision took {outcome.longest_s:.2f} s")


def a_cold_one(name: str, server: str) -> Outcome:
    """All four rest when the cold one asks first."""
    outcome = Outcome()
    with crewed(name, server, 400) as (group, crew):
        until(lambda: len(crew.admitted()) > 200, "nothing is charged")
        primary = primary_of(group)
        hold_replicas_off(group, primary)
        until(crew.refused, "the budget is never used up")
        time.sleep(1.2)  # what is on its way is answered by then
        crew.signal(signal.SIGSTOP, *MACHINES)
        used = len(crew.admitted())
        primary.kill()
        until_another(group, primary)
        crew.start(COLD)
        until(lambda: COLD in crew.refused(), "the cold machine goes on")
        crew.signal(signal.SIGCONT, *MACHINES)
        time.sleep(1)
        outcome.take(crew, group.url)
        outcome.check(used == crew.units, f"{used} units of {crew.units} were granted before the loss")
        outcome.check(outcome.overspent <= outcome.put_back, f"{outcome.overspent} overspent, {outcome.put_back} lost")
    return outcome


# -- a slot of a cluster moves -----------------------------------------------------------------------------------------

ROUNDS = 6
PAUSE_S = 0.15
"""Between two steps of a move, so that many decisions meet each state."""


def run_reshard(server: str) -> Outcome:
    outcome = Outcome()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = stack.enter_context(Nodes(executable=executables()[server], node_timeout_ms=PATIENT_MS))
        crew = stack.enter_context(Crew(nodes.url, folder, 1_000_000))
        crew.start(*MACHINES)
        for here, there in itertools.pairwise(itertools.islice(itertools.cycle(nodes.servers[:3]), ROUNDS + 1)):
            move(nodes, here, there)
        ids = outcome.take(crew, nodes.url)
        outcome.check(outcome.lost == 0, f"{outcome.lost} charges were lost, {outcome.put_back} of them put back")
        # A call whose answer was lost on the way may have been charged: then it is refused, and in the log.
        decisions = crew.decisions()
        refused = sum(not event["admitted"] for _, event in decisions)
        more = len(ids) - (len(decisions) - refused)
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
