"""Whom a window met: identities that it counts for the first time, noted here until the storage is told.

From these counts comes how many identities are alive. A storage adds them up over all workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from quota.errors import StorageAway
from quota.inbound.contract import MAX_TOTALS

Window = tuple[str, int, int]
"""A rule's window: the rule's name, the window's length in ms, and its number."""


class Met:
    """For each window two counts of identities: new ones, and those that the window before it knew. Safe to use from
    several threads.
    """

    def __init__(self) -> None:
        self._counts: dict[Window, list[int]] = {}
        self._lock = threading.RLock()  # a signal handler may note while its thread does

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, window: Window, *, was_before: bool) -> None:
        """This window met one more identity; `was_before`: the window before it knew that one."""
        with self._lock:
            self._counts.setdefault(window, [0, 0])[was_before] += 1
            if len(self._counts) >= MAX_TOTALS:  # nobody asks this worker
                del self._counts[next(iter(self._counts))]

    @contextmanager
    def handed_over(self) -> Iterator[Mapping[Window, Sequence[int]]]:
        """The counts (new, known before) by window, which are forgotten here unless StorageAway is raised within."""
        with self._lock:
            counts, self._counts = self._counts, {}
        try:
            yield counts
        except StorageAway:
            with self._lock:
                for window, (new, again) in counts.items():
                    kept = self._counts.setdefault(window, [0, 0])
                    kept[:] = [kept[0] + new, kept[1] + again]
            raise
