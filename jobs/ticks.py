"""When the ticks of all jobs start. Pure: `quota schedule` runs by it, and `quota plan` looks ahead with it.

    Stream    a sequence of ticks: a job's, or with `stagger` those of one region
    Tick      one start: when, of which job, over which regions
    streams   the streams of the configured jobs
    ticks     their ticks between two times, in order
    crontab   lines for `crontab -e` that run the jobs instead: `quota schedule --crontab`

A tick starts at the time of its schedule, plus `stagger` times the position of its region, plus its jitter. The jitter
depends on the tick's name and time alone. So all machines compute the same start and know the tick by the same name,
and a plan predicts it to the millisecond.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import quota
from quota.common.clock import NEVER
from quota.common.text import many
from quota.settings.model import JobSettings, Settings, state_folder
from quota.settings.schedules import MAX_PAUSE_DAYS, Every, Schedule, parse_schedule
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, format_duration, load_zone


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
            # The jitter is less than the time until the next fire, so that no tick overtakes another. If the clock goes
            # forward, that time may be an hour shorter than the schedule says.
            most_ms = min(self.jitter_ms, following_ms - base_ms - 1)
            chosen = crc32(f"{self.job}\n{','.join(self.regions)}\n{base_ms}".encode())
            at_ms = base_ms + self.offset_ms + chosen % (most_ms + 1)
            if since_ms <= at_ms < until_ms:
                yield Tick(at_ms, self.job, self.regions)

    def after(self, at_ms: int) -> Tick:
        """The first tick later than `at_ms`."""
        # Try a day first: most schedules have a tick within it, and few need a search over years.
        spans = (1, 32, MAX_PAUSE_DAYS)
        return next(chain.from_iterable(self.ticks(at_ms + 1, at_ms + days * DAY_MS) for days in spans))


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


# -- lines for cron ----------------------------------------------------------------------------------------------------


def crontab(settings: Settings) -> Iterator[str]:
    """The lines, in the order of the jobs. For what cron cannot do, a comment says what to do. Raises ConfigError if no
    job has a schedule."""
    jobs = settings.jobs.values()
    if settings.path is None or all(job.schedule is None for job in jobs):
        raise quota.ConfigError(f'{settings.source}: no job has a schedule; add schedule = "*/30 * * * *" to one')
    yield "# Written by `quota schedule --crontab`. Paste it into `crontab -e`."
    yield f"QUOTA_CONFIG={settings.path.absolute()}"
    if os.environ.get("QUOTA_STATE_DIR") or os.environ.get("XDG_STATE_HOME"):
        yield f"QUOTA_STATE_DIR={state_folder()}"
    # The variables of the environment that hold secrets, or override keys of the file.
    refs = [ref for each in settings.credentials.values() for ref in (each.key_ref, each.auth_ref)]
    refs += [ref for _, ref in settings.ledger.secrets]
    refs += [job.ping_ref for job in jobs]
    refs += [settings.notify.url_ref] if settings.notify else []
    of_secrets = {ref.rpartition("env:")[2] for ref in refs if ref and "env:" in ref}
    if variables := sorted({*settings.variables.values(), *of_secrets}):
        yield "# Cron does not know the variables of your shell: set these here, or keep their values in files."
        yield from (f"# {variable}=..." for variable in variables)
    for job in jobs:
        yield ""
        yield from _lines(job)


def _lines(job: JobSettings) -> Iterator[str]:
    if job.schedule is None:
        yield f"# {job.name}: it has no schedule; give it one in quota.toml, or start it with `quota run`."
        return
    line = _cron_line(job.schedule)
    if line is None:
        yield f"# {job.name}: cron cannot run a job {job.schedule!r}; choose a cron line, or use `quota schedule`."
        return
    names_minutes_only = line.split()[1:] == ["*"] * 4
    # Cron fits if, all the year, the wall clock of the zone differs from this machine's by whole periods only.
    period = timedelta(hours=1) if names_minutes_only else timedelta(weeks=1)
    year, there = datetime.now(UTC).year, load_zone(job.timezone)
    days = [datetime(year, month, 1, 12, tzinfo=UTC) for month in range(1, 13)]
    walls = [(day.astimezone().replace(tzinfo=None), day.astimezone(there).replace(tzinfo=None)) for day in days]
    if any((here - wall) % period for here, wall in walls):
        yield f"# {job.name}: these times are in {job.timezone}, and cron goes by the zone of this machine."
        yield f"# Put CRON_TZ={job.timezone} above the line if your cron knows it (cronie); else change the times."
    in_one_run = f"the line fetches {many(len(job.regions), 'region')} in one run"
    for key, pause_ms, instead in (
        ("stagger", job.stagger_ms, in_one_run),
        ("jitter", job.jitter_ms, "it starts on time"),
    ):
        if pause_ms:
            text = format_duration(pause_ms)
            yield f"# {job.name}: cron has no {key} ({text}): {instead}; for the {key} use `quota schedule`."
    program = Path(sys.executable).with_name("quota")
    command = _escaped(str(program)) if program.exists() else f"{_escaped(sys.executable)} -m quota"
    name = _escaped(job.name)
    words = f"--quiet -- {name}" if job.name.startswith("-") else f"{name} --quiet"
    yield f"{line}  {command} run {words}"


def _cron_line(schedule: str) -> str | None:
    """A schedule as a line of cron; None for an interval that does not divide an hour or a day."""
    parsed = parse_schedule(schedule)
    if not isinstance(parsed, Every):
        return " ".join(schedule.split())
    if parsed.interval_ms == DAY_MS:
        return "0 0 * * *"
    for unit_ms, whole_ms, line in ((MINUTE_MS, HOUR_MS, "{} * * * *"), (HOUR_MS, DAY_MS, "0 {} * * *")):
        step, rest_ms = divmod(parsed.interval_ms, unit_ms)
        if not rest_ms and whole_ms % parsed.interval_ms == 0 and parsed.interval_ms < whole_ms:
            return line.format("*" if step == 1 else f"*/{step}")
    return None


def _escaped(text: str) -> str:
    """A word for cron's shell. Cron itself reads % as the end of the line."""
    return shlex.quote(text).replace("%", "\\%")
