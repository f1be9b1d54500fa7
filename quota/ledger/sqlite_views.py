"""A view of the log in the SQLite ledger: as it is stored, brought up to the log's end.

A view is moved over what is new and what has expired since it was last used: L3 to L9 in docs/ledger-rules.md. Each
function works in a transaction of `quota.ledger.sqlite_ledger`.
"""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.common.sqlite_file import DamagedError, checked_row
from quota.ledger.contract import LimitCheck
from quota.ledger.entry import Id
from quota.ledger.sqlite_fields import marks
from quota.ledger.state_fields import id_text
from quota.terms.limits import Sliding, View

_BETWEEN = (
    "FROM charges WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) AND (ms, seq) <= (?, ?)"
    " ORDER BY ms, seq"
)
"""The plain bounds on ms are implied by the pairs; they are what the primary key is searched by."""


class ViewState(NamedTuple):
    """A view as it is stored (L3)."""

    total: int
    tail: Id
    head: Id
    dropped_through_ms: int

    def text(self) -> str:
        """As the field `view:NAME` has it: `TOTAL TAIL HEAD DROPPED_THROUGH_MS`."""
        return f"{self.total} {id_text(self.tail)} {id_text(self.head)} {self.dropped_through_ms}"

    def charged(self, units: int, at: Id) -> ViewState:
        """With what was just charged, up to the log's new end."""
        return ViewState(self.total + units, self.tail, at, self.dropped_through_ms)

    def has_read(self, at: Id) -> bool:
        """Whether an entry with this id is in the total, if the view selects it."""
        return self.tail <= at <= self.head

    @classmethod
    def of(cls, text: str | None) -> ViewState | None:
        """None where it is missing or cannot be right, and is to be taken from the log again (L6)."""
        try:
            numbers = list(map(int, (text or "").replace("-", " ").split(" ")))
            total, tail_ms, tail_seq, head_ms, head_seq, dropped_through_ms = numbers
        except ValueError:
            return None
        state = cls(total, (tail_ms, tail_seq), (head_ms, head_seq), dropped_through_ms)
        return state if max(numbers) <= NEVER else None


class Piece(NamedTuple):
    """What was read of the log: how many charges, the newest one's time (0: there was none), the units that a view
    counts of them, and up to which id there are no others."""

    charges: int
    newest_ms: int
    units: int
    through: Id


def advance(
    db: sqlite3.Connection,
    project: str,
    check: LimitCheck,
    now_ms: int,
    last: Id,
    stored: ViewState | None,
    room: int,
) -> tuple[ViewState, int]:
    """The view brought up to the log's end, without what has left its window; and how much may still be read. 0:
    that is how far it came."""
    cutoff_ms = _cutoff(check, now_ms)
    # L6. Missing, or the clock went back behind what was dropped, or all that it counts has expired: start afresh.
    if stored is None or stored.dropped_through_ms > cutoff_ms or stored.head[0] <= cutoff_ms:
        stored = ViewState(0, (cutoff_ms + 1, 0), (cutoff_ms, NEVER), cutoff_ms)
    total, tail, head, dropped_through_ms = stored
    if head < last:  # L7
        added = read_piece(db, project, check.view, head, last, room)
        total, head, room = total + added.units, added.through, room - added.charges
    if tail[0] <= cutoff_ms and room:  # L8
        left = read_piece(db, project, check.view, (tail[0], tail[1] - 1), (cutoff_ms, NEVER), room)
        total, room = total - left.units, room - left.charges
        dropped_through_ms = max(dropped_through_ms, left.newest_ms)
        if room:
            oldest_left = "SELECT ms, seq FROM charges WHERE project = ? AND ms > ? ORDER BY ms, seq LIMIT 1"
            tail = db.execute(oldest_left, (project, cutoff_ms)).fetchone() or (cutoff_ms + 1, 0)
        else:
            tail = left.through[0], left.through[1] + 1
    if total < 0:
        raise DamagedError("more has left a view than it had")
    return ViewState(total, tail, head, dropped_through_ms), room


def read_piece(db: sqlite3.Connection, project: str, view: View, after: Id, until: Id, room: int) -> Piece:
    """The charges with after < id <= until, at most `room` of them."""
    counted, names = _counted_if_selected(view)
    between = (project, after[0], until[0], *after, *until)
    sql = f"SELECT COUNT(*), COALESCE(MAX(ms), 0), COALESCE(SUM({counted}), 0) FROM (SELECT * {_BETWEEN} LIMIT ?)"  # noqa: S608
    row: tuple[int, int, int] = db.execute(sql, (*names, *between, room)).fetchone()
    charges, newest_ms, units = checked_row(row, integers=3)
    if charges == room:
        until = db.execute(f"SELECT ms, seq {_BETWEEN} LIMIT 1 OFFSET ?", (*between, room - 1)).fetchone()
    return Piece(charges, newest_ms, units, until)


def _cutoff(check: LimitCheck, now_ms: int) -> int:
    """L5. The newest millisecond that is out of the window at `now_ms`."""
    if isinstance(check.view.window, Sliding):
        return now_ms - check.view.window.window_ms
    assert check.edges is not None  # noqa: S101  # a calendar limit comes with its edges
    return check.edges[1 if now_ms >= check.edges[1] else 0] - 1


@lru_cache(maxsize=1_000)
def _counted_if_selected(view: View) -> tuple[str, tuple[str, ...]]:
    """L2. What a view counts of a charge, in SQL, and the names that it selects."""
    selector = view.selector
    fields = {"bucket": selector.buckets, "method": selector.methods, "job": selector.jobs}
    selected = " AND ".join([f"{field} IN ({marks(names)})" for field, names in fields.items() if names]) or "1"
    counted = "MIN(units, 1)" if selector.count == "calls" else "units"
    names = (*selector.buckets, *selector.methods, *selector.jobs)
    return f"CASE WHEN {selected} THEN {counted} ELSE 0 END", names
