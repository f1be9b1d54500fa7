"""The history of the embedded ledger: charges added up by hour, and refusals (L29, L30 in ARCHITECTURE.md).

Each function works in a transaction of `quota.ledger.sqlite_ledger`.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import LATEST_MS, NEVER
from quota.common.sqlite_file import checked_row
from quota.ledger.history import (
    HISTORY_MS,
    MAX_CELLS,
    MAX_REFUSALS,
    OTHER,
    ROLL_UP_AT_ONCE,
    History,
    HourOfSpending,
    RefusalCount,
    RefusedSum,
    RunningSum,
    cells_text,
    cut,
    read_cells,
)
from quota.limits import HOUR_MS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from quota.ledger.entry import Entry, Id


class _Head(NamedTuple):
    rolled_ms: int
    rolled_seq: int
    whole_after_ms: int
    gap_from_ms: int
    gap_to_ms: int
    summed_after_ms: int
    summed_after_seq: int


_HEAD = f"SELECT {', '.join(_Head._fields)} FROM histories WHERE project = ?"  # noqa: S608  # constants
_COUNT = "SELECT COUNT(*) FROM {} WHERE project = ? {}"


def roll_up(db: sqlite3.Connection, project: str, now_ms: int, through_ms: int, trimmed_through_ms: int) -> bool:
    """Add at most ROLL_UP_AT_ONCE charges of one hour, up to `through_ms`; whether there is more to do."""
    stored = _head(db, project)
    head = stored or _Head(0, 0, trimmed_through_ms, 0, 0, 0, 0)
    oldest = db.execute("SELECT ms, seq FROM charges WHERE project = ? ORDER BY ms, seq LIMIT 1", (project,)).fetchone()
    if oldest is None and stored is None:
        return False
    rolled = head.rolled_ms, head.rolled_seq
    seen_ms = max(head.whole_after_ms, rolled[0])
    if trimmed_through_ms > seen_ms and (oldest is None or oldest > rolled):
        old = head.gap_to_ms < now_ms - HISTORY_MS
        head = head._replace(
            gap_from_ms=seen_ms if old else min(head.gap_from_ms, seen_ms),
            gap_to_ms=max(head.gap_to_ms, trimmed_through_ms),
        )
    rows = db.execute(
        "SELECT ms, seq, method, job, region, bucket, units, charged_units FROM charges"
        " WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) ORDER BY ms, seq LIMIT ?",
        (project, rolled[0], through_ms, *rolled, ROLL_UP_AT_ONCE),
    ).fetchall()
    of_hour = [row for row in rows if row[0] // HOUR_MS == rows[0][0] // HOUR_MS]
    if of_hour:
        _add_hour(db, project, of_hour, (head.summed_after_ms, head.summed_after_seq))
        head = head._replace(rolled_ms=of_hour[-1][0], rolled_seq=of_hour[-1][1])
    oldest_hour_ms = (now_ms - HISTORY_MS) // HOUR_MS * HOUR_MS
    newest_old = "SELECT MAX(hour_ms) FROM hours WHERE project = ? AND hour_ms < ?"
    newest_old_ms = db.execute(newest_old, (project, oldest_hour_ms)).fetchone()[0]
    if newest_old_ms is not None:
        head = head._replace(whole_after_ms=max(head.whole_after_ms, newest_old_ms + HOUR_MS - 1))
    if head != stored:
        db.execute("REPLACE INTO histories VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (project, *head))
    for table in ("hours", "refused"):
        db.execute(f"DELETE FROM {table} WHERE project = ? AND hour_ms < ?", (project, oldest_hour_ms))  # noqa: S608  # constants
    return len(of_hour) < len(rows) or len(rows) == ROLL_UP_AT_ONCE


def rolled_up(db: sqlite3.Connection, project: str) -> Id | None:
    """The newest charge that the history has; None where nobody keeps one."""
    head = _head(db, project)
    return None if head is None else (head.rolled_ms, head.rolled_seq)


def correct(db: sqlite3.Connection, project: str, entry: Entry, units: int) -> None:
    """A charge counts `units` from now on (L15): in its hour, if that has it already, and in the sums of
    corrections."""
    changed = units - entry.units
    rolled = rolled_up(db, project)
    if rolled is not None and (entry.ms, entry.seq) <= rolled and changed:
        hour_ms = entry.ms // HOUR_MS * HOUR_MS
        names = cut(entry.method), cut(entry.job), cut(entry.region), cut(entry.bucket)
        _change_hour(db, project, hour_ms, names, 0, changed)
    if changed:
        _add_sum(db, project, (cut(entry.method), cut(entry.job)), (0, 0, abs(changed)))


def read_history(db: sqlite3.Connection, project: str, since_ms: int, now_ms: int) -> History:
    head = _head(db, project) or _Head(0, 0, 0, 0, 0, 0, 0)
    first_ms = max(since_ms, now_ms - HISTORY_MS, 0) // HOUR_MS * HOUR_MS
    of_hours = "WHERE project = ? AND hour_ms >= ? ORDER BY hour_ms"  # the clock may have gone back since
    span = project, first_ms
    hours = db.execute(
        f"SELECT charges, units, hour_ms, method, job, region, bucket FROM hours {of_hours}",  # noqa: S608  # constants
        span,
    ).fetchall()
    refused = db.execute(
        f"SELECT calls, hour_ms, refused_by, job, reason FROM refused {of_hours}",  # noqa: S608  # constants
        span,
    ).fetchall()
    sums = db.execute(
        "SELECT charges, units, corrected_units, method, job FROM sums WHERE project = ?", (project,)
    ).fetchall()
    refused_sums = db.execute(
        "SELECT calls, refused_by, job, reason FROM refused_sums WHERE project = ?", (project,)
    ).fetchall()
    for row in hours:
        checked_row(row, integers=3)
        checked_row(row[2:3], integers=1, below=LATEST_MS)
    for row in refused:
        checked_row(row, integers=2)
        checked_row(row[1:2], integers=1, below=LATEST_MS)
    for row in refused_sums:
        checked_row(row, integers=1)
    for row in sums:
        checked_row(row, integers=3)
    return History(
        rolled_up=(head.rolled_ms, head.rolled_seq),
        whole_after_ms=head.whole_after_ms,
        gap=(head.gap_from_ms, head.gap_to_ms) if head.gap_to_ms else None,
        summed_after=(head.summed_after_ms, head.summed_after_seq),
        hours=tuple(HourOfSpending(*row[2:], *row[:2]) for row in hours),
        sums=tuple(RunningSum(method, job, *numbers) for *numbers, method, job in sums),
        refused=tuple(RefusalCount(hour_ms, limit, job, why, calls) for calls, hour_ms, limit, job, why in refused),
        refused_sums=tuple(RefusedSum(limit, job, why, calls) for calls, limit, job, why in refused_sums),
    )


def add_refusals(db: sqlite3.Connection, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str]) -> None:
    for one in counts:
        names = cut(one.limit), cut(one.job), cut(one.reason)
        hour_ms = one.hour_ms // HOUR_MS * HOUR_MS
        where = "hour_ms = ? AND refused_by = ? AND job = ? AND reason = ?"
        key = names
        if not _known(db, "refused", project, where, (hour_ms, *names)):
            others = db.execute(
                _COUNT.format("refused", "AND hour_ms = ? AND refused_by != ?"), (project, hour_ms, OTHER)
            ).fetchone()[0]
            if others >= MAX_CELLS:
                key = OTHER, OTHER, OTHER
        db.execute(
            "INSERT INTO refused VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls",
            (project, hour_ms, *key, one.calls),
        )
        if not _known(db, "refused_sums", project, "refused_by = ? AND job = ? AND reason = ?", names):
            others = db.execute(_COUNT.format("refused_sums", "AND refused_by != ?"), (project, OTHER)).fetchone()[0]
            if others >= MAX_CELLS:
                names = OTHER, OTHER, OTHER
        db.execute(
            "INSERT INTO refused_sums VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET calls = calls + excluded.calls",
            (project, *names, one.calls),
        )
    newest = db.execute("SELECT MAX(number) FROM refusals WHERE project = ?", (project,)).fetchone()[0] or 0
    for number, refusal in enumerate(refusals, newest + 1):
        db.execute("INSERT INTO refusals VALUES (?, ?, ?)", (project, number, refusal))
    db.execute(
        "DELETE FROM refusals WHERE project = ? AND number <= ?", (project, newest + len(refusals) - MAX_REFUSALS)
    )


def read_refusals(db: sqlite3.Connection, project: str) -> list[str]:
    rows = db.execute("SELECT refusal FROM refusals WHERE project = ? ORDER BY number", (project,)).fetchall()
    return [checked_row(row, integers=0)[0] for row in rows]


# -- after a repair, and in a move -------------------------------------------------------------------------------------


def take_back(db: sqlite3.Connection, project: str, now_ms: int) -> bool:
    """Before a repair gives charges other ids: take those that are dated ahead of `now_ms` out of their hours, to be
    rolled up again under their new ids. The sums need each charge once, and get all that they lack. Returns whether
    there was anything to take back: then call `sums_have` with the newest id.
    """
    rolled = rolled_up(db, project)
    if rolled is None or rolled[0] <= now_ms:
        return False
    sql = (
        "SELECT method, job, COUNT(*), SUM(charged_units) FROM charges"
        " WHERE project = ? AND (ms, seq) > (?, ?) GROUP BY method, job"
    )
    for method, job, charges, units in db.execute(sql, (project, *rolled)).fetchall():
        _add_sum(db, project, (cut(method), cut(job)), (charges, units, 0))
    hour_ms = now_ms // HOUR_MS * HOUR_MS
    db.execute("DELETE FROM hours WHERE project = ? AND hour_ms > ?", (project, hour_ms))
    sql = (
        "SELECT method, job, region, bucket, COUNT(*), SUM(units) FROM charges"
        " WHERE project = ? AND ms > ? AND ms < ? AND (ms, seq) <= (?, ?) GROUP BY method, job, region, bucket"
    )
    for *names, charges, units in db.execute(sql, (project, now_ms, hour_ms + HOUR_MS, *rolled)).fetchall():
        _change_hour(db, project, hour_ms, tuple(map(cut, names)), -charges, -units)
    newest = "SELECT ms, seq FROM charges WHERE project = ? AND ms <= ? ORDER BY ms DESC, seq DESC LIMIT 1"
    unchanged = db.execute(newest, (project, now_ms)).fetchone() or (now_ms - 1, NEVER)
    db.execute("UPDATE histories SET rolled_ms = ?, rolled_seq = ? WHERE project = ?", (*unchanged, project))
    return True


def sums_have(db: sqlite3.Connection, project: str, through: Id) -> None:
    """All charges up to this id are in the sums, whether they are rolled up or not."""
    sql = "UPDATE histories SET summed_after_ms = ?, summed_after_seq = ? WHERE project = ?"
    db.execute(sql, (*through, project))


def fields(db: sqlite3.Connection, project: str) -> Iterator[tuple[str, str]]:
    """The history as fields, with the names that Redis has for them, and all refusals in one."""
    head = _head(db, project)
    if head is not None:
        yield "rolled_up", f"{head.rolled_ms}-{head.rolled_seq}"  # the copy in the state
        yield "history:rolled_up", f"{head.rolled_ms}-{head.rolled_seq}"
        yield "history:whole_after_ms", str(head.whole_after_ms)
        yield "history:sums_after", f"{head.summed_after_ms}-{head.summed_after_seq}"
        if head.gap_to_ms:
            yield "history:gap", f"{head.gap_from_ms} {head.gap_to_ms}"
    history = read_history(db, project, 0, 0)
    of_hours = groupby(history.hours, key=lambda row: row.hour_ms)
    for hour_ms, rows in of_hours:
        yield f"history:hour:{hour_ms // HOUR_MS}", cells_text((row[1:5], row[5:]) for row in rows)
    for hour_ms, counts in groupby(history.refused, key=lambda row: row.hour_ms):
        yield f"history:refused:{hour_ms // HOUR_MS}", cells_text((row[1:4], row[4:]) for row in counts)
    oldest = [*(row.hour_ms for row in history.hours[:1]), *(row.hour_ms for row in history.refused[:1])]
    if oldest:
        yield "history:swept_hour", str(min(oldest) // HOUR_MS - 1)
    if history.sums:
        yield "history:sums", cells_text((row[:2], row[2:]) for row in history.sums)
    if history.refused_sums:
        yield "history:refused_sums", cells_text((row[:3], row[3:]) for row in history.refused_sums)
    refusals = read_refusals(db, project)
    if refusals:
        import json

        yield "history:refusals", json.dumps(refusals)


def put(db: sqlite3.Connection, project: str, name: str, value: str) -> None:
    """One field of a history as rows, the inverse of `fields`. Raises ValueError for what no program of ours writes."""
    kind, _, number = name.partition(":")
    if kind == "hour":
        for names, numbers in read_cells(value, 4, 2):
            row = (project, int(number) * HOUR_MS, *names, *numbers)
            db.execute("REPLACE INTO hours VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    elif kind == "refused":
        for names, numbers in read_cells(value, 3, 1):
            row = (project, int(number) * HOUR_MS, *names, *numbers)
            db.execute("REPLACE INTO refused VALUES (?, ?, ?, ?, ?, ?)", row)
    elif kind == "sums":
        for names, numbers in read_cells(value, 2, 3):
            db.execute("REPLACE INTO sums VALUES (?, ?, ?, ?, ?, ?)", (project, *names, *numbers))
    elif kind == "refused_sums":
        for names, numbers in read_cells(value, 3, 1):
            db.execute("REPLACE INTO refused_sums VALUES (?, ?, ?, ?, ?)", (project, *names, *numbers))
    elif kind == "refusals":
        import json

        for n, text in enumerate(json.loads(value), 1):
            db.execute("REPLACE INTO refusals VALUES (?, ?, ?)", (project, n, text))
    elif kind in _HEAD_FIELDS:
        columns = _HEAD_FIELDS[kind]
        numbers = [int(part) for part in value.replace("-", " ").split(" ")]
        db.execute("INSERT OR IGNORE INTO histories VALUES (?, 0, 0, 0, 0, 0, 0, 0)", (project,))
        for column, found in zip(columns, numbers, strict=True):
            db.execute(f"UPDATE histories SET {column} = ? WHERE project = ?", (found, project))  # noqa: S608  # constants


_HEAD_FIELDS = {
    "rolled_up": ("rolled_ms", "rolled_seq"),
    "whole_after_ms": ("whole_after_ms",),
    "gap": ("gap_from_ms", "gap_to_ms"),
    "sums_after": ("summed_after_ms", "summed_after_seq"),
}


# -- pieces ------------------------------------------------------------------------------------------------------------


def _head(db: sqlite3.Connection, project: str) -> _Head | None:
    row = db.execute(_HEAD, (project,)).fetchone()
    if row is None:
        return None
    head = _Head(*checked_row(row, integers=len(row)))
    times_ms = head.rolled_ms, head.whole_after_ms, head.gap_from_ms, head.gap_to_ms, head.summed_after_ms
    checked_row(times_ms, integers=len(times_ms), below=LATEST_MS)
    return head


def _add_hour(
    db: sqlite3.Connection,
    project: str,
    rows: Sequence[tuple[int, int, str, str, str, str, int, int]],
    summed_after: Id,
) -> None:
    """Add charges of one hour to it, and to the sums."""
    hour_ms = rows[0][0] // HOUR_MS * HOUR_MS
    known = {
        tuple(row)
        for row in db.execute(
            "SELECT method, job, region, bucket FROM hours WHERE project = ? AND hour_ms = ?", (project, hour_ms)
        )
    }
    known.discard((OTHER,) * 4)
    added: dict[tuple[str, ...], tuple[int, int]] = {}
    summed: dict[tuple[str, str], tuple[int, int]] = {}
    for ms, seq, method, job, region, bucket, units, charged_units in rows:
        checked_row((ms, seq, units, charged_units, method, job, region, bucket), integers=4)
        key: tuple[str, ...] = cut(method), cut(job), cut(region), cut(bucket)
        if key not in known:
            if len(known) < MAX_CELLS:
                known.add(key)
            else:
                key = (OTHER,) * 4
        charges, counted = added.get(key, (0, 0))
        added[key] = charges + 1, counted + units
        if (ms, seq) > summed_after:
            charges, counted = summed.get((cut(method), cut(job)), (0, 0))
            summed[cut(method), cut(job)] = charges + 1, counted + charged_units
    db.executemany(
        "INSERT INTO hours VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET charges = charges + excluded.charges, units = units + excluded.units",
        [(project, hour_ms, *key, *numbers) for key, numbers in added.items()],
    )
    for name, numbers in summed.items():
        _add_sum(db, project, name, (*numbers, 0))


def _add_sum(db: sqlite3.Connection, project: str, name: tuple[str, str], numbers: tuple[int, int, int]) -> None:
    if not _known(db, "sums", project, "method = ? AND job = ?", name):
        others = db.execute(_COUNT.format("sums", "AND method != ?"), (project, OTHER)).fetchone()[0]
        if others >= MAX_CELLS:
            name = OTHER, OTHER
    db.execute(
        "INSERT INTO sums VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET charges = charges + excluded.charges,"
        " units = units + excluded.units, corrected_units = corrected_units + excluded.corrected_units",
        (project, *name, *numbers),
    )


def _change_hour(
    db: sqlite3.Connection, project: str, hour_ms: int, names: Sequence[str], charges: int, units: int
) -> None:
    """Add to the row of these names, or to the one of all that came after MAX_CELLS."""
    for key in (names, (OTHER,) * 4):
        done = db.execute(
            "UPDATE hours SET charges = MAX(0, charges + ?), units = MAX(0, units + ?)"
            " WHERE project = ? AND hour_ms = ? AND method = ? AND job = ? AND region = ? AND bucket = ?",
            (charges, units, project, hour_ms, *key),
        )
        if done.rowcount:
            return


def _known(db: sqlite3.Connection, table: str, project: str, where: str, key: Sequence[object]) -> bool:
    sql = f"SELECT 1 FROM {table} WHERE project = ? AND {where}"  # noqa: S608  # constants and placeholders
    return db.execute(sql, (project, *key)).fetchone() is not None
