"""Reading a file that somebody named in a configuration or an option: it may be anything, a pipe too."""

from __future__ import annotations

import errno
import os
import stat
from select import POLLIN, poll

WRITER_WITHIN_MS = 5_000
"""How long a pipe is given until somebody writes to it."""

_AT_ONCE = os.O_CLOEXEC | os.O_NONBLOCK


def read_named(path: str | os.PathLike[str], at_most: int) -> bytes:
    """The first `at_most` bytes of a file, or of what a shell's `<(...)` hands over.

    Raises OSError, also for a pipe that nobody writes to: a run would hang until somebody does. Raises ValueError for
    a name with a NUL.
    """
    fd = at_once(path, os.O_RDONLY)
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISFIFO(kind):
            _await_writer(fd)
        if not stat.S_ISREG(kind):
            os.set_blocking(fd, True)
        with open(fd, "rb", closefd=False) as file:
            return file.read(at_most)
    finally:
        os.close(fd)


def at_once(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file without waiting for the other end of a pipe: an `opener` for `open`."""
    return os.open(path, flags | _AT_ONCE)


def _await_writer(fd: int) -> None:
    waiting = poll()
    waiting.register(fd, POLLIN)
    if waiting.poll(WRITER_WITHIN_MS):
        return
    try:
        os.read(fd, 1)  # there is nothing to be lost
    except BlockingIOError:
        return  # somebody has opened it, and takes a while
    raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
