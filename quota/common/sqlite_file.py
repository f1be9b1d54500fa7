"""A SQLite file that many processes of one machine share: opening it, its transactions and its errors."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar
from urllib.parse import quote

from quota.common.clock import elapsed_s
from quota.common.files import (
    doubt_of_database,
    lack_of_room,
    lacks_descriptors,
    lacks_locks,
    make_folder,
    open_alone,
    read_text,
    remedy_for,
)
from quota.common.findings import is_mounted_alone, obstacle
from quota.common.fork import hold_over_fork

T = TypeVar("T")
R = TypeVar("R", bound="tuple[object, ...]")

DEADLINE_S = 1.0
"""How long a transaction may wait for transactions of other processes."""

PAGE_BYTES = 2048
"""The size of a page. SQLite's own default is 4096.

A decision changes two pages, and SQLite writes each of them whole, so smaller pages save 5% of its time. A charge with
the longest names still fits into a quarter of a page, so no charge needs an overflow page.
"""

ROOM_BYTES = 65_536
"""The bytes that a process's first transaction may need for SQLite's -shm, beside its own pages."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_OUT_OF_STEP = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Codes that SQLite also returns if the files beside the database do not belong to it."""


class DamagedError(Exception):
    """A row holds a value that this package never writes. `transact` turns this into the file's own error."""


DAMAGE = (DamagedError, TypeError, OverflowError, UnicodeDecodeError, MemoryError)
"""The errors that reading a damaged file raises. UnicodeDecodeError: SQLite's message quotes a damaged schema, and the
driver cannot decode it. MemoryError: a damaged length asks for too much memory."""


def pause() -> None:
    """Wait for a moment until another process has ended its transaction."""
    time.sleep(random.uniform(0.0002, 0.002))  # noqa: S311  # a jitter, not a secret


def checked_row(row: R, *, integers: int) -> R:
    """Return `row` if its first `integers` fields are whole numbers from 0 to below 2**53, and the others are text.

    Raises DamagedError if they are not.
    """
    for value in row[:integers]:
        if type(value) is not int or not 0 <= value < 2**53:
            raise DamagedError(f"{value!r:.100}")
    for value in row[integers:]:
        if type(value) is not str:
            raise DamagedError(f"{value!r:.100}")
    return row


_FAULTS: dict[str | int, str] = {
    "foreign": " is another program's database; {remedy}",
    "newer": " was written by a newer quota-ledger (its version {reason}, ours {version}); upgrade this machine",
    "older": " was written by an older quota-ledger (its version {reason}, ours {version}); {remedy} ({lost_then})",
    "no file": ": {reason}; check its folder",
    "other": ": {reason}",
    **dict.fromkeys(_BUSY, " is locked by another process (waited {deadline_s:g} s); find it: fuser {path}"),
    sqlite3.SQLITE_NOTADB: " is not an SQLite database; {remedy}",
    sqlite3.SQLITE_READONLY: (
        " is read-only; give this user write access to the file, its -wal and -shm, and their folder"
    ),
    sqlite3.SQLITE_CANTOPEN: " cannot be opened; check that its folder exists and this user may write there",
    sqlite3.SQLITE_FULL: ": {when_full}",
    sqlite3.SQLITE_CORRUPT: " is damaged; move it away, with its -wal and -shm ({lost_then})",
    sqlite3.SQLITE_IOERR: (
        ": reading or writing it failed; check the disk and its space, or, if its -wal was deleted, restart what has "
        "it open: fuser {path}"
    ),
}
"""The rest of a message after the name of the file, by fault or by SQLite's code."""


class _Connection(sqlite3.Connection):
    """Closes itself if its user left it open, without a ResourceWarning, as every Python before 3.13 does."""

    def __del__(self) -> None:
        with suppress(sqlite3.ProgrammingError):  # it could not be opened
            self.close()


