"""A ledger that can lose its charges, and machines that use it, each with a journal of its own.

LEDGERS  how the tests get a ledger of each kind: the one place that a further kind needs
Site     a place where a ledger lies, machines that use it, and the clock of the ledger, which a test moves
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import redis
from redis.client import Pipeline

from quota.budget import Budget
from quota.deciding.keys import Keys
from quota.deciding.project import Project
from quota.errors import LedgerError
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.ledger.log import Log
from quota.rules.entry import Id
from quota.terms.limits import DAY_MS, Limit
from support.books import BOOK
from support.servers import immortal
from support.setup import NOW_MS


class LedgerStorage(Protocol):
    """Where a ledger keeps its data, and what can happen to that."""

    url: str

    def empty(self) -> None: ...

    def clear(self, wait_s: float = 30) -> None:
        """Lose all, also in a file that others have open."""
        self.empty()

    def overwrite(self, copy: Any) -> None:
        """Put a copy in its place, also in a file that others have open."""
        self.restore(copy)

    def copy(self) -> Any: ...

    def restore(self, copy: Any) -> None: ...

    def spoil(self, entry_id: Id) -> None:
        """Make an entry of the only log unreadable."""

    def lose(self, *parts: str) -> None:
        """Lose the `log`, its `state`, or both, and nothing else."""

    def immortal(self) -> Sequence[object]:
        """The keys without a lifetime that should have one."""
        return ()

    def close(self) -> None:
        """Release connections."""


class SqliteStorage(LedgerStorage):
    """A file. To lose it means to find another file at its path, as after a restore from a backup."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.db"
        self.url = f"sqlite:///{self.path}"
        self.copies = 0

    def empty(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def clear(self, wait_s: float = 30) -> None:
        with closing(sqlite3.connect(self.path, timeout=wait_s)) as db, db:
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                db.execute(f"DELETE FROM {table}")  # noqa: S608

    def overwrite(self, copy: Path) -> None:
        with closing(sqlite3.connect(copy)) as kept, closing(sqlite3.connect(self.path, timeout=30)) as db:
            kept.backup(db)

    def copy(self) -> Path | None:
        if not self.path.exists():
            return None
        self.copies += 1
        target = self.path.with_suffix(f".copy{self.copies}")
        with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(target)) as into:
            source.backup(into)
        return target

    def restore(self, copy: Path | None) -> None:
        self.empty()
        if copy is not None:
            beside = self.path.with_suffix(".new")
            shutil.copy(copy, beside)
            os.replace(beside, self.path)

    def spoil(self, entry_id: Id) -> None:
        self._run("UPDATE log SET line = ? WHERE ms = ? AND seq = ?", ("?", *entry_id))

    def lose(self, *parts: str) -> None:
        for part in (*parts, *(["corrected"] if "log" in parts else [])):
            self._run(f"DELETE FROM {part}")  # noqa: S608  # a table of ours

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> None:
        with closing(sqlite3.connect(self.path, timeout=20)) as db, db:
            db.execute(statement, values)


class RedisStorage(LedgerStorage):
    """Servers with a ledger. All keys of each are replaced in one step, as by a restart with other data."""

    def __init__(self, url: str, *clients: redis.Redis) -> None:
        """Without `clients`, one of each server that takes writes, the url is that of a single server."""
        self.url = url
        self.clients = clients or (redis.Redis.from_url(url),)

    @property
    def client(self) -> redis.Redis:
        """Of the only server, or the first."""
        return self.clients[0]

    def open(self, **options: Any) -> Any:
        """A client that finds every key."""
        port = self.client.get_connection_kwargs()["port"]
        return (redis.Redis if len(self.clients) == 1 else redis.RedisCluster)(host="127.0.0.1", port=port, **options)

    def keys(self, pattern: str) -> list[bytes]:
        """Of all servers: redis-py asks one node of a cluster only."""
        return [key for client in self.clients for key in client.keys(pattern)]

    def empty(self) -> None:
        for client in self.clients:
            client.flushall()

    def copy(self) -> list[dict[bytes, bytes]]:
        """All keys as they are at one moment."""
        copy = []
        for client in self.clients:
            keys: Any = client.keys("*")
            with self._step(client, keys) as pipe:
                for key in keys:
                    pipe.dump(key)
                copy.append({key: value for key, value in zip(keys, pipe.execute(), strict=True) if value is not None})
        return copy

    def restore(self, copy: list[dict[bytes, bytes]]) -> None:
        for client, kept in zip(self.clients, copy, strict=True):
            with self._step(client, kept) as pipe:
                pipe.flushall()
                for key, value in kept.items():
                    pipe.restore(key, 180_000_000, value)
                pipe.execute()

    def _step(self, client: redis.Redis, keys: Iterable[bytes]) -> Pipeline:
        """One step; a cluster has none for keys of several projects."""
        projects = {key.partition(b"}")[0] for key in keys}
        return client.pipeline(transaction=len(self.clients) == 1 or len(projects) == 1)

    def spoil(self, entry_id: Id) -> None:
        """A stream takes nothing in its middle: what is behind the entry is added again."""
        (key,) = self.client.keys("*:log")
        rows = self.client.xrange(key, f"{entry_id[0]}-{entry_id[1]}")
        for row_id, _ in rows:
            self.client.xdel(key, row_id)
        copy = key + b"-copy"
        for row_id, fields in [*self.client.xrange(key), (rows[0][0], {"e": "?"}), *rows[1:]]:
            self.client.xadd(copy, fields, id=row_id)
        self.client.expire(copy, 1_000)
        self.client.rename(copy, key)

    def lose(self, *parts: str) -> None:
        for part in (*parts, *(["corrected"] if "log" in parts else [])):
            self.client.delete(*(self.client.keys(f"*:{part}") or ["none"]))

    def immortal(self) -> Sequence[object]:
        return [key for client in self.clients for key in immortal(client)]

    def close(self) -> None:
        """A cluster's clients are the topology's."""
        if len(self.clients) == 1:
            self.client.close()


