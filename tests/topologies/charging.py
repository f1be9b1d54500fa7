"""Machines that charge one project all the time, and what they and the ledger said."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quota.ledger.factory import open_ledger
from support.commands import Quota, program
from support.forked import Forked
from support.patience import be_patient
from support.servers import until
from support.setup import budget_of, charges_at, ids_of, limit
from topologies.charger import NOTES, PROJECT

MACHINES = ("a", "b", "c", "d")
COLD = "cold"
"""A machine that starts later, and has seen nothing."""

END_S = 60
Event = dict[str, Any]


class Crew:
    """A process that charges on each machine; they end with the `with`. `elsewhere` gives the prefix of a command that
    runs on a machine."""

    def __init__(
        self, url: str, folder: Path, units: int, elsewhere: Callable[[str], list[str]] = lambda _: []
    ) -> None:
        self.url, self.units = url, units
        self.failed: list[str] = []
        self._folder, self._elsewhere = folder, elsewhere
        self._processes: dict[str, subprocess.Popen[str] | Forked] = {}

    def start(self, *names: str) -> None:
        for name in names:
            folder = self._folder / name
            folder.mkdir()
            self._processes[name] = Quota(folder, self._elsewhere(name)).start(
                *(self.url, str(self.units), str(folder), str(self._finish)),
                script=program("topologies.charger"),
                stdout=subprocess.DEVNULL,
            )
        until(lambda: {*names} <= {name for name, _ in self.decisions()}, f"{names} did not start")

    @property
    def _finish(self) -> Path:
        return self._folder / "finish"

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            self._processes[name].send_signal(number)

    def decisions(self) -> list[tuple[str, Event]]:
        """All decisions so far, and whose they are, in the order in which they were asked for."""
        decided = []
        for path in self._folder.glob(f"*/{NOTES}"):
            whole, _, _ = path.read_text().rpartition("\n")  # its last line may be on its way
            decided += [(path.parent.name, json.loads(line)) for line in whole.splitlines()]
        return sorted(decided, key=lambda pair: pair[1]["asked_ms"])

    def admitted(self) -> list[str]:
        """The ids of all calls that were admitted."""
        return [event["id"] for _, event in self.decisions() if event["admitted"]]

    def refused(self) -> set[str]:
        """The machines that were told that the limit is reached."""
        return {machine for machine, event in self.decisions() if event["reason"] == "limit"}

    def end(self) -> None:
        self._finish.touch()
        for name, process in self._processes.items():
            _, errors = process.communicate(timeout=END_S)
            if process.returncode:
                self.failed.append(f"{name} ended with {process.returncode}: {errors[-2_000:]}")

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


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

    def take(self, crew: Crew, url: str) -> list[str]:
        """End a crew, and hold what it was told against what the ledger at `url` has: the ids of all calls there."""
        crew.end()
        be_patient()
        admitted = crew.admitted()
        with closing(open_ledger(url)) as ledger:
            budget = budget_of(ledger, limit(crew.units), project=PROJECT)
            used_units, ids = budget.usage()[0].used_units, ids_of(charges_at(ledger, PROJECT))
            self.put_back = sum(loss.charges for loss in budget._project.reading.facts.losses)
        self.missing = len({*admitted} - {*ids})
        self.overspent = max(0, len(admitted) - crew.units)
        self.longest_s = max(event["ms"] - event["asked_ms"] for _, event in crew.decisions()) / 1_000
        self.wrong += crew.failed
        self.check(self.missing == 0, f"{self.missing} charges were lost, and not put back")
        self.check(used_units == len(ids), f"{used_units} units are used, of {len(ids)} calls")
        return ids
