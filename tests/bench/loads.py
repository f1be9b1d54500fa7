"""What decisions cost with many charges in the window, for several calls at once, and what many projects cost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import quota
from bench.budgets import budget, charging, day, fill
from bench.kinds import CHEAP, LABELS
from bench.race import Contestant, race
from bench.report import Bar, Report
from bench.sessions import budget_at
from quota.budget import Budget
from quota.ledger.factory import open_ledger

SIZES = (10, 100)
CALLS = 3
"""In each round. A hundred single charges are a long call."""

STATUS_S = 5


def measure_growth(
    report: Report, kind: str, url_of: Callable[[str], str], sizes: Sequence[int], rounds: int, calls: int
) -> None:
    """The same charge with so many before it. `url_of` gives the ledger for a name."""
    report.begin(f"{kind}, growth")
    ledgers, contestants = [], []
    for size in sizes:
        ledger = open_ledger(url_of(f"growth-{size}"))
        project = f"growth-{size}"
        fill(ledger, project, size)
        contestants.append(
            Contestant(f"{size:,} charges in the window", charging(budget(ledger, project, [day()]), CHEAP, 1))
        )
        ledgers.append(ledger)
    for contestant in contestants:
        contestant.call()  # reads what was filled in
    rows = race(contestants, rounds, calls)
    report.race(f"{kind}: growth, 1 limit, 1 unit", rows, "ratio to the first row")
    for ledger in ledgers:
        ledger.close()


def measure_together(report: Report, redis_url: str, folder: Path, rounds: int) -> None:
    for ledger_name, url in (("Redis", redis_url), ("SQLite", f"sqlite:///{folder / 'together.db'}")):
        report.begin(f"{ledger_name}, several calls together")
        spent = budget_at(url, folder, f"together-{ledger_name}", limits=2)
        contestants = []
        for size in SIZES:
            contestants.append(Contestant(f"{size} calls, one by one", _one_by_one(spent, size)))
            contestants.append(Contestant(f"{size} calls together", _together(spent, size)))
        rows = race(contestants, rounds, CALLS)
        report.race(f"{ledger_name}: several calls, all or none", rows, "2 limits, guarded; ratio to the first line")


def _one_by_one(spent: Budget, size: int) -> Callable[[], object]:
    def call() -> None:
        for _ in range(size):
            assert spent.charge(CHEAP, **LABELS).admitted

    return call


def _together(spent: Budget, size: int) -> Callable[[], object]:
    calls = [CHEAP] * size

    def call() -> None:
        assert spent.charge_many(calls, **LABELS)[0].admitted

    return call


def measure_many(report: Report, folder: Path, redis_url: str, projects: int) -> None:
    """Each project has a charge, and the two limits of a credential that names none."""
    report.begin("many projects")
    folder = folder / "many"
    folder.mkdir()
    for name, url in (("Redis", redis_url), ("SQLite", f"sqlite:///{folder / 'ledger.db'}")):
        path = folder / f"{name}.toml"
        path.write_text(f'[ledger]\nurl = "{url}"\n' + "".join(map(_credential, range(projects))))
        charged = {"QUOTA_STATE_DIR": str(folder / f"{name} charged")}
        with patch.dict(os.environ, charged), quota.open(path) as session:
            for credential in session.settings.credentials:
                session.budget(credential).charge("search.list")
        environment = {**os.environ, "QUOTA_STATE_DIR": str(folder / f"{name} looked at")}
        command = [sys.executable, "-c", "from quota.cli.entry import main; main()", "status", "--config", str(path)]
        for look in ("first status", "status"):
            started_s = perf_counter()
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
            took_s = perf_counter() - started_s
            report.bars.append(Bar(f"{look} of {projects:,} projects, {name}", took_s, STATUS_S, "s"))


def _credential(n: int) -> str:
    return f'[credentials.c{n}]\napi = "youtube-v3"\nproject = "bench-many-{n}"\n'
