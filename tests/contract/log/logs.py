"""What the tests of logs share: entries, a clock, and where a log of each kind lies."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import redis

from quota.errors import LedgerError
from quota.ledger.log import ANY, Append, Log, Reply
from quota.ledger.redis_log import RedisLog
from quota.ledger.sqlite_log import SqliteLog
from quota.rules.entry import START, Entry, Id

P = "p"
"""The project of a test."""

NOW_MS = 1_795_867_200_000
"""A noon, in UTC."""

_numbers = count()


class Clock:
    """The ledger's clock, which a test moves."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def __call__(self) -> int:
        return self.now_ms


# -- entries -------------------------------------------------------------------------------------------------------


def new_key() -> str:
    """A key that no other process has, either."""
    return f"{os.getpid()}-{next(_numbers)}"


def charge(units: int = 1, **fields: Any) -> Entry:
    return Entry(START, units, "units", "videos.list", "job", "DE", new_key())._replace(**fields)


def correction(of: Entry, units: int, **fields: Any) -> Entry:
    """A correction of a charge that stands in a log."""
    corrects: dict[str, Any] = {"kind": "correction", "of": of.key, "at": of.id, "before_units": of.units}
    return of._replace(id=START, units=units, key=new_key(), **corrects)._replace(**fields)


def others(units: int, **fields: Any) -> Entry:
    return Entry(START, units, "units", "", "", "", new_key(), "others", "usage", (1, 2))._replace(**fields)


def marker() -> Entry:
    return Entry(START, 0, "", "", "", "", new_key(), "marker")


# -- asking --------------------------------------------------------------------------------------------------------


def entries_of(log: Log, project: str = P) -> list[Entry]:
    return list(log.read(project, START, (2**53, 2**53), 10_000))


def past_of(log: Log) -> list[Entry]:
    return list(log.past(P, START, (2**53, 2**53), 100_000))


def add(log: Log, *entries: Entry, project: str = P) -> Id:
    """Add entries, as somebody does who has read everything; the id of the first."""
    beginning = log.begin(project)
    seen = max(beginning.tip, beginning.trimmed)
    request = Append(beginning.epoch, seen, entries, ANY, seq=random.getrandbits(40), new_epoch="first")
    reply = log.append(project, request)
    assert reply.word == "APPENDED"
    assert reply.id is not None
    return reply.id


def added(log: Log, *entries: Entry) -> list[Entry]:
    """The same; the entries as they stand in the log then."""
    ms, seq = add(log, *entries)
    return [entry._replace(id=(ms, seq + n)) for n, entry in enumerate(entries)]


def add_many(log: Log, number: int) -> list[Entry]:
    made = [charge() for _ in range(number)]
    return [entry for first in range(0, number, 100) for entry in added(log, *made[first : first + 100])]


def ask(log: Log, *entries: Entry, epoch: str | None = None, **fields: Any) -> Reply:
    """Ask for entries, as somebody who knows the epoch of the log, and has read nothing that it still has unless `seen`
    says so."""
    beginning = log.begin(P)
    seen, epoch = beginning.trimmed, beginning.epoch if epoch is None else epoch
    request = Append(epoch, seen, entries, new_epoch="first", seq=7)
    return log.append(P, request._replace(**fields))


def fence(log: Log, token: str = "token") -> str:  # noqa: S107  # no secret
    done, epoch = log.fence(P, log.begin(P).epoch, token)
    assert done
    return epoch


def no_answer(*_: Any, **options: Any) -> Any:
    """In the place of a method: as if the ledger were gone."""
    raise LedgerError("no answer")


# -- where a log lies ----------------------------------------------------------------------------------------------


class Place(Protocol):
    """Where a log of a kind lies, and what may befall it there."""

    def open(self, clock: Callable[[], int] | None = None) -> Log:
        """The log, as one more process opens it."""

    def spoil(self, log: Log, entry_id: Id) -> None:
        """Make an entry unreadable."""

    def lose(self, *parts: str) -> None:
        """Lose the `log`, its `state`, or both, and nothing else."""

    def close(self) -> None: ...


class SqlitePlace:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self._logs: list[Log] = []

    def open(self, clock: Callable[[], int] | None = None) -> Log:
        self._logs.append(SqliteLog(f"sqlite:///{self.path}", clock=clock))
        return self._logs[-1]

    def spoil(self, log: Log, entry_id: Id) -> None:
        self._run("UPDATE log SET line = ? WHERE ms = ? AND seq = ?", ("?", *entry_id))

    def lose(self, *parts: str) -> None:
        for part in parts:
            self._run(f"DELETE FROM {part}")  # noqa: S608  # a table of ours
        if "log" in parts:
            self._run("DELETE FROM corrected")

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        with closing(sqlite3.connect(self.path, timeout=20)) as db, db:
            db.execute(statement, values)

    def close(self) -> None:
        for log in self._logs:
            log.close()


class RedisPlace:
    def __init__(self, url: str) -> None:
        self.url = url
        self._logs: list[Log] = []
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.client.flushall()

    def open(self, clock: Callable[[], int] | None = None) -> Log:
        self._logs.append(RedisLog(self.url, clock=clock))
        return self._logs[-1]

    def spoil(self, log: Log, entry_id: Id) -> None:
        """A stream takes nothing in its middle: what is behind the entry is added again."""
        key = self._key("log")
        rows = self.client.xrange(key, f"{entry_id[0]}-{entry_id[1]}")
        for row_id, _ in rows:
            self.client.xdel(key, row_id)
        copy = f"{key}-copy"
        for row_id, fields in [*self.client.xrange(key), (rows[0][0], {"e": "?"}), *rows[1:]]:
            self.client.xadd(copy, fields, id=row_id)
        self.client.expire(copy, 1_000)
        self.client.rename(copy, key)

    def lose(self, *parts: str) -> None:
        for part in parts:
            self.client.delete(self._key(part))
        if "log" in parts:
            self.client.delete(*(self.client.keys("*:corrected") or ["none"]))

    def _key(self, part: str) -> str:
        (key,) = self.client.keys(f"*:{part}")
        return str(key)

    def close(self) -> None:
        """Afterwards no key may be left without a lifetime."""
        for log in self._logs:
            log.close()
        immortal = [key for key in self.client.scan_iter() if self.client.ttl(key) == -1]
        self.client.close()
        assert immortal == [], "keys without a lifetime"
