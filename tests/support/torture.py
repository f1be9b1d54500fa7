"""Processes that charge as fast as they can, while their ledger loses what it has, again and again.

    cd tests; python -m support.torture SECONDS PROCESSES [--seed N]

prints a line for each kind of loss, on a real redis-server and on SQLite. Windows are short, so that charges leave them
all the time. The processes lie on three machines, each with a journal of its own; or on one machine, where nobody else
can put entries back. Two rules must hold:

1. **Nobody is granted what its machine had read.** Before each call, a process reads the journal of its machine. What
   it grants has to fit beside all that stands there: to the unit, whatever was lost meanwhile.
2. **Nothing is lost.** Once each machine has asked again, each admitted call is in the log: once, with its own time.

Together the machines may grant more than the limit: charges of one machine that the ledger lost before the others had
read them. They are counted, and printed as `over`.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from quota.budget import Budget
from quota.deciding.history import entries
from quota.deciding.project import Project
from quota.decision import Allowance
from quota.errors import LedgerError, UnknownCharge
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.rules.entry import Entry, id_of_call
from quota.terms.limits import DAY_MS
from support import memory
from support.losses import RedisStorage, SqliteStorage
from support.patience import be_impatient
from support.processes import Children
from support.proxy import Kind, Proxy
from support.servers import RedisServer, until
from support.setup import budget_of, limit

METHOD = "videos.list"
WINDOW_MS = 1_500
LIMIT_UNITS = 200
ALLOWANCE = Allowance(max_cost_units=1, allowance_units=40)

ON_REDIS = (
    *("emptied", "old copy", "a key", "server killed", "answers lost"),
    *("processes killed", "processes paused", "killed in a union", "all of it"),
)
ON_SQLITE = ("emptied", "old copy", "processes killed", "processes paused", "killed in a union", "all of it")


class Granted(NamedTuple):
    """A call that was admitted, as its process has noted it. `units` is what it counts in the end; None where nobody
    knows whether its correction was made."""

    key: str
    ms: int
    charged_units: int
    units: int | None
    by_ledger: bool


@dataclass
class Outcome:
    """What came of a course."""

    granted: Sequence[Granted]
    log: Sequence[Entry]
    calls: int
    strikes: int
    longest_ms: int
    broken: Sequence[str]
    """Grants beside which there was no room, by what their machine had read, and charges that were not found again."""

    @property
    def charges(self) -> Counter[str]:
        return Counter(entry.key for entry in self.log if entry.kind == "charge")

    @property
    def missing(self) -> set[str]:
        """What was admitted and is not in the log."""
        return {grant.key for grant in self.granted} - self.charges.keys()

    @property
    def twice(self) -> set[str]:
        return {key for key, times in self.charges.items() if times > 1}

    @property
    def moved(self) -> set[str]:
        """What is in the log with another time than it was granted with, or counts otherwise than it was settled."""
        places = {entry.key: entry for entry in self.log if entry.kind == "charge"}
        counts = {entry.key: entry.units for entry in self.log if entry.kind == "charge"}
        counts |= {entry.of: entry.units for entry in self.log if entry.kind == "correction"}
        return {
            grant.key
            for grant in self.granted
            if grant.key in places
            and (
                (grant.by_ledger and grant.ms != places[grant.key].id[0])
                or (grant.units is not None and grant.units != counts[grant.key])
            )
        }

    @property
    def over_units(self) -> int:
        """The most that the ledger admitted in any window beyond the limit."""
        least = {grant.key: min(grant.charged_units, grant.units or 0) for grant in self.granted if grant.by_ledger}
        charges = [(entry.id[0], least[entry.key]) for entry in self.log if entry.key in least]
        used_units = worst_units = first = 0
        for ms, units in sorted(charges):
            used_units += units
            while charges[first][0] <= ms - WINDOW_MS:
                used_units -= charges[first][1]
                first += 1
            worst_units = max(worst_units, used_units)
        return max(0, worst_units - LIMIT_UNITS)


# -- a process -------------------------------------------------------------------------------------------------------


class Account:
    """What one machine has read, by its journal: an independent count of what its processes may grant."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder, Identity("test", "p"), keep_ms=DAY_MS)
        self._position: dict[str, int] = {}
        self._charges: dict[str, Entry] = {}

    def read(self) -> None:
        position = self._journal.position()
        for _, entry in self._journal.records(self._position):
            if entry.kind == "charge":
                self._charges.setdefault(entry.key, entry)
        self._position = position

    def counting(self, ms: int) -> list[Entry]:
        """What was read before, and counts at a time."""
        self._charges = {key: entry for key, entry in self._charges.items() if entry.id[0] > ms - 10 * WINDOW_MS}
        return [entry for entry in self._charges.values() if entry.id[0] > ms - WINDOW_MS]


