"""One SQLite file that many processes of one machine share: opening, transactions, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from quota.common.fork import hold_over_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")
R = TypeVar("R", bound="tuple[object, ...]")

DEADLINE_S = 1.0
"""How long one transaction may wait for other processes'."""

PAGE_BYTES = 2048
"""A decision changes two pages, and each is written whole: smaller ones than SQLite's own 4096 save 5% of its time. A
charge with the longest names still fits into a quarter of one, so that none spills over.
"""

_UNPREPARED = -1
"""No file's number: the connection is not ready to be used."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class DamagedError(Exception):
    """A row holds what this package never writes. Where a transaction meets it, it ends in the file's error."""


def checked_row(row: R, *, integers: int, below: int = 2**53) -> R:
    """`row`, whose first `integers` fields must be whole numbers from 0 to below `below`, and the others text.

    Raises DamagedError.
    """
    for n, value in enumerate(row):
        right = type(value) is int and 0 <= value < below if n < integers else type(value) is str
        if not right:
            raise DamagedError(f"{value!r:.100}")
    return row


class Wording(NamedTuple):
    """What a file's errors say: each is one line that names the file and what to do.

    `{version}` stands for the version that the file has, `{reason}` for the system's own word.
    """

    foreign: str
    newer: str
    older: str
    locked: str
    not_a_database: str
    read_only: str
    cannot_open: str
    no_file: str
    disk_full: str
    damaged: str
    disk_fails: str
    other: str


