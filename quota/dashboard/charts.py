"""The use of a limit over time, by job, with the forecast; and its shapes for an SVG.

    Event     one charge as a limit counts it
    Curve     the use of a limit over a span of time, from the charges that it counts
    Chart     a curve as the paths and labels that the template puts into an SVG

Pure: no ledger, no clock. Shapes are in a field of WIDTH x HEIGHT that the browser stretches. Text has places in
percent beside that field, so letters are never stretched.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate
from typing import NamedTuple

from quota.common.clock import local
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, Calendar, Window, cutoff

SAMPLES = 145
"""The number of past moments in a chart: for a day, one in 10 minutes."""

AHEAD_SAMPLES = 96
LEAST_AHEAD_MS = 3 * HOUR_MS


class Event(NamedTuple):
    """Units (or a call) of a job at `ms`."""

    ms: int
    units: int
    job: str


class Curve(NamedTuple):
    """Use at `times_ms`, the last of which is now, by job: each job has a number for each time. `ahead` is the
    forecast of later times, of all jobs together. A short window has its peaks there."""

    start_ms: int
    now_ms: int
    end_ms: int
    times_ms: tuple[int, ...]
    jobs: dict[str, tuple[int, ...]]
    ahead: tuple[tuple[int, int], ...]


def span(window: Window, now_ms: int, until_ms: int | None) -> tuple[int, int]:
    """The span of a chart: the period of a calendar limit; for any other limit the last day, and the time until
    `until_ms`, or one more day."""
    if isinstance(window, Calendar) and window.longest_ms > HOUR_MS:
        return window.edges(now_ms)
    latest_ms = now_ms + DAY_MS
    return now_ms - DAY_MS, latest_ms if until_ms is None else min(max(until_ms, now_ms + LEAST_AHEAD_MS), latest_ms)


def since(window: Window, now_ms: int) -> int:
    """The time of the first charge that a curve needs."""
    return cutoff(window, span(window, now_ms, None)[0]) + 1


def curve(
    window: Window,
    now_ms: int,
    until_ms: int | None,
    events: Sequence[Event],
    expected: Sequence[Event] = (),
    others: Sequence[tuple[int, int]] = (),
    known_ms: int | None = None,
    most_units: int | None = None,
) -> Curve:
    """The curve of a limit from the events that it counts, oldest first, and the events that are expected until
    `known_ms` (None: all). These never bring it above `most_units`: the forecast may be older than the charges.

    `others` are units that only upstream counted, each with the time until which they count. They are part of `ahead`.
    """
    start_ms, end_ms = span(window, now_ms, until_ms)
    past = [event for event in events if event.ms <= now_ms]
    times_ms = _peaks(window, [start_ms + (now_ms - start_ms) * n // (SAMPLES - 1) for n in range(SAMPLES)], past)
    by_job: dict[str, list[Event]] = {}
    for event in events:
        by_job.setdefault(event.job, []).append(event)
    jobs = {job: units for job, own in by_job.items() if any(units := _used(window, times_ms, own))}
    known_ms = end_ms if known_ms is None else max(now_ms + 1, min(end_ms, known_ms))
    last_ms = known_ms - 1  # at the reset a calendar limit starts from 0
    step_ms = max(1, (last_ms - now_ms) // AHEAD_SAMPLES)
    coming = sorted(event for event in expected if now_ms < event.ms < known_ms)
    later_ms = _peaks(window, [*range(now_ms, last_ms, step_ms), last_ms], coming)
    ahead = []
    for at_ms, used, added in zip(later_ms, *(_used(window, later_ms, of) for of in (past, coming)), strict=True):
        still = used + sum(of_others for of_others, until_ms in others if at_ms < until_ms)
        units = still + added
        ahead.append((at_ms, units if most_units is None else max(still, min(units, most_units))))
    return Curve(start_ms, now_ms, end_ms, times_ms, jobs, tuple(ahead))


def _peaks(window: Window, times_ms: Sequence[int], events: Sequence[Event]) -> tuple[int, ...]:
    """These times, if the window is no shorter than the time between them. Else, between the first and the last, the
    moments in between at which the window held most."""
    if window.longest_ms * len(times_ms) >= times_ms[-1] - times_ms[0]:
        return tuple(times_ms)
    peaks, held, oldest = [(0, at_ms) for at_ms in times_ms], 0, 0
    for event in events:
        held += event.units
        while events[oldest].ms <= event.ms - window.longest_ms:
            held -= events[oldest].units
            oldest += 1
        n = min(bisect_left(times_ms, event.ms), len(times_ms) - 2)
        peaks[n] = max(peaks[n], (held, event.ms))
    return (times_ms[0], *[at_ms for _, at_ms in peaks[1:-1]], times_ms[-1])


def _used(window: Window, times_ms: Sequence[int], events: Iterable[Event]) -> tuple[int, ...]:
    """The units that the window holds at each of these times."""
    ours = sorted(events, key=lambda event: event.ms)
    times, sums = [event.ms for event in ours], [0, *accumulate(event.units for event in ours)]
    return tuple(
        sums[bisect_right(times, at_ms)] - sums[bisect_right(times, cutoff(window, at_ms))] for at_ms in times_ms
    )


# -- shapes ------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 1000, 200
COLOURS = 6
"""The most jobs with a colour of their own; the others share one band."""

OTHERS = "others"
TALL = 0.11
"""A band needs this share of the height to show its name."""

EDGE = 3.0
"""A label nearer to either end would leave the chart, in percent."""

CHARACTER = 2.6
"""The width of a letter of a name, in percent of a narrow chart."""

_STEPS_MS = (15 * MINUTE_MS, HOUR_MS, 3 * HOUR_MS, 6 * HOUR_MS, DAY_MS, 7 * DAY_MS)
_MOST_TICKS = 9
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - of the local clock


class Band(NamedTuple):
    """The area of one job. `colour` is its number (0: the others together). `units` are the last of `past_units`, which
    are those at each time of the curve. `label_y` is the middle of its end in percent (None: no room for its name)."""

    job: str
    colour: int
    path: str
    units: int
    past_units: Sequence[int]
    label_y: float | None


class Tick(NamedTuple):
    """A place on an axis in percent, with its label. A narrow chart leaves out the `minor` ticks."""

    at: float
    label: str
    minor: bool = False


class Chart(NamedTuple):
    """A curve's shapes. Places are in percent: `now` and the `next` capacity across (None: outside the chart),
    the limit and the start of the forecast from the top."""

    bands: tuple[Band, ...]
    ahead: str
    ahead_begin: float
    ahead_end: float
    ahead_rises: bool
    ahead_falls: bool
    now: float
    limit_y: float
    times: tuple[Tick, ...]
    units: tuple[Tick, ...]
    next: float | None


def chart(curve: Curve, limit_units: int, colours: Mapping[str, int], next_ms: int | None) -> Chart:
    """The shapes of a curve. `colours` are numbers by job."""
    jobs = _grouped(curve, colours)
    totals = [sum(units[n] for _, _, units in jobs) for n in range(len(curve.times_ms))]
    ahead_units = [units for _, units in curve.ahead]
    top = max(limit_units, *totals, *ahead_units, 1) * 1.08
    span_ms = max(1, curve.end_ms - curve.start_ms)

    def x(at_ms: int) -> float:
        return round((at_ms - curve.start_ms) * 100 / span_ms, 2)

    def y(units: float) -> float:
        return round(100 - units * 100 / top, 2)

    xs = [_n(x(at_ms) * WIDTH / 100) for at_ms in curve.times_ms]
    below = [0] * len(xs)
    bands = []
    for job, colour, units in jobs:
        above = [low + own for low, own in zip(below, units, strict=True)]
        back = _line(xs[::-1], [y(edge) for edge in reversed(below)], begin="L")
        label_y = _label_y(job, below, above, top, x(curve.now_ms))
        bands.append(Band(job, colour, f"{_line(xs, map(y, above))}{back}Z", units[-1], units, label_y))
        below = above
    ahead = _line([_n(x(at_ms) * WIDTH / 100) for at_ms, _ in curve.ahead], [y(units) for units in ahead_units])
    return Chart(
        bands=tuple(bands),
        ahead=ahead,
        ahead_begin=y(ahead_units[0]),
        ahead_end=y(ahead_units[-1]),
        ahead_rises=ahead_units[len(ahead_units) // 3] > ahead_units[0],
        ahead_falls=ahead_units[-1] < ahead_units[0] - top * TALL,
        now=x(curve.now_ms),
        limit_y=y(limit_units),
        times=tuple(_times(curve, x)),
        units=tuple(_unit_ticks(limit_units, y, y(ahead_units[-1]))),
        next=x(next_ms) if next_ms is not None and curve.now_ms <= next_ms <= curve.end_ms else None,
    )


def _grouped(curve: Curve, colours: Mapping[str, int]) -> list[tuple[str, int, Sequence[int]]]:
    """Jobs with their colours and units, from the bottom of the stack to its top."""
    stack: list[tuple[str, int, Sequence[int]]]
    stack = [(job, colour, curve.jobs[job]) for job, colour in colours.items() if job in curve.jobs]
    rest = [units for job, units in curve.jobs.items() if job not in colours]
    if rest:
        stack.append((OTHERS, 0, [sum(of_job) for of_job in zip(*rest, strict=True)]))
    return stack


def colours_of(jobs: Iterable[str]) -> dict[str, int]:
    """A number for each of the first COLOURS jobs, which get a colour of their own."""
    return {job: n for n, job in enumerate(list(dict.fromkeys(jobs))[:COLOURS], 1)}


def _label_y(job: str, below: Sequence[int], above: Sequence[int], top: float, now: float) -> float | None:
    """The height of a band's name, which ends where the band ends; None if there is no room for it."""
    wide = (len(job or "no job") + 2) * CHARACTER * (len(below) - 1) / max(now, 1.0)
    first = len(below) - 1 - int(wide)
    if first < 0:
        return None
    low, high = max(below[first:]), min(above[first:])
    return round(100 - (low + high) * 50 / top, 2) if (high - low) / top >= TALL else None