def work(url: str, machine: Path, notes: Path, finish: Path) -> None:
    """Charge until it is time to finish, and note what came of it before the next call."""
    be_impatient()
    logging.getLogger("quota").setLevel(logging.CRITICAL)  # each loss is a warning
    dice, account = random.Random(), Account(machine)
    with closing(open_ledger(url)) as ledger, notes.open("ab", buffering=0) as file:
        budget = budget_of(ledger, limit(LIMIT_UNITS, WINDOW_MS), folder=machine, allowance=ALLOWANCE)
        calls, longest_ns = 0, 0
        file.write(b"began\n")
        while not finish.exists():
            account.read()
            units, began_ns = dice.choice((1, 1, 1, 3)), time.monotonic_ns()
            decision = budget.charge(METHOD, units=units)
            longest_ns, calls = max(longest_ns, time.monotonic_ns() - began_ns), calls + 1
            if calls % 100 == 0:
                file.write(f"calls 100 {longest_ns}\n".encode())
            if not decision.admitted:
                continue
            ms, _, key = str(decision.id).partition("-")
            file.write(f"granted {key} {ms} {units} {decision.source}\n".encode())
            beside = account.counting(int(ms))
            if decision.source == "ledger" and units + sum(entry.units for entry in beside) > LIMIT_UNITS:
                file.write(f"tight {key} {units} {','.join(entry.key for entry in beside)}\n".encode())
            if dice.random() < 0.1:
                _settle(budget, id_of_call(int(ms), key, 0), dice.randint(0, units), file.write)


def _is_done(budget: Budget) -> bool:
    """Whether its machine has compared, and handed over what it drew."""
    return budget.peek(METHOD).reason in ("ok", "limit") and not budget.owed_units()


def _settle(budget: Budget, name: str, units: int, write: Callable[[bytes], object]) -> None:
    key = name.partition("-")[2]
    write(f"settling {key}\n".encode())
    try:
        budget.settle(name, units)
    except UnknownCharge as error:
        write(f"broken {error}\n".encode())
    except LedgerError:
        pass
    else:
        write(f"settled {key} {units}\n".encode())


# -- what happens to them ----------------------------------------------------------------------------------------------


