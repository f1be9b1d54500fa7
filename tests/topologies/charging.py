"""Processes that charge one project all the time, each as a machine of its own: it has a state folder.

`python -m topologies.charging URL FOLDER NAME UNITS` is one. Each decision is a line of JSON in FOLDER/NAME.jsonl: when
it was asked for, how long it took, its id if it was admitted, else why not. It rests while FOLDER/rest-NAME is there,
and ends once FOLDER/finish is. With `read` behind all that, it only prints what the ledger holds now.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quota.budget import Budget
from quota.deciding.losses import losses
from quota.ledger.factory import open_ledger
from support.patience import be_patient
from support.setup import budget_of as budget_over
from support.setup import charges_at, ids_of, limit

if TYPE_CHECKING:
    from collections.abc import Sequence

TESTS = Path(__file__).resolve().parents[1]
PROJECT = "p"
REST_S = 0.008


@dataclass(frozen=True)
class Answer:
    """One decision, and whose it was."""

    name: str
    at_s: float
    took_s: float
    id: str | None
    reason: str


def budget_of(url: str, folder: Path, name: str, units: int) -> Budget:
    """Of the machine of that name."""
    return budget_over(open_ledger(url), limit(units), project=PROJECT, folder=folder / name)


def work(url: str, folder: Path, name: str, units: int) -> None:
    journal = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    budget, rest, finish = budget_of(url, folder, name, units), folder / f"rest-{name}", folder / "finish"
    while not finish.exists():
        if rest.exists():
            time.sleep(0.002)
            continue
        at_s = time.time()
        decision = budget.charge("videos.list", units=1)
        answer = (at_s, time.time() - at_s, decision.id, decision.reason)
        os.write(journal, json.dumps(answer).encode() + b"\n")
        time.sleep(REST_S)


class Crew:
    """The processes; whoever starts them in `with` also ends them. `prefix` runs one elsewhere, by its name."""

    def __init__(self, url: str, folder: Path, units: int) -> None:
        self.url, self.folder, self.units = url, folder, units
        self.died: list[str] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, prefix: Sequence[str] = ()) -> None:
        for name in names:
            command = [*prefix, sys.executable, "-m", "topologies.charging", self.url, str(self.folder), name]
            with (self.folder / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen([*command, str(self.units)], cwd=TESTS, stderr=log)

    def rest(self, *names: str) -> None:
        for name in names:
            (self.folder / f"rest-{name}").touch()
        time.sleep(1.2)  # what is on its way is answered by then

    def go_on(self, *names: str) -> None:
        for name in names:
            (self.folder / f"rest-{name}").unlink()

    def answers(self) -> list[Answer]:
        """All decisions of all processes, in order."""
        answers = []
        for name in self._processes:
            path = self.folder / f"{name}.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            answers += [Answer(name, *json.loads(line)) for line in lines]
        return sorted(answers, key=lambda answer: answer.at_s)

    def admitted(self) -> int:
        return sum(answer.id is not None for answer in self.answers())

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        (self.folder / "finish").touch()
        for name, process in self._processes.items():
            try:
                status = process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                self.died.append(f"{name} ended with status {status}")


@dataclass(frozen=True)
class Holding:
    """What the ledger holds at the end: the ids of all calls, and the units that are used. So many charges it had lost,
    and machines have put them back."""

    ids: list[str]
    used_units: int
    put_back: int


def holding(url: str, folder: Path, units: int, prefix: Sequence[str] = ()) -> Holding:
    """Asked by the machine `a`, in a process of its own, elsewhere with a `prefix`."""
    command = [*prefix, sys.executable, "-m", "topologies.charging", url, str(folder), "a", str(units), "read"]
    asked = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    return Holding(*json.loads(asked.stdout))


def read(url: str, folder: Path, name: str, units: int) -> None:
    be_patient()
    budget = budget_of(url, folder, name, units)
    used_units = budget.usage()[0].used_units
    put_back = sum(loss.charges for loss in losses(budget._project))
    print(json.dumps((ids_of(charges_at(budget.ledger, PROJECT)), used_units, put_back)))


if __name__ == "__main__":
    url, folder, name, units = sys.argv[1:5]
    (read if sys.argv[5:] else work)(url, Path(folder), name, int(units))
