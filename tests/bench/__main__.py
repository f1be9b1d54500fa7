"""Measure everything, print the tables, and hold the ratios against the bars."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path

import redis

from bench import cold, growth, many, moments, on_loops, on_redis, on_sqlite, together
from bench.before import Before
from bench.on_redis import DAY_UNITS
from bench.report import Report
from support.servers import RedisServer


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of the races and calls in each, charges filled in before, one in how many of a day's
    charges is made to be weighed, how many fill the windows that refuse, by how much other logs are shorter than they
    are for users, how many decisions an event loop makes, and how many projects are many.
    """

    rounds: int
    calls: int
    growth_rounds: int
    cold_rounds: int
    sizes: tuple[int, ...]
    share: int
    full: int
    shorter: int
    decisions: int
    projects: int


FULL = Effort(200, 20, 60, 30, (100, 1_000, 10_000, 50_000), 1, DAY_UNITS, 1, 3_000, projects=1_000)
QUICK = Effort(30, 10, 15, 4, (100, 1_000), 10, 200, 400, 150, projects=5)


def main() -> None:
    options = _options()
    effort = QUICK if options.quick else FULL
    rounds, growth_rounds, cold_rounds = effort.rounds, effort.growth_rounds, effort.cold_rounds
    if options.rounds:
        rounds = growth_rounds = cold_rounds = options.rounds
    report = Report()
    pinned = _pin()  # before the server starts: a child inherits it
    with tempfile.TemporaryDirectory(prefix="quota-bench-") as name:
        folder = Path(name)
        before = Before(options.before, folder / "before") if options.before else None
        server = RedisServer()
        try:
            report.about = _where(server, pinned)
            print(", ".join(f"{name} {value}" for name, value in report.about.items()))
            on_redis.measure(report, server, folder, rounds, effort.calls, before, effort.full)
            on_redis.measure_memory(report, server, effort.share)
            growth.measure(
                report, "Redis", lambda _: server.url, effort.sizes, effort.full, growth_rounds, effort.calls
            )
            on_sqlite.measure(report, folder, rounds, effort.calls, before, effort.full)
            on_sqlite.measure_size(report, folder, effort.share)
            growth.measure(
                report,
                "SQLite",
                lambda file: f"sqlite:///{folder / file}.db",
                effort.sizes,
                effort.full,
                growth_rounds,
                effort.calls,
            )
            together.measure(report, server.url, folder, growth_rounds)
            on_loops.measure(report, server, folder, cold_rounds, effort.decisions)
            moments.measure(report, server, folder, effort.full, effort.shorter)
            many.measure(report, folder, server.url, effort.projects)
            cold.measure(report, folder, server.url, cold_rounds)
        finally:
            if before:
                before.close()
            server.close()
    report.show_bars()
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: the order of magnitude")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of every race, instead of the usual number")
    parser.add_argument("--before", metavar="REVISION", help="also measure decisions as REVISION made them")
    parser.add_argument("--json", metavar="FILE", help="also write everything measured to FILE")
    return parser.parse_args()


def _pin() -> bool:
    """Keep this process and its children on one CPU, so that a round trip is the work and not the waking of another."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return True


def _where(server: RedisServer, pinned: bool) -> dict[str, str]:
    with redis.Redis(port=server.port) as client:
        version = client.info("server")["redis_version"]
    return {
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        "Redis": version,
        "redis-py": redis.__version__,
        "CPUs": "1" if pinned else "not pinned",
    }


if __name__ == "__main__":
    main()