class Torture:
    """One course of one kind of loss. What happens is drawn by lot, of a seed."""

    def __init__(
        self, kind: str, folder: Path, processes: int, seed: int, *, on_redis: bool = True, machines: int = 3
    ) -> None:
        self.kind, self.folder, self.processes = kind, folder, processes
        self.dice = random.Random(f"{seed} {kind}")
        self.strikes = 0
        self._stack = ExitStack()
        self._copies: list[Any] = []
        self._children: list[Children] = []
        self._names = count()
        self._server: RedisServer | None = None
        self._proxy: Proxy | None = None
        self.storage: RedisStorage | SqliteStorage
        if on_redis:
            self._server = RedisServer()
            self._stack.enter_context(self._server)
            self._proxy = self._stack.enter_context(Proxy(self._server.port))
            self.storage = RedisStorage(self._server.url)
        else:
            self.storage = SqliteStorage(folder)
            open_ledger(self.storage.url).close()
        through_proxy = self._proxy is not None and kind in ("answers lost", "all of it")
        self.url = self._proxy.url if self._proxy is not None and through_proxy else self.storage.url
        self.notes, self.finish = folder / "notes", folder / "finish"
        self.notes.mkdir()
        self.machines = [folder / f"machine-{n}" for n in range(machines)]
        for machine in self.machines:
            machine.mkdir()

    def run(self, seconds: float) -> Outcome:
        with self._stack:
            for number in range(self.processes):
                self._start(number)
            until(lambda: len([*self.notes.iterdir()]) >= self.processes, "the processes did not start")
            ends_s = time.monotonic() + seconds
            while (left_s := ends_s - time.monotonic()) > 0:
                time.sleep(min(left_s, self.dice.uniform(0.05, 0.4)))
                self.strike(self.kind)
            if self._proxy is not None:
                self._proxy.heal()
            self.finish.touch()
            for child in self._children:
                child.answers()
            return self._outcome()

    def _start(self, number: int) -> None:
        note = self.notes / f"{next(self._names)}"
        row = (self.url, self.machines[number % len(self.machines)], note, self.finish)
        child = self._stack.enter_context(Children(work, row, start="anew"))
        self._children[number : number + 1] = [child]

    # -- losses

    def strike(self, kind: str) -> None:
        if kind == "all of it":
            kind = self.dice.choice([each for each in (ON_REDIS if self._server else ON_SQLITE) if each != "all of it"])
        strikes: dict[str, Callable[[], None]] = {
            "emptied": self.storage.clear,
            "old copy": self._restore_or_copy,
            "a key": self._delete_a_key,
            "server killed": self._kill_the_server,
            "answers lost": self._lose_answers,
            "processes killed": self._kill,
            "processes paused": self._pause,
            "killed in a union": self._kill_in_a_union,
        }
        strikes[kind]()
        self.strikes += 1

    def _lose_answers(self) -> None:
        assert self._proxy is not None
        way: Kind = self.dice.choice(["drop-reply", "drop-reply", "drop-request"])
        self._proxy.heal()
        self._proxy.fail(way, times=self.dice.choice((1, 2, 8)), match=METHOD.encode())
        if self.dice.random() < 0.5:
            time.sleep(self.dice.uniform(0, 0.05))
            self.storage.clear()

    def _kill_in_a_union(self) -> None:
        self.storage.clear()
        time.sleep(self.dice.uniform(0, 0.02))
        self._kill()

    def _kill(self) -> None:
        """Kill all processes of one machine, and start others."""
        machine = self.dice.randrange(len(self.machines))
        numbers = range(machine, self.processes, len(self.machines))
        for number in numbers:
            self._children[number].kill()
        for number in numbers:
            self._start(number)

    def _pause(self) -> None:
        """Stop a process, lose all, and let it go on when others have put it back."""
        (process,) = self._children[self.dice.randrange(self.processes)].processes
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(self.dice.uniform(0, 0.003))
        with suppress(sqlite3.OperationalError):  # it was stopped in the middle of a transaction
            self.storage.clear(wait_s=0.2)
        time.sleep(self.dice.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGCONT)

    def _restore_or_copy(self) -> None:
        copy = self.dice.choice(self._copies) if self._copies else None
        if copy is None or self.dice.random() < 0.4:
            self._copies.append(copy := self.storage.copy())
            time.sleep(self.dice.uniform(0, self.dice.choice((0.003, 0.3))))  # also while a charge is on its way
        self.storage.overwrite(copy)

    def _delete_a_key(self) -> None:
        assert isinstance(self.storage, RedisStorage)
        keys = self.storage.keys("quota:{p}:*")
        if keys:
            self.storage.client.delete(self.dice.choice(sorted(keys)))

    def _kill_the_server(self) -> None:
        """It comes back with what was saved last."""
        assert self._server is not None
        if self.dice.random() < 0.5:
            self.storage.client.save()  # type: ignore[union-attr]
            time.sleep(self.dice.uniform(0, 0.2))
        self._server.kill()
        self._server.start()

    # -- what came of it

    def _outcome(self) -> Outcome:
        with closing(open_ledger(self.storage.url)) as ledger:
            for machine in self.machines:
                budget = budget_of(ledger, limit(LIMIT_UNITS, WINDOW_MS), folder=machine, allowance=ALLOWANCE)
                until(lambda: _is_done(budget), "no answer")  # noqa: B023
            log = [*entries(Project(ledger, "p"))]
        lines = [line.split(" ") for path in self.notes.iterdir() for line in path.read_text().splitlines()]
        of_kind: dict[str, list[list[str]]] = {}
        for kind, *rest in lines:
            of_kind.setdefault(kind, []).append(rest)
        settled: dict[str, int | None] = {key: None for (key,) in of_kind.get("settling", [])}
        settled |= {key: int(units) for key, units in of_kind.get("settled", [])}
        granted = [
            Granted(key, int(ms), int(units), settled.get(key, int(units)), source == "ledger")
            for key, ms, units, source in of_kind.get("granted", [])
        ]
        waits = of_kind.get("calls", [])
        broken = [" ".join(rest) for rest in of_kind.get("broken", [])]
        least = {entry.key: entry.units for entry in log if entry.kind == "charge"}
        for entry in log:
            if entry.kind == "correction":
                least[entry.of] = min(least[entry.of], entry.units)
        for key, units, beside in of_kind.get("tight", []):  # without corrections that the process had not read
            used_units = sum(least.get(name, 0) for name in beside.split(","))
            if used_units + int(units) > LIMIT_UNITS:
                broken.append(f"{key} of {units} beside {used_units}")
        return Outcome(
            granted,
            log,
            sum(int(calls) for calls, _ in waits),
            self.strikes,
            max((int(longest_ns) // 1_000_000 for _, longest_ns in waits), default=0),
            broken,
        )


# -- the table ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("ledger", "loss", "strikes", "calls", "granted", "drawn", "over"),
    *("broken", "missing", "twice", "moved", "ms"),
)


def row_of(ledger: str, kind: str, outcome: Outcome) -> Sequence[object]:
    drawn = sum(not grant.by_ledger for grant in outcome.granted)
    failures = (outcome.broken, outcome.missing, outcome.twice, outcome.moved)
    counts = (outcome.strikes, outcome.calls, len(outcome.granted), drawn, outcome.over_units, *map(len, failures))
    return ledger, kind, *counts, outcome.longest_ms


def shown(row: Sequence[object]) -> str:
    ledger, kind, *numbers = row
    return f"{ledger:<8}{kind:<22}" + "".join(f"{number:>9}" for number in numbers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.torture")
    parser.add_argument("seconds", type=float, help="how long all of it takes, about")
    parser.add_argument("processes", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = parser.parse_args()
    logging.getLogger("quota").setLevel(logging.CRITICAL)
    courses = [("redis", kind, 3) for kind in ON_REDIS] + [("sqlite", kind, 3) for kind in ON_SQLITE]
    courses += [("redis", "answers lost", 1), ("redis", "processes paused", 1), ("redis", "all of it", 1)]
    failed = False
    print(f"seed {options.seed}: {options.processes} processes")
    print(shown(COLUMNS), flush=True)
    for ledger, kind, machines in courses:
        with tempfile.TemporaryDirectory(dir=memory.MEMORY if memory.MEMORY.is_dir() else None) as name:
            of_course = options.seconds / len(courses)
            on_redis = ledger == "redis"
            made = Torture(kind, Path(name), options.processes, options.seed, on_redis=on_redis, machines=machines)
            outcome = made.run(of_course)
        print(shown(row_of(ledger, f"{kind} ({machines})", outcome)), flush=True)
        for line in [*outcome.broken, *map(str, (outcome.missing, outcome.twice, outcome.moved))]:
            if line != "set()":
                failed = True
                print(f"    {line[:200]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
