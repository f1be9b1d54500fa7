"""The history of the embedded ledger: charges added up by hour, and refusals (L29, L30 in docs/ledger-rules.md).

Its fields are those of `lua/roll_up.lua` and `lua/add_refusals.lua`, with `history:` before their names. Each function
works in a transaction of `quota.ledger.sqlite_ledger`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence

from quota.common.clock import NEVER
from quota.ledger.entry import Entry, Id, is_first
from quota.ledger.history import (
    HISTORY_MS,
    MAX_CELLS,
    MAX_REFUSALS,
    OTHER,
    ROLL_UP_AT_ONCE,
    History,
    RefusalCount,
    cells_text,
    cut,
    read_cells,
)
from quota.ledger.sqlite_fields import drop_fields, fields_of, put_fields, read_fields
from quota.ledger.state_fields import HISTORY_FIELDS, history_of, id_text, read_id
from quota.terms.limits import HOUR_MS

ROLLED_UP = "history:rolled_up"
REFUSALS = "history:refusals"

_OF_CHARGES, _OF_REFUSALS = (4, 2), (3, 1)
"""How many names, and how many numbers, a row of an hour has."""
_SUMS, _REFUSED_SUMS = (2, 3), (3, 1)


class _Cells:
    """Rows of numbers by names, as one field has them. After MAX_CELLS rows, all that is new counts under OTHER."""

    def __init__(self, db: sqlite3.Connection, project: str, field: str, shape: tuple[int, int]) -> None:
        self._db, self._project, self._field = db, project, field
        names, self._numbers = shape
        self._others = (OTHER,) * names
        text = read_fields(db, project, (field,)).get(field, "")
        self.rows = {tuple(parts): numbers for parts, numbers in read_cells(text, *shape)}

    def add(self, names: Iterable[str], *numbers: int) -> None:
        key = tuple(map(cut, names))
        if key not in self.rows and len(self.rows) - (self._others in self.rows) >= MAX_CELLS:
            key = self._others
        known = self.rows.get(key, [0] * self._numbers)
        self.rows[key] = [number + more for number, more in zip(known, numbers, strict=True)]

    def change(self, names: Iterable[str], *numbers: int) -> None:
        """Change the row of these names, or the one of all that came after MAX_CELLS, by what may be less than 0."""
        key = tuple(map(cut, names))
        known = self.rows.get(key) or self.rows.get(self._others)
        if known is not None:
            known[:] = [max(0, number + more) for number, more in zip(known, numbers, strict=True)]

    def save(self) -> None:
        put_fields(self._db, self._project, [(self._field, cells_text(self.rows.items()))])


def roll_up(db: sqlite3.Connection, project: str, now_ms: int, through_ms: int, trimmed_through_ms: int) -> bool:
    """Add at most ROLL_UP_AT_ONCE charges of one hour, up to `through_ms`; whether there is more to do."""
    stored = _head(db, project)
    head = stored or History(whole_after_ms=trimmed_through_ms)
    oldest = db.execute("SELECT ms, seq FROM charges WHERE project = ? ORDER BY ms, seq LIMIT 1", (project,)).fetchone()
    if oldest is None and stored is None:
        return False
    rolled = head.rolled_up
    seen_ms = max(head.whole_after_ms, rolled[0])
    if trimmed_through_ms > seen_ms and (oldest is None or oldest > rolled):
        from_ms, to_ms = head.gap or (0, 0)
        from_ms = seen_ms if to_ms < now_ms - HISTORY_MS else min(from_ms, seen_ms)
        head = head._replace(gap=(from_ms, max(to_ms, trimmed_through_ms)))
    rows = db.execute(
        "SELECT ms, seq, method, job, region, bucket, units, charged_units, idempotency_key FROM charges"
        " WHERE project = ? AND ms BETWEEN ? AND ? AND (ms, seq) > (?, ?) ORDER BY ms, seq LIMIT ?",
        (project, rolled[0], through_ms, *rolled, ROLL_UP_AT_ONCE),
    ).fetchall()
    of_hour = [row for row in rows if row[0] // HOUR_MS == rows[0][0] // HOUR_MS]
    if of_hour:
        cells = _hour(db, project, of_hour[0][0])
        sums = _Cells(db, project, "history:sums", _SUMS)
        for ms, seq, method, job, region, bucket, units, charged_units, key in of_hour:
            cells.add((method, job, region, bucket), 1, units)
            if (ms, seq) > head.summed_after:
                sums.add((method, job), is_first(key), charged_units, 0)
        cells.save()
        sums.save()
        head = head._replace(rolled_up=of_hour[-1][:2])
    oldest_hour = (now_ms - HISTORY_MS) // HOUR_MS
    too_old = [hour for hour in _hours(db, project, "hour") if hour < oldest_hour]
    if too_old:
        head = head._replace(whole_after_ms=max(head.whole_after_ms, (max(too_old) + 1) * HOUR_MS - 1))
        drop_fields(db, project, [f"history:hour:{hour}" for hour in too_old])
    drop_fields(
        db, project, [f"history:refused:{hour}" for hour in _hours(db, project, "refused") if hour < oldest_hour]
    )
    if head != stored:
        put_fields(db, project, [(ROLLED_UP, id_text(head.rolled_up)), ("history:whole_after_ms", head.whole_after_ms)])
        sums_have(db, project, head.summed_after)
        if head.gap is not None:
            put_fields(db, project, [("history:gap", f"{head.gap[0]} {head.gap[1]}")])
    return len(of_hour) < len(rows) or len(rows) == ROLL_UP_AT_ONCE


def rolled_up(db: sqlite3.Connection, project: str) -> Id | None:
    """The newest charge that the history has; None where nobody keeps one."""
    text = read_fields(db, project, (ROLLED_UP,)).get(ROLLED_UP)
    return None if text is None else read_id(text)


def correct(db: sqlite3.Connection, project: str, entry: Entry, units: int) -> None:
    """A charge counts `units` from now on (L15): in its hour, if that has it already, and in the sums of
    corrections."""
    changed = units - entry.units
    if not changed:
        return
    rolled = rolled_up(db, project)
    if rolled is not None and (entry.ms, entry.seq) <= rolled:
        cells = _hour(db, project, entry.ms)
        cells.change((entry.method, entry.job, entry.region, entry.bucket), 0, changed)
        cells.save()
    sums = _Cells(db, project, "history:sums", _SUMS)
    sums.add((entry.method, entry.job), 0, 0, abs(changed))
    sums.save()


def read_history(db: sqlite3.Connection, project: str, since_ms: int, now_ms: int) -> History:
    fields = fields_of(db, project, "history")
    first = max(since_ms, now_ms - HISTORY_MS, 0) // HOUR_MS
    known = {int(name.rpartition(":")[2]) for name in fields if name.startswith(("hour:", "refused:"))}
    hours = [str(hour) for hour in sorted(known) if hour >= first]  # the clock may have gone back since
    words = [*HISTORY_FIELDS, *(f"hour:{hour}" for hour in hours), *(f"refused:{hour}" for hour in hours)]
    return history_of(hours, [fields.get(word) for word in words], None)


def add_refusals(db: sqlite3.Connection, project: str, counts: Sequence[RefusalCount], refusals: Sequence[str]) -> None:
    sums = _Cells(db, project, "history:refused_sums", _REFUSED_SUMS)
    hours: dict[int, _Cells] = {}
    for one in counts:
        hour, names = one.hour_ms // HOUR_MS, (one.limit, one.job, one.reason)
        if hour not in hours:
            hours[hour] = _Cells(db, project, f"history:refused:{hour}", _OF_REFUSALS)
        hours[hour].add(names, one.calls)
        sums.add(names, one.calls)
    for cells in (*hours.values(), sums) if counts else ():
        cells.save()
    if refusals:
        kept = [*read_refusals(db, project), *refusals][-MAX_REFUSALS:]
        put_fields(db, project, [(REFUSALS, json.dumps(kept))])


def read_refusals(db: sqlite3.Connection, project: str) -> list[str]:
    found = json.loads(read_fields(db, project, (REFUSALS,)).get(REFUSALS, "[]"))
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("refusals are texts")
    return found


# -- after a repair ----------------------------------------------------------------------------------------------------


def take_back(db: sqlite3.Connection, project: str, now_ms: int) -> bool:
    """Before a repair gives charges other ids: take those that are dated ahead of `now_ms` out of their hours, to be
    rolled up again under their new ids. The sums need each charge once, and get all that they lack. Returns whether
    there was anything to take back: then call `sums_have` with the newest id.
    """
    rolled = rolled_up(db, project)
    if rolled is None or rolled[0] <= now_ms:
        return False
    sql = (
        "SELECT method, job, SUM(idempotency_key NOT GLOB '*+[1-9]'), SUM(charged_units) FROM charges"
        " WHERE project = ? AND (ms, seq) > (?, ?) GROUP BY method, job"
    )
    sums = _Cells(db, project, "history:sums", _SUMS)
    for method, job, charges, units in db.execute(sql, (project, *rolled)).fetchall():
        sums.add((method, job), charges, units, 0)
    sums.save()
    hour = now_ms // HOUR_MS
    drop_fields(db, project, [f"history:hour:{later}" for later in _hours(db, project, "hour") if later > hour])
    sql = (
        "SELECT method, job, region, bucket, COUNT(*), SUM(units) FROM charges"
        " WHERE project = ? AND ms > ? AND ms < ? AND (ms, seq) <= (?, ?) GROUP BY method, job, region, bucket"
    )
    cells = _hour(db, project, now_ms)
    for *names, charges, units in db.execute(sql, (project, now_ms, (hour + 1) * HOUR_MS, *rolled)).fetchall():
        cells.change(names, -charges, -units)
    cells.save()
    newest = "SELECT ms, seq FROM charges WHERE project = ? AND ms <= ? ORDER BY ms DESC, seq DESC LIMIT 1"
    unchanged = db.execute(newest, (project, now_ms)).fetchone() or (now_ms - 1, NEVER)
    put_fields(db, project, [(ROLLED_UP, id_text(unchanged))])
    return True


def sums_have(db: sqlite3.Connection, project: str, through: Id) -> None:
    """All charges up to this id are in the sums, whether they are rolled up or not."""
    put_fields(db, project, [("history:sums_after", id_text(through))])


# -- pieces ------------------------------------------------------------------------------------------------------------


def _head(db: sqlite3.Connection, project: str) -> History | None:
    """The history without its hours and its sums; None where nobody keeps one."""
    names = [f"history:{name}" for name in HISTORY_FIELDS[:4]]
    found = [*map(read_fields(db, project, names).get, names)]
    return None if found[0] is None else history_of((), [*found, None, None], None)


def _hour(db: sqlite3.Connection, project: str, ms: int) -> _Cells:
    return _Cells(db, project, f"history:hour:{ms // HOUR_MS}", _OF_CHARGES)


def _hours(db: sqlite3.Connection, project: str, kind: str) -> list[int]:
    """The hours, since 1970, that have such a row."""
    begins = f"history:{kind}:"
    sql = "SELECT name FROM state WHERE project = ? AND name >= ? AND name < ?"
    rows = db.execute(sql, (project, begins, f"history:{kind};")).fetchall()
    return [int(name.removeprefix(begins)) for (name,) in rows]
