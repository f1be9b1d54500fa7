"""What this process counts until it hands that over to the storage, where it is added up over all workers.

    Counts      what became of the requests
    Met         whom each window met: from that comes how many identities are alive

A scrape meets any worker, so the numbers are read from the storage. A worker hands its own over every 10 s.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from quota.errors import StorageAway
from quota.inbound.contract import MAX_TOTALS, Storage

Outcome = Literal["admitted", "refused", "shadowed", "failed_open", "failed_closed"]
"""What became of a request; `shadowed`: refused by a rule that only watches."""

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.025, 0.1, 0.25)
"""Upper bounds of the times that decisions take. What takes longer is in a last one without a bound."""

_TOOK = [f"took|{n}" for n in range(len(BUCKETS_S) + 1)]
_SUM_US = "took_us"


class Counts:
    """What this process counted and has not handed over. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, rule: str, outcome: Outcome, took_s: float) -> None:
        """One request, and how long its decision took."""
        request, took, took_us = f"requests|{rule}|{outcome}", _TOOK[bisect_left(BUCKETS_S, took_s)], int(took_s * 1e6)
        with self._lock:
            self._counts[request] += 1
            self._counts[took] += 1
            self._counts[_SUM_US] += took_us

    def hand_over(self, storage: Storage) -> None:
        """Add everything to the storage's totals. Raises StorageAway, and then keeps what was not taken."""
        with self._lock:
            rest, self._counts = dict(self._counts), Counter()
        try:
            while rest:
                part = dict(list(rest.items())[:MAX_TOTALS])
                storage.add_totals(part)
                rest = {name: number for name, number in rest.items() if name not in part}
        finally:
            with self._lock:
                self._counts.update(rest)


class Requests(NamedTuple):
    """How many requests of one rule had one outcome."""

    rule: str
    outcome: str
    number: int


def requests_in(totals: Mapping[str, int]) -> Iterator[Requests]:
    """The requests in a storage's totals, sorted."""
    for name, number in sorted(totals.items()):
        kind, _, rest = name.partition("|")
        rule, _, outcome = rest.partition("|")
        if kind == "requests":
            yield Requests(rule, outcome, number)


def decision_times(totals: Mapping[str, int]) -> tuple[list[int], float]:
    """How many decisions took at most each of BUCKETS_S, then how many there were; and their sum in seconds."""
    counts = [totals.get(name, 0) for name in _TOOK]
    return [sum(counts[: n + 1]) for n in range(len(counts))], totals.get(_SUM_US, 0) / 1e6


# -- identities --------------------------------------------------------------------------------------------------------

Window = tuple[str, int, int]
"""A rule's window: the rule's name, the window's length in ms, and its number."""


class Met:
    """Identities that a window counts for the first time. Safe to use from several threads.

    Each window has two counts: new ones, and those that the window before it knew.
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
