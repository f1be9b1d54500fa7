"""What many projects cost: the status of all of them, first and later looks of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import quota
from bench.report import Bar, Figure, Report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATUS_S = 5

_SHOWN = "from quota.cli.entry import main; main()"


def measure(report: Report, folder: Path, redis_url: str, projects: int) -> None:
    """Each project has a charge, and the two limits of a credential that names none."""
    report.progress.begin("many projects")
    folder = folder / "many"
    folder.mkdir()
    figures = []
    for name, url in (("Redis", redis_url), ("SQLite", f"sqlite:///{folder / 'ledger.db'}")):
        path = folder / f"{name}.toml"
        path.write_text(f'[ledger]\nurl = "{url}"\n' + "".join(map(_credential, range(projects))))
        os.environ["QUOTA_STATE_DIR"] = str(folder / f"{name} charged")
        with quota.open(path) as session:
            for credential in session.settings.credentials:
                session.budget(credential).charge("search.list")
        del os.environ["QUOTA_STATE_DIR"]
        environment = {**os.environ, "QUOTA_STATE_DIR": str(folder / f"{name} looked at")}
        command = [sys.executable, "-c", _SHOWN, "status", "--config", str(path)]

        def show(command: list[str] = command, environment: dict[str, str] = environment) -> None:
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)

        for look in ("first status", "status"):
            figures.append(Figure(f"{look} of {projects:,} projects, {name}", _taken_s(show), "s"))
    report.figures("many", "Many projects", figures)
    report.bars += [Bar(name, taken_s, STATUS_S, unit) for name, taken_s, unit in figures]


def _credential(n: int) -> str:
    return f'[credentials.c{n}]\napi = "youtube-v3"\nproject = "bench-many-{n}"\n'


def _taken_s(work: Callable[[], object]) -> float:
    started_s = perf_counter()
    work()
    return perf_counter() - started_s
