"""The counts of this process. Every 10 s it adds them to the totals of all workers in the storage.

    Counts      the outcomes of requests
    Met         how many identities each window met, which gives the number of identities that are alive

A scrape reaches any worker, so the metrics come from the storage.
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
"""What became of a request. `shadowed`: a shadow rule would have refused it."""

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.025, 0.1, 0.25)
"""Upper bounds of the histogram of decision times. The last bucket has no bound."""

_TOOK = [f"took|{n}" for n in range(len(BUCKETS_S) + 1)]
_SUM_US = "took_us"


class Counts:
    """Counts that this process has not handed over yet. Safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, rule: str, outcome: Outcome, took_s: float) -> None:
        """Count a request, and how long its decision took."""
        request, took, took_us = f"requests|{rule}|{outcome}", _TOOK[bisect_left(BUCKETS_S, took_s)], int(took_s * 1e6)
        with self._lock:
            self._counts[request] += 1
            self._counts[took] += 1
            self._counts[_SUM_US] += took_us

    def hand_over(self, storage: Storage) -> None:
        """Add all counts to the storage's totals. After StorageAway, the rest stays here."""
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
    """The number of requests of one rule with one outcome."""

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
    """The number of decisions within each bound of BUCKETS_S, then of all decisions; and their sum in seconds."""
    counts = [totals.get(name, 0) for name in _TOOK]
    return [sum(counts[: n + 1]) for n in range(len(counts))], totals.get(_SUM_US, 0) / 1e6


# -- identities --------------------------------------------------------------------------------------------------------

Window = tuple[str, int, int]
"""A window of a rule: the rule's name, the window's length in ms, and the window's number."""


class Met:
    """How many identities each window counted for the first time. Safe in several threads.

    A window has two counts: new identities, and identities that the window before it had counted too.
    """

    def __init__(self) -> None:
        self._counts: dict[Window, list[int]] = {}
        self._lock = threading.RLock()  # a signal handler may note while its thread does

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, window: Window, *, was_before: bool) -> None:
        """The window met one more identity. `was_before`: the window before it had counted this identity."""
        with self._lock:
            self._counts.setdefault(window, [0, 0])[was_before] += 1
            if len(self._counts) >= MAX_TOTALS:  # this worker hands nothing over
                del self._counts[next(iter(self._counts))]

    @contextmanager
    def handed_over(self) -> Iterator[Mapping[Window, Sequence[int]]]:
        """The counts (new, counted before) by window. They are removed here, unless the block raises StorageAway."""
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
