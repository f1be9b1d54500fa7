"""What many projects cost: reading their configuration, and the status of all, first and later looks of a machine."""

from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import quota
from bench.report import Bar, Report
from quota.settings.load import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIGURATION_S = 1
STATUS_S = 5

_SHOWN = "from quota.cli.entry import main; main()"


def measure(report: Report, folder: Path, redis_url: str, projects: int) -> None:
    """Each project has a charge, and the two limits of a credential that names none."""
    report.progress.begin("many projects")
    folder = folder / "many"
    folder.mkdir()
    bars = []
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
            bars.append(Bar(f"{look} of {projects:,} projects, {name}", _taken_s(show), STATUS_S, "s"))
    bars.append(
        Bar(f"configuration of {projects:,} projects", _taken_s(lambda: load_settings(path)), CONFIGURATION_S, "s")
    )
    report.figures("many", "Many projects", bars)
    report.bars += [bar for bar in bars if bar.most is not None]


def _credential(n: int) -> str:
    return f'[credentials.c{n}]\napi = "youtube-v3"\nproject = "bench-many-{n}"\n'


def _taken_s(work: Callable[[], object]) -> float:
    started_s = perf_counter()
    work()
    return perf_counter() - started_s