@dataclass(eq=False, repr=False)
class SqliteFile:
    """A file in WAL mode with its own schema. The path "" means a database in memory.

    schema           the shipped script that creates the tables, as the arguments of `read_text`
    application_id   marks the file as ours
    version          the version of its format
    error            raised for each failure, with a message of one line from `says`
    what             the name of the file in messages, before its path
    remedy           what to do with a file that this package cannot read
    lost_then        what is lost if somebody moves it away
    when_full        what the message says if the disk is full
    unusable         raised instead of `error` if a retry is no use: another format, another program's file, damage
    private          only this user may read the file, and a new folder; otherwise other users may read it
    lenient          replaces bytes that are not UTF-8 when it reads text
    read_only        write nothing and make no file: a missing or empty file is an error
    deadline_s       how long a transaction may wait for transactions of other processes

    The first transaction opens the file. Threads may share this object, and so may both processes after a fork.
    """

    path: str
    _: KW_ONLY
    schema: tuple[str, str]
    application_id: int
    version: int
    error: type[Exception]
    what: str
    remedy: str
    lost_then: str
    when_full: str
    unusable: type[Exception] | None = None
    private: bool = True
    lenient: bool = False
    read_only: bool = False
    deadline_s: float = DEADLINE_S
    page_bytes: int = PAGE_BYTES

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._paths = (self.path, f"{self.path}-wal", f"{self.path}-shm") if self.path else ()
        self._inodes: list[int] | None = None  # of the files that the connection has open; None: it is not ready
        self._turn = 0  # counts how often a connection was dropped
        hold_over_fork(self)

    def transact(
        self,
        work: Callable[[sqlite3.Connection], T],
        *,
        write: bool | None,
        within_s: float | None = None,
    ) -> T:
        """Run `work` in one transaction. Waits for transactions of other processes, until the deadline, or `within_s`.

        With `write` None, `work` itself begins and commits its transactions. Without a BEGIN, every
        statement is a transaction of its own.

        SQLite's own busy handler backs off to 100 ms, and a process can starve under contention. So this method does
        the waiting itself, in short random steps. `work` may run again, from the start.

        A signal handler may raise an exception anywhere in here: it ends the transaction, and reaches the caller
        unchanged. A signal handler may also run a transaction of its own in the middle of this one. That ends this
        transaction, which begins again afterwards.
        """
        deadline = elapsed_s() + (self.deadline_s if within_s is None else within_s)
        with self._lock:
            while True:
                turn = self._turn
                try:
                    db = self._connection()
                    # Use no context manager: an exception may arrive before its `__exit__` does anything.
                    try:
                        if write is None:
                            return work(db)
                        db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                        result = work(db)
                        db.execute("COMMIT")
                    except BaseException:
                        if self._db is db:
                            db.rollback()  # does nothing outside a transaction
                        raise
                    return result
                except sqlite3.Error as error:
                    if self._turn != turn:
                        continue
                    if _code(error) in _BUSY and elapsed_s() < deadline:
                        pause()
                        continue
                    if self.path and _code(error) in _OUT_OF_STEP:
                        self._let_go()  # the next transaction begins with the files that are there then
                    if not write and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_SHMSIZE:
                        return self._read_alone(work, error)
                    raise self._explained(error) from error
                except DAMAGE as error:
                    raise self._useless(sqlite3.SQLITE_CORRUPT) from error
                except OSError as error:
                    if error.errno is None:  # not from the system: a signal handler raised TimeoutError
                        raise
                    remedy = remedy_for(error.errno, "check its folder")
                    raise self.error(self.says("other", f"{error.strerror}; {remedy}")) from error

    def _read_alone(self, work: Callable[[sqlite3.Connection], T], trouble: sqlite3.Error) -> T:
        """Read on a full disk, where SQLite cannot make its -shm. A connection that keeps all others out needs none.
        Raises the trouble if that fails, too."""
        ends_s, is_busy = elapsed_s() + self.deadline_s, True
        while is_busy and elapsed_s() < ends_s:
            db = self._connect(read_only=False)  # which could not keep others out
            try:
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
                db.execute("BEGIN")
                if self._format(db) == self.version:
                    return work(db)
                is_busy = False
            except (sqlite3.Error, *DAMAGE) as error:
                is_busy = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY  # another process reads
            finally:
                self._end(db)
            pause()
        raise self._explained(trouble) from trouble

    def close(self) -> None:
        """Close the file. A second call does nothing. A later transaction opens the file again."""
        with self._lock:
            self._let_go()

    def held_over_fork(self) -> Generator[None, None, None]:
        """Wait for the current transaction, and close the file. Both processes open it again when they need it.

        SQLite keeps its own list of locks in memory. That list would be wrong in the child.
        """
        with self._lock:
            if self.path:
                self._let_go()
            yield

    def _let_go(self) -> None:
        """Close the connection.

        Only a signal handler can call this in the middle of a transaction, one of its own thread. The interrupted
        transaction gets an error at its next statement, and begins again.
        """
        self._turn += 1
        db, self._db = self._db, None
        if db is not None:
            self._end(db)

    def _connection(self) -> sqlite3.Connection:
        db = self._db
        if db is not None:
            if self._inodes == [_inode(path) for path in self._paths]:
                if not db.in_transaction:
                    return db
                if not self.path:
                    return self._moved(db)
            # The file, or a file beside it, was deleted or replaced, for example by a restored copy: we would not see
            # what other processes write, nor they what we write. Or a transaction is open, and a signal handler
            # interrupted it and called us.
            self._let_go()
        if self.path:
            self._check()
            if not self.read_only and not os.path.exists(self.path):
                if os.path.islink(self.path):  # as where what it names is not mounted
                    raise self.error(self.says("no file", "it is a link to nothing"))
                self._make()
                self._check()
        of_file = [_inode(path) for path in self._paths[:1]]
        self._inodes = None
        self._db = db = self._connect(read_only=self.read_only)
        try:
            self._prepare(db)
        except BaseException:
            if self._db is db:
                self._db = None
            self._end(db)
            raise
        self._inodes = of_file + [_inode(path) for path in self._paths[1:]]
        return db

    def _make(self) -> None:
        """Create the file. SQLite gives its side files the same mode. The umask may take rights away."""
        folder = os.path.dirname(self.path)
        if self.private and folder and not os.path.isdir(folder):
            make_folder(folder)
        os.close(open_alone(self.path, os.O_RDWR | os.O_CREAT, 0o600 if self.private else 0o644))

    def _check(self) -> None:
        """Raise for a file that others could change, or with a second name. SQLite keeps a -wal beside each name, so
        processes that open different names do not see each other's writes."""
        why, real = doubt_of_database(self.path), os.path.realpath(self.path)
        if not why and os.path.exists(real) and os.stat(real).st_nlink > 1:
            why = "a hard link to it is a second file for SQLite; delete one of the two (find / -samefile shows both)"
        elif not why and is_mounted_alone(real):
            why = "it is mounted without its folder, and is a second file for SQLite; mount the folder"
        if why:
            raise self._useless("other", why)

    def _connect(self, *, read_only: bool) -> sqlite3.Connection:
        target = self.path or ":memory:"
        if read_only:
            target = f"file:{quote(os.fsencode(os.path.abspath(self.path)))}?mode=ro"
        db = sqlite3.connect(
            target,
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
            uri=read_only,
        )
        if not self.read_only:  # a statement that changes many pages would need a folder for temporary files
            db.execute("PRAGMA temp_store = MEMORY")
        if self.lenient:
            db.text_factory = lambda text: text.decode("utf-8", "replace")
        return db

    def _moved(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """`_let_go` for a database in memory. It would end with its connection, so copy it to a new connection."""
        self._turn += 1
        db.rollback()
        moved = self._connect(read_only=False)
        db.backup(moved)
        self._db = moved
        self._end(db)
        return moved

    def _end(self, db: sqlite3.Connection) -> None:
        """Roll back, then close the connection. `close` alone would keep the lock while a statement is unfinished."""
        try:
            db.rollback()
        except sqlite3.Error:
            pass  # already closed
        finally:
            db.close()

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN")
        version = self._format(db)
        db.execute("COMMIT")
        if self.read_only:
            if not version:  # empty: another process is about to fill it
                raise self.error(self.says("no file", "it is empty"))
            return
        if version < self.version:
            db.execute(f"PRAGMA page_size = {self.page_bytes}")  # a file with pages keeps its own size
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            if self._format(db) < self.version:  # another process may have done it
                for statement in statements(read_text(*self.schema)):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {self.application_id}")
                db.execute(f"PRAGMA user_version = {self.version}")
            db.execute("COMMIT")
        db.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine, not of a process, may lose the last commits

    def _format(self, db: sqlite3.Connection) -> int:
        """The version of our format in the file, or 0 for an empty file."""
        if db.execute("PRAGMA application_id").fetchone()[0] != self.application_id:
            if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
                raise self._useless("foreign")
            return 0
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        if version != self.version:
            raise self._useless("newer" if version > self.version else "older", version)
        return version

    def says(self, fault: str | int, reason: object = "") -> str:
        """The message of a fault, or of an SQLite code. It names the file and the remedy."""
        file = f"sqlite:///{self.path}" if self.path else "in memory"
        text = _FAULTS.get(fault, _FAULTS["other"])
        return f"{self.what} {file}{text.format(reason=reason, **vars(self))}"

    def _says_system(self, code: int) -> str:
        return self.says("other", f"{os.strerror(code)}; {remedy_for(code, 'see `quota doctor`')}")

    def full(self, needed_bytes: int = ROOM_BYTES) -> str:
        """The message if the file may not grow by so much; "" if it may."""
        codes = [code for path in self._paths if (code := lack_of_room(path, needed_bytes))]
        if not codes:
            return ""
        return self.says(sqlite3.SQLITE_FULL) if codes[0] == errno.ENOSPC else self._says_system(codes[0])

    def _useless(self, fault: str | int, reason: object = "") -> Exception:
        """The error for a file with which a retry is no use."""
        return (self.unusable or self.error)(self.says(fault, reason))

    def _explained(self, error: sqlite3.Error) -> Exception:
        code, reason = _code(error), str(error)
        # Also: a text is not UTF-8, or a table or column of the format is missing.
        if reason.startswith(("Could not decode", "no such table", "no such column")):
            code = sqlite3.SQLITE_CORRUPT
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return self._useless(code)
        if code == sqlite3.SQLITE_CANTOPEN and lacks_descriptors():
            return self.error(self._says_system(errno.EMFILE))
        if code in _BUSY and self.path and lacks_locks(self.path):
            return (self.unusable or self.error)(self._says_system(errno.ENOLCK))
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN) and (full := self.full()):
            return self.error(full)
        if code == sqlite3.SQLITE_CANTOPEN and (prevented := obstacle(self.path)) is not None:
            return self.error(self.says("other", "; ".join(prevented)))
        return self.error(self.says(code, reason))


def statements(script: str) -> list[str]:
    """Split a script into statements, to run them inside one transaction. `executescript` would commit first."""
    whole, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            whole.append(pending)
            pending = ""
    return whole


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code. The higher bits of an extended code carry detail."""
    code: int = getattr(error, "sqlite_errorcode", 0) or 0
    return code & 0xFF


def _inode(path: str) -> int:
    """The inode of the file that is at this path now, or 0 if there is none."""
    try:
        return os.stat(path).st_ino
    except OSError as error:
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise
        return 0
