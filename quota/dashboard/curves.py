"""How much of a limit was used at each moment, by job, and how much the schedule will use. Pure: no ledger, no clock.

Event     one charge as a limit counts it
Curve     the use of a limit over a span of time
curve     the curve of a limit from the charges that it counts
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Window, cutoff

SAMPLES = 145
"""The number of past moments that are shown: one in 10 minutes of a day."""

AHEAD_SAMPLES = 96
LEAST_AHEAD_MS = 3 * HOUR_MS


class Event(NamedTuple):
    """Units (or a call) of a job at `ms`."""

    ms: int
    units: int
    job: str


class Curve(NamedTuple):
    """Use at `times_ms`, the last of which is now, by job: each job has a number for each time. `ahead` is the use that
    is expected at later times, of all jobs together, as far as that is known."""

    start_ms: int
    now_ms: int
    end_ms: int
    times_ms: tuple[int, ...]
    jobs: dict[str, tuple[int, ...]]
    ahead: tuple[tuple[int, int], ...]


def span(window: Window, now_ms: int, until_ms: int | None) -> tuple[int, int]:
    """The span of time that is shown: the period of a calendar limit; of any other the last day, and what comes until
    `until_ms`, or for a day."""
    if isinstance(window, Calendar) and window.longest_ms > HOUR_MS:
        return window.edges(now_ms)[:2]
    latest_ms = now_ms + DAY_MS
    return now_ms - DAY_MS, latest_ms if until_ms is None else min(max(until_ms, now_ms + LEAST_AHEAD_MS), latest_ms)


def since(window: Window, now_ms: int) -> int:
    """The first moment whose charges a curve needs."""
    return cutoff(window, span(window, now_ms, None)[0]) + 1


def curve(
    window: Window,
    now_ms: int,
    until_ms: int | None,
    events: Sequence[Event],
    expected: Sequence[Event] = (),
    others: Sequence[tuple[int, int]] = (),
    known_ms: int | None = None,
) -> Curve:
    """The curve of a limit from what it counts, oldest first, and from what is expected until `known_ms` (None: all).

    `others` are units that only upstream has counted, each with the time until which they count. They are in what is
    ahead.
    """
    start_ms, end_ms = span(window, now_ms, until_ms)
    past_ms = now_ms - start_ms
    times_ms = tuple(start_ms + past_ms * n // (SAMPLES - 1) for n in range(SAMPLES))
    series: dict[str, list[int]] = {}
    held: dict[str, int] = {}
    first = last = 0
    for n, at_ms in enumerate(times_ms):
        after_ms = cutoff(window, at_ms)
        while last < len(events) and events[last].ms <= at_ms:
            held[events[last].job] = held.get(events[last].job, 0) + events[last].units
            last += 1
        while first < last and events[first].ms <= after_ms:
            held[events[first].job] -= events[first].units
            first += 1
        for job, units in held.items():
            if job not in series:
                series[job] = [0] * SAMPLES
            series[job][n] = units
    known_ms = end_ms if known_ms is None else max(now_ms + 1, min(end_ms, known_ms))
    ahead = _ahead(window, now_ms, known_ms, events, expected, others)
    jobs = {job: tuple(units) for job, units in series.items() if any(units)}
    return Curve(start_ms, now_ms, end_ms, times_ms, jobs, ahead)


def _ahead(
    window: Window,
    now_ms: int,
    end_ms: int,
    events: Sequence[Event],
    expected: Sequence[Event],
    others: Sequence[tuple[int, int]],
) -> tuple[tuple[int, int], ...]:
    coming = [one for one in expected if now_ms < one.ms < end_ms]
    ours = sorted([*(one for one in events if one.ms <= now_ms), *coming], key=lambda one: one.ms)
    times, sums = [one.ms for one in ours], [0, *accumulate(one.units for one in ours)]

    def used(at_ms: int) -> int:
        counted = sums[bisect_right(times, at_ms)] - sums[bisect_right(times, cutoff(window, at_ms))]
        return counted + sum(units for units, until_ms in others if at_ms < until_ms)

    last_ms = end_ms - 1  # at the reset itself a calendar limit has begun anew
    step_ms = max(1, (last_ms - now_ms) // AHEAD_SAMPLES)
    moments = [*range(now_ms, last_ms, step_ms), last_ms]
    return tuple((at_ms, used(at_ms)) for at_ms in moments)
