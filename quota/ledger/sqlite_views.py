"""A view of the log in the SQLite ledger: as it is stored, brought up to the log's end, and what leaves it next.

A view is moved over what is new and what has expired since it was last used: L3 to L9 in ARCHITECTURE.md. Each
function works in a transaction of `quota.ledger.sqlite_ledger`.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import NEVER
from quota.common.sqlite_file import DamagedError, checked_row
from quota.ledger.sqlite_rows import marks
from quota.limits import MINUTE_MS, Sliding

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from quota.ledger.contract import ChargeRequest, LimitCheck
    from quota.ledger.entry import Id
    from quota.limits import View

_VIEW = (
    "SELECT total, tail_ms, tail_seq, head_ms, head_seq, dropped_through_ms FROM views WHERE project = ? AND name = ?"
)
_BETWEEN = (
    "FROM charges WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) AND (ms, seq) <= (?, ?)"
    " ORDER BY ms, seq"
)


class ViewState(NamedTuple):
    """A view as it is stored (L3)."""

    total: int
    tail_ms: int
    tail_seq: int
    head_ms: int
    head_seq: int
    dropped_through_ms: int


def stored_view(db: sqlite3.Connection, project: str, view: View) -> ViewState | None:
    """The view's state; None where it is missing or cannot be right, and is to be taken from the log again (L6)."""
    row = db.execute(_VIEW, (project, view.name)).fetchone()
    if row is None:
        return None
    total, t_ms, t_seq, h_ms, h_seq, dropped_through_ms = row
    whole = type(total) is type(t_ms) is type(t_seq) is type(h_ms) is type(h_seq) is type(dropped_through_ms) is int
    return ViewState(*row) if whole and total >= 0 else None


