"""The runs of this machine: when each began and ended, how, and what refused it. Kept in the store for 35 days,
or the newest 50,000 of them.

A row is written when a run begins and completed when it ends. So a run that was killed is seen too: it has no end.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quota.common.clock import LATEST_MS, host_clock
from quota.common.members import members
from quota.common.sqlite_file import SqliteFile
from quota.common.text import shorten
from quota.reports.runs import RegionOfRun, Run
from quota.terms.limits import DAY_MS

KEPT_MS = 35 * DAY_MS
MAX_AHEAD_MS = 2 * DAY_MS
"""How far apart runs may be. A time beyond that is believed once runs have had it for DOUBTED_MS."""

DOUBTED_MS = DAY_MS

MAX_KEPT = 50_000
"""A run that is refused takes 1.4 kB. A job that starts each second begins three million in 35 days."""

MAX_REFUSAL_CHARACTERS = 4_000
MAX_WHY_CHARACTERS = 1_000
MAX_ERRORS_CHARACTERS = 20_000
"""The most characters that the errors of a run's regions have together, but each may have 100."""

MAX_ROWS = 10_000

UNFINISHED = "unfinished"
"""The outcome of a run that has not ended: it is still running, or it was killed."""

_COLUMNS = (
    "id, run, project, job, outcome, why, refused_by, retry_at_ms, units, attempts, exit_status, began_at_ms,"
    " ended_at_ms, regions, refusal"
)


_OF_REGION = ("region", "outcome", "pages", "items", "units", "error")


def run_json(run: Run) -> dict[str, object]:
    """A run as `quota runs --json` prints it: its regions without cursors."""
    names = "run project job outcome why refused_by retry_at units attempts exit_status began_at ended_at"
    return {**members(run, names), "regions": [_region_json(one) for one in run.regions], "refusal": run.refusal}


def _region_json(one: RegionOfRun) -> dict[str, object]:
    return {name: getattr(one, name) for name in _OF_REGION}


