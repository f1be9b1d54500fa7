"""The embedded ledger: one SQLite file, shared by the processes of one machine. The contract is
`quota.ledger.contract.Ledger`.

Every charge is one `BEGIN IMMEDIATE` transaction. Its cost does not depend on how much was charged before: each view
moves forward over what is new and what has expired since it was last used. The rules (L1, L2, ...) are in
docs/ledger-rules.md.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from quota.common.clock import NEVER, elapsed_s, host_clock
from quota.common.fork import OfOneProcess
from quota.common.sqlite_file import DEADLINE_S, DamagedError, SqliteFile, checked_row
from quota.errors import LedgerError, UnusableLedger
from quota.ledger import sqlite_history
from quota.ledger.compared import read_compared
from quota.ledger.contract import (
    CLOCK_SLACK_MS,
    COUNT_WITHIN_S,
    LONGEST_CLAIM_MS,
    MAX_REPAIRS,
    MIN_RETENTION_MS,
    Ahead,
    ChargeRequest,
    ChargeResult,
    Exhaustion,
    Notes,
    Repair,
    checked_exhaustion,
    checked_range,
    clocks_agree,
    clocks_are_one,
    repaired_ms_of,
    root_of,
    units_beyond,
)
from quota.ledger.entry import Charge, Entry, Id
from quota.ledger.fence import FENCE, fenced_error
from quota.ledger.file_errors import file_wording, refuse_others
from quota.ledger.file_url import label_of, path_of
from quota.ledger.grants import read_grants
from quota.ledger.history import History, RefusalCount
from quota.ledger.sqlite_decision import decide
from quota.ledger.sqlite_fields import (
    COLUMNS,
    UNREADABLE,
    append_charge,
    drop_fields,
    drop_kind,
    entry_of,
    exhaustions_of,
    fields_of,
    following_id,
    newest_id,
    put_fields,
    read_fields,
    trimmed_through_ms,
    usages_of,
)
from quota.ledger.sqlite_views import ViewState
from quota.ledger.state_changes import Rule, StateChanges
from quota.ledger.state_fields import (
    exhaustion_text,
    leading_ms,
    read_id,
    read_ms,
    read_repair,
    repair_text,
    usages_text,
)
from quota.terms.arguments import MAX_NUMBER, whole, whole_clock
from quota.terms.limits import HOUR_MS, View, longest_ms_of

if TYPE_CHECKING:
    from quota.common.findings import Finding

T = TypeVar("T")


SCHEMA_VERSION = 13
APPLICATION_ID = 0x51_4C_47_31
"""Marks an SQLite file as a ledger ("QLG1")."""


class SqliteLedger(StateChanges, OfOneProcess):
    """`sqlite:///relative/path`, `sqlite:////absolute/path`, or `sqlite://` for one in memory."""

    shared = False

    _durable = False
    """Whether each transaction waits for the disk."""

    _deadline_s = DEADLINE_S

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        path = path_of(url)
        self.label = label_of(path)
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

        def work(db: sqlite3.Connection) -> ChargeResult:
            return decide(db, request, self._clock, self._check_fence, commit=commit)

        ends_s = elapsed_s() + COUNT_WITHIN_S
        while True:
            result = self._run(work, write=True)
            if result.outcome != "counting" or elapsed_s() >= ends_s:
                return result

    def _run(self, work: Callable[[sqlite3.Connection], T], *, write: bool | None, within_s: float | None = None) -> T:
        """`work` in one transaction. A field that none of us wrote is damage."""

        def checked(db: sqlite3.Connection) -> T:
            try:
                return work(db)
            except UNREADABLE as error:
                raise DamagedError(str(error)) from error

        return self._file.transact(checked, write=write, within_s=within_s)

    def _transact(
        self, project: str, work: Callable[[sqlite3.Connection], T], *, write: bool, within_s: float | None = None
    ) -> T:
        """`work` in one transaction, unless the ledger is fenced (L27). Only the log of a fenced ledger can be read."""

        def guarded(db: sqlite3.Connection) -> T:
            self._check_fence(read_fields(db, project, ("epoch",)).get("epoch", ""))
            return work(db)

        return self._run(guarded, write=write, within_s=within_s)

    def _check_fence(self, epoch: str) -> None:
        if epoch[:1] == FENCE:
            raise fenced_error(f"ledger {self.label}", epoch)

    def whole_after_ms(self, project: str) -> int:
        return self._transact(project, lambda db: trimmed_through_ms(db, project), write=False)

    def examine(self, project: str) -> Sequence[Finding]:
        from quota.common.findings import warning  # late: `quota doctor` alone asks
        from quota.common.storage import examine_folder

        path = self._file.path
        if not path:
            return [warning("ledger file", "in memory: it ends with this process", "name a file in the url")]
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
            number_of, time_of = f"repaid:{machine}", f"repaid_at:{machine}"
            fields = read_fields(db, project, (number_of, "retention_ms", "epoch"))
            known, at = int(fields.get(number_of, -1)), newest_id(db, project)
            kept_ms = max(retention_ms, int(fields.get("retention_ms", 0)))
            for number, charge in charges:
                if number > known:
                    at = following_id(at, clock_ms)
                    append_charge(db, project, at, charge)
                    if not fields.get("epoch"):
                        fields["epoch"] = charge.idempotency_key
                        put_fields(db, project, [("epoch", charge.idempotency_key)])
            put_fields(db, project, [("retention_ms", kept_ms)])
            if charges[-1][0] > known:
                put_fields(db, project, [(number_of, charges[-1][0]), (time_of, clock_ms)])
            # A machine that is made anew each day leaves a number each day.
            times_ms = fields_of(db, project, "repaid_at").items()
            gone = [one for one, at_ms in times_ms if 1 <= int(at_ms) <= clock_ms - kept_ms]
            drop_fields(db, project, [f"{kind}:{one}" for one in gone for kind in ("repaid", "repaid_at")])
            return True

        return self._transact(project, work, write=True)

    def settle(
        self, project: str, charge_id: str, units: int, views: Sequence[View], also: Sequence[str] = ()
    ) -> Entry | None:
        units = whole(units, "units: what a charge counts", 0, MAX_NUMBER)
        try:
            ids = [*dict.fromkeys(map(read_id, (charge_id, *also)))]
        except ValueError:
            return None

        def work(db: sqlite3.Connection) -> Entry | None:
            entries: list[Entry] = []
            for ms, seq in ids:
                row = db.execute(
                    f"SELECT {COLUMNS} FROM charges WHERE project = ? AND ms = ? AND seq = ?",  # noqa: S608  # a constant
                    (project, ms, seq),
                ).fetchone()
                if row is None:
                    return None
                entries.append(entry_of(row))
            for entry in entries:
                self._settle(db, project, entry, units, views)
            return entries[0]

        return self._transact(project, work, write=True)

    @staticmethod
    def _settle(db: sqlite3.Connection, project: str, entry: Entry, units: int, views: Sequence[View]) -> None:
        db.execute(
            "UPDATE charges SET units = ?, settled = 1 WHERE project = ? AND ms = ? AND seq = ?",
            (units, project, entry.ms, entry.seq),
        )
        named = {view.name: view.selector for view in views}
        for name, text in fields_of(db, project, "view").items():
            view, selector = ViewState.of(text), named.get(name)
            if view is None or selector is None:
                drop_fields(db, project, [f"view:{name}"])
            elif selector.counts(entry.bucket, entry.method, entry.job) and view.has_read((entry.ms, entry.seq)):
                more = selector.cost(units) - selector.cost(entry.units)
                put_fields(db, project, [(f"view:{name}", view._replace(total=view.total + more).text())])
        sqlite_history.correct(db, project, entry, units)

    def read(
        self, project: str, after: Id, until_ms: int, count: int, within_s: float | None = None
    ) -> Sequence[Entry]:
        after, until_ms, count = checked_range(after, until_ms, count)
        sql = (
            f"SELECT {COLUMNS} FROM charges"  # noqa: S608  # a constant
            " WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) ORDER BY ms, seq LIMIT ?"
        )
        values = (project, after[0], until_ms, *after, count)
        return self._run(lambda db: [entry_of(row) for row in db.execute(sql, values)], write=None, within_s=within_s)

    def exhaust(self, project: str, exhaustion: Exhaustion) -> Exhaustion:
        exhaustion = checked_exhaustion(exhaustion)

        def work(db: sqlite3.Connection) -> Exhaustion:
            bucket, now_ms = exhaustion.bucket, self._clock()
            standing = exhaustions_of(db, project).get(bucket)
            if standing is not None and standing.until_ms > now_ms:
                reopened_ms = standing.reopened_ms
                if not reopened_ms or exhaustion.since_ms < reopened_ms <= now_ms:
                    return standing
            drop_fields(db, project, [f"reopened:{bucket}"])
            put_fields(db, project, [(f"closed:{bucket}", exhaustion_text(exhaustion))])
            return exhaustion

        return self._transact(project, work, write=True)

    def notes(self, project: str) -> Notes:
        def work(db: sqlite3.Connection) -> Notes:
            fields = read_fields(db, project, ("trimmed_through_ms", "granted", "compared"))
            return Notes(
                list(exhaustions_of(db, project).values()),
                read_grants(fields.get("granted", "")),
                read_compared(fields.get("compared", "")),
                read_ms(fields.get("trimmed_through_ms", "0")),
            )

        return self._transact(project, work, write=False)

    def _change_state(self, project: str, names: Sequence[str], rule: Rule[T], *, once: bool = False) -> T:
        def work(db: sqlite3.Connection) -> T:
            answer, fields, _ = rule(self._clock(), read_fields(db, project, names))
            put_fields(db, project, [(name, text) for name, text in fields.items() if text is not None])
            drop_fields(db, project, [name for name, text in fields.items() if text is None])
            return answer

        return self._transact(project, work, write=True)

    # -- after a clock that was wrong --------------------------------------------------------------------------------

    def ahead(self, project: str) -> Ahead:
        return self._transact(project, lambda db: self._ahead(db, project, self._clock()), write=False)

    def _ahead(self, db: sqlite3.Connection, project: str, now_ms: int) -> Ahead:
        newest_ms, _ = newest_id(db, project)
        sql = "SELECT COUNT(*), COALESCE(SUM(units), 0) FROM charges WHERE project = ? AND ms > ?"
        charges, units = checked_row(db.execute(sql, (project, now_ms)).fetchone(), integers=2)
        exhaustions, claims = (len(kind) for kind in _of_the_future(db, project, now_ms))
        usages = [usage for of_view in usages_of(db, project).values() for usage in of_view]
        unlogged = sum(units_beyond(usage, now_ms) for usage in usages)
        return Ahead(now_ms, newest_ms, charges, units, unlogged, exhaustions, claims)

    def repair(self, project: str, epoch: str, caller_ms: int) -> str | None:
        def work(db: sqlite3.Connection) -> str | None:
            now_ms = self._clock()
            if not clocks_are_one(now_ms, caller_ms):
                return None
            fields = read_fields(db, project, ("epoch", "trimmed_through_ms", "repaired"))
            newest, current = newest_id(db, project), fields.get("epoch", "")
            taken_back = sqlite_history.take_back(db, project, now_ms)
            through = self._redate(db, project, now_ms)
            if taken_back:
                sqlite_history.sums_have(db, project, through)
            drop_kind(db, project, "view")
            clamped = {
                view: [usage.until(now_ms + longest_ms_of(view)) for usage in of_view]
                for view, of_view in usages_of(db, project).items()
            }
            put_fields(db, project, [(f"unlogged:{view}", usages_text(of_view)) for view, of_view in clamped.items()])
            until_ms = max((usage.until_ms for of_view in clamped.values() for usage in of_view), default=0)
            for names in _of_the_future(db, project, now_ms):
                drop_fields(db, project, names)
            at_ms = max(now_ms, repaired_ms_of(current) + 1)
            begun = f"{root_of(current)}/{epoch}@{at_ms}" if current else f"{epoch}@{at_ms}"
            mark = repair_text(Repair(newest, now_ms, at_ms, through))
            put_fields(
                db,
                project,
                [
                    ("epoch", begun),
                    ("unlogged_until_ms", until_ms),
                    ("trimmed_through_ms", min(read_ms(fields.get("trimmed_through_ms", "0")), now_ms - 1)),
                    ("repaired", "\n".join([mark, *fields.get("repaired", "").splitlines()][:MAX_REPAIRS])),
                ],
            )
            return begun

        return self._transact(project, work, write=True)

    def _redate(self, db: sqlite3.Connection, project: str, now_ms: int) -> Id:
        """Give the charges dated ahead of `now_ms` ids from then on. Returns the newest id of all."""
        ahead = db.execute(
            f"SELECT {COLUMNS} FROM charges WHERE project = ? AND ms > ? ORDER BY ms, seq",  # noqa: S608  # a constant
            (project, now_ms),
        ).fetchall()
        db.execute("DELETE FROM charges WHERE project = ? AND ms > ?", (project, now_ms))
        at = newest_id(db, project)
        for _, _, *rest in ahead:
            at = following_id(at, now_ms)
            db.execute("INSERT INTO charges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (project, *at, *rest))
        return at

    def repairs(self, project: str) -> Sequence[Repair]:
        def work(db: sqlite3.Connection) -> list[Repair]:
            lines = read_fields(db, project, ("repaired",)).get("repaired", "").splitlines()
            return [read_repair(line) for line in reversed(lines)]

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
            return sqlite_history.roll_up(db, project, now_ms, through_ms, trimmed_through_ms(db, project))

        return self._transact(project, work, write=True, within_s=within_s)

    def history(self, project: str, since_ms: int, now_ms: int) -> History:
        read = partial(sqlite_history.read_history, project=project, since_ms=since_ms, now_ms=now_ms)
        return self._transact(project, read, write=False)

    def add_refusals(
        self, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str], within_s: float | None = None
    ) -> None:
        add = partial(sqlite_history.add_refusals, project=project, counts=counts, refusals=refusals)
        self._transact(project, add, write=True, within_s=within_s)

    def refusals(self, project: str) -> Sequence[str]:
        return self._transact(project, lambda db: sqlite_history.read_refusals(db, project), write=False)

    def close(self) -> None:
        self._file.close()


def _of_the_future(db: sqlite3.Connection, project: str, now_ms: int) -> tuple[list[str], list[str]]:
    """The fields of exhaustions, and of claims, that were made later than now (L26)."""
    exhaustions, claims = exhaustions_of(db, project).values(), fields_of(db, project, "claim").items()
    return (
        [
            f"{'reopened' if one.reopened_ms else 'closed'}:{one.bucket}"
            for one in exhaustions
            if one.since_ms > now_ms or one.reopened_ms > now_ms
        ],
        [f"claim:{name}" for name, text in claims if leading_ms(text) > now_ms + LONGEST_CLAIM_MS],
    )
