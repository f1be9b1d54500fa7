"""Where a job stands in its regions: rows of the table `checkpoints`.

Checkpoint      where one job stands in one region
by_rotation     the regions that a run covers, in their order; plans and schedules use it too
in_round        a checkpoint as a run covers it
ended_at        when the last pass over a region ended
place_of        a checkpoint as text, for a ledger that keeps it; `read_place` reads it
is_stale        whether a region was last complete too long ago
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from quota.jobs.job import Cursor, is_deep
from quota.jobs.store.file import MAX_COUNT, is_time
from quota.terms.limits import HOUR_MS

AHEAD_MS = HOUR_MS
"""A wrong clock has dated whatever is this far ahead of now."""

FIRST_PAGE: dict[str, Any] = {"cursor": None, "pages": 0, "items": 0, "ranks": 0, "started_at_ms": None}
"""The fields of a checkpoint whose next page is the first."""


class Checkpoint(NamedTuple):
    """Where one job stands in one region. `pages` and `items` count the current pass; see the table `checkpoints`.

    `work` is the job's project, fetch function and options (`quota.jobs.places.work_of`): if they change, the job gets
    new checkpoints.
    """

    job: str
    region: str
    pending: bool = False
    cursor: Cursor | None = None
    pages: int = 0
    items: int = 0
    ranks: int = 0
    started_at_ms: int | None = None
    completed_at_ms: int | None = None
    failed_at_ms: int | None = None
    work: str = ""

    @property
    def begun(self) -> bool:
        """Whether the store has anything of this pass."""
        return self.started_at_ms is not None

    def begins_before(self, cutoff_ms: int) -> bool:
        """Whether a pass that would go on began before this time."""
        return self.cursor is not None and (self.started_at_ms or 0) < cutoff_ms

    def is_complete(self, pages: int) -> bool:
        """Whether the pass under way has all its pages: the job asked for more when the pass began."""
        return self.cursor is not None and self.begun and self.pages >= pages

    def completed(self) -> Checkpoint:
        """The checkpoint of a pass that is complete, as of its beginning: its last page has no date."""
        completed_at_ms = max(self.started_at_ms or 0, self.completed_at_ms or 0)
        return self._replace(pending=False, cursor=None, completed_at_ms=completed_at_ms)


def by_rotation(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints of the regions that a run covers: the pending ones, and with them those that no run has covered.
    If none is pending, a new round begins, and a run covers all.

    Regions with a cursor come first, because their pass is older than any other. Then come the regions whose last pass
    ended longest ago. Otherwise the given order stays.
    """
    given = list(checkpoints)
    pending = [checkpoint for checkpoint in given if checkpoint.pending or not ended_at(checkpoint)]
    covered = pending if any(checkpoint.pending for checkpoint in given) else given
    return sorted(covered, key=lambda checkpoint: (checkpoint.cursor is None, ended_at(checkpoint)))


