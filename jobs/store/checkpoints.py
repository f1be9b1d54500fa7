"""Where a job stands in its regions: rows of the table `checkpoints`.

Checkpoint      where one job stands in one region
by_rotation     the order in which a run covers its regions; the simulation of a schedule uses it too
ended_at        when the last pass over a region ended
place_of        a checkpoint as text, for a ledger that keeps it; `read_place` reads it
is_stale        whether a region was last complete too long ago
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

from quota.jobs.job import Cursor, is_deep
from quota.jobs.store.file import MAX_COUNT, is_time
from quota.terms.limits import HOUR_MS

AHEAD_MS = HOUR_MS
"""A wrong clock has dated whatever is this far ahead of now."""

PENDING = "UPDATE checkpoints SET pending = 1 WHERE job = ? AND work = ? AND region = ?"
"""The current round, or the next one, covers the region."""

RESTART = (
    "UPDATE checkpoints SET cursor = NULL, pages = 0, items = 0, ranks = 0, started_at_ms = NULL"
    " WHERE job = ? AND work = ? AND region = ?"
)
"""The region's next page is its first."""


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


class RegionState(Protocol):
    """The part of a Checkpoint that decides the order of regions."""

    @property
    def pending(self) -> bool: ...

    @property
    def cursor(self) -> Any: ...

    @property
    def completed_at_ms(self) -> int | None: ...

    @property
    def failed_at_ms(self) -> int | None: ...


S = TypeVar("S", bound=RegionState)


def by_rotation(states: Iterable[S]) -> list[S]:
    """The pending states, in the order in which a run covers their regions.

    Regions with a cursor come first, because their pass is older than any other. Then come the regions whose last pass
    ended longest ago. Otherwise the given order stays.
    """
    return sorted(
        (state for state in states if state.pending),
        key=lambda state: (state.cursor is None, ended_at(state)),
    )


def ended_at(state: RegionState) -> int:
    """When the last pass over the region ended, complete or failed; 0 if none has."""
    return max(state.completed_at_ms or 0, state.failed_at_ms or 0)


def read_checkpoint(db: sqlite3.Connection, job: str, region: str, work: str) -> Checkpoint:
    empty = Checkpoint(job, region, work=work)
    sql = f"SELECT {', '.join(_PLACE)} FROM checkpoints WHERE job = ? AND work = ? AND region = ?"  # noqa: S608
    row = db.execute(sql, key_of(empty)).fetchone()
    return (row and _checkpoint(job, region, work, *row)) or empty


def _checkpoint(
    job: str, region: str, work: str, pending: object, cursor: object, pages: Any, items: Any, ranks: Any, *times: Any
) -> Checkpoint | None:
    """The checkpoint in a row of `checkpoints`; None if the row has values that no store writes."""
    try:
        decoded = None if cursor is None else json.loads(cursor)  # type: ignore[arg-type]  # a TypeError, if it is
    except (TypeError, ValueError, RecursionError):
        return None
    valid = (
        pending in (0, 1)
        and (decoded is None or (isinstance(decoded, dict) and not is_deep(decoded)))
        and all(isinstance(count, int) and 0 <= count < MAX_COUNT for count in (pages, items, ranks))
        and all(at_ms is None or is_time(at_ms) for at_ms in times)
    )
    if not valid:
        return None
    started_at_ms, completed_at_ms, failed_at_ms = times
    return Checkpoint(
        job, region, bool(pending), decoded, pages, items, ranks, started_at_ms, completed_at_ms, failed_at_ms, work
    )


def place_of(checkpoint: Checkpoint, cursors: Sequence[bytes]) -> str:
    """A checkpoint as text for the ledger, with digests of the last cursors of its pass."""
    place = {name: getattr(checkpoint, name) for name in _PLACE}
    return json.dumps({**place, "cursors": [digest.hex() for digest in cursors]})


def read_place(text: str, job: str, region: str, work: str) -> tuple[Checkpoint, tuple[bytes, ...]] | None:
    """The checkpoint in a text, and the digests; None if `place_of` did not make the text."""
    try:
        data = json.loads(text)
        cursors = tuple(bytes.fromhex(digest) for digest in data["cursors"])
        pending, cursor, *rest = (data[name] for name in _PLACE)
        written = None if cursor is None else json.dumps(cursor)
        checkpoint = _checkpoint(job, region, work, pending, written, *rest)
    except (TypeError, ValueError, KeyError, RecursionError):
        return None
    return None if checkpoint is None else (checkpoint, cursors)


_PLACE = ("pending", "cursor", "pages", "items", "ranks", "started_at_ms", "completed_at_ms", "failed_at_ms")


def digest_of(cursor: Cursor | None) -> bytes:
    """A digest that tells one cursor from another, whatever its size."""
    return blake2b(json.dumps(cursor).encode(), digest_size=8).digest()


def key_of(checkpoint: Checkpoint) -> tuple[str, str, str]:
    return checkpoint.job, checkpoint.work, checkpoint.region


def is_empty(checkpoint: Checkpoint) -> bool:
    return checkpoint == Checkpoint(checkpoint.job, checkpoint.region, work=checkpoint.work)


def stand_of(checkpoint: Checkpoint) -> tuple[object, ...]:
    """The state to which a page is added."""
    return (
        checkpoint.pending,
        json.dumps(checkpoint.cursor),
        checkpoint.pages,
        checkpoint.items,
        checkpoint.ranks,
        checkpoint.started_at_ms,
    )


def is_stale(due_ms: int | None, now_ms: int, stale_ms: int | None) -> bool:
    """Whether a region that is due since `due_ms` is stale. A region dated ahead is stale: nobody knows how old its
    pass is. No region is stale if its time is unknown, or if the configuration has no `stale`."""
    if due_ms is None or stale_ms is None:
        return False
    return now_ms - due_ms > stale_ms or due_ms > now_ms + AHEAD_MS
