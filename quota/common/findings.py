"""The findings of `quota check` and `quota doctor`: each is a verdict on one thing, with the remedy.

This module also examines folders: their file system, their owner, and their free space.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from quota.common.files import doubt_at
from quota.common.redact import redact
from quota.common.text import one_line

Level = Literal["error", "warning", "ok"]

LEVELS: tuple[Level, ...] = ("error", "warning", "ok")
"""The most urgent level first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One verdict: its place, its message and, unless it is `ok`, the remedy.

    An `error` makes work fail or spends too much; a `warning` may be intended.
    """

    level: Level
    location: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.location}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def warning(location: str, message: str, remedy: str = "") -> Finding:
    """A finding that may be intended."""
    return Finding("warning", location, message, remedy)


def problem(location: str, message: str, remedy: str = "") -> Finding:
    """A finding that makes work fail or spends too much."""
    return Finding("error", location, message, remedy)


def finding_of(level: Level, location: str, error: object, remedy: str = "") -> Finding:
    """The finding for an error that says "what is wrong; what to do". `remedy` is for an error without one."""
    message, _, own_remedy = redact(str(error)).partition("; ")
    return Finding(level, location, message, own_remedy or remedy)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then the rest; otherwise in the order given."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


# -- folders -----------------------------------------------------------------------------------------------------------

MOUNTS = "/proc/self/mountinfo"
"""Linux lists its mounts here. On other systems, the file systems are not known."""

IN_MEMORY = frozenset(("tmpfs", "ramfs", "rootfs"))
"""A restart empties these."""

NETWORK = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3"),
        *(f"fuse.{name}" for name in ("ceph", "davfs", "gcsfuse", "glusterfs", "rclone", "s3fs", "sshfs")),
    )
)
"""Locks may not hold between the machines that mount these."""

_EFFECTIVE = os.access in os.supports_effective_ids

LITTLE_BYTES, TOO_LITTLE_BYTES = 100_000_000, 10_000_000


def examine_folder(
    location: str, folder: str | os.PathLike[str], holds: str, mounts: str = MOUNTS, *, alone: bool = True
) -> Iterator[Finding]:
    """The findings about a folder that `holds` something, or would be made: at least one finding.

    `alone`: other users must not be able to write there.
    """
    if prevented := _obstacle(os.fspath(folder), is_folder=True):
        yield problem(location, *prevented)
        return
    there, name = existing(os.path.realpath(folder)), one_line(folder)
    findings = []
    if alone and there == os.path.realpath(folder) and (why := doubt_at(there)):
        remedy = "make it this user's alone (chown, chmod), or name another folder"
        findings.append(problem(location, f"{name} {why}: nothing in it is used", remedy))
    kind = file_system(there, mounts)
    if kind in IN_MEMORY:
        message = f"{name} is on {kind}: a restart forgets {holds}"
        findings.append(warning(location, message, "move it to a disk that lasts"))
    elif kind in NETWORK:
        message = f"{name} is on {kind}, where locks may not hold: {holds} may be damaged"
        findings.append(warning(location, message, "move it to a local disk"))
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < LITTLE_BYTES:
        level: Level = "error" if free_bytes < TOO_LITTLE_BYTES else "warning"
        message = f"{name}: {free_bytes / 1e6:,.1f} MB are free on its disk"
        findings.append(Finding(level, location, message, f"free {LITTLE_BYTES // 1_000_000} MB there"))
    yield from findings or [Finding("ok", location, f"{name}, {free_bytes / 1e9:,.1f} GB free")]


def obstacle(path: str, *beside: str) -> tuple[str, str] | None:
    """Why this user could not write the file at `path` and the files whose names add `beside`, or make them with their
    parent folders; and the remedy. By default the path is of an SQLite file, and the others are those that SQLite
    keeps. The caller names the path."""
    names = [path + ending for ending in ("", *(beside or ("-wal", "-shm")))]
    return next(filter(None, (_obstacle(name, shown=path) for name in names)), None)


def _obstacle(path: str, *, shown: str = "", is_folder: bool = False) -> tuple[str, str] | None:
    there = existing(os.path.abspath(path))
    is_file = there == os.path.abspath(path) and not is_folder
    name = "it" if is_file and path == shown else one_line(there)
    try:
        inode = os.stat(there).st_ino
        if not is_file and not os.path.isdir(there):
            return f"{name} is no folder", "correct the path"
        if os.access(there, os.W_OK if is_file else os.W_OK | os.X_OK, effective_ids=_EFFECTIVE):
            return None
        is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        if os.stat(there).st_ino != inode:  # another process has just deleted it, and made it again
            return None
    except OSError:
        if os.path.islink(there):  # as where what it names is not mounted
            return f"{name} is a link to nothing", "make what it names, or correct the path"
        return None  # another process has just deleted it
    if is_read_only:
        return f"{name} is on a read-only file system", "remount it so that it can be written"
    return f"this user may not write to {name}", "correct the path, or its owner or mode"


def file_system(path: str | os.PathLike[str], mounts: str = MOUNTS) -> str:
    """The type of the file system that holds `path`, or would hold it; "" if it is not known."""
    path = os.path.realpath(path)
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        holds_it = f"{path}/".startswith(f"{point.rstrip('/')}/")
        if holds_it and len(point) >= len(best):  # the later of two mounts hides the other
            best, kind = point, after.split(" ")[0]
    return kind


def is_mounted_alone(path: str, mounts: str = MOUNTS) -> bool:
    """Whether a mount leads to the file at `path`, and not to its folder; False if that is not known."""
    spelled = re.sub(r"[ \t\n\\]", lambda special: f"\\{ord(special[0]):03o}", path)
    try:
        return f" {spelled} " in Path(mounts).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False


def existing(path: str) -> str:
    """The path, or the nearest folder above it that exists."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
