"""Machines that charge one project all the time, with workers of the chaos run, and what they and the ledger said."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chaos.evidence import lives_of
from chaos.scene import PROJECT, Limit, Scene
from chaos.supervisor import Course, Worker, until_decided, until_ended
from quota.deciding.losses import losses
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS
from support.patience import be_patient
from support.setup import budget_of, charges_at, ids_of, limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chaos.evidence import Event

MACHINES = ("a", "b", "c", "d")
COLD = "cold"
"""A machine that starts later, and has seen nothing."""


@dataclass(frozen=True)
class Charging(Scene):
    units: int = 0
    machines = (*MACHINES, COLD)
    workers = tuple((machine, "spends") for machine in machines)
    allowance_units = 0

    @property
    def limits(self) -> dict[str, Limit]:
        return {"day": Limit(self.units, DAY_MS)}


class Crew:
    """The workers, one on each machine; they end with the `with`. `elsewhere` gives the prefix of a command that runs
    on a machine."""

    def __init__(
        self, url: str, folder: Path, units: int, elsewhere: Callable[[str], list[str]] = lambda _: []
    ) -> None:
        self.url, self.units = url, units
        self.course = Course()
        self.scene = Charging(1, 0, folder, losses=False, units=units)
        self.scene.configure(url)
        machines = enumerate(self.scene.machines)
        self._workers = {machine: Worker(self.scene, number, elsewhere(machine)) for number, machine in machines}

    def start(self, *names: str) -> None:
        workers = [self._workers[name] for name in names]
        for worker in workers:
            worker.start(worker.number)
        until_decided(workers)

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            self._workers[name].signal(number)

    def decisions(self) -> list[tuple[str, Event]]:
        """All decisions so far, and whose they are, in the order in which they were asked for."""
        events = ((life.machine, event) for life in lives_of(self.scene) for event in life.events)
        decided = [(machine, event) for machine, event in events if event["event"] == "decision" and event["commit"]]
        return sorted(decided, key=lambda pair: pair[1]["asked_ms"])

    def admitted(self) -> list[str]:
        """The ids of all calls that were admitted."""
        return [event["id"] for _, event in self.decisions() if event["admitted"]]

    def refused(self) -> set[str]:
        """The machines that were told that the limit is reached."""
        return {machine for machine, event in self.decisions() if event["reason"] == "limit"}

    def end(self) -> None:
        self.scene.stop.touch()
        until_ended(self.course, [worker for worker in self._workers.values() if worker.process is not None])

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers.values():
            if worker.process is not None:
                worker.kill()


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
            self.put_back = sum(loss.charges for loss in losses(budget._project))
        self.missing = len({*admitted} - {*ids})
        self.overspent = max(0, len(admitted) - crew.units)
        self.longest_s = max(event["ms"] - event["asked_ms"] for _, event in crew.decisions()) / 1_000
        self.wrong += crew.course.failed
        self.check(self.missing == 0, f"{self.missing} charges were lost, and not put back")
        self.check(used_units == len(ids), f"{used_units} units are used, of {len(ids)} calls")
        return ids
