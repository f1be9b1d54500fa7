"""Decisions as an earlier revision made them, in the same race as today's.

The earlier code is installed in a folder and called in a process of its own, which makes and times its calls when told
to and is idle while others are measured. The same code differs by some hundredths between a process of its own and the
one that the others share; so today's guarded decisions, which are held against the earlier ones, are called both ways.

    python -m bench.before URL PROJECT [STATE]

reads a number of calls from each line of stdin and answers with a line: the ns that each of them took.
"""

from __future__ import annotations

import gc
import os
import shutil
import site
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cold import REPOSITORY, lay_out
from bench.race import Contestant, time_calls
from bench.report import Bar, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import NoReturn

GUARDED = "quota, 1 limit, guarded, in its own process"


class Before:
    """The package as of a revision of this repository, and as it is today, each in a folder with today's dependencies.

    Ends the program with one line if that cannot be had.
    """

    def __init__(self, revision: str, folder: Path) -> None:
        unknown = f"git knows no commit {revision} here"
        self.revision = _run(unknown, "git", "rev-parse", "--verify", "--quiet", "--short=7", f"{revision}^{{commit}}")
        self._row = f"as of {self.revision}, 1 limit, guarded"
        self._earlier, self._today, self._state = folder / "earlier", folder / "today", folder / "state"
        self._processes: list[subprocess.Popen[str]] = []
        folder.mkdir()
        archive, source = folder / "source.zip", folder / "source"
        failed = f"{self.revision} cannot be installed"
        _run(failed, "git", "archive", "--format=zip", f"--output={archive}", self.revision)
        shutil.unpack_archive(archive, source)
        self._measures = source / "tests"  # its own: an earlier revision has other names
        if not (self._measures / "bench" / "before.py").exists():
            sys.exit(f"bench: {self.revision} is older than this comparison: it cannot measure itself")
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        _run(failed, *pip, "--target", str(self._earlier), str(source))
        lay_out(self._today)
        self._state.mkdir()

    def contestants(self, kind: str, url_of: Callable[[str], str]) -> list[Contestant]:
        """A guarded decision then, and one now. `url_of` gives the ledger for a name, which is also the project's."""
        then, now = f"{kind}-then", f"{kind}-now"
        return [
            self._contestant(self._row, self._earlier, self._measures, url_of(then), then),
            self._contestant(GUARDED, self._today, REPOSITORY / "tests", url_of(now), now),
        ]

    def hold(self, report: Report, kind: str, ratio: Mapping[str, float]) -> None:
        """A decision must not be slower than it was."""
        report.bars.append(
            Bar(f"{kind}, guarded beside one of {self.revision}", ratio[GUARDED] / ratio[self._row], 1.03)
        )

    def close(self) -> None:
        for process in self._processes:
            process.communicate()  # the end of its stdin is its end

    def _contestant(self, name: str, packages: Path, measures: Path, url: str, project: str) -> Contestant:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("QUOTA_", "PYTHON"))}
        places = [str(packages), str(measures), *site.getsitepackages()]
        state = self._state / project
        state.mkdir(parents=True)
        process = subprocess.Popen(
            # Without `site`, nothing reads the .pth file by which an editable install leads to the working tree.
            [sys.executable, "-S", "-P", "-m", "bench.before", url, project, str(state)],
            env=environment | {"PYTHONPATH": os.pathsep.join(places)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)

        def answer() -> str:
            line = process.stdout.readline()
            if not line:
                _give_up(f"cannot measure '{name}'", process.communicate()[1])
            return line.rstrip("\n")

        def time_there(calls: int) -> list[int]:
            print(calls, file=process.stdin, flush=True)
            return [int(ns) for ns in answer().split()]

        for place in answer().split(os.pathsep):
            assert Path(place).is_relative_to(packages), f"'{name}' would measure {place}"
        return Contestant(name, lambda: time_there(1), time_calls=time_there)


def _run(failure: str, *command: str) -> str:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"bench: {failure}: {command[0]} is not installed")
    if done.returncode != 0:
        _give_up(failure, done.stderr)
    return done.stdout.strip()


def _give_up(failure: str, said: str) -> NoReturn:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("ERROR: ")] or lines  # pip says less in its last lines
    sys.exit(": ".join(["bench", failure, *telling[-1:]]))


def serve(url: str, project: str, state: str | None = None) -> None:
    """Say where the code is from, then charge as told; guarded if there is a state folder.

    Later revisions start this module of an earlier one: the arguments and what is printed must stay.
    """
    import quota
    from bench.budgets import CHEAP, budget, charging, guarded, one
    from quota.ledger.factory import open_ledger

    print(quota.__file__, *import_module("quota.lua").__path__, sep=os.pathsep, flush=True)
    ledger = open_ledger(url)
    spent = guarded(ledger, project, one(), Path(state)) if state else budget(ledger, project, one())
    call = charging(spent, CHEAP, 1)
    gc.disable()  # as in the race
    for line in sys.stdin:
        calls = int(line)
        time_calls(call, calls // 2)  # the first ones after a change of process are slow
        print(*time_calls(call, calls), flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