class RunHistory:
    """The table `past_runs` of a store."""

    def __init__(self, file: SqliteFile, clock: Callable[[], int] = host_clock) -> None:
        self._file = file
        self._clock = clock

    def begin(self, run: str, project: str, job: str) -> int:
        """Note that a run begins, and forget those before KEPT_MS and MAX_KEPT. Returns the row's id, for `end`."""
        now_ms = self._clock()

        def work(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM past_runs WHERE began_at_ms <= ?", (believed_ms(db, now_ms) - KEPT_MS,))
            db.execute("DELETE FROM past_runs WHERE id <= (SELECT max(id) FROM past_runs) + 1 - ?", (MAX_KEPT,))
            row = (run, project, job, UNFINISHED, now_ms)
            sql = "INSERT INTO past_runs (run, project, job, outcome, began_at_ms) VALUES (?, ?, ?, ?, ?)"
            return db.execute(sql, row).lastrowid or 0

        return self._file.transact(work, write=True)

    def end(self, row_id: int, report: Run) -> None:
        """Complete the row with how the run ended, and with what refused it."""
        failed = sum(one.error is not None for one in report.regions)
        most = max(100, min(MAX_WHY_CHARACTERS, MAX_ERRORS_CHARACTERS // max(1, failed)))
        regions = [
            replace(one, error=None if one.error is None else shorten(one.error, most)) for one in report.regions
        ]
        row = (
            report.outcome,
            shorten(report.why, MAX_WHY_CHARACTERS),
            report.refused_by,
            report.retry_at_ms,
            report.units,
            report.attempts,
            report.exit_status,
            self._clock(),
            json.dumps([_region_json(one) for one in regions]),
            None if report.refusal is None else _refusal_text(report.refusal),
            row_id,
        )
        sql = (
            "UPDATE past_runs SET outcome = ?, why = ?, refused_by = ?, retry_at_ms = ?, units = ?, attempts = ?,"
            " exit_status = ?, ended_at_ms = ?, regions = ?, refusal = ? WHERE id = ?"
        )
        self._file.transact(lambda db: db.execute(sql, row), write=True)

    def read(self, job: str | None = None, since_ms: int = 0, count: int = MAX_ROWS) -> list[Run]:
        """The newest runs that began after `since_ms`, newest first: of one job, or of all."""
        sql = (
            f"SELECT {_COLUMNS} FROM past_runs WHERE began_at_ms > ? AND (? IS NULL OR job = ?)"  # noqa: S608  # a constant
            " ORDER BY id DESC LIMIT ?"  # a run that a wrong clock dated ahead is not the newest for ever
        )
        name = None if job is None else job.encode(errors="replace").decode()  # SQLite stores no half of a character
        values = (since_ms, name, name, min(count, MAX_ROWS))
        rows = self._file.transact(lambda db: db.execute(sql, values).fetchall(), write=False)
        return [run for run in map(_read, rows) if run is not None]

    def last_ended(self, job: str) -> Run | None:
        """The newest run of a job that has ended: one that is under way says nothing yet of how runs end."""
        sql = (
            f"SELECT {_COLUMNS} FROM past_runs WHERE job = ? AND ended_at_ms IS NOT NULL"  # noqa: S608  # a constant
            " ORDER BY id DESC LIMIT 1"
        )
        row = self._file.transact(lambda db: db.execute(sql, (job,)).fetchone(), write=False)
        return None if row is None else _read(row)


def believed_ms(db: sqlite3.Connection, now_ms: int) -> int:
    """The time by which a run may delete what is old: now, unless that is days after the last run and runs have not
    had such a time for a day. Either the machine was off, or its clock is wrong; then it is the time of that run."""
    row: Sequence[Any] = db.execute("SELECT time_ms, doubted_ms FROM store").fetchone() or (None, None)
    time_ms, doubted_ms = (int(ms) if _is_whole(ms) else None for ms in row)
    since_ms = now_ms if doubted_ms is None else min(doubted_ms, now_ms)
    if time_ms is None or now_ms - time_ms <= MAX_AHEAD_MS or now_ms - since_ms >= DOUBTED_MS:
        time_ms, doubted_ms = now_ms, None
    else:
        doubted_ms = since_ms
    db.execute("UPDATE store SET time_ms = ?, doubted_ms = ?", (time_ms, doubted_ms))
    return time_ms


def _refusal_text(refusal: Mapping[str, Any]) -> str:
    """A decision as JSON: if need be without the limits that did not refuse."""
    text = json.dumps(refusal)
    if len(text) > MAX_REFUSAL_CHARACTERS:
        limits = [one for one in refusal["limits"] if one["name"] == refusal["refused_by"]]
        left_out = len(refusal["limits"]) - len(limits)
        text = json.dumps({**refusal, "limits": limits, "limits_left_out": left_out})
    return text


def _read(row: Sequence[Any]) -> Run | None:
    """A row as it was written; None for one that was not written so."""
    key, *told, regions, refusal = row
    run, project, job, outcome, why, refused_by, retry_at_ms, units, attempts, exit_status, began_ms, ended_ms = told
    if not all(isinstance(text, str) for text in (run, project, job, outcome, why, refused_by or "")):
        return None
    if not all(map(_is_whole, (key, units, attempts, began_ms, retry_at_ms or 0, exit_status or 0, ended_ms or 0))):
        return None
    try:
        listed = tuple(map(_region, json.loads(regions))) if regions else ()
        decided = json.loads(refusal) if refusal else None
    except (TypeError, ValueError, RecursionError):
        return None
    ending = refused_by, retry_at_ms, why, exit_status, decided if isinstance(decided, dict) else None
    return Run(run, job, outcome, listed, units, attempts, *ending, project, began_ms, ended_ms, str(key))


def _region(kept: Mapping[str, Any]) -> RegionOfRun:
    """A region as it was written. Raises TypeError or ValueError for one that was not written so."""
    region = RegionOfRun(**kept)
    texts, counts = (region.region, region.outcome, region.error or ""), (region.pages, region.items, region.units)
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_whole, counts)):
        raise ValueError(kept)
    return region


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < LATEST_MS
