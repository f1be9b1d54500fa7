"""Files and folders that this package makes, that a user names, and that ship with the package.

    make_folder           a folder, with its missing parents
    open_alone            a file of our own: made safely, or refused if other users could have made or changed it
    Opened                a descriptor, which knows whether it still belongs to its file
    first_within          whether no process of this machine did something for a while
    lack_of_room          why a file may not grow by so many bytes
    lacks_locks           whether a file system has no locks
    lacks_descriptors     whether this process may open no more files
    remedy_for            what to do about a failure of the system
    doubt                 why other users could change one file or folder
    doubt_at              the same for a path, which may lead to nothing
    doubt_of_database     the same for an SQLite file, with its folder and the files beside it
    doubt_of_path         the same for every folder and link on a path, and for the folder of its target
    doubt_of_way          the same for every folder and link on a path only
    read_named            a file from a configuration or an option: it may be anything, also a pipe
    read_text             a file that ships in the packages: a Lua script, a cost book, a schema

If other users may write to a folder, one of them may have put a link, a pipe or a file at a path that we use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import resource
import stat
from functools import partial
from importlib import import_module
from pathlib import Path

from quota.common.clock import host_clock
from quota.common.hosts import is_readable
from quota.common.text import one_line

_AT_ONCE = os.O_CLOEXEC | os.O_NONBLOCK
"""Do not wait for the other end of a pipe."""

# -- files of our own --------------------------------------------------------------------------------------------------


class NotAloneError(OSError):
    """The path is no file, or other users could have made or changed it. `strerror` is the reason, in words that follow
    the file's name."""


def make_folder(path: str | os.PathLike[str], mode: int = 0o700) -> None:
    """Make a folder and its missing parents, by default readable by this user alone. Existing folders stay as they are.

    `os.makedirs` applies its mode to the last folder only, and leaves the others to the umask. Raises OSError.
    """
    missing = [os.fspath(path)]
    while (above := os.path.dirname(missing[-1].rstrip(os.sep))) and not os.path.exists(above):
        missing.append(above)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
            _keep_own_rights(folder, mode)
        except FileExistsError:  # another process made it first, or it is no folder
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None


def _keep_own_rights(made: int | str, mode: int) -> None:
    """Give a new file or folder what the umask took from this user, who would not open it again."""
    given = stat.S_IMODE(os.stat(made).st_mode)
    if mode & stat.S_IRWXU & ~given:
        os.chmod(made, given | mode & stat.S_IRWXU)


