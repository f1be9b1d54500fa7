"""Contestants measured side by side, so that a machine that is slow for a while is slow for all of them.

A race has rounds. In each round every contestant makes a few calls, one contestant after the other, each round
beginning with another one. A round's figure is the median of its calls, so that a call during which the machine did
something else does not count; a contestant's ratio is the median over the rounds of its figure divided by the floor's
of the same round.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from time import perf_counter_ns


@dataclass(frozen=True)
class Contestant:
    """A name and one call of it. The first contestant of a race is its floor.

    `prepare` comes before its calls of each round, untimed. `time_calls` is for one whose calls happen in another
    process: it makes so many and gives the ns that each took there.
    """

    name: str
    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    time_calls: Callable[[int], list[int]] | None = None


@dataclass(frozen=True)
class Row:
    """What a contestant did. Ratios are to the floor of the race.

    `low` and `high` enclose eight of ten rounds. `mean` compares nearly all the time spent, with the calls that a
    median leaves out because they trim a log or write a checkpoint; only each contestant's worst rounds, one in twenty,
    are taken for the machine's and not counted.
    """

    name: str
    us: float
    ratio: float
    low: float
    high: float
    mean: float


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection of garbage falls into what is timed here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def pinned(choose: Callable[[set[int]], set[int]] = lambda cpus: {max(cpus)}) -> Iterator[bool]:
    """Keep this process and its children on one CPU, so that a call is the work and not the waking of another; or on
    those that `choose` takes. Whether the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield False
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, choose(before))
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)


def race(contestants: Sequence[Contestant], rounds: int, calls: int) -> list[Row]:
    """Run a race; its rows in the order of the contestants."""
    for contestant in contestants:
        for _ in range(min(rounds, max(2, calls // 4))):
            contestant.call()
    typical_ns: list[list[float]] = [[] for _ in contestants]
    mean_ns: list[list[float]] = [[] for _ in contestants]
    with uncollected():
        for number in range(rounds):
            first = number % len(contestants)
            for place in (*range(first, len(contestants)), *range(first)):
                contestant = contestants[place]
                if contestant.prepare is not None:
                    contestant.prepare()
                if contestant.time_calls is not None:
                    times_ns = contestant.time_calls(calls)
                else:
                    times_ns = time_calls(contestant.call, calls)
                typical_ns[place].append(median(times_ns))
                mean_ns[place].append(fmean(times_ns))
            gc.collect()
    return [
        _row(contestant.name, typical_ns[place], typical_ns[0], _calm_mean(mean_ns[place]) / _calm_mean(mean_ns[0]))
        for place, contestant in enumerate(contestants)
    ]


def time_calls(call: Callable[[], object], calls: int) -> list[int]:
    """The ns that each of so many calls takes."""
    times_ns = []
    for _ in range(calls):
        started_ns = perf_counter_ns()
        call()
        times_ns.append(perf_counter_ns() - started_ns)
    return times_ns


def _calm_mean(rounds_ns: list[float]) -> float:
    return fmean(sorted(rounds_ns)[: len(rounds_ns) - len(rounds_ns) // 20])


def _row(name: str, own_ns: list[float], floor_ns: list[float], mean: float) -> Row:
    ratios = [own / floor for own, floor in zip(own_ns, floor_ns, strict=True)]
    tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
    return Row(name, median(own_ns) / 1000, median(ratios), tenths[0], tenths[-1], mean)
