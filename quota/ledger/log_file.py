"""An SQLite file in which a thread may keep its transaction open over several pieces of work."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from quota.common.sqlite_file import DamagedError, SqliteFile

T = TypeVar("T")


class LogFile(SqliteFile):
    """A file whose transactions are one by one, but those in a block of `held`.

    `_held` is the connection whose transaction is open for the next piece of work, and `_is_working` says whether such
    a piece is under way: what asks meanwhile is a signal handler.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held: sqlite3.Connection | None = None
        self._is_working = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from writing while this thread reads, and until it has written: what was written is committed
        before `transact` returns. The rest of the block holds nobody back."""
        with self._lock:
            try:
                super().transact(lambda db: db.execute("BEGIN IMMEDIATE"), write=None)
                self._held = self._db
                yield
            finally:
                # Not in a function of its own: a signal handler may raise as that begins.
                if self._db is not None:
                    self._db.rollback()  # does nothing outside a transaction
                self._held = None

    def transact(
        self, work: Callable[[sqlite3.Connection], T], *, write: bool | None, within_s: float | None = None
    ) -> T:
        """As `SqliteFile.transact`, in the transaction that is held, if there is one.

        Where anything comes between, a signal handler for example, that transaction ends, and the work begins again in
        one of its own.
        """
        with self._lock:
            if self._held is not None and not self._is_working:
                self._is_working = True
                try:
                    db = self._held
                    if db is not None:  # a handler may have ended it just now
                        answer = work(db)
                        if write:
                            db.execute("COMMIT")
                            self._held = None
                        return answer
                except (sqlite3.Error, DamagedError, TypeError):
                    # A handler has closed that connection; or `super` says what is wrong.
                    self._release()
                except BaseException:
                    self._release()
                    raise
                finally:
                    self._is_working = False
            return super().transact(work, write=write, within_s=within_s)

    def _release(self) -> None:
        """End the transaction that is held, with nothing written."""
        if self._held is not None and self._held is self._db:
            self._held.rollback()
        self._held = None
