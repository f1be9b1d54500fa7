"""The local allowance: what a machine may spend while the ledger does not answer. Bounded, durable, and repaid.

    draw    a call of at most `max_cost_units` is admitted while the draws of the longest window stay within
            `allowance_units`; a dearer call is refused. Of several calls all are admitted, or none
    repay   the next decision that reaches the ledger first hands it all draws that are owed

A debt belongs to an identity (`quota.ledger.identity.Identity`) and goes to whichever ledger of that identity answers
next: the configuration may have moved it meanwhile. The allowance is counted over all identities of one upstream
project, that is of one project name and endpoint, so that two configurations do not draw it twice.

For example with max_cost 1 and allowance 50, and a longest window of 24 h:

    10:00   the ledger stops. 30 calls of 1 unit are drawn, each with a number; 20 units remain. A search of 100 units
            is refused
    10:30   the ledger answers again. It is handed all 30, dates them 10:30, and remembers the last number
    16:00   the ledger stops again. 20 calls are drawn, and the next one is refused
    10:00   on the next day the first draw has left the window, and there is room for one call

Repaying does not renew the allowance. So `machines` journals together never hold more than machines x allowance in a
window, whatever fails how often; `quota check` compares that with the headroom.

The journal is one file for all processes of a machine. What may happen to it, and what follows:

    it cannot be read or written    nothing is drawn. The debt stays and is repaid once the journal can be read again;
                                    until then the ledger decides all calls that it can
    its mark "repaid" is lost       the same draws are sent again, and the ledger ignores the numbers that it remembers
    the machine loses its power     a draw is on the disk before its call leaves
    an old copy of it is put back   the same draws may be sent again, which changes nothing, and what it lacks does not
                                    count against the allowance. New draws have other numbers, and are repaid
    it is deleted                   its debt is forgotten and the allowance begins anew: upstream may see up to
                                    `allowance_units` more than the ledger counts, once for each deletion

An outage is two lines of a process's log, however many calls are drawn: `allowance_drawn` at the first call, with the
reason why the ledger did not answer, and then `debt_repaid`, or `allowance_used` if the process ends before it repays.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from quota.common.clock import LATEST_MS, host_clock
from quota.common.fork import start_over_in_child
from quota.common.log import warn
from quota.common.sqlite_file import DEADLINE_S, SqliteFile, checked_row
from quota.errors import LedgerError
from quota.ledger.contract import Ledger
from quota.ledger.entry import Charge
from quota.ledger.file_errors import file_wording
from quota.ledger.identity import Identity
from quota.ledger.parts import correctable
from quota.terms.arguments import MAX_NUMBER, whole, whole_clock

T = TypeVar("T")

APPLICATION_ID = 0x51_4C_4A_31
"""Marks an SQLite file as a journal ("QLJ1")."""

SCHEMA_VERSION = 6

TAG_LENGTH = 8
"""So much of the journal's own name, which is random, stands in the names of its draws."""

REPAID_AT_ONCE = 100

LOOK_AGAIN_MS = 10_000
"""How long a process trusts that nothing is owed, or that the journal is unreadable: other processes may draw."""


class Drawn(NamedTuple):
    """Calls that the allowance admitted: a name for each, none for a peek, and what remains after them.

    A name has the machine in it, `3f2a9c1d-1793000000000`: another machine's journal may have that number, too.
    """

    names: tuple[str, ...]
    remaining_units: int


class Draw(NamedTuple):
    """A draw as the journal has it. Once it is `repaid`, the ledger has an entry with its idempotency key, of a time at
    or after `drawn_ms`.
    """

    number: int
    drawn_ms: int
    repaid: bool
    charge: Charge


class _OutageDraw(NamedTuple):
    """A draw of the outage under way: its units, and what remained of the allowance after it."""

    units: int
    remaining_units: int


