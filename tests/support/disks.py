"""A disk of a few kilobytes, and nothing left on it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int, files: int = 0) -> Iterator[None]:
    """A file system of this size at `folder`, for so many files (0: any number). Only root may mount one."""
    folder.mkdir(exist_ok=True)
    options = f"size={kilobytes}k,nr_inodes={files},mode=755"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system of one's own can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def without_temporary_folder(folder: Path) -> tuple[str, ...]:
    """The words before a command that can write only `folder`, of all where temporary files may be."""
    script = """for place in /tmp /var/tmp /dev/shm; do mount --bind $place $place; done; mount --bind "$0" "$0"
        for place in /tmp /var/tmp /dev/shm; do mount -o remount,bind,ro $place; done; cd /proc; exec "$@" """
    words = ("unshare", "--mount", "sh", "-ec", script, str(folder))
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no file system of one's own can be mounted here")
    return words


def fill(folder: Path) -> Path:
    """Take all the space that is left; the file that takes it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65_536, 4_096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast
