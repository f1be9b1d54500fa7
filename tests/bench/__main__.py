"""Measure everything, print the tables, and hold the ratios against the bars."""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from bench import cold, loads, on_ledgers, on_loops
from bench.before import Before
from bench.on_ledgers import DAY_UNITS
from bench.report import measuring


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of the races and calls in each, charges filled in before, one in how many of a day's
    charges is made to be weighed, how many fill the windows that refuse, how many decisions an event loop makes, and
    how many projects are many.
    """

    rounds: int
    calls: int
    growth_rounds: int
    cold_rounds: int
    sizes: tuple[int, ...]
    share: int
    full: int
    decisions: int
    projects: int


FULL = Effort(200, 20, 60, 30, (100, 1_000, 10_000, 50_000), 1, DAY_UNITS, 3_000, projects=1_000)
QUICK = Effort(30, 10, 15, 4, (100, 1_000), 10, 200, 150, projects=5)


def main() -> None:
    options = _options()
    effort = QUICK if options.quick else FULL
    with ExitStack() as stack:
        before = None
        if options.before:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="quota-bench-"))
            before = stack.enter_context(closing(Before(options.before, Path(place, "before"))))
        report, server, folder = stack.enter_context(measuring())
        stack.enter_context(patch.dict(os.environ, {"QUOTA_STATE_DIR": str(folder / "state")}))
        on_ledgers.measure_decisions(report, server, folder, effort.rounds, effort.calls, before, effort.full)
        on_ledgers.measure_memory(report, server, effort.share)
        grown = effort.sizes, effort.growth_rounds, effort.calls
        loads.measure_growth(report, "Redis", lambda _: server.url, *grown)
        on_ledgers.measure_size(report, folder, effort.share)
        loads.measure_growth(report, "SQLite", lambda file: f"sqlite:///{folder / file}.db", *grown)
        loads.measure_together(report, server.url, folder, effort.growth_rounds)
        on_loops.measure(report, server, folder, effort.cold_rounds, effort.decisions)
        loads.measure_many(report, folder, server.url, effort.projects)
        cold.measure(report, folder, server.url, effort.cold_rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: the order of magnitude")
    parser.add_argument("--before", metavar="REVISION", help="also measure decisions as REVISION made them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
