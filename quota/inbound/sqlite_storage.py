"""The storage of one machine: a SQLite file that worker processes share. `quota.inbound.contract` has the
contract, `Storage`, and the algorithms.

A decision is one short transaction. A commit does not wait for the disk, except about one in five hundred, which moves
SQLite's log into the file. If the machine dies, the last decisions may be lost.
"""

from __future__ import annotations

import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import nlargest
from typing import Any, NamedTuple, TypeVar

from quota.common.clock import elapsed_s, host_clock
from quota.common.fork import start_here_and_in_child
from quota.common.sqlite_file import SqliteFile, checked_row
from quota.errors import StorageAway
from quota.inbound import names
from quota.inbound.contract import (
    MAX_TOTALS,
    MET_KEPT_MS,
    MET_LAG_MS,
    WALL_S,
    Consumer,
    Decision,
    Entries,
    Policy,
    States,
    decide,
    gcra_used,
)
from quota.ledger.files import label_of, path_of, refuse_others
from quota.terms.arguments import whole, whole_clock

T = TypeVar("T")

SCHEMA_VERSION = 1
APPLICATION_ID = 0x51_4C_49_31
"""Marks a SQLite file as a storage of inbound limits ("QLI1")."""

SWEEP_EVERY = 16
"""Of this many new identities in a window, one deletes expired states."""

SWEEP_AT_ONCE = 64
"""How many expired states it deletes: four for each new state, so the file does not grow with time."""

SWEEP_LATER, SWEEP_PAUSE_S = 256, 0.002
"""How many expired states a worker deletes at once when it hands over its totals, with pauses for decisions. Without
this, the states would stay if no new identities came."""

_PAIR = (
    "SELECT expires_ms, state FROM states WHERE expires_ms = ? AND limit_id = ? AND name = ?"
    " UNION ALL SELECT expires_ms, state FROM states WHERE expires_ms = ? AND limit_id = ? AND name = ?"
)
_SWEEP = (
    "DELETE FROM states WHERE (expires_ms, limit_id, name) IN"
    " (SELECT expires_ms, limit_id, name FROM states WHERE expires_ms <= ? ORDER BY expires_ms LIMIT ?)"
)
_ADD_MET = (
    "INSERT INTO met VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (rule, window_ms, number)"
    " DO UPDATE SET new = new + excluded.new, again = again + excluded.again"
)


class _Numbered(NamedTuple):
    """The salts of a policy and the ids of its limits in the file of one connection."""

    salts: names.Plan
    limit_ids: tuple[int, ...]
    db: sqlite3.Connection


class _Taking(partial[bool]):
    """`with taking as held` takes a lock, if it can, and does not release it.

    `partial` does that in C alone: a signal handler, which may raise, runs only after `held` knows. After a call of
    `acquire` it may run before anything notes that the lock is taken.
    """

    __enter__ = partial.__call__

    def __exit__(self, *_: object) -> None:
        pass


class SqliteStorage:
    """`sqlite:///relative/path`, `sqlite:////absolute/path`, or `sqlite://` for one in memory."""

    shared = False

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        path = path_of(url)
        self.label = label_of(path)
        refuse_others(path, "inbound storage")
        self._file = SqliteFile(
            path,
            schema=("quota.inbound", "schema.sql"),
            application_id=APPLICATION_ID,
            version=SCHEMA_VERSION,
            error=StorageAway,
            what="inbound storage",
            remedy="move it away, or name another file",
            lost_then="all limits begin at zero",
            when_full="the disk is full; free space there (df, df -i)",
            deadline_s=WALL_S,
        )
        self._plans: dict[Policy, _Numbered] = {}
        self._clock = host_clock if clock is None else whole_clock(clock)
        self._met = names.Counts[names.MetWindow](MAX_TOTALS)
        start_here_and_in_child(self)

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, policy: Policy, identity: str, cost: int = 1) -> Decision:
        cost = whole(cost, "units: the cost of a request", 1, policy.most)
        decision, made, met = self._transact(lambda db: self._decide(db, policy, identity, cost))
        if made is not None:
            self._plans[policy] = made
        if met is not None:
            self._met.add({met: 1})
        return decision

    def _transact(self, work: Callable[[sqlite3.Connection], T], *, write: bool = True) -> T:
        """The result of `work` in one transaction. Waits at most WALL_S for other threads and processes."""
        ends_s = elapsed_s() + WALL_S
        held = False
        try:
            with self._taking as held:
                pass
            if not held:
                raise StorageAway(self._file.says(sqlite3.SQLITE_BUSY))
            return self._file.transact(work, write=write, within_s=ends_s - elapsed_s())
        except (names.UnreadableError, struct.error) as error:
            raise StorageAway(self._file.says(sqlite3.SQLITE_CORRUPT)) from error
        finally:
            if held:
                self._lock.release()

    def _decide(
        self, db: sqlite3.Connection, policy: Policy, identity: str, cost: int
    ) -> tuple[Decision, _Numbered | None, names.MetWindow | None]:
        """The decision, and what to keep after the commit: a new plan, and the window that met a new identity."""
        now_ms = self._clock()
        plan, made = self._plans.get(policy), None
        # Another connection may have another file, with other salts.
        if plan is None or plan.db is not db or not plan.salts.holds_at(now_ms):
            plan = made = self._new_plan(db, policy, now_ms)
        read: Callable[[Any], Any] = unpacked if policy.algorithm == "log" else counted
        keys, held = [], []
        for limit, window, limit_id in zip(policy.limits, plan.salts.windows, plan.limit_ids, strict=True):
            # SQLite's integers have a sign.
            name, previous_name = (int.from_bytes(name, "big", signed=True) for name in window.names_of(identity))
            expires_ms = (window.number + 2) * limit.window_ms
            key, previous_key = (expires_ms, limit_id, name), (expires_ms - limit.window_ms, limit_id, previous_name)
            rows = dict(db.execute(_PAIR, key + previous_key).fetchall())
            keys.append(key)
            held.append(States(read(rows.get(previous_key[0])), read(rows.get(expires_ms))))
        decision, after = decide(policy, held, now_ms, cost)
        if after is held:
            return decision, made, None
        for (expires_ms, limit_id, name), before, states in zip(keys, held, after, strict=True):
            state = packed(states.current) if policy.algorithm == "log" else states.current
            if before.current is not None:
                db.execute(
                    "UPDATE states SET state = ? WHERE expires_ms = ? AND limit_id = ? AND name = ?",
                    (state, expires_ms, limit_id, name),
                )
                continue
            db.execute("INSERT INTO states VALUES (?, ?, ?, ?)", (expires_ms, limit_id, name, state))
            if name % SWEEP_EVERY == 0:  # names are random, so this also works for workers that live for one request
                _sweep(now_ms, SWEEP_AT_ONCE, db)
        longest = policy.longest
        states_before = held[policy.limits.index(longest)]
        if states_before.current is not None:
            return decision, made, None
        was_before = states_before.previous is not None
        return decision, made, (policy.rule, longest.window_ms, now_ms // longest.window_ms, was_before)

    def _new_plan(self, db: sqlite3.Connection, policy: Policy, now_ms: int) -> _Numbered:
        """Read the salts and the ids of the limits, and create missing ones (I4)."""
        needed = names.salt_names(policy, now_ms)
        sql = "INSERT OR IGNORE INTO salts VALUES (?, ?, ?)"
        for name, until_ms in {names.SHARD: now_ms, "0": now_ms, **needed}.items():
            db.execute(sql, (name, names.new_salt(), until_ms))
        fixed = self._fixed(db)
        db.execute("UPDATE salts SET until_ms = ? WHERE instr(name, ':') = 0", (now_ms + names.SALTS_KEPT_MS,))
        db.execute("DELETE FROM salts WHERE until_ms <= ?", (now_ms,))
        stored = db.execute("SELECT name, salt FROM salts WHERE instr(name, ':') > 0").fetchall()
        ids = []
        for limit in policy.limits:
            row = (policy.rule, names.kind_of(policy, limit), limit.window_ms)
            db.execute("INSERT OR IGNORE INTO limits (rule, kind, window_ms) VALUES (?, ?, ?)", row)
            sql = "SELECT id FROM limits WHERE rule = ? AND kind = ? AND window_ms = ?"
            ids.append(int(db.execute(sql, row).fetchone()[0]))
        return _Numbered(names.plan(policy, now_ms, fixed, dict(stored)), tuple(ids), db)

    def _fixed(self, db: sqlite3.Connection) -> dict[str, str]:
        return dict(db.execute("SELECT name, salt FROM salts WHERE instr(name, ':') = 0").fetchall())

    # -- totals of all workers -----------------------------------------------------------------------------------------

    def add_totals(self, totals: Mapping[str, int]) -> None:
        now_ms = self._clock()

        def work(db: sqlite3.Connection) -> None:
            sql = "INSERT INTO totals VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET total = total + excluded.total"
            db.executemany(sql, totals.items())
            for (rule, window_ms, number, was_before), count in met.items():
                new, again = (0, count) if was_before else (count, 0)
                db.execute(_ADD_MET, (rule, window_ms, number, new, again, now_ms + 2 * window_ms + MET_KEPT_MS))
            for table in ("met", "salts"):
                db.execute(f"DELETE FROM {table} WHERE until_ms <= ?", (now_ms,))  # noqa: S608  # of our own schema

        with self._met.handed_over() as met:
            self._transact(work)
        ends_s, sweep = elapsed_s() + WALL_S, partial(_sweep, now_ms, SWEEP_LATER)
        with suppress(StorageAway):  # the totals are stored; the next call sweeps
            while self._transact(sweep) == SWEEP_LATER and elapsed_s() < ends_s:
                time.sleep(SWEEP_PAUSE_S)

    def totals(self) -> Mapping[str, int]:
        return {name: total for total, name in self._read("SELECT total, name FROM totals", integers=1)}

    def alive(self, policy: Policy) -> int:
        window_ms = policy.longest.window_ms
        number = (self._clock() - MET_LAG_MS) // window_ms
        sql = "SELECT number, new, again FROM met WHERE rule = ? AND window_ms = ? AND number BETWEEN ? AND ?"
        rows = self._read(sql, policy.rule, window_ms, number - 1, number, integers=3)
        return sum(new if at == number else new + again for at, new, again in rows)

    def top(self, policy: Policy, count: int = 10) -> Sequence[Consumer]:
        limit = policy.longest
        now_ms = self._clock()
        number = now_ms // limit.window_ms
        wanted = ((number + 2) * limit.window_ms, policy.rule, names.kind_of(policy, limit), limit.window_ms)

        def used(name: Any, state: Any) -> tuple[int, int]:
            if type(name) is not int:
                raise names.UnreadableError
            if policy.algorithm == "log":
                return sum(units for _, units in unpacked(state) or ()), name
            units = counted(state) or 0
            if policy.algorithm == "gcra":
                units = gcra_used(limit, units, now_ms - number * limit.window_ms)
            return units, name

        def work(db: sqlite3.Connection) -> list[tuple[int, int]]:
            rows = db.execute(
                "SELECT name, state FROM states JOIN limits ON limits.id = limit_id"
                " WHERE expires_ms = ? AND rule = ? AND kind = ? AND window_ms = ?",
                wanted,
            )
            return nlargest(count, (used(name, state) for name, state in rows))

        largest = self._transact(work, write=False)
        return [Consumer((name % 2**64).to_bytes(names.NAME_BYTES, "big").hex(), units) for units, name in largest]

    def rotate(self) -> int:
        now_ms = self._clock()

        def work(db: sqlite3.Connection) -> int:
            fixed = self._fixed(db)
            if not fixed:  # no request was ever counted, so there is no salt
                return now_ms
            since_ms = now_ms + names.ROTATION_LEAD_MS
            row = (str(since_ms), names.new_salt(), now_ms + names.SALTS_KEPT_MS)
            db.execute("INSERT OR REPLACE INTO salts VALUES (?, ?, ?)", row)
            db.executemany("DELETE FROM salts WHERE name = ?", [(name,) for name in names.outdated(fixed, now_ms)])
            return since_ms

        return self._transact(work)

    def _read(self, sql: str, *values: object, integers: int) -> list[Any]:
        def work(db: sqlite3.Connection) -> list[Any]:
            return [checked_row(row, integers=integers) for row in db.execute(sql, values)]

        return self._transact(work, write=False)

    def close(self) -> None:
        self._file.close()

    def start_over_in_child(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._taking = _Taking(self._lock.acquire, timeout=WALL_S)


def _sweep(now_ms: int, at_once: int, db: sqlite3.Connection) -> int:
    """Delete up to `at_once` expired states, and return their number."""
    return db.execute(_SWEEP, (now_ms, at_once)).rowcount


def counted(state: Any) -> int | None:
    """The state of `counter` or `gcra`. Raises DamagedError for other values."""
    return None if state is None else checked_row((state,), integers=1)[0]


_ENTRY = struct.Struct(">IH")


def packed(entries: Entries) -> bytes:
    """The entries of a log as bytes: 4 for the time in the window, 2 for the units."""
    return b"".join([_ENTRY.pack(*entry) for entry in entries])


def unpacked(state: bytes | None) -> Entries | None:
    """The entries of a log. Raises struct.error or UnreadableError for other bytes."""
    if state is None:
        return None
    if type(state) is not bytes or not state:
        raise names.UnreadableError
    return tuple(_ENTRY.iter_unpack(state))
