"""Folders that only this user may read, and files that only this user may write, whatever the umask."""

from __future__ import annotations

import contextlib
import os
import time


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and its missing parents, readable by this user alone. Existing folders stay as they are.

    `os.makedirs` applies its mode to the last folder only, and leaves the others to the umask. Raises OSError.
    """
    above = os.fspath(path)
    missing = [above]
    while (above := os.path.dirname(above.rstrip(os.sep))) and not os.path.exists(above):
        missing.append(above)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # another process made it first, or it is a file: then the error is right
            if not os.path.isdir(folder):
                raise


def first_within(path: str | os.PathLike[str], ms: int) -> bool:
    """Whether nobody called this for `ms`, with a file at `path` to note it: for what one machine says now and then.

    A file of the future, by a clock that was wrong, notes nothing. Raises OSError.
    """
    now_ms = time.time_ns() // 1_000_000
    with contextlib.suppress(FileNotFoundError):
        if 0 <= now_ms - os.stat(path).st_mtime_ns // 1_000_000 < ms:
            return False
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.utime(path)
    return True


def private(path: str, flags: int) -> int:
    """Opens a file that only this user may read and write: an `opener` for `open`."""
    return os.open(path, flags, 0o600)


def readable(path: str, flags: int) -> int:
    """Opens a file that others may read, as the umask allows: an `opener` for `open`."""
    return os.open(path, flags, 0o644)
