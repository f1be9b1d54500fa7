"""Starts everything, does what the plan says, heals, and waits until every worker has done its last tick."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chaos.evidence import store_id
from chaos.journal import now_ms
from chaos.plan import CLOCK_WRONG, MOVES, make_plan
from chaos.scene import AHEAD_MS, FETCH, HEAL_S, MACHINES, SHARED, Scene
from chaos.server import ChaosServer, Entry
from support.commands import Quota, program
from support.proxy import Proxy

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Iterator, Sequence

    from chaos.plan import Step
    from support.forked import Forked

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
"""The library of Debian's package faketime, by which a process has a wrong clock; None where it is not installed."""

START_S = 60
MOVE_S = 60
POLL_S = 0.02
WRONG_S = (2 * 3_600, 72 * 3_600)
"""By so much a wrong clock is wrong: more than the hour that a ledger puts up with."""

LONGEST_MOVE_S = 0.02
"""After the ledger is closed: some of what a move takes from there."""


@dataclass
class Loss:
    """The ledger lost what it knew: everything, or what an old copy did not have yet."""

    kind: str
    at_ms: int
    """From here on it answered without what it had lost."""

    log: list[Entry]
    """What it had held."""

    kept: frozenset[str] = frozenset()
    """The tokens of what it held still."""


@dataclass
class UnsafeKill:
    """A kill of a server that does not write every charge to the disk before it answers."""

    at_ms: int
    kept: frozenset[str]
    """The tokens of what is on the disk."""


@dataclass
class Outage:
    """The ledger could not answer, or not reliably, until `back_ms`."""

    kind: str
    from_ms: int
    back_ms: int = 0


@dataclass
class Course:
    """What happened, as the supervisor saw it."""

    steps: list[tuple[int, Step]] = field(default_factory=list)
    """What was done, and when."""

    faults: Counter[str] = field(default_factory=Counter)
    outages: list[Outage] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    unsafe_kills: list[UnsafeKill] = field(default_factory=list)

    killed: set[str] = field(default_factory=set)
    """Lives of workers that were killed before their end."""

    failed: list[str] = field(default_factory=list)
    """Workers that ended by themselves, and not well."""

    moves_ms: list[int] = field(default_factory=list)
    """When the ledger had moved with all that it held."""

    movers_killed: int = 0
    """Moves that were killed after the ledger was closed for them, and before they were done."""

    usage: dict[str, Any] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)
    healed_ms: int = 0
    ended_ms: int = 0


