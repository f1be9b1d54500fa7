"""Who could change a file or folder: this user and root alone, or somebody else.

    doubt            what is wrong with one file or folder
    doubt_of_path    the same for everything that a path leads through, and for the folder of what is found
    doubt_of_way     the same for everything that a path leads through alone

Others are: another owner, every user (`o+w`), or a group with somebody else in it. Groups of this process's own do not
count: its primary group, as with umask 002, and the group of a Kubernetes volume (`fsGroup`), which is one of its
supplementary groups and has nobody else. Nobody writes to what is mounted read-only, such as a ConfigMap, whose folder
has the mode 777.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat

from quota.common.text import one_line

NO_FILE = "is neither a file nor a folder"

MAX_LINKS = 40
"""As many symbolic links as Linux follows in one path."""

_ACL = "system.posix_acl_access"


def doubt(found: os.stat_result, path: int | str | os.PathLike[str], *, roots: bool = False) -> str:
    """Why others could change `found` at `path` (or an open file), in words that follow its name; "" if they could not.

    A folder may belong to root; a file only with `roots`. Nothing else than a file or a folder is sound.
    """
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return NO_FILE
    roots = roots or stat.S_ISDIR(found.st_mode)
    return _owned_by_another(found, roots=roots) or _writable_by_others(found, path)


def doubt_of_link(found: os.stat_result) -> str:
    """The same for a symbolic link, which is its owner's to change."""
    return f"is a link that {why}" if (why := _owned_by_another(found, roots=True)) else ""


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
        found = os.lstat(entry)
        why = "" if _is_unmapped(found.st_uid) else _owned_by_another(found, roots=True)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(0, "too many symbolic links")
            target = os.readlink(entry)
            at = "/" if target.startswith("/") else at
            todo += target.split("/")[::-1]
        else:
            at = entry
            if not found.st_mode & stat.S_ISVTX:
                why = why or _writable_by_others(found, entry)
        if why:
            return f"{one_line(entry)} {why}"
    why = doubt(os.lstat(at), at, roots=True)
    return f"{one_line(at)} {why}" if why else ""


def _owned_by_another(found: os.stat_result, *, roots: bool) -> str:
    me = os.geteuid()
    if found.st_uid == me or (roots and found.st_uid == 0):
        return ""
    return f"belongs to {user_name(found.st_uid)}, and this is {user_name(me)}"


def _writable_by_others(found: os.stat_result, path: int | str | os.PathLike[str]) -> str:
    why = ""
    if found.st_mode & stat.S_IWOTH:
        why = "can be written by every user"
    elif found.st_mode & stat.S_IWGRP:
        if _has_acl(path):
            why = "can be written by others: see getfacl"
        elif not _is_own_group(found.st_gid):
            why = f"can be written by the group {_group_name(found.st_gid)}"
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
    if members - {user_name(me), user_name(0)}:
        return False
    return gid == primary or all(one.pw_uid in (me, 0) for one in pwd.getpwall() if one.pw_gid == gid)


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
            known = [[int(field) for field in line.split()] for line in file]
        with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as file:
            shown = int(file.read())
    except (OSError, ValueError):
        return False
    return uid == shown and not any(first <= uid < first + count for first, _, count in known)


def user_name(uid: int) -> str:
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
