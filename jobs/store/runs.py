"""The past runs of this machine.

    RunHistory     the runs: when each began and ended, how, and what refused it; and what the pages of jobs brought
    note_page      notes what one page brought

The store keeps runs for 35 days, at most the newest 50,000. A run writes its row when it begins, and completes it when
it ends. So a killed run has a row too, without an end.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quota.common.clock import LATEST_MS
from quota.common.sqlite_file import SqliteFile
from quota.common.text import members, shorten
from quota.jobs.job import Page
from quota.jobs.store.checkpoints import assigned
from quota.jobs.store.file import note_time
from quota.reports.runs import Bought, RegionOfRun, Run
from quota.rules.refusals import bounded
from quota.terms.limits import DAY_MS

KEPT_MS = 35 * DAY_MS

MAX_KEPT = 50_000
"""A refused run takes 1.4 kB. A job that starts each second begins three million runs in 35 days."""

MAX_WHY_CHARACTERS = 1_000
MAX_ERRORS_CHARACTERS = 20_000
"""The most characters of all errors of a run's regions together; each may have at least 100."""

MAX_ROWS = 10_000

UNFINISHED = "unfinished"
"""The outcome of a run that has not ended, and of its regions: it is still running, or it was killed."""

_TEXTS = ("run", "project", "job", "outcome", "why", "refused_by")
_NUMBERS = ("key", "units", "attempts", "began_ms", "retry_at_ms", "exit_status", "ended_ms")
_OPTIONAL = ("refused_by", "retry_at_ms", "exit_status", "ended_ms")
_COLUMNS = (
    "run, project, job, outcome, why, refused_by, id AS key, units, attempts, began_at_ms AS began_ms, retry_at_ms,"
    " exit_status, ended_at_ms AS ended_ms, regions, refusal"
)

_FIELDS = "run project job outcome why refused_by retry_at units attempts exit_status began_at ended_at"
RUN_FIELDS = (*_FIELDS.split(), "regions", "refusal")


def run_json(run: Run) -> dict[str, object]:
    """A run as `quota runs --json` prints it: its regions without cursors."""
    return {
        **members(run, _FIELDS),
        "regions": [_region_json(region) for region in run.regions],
        "refusal": run.refusal,
    }


def _region_json(region: RegionOfRun) -> dict[str, object]:
    return members(region, "region outcome pages items units error")


Units = Sequence[tuple[int, int]]
"""Units of attempts, each with the number of its page in the pass."""


