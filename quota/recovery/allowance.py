"""When the ledger cannot answer: a small local allowance, bounded, durable, and repaid once the ledger is back.

    draw    calls up to `max_cost_units` are admitted while the journal holds less than `allowance_units` of this
            project within the longest window; dearer calls are refused
    repay   the next decision that reaches the ledger first hands it what was drawn

The journal is one file for all processes of a machine. Repaying does not renew the allowance: what was drawn counts
against it until it has left the longest window, so that `machines` journals together never hold more than
machines x allowance, whatever fails how often. `quota check` holds that against the headroom.

What the journal itself may suffer, and what follows:

    it cannot be read or written    nothing is drawn. What is owed stays noted, is repaid once it can be read again, and
                                    stops no call meanwhile: the ledger answers for those
    its note "repaid" is lost       the same is sent again, and the ledger, which remembers the last number, ignores it
    the machine loses its power     a draw is on the disk before its call leaves
    it is deleted                   what was owed is forgotten and the allowance begins anew: upstream may see up to
                                    `allowance_units` more than the ledger counts, once for each deletion

An outage is two lines of a process's log, however many calls it lets through: `allowance_drawn` at the first of them,
with what the ledger's trouble is, and at its end `debt_repaid`, or `allowance_used` where the process ends before it
repays.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from quota.arguments import MAX_NUMBER, whole, whole_clock
from quota.common.clock import LATEST_MS, host_clock
from quota.common.log import warn
from quota.common.sqlite_file import SqliteFile, sound
from quota.errors import LedgerError
from quota.ledger.entry import Charge

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from quota.ledger.contract import Ledger

APPLICATION_ID = 0x51_4C_4A_31
"""Marks an SQLite file as a journal ("QLJ1")."""

REPAID_AT_ONCE = 100

LOOK_AGAIN_MS = 10_000
"""How soon a process looks again into a journal that it found paid, or unreadable: others may draw meanwhile."""


class Drawn(NamedTuple):
    """A call that the allowance let through, by its number in the journal, and what the allowance has left."""

    number: int | None
    left_units: int


class Repaid(NamedTuple):
    """A draw that the ledger has been handed: it is found there by its token, not long before `ms` or after it."""

    units: int
    ms: int
    idempotency_key: str


class Allowance:
    """The allowance of one machine. Safe to share between threads and after a fork.

    `clock` is in ms since the epoch. The file is made at the first draw. When it fails, `draw` and `settle` raise
    LedgerError; the others go on without it and log `allowance_unreadable`, once for each process.
    """

    def __init__(self, path: str, max_cost_units: int, allowance_units: int, clock: Callable[[], int]) -> None:
        self.max_cost_units = whole(max_cost_units, "units: the dearest call of an allowance", 1, MAX_NUMBER)
        self.allowance_units = whole(allowance_units, "units: an allowance", 1, MAX_NUMBER)
        self._clock = clock if clock is host_clock else whole_clock(clock)
        self._path = path
        self._file = SqliteFile(
            path,
            "allowance",
            schema=("quota.recovery", "journal.sql"),
            application_id=APPLICATION_ID,
            version=4,
            lost_then="what it owes is forgotten then",
            durable=True,
        )
        self._looked_ms: dict[str, int] = {}  # when a project was found to owe nothing
        self._drawn: dict[tuple[str, int], list[tuple[int, int]]] = {}  # (project, pid) -> units and what was left then
        self._warned = False

    def draw(
        self, project: str, charge: Charge, longest_ms: int, *, commit: bool, because: str = "the ledger did not answer"
    ) -> Drawn | None:
        """Let one call through, if it is cheap enough and the allowance has room; None: refused.

        Without `commit` only the answer is given, and its number is None. `because` is what the log says of the ledger.
        """
        if charge.units > self.max_cost_units:
            return None

        def work(db: sqlite3.Connection) -> Drawn | None:
            newest = db.execute("SELECT COALESCE(MAX(drawn_ms), 0) FROM draws WHERE project = ?", (project,)).fetchone()
            now_ms = max(
                self._clock(), *sound(newest, until=1, most=LATEST_MS)
            )  # a clock that goes back must not renew anything
            used = db.execute(
                "SELECT COALESCE(SUM(units), 0) FROM draws WHERE project = ? AND drawn_ms > ?",
                (project, now_ms - longest_ms),
            ).fetchone()
            left_units = self.allowance_units - sound(used, until=1)[0]
            if charge.units > left_units:
                return None
            if not commit:
                return Drawn(None, left_units)
            row = (
                project,
                now_ms,
                charge.units,
                charge.bucket,
                charge.method,
                charge.job,
                charge.region,
                charge.idempotency_key,
            )
            number = db.execute(
                "INSERT INTO draws (project, drawn_ms, units, bucket, method, job, region, idempotency_key)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            ).lastrowid
            # No window reaches these any more, so neither the allowance nor the ledger has a use for them: not the
            # longest of any configuration that draws here.
            known = db.execute("SELECT window_ms FROM longest_windows WHERE project = ?", (project,)).fetchone() or (0,)
            kept_ms = max(longest_ms, sound(known, until=1)[0])
            if known != (kept_ms,):
                db.execute("REPLACE INTO longest_windows VALUES (?, ?)", (project, kept_ms))
            db.execute("DELETE FROM draws WHERE project = ? AND drawn_ms <= ?", (project, now_ms - 2 * kept_ms))
            return Drawn(number, left_units - charge.units)

        drawn = self._file.transact(work, write=commit)
        if commit and drawn is not None:
            self._looked_ms.pop(project, None)
            outage = self._drawn.setdefault((project, os.getpid()), [])
            if not outage:
                warn(
                    "allowance_drawn project=%s method=%s units=%d left=%d: %s",
                    project,
                    charge.method,
                    charge.units,
                    drawn.left_units,
                    because,
                )
            outage.append((charge.units, drawn.left_units))
        return drawn

    def settle(self, project: str, number: int, units: int) -> Charge | None:
        """Correct a draw that is not repaid yet; the charge as it stood before, None if there is none: see `repaid`."""

        def work(db: sqlite3.Connection) -> Charge | None:
            row = db.execute(
                "SELECT units, bucket, method, job, region, idempotency_key FROM draws"
                " WHERE project = ? AND number = ? AND NOT repaid",
                (project, number),
            ).fetchone()
            if row is None:
                return None
            db.execute("UPDATE draws SET units = ?, corrected = 1 WHERE number = ?", (units, number))
            return Charge(*sound(row, until=1))

        return self._file.transact(work, write=True) if os.path.exists(self._path) else None

    def repaid(self, project: str, number: int) -> Repaid | None:
        """What the ledger was handed for a draw; None for one that is owed, or is not known (any more)."""

        def work(db: sqlite3.Connection) -> Repaid | None:
            row = db.execute(
                "SELECT units, drawn_ms, idempotency_key FROM draws WHERE project = ? AND number = ? AND repaid",
                (project, number),
            ).fetchone()
            return None if row is None else Repaid(*sound(row, until=2, most=LATEST_MS))

        return self._file.transact(work, write=False) if os.path.exists(self._path) else None

    def note_settled(self, project: str, number: int, units: int) -> None:
        """A repaid draw counts so much now: the ledger knows, and this is for the allowance and its reports."""
        sql = "UPDATE draws SET units = ? WHERE project = ? AND number = ? AND repaid"
        self._file.transact(lambda db: db.execute(sql, (units, project, number)), write=True)

    def drawn_by(self, project: str, run: str) -> list[Charge]:
        """What this run drew, repaid or not, as it stands now."""
        sql = (
            "SELECT units, bucket, method, job, region, idempotency_key FROM draws"
            " WHERE project = ? AND substr(idempotency_key, 1, ?) = ?"
        )

        def work(db: sqlite3.Connection) -> list[Charge]:
            rows = db.execute(sql, (project, len(run), run)).fetchall()
            return [Charge(*sound(row, until=1)) for row in rows]

        return self._file.transact(work, write=False) if os.path.exists(self._path) else []

    def owed_units(self, project: str) -> int:
        """What was drawn and is not repaid, as far as the journal can be read."""
        if not os.path.exists(self._path):
            return 0
        sql = "SELECT COALESCE(SUM(units), 0) FROM draws WHERE project = ? AND NOT repaid"
        try:
            owed: tuple[int] = self._file.transact(
                lambda db: sound(db.execute(sql, (project,)).fetchone(), until=1), write=False
            )
        except LedgerError as error:
            self._warn(error)
            return 0
        return owed[0]

    def repay(self, project: str, ledger: Ledger, retention_ms: int) -> Sequence[Repaid]:
        """Hand the ledger what was drawn, once: it remembers the last number repaid by this journal. `retention_ms` is
        how long it must keep it: see `quota.ledger.contract.kept_ms`.

        Costs next to nothing where nothing is owed. Raises LedgerError while the ledger still cannot answer, and never
        because of the journal: a debt that cannot be read is no reason to refuse calls that the ledger can decide.

        Returns the draws that were corrected before they were noted as repaid. The ledger may have been told what they
        counted before that, and the caller has to settle them there.
        """
        now_ms = self._clock()
        looked_ms = self._looked_ms.get(project)
        if looked_ms is not None and 0 <= now_ms - looked_ms < LOOK_AGAIN_MS:
            return ()
        corrected: list[Repaid] = []
        if os.path.exists(self._path):
            corrected = self._repay(project, ledger, retention_ms)
            self._say_used(project)
        self._looked_ms[project] = now_ms
        return corrected

    def _repay(self, project: str, ledger: Ledger, retention_ms: int) -> list[Repaid]:
        corrected: list[Repaid] = []
        after, more = 0, True
        while more:
            unpaid = partial(self._unpaid, project=project, after=after)
            try:
                machine, rows = self._file.transact(unpaid, write=False)
            except LedgerError as error:
                self._warn(error)
                return corrected
            more = len(rows) == REPAID_AT_ONCE
            if not rows:
                return corrected
            after = rows[-1][0]
            ledger.repay(project, machine, [(row[0], Charge(*row[1:])) for row in rows], retention_ms)
            try:
                corrected += self._mark_repaid(project, after)
            except LedgerError as error:  # they are sent again later, which changes nothing
                self._warn(error)
            else:
                units = sum(row[1] for row in rows)
                self._drawn.pop((project, os.getpid()), None)
                warn("debt_repaid project=%s charges=%d units=%d", project, len(rows), units)
        return corrected

    def _say_used(self, project: str) -> None:
        """The end of an outage whose debt this process has not repaid; of a single draw all is said."""
        outage = self._drawn.pop((project, os.getpid()), [])
        if len(outage) > 1:
            units = sum(units for units, _ in outage)
            warn("allowance_used project=%s charges=%d units=%d left=%d", project, len(outage), units, outage[-1][1])

    def _warn(self, error: LedgerError) -> None:
        if not self._warned:
            self._warned = True
            warn("allowance_unreadable path=%s: %s", self._path, error)

    def _mark_repaid(self, project: str, last: int) -> list[Repaid]:
        """Those among them that were corrected meanwhile, or after a note "repaid" that was lost."""

        def work(db: sqlite3.Connection) -> list[Repaid]:
            found = db.execute(
                "SELECT units, drawn_ms, idempotency_key FROM draws"
                " WHERE project = ? AND number <= ? AND NOT repaid AND corrected",
                (project, last),
            )
            corrected = [Repaid(*sound(row, until=2, most=LATEST_MS)) for row in found]
            db.execute("UPDATE draws SET repaid = 1 WHERE project = ? AND number <= ?", (project, last))
            return corrected

        return self._file.transact(work, write=True)

    def _unpaid(
        self, db: sqlite3.Connection, project: str, after: int
    ) -> tuple[str, list[tuple[int, int, str, str, str, str, str]]]:
        rows = db.execute(
            "SELECT number, units, bucket, method, job, region, idempotency_key FROM draws"
            " WHERE project = ? AND NOT repaid AND number > ? ORDER BY number LIMIT ?",
            (project, after, REPAID_AT_ONCE),
        ).fetchall()
        machine: tuple[str] = db.execute("SELECT id FROM machine").fetchone() or ("",)
        return sound(machine, until=0)[0], [sound(row, until=2) for row in rows]

    def close(self) -> None:
        for project, _ in list(self._drawn):
            self._say_used(project)
        self._file.close()