def _line(xs: Sequence[str], ys: Iterable[float], begin: str = "M") -> str:
    """A path through points. It leaves out points on a level stretch."""
    heights = [_n(y * HEIGHT / 100) for y in ys]
    kept = [n for n in range(len(xs)) if n in (0, len(xs) - 1) or not heights[n - 1] == heights[n] == heights[n + 1]]
    return "".join(f"{begin if place == 0 else 'L'}{xs[n]} {heights[n]}" for place, n in enumerate(kept))


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _unit_ticks(limit_units: int, y: Callable[[float], float], ahead_end: float) -> Iterable[Tick]:
    """Round numbers below the limit, at most four, at the right edge. At the end of the forecast stands no label."""
    size = 10 ** (len(str(limit_units)) - 1)
    step = next(size * part // 10 for part in (2, 5, 10, 20, 50) if limit_units * 10 <= size * part * 4)
    step = max(1, step)
    for units in range(step, limit_units, step):
        at = y(units)
        hidden = -3 < ahead_end - at < 9 or at > 95
        if units <= limit_units * 0.9:
            yield Tick(at, "" if hidden else f"{units:,}")


def _times(curve: Curve, x: Callable[[int], float]) -> Iterable[Tick]:
    span_ms = curve.end_ms - curve.start_ms
    step_ms = next((step for step in _STEPS_MS if span_ms / step <= _MOST_TICKS), _STEPS_MS[-1])
    edge_ms = round(span_ms * EDGE / 100)
    for at_ms, n in _round(curve.start_ms + edge_ms, curve.end_ms - edge_ms, step_ms):
        at = local(at_ms)
        yield Tick(x(at_ms), f"{at.day} {at:%b}" if step_ms >= DAY_MS else f"{at:%H:%M}", bool(n % 2))


def _round(start_ms: int, end_ms: int, step_ms: int) -> Iterable[tuple[int, int]]:
    """Round times of the local clock, numbered, also if its offset changes in between. A time that spring skips is
    missing; of two equal times in autumn the first counts."""
    step = timedelta(milliseconds=step_ms)
    first, last = ((local(at_ms).replace(tzinfo=None) - _EPOCH) // step for at_ms in (start_ms, end_ms))
    for n in range(first, last + 1):
        wall = _EPOCH + n * step
        at_ms = round(wall.timestamp() * 1000)
        if start_ms <= at_ms <= end_ms and local(at_ms).replace(tzinfo=None) == wall:
            yield at_ms, n
