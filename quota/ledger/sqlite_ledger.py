"""The embedded ledger: one SQLite file, shared by the processes of one machine. The contract is
`quota.ledger.contract.Ledger`.

Every charge is one `BEGIN IMMEDIATE` transaction. Its cost does not depend on how much was charged before: each view
moves forward over what is new and what has expired since it was last used. The rules (L1, L2, ...) are in
ARCHITECTURE.md.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from quota.arguments import MAX_NUMBER, whole, whole_clock
from quota.common.clock import LATEST_MS, NEVER, elapsed_s, host_clock
from quota.common.fork import OfOneProcess
from quota.common.sqlite_file import DEADLINE_S, DamagedError, SqliteFile, checked_row
from quota.errors import LedgerError, UnusableLedger, UsageError
from quota.ledger import sqlite_history
from quota.ledger.compared import compared_text, read_compared
from quota.ledger.contract import (
    CLOCK_SLACK_MS,
    COUNT_WITHIN_S,
    LONGEST_CLAIM_MS,
    MAX_REPAIRS,
    MIN_RETENTION_MS,
    RETENTION_SLACK_MS,
    Ahead,
    ChargeResult,
    Exhaustion,
    Notes,
    Repair,
    checked_exhaustion,
    checked_range,
    clocks_agree,
    clocks_are_one,
    following_epoch,
    repaired_ms_of,
    root_of,
    units_beyond,
)
from quota.ledger.entry import Entry
from quota.ledger.fence import FENCE, fenced_error
from quota.ledger.file_errors import file_wording, refuse_others
from quota.ledger.grants import grants_text
from quota.ledger.history import HISTORY_MS, RUN_CHARS, HourOfLog
from quota.ledger.sqlite_rows import (
    COLUMNS,
    EXHAUSTION,
    UNLOGGED,
    append_charge,
    entry_of,
    exhaustion_of,
    exhaustions_of,
    following_id,
    granted_of,
    marks,
    repair_of,
    set_project,
    unlogged_of,
    usage_of,
    usages_of,
)
from quota.ledger.sqlite_views import advance, edges_fit, leaving_at, piece_of_log, save_view, save_views, stored_view
from quota.ledger.unlogged import UnloggedUsage, expiries_text, is_carry
from quota.limits import HOUR_MS, MINUTE_MS, longest_ms_of

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quota.common.findings import Finding
    from quota.ledger.claims import Claim, Claimed, Ending, Record
    from quota.ledger.compared import Compared
    from quota.ledger.contract import ChargeOutcome, ChargeRequest
    from quota.ledger.entry import Charge, Id
    from quota.ledger.grants import Grant
    from quota.ledger.history import History, RefusalCount
    from quota.limits import View

T = TypeVar("T")


SCHEMA_VERSION = 11
APPLICATION_ID = 0x51_4C_47_31
"""Marks an SQLite file as a ledger ("QLG1")."""


TRIM_AT_ONCE = 10_000
"""So many charges are trimmed at once (L13)."""

ROWS_AT_ONCE = 50_000
"""So many charges are read for the views of a decision in one transaction, and what lies within a minute (L21)."""

_HEAD = (
    "SELECT ms, seq, epoch, unlogged_until_ms, retention_ms, granted,"
    " (SELECT MAX(until_ms) FROM exhaustions WHERE project = charges.project AND reopened_ms = 0)"
    " FROM charges LEFT JOIN projects USING (project)"
    " WHERE project = ? ORDER BY ms DESC, seq DESC LIMIT 1"
)

_NOTES = (
    "SELECT COALESCE(epoch, ''), COALESCE(trimmed_through_ms, 0), COALESCE(granted, ''), COALESCE(compared, ''),"  # noqa: S608  # constants
    f" {EXHAUSTION} FROM (SELECT ? AS project)"
    " LEFT JOIN projects USING (project) LEFT JOIN exhaustions USING (project) ORDER BY bucket"
)
_AHEAD = "exhaustions WHERE project = ? AND (since_ms > ? OR reopened_ms > ?)"
_EXHAUSTIONS_AHEAD = f"SELECT COUNT(*) FROM {_AHEAD}"  # noqa: S608  # a constant
_FORGET_REPAIRS = (
    "DELETE FROM repairs WHERE project = ? AND at_ms NOT IN"
    " (SELECT at_ms FROM repairs WHERE project = ? ORDER BY at_ms DESC LIMIT ?)"
)
_ADDED_UP = (
    "SELECT ms / ? AS hour, COUNT(*), SUM(units), MIN(units), method, job, region, bucket,"
    " substr(idempotency_key, 1, ?) AS run FROM charges"
    " WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) AND (ms, seq) <= (?, ?)"
    " GROUP BY hour, method, job, region, bucket, run"
)

_CHANGES_NOTHING = "UPDATE projects SET epoch = epoch WHERE 0"


class SqliteLedger(OfOneProcess):
    """`sqlite:///relative/path`, `sqlite:////absolute/path`, or `sqlite://` for one in memory."""

    shared = False

    _durable = False
    """Whether each transaction waits for the disk."""

    _deadline_s = DEADLINE_S

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        path = url.removeprefix("sqlite://").removeprefix("/")
        self.label = f"sqlite:///{path}" if path else "sqlite:// (in memory)"
        refuse_others(path, "ledger")
        self._file = SqliteFile(
            path,
            schema=("quota.ledger", "schema.sql"),
            application_id=APPLICATION_ID,
            version=SCHEMA_VERSION,
            error=LedgerError,
            unusable=UnusableLedger,
            wording=file_wording(
                path,
                "ledger",
                version=SCHEMA_VERSION,
                lost_then="this machine still counts what it has seen",
                remedy="move it away, or name another file in the url",
            ),
            durable=self._durable,
            deadline_s=self._deadline_s,
        )
        self._clock = host_clock if clock is None else whole_clock(clock)

    def now_ms(self) -> int:
        return self._clock()

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        """While there is more to count, others get their turn between two transactions (L21)."""
        ends_s = elapsed_s() + COUNT_WITHIN_S
        result = self._file.transact(lambda db: self._decide(db, request, commit), write=True)
        while result.outcome == "counting" and elapsed_s() < ends_s:
            result = self._file.transact(lambda db: self._decide(db, request, commit), write=True)
        if result.outcome != "refused":
            return result
        return result._replace(leaving_ms=self._leaving_ms(request, result))

    def _leaving_ms(self, request: ChargeRequest, result: ChargeResult) -> tuple[int | None, ...]:
        """L9. See `ChargeResult.leaving_ms`. It is read outside of the decision: nobody waits for this."""
        project, now_ms = request.project, result.now_ms

        def read(db: sqlite3.Connection) -> tuple[int | None, ...]:
            last, _, unlogged_until_ms, *_ = self._head(db, project)
            unlogged = unlogged_of(db, request, now_ms) if unlogged_until_ms > now_ms else ((),) * len(request.checks)
            found = []
            for check, used, usages in zip(request.checks, result.used_units, unlogged, strict=True):
                leaving_ms = None
                if used + check.cost_units > check.cap_units:
                    stored = stored_view(db, project, check.view)
                    view, _ = advance(db, project, check, now_ms, last, stored, NEVER)
                    expiring = [(until, n) for usage in usages for n, until in usage.expiries if until > now_ms]
                    leaving_ms = leaving_at(db, project, check, view, sorted(expiring))
                found.append(leaving_ms)
            return tuple(found)

        try:
            return self._file.transact(read, write=False)
        except LedgerError:  # that it was refused stands
            return ()

    def _decide(self, db: sqlite3.Connection, request: ChargeRequest, commit: bool) -> ChargeResult:
        if not commit:  # of a file that may only be read, SQLite says so at the first statement that writes
            db.execute(_CHANGES_NOTHING)
        project, charge = request.project, request.charge
        clock_ms = self._clock()
        now_ms = min(clock_ms, request.caller_ms + CLOCK_SLACK_MS)  # L11
        last, epoch, unlogged_until_ms, retention_ms, closed_until_ms, granted = self._head(db, project)
        if not clocks_agree(clock_ms, request.caller_ms) or not edges_fit(request.checks, now_ms):
            return ChargeResult("clock", None, clock_ms, last, (), epoch=epoch)
        expected = request.expected
        if expected.epoch and expected != (epoch, (last,)) and self._is_behind(db, request, last, epoch):
            return ChargeResult("behind", None, now_ms, last, (), epoch=epoch)
        if request.granted is not None and request.granted != granted:  # L28
            granted_of(granted)
            return ChargeResult("granted", None, now_ms, last, (), epoch=epoch, granted=granted)

        stored, views, used, room = [], [], [], ROWS_AT_ONCE
        for check in request.checks:
            state = stored_view(db, project, check.view)
            view, room = advance(db, project, check, now_ms, last, state, room)
            stored.append(state)
            views.append(view)
            used.append(view.total)
            if not room:  # what a peek has read is kept too
                save_views(db, request, views, stored)
                return ChargeResult("counting", None, now_ms, last, (), epoch=epoch)
        unlogged = unlogged_of(db, request, now_ms) if unlogged_until_ms > now_ms else ()
        for i, usages in enumerate(unlogged):
            used[i] += sum(usage.units_at(now_ms) for usage in usages)
        exhaustion = self._closed(db, request, now_ms) if closed_until_ms else None
        fits = True  # L9
        for check, total in zip(request.checks, used, strict=True):
            if check.cost_units and total + check.cost_units > check.cap_units:
                fits = False
        if exhaustion is not None or not fits or not commit:
            if commit:
                if request.retention_ms > retention_ms:
                    set_project(db, project, epoch, unlogged_until_ms, request.retention_ms)
                save_views(db, request, views, stored)
            outcome: ChargeOutcome = "exhausted" if exhaustion is not None else "admitted" if fits else "refused"
            return ChargeResult(outcome, None, now_ms, last, tuple(used), exhaustion, epoch, unlogged)

        at = first = following_id(last, clock_ms)
        append_charge(db, project, at, charge)
        for further in request.also:
            at = following_id(at, clock_ms)
            append_charge(db, project, at, further)
        if not epoch or request.retention_ms > retention_ms:
            epoch, retention_ms = epoch or charge.idempotency_key, max(retention_ms, request.retention_ms)
            set_project(db, project, epoch, unlogged_until_ms, retention_ms)
        for i, (check, view) in enumerate(zip(request.checks, views, strict=True)):
            used[i] += check.cost_units
            total, tail_ms, tail_seq, _, _, dropped_through_ms = view
            charged = total + check.cost_units, tail_ms, tail_seq, *at, dropped_through_ms
            save_view(db, project, check.view, charged)
        if at[0] // MINUTE_MS != last[0] // MINUTE_MS:
            # A clock that stood ahead for this one charge costs no history.
            self._trim(db, project, min(now_ms, last[0]), retention_ms)
        also = tuple([f"{first[0]}-{first[1] + n}" for n in range(1, len(request.also) + 1)])
        charge_id = f"{first[0]}-{first[1]}"
        return ChargeResult("admitted", charge_id, now_ms, at, tuple(used), None, epoch, unlogged, also=also)

    def _transact(
        self, project: str, work: Callable[[sqlite3.Connection], T], *, write: bool, within_s: float | None = None
    ) -> T:
        """`work` in one transaction, unless the ledger is fenced (L27). Only the log of a fenced ledger can be read."""

        def guarded(db: sqlite3.Connection) -> T:
            epoch = db.execute("SELECT epoch FROM projects WHERE project = ?", (project,)).fetchone()
            if epoch is not None:
                self._check_fence(str(epoch[0]))
            return work(db)

        return self._file.transact(guarded, write=write, within_s=within_s)

    def _check_fence(self, epoch: str) -> None:
        if epoch[:1] == FENCE:
            raise fenced_error(f"ledger {self.label}", epoch)

    def _head(self, db: sqlite3.Connection, project: str) -> tuple[Id, str, int, int, int, str]:
        """last, epoch, unlogged_until_ms, retention_ms, closed_until_ms, granted: the newest entry's id, the epoch
        (empty before the first charge), until when any unlogged usage counts, how long charges are kept, until when any
        exhaustion may stand (0: none does), and the text of upstream's grants. One query, where there is an entry.
        """
        row = db.execute(_HEAD, (project,)).fetchone()
        if row is None:
            sql = "SELECT epoch, unlogged_until_ms, retention_ms, granted FROM projects WHERE project = ?"
            row = (0, 0, *(db.execute(sql, (project,)).fetchone() or ("", 0, 0, "")), NEVER)
        ms, seq, epoch, unlogged_until_ms, retention_ms, granted, closed_until_ms = row
        if epoch is None:
            epoch, unlogged_until_ms, retention_ms, granted = "", 0, 0, ""
        whole = type(ms) is type(seq) is type(unlogged_until_ms) is type(retention_ms) is int
        if not (whole and type(epoch) is type(granted) is str):
            checked_row((ms, seq, unlogged_until_ms, retention_ms, epoch, granted), integers=4)
        if not 0 <= ms < LATEST_MS or seq < 0:
            raise DamagedError("a charge in the far future")
        self._check_fence(epoch)
        if type(closed_until_ms) is not int:
            closed_until_ms = 0 if closed_until_ms is None else NEVER
        return (ms, seq), epoch, unlogged_until_ms, retention_ms, closed_until_ms, granted

    def _is_behind(self, db: sqlite3.Connection, request: ChargeRequest, last: Id, epoch: str) -> bool:
        """L18. Whether this ledger lacks what the caller expects of it."""
        if request.expected.epoch != epoch:
            return True
        sql = "SELECT 1 FROM charges WHERE project = ? AND ms = ? AND seq = ?"
        ids = [at for at in request.expected.ids if at != last]
        missing_ms = [at[0] for at in ids if db.execute(sql, (request.project, *at)).fetchone() is None]
        return bool(missing_ms) and max(missing_ms) > self._trimmed_through_ms(db, request.project)

    def _closed(self, db: sqlite3.Connection, request: ChargeRequest, now_ms: int) -> Exhaustion | None:
        """L20. Of the exhaustions that close this call, the one that lasts longest; None if there is none."""
        closed_by = request.closed_by
        if not closed_by:
            return None
        rows = db.execute(
            f"SELECT {EXHAUSTION} FROM exhaustions"  # noqa: S608  # a constant, and placeholders
            f" WHERE project = ? AND reopened_ms = 0 AND bucket IN ({marks(closed_by)}) AND until_ms + ? > ?"
            " ORDER BY until_ms DESC",
            (request.project, *closed_by, request.jitter_ms, now_ms),
        ).fetchone()
        return None if rows is None else exhaustion_of(rows)

    def _trim(self, db: sqlite3.Connection, project: str, now_ms: int, retention_ms: int) -> None:
        """L13. Remove what no window can reach any more and the history has (L29), a bounded number of charges at
        once."""
        through_ms, rolled = now_ms - retention_ms, sqlite_history.rolled_up(db, project)
        if rolled is not None:
            through_ms = min(through_ms, max(rolled[0] - 1, now_ms - HISTORY_MS))
        newest_trimmed = db.execute(
            "SELECT MAX(ms) FROM (SELECT ms FROM charges WHERE project = ? AND ms <= ? ORDER BY ms, seq LIMIT ?)",
            (project, through_ms, TRIM_AT_ONCE),
        ).fetchone()[0]
        if newest_trimmed is not None:
            db.execute("DELETE FROM charges WHERE project = ? AND ms <= ?", (project, newest_trimmed))
            # A view that still counts some of these could not drop them later: it starts afresh at its next use.
            db.execute("DELETE FROM views WHERE project = ? AND tail_ms <= ?", (project, newest_trimmed))
            db.execute(
                "UPDATE projects SET trimmed_through_ms = MAX(trimmed_through_ms, ?) WHERE project = ?",
                (newest_trimmed, project),
            )

    def whole_after_ms(self, project: str) -> int:
        return self._transact(project, lambda db: self._trimmed_through_ms(db, project), write=False)

    def _trimmed_through_ms(self, db: sqlite3.Connection, project: str) -> int:
        sql = "SELECT trimmed_through_ms FROM projects WHERE project = ?"
        row: tuple[int] = db.execute(sql, (project,)).fetchone() or (0,)
        return checked_row(row, integers=1, below=LATEST_MS)[0]

    def examine(self, project: str) -> Sequence[Finding]:
        from quota.common.findings import Finding  # late: `quota doctor` alone asks
        from quota.common.storage import examine_folder

        path = self._file.path
        if not path:
            return [Finding("warning", "ledger file", "in memory: it ends with this process", "name a file in the url")]
        return list(examine_folder("ledger file", os.path.dirname(path), "the charges"))

    # -- corrections and reading -------------------------------------------------------------------------------------

    def repay(
        self,
        project: str,
        machine: str,
        charges: Sequence[tuple[int, Charge]],
        retention_ms: int = MIN_RETENTION_MS,
        caller_ms: int | None = None,
    ) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            clock_ms = self._clock()
            if caller_ms is not None and not clocks_agree(clock_ms, caller_ms):
                return False
            row = db.execute(
                "SELECT number FROM repaid WHERE project = ? AND machine = ?", (project, machine)
            ).fetchone()
            at, epoch, unlogged_until_ms, stored_ms, _, _ = self._head(db, project)
            if retention_ms > stored_ms:
                set_project(db, project, epoch, unlogged_until_ms, retention_ms)
            for number, charge in charges:
                if row is None or number > row[0]:
                    at = following_id(at, clock_ms)
                    append_charge(db, project, at, charge)
            last = charges[-1][0]
            if row is None or last > row[0]:
                db.execute("REPLACE INTO repaid VALUES (?, ?, ?, ?)", (project, machine, last, clock_ms))
            # A machine that is made anew each day leaves a number each day.
            oldest_ms = clock_ms - max(retention_ms, stored_ms)
            db.execute("DELETE FROM repaid WHERE project = ? AND at_ms BETWEEN 1 AND ?", (project, oldest_ms))
            return True

        return self._transact(project, work, write=True)

    def add_unlogged(
        self, project: str, epoch: str, usages: Sequence[UnloggedUsage], retention_ms: int = MIN_RETENTION_MS
    ) -> str:
        def work(db: sqlite3.Connection) -> str:
            last, current, unlogged_until_ms, stored_ms, _, _ = self._head(db, project)
            db.execute(
                "DELETE FROM unlogged WHERE project = ? AND until_ms <= ?",
                (project, min(self._clock(), last[0]) - RETENTION_SLACK_MS),
            )
            changed = lost = False
            for usage in usages:
                if is_carry(usage.epoch) and root_of(usage.epoch) == root_of(current):
                    continue  # this log has it
                sql = f"SELECT {UNLOGGED} FROM unlogged WHERE project = ? AND view = ? AND epoch = ?"  # noqa: S608
                row = db.execute(sql, (project, usage.view, usage.epoch)).fetchone()
                known = None if row is None else usage_of(row)
                stands = usage if known is None else known.with_report(usage, self._clock())
                if stands != known:
                    changed = True
                    lost = lost or not is_carry(usage.epoch)
                    unlogged_until_ms = max(unlogged_until_ms, stands.until_ms)
                    db.execute(
                        "REPLACE INTO unlogged VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (
                            project,
                            stands.view,
                            stands.epoch,
                            expiries_text(stands.expiries),
                            stands.until_ms,
                            *stands.last,
                            *stands.kept,
                        ),
                    )
            stands_epoch = current
            if not current or lost:
                stands_epoch = following_epoch(current, epoch)
            if stands_epoch != current or changed or retention_ms > stored_ms:
                set_project(db, project, stands_epoch, unlogged_until_ms, max(retention_ms, stored_ms))
            return stands_epoch

        return self._transact(project, work, write=True)

    def settle(self, project: str, charge_id: str, units: int, views: Sequence[View]) -> Entry | None:
        units = whole(units, "units: what a charge counts", 0, MAX_NUMBER)
        ms, seq = (int(part) for part in charge_id.split("-"))

        def work(db: sqlite3.Connection) -> Entry | None:
            row = db.execute(
                f"SELECT {COLUMNS} FROM charges WHERE project = ? AND ms = ? AND seq = ?",  # noqa: S608  # a constant
                (project, ms, seq),
            ).fetchone()
            if row is None:
                return None
            entry = entry_of(row)
            db.execute(
                "UPDATE charges SET units = ? WHERE project = ? AND ms = ? AND seq = ?", (units, project, ms, seq)
            )
            for view in dict.fromkeys(views):  # two limits may share a view: once is enough
                selector = view.selector
                if selector.counts(entry.bucket, entry.method, entry.job):
                    db.execute(
                        "UPDATE views SET total = total + ? WHERE project = ? AND name = ?"
                        " AND (tail_ms, tail_seq) <= (?, ?) AND (head_ms, head_seq) >= (?, ?)",
                        (selector.cost(units) - selector.cost(entry.units), project, view.name, ms, seq, ms, seq),
                    )
            db.execute(
                f"DELETE FROM views WHERE project = ? AND name NOT IN ({marks(views)})",  # noqa: S608  # placeholders only
                (project, *(view.name for view in views)),
            )
            sqlite_history.correct(db, project, entry, units)
            return entry

        return self._transact(project, work, write=True)

    def read(
        self, project: str, after: Id, until_ms: int, count: int, within_s: float | None = None
    ) -> Sequence[Entry]:
        return self._file.transact(
            lambda db: self._entries(db, project, after, until_ms, count), write=None, within_s=within_s
        )

    def _entries(
        self, db: sqlite3.Connection, project: str, after: Id, until_ms: int, count: int, *_: object
    ) -> Sequence[Entry]:
        after, until_ms, count = checked_range(after, until_ms, count)
        rows = db.execute(
            f"SELECT {COLUMNS} FROM charges"  # noqa: S608  # a constant
            " WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) ORDER BY ms, seq LIMIT ?",
            (project, after[0], until_ms, *after, count),
        ).fetchall()
        return [entry_of(row) for row in rows]

    def add_up(self, project: str, after: Id, through: Id) -> Iterator[HourOfLog]:
        room = 0
        while not room:
            rows, after, room = self._transact(project, partial(self._add_up, project, after, through), write=False)
            yield from rows

    def _add_up(self, project: str, after: Id, through: Id, db: sqlite3.Connection) -> tuple[list[HourOfLog], Id, int]:
        """The rows of a piece, the id that it ends with, and 0 if there is more."""
        until, room = piece_of_log(db, project, after, through, ROWS_AT_ONCE)
        between = (HOUR_MS, RUN_CHARS, project, after[0], until[0], *after, *until)
        rows: Iterable[tuple[int, int, int, int, str, str, str, str, str]] = db.execute(_ADDED_UP, between)
        hours = []
        for row in rows:
            hour, charges, units, _, method, job, region, bucket, run = checked_row(row, integers=4)
            hours.append(HourOfLog(hour * HOUR_MS, method, job, region, bucket, run, charges, units))
        return hours, until, room

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        exhaustion = checked_exhaustion(exhaustion)

        def work(db: sqlite3.Connection) -> Exhaustion:
            standing = exhaustions_of(db, project).get(exhaustion.bucket)
            now_ms = self._clock()
            if standing is not None and standing.until_ms > now_ms:
                reopened_ms = standing.reopened_ms
                if not reopened_ms or exhaustion.since_ms < reopened_ms <= now_ms:
                    return standing
            db.execute(
                "REPLACE INTO exhaustions VALUES (?, ?, ?, ?, ?, ?, 0, '')",
                (
                    project,
                    exhaustion.bucket,
                    exhaustion.since_ms,
                    exhaustion.until_ms,
                    exhaustion.evidence,
                    exhaustion.reported_by,
                ),
            )
            return exhaustion

        return self._transact(project, work, write=True)

    def exhaustions(self, project: str) -> Sequence[Exhaustion]:
        return list(self._transact(project, lambda db: exhaustions_of(db, project), write=False).values())

    def reopen(self, project: str, bucket: str, because: str = "") -> bool:
        sql = (
            "UPDATE exhaustions SET reopened_ms = ?, reopened_because = ?"
            " WHERE project = ? AND bucket = ? AND reopened_ms = 0"
        )
        values = (self._clock(), because, project, bucket)
        return self._transact(project, lambda db: db.execute(sql, values).rowcount, write=True) > 0

    def grant(self, project: str, grants: Sequence[Grant], compared: Sequence[Compared] | None = None) -> None:
        try:
            granted, seen = grants_text(grants), None if compared is None else compared_text(compared)
        except ValueError as error:
            raise UsageError(f"grants: {error}") from None
        sql = (
            "INSERT INTO projects VALUES (?, '', 0, 0, 0, ?, COALESCE(?, '')) ON CONFLICT (project) DO UPDATE"
            " SET granted = excluded.granted, compared = COALESCE(?, compared)"
        )
        self._transact(project, lambda db: db.execute(sql, (project, granted, seen, seen)), write=True)

    def grants(self, project: str) -> Sequence[Grant]:
        sql = "SELECT granted FROM projects WHERE project = ?"
        row = self._transact(project, lambda db: db.execute(sql, (project,)).fetchone(), write=False)
        return granted_of("" if row is None else row[0])

    def compared(self, project: str) -> Sequence[Compared]:
        sql = "SELECT compared FROM projects WHERE project = ?"
        row = self._transact(project, lambda db: db.execute(sql, (project,)).fetchone(), write=False)
        return read_compared("" if row is None else str(row[0]))

    def notes(self, project: str) -> Notes:
        return self._file.transact(lambda db: self._notes(db, project), write=None)

    def _notes(self, db: sqlite3.Connection, project: str) -> Notes:
        rows = db.execute(_NOTES, (project,)).fetchall()
        epoch, whole_after_ms, granted, compared, *_ = rows[0]
        self._check_fence(epoch)
        checked_row((whole_after_ms, epoch, granted, compared), integers=1, below=LATEST_MS)
        exhaustions = [exhaustion_of(row[4:]) for row in rows if row[4] is not None]
        return Notes(exhaustions, granted_of(granted), read_compared(compared), whole_after_ms)

    def claim(self, project: str, claim: Claim, *, take_over: bool = False) -> Claimed:
        return self._claims(project, claim, lambda record, checked: record.claim(checked, take_over=take_over))

    def end_claim(self, project: str, claim: Claim, ending: Ending) -> None:
        self._claims(project, claim, lambda record, checked: record.end(checked, ending))

    def _claims(self, project: str, claim: Claim, change: Callable[[Record, Claim], T]) -> T:
        """Change the stored record of a job's claims (L25)."""
        from quota.ledger.claims import Record, checked_claim  # late: a charge claims nothing

        claim = checked_claim(claim)

        def work(db: sqlite3.Connection) -> T:
            now_ms = self._clock()
            db.execute("DELETE FROM claims WHERE project = ? AND until_ms <= ?", (project, now_ms))
            sql = "SELECT record FROM claims WHERE project = ? AND name = ?"
            row = db.execute(sql, (project, claim.name)).fetchone()
            record = Record(None if row is None else row[0], now_ms)
            answer = change(record, claim)
            if until_ms := record.until_ms():
                db.execute("REPLACE INTO claims VALUES (?, ?, ?, ?)", (project, claim.name, until_ms, record.stored()))
            else:
                db.execute("DELETE FROM claims WHERE project = ? AND name = ?", (project, claim.name))
            return answer

        return self._transact(project, work, write=True)

    # -- after a clock that was wrong --------------------------------------------------------------------------------

    def ahead(self, project: str) -> Ahead:
        return self._transact(project, lambda db: self._ahead(db, project, self._clock()), write=False)

    def _ahead(self, db: sqlite3.Connection, project: str, now_ms: int) -> Ahead:
        def count(sql: str, *values: int) -> tuple[int, ...]:
            row: tuple[int, ...] = db.execute(sql, (project, *values)).fetchone()
            return checked_row(row, integers=len(row))

        (newest_ms, _), *_ = self._head(db, project)
        charges, units = count(
            "SELECT COUNT(*), COALESCE(SUM(units), 0) FROM charges WHERE project = ? AND ms > ?", now_ms
        )
        (exhaustions,) = count(_EXHAUSTIONS_AHEAD, now_ms, now_ms)
        (claims,) = count("SELECT COUNT(*) FROM claims WHERE project = ? AND until_ms > ?", now_ms + LONGEST_CLAIM_MS)
        unlogged = sum(units_beyond(usage, now_ms) for usage in usages_of(db, project))
        return Ahead(now_ms, newest_ms, charges, units, unlogged, exhaustions, claims)

    def repair(self, project: str, epoch: str, caller_ms: int) -> str | None:
        def work(db: sqlite3.Connection) -> str | None:
            now_ms = self._clock()
            if not clocks_are_one(now_ms, caller_ms):
                return None
            newest, current, _, retention_ms, *_ = self._head(db, project)
            taken_back = sqlite_history.take_back(db, project, now_ms)
            through = self._redate(db, project, now_ms)
            if taken_back:
                sqlite_history.sums_have(db, project, through)
            db.execute("DELETE FROM views WHERE project = ?", (project,))
            unlogged_until_ms = 0
            for usage in usages_of(db, project):
                clamped = usage.until(now_ms + longest_ms_of(usage.view))
                unlogged_until_ms = max(unlogged_until_ms, clamped.until_ms)
                if clamped != usage:
                    db.execute(
                        "UPDATE unlogged SET expiries = ?, until_ms = ? WHERE project = ? AND view = ? AND epoch = ?",
                        (expiries_text(clamped.expiries), clamped.until_ms, project, usage.view, usage.epoch),
                    )
            db.execute(f"DELETE FROM {_AHEAD}", (project, now_ms, now_ms))  # noqa: S608  # a constant
            db.execute("DELETE FROM claims WHERE project = ? AND until_ms > ?", (project, now_ms + LONGEST_CLAIM_MS))
            at_ms = max(now_ms, repaired_ms_of(current) + 1)
            begun = f"{root_of(current)}/{epoch}@{at_ms}" if current else f"{epoch}@{at_ms}"
            set_project(db, project, begun, unlogged_until_ms, retention_ms)
            db.execute(
                "UPDATE projects SET trimmed_through_ms = MIN(trimmed_through_ms, ?) WHERE project = ?",
                (now_ms - 1, project),
            )
            db.execute("REPLACE INTO repairs VALUES (?, ?, ?, ?, ?, ?, ?)", (project, *newest, now_ms, at_ms, *through))
            db.execute(_FORGET_REPAIRS, (project, project, MAX_REPAIRS))
            return begun

        return self._transact(project, work, write=True)

    def _redate(self, db: sqlite3.Connection, project: str, now_ms: int) -> Id:
        """Give the charges dated ahead of `now_ms` ids from then on. Returns the newest id of all."""
        ahead = db.execute(
            f"SELECT {COLUMNS} FROM charges WHERE project = ? AND ms > ? ORDER BY ms, seq",  # noqa: S608  # a constant
            (project, now_ms),
        ).fetchall()
        db.execute("DELETE FROM charges WHERE project = ? AND ms > ?", (project, now_ms))
        at, *_ = self._head(db, project)
        for _, _, *rest in ahead:
            at = following_id(at, now_ms)
            db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (project, *at, *rest))
        return at

    def repairs(self, project: str) -> Sequence[Repair]:
        sql = (
            "SELECT newest_ms, newest_seq, begun_ms, at_ms, through_ms, through_seq FROM repairs WHERE project = ?"
            " ORDER BY at_ms"
        )

        def work(db: sqlite3.Connection) -> list[Repair]:
            return [repair_of(row) for row in db.execute(sql, (project,)).fetchall()]

        return self._transact(project, work, write=False)

    # -- the history -------------------------------------------------------------------------------------------------

    def roll_up(
        self, project: str, caller_ms: int, within_s: float | None = None, *, present_hour: bool = False
    ) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            clock_ms = self._clock()
            if not clocks_agree(clock_ms, caller_ms):  # nobody knows which hours are over
                return False
            now_ms = min(clock_ms, caller_ms + CLOCK_SLACK_MS)
            through_ms = NEVER if present_hour else now_ms // HOUR_MS * HOUR_MS - 1
            return sqlite_history.roll_up(db, project, now_ms, through_ms, self._trimmed_through_ms(db, project))

        return self._transact(project, work, write=True, within_s=within_s)

    def history(self, project: str, since_ms: int, now_ms: int) -> History:
        def work(db: sqlite3.Connection) -> History:
            return sqlite_history.read_history(db, project, since_ms, now_ms)

        return self._transact(project, work, write=False)

    def add_refusals(
        self, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str], within_s: float | None = None
    ) -> None:
        def work(db: sqlite3.Connection) -> None:
            sqlite_history.add_refusals(db, project, counts, refusals)

        self._transact(project, work, write=True, within_s=within_s)

    def refusals(self, project: str) -> Sequence[str]:
        return self._transact(project, lambda db: sqlite_history.read_refusals(db, project), write=False)

    def close(self) -> None:
        self._file.close()