class Allowance:
    """The allowance of one machine. Safe to share between threads and after a fork.

    `clock` is in ms since 1970. The first draw makes the file. If the file fails, `draw` and `settle` raise
    LedgerError; `repay` and `owed_units` go on without it and log `allowance_unreadable`, once a process.
    """

    _deadline_s = DEADLINE_S

    def __init__(self, path: str, max_cost_units: int, allowance_units: int, clock: Callable[[], int]) -> None:
        self.max_cost_units = whole(max_cost_units, "units: the dearest call of an allowance", 1, MAX_NUMBER)
        self.allowance_units = whole(allowance_units, "units: an allowance", 1, MAX_NUMBER)
        self._clock = clock if clock is host_clock else whole_clock(clock)
        self._path = path
        self._file = SqliteFile(
            path,
            schema=("quota.recovery", "journal.sql"),
            application_id=APPLICATION_ID,
            version=SCHEMA_VERSION,
            error=LedgerError,
            wording=file_wording(path, "allowance", version=SCHEMA_VERSION, lost_then="what it owes is forgotten then"),
            durable=True,
            deadline_s=self._deadline_s,
        )
        self._checked_ms: dict[Identity, int] = {}  # when it was found to owe nothing
        self._outages: dict[Identity, list[_OutageDraw]] = {}
        self._warned = False
        start_over_in_child(self)

    def start_over_in_child(self) -> None:
        """A forked child logs its own outages, not its parent's."""
        self._outages = {}

    # -- while the ledger does not answer ------------------------------------------------------------------------------

    def draw(
        self,
        identity: Identity,
        charges: Sequence[Charge],
        longest_ms: int,
        *,
        commit: bool,
        because: str = "the ledger did not answer",
    ) -> Drawn | None:
        """Admit these calls if each is cheap enough and the allowance has room for all; None: refused.

        `longest_ms` is the longest window of the caller's limits. Without `commit` nothing is drawn. `because` is the
        trouble of the ledger, for the log.
        """
        if any(charge.units > self.max_cost_units for charge in charges):
            return None
        work = partial(self._draw, identity=identity, charges=charges, longest_ms=longest_ms, commit=commit)
        drawn = self._file.transact(work, write=commit)
        if commit and drawn is not None:
            self._checked_ms.pop(identity, None)
            self._log_draws(identity, charges, drawn, because)
        return drawn

    def _draw(
        self, db: sqlite3.Connection, identity: Identity, charges: Sequence[Charge], longest_ms: int, *, commit: bool
    ) -> Drawn | None:
        upstream = identity.upstream_hash
        newest = db.execute("SELECT COALESCE(MAX(drawn_ms), 0) FROM draws WHERE upstream = ?", (upstream,)).fetchone()
        (newest_ms,) = checked_row(newest, integers=1, below=LATEST_MS)
        now_ms = max(self._clock(), newest_ms)  # a clock that goes back must not renew the allowance
        used_units = _units(db, "upstream = ? AND drawn_ms > ?", upstream, now_ms - longest_ms)
        remaining_units, units = self.allowance_units - used_units, sum(charge.units for charge in charges)
        if units > remaining_units:
            return None
        if not commit:
            return Drawn((), remaining_units)
        numbers = [
            db.execute(_DRAW, (now_ms, identity.hash, upstream, identity.project, now_ms, *charge)).lastrowid
            for charge in charges
        ]
        _delete_expired(db, upstream, now_ms, longest_ms)
        tag = _machine(db)[:TAG_LENGTH]
        return Drawn(tuple(f"{tag}-{number}" for number in numbers), remaining_units - units)

    def _log_draws(self, identity: Identity, charges: Sequence[Charge], drawn: Drawn, because: str) -> None:
        outage = self._outages.setdefault(identity, [])
        remaining_units = drawn.remaining_units + sum(charge.units for charge in charges)
        for charge in charges:
            remaining_units -= charge.units
            if not outage:
                drawn_now = {"method": charge.method, "units": charge.units, "left": remaining_units}
                warn("allowance_drawn", because, project=identity.project, **drawn_now)
            outage.append(_OutageDraw(charge.units, remaining_units))

    def number(self, name: str) -> int | None:
        """The number of the draw of this name in the journal; None for a name that another machine gave."""
        tag, _, number = name.partition("-")
        if not (number.isascii() and number.isdigit() and len(number) <= 15 and os.path.exists(self._path)):
            return None
        return int(number) if tag == self._file.transact(_machine, write=False)[:TAG_LENGTH] else None

    def _transact(self, work: Callable[[sqlite3.Connection], T], without: T, *, write: bool = False) -> T:
        """Do this with the journal; `without` one, return that, and make none."""
        return self._file.transact(work, write=write) if os.path.exists(self._path) else without

    # -- corrections ---------------------------------------------------------------------------------------------------

    def settle(self, identity: Identity, number: int, units: int) -> Charge | None:
        """Correct a draw that is still owed. Returns the charge as it stood before; None if it is not owed."""

        def work(db: sqlite3.Connection) -> Charge | None:
            for draw in _draws(db, identity, "number = ? AND NOT repaid", number):
                db.execute("UPDATE draws SET units = ?, corrected = 1 WHERE number = ?", (units, number))
                return draw.charge
            return None

        return self._transact(work, None, write=True)

    def correct_repaid(self, identity: Identity, number: int, units: int) -> None:
        """Set what a repaid draw counts against the allowance, after the ledger was told the same."""
        sql = "UPDATE draws SET units = ? WHERE identity = ? AND number = ? AND repaid"
        self._file.transact(lambda db: db.execute(sql, (units, identity.hash, number)), write=True)

    def repair(self) -> None:
        """Date now what a wrong clock dated ahead: else the allowance would stay used up until that time."""
        now_ms = self._clock()
        sql = "UPDATE draws SET drawn_ms = ? WHERE drawn_ms > ?"
        self._transact(lambda db: db.execute(sql, (now_ms, now_ms)), None, write=True)

    # -- reports -------------------------------------------------------------------------------------------------------

    def drawn_by(self, identity: Identity, run: str) -> list[Charge]:
        """All draws of a run, repaid or not, as they stand now."""
        found = self._found(identity, "substr(idempotency_key, 1, ?) = ?", len(run), run)
        return [draw.charge for draw in found]

    def find(self, identity: Identity, number: int) -> Draw | None:
        """A draw of this number, repaid or not; None if the journal has none (any more)."""
        return next(iter(self._found(identity, "number = ?", number)), None)

    def _found(self, identity: Identity, which: str, *values: object) -> list[Draw]:
        none: list[Draw] = []
        return self._transact(lambda db: _draws(db, identity, which, *values), none)

    def drawn_units(self, identity: Identity, at_ms: int, longest_ms: int) -> int:
        """What counted against the allowance at `at_ms`, as far as the journal still has it."""
        which, values = "upstream = ? AND drawn_ms > ? AND drawn_ms <= ?", (at_ms - longest_ms, at_ms)
        return self._transact(lambda db: _units(db, which, identity.upstream_hash, *values), 0)

    def check(self) -> None:
        """Raises LedgerError if there is a journal and it cannot be used. Makes none."""
        if os.path.exists(self._path) and os.path.getsize(self._path):
            self._file.transact(lambda db: db.execute("SELECT SUM(units) FROM draws").fetchone(), write=False)

    def owed_units(self, identity: Identity) -> int:
        """What was drawn and is not repaid; 0 if the journal cannot be read."""
        try:
            return self._transact(lambda db: _units(db, "identity = ? AND NOT repaid", identity.hash), 0)
        except LedgerError as error:
            self._warn(error)
            return 0

    # -- once the ledger answers again ---------------------------------------------------------------------------------

    def may_owe(self, identity: Identity) -> bool:
        """Whether it is time to look for a debt: else `repay` does nothing."""
        checked_ms = self._checked_ms.get(identity)
        return checked_ms is None or not 0 <= self._clock() - checked_ms < LOOK_AGAIN_MS

    def repay(
        self, identity: Identity, ledger: Ledger, retention_ms: int, caller_ms: int | None = None
    ) -> Sequence[Draw]:
        """Hand the ledger all draws that are owed. It appends each of them once: it remembers the last number.

        `retention_ms` is how long it must keep them: see `quota.ledger.contract.retention_of`. Where `caller_ms` is
        given and the ledger's clock disagrees with it, the debt stays. Costs next to nothing where nothing is owed.
        Raises LedgerError if the ledger still does not answer, and never because of the journal: an unreadable debt is
        no reason to refuse calls that the ledger can decide.

        Returns the draws that were corrected before they were marked as repaid. The ledger may have been told what they
        counted before that, so the caller has to settle them there.
        """
        now_ms = self._clock()
        if not self.may_owe(identity):
            return ()
        corrected: list[Draw] = []
        if os.path.exists(self._path):
            repaid = self._repay_all(identity, ledger, retention_ms, caller_ms)
            if repaid is None:
                return ()
            corrected = repaid
            self._log_end_of_outage(identity)
        self._checked_ms[identity] = now_ms
        return corrected

    def _repay_all(
        self, identity: Identity, ledger: Ledger, retention_ms: int, caller_ms: int | None
    ) -> list[Draw] | None:
        """The draws to be corrected in the ledger; None where the clocks disagree."""
        corrected: list[Draw] = []
        last, more = 0, True
        while more:
            try:
                machine, draws = self._file.transact(partial(_read_unpaid, identity=identity, after=last), write=False)
            except LedgerError as error:
                self._warn(error)
                return corrected
            more = len(draws) == REPAID_AT_ONCE
            if not draws:
                return corrected
            last = draws[-1].number
            charges = [(draw.number, draw.charge) for draw in draws]
            if not correctable(ledger).repay(identity.project, machine, charges, retention_ms, caller_ms):
                return None
            try:
                corrected += self._mark_repaid(identity, last)
            except LedgerError as error:  # they are sent again later, which changes nothing
                self._warn(error)
            else:
                units = sum(draw.charge.units for draw in draws)
                self._outages.pop(identity, None)
                warn("debt_repaid", project=identity.project, charges=len(draws), units=units)
        return corrected

    def _mark_repaid(self, identity: Identity, last: int) -> list[Draw]:
        """Mark the draws up to this number, but those that were corrected while they were owed: it returns these."""

        def work(db: sqlite3.Connection) -> list[Draw]:
            corrected = _draws(db, identity, "number <= ? AND NOT repaid AND corrected", last)
            sql = "UPDATE draws SET repaid = 1 WHERE identity = ? AND number <= ? AND NOT corrected"
            db.execute(sql, (identity.hash, last))
            return corrected

        return self._file.transact(work, write=True)

    def told(self, identity: Identity, draw: Draw) -> Draw | None:
        """The ledger counts what a draw was corrected to: it is repaid. Returns the draw as it is now if it was
        corrected again meanwhile."""

        def work(db: sqlite3.Connection) -> Draw | None:
            for now in _draws(db, identity, "number = ?", draw.number):
                if now.charge.units != draw.charge.units:
                    return now
            db.execute("UPDATE draws SET repaid = 1 WHERE identity = ? AND number = ?", (identity.hash, draw.number))
            return None

        try:
            return self._transact(work, None, write=True)
        except LedgerError as error:  # it is told again later, which changes nothing
            self._warn(error)
            return None

    def _log_end_of_outage(self, identity: Identity) -> None:
        """Say what this process drew and did not repay itself. `allowance_drawn` has said all about a single draw."""
        outage = self._outages.pop(identity, [])
        if len(outage) > 1:
            units, left = sum(draw.units for draw in outage), outage[-1].remaining_units
            warn("allowance_used", project=identity.project, charges=len(outage), units=units, left=left)

    def _warn(self, error: LedgerError) -> None:
        if not self._warned:
            self._warned = True
            warn("allowance_unreadable", error, path=self._path)

    def close(self) -> None:
        """Close the journal, and log what was drawn and not repaid. May be called twice."""
        for identity in list(self._outages):
            self._log_end_of_outage(identity)
        self._file.close()


