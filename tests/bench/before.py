"""Decisions as an earlier revision made them, in the same race as today's.

The earlier code is installed in a folder and called in a process of its own (`bench.sessions`), which makes and times
its calls when told to and is idle while others are measured. The same code differs by some hundredths between a process
of its own and the one that the others share; so today's code is called in the same way.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from bench.cold import REPOSITORY, lay_out
from bench.kinds import DECISIONS
from bench.race import Contestant
from bench.report import Bar, Report

NOW = "now"
HELD = "1 unit"
"""This decision must not be slower than it was."""

HELD_MOST = 1.03


class Before:
    """The package as of a revision of this repository, and as it is today, each in a folder with today's dependencies.

    Ends the program with one line if that cannot be had.
    """

    def __init__(self, revision: str, folder: Path) -> None:
        unknown = f"git knows no commit {revision} here"
        self.revision = _run(unknown, "git", "rev-parse", "--verify", "--quiet", "--short=7", f"{revision}^{{commit}}")
        self._folder, self._earlier, self._today = folder, folder / "earlier", folder / "today"
        self._processes: list[subprocess.Popen[str]] = []
        folder.mkdir()
        archive, source = folder / "source.zip", folder / "source"
        failed = f"{self.revision} cannot be installed"
        _run(failed, "git", "archive", "--format=zip", f"--output={archive}", self.revision)
        shutil.unpack_archive(archive, source)
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        _run(failed, *pip, "--target", str(self._earlier), str(source))
        lay_out(self._today)

    def contestants(self, kind: str, url_of: Callable[[str], str], full: int) -> list[Contestant]:
        """All kinds of decisions, then and now. `url_of` gives the ledger for a name, which is also the projects'."""
        return [
            contestant
            for when, packages in ((self.revision, self._earlier), (NOW, self._today))
            for contestant in self._contestants(when, packages, url_of(f"{kind}-{when}"), f"{kind}-{when}", full)
        ]

    def show(self, report: Report, kind: str, ratio: Mapping[str, float]) -> None:
        """A table of what each decision took, and takes."""
        rows = {}
        for name in DECISIONS:
            then, now = (ratio[f"{kind}-{when}: {name}"] for when in (self.revision, NOW))
            rows[name] = (then, now, now / then)
        columns = (self.revision, NOW, "of before")
        report.ratios(f"{kind}: before and now, as ratios to the floor", columns, rows)
        report.bars.append(Bar(f"{kind}, {HELD}, beside {self.revision}", rows[HELD][2], HELD_MOST))

    def close(self) -> None:
        for process in self._processes:
            process.communicate()  # the end of its stdin is its end

    def _contestants(self, when: str, packages: Path, url: str, name: str, full: int) -> list[Contestant]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("QUOTA_", "PYTHON"))}
        folder = self._folder / name
        folder.mkdir()
        environment["QUOTA_STATE_DIR"] = str(folder / "state")
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), str(REPOSITORY / "tests"), *site.getsitepackages()])
        process = subprocess.Popen(
            # Without `site`, nothing reads the .pth file by which an editable install leads to the working tree.
            [sys.executable, "-S", "-P", "-m", "bench.sessions", url, str(folder), str(full)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)

        def answer() -> str:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                _give_up(f"cannot measure '{when}'", process.communicate()[1])
            return line.rstrip("\n")

        def times_ns(kind: str, calls: int) -> list[int]:
            print(calls, kind, file=process.stdin, flush=True)
            return [int(ns) for ns in answer().split()]

        for place in answer().split(os.pathsep):
            assert Path(place).is_relative_to(packages), f"'{when}' would measure {place}"
        return [
            Contestant(f"{name}: {decision}", partial(times_ns, decision, 1), time_calls=partial(times_ns, decision))
            for decision in DECISIONS
        ]


def _run(failure: str, *command: str) -> str:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"bench: {failure}: {command[0]} is not installed")
    if done.returncode != 0:
        _give_up(failure, done.stderr)
    return done.stdout.strip()


def _give_up(failure: str, stderr: str) -> NoReturn:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("ERROR: ")] or lines  # pip says less in its last lines
    sys.exit(": ".join(["bench", failure, *telling[-1:]]))