class Worker:
    """One worker over its lives."""

    def __init__(self, scene: Scene, number: int, prefix: Sequence[str] = ()) -> None:
        """`prefix`: a command that runs it elsewhere."""
        self.scene, self.number, self.prefix = scene, number, prefix
        self.machine, self.kind = scene.workers[number]
        self.lives = 0
        self.lost = False
        """Its machine is gone: nothing starts there."""

        self.process: subprocess.Popen[str] | Forked | None = None

    @property
    def life(self) -> str:
        return f"w{self.number}-{self.lives}"

    def start(self, seed: int, ahead_ms: int = 0) -> None:
        """Not where it lives: one that is killed again before its start finds two of them coming.

        `ahead_ms`: under a clock that is so far ahead.
        """
        if self.lost or (self.process is not None and self.process.poll() is None):
            return
        self.lives += 1
        environment = {}
        if ahead_ms:
            environment = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{ahead_ms // 1_000:+d}s"}
            environment |= {"FAKETIME_DISABLE_SHM": "1", AHEAD_MS: str(ahead_ms)}
        with (self.scene.folder / f"{self.life}.err").open("wb") as errors:
            self.process = Quota(self.scene.machine(self.machine), self.prefix).start(
                *(str(self.scene.folder), self.machine, self.kind, self.life, str(seed)),
                script=program("chaos.worker"),
                env=environment,
                stdout=errors.fileno(),
                stderr=errors.fileno(),
            )

    def kill(self) -> bool:
        """Whether it lived until now."""
        assert self.process is not None
        lived = self.process.poll() is None
        self.process.kill()
        self.process.wait()
        return lived

    def signal(self, number: int) -> None:
        """To the life of the moment, which may be another one than that which was stopped."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)

    def trouble(self) -> str | None:
        """How it ended, if not well."""
        assert self.process is not None
        if self.lost or self.process.poll() in (None, 0):
            return None
        errors = (self.scene.folder / f"{self.life}.err").read_text()
        return f"{self.life} ({self.machine}, {self.kind}) ended with {self.process.returncode}: {errors[-2_000:]}"


def until_decided(workers: Iterable[Worker]) -> None:
    """Each of these, which were started just now, is past its imports."""
    deadline = time.monotonic() + START_S
    for worker in workers:
        path = worker.scene.journals / f"{worker.life}.jsonl"
        while not (path.exists() and b'"decision"' in path.read_bytes()):
            if (trouble := worker.trouble()) or time.monotonic() > deadline:
                raise RuntimeError(trouble or f"{worker.life} did not start in {START_S} s")
            time.sleep(POLL_S)


def until_ended(course: Course, workers: Iterable[Worker]) -> None:
    deadline = time.monotonic() + HEAL_S
    for worker in workers:
        assert worker.process is not None
        while worker.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if worker.process.poll() is None:
            course.failed.append(f"{worker.life} did not end within {HEAL_S} s after everything was healed")
        elif (trouble := worker.trouble()) is not None and trouble not in course.failed:
            course.failed.append(trouble)


class Supervisor:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.course = Course()
        self.copied: frozenset[str] = frozenset()
        self.workers = [Worker(scene, number) for number in range(len(scene.workers))]

    def run(self) -> Course:
        with (
            contextlib.closing(ChaosServer(self.scene.folder / "copies")) as self.server,
            Proxy(self.server.port) as self.proxy,
            self._upstream() as self.address,
        ):
            self.scene.configure(self.proxy.url, self.address)
            try:
                for worker in self.workers:
                    worker.start(self.scene.seed * 100 + worker.number)
                until_decided(self.workers)
                began = time.monotonic()
                for step in make_plan(self.scene.seed, self.scene.seconds, losses=self.scene.losses):
                    while (left_s := began + step.at_s - time.monotonic()) > 0:
                        time.sleep(min(left_s, POLL_S))
                    if step.fault:
                        self.course.faults[step.fault] += 1
                    self.course.steps.append((now_ms(), step))
                    struck = time.monotonic()
                    getattr(self, "_" + step.do.replace("-", "_"))(step)
                    if step.fault in (*MOVES, CLOCK_WRONG):
                        began += time.monotonic() - struck
                self._finish()
                until_ended(self.course, self.workers)
            finally:
                for worker in self.workers:
                    if worker.process is not None:
                        worker.kill()
            self.course.ended_ms = now_ms()
            self.course.log = self.server.log()
            with urllib.request.urlopen(f"{self.address}/emulator/usage") as answer:  # noqa: S310  # our own address
                self.course.usage = json.load(answer)
        return self.course

    @contextlib.contextmanager
    def _upstream(self) -> Iterator[str]:
        words = (str(self.scene.quota_units), str(self.scene.wire))
        with Quota(self.scene.folder).start(*words, script=program("chaos.upstream"), stderr=2) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().strip()
            finally:
                process.kill()

    def _finish(self) -> None:
        self._heal()
        self.proxy.resume()
        self._owner_back()
        for worker in self.workers:
            if worker.trouble() is not None:
                self.course.failed.append(str(worker.trouble()))
        self.course.healed_ms = now_ms()
        self.scene.stop.touch()

    # -- what the plan may ask for -----------------------------------------------------------------------------------

    def _out(self, kind: str) -> None:
        self.course.outages.append(Outage(kind, now_ms()))

    def _back(self) -> None:
        self.course.outages[-1].back_ms = now_ms()

    def _kill_worker(self, step: Step) -> None:
        self._kill(self.workers[step.how["worker"]])

    def _kill(self, worker: Worker) -> None:
        trouble = worker.trouble()
        if worker.kill():
            self.course.killed.add(worker.life)
        elif trouble is not None and worker.life not in self.course.killed:
            self.course.failed.append(trouble)

    def _start_worker(self, step: Step) -> None:
        self.workers[step.how["worker"]].start(step.how["seed"])

    def _stop_worker(self, step: Step) -> None:
        self.workers[step.how["worker"]].signal(signal.SIGSTOP)

    def _continue_worker(self, step: Step) -> None:
        self.workers[step.how["worker"]].signal(signal.SIGCONT)

    def _trouble_upstream(self, step: Step) -> None:
        asked = urllib.request.Request(f"{self.address}/emulator/faults", data=json.dumps(step.how).encode())  # noqa: S310
        urllib.request.urlopen(asked).close()  # noqa: S310  # our own address

    def _kill_server(self, step: Step) -> None:
        self._out(step.fault)
        self.server.kill()
        if self.server.fsync == "everysec":
            kept = frozenset(entry.token for entry in self.server.log_of_the_dead())
            self.course.unsafe_kills.append(UnsafeKill(now_ms(), kept))

    def _start_server(self, step: Step) -> None:
        data: Literal["own", "none", "old-aof", "old-rdb"] = step.how["data"]
        if data != "own":
            held = self.server.log_of_the_dead()
            kept = frozenset() if data == "none" else self.copied
            self.course.losses.append(Loss(data, now_ms(), held, kept))
        self.server.restart(step.how["fsync"], data)
        self._back()

    def _stop_server(self, step: Step) -> None:
        self._out(step.fault)
        os.kill(self.server.pid, signal.SIGSTOP)

    def _continue_server(self, step: Step) -> None:
        os.kill(self.server.pid, signal.SIGCONT)
        self._back()

    def _pause_network(self, step: Step) -> None:
        self._out(step.fault)
        self.proxy.pause()

    def _resume_network(self, step: Step) -> None:
        self.proxy.resume()
        self._back()

    def _cut_connections(self, step: Step) -> None:
        self._out(step.fault)
        self.proxy.drop_all()
        self._back()

    def _fail(self, step: Step) -> None:
        self.proxy.fail(**step.how)

    def _release(self) -> None:
        while True:
            try:
                self.proxy.release()
                return
            except OSError:  # the server has gone since
                continue

    def _heal(self, step: Step | None = None) -> None:
        self.proxy.heal()
        self._release()

    def _flush_scripts(self, step: Step) -> None:
        with self.server.client() as client:
            client.script_flush()

    def _copy(self, step: Step) -> None:
        self.copied = frozenset(entry.token for entry in self.server.log())
        self.server.copy_aof()
        self.server.copy_rdb()

    # -- the ledger's address changes ----------------------------------------------------------------------------------

    def _ledger_url(self, database: int) -> str:
        return f"{self.proxy.url.rpartition('/')[0]}/{database}"

    def _url_edited(self, step: Step) -> None:
        """By hand, with nobody at work: what no machine has seen in the old ledger, nobody knows."""
        self._kill_all()
        self.course.losses.append(Loss(step.fault, now_ms(), self.server.log()))
        self._restart_all(step)

    def _ledger_moved(self, step: Step) -> None:
        """By the command, with everybody at work; it is killed on its way, and called again until it is done."""
        dice = random.Random(step.how["dice"])
        old, new = (self._ledger_url(self.server.database + more) for more in (0, 1))
        with self._mover(old, new) as mover:
            deadline = time.monotonic() + MOVE_S
            while mover.poll() is None and not self.server.fenced() and time.monotonic() < deadline:
                pass
            time.sleep(dice.uniform(0, LONGEST_MOVE_S))
            self.course.movers_killed += mover.poll() is None
            mover.kill()
        time.sleep(dice.uniform(0.1, 1.0))
        while True:
            with self._mover(old, new) as mover:
                output = "".join(mover.communicate())
            if mover.returncode == 0:
                break
            if time.monotonic() > deadline:
                self.course.failed.append(f"quota ledger move ended with {mover.returncode}: {output}")
                break
        self.course.moves_ms.append(now_ms())
        self._kill_all()
        self._restart_all(step)

    def _mover(self, old: str, new: str) -> subprocess.Popen[str] | Forked:
        return Quota(self.scene.machine(self.workers[0].machine)).start("ledger", "move", old, new)

    def _kill_all(self) -> None:
        for worker in self.workers:
            if not worker.lost:
                self.course.faults["worker-killed"] += 1
                self._kill(worker)

    # -- a clock is wrong ----------------------------------------------------------------------------------------------

    def _clock_wrong(self, step: Step) -> None:
        """Nothing else strikes meanwhile: what a machine draws on its allowance then would be dated by its clock."""
        if FAKETIME is None:
            del self.course.faults[step.fault]
            return
        dice = random.Random(step.how["dice"])
        machine = dice.choice(MACHINES)
        ahead_ms = dice.choice((-1, 1)) * dice.randrange(*WRONG_S) * 1_000
        there = [worker for worker in self.workers if worker.machine == machine and not worker.lost]
        for clock_ms in (ahead_ms, 0):
            for worker in there:
                self.course.faults["worker-killed"] += 1
                self._kill(worker)
                worker.start(dice.randrange(1 << 30), clock_ms)
            until_decided(there)
            time.sleep(dice.uniform(0.5, 1.5))

    # -- a machine is lost ---------------------------------------------------------------------------------------------

    def _owner_lost(self, step: Step) -> None:
        dice = random.Random(step.how["dice"])
        lost = self._owner() or dice.choice(MACHINES)
        for worker in self.workers:
            if worker.machine == lost:
                self.course.faults["worker-killed"] += 1
                self._kill(worker)
                worker.lost = True
        self.scene.here(lost).unlink(missing_ok=True)
        self.scene.here(dice.choice([machine for machine in MACHINES if machine != lost])).touch()

    def _owner_back(self, step: Step | None = None) -> None:
        for worker in self.workers:
            if worker.lost:
                worker.lost = False
                worker.start(self.scene.seed * 100 + worker.number + worker.lives)

    def _owner(self) -> str | None:
        """The machine that the shared job belongs to."""
        owner = self.server.owner(f"{FETCH}|{SHARED}")
        return next((machine for machine in MACHINES if store_id(self.scene, machine) == owner), None)

    def _restart_all(self, step: Step) -> None:
        self.server.database += 1
        self.scene.name_ledger(self._ledger_url(self.server.database))
        for worker in self.workers:
            worker.start(step.how["dice"] + worker.number)
        until_decided(worker for worker in self.workers if not worker.lost)

    def _flush(self, step: Step) -> None:
        log, at_ms = self.server.flush()
        self.course.losses.append(Loss("flushed", at_ms, log))
