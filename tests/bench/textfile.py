"""What a run pays for its metrics: both files written anew, after the 32 charges of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

import quota
from bench.race import Contestant, race
from bench.report import Bar, Report
from quota.jobs.textfile import write_metrics
from quota.metrics import write_file
from quota.status import read_status

if TYPE_CHECKING:
    from collections.abc import Callable

CHARGES = 32
MOST_MS = 5
CONFIGURATION = """
textfile = "metrics"
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "bench-textfile"
key = "env:NOT_READ"
[[credentials.main.limits]]
name = "day"
units = 1_000_000_000
window = "24h"
[jobs.trending]
fetch = "trending"
regions = ["US"]
pages = 4
"""


def measure(report: Report, folder: Path, redis_url: str, rounds: int) -> None:
    """Both ledgers beside the bare writing of two files. prometheus_client is not imported for it."""
    report.progress.begin("metrics")
    folder = folder / "textfile"
    (folder / "metrics").mkdir(parents=True)
    before = os.environ.get("QUOTA_STATE_DIR")
    os.environ["QUOTA_STATE_DIR"] = str(folder / "state")
    sessions = []
    for name, url in (("SQLite", f"sqlite:///{folder / 'ledger.db'}"), ("Redis", redis_url)):
        path = folder / f"{name}.toml"
        path.write_text(CONFIGURATION.format(url=url))
        sessions.append((name, quota.open(path)))
    try:
        contestants = [Contestant("floor: two files written and renamed", lambda: _write_two(folder / "metrics"))]
        contestants += [
            Contestant(f"metrics of a run, {name}", lambda: None, time_calls=_after_a_run(session))
            for name, session in sessions
        ]
        rows = race(contestants, rounds, 2, report.progress)
    finally:
        for _, session in sessions:
            session.close()
        os.environ.pop("QUOTA_STATE_DIR")
        if before is not None:
            os.environ["QUOTA_STATE_DIR"] = before
    assert "prometheus_client" not in sys.modules
    report.race("textfile", f"Metrics of a run, after {CHARGES} charges", rows)
    report.bars += [Bar(row.name, row.us / 1000, MOST_MS, "ms") for row in rows[1:]]


def _write_two(folder: Path) -> None:
    for name in ("one.prom", "two.prom"):
        write_file(str(folder), name, "# nothing\n")


def _after_a_run(session: quota.Session) -> Callable[[int], list[int]]:
    def work(calls: int) -> list[int]:
        times_ns = []
        for _ in range(calls):
            for _ in range(CHARGES):
                session.budget().charge("videos.list", job="trending", region="US")
            status = read_status(session, "main")
            started_ns = perf_counter_ns()
            write_metrics(session, "trending", 0, status, [])
            times_ns.append(perf_counter_ns() - started_ns)
        return times_ns

    return work
