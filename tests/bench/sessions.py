"""Decisions as a user's program makes them, by a configuration and what `quota` itself offers: so every revision can.
With a journal of what the machine saw of the log, and with what answers while the ledger cannot.

    python -m bench.sessions URL FOLDER FULL

Prints where the code is from. Then it reads lines `CALLS NAME`, makes so many decisions of that kind (`bench.kinds`),
and answers with a line: the ns that each of them took. Those that are refused meet FULL charges of 1. The logs of its
projects, and its state folder, are its own: FOLDER names them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import quota
from bench.kinds import DEAR, DECISIONS, LABELS, Kind
from bench.race import time_calls

PLENTY = 10**9
ALLOWANCE_UNITS = 50
AT_ONCE = 100
LIMITS = (
    ("day", 'window = "24h"'),
    ("pacific-day", 'window = { calendar = "day", zone = "America/Los_Angeles" }'),
    ("search", f'window = "24h"\nmethods = ["{DEAR}"]'),
)


def budget_at(url: str, folder: Path, project: str, limits: int, units: int = PLENTY) -> quota.Budget:
    """With the first of these limits, each of so many units."""
    configured = "".join(
        f'[[credentials.main.limits]]\nname = "{name}"\n{window}\n'
        f"quota = {units + ALLOWANCE_UNITS}\nheadroom = {ALLOWANCE_UNITS}\n"
        for name, window in LIMITS[:limits]
    )
    path = folder / f"{project}.toml"
    path.write_text(
        f'[ledger]\nurl = "{url}"\n'
        f"unavailable = {{ max_cost = 1, allowance = {ALLOWANCE_UNITS}, machines = 1 }}\n"
        f'[credentials.main]\napi = "youtube-v3"\nproject = "{project}"\n{configured}'
    )
    return quota.open(path).budget()


def decision(url: str, folder: Path, project: str, kind: Kind, full: int) -> Callable[[], object]:
    budget = budget_at(url, folder, project, kind.limits, full if kind.refused else PLENTY)
    for before in range(0, full if kind.refused else 0, AT_ONCE):
        assert budget.charge_many([(DEAR, 1)] * min(AT_ONCE, full - before), **LABELS)[0].admitted

    def call() -> None:
        assert budget.charge(kind.method, units=kind.units, **LABELS).admitted is not kind.refused

    return call


def decisions(url: str, folder: Path, full: int) -> dict[str, Callable[[], object]]:
    """Each of a project of its own. Those that are refused meet `full` charges of 1."""
    folder.mkdir(exist_ok=True)
    return {
        name: decision(url, folder, f"{folder.name}-{number}", kind, full)
        for number, (name, kind) in enumerate(DECISIONS.items())
    }


def serve(url: str, folder: Path, full: int) -> None:
    print(quota.__file__, *import_module("quota.lua").__path__, sep=os.pathsep, flush=True)
    calls = decisions(url, folder, full)
    gc.disable()  # as in the race
    for line in sys.stdin:
        times, _, name = line.rstrip("\n").partition(" ")
        time_calls(calls[name], int(times) // 2)  # the first ones after a change of process are slow
        print(*time_calls(calls[name], int(times)), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
