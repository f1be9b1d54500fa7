"""A primary dies under load, while its replicas lag: by sentinels, and in a cluster.

Four machines charge. The replicas are held off for a while, then the primary is killed: what was charged meanwhile is
lost, and only machines that read it there have seen it. Two runs, and what they have to show:

    as it comes     all four go on at once. Every lost charge is put back, and nothing is overspent
    a cold one      the budget is used up, and the first to ask is a machine that has seen nothing: it may be granted
                    what was lost, until the others ask
"""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from redis.crc import key_slot
from redis.exceptions import RedisError

from quota.ledger.redis_log import keys_of
from support.certificates import Certificates
from support.clusters import Nodes, Sentinels
from support.servers import executables, until
from support.topologies import PATIENT_MS
from topologies.charging import PROJECT, Crew, holding

if TYPE_CHECKING:
    import redis

    from support.servers import RedisServer

MACHINES = ("a", "b", "c", "d")
BEFORE_S, LAG_S = 1.5, 0.7
BACK_WITHIN_S = 2.0
"""After the servers have noticed."""

DOWN_AFTER_MS = 1_000
"""With less, Valkey's sentinels take the new primary for dead as well, before they are connected to it."""

LONGEST_S = 1.0
"""A decision takes a second at most."""

KEY = keys_of(PROJECT).log


@dataclass
class Outcome:
    """The figures of a run, and what was wrong."""

    put_back: int = 0
    missing: int = 0
    """Charges that were admitted and that the ledger lacks at the end."""

    overspent: int = 0
    cold_overspent: int = 0
    back_s: float = 0.0
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Charges that the ledger lost."""
        return self.put_back + self.missing

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


class Group:
    """Servers with replicas, of either kind, seen alike; with TLS if the name begins so."""

    def __init__(self, name: str, server: str, folder: Path) -> None:
        executable = executables()[server]
        certificates = Certificates(folder / "certificates") if name.startswith("tls_") else None
        self._of: Sentinels | Nodes
        if name.endswith("sentinel"):
            self._of = Sentinels(executable=executable, certificates=certificates, down_after_ms=DOWN_AFTER_MS)
            self.detection_s = DOWN_AFTER_MS / 1_000
        else:
            self._of = Nodes(executable=executable, certificates=certificates)
            self.detection_s = self._of.node_timeout_ms / 1_000
        self.url = self._of.url

    def primary(self) -> RedisServer:
        return self._of.primary() if isinstance(self._of, Sentinels) else self._of.owner(KEY)

    def client(self, server: RedisServer) -> redis.Redis:
        return self._of.client(server)

    def hold_replicas_off(self, primary: RedisServer) -> None:
        """They lose the connection and cannot come back: its clients have theirs already."""
        with self.client(primary) as client:
            client.config_set("requirepass", "nobody knows it")
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")

    def kill(self, primary: RedisServer) -> float:
        """When."""
        at_s = time.time()
        primary.kill()
        return at_s

    def until_another(self, primary: RedisServer) -> RedisServer:
        """Who takes over."""

        def another() -> bool:
            try:
                return self.primary() is not primary
            except (RedisError, StopIteration):
                return False

        until(another, "nobody takes over")
        return self.primary()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        self._of.close()


def run(name: str, server: str) -> Outcome:
    outcome = Outcome()
    as_it_comes(name, server, outcome)
    a_cold_one(name, server, outcome)
    return outcome


def as_it_comes(name: str, server: str, outcome: Outcome) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        group = stack.enter_context(Group(name, server, folder))
        crew = stack.enter_context(Crew(group.url, folder, 1_500))
        crew.start(*MACHINES)
        until(lambda: {answer.name for answer in crew.answers()} == set(MACHINES), "not all began")
        time.sleep(BEFORE_S)
        primary = group.primary()
        group.hold_replicas_off(primary)
        time.sleep(LAG_S)
        killed_s = group.kill(primary)
        second = group.until_another(primary)
        time.sleep(3)
        crew.start("cold")
        until(lambda: any(answer.reason == "limit" for answer in crew.answers()), "the budget is never used up")
        time.sleep(1)
        crew.__exit__()
        answers = crew.answers()
        admitted = [answer.id for answer in answers if answer.id is not None]
        held = holding(group.url, folder, crew.units)
        back = [answer.at_s + answer.took_s for answer in answers if answer.id and answer.at_s > killed_s]
        outcome.back_s = min(back) - killed_s
        outcome.longest_s = max(answer.took_s for answer in answers)
        outcome.put_back, outcome.missing = held.put_back, len(set(admitted) - set(held.ids))
        outcome.overspent = max(0, len(admitted) - crew.units)
        outcome.wrong += crew.died
        outcome.check(group.primary() is second, "one more failover, of a primary that lived: the machine is too busy")
        outcome.check(outcome.lost > 0, "the replicas did not lag")
        outcome.check(outcome.missing == 0, f"{outcome.missing} charges were lost, and not put back")
        outcome.check(held.used_units == len(held.ids), f"{held.used_units} units are used, of {len(held.ids)} calls")
        outcome.check(outcome.overspent == 0, "overspent, though all had seen what was lost")
        outcome.check(outcome.back_s < group.detection_s + BACK_WITHIN_S, f"back after {outcome.back_s:.1f} s")
        outcome.check(outcome.longest_s < LONGEST_S, f"a decision took {outcome.longest_s:.2f} s")


def a_cold_one(name: str, server: str, outcome: Outcome) -> None:
    """All four rest when the cold one asks first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        group = stack.enter_context(Group(name, server, folder))
        crew = stack.enter_context(Crew(group.url, folder, 400))
        crew.start(*MACHINES)
        until(lambda: crew.admitted() > 200, "nothing is charged")
        primary = group.primary()
        group.hold_replicas_off(primary)
        until(lambda: any(answer.reason == "limit" for answer in crew.answers()), "the budget is never used up")
        crew.rest(*MACHINES)
        used = crew.admitted()
        group.kill(primary)
        group.until_another(primary)
        crew.start("cold")
        until(lambda: ("cold", "limit") in {(a.name, a.reason) for a in crew.answers()}, "the cold machine goes on")
        crew.go_on(*MACHINES)
        time.sleep(1)
        crew.__exit__()
        outcome.cold_overspent = crew.admitted() - crew.units
        lost = holding(group.url, folder, crew.units).put_back
        outcome.wrong += crew.died
        outcome.check(used == crew.units, f"{used} units of {crew.units} were granted before the loss")
        outcome.check(outcome.cold_overspent <= lost, f"{outcome.cold_overspent} overspent, of {lost} lost")


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
