"""Files and folders that this package makes: nobody else reads or writes them, whatever the umask.

    make_folder           a folder, with its missing parents
    open_alone            a file of our own: made safely, or refused where others could have made or changed it
    is_ours               whether a descriptor is still the one that `mark_ours` has marked
    doubt_at              why others could change a file or folder that is there
    doubt_of_database     the same for an SQLite file, with its folder and the files beside it

Where others may write, somebody may have put a link, a pipe or a file of theirs at a path that we are about to use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time

from quota.common.owners import doubt, doubt_of_link

_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Follow no link, and wait for nobody at the other end of a pipe."""

_OURS = 0x51_4C_4F_31

_BESIDE = ("", "-journal", "-wal", "-shm")
"""An SQLite file, and those that SQLite makes and believes beside it."""


class NotAloneError(OSError):
    """Others could have made or changed the file. Its `strerror` says why, in words that follow the file's name."""


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and its missing parents, readable by this user alone. Existing folders stay as they are.

    `os.makedirs` applies its mode to the last folder only, and leaves the others to the umask. Raises OSError.
    """
    above = os.fspath(path)
    with contextlib.suppress(OSError):  # mostly only the last one is missing
        os.mkdir(above, 0o700)
        return
    missing = [above]
    while (above := os.path.dirname(above.rstrip(os.sep))) and not os.path.exists(above):
        missing.append(above)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # another process made it first, or it is a file: then the error is right
            if not os.path.isdir(folder):
                raise


def open_alone(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """As `os.open`, for a file of our own. What the umask takes off `mode` is off.

    A new file is made with O_EXCL. Raises NotAloneError for a link, a pipe, a file of another user, or one that others
    may write; OSError for anything else.
    """
    makes = flags & os.O_CREAT
    flags = flags & ~os.O_CREAT | _SAFELY
    while True:
        if makes:
            with contextlib.suppress(FileExistsError):
                return os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
        try:
            fd = os.open(path, flags & ~os.O_TRUNC)
            break
        except FileNotFoundError:
            if not makes:  # else it is gone again
                raise
        except OSError as error:
            why = {errno.ELOOP: "is a symbolic link", errno.ENXIO: "is neither a file nor a folder"}.get(
                error.errno or 0
            )
            if why is None:
                raise
            raise NotAloneError(errno.EPERM, why, os.fspath(path)) from None
    try:
        why = doubt(os.fstat(fd), fd)
        if why:
            raise NotAloneError(errno.EPERM, why, os.fspath(path))
        if flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "File exists")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mark_ours(fd: int) -> None:
    """Mark an open file, which is never read or written where it stands. A program that closes all descriptors, as
    daemons do, gets the numbers of ours for files of its own."""
    os.lseek(fd, _OURS, os.SEEK_SET)


def is_ours(fd: int) -> bool:
    """Whether a descriptor is still that of a file that we marked. It takes a third of the time of `fstat`."""
    try:
        return os.lseek(fd, 0, os.SEEK_CUR) == _OURS
    except OSError as error:
        if error.errno is None:  # not the system's: the TimeoutError of a signal handler
            raise
        return False


def doubt_at(path: str | os.PathLike[str]) -> str:
    """Why others could change the file or folder at `path`, in words that follow its name; "" if they could not, or if
    there is nothing to be seen."""
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            return doubt_of_link(found) or doubt(os.stat(path), path)
        return doubt(found, path)
    except OSError:
        return ""


def doubt_of_database(path: str) -> str:
    """Why others could change the SQLite file at `path`, in words; "" if they could not.

    Who may write to its folder could put a journal there, which SQLite would play into the file.
    """
    for link in (path, os.path.realpath(path)) if os.path.islink(path) else (path,):
        folder = os.path.dirname(link) or "."
        why = doubt_at(folder)
        if why:
            return f"its folder {folder} {why}"
        for end in _BESIDE:
            why = doubt_at(link + end)
            if why:
                return f"{os.path.basename(link)}{end} {why}"
    return ""


def first_within(path: str | os.PathLike[str], ms: int) -> bool:
    """Whether nobody called this for `ms`, with a file at `path` to note it: for what one machine says now and then.

    A file of the future, by a clock that was wrong, notes nothing. Raises OSError.
    """
    fd = None
    try:
        with contextlib.suppress(FileNotFoundError):
            fd = open_alone(path, os.O_WRONLY)
        if fd is None:
            with contextlib.suppress(FileExistsError):  # another process says it
                fd = open_alone(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                return True
            return False
        with contextlib.suppress(OSError):  # a file system without locks: two may say it
            fcntl.flock(fd, fcntl.LOCK_EX)
        now_ms = time.time_ns() // 1_000_000
        if 0 <= now_ms - os.fstat(fd).st_mtime_ns // 1_000_000 < ms:
            return False
        os.utime(fd)
        return True
    finally:
        if fd is not None:
            os.close(fd)


def readable(path: str, flags: int) -> int:
    """Opens a file that others may read, as the umask allows: an `opener` for `open`."""
    return open_alone(path, flags, 0o644)
