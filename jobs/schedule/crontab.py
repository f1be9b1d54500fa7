"""Lines for `crontab -e` that run the jobs of a configuration: `quota schedule --crontab`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import quota
from quota.common.text import many
from quota.settings.folders import state_folder
from quota.settings.model import JobSettings, Settings
from quota.settings.schedules import Every, parse_schedule
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, format_duration, load_zone


def crontab(settings: Settings) -> Iterator[str]:
    """The lines, in the order of the jobs. What cron cannot do is a comment that says what to do. Raises ConfigError if
    no job has a schedule."""
    jobs = settings.jobs.values()
    if settings.path is None or all(job.schedule is None for job in jobs):
        raise quota.ConfigError(f'{settings.source}: no job has a schedule; add schedule = "*/30 * * * *" to one')
    yield "# Written by `quota schedule --crontab`. Put it into `crontab -e`."
    yield f"QUOTA_CONFIG={settings.path.absolute()}"
    if os.environ.get("QUOTA_STATE_DIR"):
        yield f"QUOTA_STATE_DIR={state_folder()}"
    for variable in _variables(settings):
        yield "# Cron does not know the variables of your shell: set this one here, or keep the secret in a file."
        yield f"# {variable}=..."
    for job in jobs:
        yield ""
        yield from _lines(job)


def _variables(settings: Settings) -> list[str]:
    """The variables of the environment that hold the secrets of credentials."""
    refs = [ref for each in settings.credentials.values() for ref in (each.key_ref, each.auth_ref) if ref]
    return sorted({ref.rpartition("env:")[2] for ref in refs if "env:" in ref})


def _lines(job: JobSettings) -> Iterator[str]:
    if job.schedule is None:
        yield f"# {job.name}: it has no schedule; give it one in quota.toml, or start it with `quota run`."
        return
    line = _cron_line(job.schedule)
    if line is None:
        yield f"# {job.name}: cron cannot run a job {job.schedule!r}; choose a cron line, or use `quota schedule`."
        return
    if not _same_everywhere(line) and not _is_local(job.timezone):
        yield f"# {job.name}: these times are in {job.timezone}, and cron goes by the zone of this machine."
        yield f"# Put CRON_TZ={job.timezone} above the line if your cron knows it (cronie); else change the hours."
    for key, pause_ms in (("stagger", job.stagger_ms), ("jitter", job.jitter_ms)):
        if pause_ms:
            text = format_duration(pause_ms)
            at_once = (
                f"it starts {many(len(job.regions), 'region')} at once" if key == "stagger" else "it starts on time"
            )
            yield f"# {job.name}: cron has no {key} ({text}): {at_once}; for the {key} use `quota schedule`."
    yield f"{line}  {_command()} run {_escaped(job.name)} --quiet"


def _cron_line(schedule: str) -> str | None:
    """A schedule as a line of cron; None for an interval that does not divide an hour or a day."""
    parsed = parse_schedule(schedule)
    if not isinstance(parsed, Every):
        return " ".join(schedule.split())
    for unit_ms, whole_ms, line in (
        (MINUTE_MS, HOUR_MS, "{} * * * *"),
        (HOUR_MS, DAY_MS, "0 {} * * *"),
        (DAY_MS, DAY_MS, "0 0 * * *"),
    ):
        if parsed.interval_ms % unit_ms == 0 and whole_ms % parsed.interval_ms == 0:
            step = parsed.interval_ms // unit_ms
            if parsed.interval_ms < whole_ms:
                return line.format("*" if step == 1 else f"*/{step}")
            if unit_ms == DAY_MS:
                return line
    return None


def _same_everywhere(line: str) -> bool:
    """Whether a line means the same in each zone: it names minutes only."""
    return line.split()[1:] == ["*"] * 4


def _is_local(zone: str) -> bool:
    """Whether a zone has the wall clock of this machine, all the year."""
    year, there = datetime.now(UTC).year, load_zone(zone)
    days = [datetime(year, month, 1, 12, tzinfo=UTC) for month in range(1, 13)]
    return all(day.astimezone().utcoffset() == day.astimezone(there).utcoffset() for day in days)


def _command() -> str:
    """This program, by its path."""
    program = Path(sys.executable).with_name("quota")
    if program.exists():
        return _escaped(str(program))
    return f"{_escaped(sys.executable)} -m quota"


def _escaped(text: str) -> str:
    """A word for cron's shell. Cron itself reads % as the end of the line."""
    return shlex.quote(text).replace("%", "\\%")