class SqliteFile:
    """A file in WAL mode with a schema of its own; "" is a database in memory.

    `schema` names a shipped script, as `read_text` takes it, `application_id` marks the file as ours, `version` its
    format. Every failure is an `error` with the text that `wording` has for it. `durable` waits for the disk at every
    commit; else a crash of the machine, not of a process, may lose the last. A `private` file, and a folder that is
    missing, are made for this user alone. `lenient` reads text that is not UTF-8 as far as it can be read. A
    transaction waits `deadline_s` for other processes'. Opened at the first transaction. Safe to share between threads
    and after a fork.
    """

    def __init__(
        self,
        path: str,
        *,
        schema: tuple[str, str],
        application_id: int,
        version: int,
        error: type[Exception],
        wording: Wording,
        durable: bool = False,
        private: bool = True,
        lenient: bool = False,
        deadline_s: float = DEADLINE_S,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.path = path
        self._schema = schema
        self._application_id = application_id
        self._version = version
        self._error = error
        self._wording = wording
        self._synchronous = "FULL" if durable else "NORMAL"
        self._private = private
        self._lenient = lenient
        self._deadline_s = deadline_s
        self._page_bytes = page_bytes
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._inode = _UNPREPARED
        self._turn = 0  # counts how often a connection was let go of
        hold_over_fork(self)

    def transact(self, work: Callable[[sqlite3.Connection], T], *, write: bool) -> T:
        """Run `work` in one transaction; wait for other processes' transactions, but not for ever.

        SQLite's own busy handler backs off to 100 ms and starves under contention, so the waiting is ours: short and
        jittered, until the deadline. `work` may run again, from the start.

        A signal handler may raise anywhere in here: its exception ends the transaction and goes on as it came. Or it
        may ask a question itself, in the middle of this one: that ends ours, and we begin again when it is answered.
        """
        deadline = time.monotonic() + self._deadline_s
        with self._lock:
            while True:
                turn = self._turn
                try:
                    db = self._connection()
                    # Not as a context manager: an exception may come before `__exit__` does anything.
                    try:
                        db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                        result = work(db)
                        db.execute("COMMIT")
                    except BaseException:
                        if self._db is db:
                            db.rollback()  # does nothing where nothing was begun, or all is committed
                        raise
                    return result
                except sqlite3.Error as error:
                    if self._turn != turn:
                        continue
                    if _code(error) in _BUSY and time.monotonic() < deadline:
                        import random  # late: most processes meet no other one

                        time.sleep(random.uniform(0.0002, 0.002))  # noqa: S311  # a jitter, not a secret
                        continue
                    raise self._error(self._explain(error)) from error
                except (DamagedError, TypeError, OverflowError, UnicodeDecodeError, MemoryError) as error:
                    # The last two: where SQLite's own message quotes a damaged schema, the driver cannot read it; and
                    # a damaged length asks for more memory than there is.
                    raise self._error(self._wording.damaged) from error
                except OSError as error:
                    if error.errno is None:  # not the system's: the TimeoutError of a signal handler
                        raise
                    raise self._error(self._wording.no_file.replace("{reason}", str(error.strerror))) from error

    def close(self) -> None:
        """Close the file. May be called twice; a later transaction opens it again."""
        with self._lock:
            self._let_go()

    def held_over_fork(self) -> Generator[None, None, None]:
        """Wait for the transaction under way, and let go of the file: both sides open it again when they need it.

        SQLite's own notes on who has locked what would be wrong in the child.
        """
        with self._lock:
            if self.path:
                self._let_go()
            yield

    def _let_go(self) -> None:
        """Close the connection. Who is in the middle of a transaction on it, which only a signal handler of the same
        thread can find, gets an error at the next statement, and begins again.
        """
        self._turn += 1
        db, self._db = self._db, None
        if db is not None:
            _end(db)

    def _connection(self) -> sqlite3.Connection:
        db = self._db
        if db is not None:
            if self._inode == _inode(self.path):
                if not db.in_transaction:
                    return db
                if not self.path:
                    return self._moved(db)
            # Deleted or replaced: what is written to the old file nobody else would ever see. Or something has left a
            # transaction there: a signal handler interrupted it, and asks us.
            self._let_go()
        if self.path:
            _make(self.path, private=self._private)
        inode = _inode(self.path)
        self._inode = _UNPREPARED
        self._db = db = self._connect()
        try:
            self._prepare(db)
        except BaseException:
            if self._db is db:
                self._db = None
            _end(db)
            raise
        self._inode = inode
        return db

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path or ":memory:", timeout=0, isolation_level=None, check_same_thread=False)
        if self._lenient:
            db.text_factory = _decoded
        return db

    def _moved(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """`_let_go` for what is only in memory, which would end with its connection: it moves to another."""
        self._turn += 1
        db.rollback()
        moved = self._connect()
        db.backup(moved)
        self._db = moved
        db.close()
        return moved

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN")
        version = self._format(db)
        db.execute("COMMIT")
        if version < self._version:
            db.execute(f"PRAGMA page_size = {self._page_bytes}")  # of a new file; another keeps its own
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            if self._format(db) < self._version:  # another process may have been faster
                from quota.common.resources import read_text

                for statement in statements(read_text(*self._schema)):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {self._application_id}")
                db.execute(f"PRAGMA user_version = {self._version}")
            db.execute("COMMIT")
        db.execute(f"PRAGMA synchronous = {self._synchronous}")

    def _format(self, db: sqlite3.Connection) -> int:
        """The version of our format that the file has, 0 for an empty one."""
        if db.execute("PRAGMA application_id").fetchone()[0] != self._application_id:
            if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                raise self._error(self._wording.foreign)
            return 0
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        if version != self._version:
            text = self._wording.newer if version > self._version else self._wording.older
            raise self._error(text.replace("{version}", str(version)))
        return version

    def _explain(self, error: sqlite3.Error) -> str:
        wording, code = self._wording, _code(error)
        if code in _BUSY:
            return wording.locked
        if code == sqlite3.SQLITE_NOTADB:
            return wording.not_a_database
        if code == sqlite3.SQLITE_READONLY:
            return wording.read_only
        if code == sqlite3.SQLITE_CANTOPEN:
            return wording.cannot_open
        if code == sqlite3.SQLITE_FULL:
            return wording.disk_full
        if code == sqlite3.SQLITE_CORRUPT or "Could not decode" in str(error):
            return wording.damaged
        if code == sqlite3.SQLITE_IOERR:
            return wording.disk_fails
        return wording.other.replace("{reason}", str(error))


def statements(script: str) -> list[str]:
    """The statements of a script, so that they run inside one transaction (executescript would commit first)."""
    found, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found


def _end(db: sqlite3.Connection) -> None:
    """Close a connection, and first its transaction: to close alone keeps the lock while a statement is unfinished."""
    try:
        db.rollback()
    except sqlite3.Error:
        pass  # closed already
    finally:
        db.close()


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code (the extended codes carry detail in the higher bits)."""
    code: int = getattr(error, "sqlite_errorcode", 0) or 0
    return code & 0xFF


def _inode(path: str) -> int:
    """Which file stands at this path now; 0 for none."""
    try:
        return os.stat(path).st_ino if path else 0
    except OSError:
        return 0


def _make(path: str, *, private: bool) -> None:
    """Create the file; SQLite gives its side files the same mode. A private one is this user's, with its folder."""
    folder = os.path.dirname(path)
    if private and folder and not os.path.isdir(folder):
        from quota.common.folders import make_folder  # late: a machine needs it once

        make_folder(folder)
    if not os.path.exists(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600 if private else 0o666))


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")
