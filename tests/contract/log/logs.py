"""What the tests of logs share: entries, a clock, and where a log of each kind lies."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import count
from typing import Any

from quota.errors import LedgerError
from quota.ledger.factory import open_ledger
from quota.ledger.log import ANY, Append, Log, Reply
from quota.rules.entry import START, Entry, Id
from support.losses import LedgerStorage

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
    """Add entries as an author who has read everything. Returns the id of the first."""
    beginning = log.begin(project)
    seen = max(beginning.tip, beginning.trimmed)
    request = Append(beginning.epoch, seen, entries, ANY, seq=random.getrandbits(40), new_epoch="first")
    reply = log.append(project, request)
    assert reply.word == "APPENDED"
    assert reply.id is not None
    return reply.id


def added(log: Log, *entries: Entry) -> list[Entry]:
    """The same. Returns the entries as the log then has them."""
    ms, seq = add(log, *entries)
    return [entry._replace(id=(ms, seq + n)) for n, entry in enumerate(entries)]


def add_many(log: Log, number: int) -> list[Entry]:
    made = [charge() for _ in range(number)]
    return [entry for first in range(0, number, 100) for entry in added(log, *made[first : first + 100])]


def ask(log: Log, *entries: Entry, epoch: str | None = None, **fields: Any) -> Reply:
    """Ask for entries as a process that knows the log's epoch, and has read none of its entries unless `seen` says
    so."""
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


class Place:
    """Where a log lies, and the logs that processes opened there."""

    def __init__(self, storage: LedgerStorage) -> None:
        self.storage, self.spoil, self.lose = storage, storage.spoil, storage.lose
        self._logs: list[Log] = []

    def open(self, clock: Callable[[], int] | None = None) -> Log:
        """The log, as one more process opens it."""
        self._logs.append(open_ledger(self.storage.url, clock=clock))
        return self._logs[-1]

    def close(self) -> None:
        """Afterwards nothing may be left without a lifetime."""
        for log in self._logs:
            log.close()
        immortal = self.storage.immortal()
        self.storage.close()
        assert not immortal, "keys without a lifetime"