@dataclass(eq=False)
class RunHistory:
    """The tables `past_runs` and `bought` of a store."""

    _file: SqliteFile
    _clock: Callable[[], int]

    def begin(self, run: str, project: str, job: str) -> int:
        """Note that a run begins, and delete runs beyond KEPT_MS and MAX_KEPT. Returns the row's id, for `end`."""
        now_ms = self._clock()

        def work(db: sqlite3.Connection) -> int:
            db.execute("DELETE FROM past_runs WHERE began_at_ms <= ?", (note_time(db, now_ms) - KEPT_MS,))
            db.execute("DELETE FROM past_runs WHERE id <= (SELECT max(id) FROM past_runs) + 1 - ?", (MAX_KEPT,))
            row = (run, project, job, UNFINISHED, now_ms)
            sql = "INSERT INTO past_runs (run, project, job, outcome, began_at_ms) VALUES (?, ?, ?, ?, ?)"
            return db.execute(sql, row).lastrowid or 0

        return self._file.transact(work, write=True)

    def cover(self, row_id: int, regions: Sequence[str]) -> None:
        """Note the regions that a run is about to cover: a killed run says no more."""
        covered = json.dumps([_region_json(RegionOfRun(region, UNFINISHED)) for region in regions])
        sql = "UPDATE past_runs SET regions = ? WHERE id = ?"
        self._file.transact(lambda db: db.execute(sql, (covered, row_id)), write=True)

    def end(self, row_id: int, report: Run) -> None:
        """Complete the row with how the run ended, and with what refused it."""
        failed = sum(region.error is not None for region in report.regions)
        most = max(100, min(MAX_WHY_CHARACTERS, MAX_ERRORS_CHARACTERS // max(1, failed)))
        regions = [
            _region_json(region) | {"error": None if region.error is None else shorten(region.error, most)}
            for region in report.regions
        ]
        ending = {
            **members(report, "outcome refused_by retry_at_ms units attempts exit_status"),
            "why": shorten(report.why, MAX_WHY_CHARACTERS),
            "ended_at_ms": self._clock(),
            "regions": json.dumps(regions),
            "refusal": None if report.refusal is None else json.dumps(bounded(report.refusal)),
        }
        sql = f"UPDATE past_runs SET {assigned(ending)} WHERE id = :id"  # noqa: S608  # names of columns
        self._file.transact(lambda db: db.execute(sql, {**ending, "id": row_id}), write=True)

    def read(
        self, job: str | None = None, since_ms: int = 0, count: int = MAX_ROWS, *, ended: bool = False
    ) -> list[Run]:
        """The newest runs that began after `since_ms`, newest first: of one job, or of all. `ended`: only those that
        have ended, without runs that never got their turn."""
        name = None if job is None else job.encode(errors="replace").decode()  # SQLite stores no half of a character
        condition = "began_at_ms > ? AND (? IS NULL OR job = ?)"
        if ended:
            condition += " AND ended_at_ms IS NOT NULL AND outcome <> 'overlap'"
        # By id, so that a run that a wrong clock dated ahead is not the newest for ever.
        sql = f"SELECT {_COLUMNS} FROM past_runs WHERE {condition} ORDER BY id DESC LIMIT ?"  # noqa: S608  # constants
        values = since_ms, name, name, min(count, MAX_ROWS)
        rows = self._file.transact(lambda db: db.execute(sql, values).fetchall(), write=False)
        return [run for run in map(_read, rows) if run is not None]

    def stopped_at(self, job: str) -> str | None:
        """The method of the call whose refusal stopped the last run of a job; None if nothing stopped it."""
        last = self.read(job, count=1, ended=True)
        return next(((run.refusal or {}).get("method") for run in last), None)

    def note_units(self, job: str, units: Units) -> None:
        """Note the units of a run's attempts."""
        if units:
            self._file.transact(lambda db: note_units(db, job, units, self._clock()), write=True)

    def bought(self, since_ms: int) -> list[Bought]:
        """What the pages of each job brought since the day of `since_ms`, by job and page number."""
        sql = (
            "SELECT job, page, sum(pages), sum(items), sum(new), sum(units) FROM bought WHERE day_ms > ? - ?"
            " GROUP BY job, page ORDER BY job, page"
        )
        rows = self._file.transact(lambda db: db.execute(sql, (since_ms, DAY_MS)).fetchall(), write=False)
        return [Bought(*row) for row in rows]


def _read(row: Sequence[Any]) -> Run | None:
    """The run in a row; None if the row has values that no store writes."""
    *values, regions, refusal = row
    fields = dict(zip((*_TEXTS, *_NUMBERS), values, strict=True))
    given = {name: value for name, value in fields.items() if not (value is None and name in _OPTIONAL)}
    if not all(isinstance(value, str) if name in _TEXTS else _is_whole(value) for name, value in given.items()):
        return None
    try:
        listed = tuple(map(_region, json.loads(regions))) if regions else ()
        decided = json.loads(refusal) if refusal else None
    except (TypeError, ValueError, RecursionError):
        return None
    fields["key"] = str(fields["key"])
    return Run(regions=listed, refusal=decided if isinstance(decided, dict) else None, **fields)


def _region(kept: Mapping[str, Any]) -> RegionOfRun:
    """The region in a row. Raises TypeError or ValueError for values that no store writes."""
    region = RegionOfRun(**kept)
    texts, counts = (region.region, region.outcome, region.error or ""), (region.pages, region.items, region.units)
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_whole, counts)):
        raise ValueError(kept)
    return region


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < LATEST_MS


# -- what pages brought: rows of the table `bought` -------------------------------------------------------------------

MAX_PAGE = 100
"""Later pages count as this page."""

_ADD = (
    "INSERT INTO bought (day_ms, job, page, pages, items, new, units) VALUES (?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (day_ms, job, page) DO UPDATE SET pages = pages + excluded.pages, items = items + excluded.items,"
    " new = new + excluded.new, units = units + excluded.units"
)


def entries(db: sqlite3.Connection) -> int:
    """A number that grows by one with each new entry of a transaction: row ids rise, and a refreshed row keeps its
    id."""
    count = "(SELECT ifnull(max(rowid), 0) FROM {})"
    tables = " + ".join(count.format(table) for table in ("videos", "channels", "rows"))
    (number,) = db.execute(f"SELECT {tables}").fetchone()
    return int(number)


def note_units(db: sqlite3.Connection, job: str, units: Units, now_ms: int) -> None:
    day_ms = now_ms // DAY_MS * DAY_MS
    db.executemany(_ADD, [(day_ms, job, min(page, MAX_PAGE), 0, 0, 0, cost) for page, cost in units])


def note_page(db: sqlite3.Connection, job: str, number: int, page: Page, new: int, now_ms: int) -> None:
    if page.complete or page.items:
        brought = min(number, MAX_PAGE), int(page.complete), page.items, new, 0
        db.execute(_ADD, (now_ms // DAY_MS * DAY_MS, job, *brought))
