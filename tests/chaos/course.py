"""Starts everything, strikes, heals, and waits until every worker has done its last tick.

A seed decides what happens. While the ledger is struck, and between two strikes, workers are killed and paused and
upstream fails.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TextIO, get_args

from chaos.scene import MACHINES, PROJECT, WORKERS, Scene
from chaos.worker import now_ms, work
from quota.jobs.emulator.usage import Charge
from quota.ledger.factory import open_ledger
from support.emulator import Emulator
from support.losses import RedisStorage
from support.processes import Children
from support.proxy import Kind, Proxy
from support.servers import RedisServer, stopped, until
from support.setup import charges_at

OFTEN = ("server killed", *3 * ("answers lost",))
UPSTREAM = ("drop-idle", "close-after", "status", "truncate", "latency")
"""Faults of the upstream, by the emulator's names for them."""

WRONG_S = (2 * 3_600, 20 * 3_600)
"""How far a wrong clock is off: more than the hour that a ledger tolerates."""

HEAL_S = 60
"""The time that the workers have for their last tick and to repay, once everything is healed."""


@dataclass
class Course:
    """What was done: how often each fault struck; when the ledger began to lose what it knew, and from when on it
    answered without; which workers were killed before their end, and which ended by themselves, and not well."""

    faults: Counter[str] = field(default_factory=Counter)
    losses_ms: list[tuple[int, int]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended_ms: int = 0


class Upstream(Emulator):
    """The emulated upstream. It writes a line for every request that reaches it: when, under which call's name, for how
    many units, and whether its quota covered it."""

    def __init__(self, quota: int, wire: TextIO) -> None:
        super().__init__(quota=quota)
        self._wire = wire

    def _arrive_with_faults(self, request: Any, kinds: Any) -> Any:
        ms = now_ms()
        method, charge, fault = super()._arrive_with_faults(request, kinds)
        units, refused = (charge.units, charge.refused) if isinstance(charge, Charge) else (0, True)
        line = {"ms": ms, "call": request.params.get("quotaUser", ""), "units": units, "refused": refused}
        self._wire.write(json.dumps(line) + "\n")
        return method, charge, fault


class Chaos:
    def __init__(self, scene: Scene) -> None:
        self.scene, self.dice, self.course = scene, random.Random(scene.seed), Course()
        self.strikes: dict[str, Callable[[], None]] = {
            "server killed": self._kill_the_server,
            "server emptied": lambda: self._lose(self._storage.empty),
            "old copy restored": self._restore_a_copy,
            "server stopped": self._stop_the_server,
            "connections cut": lambda: self._proxy.drop_all(),
            "answers lost": self._lose_answers,
            "clock jumped": self._set_a_clock,
        }
        self._lives = count()
        self._workers: dict[int, tuple[str, Children]] = {}
        self._paused: dict[int, float] = {}
        """Until when each of these workers is."""

        self._copies: list[Any] = []

    def run(self) -> None:
        """One run. What it leaves lies in its folder."""
        with ExitStack() as self._stack:
            self._server = RedisServer("--appendonly", "yes", "--appendfsync", "always")
            self._stack.enter_context(self._server)
            self._proxy = self._stack.enter_context(Proxy(self._server.port))
            wire = self._stack.enter_context((self.scene.folder / "wire.jsonl").open("w", buffering=1))
            self._upstream = self._stack.enter_context(Upstream(self.scene.quota_units, wire))
            self._storage = RedisStorage(self._server.url)
            self.scene.configure(self._proxy.url, self._upstream.address)
            for number in range(len(WORKERS)):
                self._start(number)
            until(lambda: self._noted('"decision"') >= len(WORKERS) / 2, "the workers did not start")
            self._strike()
            self._finish()
            self.course.ended_ms = now_ms()
            with closing(open_ledger(self._server.url)) as ledger:
                charges = charges_at(ledger, PROJECT)
        log = [{"ms": charge.id[0], "key": charge.key, "units": charge.units} for charge in charges]
        (self.scene.folder / "log.json").write_text(json.dumps(log))
        (self.scene.folder / "course.json").write_text(json.dumps(vars(self.course)))

    def _noted(self, text: str) -> int:
        """How many workers have noted this in their present lives."""
        paths = [self.scene.folder / "notes" / life for life, _ in self._workers.values()]
        return sum(path.exists() and text in path.read_text() for path in paths)

    def _strike(self) -> None:
        """Strike in every way at least once; later, seldom in the ways that lose charges."""
        ends_s = time.monotonic() + self.scene.seconds
        deck = self.dice.sample([*self.strikes], len(self.strikes))
        while deck or time.monotonic() < ends_s:
            deck = deck or self.dice.sample([*self.strikes, *OFTEN], len(self.strikes) + len(OFTEN))
            name = deck.pop()
            self.course.faults[name] += 1
            self.strikes[name]()
            self._meanwhile(self.dice.uniform(0.1, 0.5))

    def _finish(self) -> None:
        self._resume(now_s=float("inf"))
        (self.scene.folder / "finish").touch()
        ends_s = time.monotonic() + HEAL_S
        for name, child in self._workers.values():
            child.processes[0].join(max(0, ends_s - time.monotonic()))
            if child.processes[0].is_alive():
                self.course.failed.append(f"{name} did not end within {HEAL_S} s after everything was healed")
            else:
                self._hear(name, child.answers)

    def _hear(self, name: str, hear: Callable[[], object]) -> None:
        """How a worker ended."""
        try:
            hear()
        except AssertionError as error:
            self.course.failed.append(f"{name} {error}")

    # -- workers and upstream, all the time ----------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        machine, kind = WORKERS[number]
        life = f"w{number}-{next(self._lives)}"
        row = (self.scene, machine, kind, life, self.dice.randrange(1 << 30))
        self._workers[number] = life, self._stack.enter_context(Children(work, row, start="anew"))

    def _meanwhile(self, seconds: float) -> None:
        """Let so much time go by."""
        small = (self._kill_a_worker, self._kill_a_worker, self._pause_a_worker, self._fail_upstream)
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, self.dice.uniform(0.2, 0.8)))
            self._resume(time.monotonic())
            self.dice.choice(small)()

    def _kill_a_worker(self) -> None:
        """And start another in its place."""
        number = self.dice.randrange(len(WORKERS))
        life, child = self._workers[number]
        self._paused.pop(number, None)
        self.course.faults["worker killed"] += 1
        self.course.killed.append(life)
        self._hear(life, child.kill)
        self._start(number)

    def _pause_a_worker(self) -> None:
        number = self.dice.randrange(len(WORKERS))
        self.course.faults["worker paused"] += 1
        self._signal(number, signal.SIGSTOP)
        self._paused[number] = time.monotonic() + self.dice.uniform(0.2, 2.0)

    def _resume(self, now_s: float) -> None:
        for number in [number for number, until_s in self._paused.items() if until_s <= now_s]:
            del self._paused[number]
            self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, which: int) -> None:
        _, child = self._workers[number]
        if child.processes[0].is_alive():
            os.kill(child.processes[0].pid, which)

    def _fail_upstream(self) -> None:
        kind = self.dice.choice(UPSTREAM)
        self.course.faults[f"upstream: {kind}"] += 1
        self._upstream.fault(kind, times=self.dice.randint(1, 3), ms=self.dice.randint(50, 500))

    # -- strikes -------------------------------------------------------------------------------------------------------

    def _kill_the_server(self) -> None:
        """It wrote each charge to its disk before it answered, and comes back with all of them."""
        self._server.kill()
        self._meanwhile(self.dice.uniform(0.1, 1.2))
        self._server.start()

    def _stop_the_server(self) -> None:
        with stopped(self._server):
            self._meanwhile(self.dice.uniform(0.3, 1.5))

    def _lose(self, lose: Callable[[], None]) -> None:
        from_ms = now_ms()
        lose()
        self.course.losses_ms.append((from_ms, now_ms()))

    def _restore_a_copy(self) -> None:
        """An old one, or a new one that is soon old."""
        if not self._copies or self.dice.random() < 0.5:
            self._copies.append(self._storage.copy())
            self._meanwhile(self.dice.uniform(0.1, 0.6))
        copy = self.dice.choice(self._copies)
        self._lose(lambda: self._storage.restore(copy))

    def _lose_answers(self) -> None:
        kind = self.dice.choice(get_args(Kind))
        self._proxy.fail(kind, times=self.dice.randint(1, 6), delay_s=self.dice.uniform(0.05, 0.6), keep_bytes=12)
        self._meanwhile(self.dice.uniform(0.2, 0.6))
        self._proxy.heal()
        while self._proxy.held:
            with suppress(OSError):  # the connection has gone since
                self._proxy.release()

    def _set_a_clock(self) -> None:
        """Set the clock of one machine hours ahead or hours behind, then the other way round, and right again. Nothing
        else strikes meanwhile: draws on the allowance would be dated by that clock."""
        self._resume(now_s=float("inf"))
        machine = self.dice.choice(MACHINES)
        ahead_ms = self.dice.choice((-1, 1)) * self.dice.randrange(*WRONG_S) * 1_000
        clock = self.scene.folder / machine / "ahead_ms"
        for clock_ms in (ahead_ms, -ahead_ms):
            clock.write_text(str(clock_ms))
            until(lambda: self._noted(f'"ahead_ms": {clock_ms},'), "nobody decides by the wrong clock")  # noqa: B023
            time.sleep(self.dice.uniform(0.1, 0.2))
        clock.write_text("0")
        time.sleep(0.1)
