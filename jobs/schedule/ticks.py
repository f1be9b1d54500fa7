"""Which tick of which job starts when. Pure: what `quota schedule` will do and what `quota plan` says it will.

    Stream    one line of ticks: a job, or with `stagger` one region of it
    Tick      one start: when, of which job, over which regions
    streams   the streams of the configured jobs
    ticks     their ticks over a span, in order

A tick starts at its schedule's time, plus the region's place times the job's `stagger`, plus the tick's jitter. That is
drawn from the tick's own name and time and not from a generator: every machine draws the same, so that they can agree
who runs the tick, and a plan foretells it to the millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import merge
from typing import TYPE_CHECKING
from zlib import crc32

from quota.limits import DAY_MS
from quota.settings.schedules import MAX_PAUSE_DAYS, parse_schedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from quota.settings.model import JobSettings
    from quota.settings.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Tick:
    """One start. `regions` is what `run_job` is given: empty for all of the job's."""

    at_ms: int
    job: str
    regions: tuple[str, ...]

    @property
    def name(self) -> str:
        """What schedulers that share a ledger know this tick by."""
        return f"tick:{self.job}:{','.join(self.regions)}:{self.at_ms}"


@dataclass(frozen=True, slots=True)
class Stream:
    """A line of ticks that never runs beside itself. `offset_ms` is how much later than its schedule it starts."""

    job: str
    regions: tuple[str, ...]
    schedule: Schedule
    offset_ms: int
    jitter_ms: int

    def ticks(self, since_ms: int, until_ms: int) -> Iterator[Tick]:
        """The ticks with since_ms <= at_ms < until_ms, in order.

        The configuration keeps jitter shorter than the time between two fires, so that none overtakes another.
        """
        since = since_ms - self.offset_ms
        for base_ms in self.schedule.fires(since - self.jitter_ms, until_ms - self.offset_ms):
            at_ms = base_ms + self.offset_ms + self._jitter(base_ms)
            if since_ms <= at_ms < until_ms:
                yield Tick(at_ms, self.job, self.regions)

    def after(self, at_ms: int) -> Tick:
        """The first tick later than `at_ms`."""
        # A day at a time to begin with: most schedules answer within the first, and few need to look for years.
        for days in (1, 32, MAX_PAUSE_DAYS):
            found = next(self.ticks(at_ms + 1, at_ms + days * DAY_MS), None)
            if found is not None:
                return found
        raise AssertionError("a schedule that never fires was let into the configuration")

    def _jitter(self, base_ms: int) -> int:
        if not self.jitter_ms:
            return 0
        return crc32(f"{self.job}\n{','.join(self.regions)}\n{base_ms}".encode()) % (self.jitter_ms + 1)


def streams(jobs: Iterable[JobSettings]) -> list[Stream]:
    """The streams of all jobs that have a schedule, in the order of the configuration and of each job's regions."""
    found = []
    for job in jobs:
        if job.schedule is None:
            continue
        schedule = parse_schedule(job.schedule, job.timezone)
        groups = [(region,) for region in job.regions] if job.stagger_ms and job.regions else [()]
        for checkpoint, regions in enumerate(groups):
            found.append(Stream(job.name, regions, schedule, checkpoint * job.stagger_ms, job.jitter_ms))
    return found


def ticks(jobs: Iterable[JobSettings], since_ms: int, until_ms: int) -> Iterator[Tick]:
    """Every tick of these jobs with since_ms <= at_ms < until_ms, by time, then in the configuration's order."""
    return merge(*(stream.ticks(since_ms, until_ms) for stream in streams(jobs)), key=lambda tick: tick.at_ms)
