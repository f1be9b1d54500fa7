"""When the ledger cannot answer: a small local allowance, bounded, durable, and repaid once the ledger is back.

    draw    calls up to `max_cost_units` are admitted while the journal holds less than `allowance_units` of this
            project within the longest window; dearer calls are refused
    repay   the next decision that reaches the ledger first hands it what was drawn

The journal is one file for all processes of a machine. Repaying does not renew the allowance: what was drawn counts
against it until it has left the longest window, so that `machines` journals together never hold more than
machines x allowance, whatever fails how often. `quota check` holds that against the headroom.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from quota.ledger import Charge
from quota.sqlite_file import SqliteFile

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from quota.ledger import Ledger

APPLICATION_ID = 0x51_4C_4A_31
"""Marks an SQLite file as a journal ("QLJ1")."""

REPAID_AT_ONCE = 100

_log = logging.getLogger("quota")


class Drawn(NamedTuple):
    """A call that the allowance let through, by its number in the journal, and what the allowance has left."""

    number: int | None
    left_units: int


class Allowance:
    """The allowance of one machine. Safe to share between threads. Raises LedgerError when its own file fails.

    `clock` is in ms since the epoch. The file is made at the first draw.
    """

    def __init__(self, path: str, max_cost_units: int, allowance_units: int, clock: Callable[[], int]) -> None:
        self.max_cost_units = max_cost_units
        self.allowance_units = allowance_units
        self._clock = clock
        self._path = path
        self._file = SqliteFile(
            path, "allowance", schema="journal.sql", application_id=APPLICATION_ID, version=1, durable=True
        )
        self._may_owe: dict[str, bool] = {}

    def draw(self, project: str, charge: Charge, longest_ms: int, *, commit: bool) -> Drawn | None:
        """Let one call through, if it is cheap enough and the allowance has room; None: refused.

        Without `commit` only the answer is given, and its number is None.
        """
        if charge.units > self.max_cost_units:
            return None

        def work(db: sqlite3.Connection) -> Drawn | None:
            newest_ms = db.execute("SELECT COALESCE(MAX(ms), 0) FROM draws WHERE project = ?", (project,)).fetchone()[0]
            now_ms = max(self._clock(), newest_ms)  # a clock that goes back must not renew anything
            used: int = db.execute(
                "SELECT COALESCE(SUM(units), 0) FROM draws WHERE project = ? AND ms > ?", (project, now_ms - longest_ms)
            ).fetchone()[0]
            left_units = self.allowance_units - used
            if charge.units > left_units:
                return None
            if not commit:
                return Drawn(None, left_units)
            row = (project, now_ms, charge.units, charge.bucket, charge.method, charge.job, charge.region, charge.token)
            number = db.execute(
                "INSERT INTO draws (project, ms, units, bucket, method, job, region, token)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            ).lastrowid
            db.execute("DELETE FROM draws WHERE project = ? AND repaid AND ms <= ?", (project, now_ms - 2 * longest_ms))
            return Drawn(number, left_units - charge.units)

        drawn = self._file.transact(work, write=commit)
        if commit and drawn is not None:
            self._may_owe[project] = True
            _log.warning(
                "allowance_drawn project=%s method=%s units=%d left=%d",
                project,
                charge.method,
                charge.units,
                drawn.left_units,
            )
        return drawn

    def settle(self, project: str, number: int, units: int) -> Charge | None:
        """Correct a draw that is not repaid yet; the charge as it stood before, None if there is none."""

        def work(db: sqlite3.Connection) -> Charge | None:
            row = db.execute(
                "SELECT units, bucket, method, job, region, token FROM draws"
                " WHERE project = ? AND number = ? AND NOT repaid",
                (project, number),
            ).fetchone()
            if row is None:
                return None
            db.execute("UPDATE draws SET units = ? WHERE number = ?", (units, number))
            return Charge(*row)

        return self._file.transact(work, write=True) if os.path.exists(self._path) else None

    def owed_units(self, project: str) -> int:
        """What was drawn and is not repaid."""
        if not os.path.exists(self._path):
            return 0
        sql = "SELECT COALESCE(SUM(units), 0) FROM draws WHERE project = ? AND NOT repaid"
        owed: int = self._file.transact(lambda db: db.execute(sql, (project,)).fetchone()[0], write=False)
        return owed

    def repay(self, project: str, ledger: Ledger) -> None:
        """Hand the ledger what was drawn, once: it remembers the last number repaid by this journal.

        Costs nothing where nothing was drawn. Raises LedgerError while the ledger still cannot answer.
        """
        if not self._may_owe.get(project, True):
            return
        self._may_owe[project] = os.path.exists(self._path)
        while self._may_owe[project]:
            machine, rows = self._file.transact(lambda db: self._unpaid(db, project), write=False)
            if rows:
                ledger.repay(project, machine, [(row[0], Charge(*row[1:])) for row in rows])
                self._mark_repaid(project, rows[-1][0])
                _log.warning("debt_repaid project=%s charges=%d units=%d", project, len(rows), sum(r[1] for r in rows))
            self._may_owe[project] = len(rows) == REPAID_AT_ONCE

    def _mark_repaid(self, project: str, last: int) -> None:
        sql = "UPDATE draws SET repaid = 1 WHERE project = ? AND number <= ?"
        self._file.transact(lambda db: db.execute(sql, (project, last)), write=True)

    def _unpaid(
        self, db: sqlite3.Connection, project: str
    ) -> tuple[str, list[tuple[int, int, str, str, str, str, str]]]:
        rows = db.execute(
            "SELECT number, units, bucket, method, job, region, token FROM draws"
            " WHERE project = ? AND NOT repaid ORDER BY number LIMIT ?",
            (project, REPAID_AT_ONCE),
        ).fetchall()
        return db.execute("SELECT id FROM machine").fetchone()[0], rows

    def close(self) -> None:
        self._file.close()