def open_alone(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """As `os.open`, for a file of our own. The umask applies to `mode`.

    It makes a new file with O_EXCL. Raises NotAloneError for a link, a pipe, a folder, another user's file, or a file
    that other users may write; OSError for anything else.
    """
    makes = flags & os.O_CREAT
    flags = flags & ~os.O_CREAT | os.O_NOFOLLOW | _AT_ONCE
    while True:
        if makes:
            with contextlib.suppress(FileExistsError):
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
                _keep_own_rights(fd, mode)
                return fd
        try:
            fd = os.open(path, flags & ~os.O_TRUNC)
            break
        except FileNotFoundError:
            if not makes:  # else it is gone again
                raise
        except OSError as error:
            why = {errno.ELOOP: "is a symbolic link", errno.ENXIO: NO_FILE, errno.EISDIR: FOLDER}.get(error.errno or 0)
            if why is None:
                raise
            raise NotAloneError(errno.EPERM, why, os.fspath(path)) from None
    try:
        status = os.fstat(fd)
        why = FOLDER if stat.S_ISDIR(status.st_mode) else doubt(status, fd)
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


class Opened:
    """A descriptor and the identity of its file. A program that closes all descriptors, as daemons do, may open its own
    files under the same numbers. Closes the file when nobody refers to it any more, also after a signal handler has
    interrupted its user."""

    fd = -1
    _file = (0, 0)

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(fd)
        self._file = (status.st_dev, status.st_ino)

    def stat(self) -> os.stat_result | None:
        """The file's status; None if the file was deleted, or the descriptor now belongs to another file."""
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            if error.errno is None:  # not the system's: the TimeoutError of a signal handler
                raise
            return None
        return status if (status.st_dev, status.st_ino) == self._file and status.st_nlink else None

    def __del__(self) -> None:
        try:
            status = os.fstat(self.fd)
            if (status.st_dev, status.st_ino) == self._file:
                os.close(self.fd)
        except OSError:  # the program has closed it
            pass


def first_within(path: str | os.PathLike[str], span_ms: int) -> bool:
    """Whether no process called this with `path` for `span_ms`. The file at `path` has the time of the last call.

    A file from the future, by a wrong clock, does not count. Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.close(open_alone(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        return True
    fd = open_alone(path, os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: two processes may be first
            fcntl.flock(fd, fcntl.LOCK_EX)
        if 0 <= host_clock() - os.fstat(fd).st_mtime_ns // 1_000_000 < span_ms:
            return False
        os.utime(fd)
        return True
    finally:
        os.close(fd)


readable = partial(open_alone, mode=0o644)
"""Opens a file that other users may read, as the umask allows: an `opener` for `open`."""


_REMEDIES = {
    errno.ENOSPC: "make room on its disk (df, df -i)",
    errno.EDQUOT: "make room, or raise this user's disk quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOLCK: "use a file system that has locks",
}


LACKS_LIBRARY = "install the packages again, or run again after their upgrade"
"""What to do about an ImportError."""


def remedy_for(code: int | None, otherwise: str) -> str:
    """What to do about a failure of the system that is not the file's own."""
    return _REMEDIES.get(code or 0, otherwise)


def lack_of_room(path: str, needed_bytes: int) -> int:
    """Why a file may not grow by so much, or not be made: the system's code; 0 if it may, or if that is not known."""
    folder = os.path.dirname(path) or "."
    try:
        is_there = os.path.exists(path)
        size = os.path.getsize(path) if is_there else 0
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit != resource.RLIM_INFINITY and size + needed_bytes > limit:
            return errno.EFBIG
        disk = os.statvfs(folder)  # some file systems do not know how much they hold
        has_room = not disk.f_blocks or disk.f_bavail * disk.f_frsize >= needed_bytes
        has_inode = is_there or not disk.f_files or disk.f_favail > 0
        return 0 if has_room and has_inode else errno.ENOSPC
    except OSError:
        return 0


def lacks_locks(path: str) -> bool:
    """Whether the file system of this file has no locks. SQLite reports that as a lock of another process."""
    from tempfile import TemporaryFile  # imported late: few processes need it

    try:
        with TemporaryFile(dir=os.path.dirname(path) or ".") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.ENOLCK
    return False


def lacks_descriptors(number: int = 8) -> bool:
    """Whether this process may not open so many more files."""
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(number):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            return error.errno == errno.EMFILE
    return False


# -- who could change a file -------------------------------------------------------------------------------------------

# Other users are another owner, every user (`o+w`), or a group with another member. A group of this process alone does
# not count: its primary group, as with umask 002, or a supplementary group without other members, such as that of a
# Kubernetes volume (`fsGroup`). No user writes to a read-only mount, such as a ConfigMap, whose folder has mode 777.

NO_FILE, FOLDER = "is neither a file nor a folder", "is a folder"

MAX_LINKS = 40
"""The number of symbolic links that Linux follows in one path."""

_ACL = "system.posix_acl_access"

_BESIDE = ("", "-journal", "-wal", "-shm")
"""The endings of an SQLite file and of the files that SQLite makes and trusts beside it."""


def doubt(status: os.stat_result, path: int | str | os.PathLike[str], *, roots: bool = False) -> str:
    """Why other users could change the file or folder with this `status`, in words that follow its name; "" if they
    could not.

    A folder may belong to root, and with `roots` a file too. Anything else than a file or folder is in doubt.
    """
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return NO_FILE
    roots = roots or stat.S_ISDIR(status.st_mode)
    return _owned_by_another(status, roots=roots) or _writable_by_others(status, path)


def doubt_at(path: str | os.PathLike[str]) -> str:
    """Why other users could change the file or folder at `path`, in words that follow its name; "" if they could not,
    or if there is nothing."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            why = _owned_by_another(status, roots=True)
            return f"is a link that {why}" if why else doubt(os.stat(path), path)
        return doubt(status, path)
    except OSError:
        return ""


def doubt_of_database(path: str) -> str:
    """Why other users could change the SQLite file at `path`, or why it is no file, in words; "" if all is well.

    A user who may write to its folder could put a journal there, which SQLite would play into the file.
    """
    for link in (path, os.path.realpath(path)) if os.path.islink(path) else (path,):
        folder = os.path.dirname(link) or "."
        why = doubt_at(folder)
        if why:
            return f"its folder {folder} {why}"
        for end in _BESIDE:
            why = FOLDER if os.path.isdir(link + end) else doubt_at(link + end)
            if why:
                return f"{os.path.basename(link)}{end} {why}"
    return ""


def doubt_of_path(path: str | os.PathLike[str]) -> str:
    """Why other users could replace the file at `path`, or put something beside it; "" if they could not.

    Every folder and link on the way counts: a user who may rename it may replace everything below. In a folder such as
    /tmp (mode 1777) no user renames another user's files, so it may be on the way, but not hold the file. Raises
    OSError.
    """
    absolute = os.path.abspath(path)
    return doubt_of_way(os.path.dirname(absolute)) or doubt_of_way(absolute)


def doubt_of_way(path: str | os.PathLike[str]) -> str:
    """Why other users could replace `path`, in words; "" if they could not. Raises OSError."""
    at, links = "/", 0
    todo = os.path.abspath(path).split("/")[::-1]
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
            group = str(status.st_gid)
            with contextlib.suppress(KeyError):  # it has no name
                group = grp.getgrgid(status.st_gid).gr_name
            why = f"can be written by the group {group}"
    if why and os.statvfs(path).f_flag & os.ST_RDONLY:
        return ""
    return why


def _is_own_group(gid: int) -> bool:
    """Whether this process is in the group, and no other user is known to be."""
    me, primary = os.geteuid(), os.getegid()
    if gid != primary and gid not in os.getgroups():
        return False
    try:
        members = set(grp.getgrgid(gid).gr_mem)
    except KeyError:  # the group has no name, as in most containers
        members = set()
    if members - {_user_name(me), _user_name(0)}:
        return False
    return gid == primary or all(user.pw_uid in (me, 0) for user in pwd.getpwall() if user.pw_gid == gid)


def _has_acl(path: int | str | os.PathLike[str]) -> bool:
    """Whether the group's bits are the mask of a list with further users and groups."""
    try:
        return bool(os.getxattr(path, _ACL))
    except (AttributeError, OSError):  # not on Linux, or there is no list
        return False


def _is_unmapped(uid: int) -> bool:
    """Whether a user namespace shows unknown owners by this id, such as the root outside of it."""
    if uid in (0, os.geteuid()):
        return False
    try:
        ranges = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
        mapped = [[int(field) for field in line.split()] for line in ranges]
        overflow_uid = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return uid == overflow_uid and not any(first <= uid < first + count for first, _, count in mapped)


def _user_name(uid: int) -> str:
    """The name of a user, for people."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# -- files that a user names -------------------------------------------------------------------------------------------

WRITER_WITHIN_MS = 5_000
"""How long to wait until a process writes to a pipe."""


def read_named(path: str | os.PathLike[str], at_most: int) -> bytes:
    """The first `at_most` bytes of a file, or of what a shell's `<(...)` hands over.

    Raises OSError, also for a pipe that no process writes to: a run would hang. Raises ValueError for a name with a
    NUL.
    """
    with open(path, "rb", opener=at_once) as file:
        kind = os.fstat(file.fileno()).st_mode
        if stat.S_ISFIFO(kind) and not is_readable(file.fileno(), WRITER_WITHIN_MS):
            try:
                os.read(file.fileno(), 1)  # there is no byte to lose
            except BlockingIOError:
                pass  # a process has opened it, and takes a while
            else:
                raise OSError(errno.EPIPE, "it is a pipe that nobody writes to")
        if not stat.S_ISREG(kind):
            os.set_blocking(file.fileno(), True)
        return file.read(at_most)


def at_once(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file without waiting for the other end of a pipe: an `opener` for `open`."""
    return os.open(path, flags | _AT_ONCE)


# -- files that ship ---------------------------------------------------------------------------------------------------

# They lie in folders. `importlib.resources` reads them from zip files too, and takes 3% of a cold `quota charge`.


def read_text(package: str, name: str) -> str:
    """The text of a file of the package, for example `read_text("quota.lua", "charge.lua")`."""
    return path_of(package, name).read_text(encoding="utf-8")


def list_names(package: str, folder: str, ending: str) -> list[str]:
    """The names of the files with this ending in a folder of the package, without it, sorted."""
    files = path_of(package, folder).iterdir()
    return sorted(file.name.removesuffix(ending) for file in files if file.name.endswith(ending))


def path_of(package: str, name: str) -> Path:
    """The path of a file of the package, for programs that read it themselves."""
    return Path(import_module(package).__path__[0], name)
