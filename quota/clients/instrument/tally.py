"""What the processes of one run spent. Each process keeps its numbers in a file, so a killed process counts, too."""

from __future__ import annotations

import os
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from quota.common.files import is_ours, mark_ours
from quota.common.fork import start_over_in_child

_WIDTH = 20
"""The digits of each number in the file."""


class Spent(NamedTuple):
    calls: int = 0
    units: int = 0
    refused: int = 0


class FileTally:
    """Counts what this process spends, in a file of this folder. A forked child has its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.start_over_in_child()
        start_over_in_child(self)

    def start_over_in_child(self) -> None:
        self._lock = RLock()
        self._spent = Spent()
        self._file: int | None = None

    def refused(self) -> None:
        self._add(0, 0, 1)

    def counts(self, calls: int, units: int) -> None:
        self._add(calls, units, 0)

    def _add(self, *more: int) -> None:
        with self._lock:
            self._spent = Spent(*map(sum, zip(self._spent, more, strict=True)))
            try:
                if self._file is None:
                    path = os.path.join(self._folder, f"{os.getpid()}-{os.urandom(4).hex()}")
                    self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    mark_ours(self._file)
                if is_ours(self._file):
                    os.pwrite(self._file, b"".join(b"%*d" % (_WIDTH, number) for number in self._spent), 0)
            except OSError:
                return  # the run that reads the file is over


def spent_in(folder: str) -> Spent:
    """What all processes of a run spent."""
    total = Spent()
    for path in Path(folder).iterdir():
        text = path.read_bytes()
        own = (int(text[at : at + _WIDTH] or 0) for at in (0, _WIDTH, 2 * _WIDTH))
        total = Spent(*map(sum, zip(total, own, strict=True)))
    return total
