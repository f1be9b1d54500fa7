"""When the ticks of all jobs start. Pure: `quota schedule` runs by it, and `quota plan` looks ahead with it.

    Stream    a sequence of ticks: a job's, or with `stagger` those of one region
    Tick      one start: when, of which job, over which regions
    streams   the streams of the configured jobs
    ticks     their ticks between two times, in order

A tick starts at the time of its schedule, plus `stagger` times the position of its region, plus its jitter. The jitter
depends on the tick's name and time alone. So all machines compute the same start, agree on which of them runs the tick,
and a plan predicts it to the millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, pairwise
from typing import NamedTuple
from zlib import crc32

from quota.common.clock import NEVER
from quota.settings.model import JobSettings
from quota.settings.schedules import MAX_PAUSE_DAYS, Schedule, parse_schedule
from quota.terms.limits import DAY_MS


class Tick(NamedTuple):
    """One start. `regions` is what `run_job` is given: empty for all of the job's."""

    at_ms: int
    job: str
    regions: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name by which schedulers that share a ledger know this tick."""
        return f"tick:{self.job}:{','.join(self.regions)}:{self.at_ms}"


class Stream(NamedTuple):
    """A sequence of ticks. One tick runs at a time, and each starts `offset_ms` later than its schedule."""

    job: str
    regions: tuple[str, ...]
    schedule: Schedule
    offset_ms: int
    jitter_ms: int

    def ticks(self, since_ms: int, until_ms: int) -> Iterator[Tick]:
        """The ticks with since_ms <= at_ms < until_ms, in order."""
        # As far as another fire could matter to the last tick.
        since, until = since_ms - self.offset_ms - self.jitter_ms, until_ms - self.offset_ms + self.jitter_ms
        for base_ms, following_ms in pairwise(chain(self.schedule.fires(since, until), [NEVER])):
            at_ms = base_ms + self.offset_ms + self._jitter(base_ms, following_ms)
            if since_ms <= at_ms < until_ms:
                yield Tick(at_ms, self.job, self.regions)

    def after(self, at_ms: int) -> Tick:
        """The first tick later than `at_ms`."""
        # Try a day first: most schedules have a tick within it, and few need a search over years.
        for days in (1, 32, MAX_PAUSE_DAYS):
            tick = next(self.ticks(at_ms + 1, at_ms + days * DAY_MS), None)
            if tick is not None:
                return tick
        raise AssertionError("the configuration has a schedule that never fires")

    def _jitter(self, base_ms: int, following_ms: int) -> int:
        """Less than the time until the next fire, so that no tick overtakes another. If the clock goes forward, that
        time may be an hour shorter than the schedule says."""
        most_ms = min(self.jitter_ms, following_ms - base_ms - 1)
        return crc32(f"{self.job}\n{','.join(self.regions)}\n{base_ms}".encode()) % (most_ms + 1)


def streams(jobs: Iterable[JobSettings]) -> list[Stream]:
    """The streams of all jobs that have a schedule, in the order of the configuration and of each job's regions."""
    of_jobs = []
    for job in jobs:
        if job.schedule is None:
            continue
        schedule = parse_schedule(job.schedule, job.timezone)
        groups = [(region,) for region in job.regions] if job.stagger_ms and job.regions else [()]
        for position, regions in enumerate(groups):
            of_jobs.append(Stream(job.name, regions, schedule, position * job.stagger_ms, job.jitter_ms))
    return of_jobs


def ticks(jobs: Iterable[JobSettings], since_ms: int, until_ms: int) -> Iterator[Tick]:
    """Every tick of these jobs with since_ms <= at_ms < until_ms, by time, then in the configuration's order."""
    return merge(*(stream.ticks(since_ms, until_ms) for stream in streams(jobs)), key=lambda tick: tick.at_ms)