_DRAW = (
    "INSERT INTO draws (number, identity, upstream, project, drawn_ms, units, bucket, method, job, region,"
    " idempotency_key) VALUES (max(?, ifnull((SELECT seq FROM sqlite_sequence WHERE name = 'draws'), 0) + 1),"
    " ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
"""The number is the time in ms, or the next one: so an old copy of the journal that is put back gives none that the
ledger has had since, and would ignore."""


def _delete_expired(db: sqlite3.Connection, upstream: str, now_ms: int, longest_ms: int) -> None:
    """Delete the draws that neither the allowance nor the ledger needs any more: they are repaid, and no window reaches
    them, not the longest one of any configuration that draws for this upstream project. A debt stays however old it
    looks: the clock that says so may be wrong."""
    known = db.execute("SELECT window_ms FROM longest_windows WHERE upstream = ?", (upstream,)).fetchone() or (0,)
    kept_ms = max(longest_ms, checked_row(known, integers=1)[0])
    if known != (kept_ms,):
        db.execute("REPLACE INTO longest_windows VALUES (?, ?)", (upstream, kept_ms))
    db.execute("DELETE FROM draws WHERE upstream = ? AND repaid AND drawn_ms <= ?", (upstream, now_ms - 2 * kept_ms))


def _draws(db: sqlite3.Connection, identity: Identity, which: str, *values: object) -> list[Draw]:
    """The draws of an identity of which this is true, a piece of SQL of our own."""
    columns = "number, drawn_ms, repaid, units, bucket, method, job, region, idempotency_key"
    sql = f"SELECT {columns} FROM draws WHERE identity = ? AND {which}"  # noqa: S608  # constants
    draws = []
    for row in db.execute(sql, (identity.hash, *values)).fetchall():
        number, drawn_ms, repaid, *charge = checked_row(row, integers=4)
        checked_row((drawn_ms,), integers=1, below=LATEST_MS)
        draws.append(Draw(number, drawn_ms, bool(repaid), Charge(*charge)))
    return draws


def _units(db: sqlite3.Connection, which: str, *values: object) -> int:
    """The units of all draws of which this is true, a piece of SQL of our own."""
    sql = f"SELECT COALESCE(SUM(units), 0) FROM draws WHERE {which}"  # noqa: S608  # constants
    return int(checked_row(db.execute(sql, values).fetchone(), integers=1)[0])


def _read_unpaid(db: sqlite3.Connection, identity: Identity, after: int) -> tuple[str, list[Draw]]:
    """The name under which the ledger knows the journal, and the first draws with a number above `after` that are owed.

    A ledger remembers the last number of each machine that repaid it. Two identities may use one ledger and repay in
    any order, so each has numbers of its own there.
    """
    draws = _draws(db, identity, "NOT repaid AND number > ? ORDER BY number LIMIT ?", after, REPAID_AT_ONCE)
    return f"{_machine(db)}-{identity.hash[:16]}", draws


def _machine(db: sqlite3.Connection) -> str:
    """The name of this journal."""
    row: tuple[str] = db.execute("SELECT id FROM machine").fetchone() or ("",)
    return checked_row(row, integers=0)[0]