def in_round(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as a run covers it, perhaps in a new round. A pass that failed half way may have kept its cursor,
    and continues from it."""
    if checkpoint.pending:
        return checkpoint
    return checkpoint._replace(pending=True, **({} if checkpoint.cursor is not None else FIRST_PAGE))


def ended_at(checkpoint: Checkpoint) -> int:
    """When the last pass over the region ended, complete or failed; 0 if none has."""
    return max(checkpoint.completed_at_ms or 0, checkpoint.failed_at_ms or 0)


OF_REGION = "job = :job AND work = :work AND region = :region"


def read_checkpoint(db: sqlite3.Connection, job: str, region: str, work: str) -> Checkpoint:
    empty = Checkpoint(job, region, work=work)
    sql = f"SELECT {', '.join(_PLACE)} FROM checkpoints WHERE {OF_REGION}"  # noqa: S608  # constants
    row = db.execute(sql, key_of(empty)).fetchone()
    if row is None:
        return empty
    pending, written, *rest = row
    try:
        cursor = None if written is None else json.loads(written)
    except (TypeError, ValueError, RecursionError):
        return empty
    return _checkpoint(job, region, work, pending, cursor, *rest) or empty


def add_checkpoint(db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    """Put a checkpoint into the store if its region has none there."""
    row = _row_of(checkpoint)
    values = ", ".join(f":{name}" for name in row)
    db.execute(f"INSERT OR IGNORE INTO checkpoints ({', '.join(row)}) VALUES ({values})", row)  # noqa: S608  # names


def change_checkpoint(db: sqlite3.Connection, checkpoint: Checkpoint, **fields: Any) -> None:
    """Give a stored checkpoint these fields."""
    sql = f"UPDATE checkpoints SET {assigned(fields)} WHERE {OF_REGION}"  # noqa: S608  # names of fields
    db.execute(sql, _row_of(checkpoint._replace(**fields)))


def assigned(fields: Iterable[str]) -> str:
    """The fields in the SET clause of an UPDATE."""
    return ", ".join(f"{name} = :{name}" for name in fields)


def _row_of(checkpoint: Checkpoint) -> dict[str, Any]:
    cursor = None if checkpoint.cursor is None else json.dumps(checkpoint.cursor)
    return {**checkpoint._asdict(), "cursor": cursor}


def _checkpoint(
    job: str, region: str, work: str, pending: object, cursor: Any, pages: Any, items: Any, ranks: Any, *times: Any
) -> Checkpoint | None:
    """The checkpoint with these fields; None if it has values that no store writes."""
    valid = (
        pending in (0, 1)
        and (cursor is None or (isinstance(cursor, dict) and not is_deep(cursor)))
        and all(isinstance(count, int) and 0 <= count < MAX_COUNT for count in (pages, items, ranks))
        and all(at_ms is None or is_time(at_ms) for at_ms in times)
    )
    if not valid:
        return None
    return Checkpoint(job, region, bool(pending), cursor, pages, items, ranks, *times)._replace(work=work)


def place_of(checkpoint: Checkpoint, cursors: Sequence[bytes]) -> str:
    """A checkpoint as text for the ledger, with digests of the last cursors of its pass."""
    place = {name: getattr(checkpoint, name) for name in _PLACE}
    return json.dumps({**place, "cursors": [digest.hex() for digest in cursors]})


def read_place(text: str, job: str, region: str, work: str) -> tuple[Checkpoint, tuple[bytes, ...]] | None:
    """The checkpoint in a text, and the digests; None if `place_of` did not make the text."""
    try:
        data = json.loads(text)
        cursors = tuple(bytes.fromhex(digest) for digest in data["cursors"])
        checkpoint = _checkpoint(job, region, work, *(data[name] for name in _PLACE))
    except (TypeError, ValueError, KeyError, RecursionError):
        return None
    return None if checkpoint is None else (checkpoint, cursors)


_PLACE = ("pending", "cursor", "pages", "items", "ranks", "started_at_ms", "completed_at_ms", "failed_at_ms")


def digest_of(cursor: Cursor | None) -> bytes:
    """A digest that tells one cursor from another, whatever its size."""
    return blake2b(json.dumps(cursor).encode(), digest_size=8).digest()


def key_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The region of a checkpoint, as OF_REGION selects it."""
    return {"job": checkpoint.job, "work": checkpoint.work, "region": checkpoint.region}


def is_empty(checkpoint: Checkpoint) -> bool:
    return checkpoint == Checkpoint(checkpoint.job, checkpoint.region, work=checkpoint.work)


def is_stale(due_ms: int | None, now_ms: int, stale_ms: int | None) -> bool:
    """Whether a region that is due since `due_ms` is stale. A region dated ahead is stale: nobody knows how old its
    pass is. No region is stale if its time is unknown, or if the configuration has no `stale`."""
    if due_ms is None or stale_ms is None:
        return False
    return now_ms - due_ms > stale_ms or due_ms > now_ms + AHEAD_MS
