"""Files and folders: those that this package makes, those that somebody names, and those that are shipped with it.

    make_folder           a folder, with its missing parents
    open_alone            a file of our own: made safely, or refused where others could have made or changed it
    is_ours               whether a descriptor is still the one that `mark_ours` has marked
    first_within          whether nobody of this machine did something for a while
    doubt                 why others could change one file or folder
    doubt_at              the same for what is at a path, or nothing
    doubt_of_database     the same for an SQLite file, with its folder and the files beside it
    doubt_of_path         the same for everything that a path leads through, and for the folder of what it leads to
    doubt_of_way          the same for everything that a path leads through alone
    read_named            a file that somebody named in a configuration or an option: it may be anything, a pipe too
    read_text             a file that is shipped inside the packages: a Lua script, a cost book, a schema

Where others may write, somebody may have put a link, a pipe or a file of theirs at a path that we are about to use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
from importlib import import_module
from pathlib import Path
from select import POLLIN, poll

from quota.common.clock import host_clock
from quota.common.text import one_line

_AT_ONCE = os.O_CLOEXEC | os.O_NONBLOCK
"""Wait for nobody at the other end of a pipe."""

# -- files of our own --------------------------------------------------------------------------------------------------

_OURS = 0x51_4C_4F_31


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
    flags = flags & ~os.O_CREAT | os.O_NOFOLLOW | _AT_ONCE
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
        if 0 <= host_clock() - os.fstat(fd).st_mtime_ns // 1_000_000 < ms:
            return False
        os.utime(fd)
        return True
    finally:
        if fd is not None:
            os.close(fd)


def readable(path: str, flags: int) -> int:
    """Opens a file that others may read, as the umask allows: an `opener` for `open`."""
    return open_alone(path, flags, 0o644)


# -- who could change them ---------------------------------------------------------------------------------------------

# This user and root alone, or somebody else: another owner, every user (`o+w`), or a group with somebody else in it.
# Groups of this process's own do not count: its primary group, as with umask 002, and the group of a Kubernetes volume
# (`fsGroup`), which is one of its supplementary groups and has nobody else. Nobody writes to what is mounted read-only,
# such as a ConfigMap, whose folder has the mode 777.

NO_FILE = "is neither a file nor a folder"

MAX_LINKS = 40
"""As many symbolic links as Linux follows in one path."""

_ACL = "system.posix_acl_access"

_BESIDE = ("", "-journal", "-wal", "-shm")
"""An SQLite file, and those that SQLite makes and believes beside it."""


def doubt(status: os.stat_result, path: int | str | os.PathLike[str], *, roots: bool = False) -> str:
    """Why others could change what has this `status`, in words that follow its name; "" if they could not.

    A folder may belong to root; a file only with `roots`. Nothing else than a file or a folder is sound.
    """
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return NO_FILE
    roots = roots or stat.S_ISDIR(status.st_mode)
    return _owned_by_another(status, roots=roots) or _writable_by_others(status, path)


def doubt_at(path: str | os.PathLike[str]) -> str:
    """Why others could change the file or folder at `path`, in words that follow its name; "" if they could not, or if
    there is nothing to be seen."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            why = _owned_by_another(status, roots=True)
            return f"is a link that {why}" if why else doubt(os.stat(path), path)
        return doubt(status, path)
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


def doubt_of_path(path: str | os.PathLike[str]) -> str:
    """Why others could make the file at `path` another one, or put something beside it; "" if they could not.

    Every folder and link on the way counts: a user who may rename one may replace all below. In a folder such as /tmp
    (mode 1777) nobody renames what is somebody else's, so one may be on the way, but not hold the file. Raises OSError.
    """
    absolute = os.path.abspath(path)
    return _walk(os.path.dirname(absolute)) or _walk(absolute)


def doubt_of_way(path: str | os.PathLike[str]) -> str:
    """Why others could put something else in the place of `path`, in words; "" if they could not. Raises OSError."""
    return _walk(os.path.abspath(path))


