"""What the page shows is read beside its requests, and kept: a slow ledger makes nobody wait, and one that is away does
not take the last state with it.

    Kept       one thing that is read again and again
    Reading    what it has: the value, when it was read, and since when reading it fails
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from quota.common.clock import host_clock
from quota.common.redact import redact
from quota.common.text import describe
from quota.errors import QuotaError

T = TypeVar("T")

FRESH_S = 1.0
TIMES = 20
"""A value is kept this many times as long as it took to read: so an open page costs at most 5% of a core."""

LONGEST_S = 60.0
AGAIN_S = 2.0
"""How long after a failure it is read again."""

FIRST_S = 3.0
"""How long a request waits where there is nothing to show yet, or nothing newer than OLD_S."""

OLD_S = 120.0


class Reading(NamedTuple, Generic[T]):
    """`value` is None until it was read once, at `read_ms`. While it cannot be read again, `error` says why and
    `failing_ms` since when."""

    value: T | None = None
    read_ms: int | None = None
    error: str | None = None
    failing_ms: int | None = None


class Kept(Generic[T]):
    """A value that `read` returns, dated by `clock`. One thread reads it at a time. `read` raises QuotaError."""

    def __init__(self, read: Callable[[], T], clock: Callable[[], int] = host_clock) -> None:
        self._read = read
        self._clock = clock
        self._changed = threading.Condition()
        self.last: Reading[T] = Reading()
        self._under_way = False
        self._due_s = 0.0  # of the monotonic clock
        self._read_s = 0.0
        self._took_s = 0.0

    def slow(self, patience_s: float) -> bool:
        """Whether reading it takes longer than that, so that what is there is shown."""
        return self.last.value is not None and self._took_s > patience_s

    def begin(self) -> None:
        """Begin to read it, if it is due."""
        with self._changed:
            if not self._under_way and time.monotonic() >= self._due_s:
                self._under_way = True
                try:
                    threading.Thread(target=self._read_once, name="quota-dashboard", daemon=True).start()
                except RuntimeError as error:  # no more threads can be started
                    self._keep(None, str(error), 0)

    def get(self, patience_s: float) -> Reading[T]:
        """What is there, or if it is due, what is read within `patience_s`."""
        self.begin()
        with self._changed:
            if self._under_way:
                old = time.monotonic() - self._read_s > OLD_S and self.last.error is None
                wait_s = max(patience_s, FIRST_S) if self.last.value is None or old else patience_s
                self._changed.wait_for(lambda: not self._under_way, wait_s)
            return self.last

    def _read_once(self) -> None:
        began_s = time.monotonic()
        value, error = None, None
        try:
            value = self._read()
        except QuotaError as wrong:
            error = str(wrong)
        except BaseException as wrong:  # the page goes on, and shows it
            error = describe(wrong)
        with self._changed:
            self._keep(value, error, time.monotonic() - began_s)

    def _keep(self, value: T | None, error: str | None, took_s: float) -> None:
        """End a reading that took `took_s`. The caller holds `_changed`."""
        last, now_ms = self.last, self._clock()
        if error is None:
            self.last = Reading(value, now_ms)
            self._read_s = time.monotonic()
            self._took_s = took_s
        else:
            failing_ms = now_ms if last.failing_ms is None else last.failing_ms
            self.last = Reading(last.value, last.read_ms, redact(error), failing_ms)
        keeps_s = min(max(FRESH_S, TIMES * took_s), LONGEST_S) if error is None else AGAIN_S
        self._due_s = time.monotonic() + keeps_s
        self._under_way = False
        self._changed.notify_all()