def _redis(request: pytest.FixtureRequest, folder: Path, number: int) -> RedisStorage:
    return RedisStorage(f"{request.getfixturevalue('server').url.rpartition('/')[0]}/{number}")


Opener = Callable[[pytest.FixtureRequest, Path, int], LedgerStorage]
LEDGERS: dict[str, Opener] = {"sqlite": lambda request, folder, number: SqliteStorage(folder), "redis": _redis}
"""Each kind of ledger, and what makes its place for a test: in a folder, or on a server, where several ledgers have
a `number`. Every suite of the contract runs over these."""

KINDS = tuple(LEDGERS)


class Fault(NamedTuple):
    """What happens right before a call reaches the ledger, and right after it; then its answer may be lost."""

    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    is_lost: bool = False


class FaultyLog:
    """A log with faults at some of its calls, counted from 1: of all methods, or only of those that are named."""

    def __init__(self, log: Log, faults: Mapping[int, Fault], *methods: str) -> None:
        self._log, self.faults, self._methods = log, dict(faults), methods
        self.calls: list[str] = []
        self._inside = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._log, name)
        uncounted = ("close", "unwritable")
        if not callable(method) or name in uncounted or name not in (self._methods or (name,)):
            return method
        return partial(self._call, name, method)

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._inside:  # a fault asks the ledger, too
            return method(*args, **options)
        self.calls.append(name)
        fault, self._inside = self.faults.get(len(self.calls), Fault()), True
        try:
            fault.before()
            answer = method(*args, **options)
            fault.after()
        finally:
            self._inside = False
        if fault.is_lost:
            raise LedgerError("the answer is lost")
        return answer


class Machine:
    """One machine: a state folder, one process at a time, and a clock. `skew_ms` is how far its clock is off."""

    def __init__(self, name: str, folder: Path, url: str, clock: Callable[[], int]) -> None:
        self.name = name
        self.folder = folder / name
        self._url = url
        self._clock = clock
        self.skew_ms = 0
        self.start()

    def start(self) -> None:
        """Start a new process. It knows what the folder holds."""
        self.folder.mkdir(exist_ok=True)
        self.ledger = open_ledger(self._url, clock=self._clock)

    def stop(self) -> None:
        """End the process, as a kill would: a journal needs no goodbye."""
        self.ledger.close()

    def journal(self, project: str = "p") -> Journal:
        return Journal(self.folder, Identity("test", project), keep_ms=DAY_MS, clock=self._clock)

    def budget(self, *limits: Limit, project: str = "p", **options: Any) -> Budget:
        keys = Keys(folder=self.folder)
        opened = Project(
            self.ledger,
            project,
            journal=self.journal(project),
            keys=keys,
            clock=self._clock,
            wall=lambda: self._clock() + self.skew_ms,
        )
        return Budget(credential="main", book=BOOK, limits=limits, project=opened, **options)


class Site:
    """See above. To be stopped in the end."""

    def __init__(self, place: LedgerStorage, folder: Path) -> None:
        self.place, self._folder = place, folder
        self.now_ms = NOW_MS
        self.machines: list[Machine] = []

    def machine(self, name: str = "ours", url: str = "") -> Machine:
        """A machine with this name, or one more process of it. Its ledger is reached by the `url`, where one is
        given."""
        self.machines.append(Machine(name, self._folder, url or self.place.url, lambda: self.now_ms))
        return self.machines[-1]

    def empty(self) -> None:
        """Lose all that the ledger has."""
        self._replace(self.place.empty)

    def clear(self) -> None:
        """The same, while others have the ledger open."""
        self.place.clear()
        self.now_ms += 1

    def restore(self, copy: Any) -> None:
        """Put an old copy in the place of what the ledger has."""
        self._replace(lambda: self.place.restore(copy))

    def _replace(self, replace: Callable[[], None]) -> None:
        """Nobody has a file open that is replaced. The time goes on meanwhile."""
        for machine in self.machines:
            machine.stop()
        replace()
        self.now_ms += 1
        for machine in self.machines:
            machine.start()

    def stop(self) -> None:
        for machine in self.machines:
            machine.stop()
