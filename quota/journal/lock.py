"""A lock for one process of a machine, and one thread of it, at a time."""

from __future__ import annotations

import fcntl
import io
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

from quota.common.files import make_folder, open_alone
from quota.errors import LedgerError

_LOOK_AGAIN_S = 0.002


class _LockFile(io.FileIO):
    """A file that is locked until it is closed. C code closes it, where no signal handler runs: at the end of its
    block, or, if an exception comes before the block begins, as soon as nobody refers to it."""

    holder = 0

    def __del__(self) -> None:
        self.close()


class FileLock:
    """A lock on a file, which the first lock makes. The thread that holds it may lock again.

    It ends with its block or its process. A forked child does not have its parent's lock (`start_over`).
    """

    def __init__(self, path: str, what: str) -> None:
        self._path, self._what = path, what
        self._files: WeakSet[_LockFile] = WeakSet()

    def taken(self, wait_s: float) -> AbstractContextManager[object]:
        """Take the lock, until the `with` block of the returned value ends.

        Raises LedgerError if another process holds it for `wait_s`, and OSError if nobody can lock it.
        """
        me = threading.get_ident()
        if any(file.holder == me and not file.closed for file in self._files):
            return nullcontext()
        make_folder(os.path.dirname(self._path))
        file = _LockFile(self._path, "r+", opener=_open)
        try:
            self._files.add(file)
            self._wait_for(file, wait_s)
            file.holder = me
        except BaseException:
            file.close()
            raise
        return file

    def start_over(self) -> None:
        """In a forked child: close the copies, which would hold the parent's lock as long as the child lives."""
        for file in list(self._files):
            file.close()

    def _wait_for(self, file: _LockFile, wait_s: float) -> None:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    raise LedgerError(
                        f"{self._what}: another process of this machine has held it for more than {wait_s:g} s; "
                        f"try again, or see which: fuser {self._path}"
                    ) from None
            time.sleep(_LOOK_AGAIN_S)


def _open(path: str, _: int) -> int:
    return open_alone(path, os.O_RDWR | os.O_CREAT)
