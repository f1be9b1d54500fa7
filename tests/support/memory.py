"""Temporary folders in memory, so that a slow disk delays no test.

SQLite waits for the disk in the middle of a commit, and a disk that another process fills can make it wait for
seconds. What the tests show does not need a disk; the few that look at file systems have the mark `on_disk`.
With TMPDIR set everything lies there.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOM_BYTES = 4 << 30
"""So much has to be free; a run takes a tenth of it."""

MEMORY = Path("/dev/shm")  # noqa: S108

_PREFIX = "quota-tests-"


def use() -> str:
    """Lay the temporary folders of this process, and of those that it starts, in memory if there is room. Where they
    lay before."""
    usual = os.environ.get("QUOTA_TEST_DISK")
    if usual is not None:  # a worker of xdist: its parent has done it
        return usual
    usual = tempfile.gettempdir()
    if "TMPDIR" not in os.environ and _has_room():
        _remove_left_overs()
        _hold(tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY))
        os.environ["QUOTA_TEST_DISK"] = usual
    return usual


def _has_room() -> bool:
    try:
        system = os.statvfs(MEMORY)
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return False
    forbidden = getattr(os, "ST_NOEXEC", 0) | getattr(os, "ST_RDONLY", 0)
    free = min(system.f_bavail * system.f_frsize, available)
    return free >= ROOM_BYTES and not system.f_flag & forbidden and os.access(MEMORY, os.W_OK | os.X_OK)


def _hold(folder: str) -> None:
    """Hold the lock until this process ends, however it ends."""
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # it is to look again
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_overs() -> None:
    """Remove the folders of killed runs. A new folder without a lock is about to get one."""
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_mtime > time.time() - 60:
                continue
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
