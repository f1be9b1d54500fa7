"""The high-water marks of this process: one for each file, for all its users, with few files open at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from quota.ledger.contract import Ledger
from quota.ledger.identity import Identity
from quota.recovery.high_water_mark import HighWaterMark
from quota.recovery.watermark_folder import watermark_path

MAX_FILES = 100
"""The most of their files that are open in a process. It may use thousands of projects; some systems allow it 256
files."""

END_WITHIN_S = 0.05
"""How long the end of a process waits for its ledger, for all its projects together."""

_in_use: dict[str, tuple[HighWaterMark, int]] = {}
"""By path, each with the number of its users."""

_with_file: dict[HighWaterMark, None] = {}
"""Those whose file is open, in the order in which they opened it."""

_lock = threading.RLock()  # a signal handler may open a session while its thread does


def open_high_water_mark(folder: Path, identity: Identity, label: str) -> HighWaterMark:
    """The high-water mark of an identity in a state folder, whose ledger is at `label`. All of this process that ask
    for it share it. Give it back with `close_high_water_mark`."""
    path = watermark_path(folder, identity)
    with _lock:
        mark, users = _in_use.get(path) or (
            HighWaterMark(
                path, identity.project, label=label, configuration=identity.ledger, opened=_close_those_before
            ),
            0,
        )
        _in_use[path] = mark, users + 1
        return mark


def close_high_water_mark(mark: HighWaterMark) -> None:
    """Give back what `open_high_water_mark` gave; the last one to do so frees its slot."""
    path = mark.path
    with _lock:
        if path not in _in_use:
            return
        _, users = _in_use[path]
        _in_use[path] = mark, users - 1
        if users > 1:
            return
    mark.close()  # while others still find it here: two descriptors of one file have one lock between them
    with _lock:
        if _in_use.get(path) == (mark, 0):
            del _in_use[path]
            _with_file.pop(mark, None)


def end_all(marks: Iterable[HighWaterMark], ledger: Ledger) -> None:
    """`end` each of one ledger, all within END_WITHIN_S. What is not read by then, a later decision reads: its process
    goes on from the slices that this one wrote."""
    ends_s = time.monotonic() + END_WITHIN_S
    for mark in marks:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        mark.end(ledger, left_s)


def _close_those_before(opened: HighWaterMark) -> None:
    """Where too many files are open, close those that were opened first, as if their processes had ended. The next
    decision about their projects opens them again."""
    with _lock:
        _with_file.pop(opened, None)
        _with_file[opened] = None
        for other in list(islice(_with_file, max(0, len(_with_file) - MAX_FILES))):
            if other.close_if_idle():
                del _with_file[other]
