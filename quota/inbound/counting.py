"""What became of the requests, counted in this process and handed over to totals that all workers share.

A scrape meets any worker, so the numbers are read from the storage. A worker hands its own over every 10 s.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

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
