"""What a process remembers of an SQLite ledger between two decisions, so that most of them read next to nothing and
write the charge alone.

It holds while nobody else has changed the file, which SQLite's `data_version` tells, and nothing else was changed
through this connection. Whatever is not plain is left to the ledger, which reads the file as if nothing were
remembered: several charges at once, a closed bucket, unlogged usage, other grants, a clock that disagrees.

A view that is remembered is ahead of the stored one, which reads on from the log when somebody needs it (L7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quota.ledger.contract import CLOCK_BEHIND_MS, CLOCK_SLACK_MS, ChargeResult
from quota.limits import MINUTE_MS, Sliding

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from quota.ledger.contract import ChargeRequest
    from quota.ledger.entry import Charge, Id
    from quota.limits import View

MOST_UNREAD = 50
"""The stored views are read on after so many charges at the latest, so that the next process has few to read."""

OLDEST = 50
"""So many of the charges that leave a view next are read at once."""

_OLDEST = "SELECT ms, units, bucket, method, job FROM charges WHERE project = ? AND ms >= ? ORDER BY ms, seq LIMIT ?"

UNUSED_AFTER_OTHERS = 8
"""After somebody else has changed the file, so many decisions neither use what is remembered nor ask whether it holds:
processes that take turns would ask in vain."""


class Facts(NamedTuple):
    """What a decision has found in the file, or left there: of each view its total, tail_ms and dropped_through_ms,
    with all read up to `last`. No exhaustion closes a bucket at `closed_until_ms` or later."""

    last: Id
    epoch: str
    unlogged_until_ms: int
    retention_ms: int
    closed_until_ms: int
    granted: str
    views: Sequence[tuple[View, int, int, int]]


class _Project:
    __slots__ = (
        "appended",
        "closed_until_ms",
        "epoch",
        "granted",
        "last",
        "oldest",
        "retention_ms",
        "unlogged_until_ms",
        "views",
    )

    def __init__(self) -> None:
        self.appended: list[Charge] = []  # since the first of the views was read
        self.views: dict[str, tuple[int, int, int, int]] = {}
        """The views by name: total, tail_ms, dropped_through_ms, and how many of `appended` were read."""
        self.oldest: dict[str, list[tuple[int, int, str, str, str]]] = {}
        """By view, the oldest that it counts, as of its tail: ms, units, bucket, method and job."""

    def learn(self, facts: Facts, appended: Sequence[Charge]) -> None:
        self.last, self.epoch, self.unlogged_until_ms, self.retention_ms, self.closed_until_ms, self.granted, _ = facts
        self.appended += appended
        read = len(self.appended)
        for view, total, tail_ms, dropped_through_ms in facts.views:
            self.views[view.name] = total, tail_ms, dropped_through_ms, read

    def read_on(self, view: View, total: int, had_read: int, read: int) -> int:
        selector = view.selector
        for charge in self.appended[had_read:read]:
            if selector.counts(charge.bucket, charge.method, charge.job):
                total += selector.cost(charge.units)
        return total

    def drop(self, view: View, state: tuple[int, int, int], cutoff_ms: int) -> tuple[int, int, int] | None:
        """L8. Total, tail_ms and dropped_through_ms without what has left the window; None if `oldest` cannot tell."""
        total, tail_ms, dropped_through_ms = state
        oldest, selector = self.oldest.get(view.name), view.selector
        if not oldest or oldest[0][0] != tail_ms:  # trimmed, or the tail is no charge's
            return None
        for n, (ms, units, *labels) in enumerate(oldest):
            if ms > cutoff_ms:
                self.oldest[view.name] = oldest[n:]
                return (total, ms, dropped_through_ms) if type(total) is int and total >= 0 else None
            if selector.counts(*labels):
                total -= selector.cost(units)
            dropped_through_ms = ms
        return None


class Memory:
    """What is remembered while `changes` is the connection's `total_changes`, and `version` the file's `data_version`.

    A signal handler may decide in the middle of anything here. So `changes` fits nothing while the rest is changed, and
    a memory that did not fit is left behind, never changed again.
    """

    __slots__ = ("_projects", "changes", "db", "unused", "version")

    def __init__(self, db: sqlite3.Connection | None, version: int, *, unused: int = 0) -> None:
        self.db = db
        self.version = version
        self.unused = unused
        self.changes = -1
        self._projects: dict[str, _Project] = {}

    def learn(self, project: str, facts: Facts, appended: Sequence[Charge], changes: int) -> None:
        self.changes = -1
        known = self._projects.get(project)
        if known is None or len(known.appended) >= MOST_UNREAD:
            known = self._projects[project] = _Project()
        known.learn(facts, appended)
        self.changes = changes

    def answer(self, request: ChargeRequest, clock_ms: int, *, commit: bool) -> ChargeResult | None:
        """The decision, if what is remembered holds; None where the file must be read. An admitted charge is to be
        appended, and then `add`ed."""
        project, _, checks, _, caller_ms, jitter_ms, expected, retention_ms, granted, also = request
        known = self._projects.get(project)
        if known is None or also or not clock_ms - CLOCK_BEHIND_MS <= caller_ms <= clock_ms + CLOCK_SLACK_MS:
            return None
        now_ms = min(clock_ms, caller_ms + CLOCK_SLACK_MS)
        last, epoch, read = known.last, known.epoch, len(known.appended)
        if (
            not epoch  # the first charge begins one
            or known.closed_until_ms + jitter_ms > now_ms
            or known.unlogged_until_ms > now_ms
            or known.retention_ms < retention_ms
            or (granted is not None and granted != known.granted)
            or (expected.epoch and expected != (epoch, (last,)))
        ):
            return None
        last_ms, fits = last[0], True
        used, after = [], []
        for view, cap_units, cost_units, edges in checks:
            state, window = known.views.get(view.name), view.window
            if type(window) is Sliding:
                cutoff_ms = now_ms - window.window_ms
            elif edges is not None and edges[0] <= now_ms < edges[2]:
                cutoff_ms = edges[1 if now_ms >= edges[1] else 0] - 1
            else:
                return None
            if state is None:
                return None
            total, tail_ms, dropped_through_ms, had_read = state
            if dropped_through_ms > cutoff_ms or last_ms <= cutoff_ms:
                return None
            if had_read < read:
                total = known.read_on(view, total, had_read, read)
                known.views[view.name] = total, tail_ms, dropped_through_ms, read
            if tail_ms <= cutoff_ms:
                left = self._dropped(project, view, (total, tail_ms, dropped_through_ms), cutoff_ms)
                if left is None:
                    return None
                known.views[view.name] = *left, read
                total = left[0]
            if cost_units and total + cost_units > cap_units:
                fits = False
            used.append(total)
            after.append(total + cost_units)
        if not (commit and fits):
            return ChargeResult("admitted" if fits else "refused", None, now_ms, last, tuple(used), None, epoch)
        if read >= MOST_UNREAD:
            return None
        at = (clock_ms, 0) if clock_ms > last_ms else (last_ms, last[1] + 1)
        return ChargeResult("admitted", f"{at[0]}-{at[1]}", now_ms, at, tuple(after), None, epoch)

    def _dropped(
        self, project: str, view: View, state: tuple[int, int, int], cutoff_ms: int
    ) -> tuple[int, int, int] | None:
        """As `_Project.drop`, with a look at the log where need be. It is of the same moment as all else if the file's
        version is found unchanged afterwards."""
        known = self._projects[project]
        left = known.drop(view, state, cutoff_ms)
        if left is None and self.db is not None:
            known.oldest[view.name] = self.db.execute(_OLDEST, (project, state[1], OLDEST)).fetchall()
            left = known.drop(view, state, cutoff_ms)
        return left

    def trims(self, project: str, at: Id) -> tuple[Id, int] | None:
        """The last charge and how long charges are kept, if the log is to be trimmed with a charge at `at`."""
        known = self._projects[project]
        if at[0] // MINUTE_MS == known.last[0] // MINUTE_MS:
            return None
        return known.last, known.retention_ms

    def add(self, request: ChargeRequest, result: ChargeResult, changes: int) -> None:
        """The charge of an answer was appended, and the log perhaps trimmed, which made it so many changes."""
        self.changes = -1
        known = self._projects[request.project]
        known.appended.append(request.charge)
        known.last, read = result.last, len(known.appended)
        for check, total in zip(request.checks, result.used_units, strict=True):
            name = check[0].name
            _, tail_ms, dropped_through_ms, _ = known.views[name]
            known.views[name] = total, tail_ms, dropped_through_ms, read
        self.changes = changes
