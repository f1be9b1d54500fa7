"""The SQLite ledger: time of a decision beside a bare INSERT in the same folder, and the size of a day on disk."""

from __future__ import annotations

import sqlite3
from itertools import count
from time import time_ns
from typing import TYPE_CHECKING

from bench.budgets import (
    SteppingClock,
    budget,
    decisions,
    one,
    spread_over_a_day,
    three,
)
from bench.kinds import CHEAP, DEAR, DEAR_UNITS, LABELS
from bench.peers import pyrate_sqlite
from bench.race import Contestant, race
from quota.ledger.factory import open_ledger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.before import Before
    from bench.report import Report

DAY_UNITS = 9_500


def measure(
    report: Report, folder: Path, rounds: int, calls: int, before: Before | None, full: int = DAY_UNITS
) -> None:
    """How long a decision takes; and took, `before`. `full`: so many charges fill the windows that refuse."""
    report.progress.begin("SQLite, time of a decision")
    ledger = open_ledger(f"sqlite:///{folder / 'ledger.db'}")
    peeked = budget(ledger, "peek", three())
    earlier = before.contestants("SQLite", lambda name: f"sqlite:///{folder / name}.db", full) if before else []
    contestants = [
        Contestant("floor: INSERT, its own transaction", _bare_insert(folder / "floor.db")),
        *(Contestant(f"quota, {name}", call) for name, call in decisions(ledger, folder / "file", full).items()),
        *earlier,
        Contestant("quota, peek, 3 limits", lambda: peeked.peek(DEAR, **LABELS)),
    ]
    for units in (1, DEAR_UNITS):
        peer = pyrate_sqlite(str(folder / f"pyrate-{units}.db"))
        if peer is not None:
            hit, empty = peer
            name = f"pyrate-limiter, {units} unit{'s' if units > 1 else ''}"
            contestants.append(Contestant(name, lambda hit=hit, units=units: hit(units), empty))
    rows = race(contestants, rounds, calls, report.progress)
    report.race(
        "sqlite",
        "SQLite: time of a decision",
        rows,
        "guarded: with a journal and an allowance; 1 limit, if not 3;\n"
        "ratio to a bare INSERT into a table of the same shape, WAL, synchronous NORMAL;\n"
        "pyrate-limiter begins each round with an empty budget; `mean` includes the\ncheckpoints",
    )
    if before:
        before.show(report, "SQLite", {row.name: row.ratio for row in rows})
    ledger.close()


def measure_size(report: Report, folder: Path, share: int) -> None:
    """What a day's charges take on disk. `share`: only one in so many is made, to save time."""
    report.progress.begin("SQLite, size of a day")
    rows = []
    for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
        path, clock = folder / f"size-{units}.db", SteppingClock()
        ledger = open_ledger(f"sqlite:///{path}", clock=clock)
        budget(ledger, "main", one(), clock=clock).peek(CHEAP)
        empty = _size(path)
        spread_over_a_day(ledger, clock, "main", charges, units)
        ledger.close()
        rows.append((f"quota, {charges:,} charges of {units}", _size(path) - empty, charges))
    report.sizes("sqlite-size", "SQLite: a day on disk, beyond an empty ledger", rows)


def _bare_insert(path: Path) -> Callable[[], object]:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(
        "CREATE TABLE charges (project TEXT, ms INTEGER, seq INTEGER, units INTEGER, charged_units INTEGER,"
        " bucket TEXT, method TEXT, job TEXT, region TEXT, token TEXT, PRIMARY KEY (project, ms, seq)) WITHOUT ROWID"
    )
    numbers = count()

    def call() -> None:
        n = next(numbers)
        row = ("main", time_ns() // 1_000_000, n, 1, 1, "units", CHEAP, LABELS["job"], LABELS["region"], f"1f2e3d4c{n}")
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        db.execute("COMMIT")

    return call


def _size(path: Path) -> int:
    """The file and its log, after what is in the log was moved into the file."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    files = [path, path.with_name(f"{path.name}-wal")]
    return sum(file.stat().st_size for file in files if file.exists())