def _walk(absolute: str) -> str:
    at, links = "/", 0
    todo = absolute.split("/")[::-1]
    while todo:
        name = todo.pop()
        if name == "..":
            at = os.path.dirname(at)
        if name in ("", ".", ".."):
            continue
        entry = os.path.join(at, name)
        status = os.lstat(entry)
        why = "" if _is_unmapped(status.st_uid) else _owned_by_another(status, roots=True)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(0, "too many symbolic links")
            target = os.readlink(entry)
            at = "/" if target.startswith("/") else at
            todo += target.split("/")[::-1]
        else:
            at = entry
            if not status.st_mode & stat.S_ISVTX:
                why = why or _writable_by_others(status, entry)
        if why:
            return f"{one_line(entry)} {why}"
    why = doubt(os.lstat(at), at, roots=True)
    return f"{one_line(at)} {why}" if why else ""


def _owned_by_another(status: os.stat_result, *, roots: bool) -> str:
    me = os.geteuid()
    if status.st_uid == me or (roots and status.st_uid == 0):
        return ""
    return f"belongs to {_user_name(status.st_uid)}, and this is {_user_name(me)}"


def _writable_by_others(status: os.stat_result, path: int | str | os.PathLike[str]) -> str:
    why = ""
    if status.st_mode & stat.S_IWOTH:
        why = "can be written by every user"
    elif status.st_mode & stat.S_IWGRP:
        if _has_acl(path):
            why = "can be written by others: see getfacl"
        elif not _is_own_group(status.st_gid):
            why = f"can be written by the group {_group_name(status.st_gid)}"
    if why and os.statvfs(path).f_flag & os.ST_RDONLY:
        return ""
    return why


def _is_own_group(gid: int) -> bool:
    """Whether this process is in the group, and nobody else is known to be."""
    me, primary = os.geteuid(), os.getegid()
    if gid != primary and gid not in os.getgroups():
        return False
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:  # it has no name, as in most containers
        members = set()
    if members - {_user_name(me), _user_name(0)}:
        return False
    return gid == primary or all(user.pw_uid in (me, 0) for user in pwd.getpwall() if user.pw_gid == gid)


def _has_acl(path: int | str | os.PathLike[str]) -> bool:
    """Whether the group's bits are the mask of a list with further users and groups."""
    try:
        return bool(os.getxattr(path, _ACL))
    except (AttributeError, OSError):  # not on Linux, or there is none
        return False


def _is_unmapped(uid: int) -> bool:
    """Whether this is how a user namespace shows owners that it does not know: root's outside, for one."""
    if uid in (0, os.geteuid()):
        return False
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            mapped = [[int(field) for field in line.split()] for line in file]
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as file:
            overflow_uid = int(file.read())
    except (OSError, ValueError):
        return False
    return uid == overflow_uid and not any(first <= uid < first + count for first, _, count in mapped)


def _user_name(uid: int) -> str:
    """The name of a user, for people."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# -- files that somebody names -----------------------------------------------------------------------------------------

WRITER_WITHIN_MS = 5_000
"""How long a pipe is given until somebody writes to it."""


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


# -- files that are shipped --------------------------------------------------------------------------------------------

# They lie in folders. `importlib.resources` reads them from zip files too, and takes 3% of a cold `quota charge`.


def read_text(package: str, name: str) -> str:
    """The text of a shipped file, for example `read_text("quota.lua", "charge.lua")`."""
    return _folder(package).joinpath(name).read_text(encoding="utf-8")


def list_names(package: str, folder: str) -> list[str]:
    """The names of the files in a shipped folder."""
    return [path.name for path in _folder(package).joinpath(folder).iterdir()]


def path_of(package: str, name: str) -> Path:
    """Where a shipped file lies, for programs that read it themselves."""
    return _folder(package).joinpath(name)


def _folder(package: str) -> Path:
    return Path(import_module(package).__path__[0])