def save_view(db: sqlite3.Connection, project: str, view: View, state: tuple[int, int, int, int, int, int]) -> None:
    db.execute("REPLACE INTO views VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (project, view.name, *state))


def save_views(
    db: sqlite3.Connection, request: ChargeRequest, views: list[ViewState], stored: list[ViewState | None]
) -> None:
    """Save how far the views have read. Of two limits with one view the first has come further: it comes last."""
    for check, view, state in reversed([*zip(request.checks, views, stored, strict=False)]):
        if view != state:
            save_view(db, request.project, check.view, view)


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
    if stored is None or stored.dropped_through_ms > cutoff_ms or stored.head_ms <= cutoff_ms:
        stored = ViewState(0, cutoff_ms + 1, 0, cutoff_ms, NEVER, cutoff_ms)
    total, tail_ms, tail_seq, head_ms, head_seq, dropped_through_ms = stored
    if tail_ms > cutoff_ms and (head_ms, head_seq) >= last:
        return stored, room
    if (head_ms, head_seq) < last:  # L7
        through, room = piece_of_log(db, project, (head_ms, head_seq), last, room)
        total += units_of(db, project, check.view, (head_ms, head_seq), through)
        head_ms, head_seq = through
    if tail_ms <= cutoff_ms and room:  # L8
        through, room = piece_of_log(db, project, (tail_ms, tail_seq - 1), (cutoff_ms, NEVER), room)
        total -= units_of(db, project, check.view, (tail_ms, tail_seq - 1), through)
        if not room:
            dropped_through_ms, tail_ms, tail_seq = through[0], through[0], through[1] + 1
    if tail_ms <= cutoff_ms and room:
        newest_dropped = "SELECT MAX(ms) FROM charges WHERE project = ? AND ms <= ?"
        dropped_through_ms = max(
            dropped_through_ms, db.execute(newest_dropped, (project, cutoff_ms)).fetchone()[0] or 0
        )
        oldest_left = "SELECT ms, seq FROM charges WHERE project = ? AND ms > ? ORDER BY ms, seq LIMIT 1"
        tail_ms, tail_seq = db.execute(oldest_left, (project, cutoff_ms)).fetchone() or (cutoff_ms + 1, 0)
    if total < 0:
        raise DamagedError("more has left a view than it had")
    return ViewState(total, tail_ms, tail_seq, head_ms, head_seq, dropped_through_ms), room


def piece_of_log(db: sqlite3.Connection, project: str, after: Id, until: Id, room: int) -> tuple[Id, int]:
    """Up to where the charges in after < id <= until may be read now, and how many others; 0: there are more."""
    if until[0] - after[0] <= MINUTE_MS:
        return until, room
    between = (project, after[0], until[0], *after, *until)
    found = db.execute(f"SELECT COUNT(*) FROM (SELECT 1 {_BETWEEN} LIMIT ?)", (*between, room)).fetchone()[0]  # noqa: S608
    if found < room:
        return until, room - found
    ms, seq = db.execute(f"SELECT ms, seq {_BETWEEN} LIMIT 1 OFFSET ?", (*between, room - 1)).fetchone()
    return (ms, seq), 0


def units_of(db: sqlite3.Connection, project: str, view: View, after: Id, until: Id) -> int:
    """What `view` counts of the charges with after < id <= until."""
    sql, names = _sum_sql(view)
    row: tuple[int] = db.execute(sql, (project, after[0], until[0], *after, *until, *names)).fetchone()
    return checked_row(row, integers=1)[0]


def edges_fit(checks: Sequence[LimitCheck], now_ms: int) -> bool:
    """L11. Whether the caller's clock and ours are in the same calendar periods, or in neighbouring ones."""
    for check in checks:  # noqa: SIM110  # half the time of `all` and a generator
        if check.edges is not None and not check.edges[0] <= now_ms < check.edges[2]:
            return False
    return True


def _cutoff(check: LimitCheck, now_ms: int) -> int:
    """L5. The newest millisecond that is out of the window at `now_ms`."""
    if isinstance(check.view.window, Sliding):
        return now_ms - check.view.window.window_ms
    assert check.edges is not None  # noqa: S101  # a calendar limit comes with its edges
    return check.edges[1 if now_ms >= check.edges[1] else 0] - 1


def leaving_at(
    db: sqlite3.Connection, project: str, check: LimitCheck, view: ViewState, expiring: Sequence[tuple[int, int]]
) -> int | None:
    """The time of the first charge behind which a view counts so little that the call fits; or of one that would leave
    when the unlogged units expire with which it does. `expiring`: until when those count, and how many, in order."""
    left, room = view.total + sum(units for _, units in expiring), check.cap_units - check.cost_units
    if not isinstance(check.view.window, Sliding) or not check.cost_units or not 0 <= room < left:
        return None
    window_ms, expired = check.view.window.window_ms, 0
    selected, names = _selected(check.view)
    sql = (
        f"SELECT ms, {_counted(check.view)} FROM charges"  # noqa: S608  # constants and placeholders only
        f" WHERE project = ? AND ms >= ? AND (ms, seq) >= (?, ?){selected} ORDER BY ms, seq"
    )
    rows = db.execute(sql, (project, view.tail_ms, view.tail_ms, view.tail_seq, *names))
    for ms, units in itertools.chain(rows, [(NEVER, 0)]):
        while expired < len(expiring) and expiring[expired][0] <= ms + window_ms:
            until_ms, lost_units = expiring[expired]
            expired, left = expired + 1, left - lost_units
            if left <= room:
                return max(0, until_ms - window_ms)
        left -= units
        if left <= room:
            at_ms: int = checked_row((ms,), integers=1)[0]
            return at_ms
    return None


@lru_cache(maxsize=1_000)
def _sum_sql(view: View) -> tuple[str, tuple[str, ...]]:
    """L2. SQL that sums what a view counts in (after, until], and the names that it selects."""
    selected, names = _selected(view)
    # The plain bounds on ms are implied by the pairs; they are what the primary key is searched by.
    sql = (
        f"SELECT COALESCE(SUM({_counted(view)}), 0) FROM charges"  # noqa: S608  # constants and placeholders only
        f" WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) AND (ms, seq) <= (?, ?){selected}"
    )
    return sql, names


def _counted(view: View) -> str:
    return "MIN(units, 1)" if view.selector.count == "calls" else "units"


def _selected(view: View) -> tuple[str, tuple[str, ...]]:
    selector, sql = view.selector, ""
    fields = {"bucket": selector.buckets, "method": selector.methods, "job": selector.jobs}
    for field, names in fields.items():
        if names:
            sql += f" AND {field} IN ({marks(names)})"
    return sql, (*selector.buckets, *selector.methods, *selector.jobs)
