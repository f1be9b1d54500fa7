"""One SQLite file that many processes of one machine share: opening, transactions, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from quota.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DEADLINE_S = 1.0
"""How long one transaction may wait for other processes'."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_left_to_parent: list[sqlite3.Connection] = []
"""Connections inherited over a fork. Closing one here would drop the parent's file locks."""


class SqliteFile:
    """A file in WAL mode with a schema of its own; "" is a database in memory.

    `schema` names a script shipped with this package, `application_id` marks the file as ours, `version` its format.
    `durable` waits for the disk at every commit; else a crash of the machine, not of a process, may lose the last.
    Opened at the first transaction. Safe to share between threads and after a fork; every failure is a LedgerError.
    """

    def __init__(
        self, path: str, what: str, *, schema: str, application_id: int, version: int, durable: bool = False
    ) -> None:
        self.path = path
        self.label = f"{what} sqlite:///{path}" if path else f"{what} in memory"
        self._schema = schema
        self._application_id = application_id
        self._version = version
        self._synchronous = "FULL" if durable else "NORMAL"
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._pid = 0

    def transact(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Run `work` in one transaction; wait for other processes' transactions, but not for ever.

        SQLite's own busy handler backs off to 100 ms and starves under contention, so the waiting is ours: short and
        jittered, until the deadline. `work` may run again, from the start.
        """
        deadline = time.monotonic() + DEADLINE_S
        with self._lock:
            while True:
                try:
                    db = self._connection()
                    db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                    try:
                        result = work(db)
                        db.execute("COMMIT")
                    except BaseException:
                        if db.in_transaction:
                            db.execute("ROLLBACK")
                        raise
                    return result
                except sqlite3.Error as error:
                    if _code(error) in _BUSY and time.monotonic() < deadline:
                        import random  # late: most processes meet no other one

                        time.sleep(random.uniform(0.0002, 0.002))  # noqa: S311  # a jitter, not a secret
                        continue
                    raise LedgerError(self._explain(error)) from error
                except OSError as error:
                    raise LedgerError(f"{self.label}: {error.strerror}; check its folder") from error

    def close(self) -> None:
        """Close the file. May be called twice; a later transaction opens it again."""
        with self._lock:
            if self._db is not None and self._pid == os.getpid():
                self._db.close()
            self._db = None

    def _connection(self) -> sqlite3.Connection:
        if self._db is not None:
            if self._pid == os.getpid():
                return self._db
            _left_to_parent.append(self._db)
        if self.path:
            _make_private(self.path)
        db = sqlite3.connect(self.path or ":memory:", timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        self._db, self._pid = db, os.getpid()
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        if db.execute("PRAGMA application_id").fetchone()[0] != self._application_id:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            # Another process may have been faster.
            if db.execute("PRAGMA application_id").fetchone()[0] != self._application_id:
                if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                    raise LedgerError(f"{self.label} is another program's database; correct the url")
                from quota.resources import read_text

                for statement in statements(read_text("quota", self._schema)):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {self._application_id}")
                db.execute(f"PRAGMA user_version = {self._version}")
            db.execute("COMMIT")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > self._version:
            raise LedgerError(
                f"{self.label} was written by a newer quota-ledger (its version {version}, ours {self._version}): "
                "upgrade this machine"
            )
        db.execute(f"PRAGMA synchronous = {self._synchronous}")

    def _explain(self, error: sqlite3.Error) -> str:
        code = _code(error)
        if code in _BUSY:
            return f"{self.label} is locked by another process (waited {DEADLINE_S:g} s); find it: fuser {self.path}"
        if code == sqlite3.SQLITE_NOTADB:
            return f"{self.label} is not an SQLite database; move that file away or correct the url"
        if code == sqlite3.SQLITE_READONLY:
            return f"{self.label} is read-only; give this user write access to the file and its folder"
        if code == sqlite3.SQLITE_CANTOPEN:
            return f"{self.label} cannot be opened; check that its folder exists and this user may write there"
        if code == sqlite3.SQLITE_FULL:
            return f"{self.label}: the disk is full; nothing was charged"
        if code == sqlite3.SQLITE_CORRUPT:
            return f"{self.label} is damaged; move it away (its charges are lost: lower the limits for a day)"
        return f"{self.label}: {error}"


def statements(script: str) -> list[str]:
    """The statements of a script, so that they run inside one transaction (executescript would commit first)."""
    found, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code (the extended codes carry detail in the higher bits)."""
    code: int = getattr(error, "sqlite_errorcode", 0) or 0
    return code & 0xFF


def _make_private(path: str) -> None:
    """Create the file for this user only; SQLite gives its side files the same mode."""
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if not os.path.exists(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
