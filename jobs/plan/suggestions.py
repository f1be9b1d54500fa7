"""The smallest changes of one setting that would make a schedule fit. A simulation verifies each.

The search tries the jobs that use most of the refusing limits: a longer interval, fewer pages, fewer regions, a larger
`max_units`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from quota.common.clock import elapsed_s
from quota.common.text import many
from quota.deciding.run_limit import LIMIT_NAME
from quota.jobs.job import Fetch
from quota.jobs.plan.simulation import Simulated, State, simulate
from quota.settings.model import JobSettings, Settings
from quota.settings.schedules import Every, parse_schedule
from quota.terms.limits import DAY_MS, MINUTE_MS, format_duration, of_jobs

MAX_JOBS = 5
"""The most jobs to try one by one: the jobs that use most. A binary search finds each of their changes, and each of its
simulations ends with the first refusal."""


class Change(NamedTuple):
    """One setting of one job, spelled as in the configuration."""

    job: str
    credential: str
    setting: str
    before: str
    after: str

    def sentence(self) -> str:
        """`searches: schedule = "every 103m" instead of "every 45m"`."""
        if self.setting == "regions":
            return f"{self.job}: {many(int(self.after), 'region')} instead of {self.before}"
        return f"{self.job}: {self.setting} = {self.after} instead of {self.before}"


SEARCH_WITHIN_S = 10.0
"""How long a plan looks for changes: many jobs over a month take seconds for each try."""


def smallest_changes(
    settings: Settings, outcome: Simulated, state: State, fetches: Mapping[str, Fetch]
) -> tuple[tuple[Change, ...], list[str]]:
    """The changes that would avoid the refusals of `outcome`, and a note on what could not be found."""
    ends_s = elapsed_s() + SEARCH_WITHIN_S
    cut = False

    def fits(job: JobSettings, setting: str, value: Any) -> bool:
        nonlocal cut
        cut = cut or elapsed_s() > ends_s
        if cut:
            return False
        tried = simulate(
            settings._replace(jobs={**settings.jobs, job.name: job._replace(**{setting: value})}),
            outcome.start_ms,
            outcome.until_ms,
            state=state,
            fetches=fetches,
            stops_at_refusal=True,
        )
        return not tried.refusals

    changes: list[Change] = []
    for job, wanted_units in _suspects(settings, outcome):
        ladders: dict[str, Sequence[Any]] = {
            "schedule": slower(job),
            "pages": range(job.pages - 1, 0, -1),
            "regions": [job.regions[:n] for n in range(len(job.regions) - 1, 0, -1)],
            "max_units": range(job.max_units + 1, wanted_units + 1) if job.max_units else (),
        }
        for setting, values in ladders.items():
            value_fits = partial(fits, job, setting)
            if values and value_fits(values[-1]):  # the values go from the smallest change to the largest
                smallest = values[bisect_left(values, True, hi=len(values) - 1, key=value_fits)]
                before, after = _spelled(getattr(job, setting)), _spelled(smallest)
                changes.append(Change(job.name, job.credential, setting, before, after))
    notes = []
    if cut:
        notes.append(f"the search for changes ended after {SEARCH_WITHIN_S:g} s; smaller ones may fit")
    elif not changes:
        notes.append("no single change of interval, pages, regions or max_units makes it fit")
    return tuple(changes), notes


def _suspects(settings: Settings, outcome: Simulated) -> list[tuple[JobSettings, int]]:
    """The jobs that use a refusing limit, with the units that they want of it; the jobs that use most come first."""
    own = {refusal.job for refusal in outcome.refusals if refusal.limit == LIMIT_NAME}
    full = {(settings.credentials[settings.jobs[r.job].credential].project, r.limit) for r in outcome.refusals}
    limits = {credential.project: credential.limits for credential in settings.credentials.values()}
    wants: Counter[str] = Counter()
    for wanted in outcome.wanted:
        if wanted.job in own or any(
            (wanted.project, limit.name) in full
            and limit.view.selector.counts(wanted.bucket, wanted.method, wanted.job)
            for limit in of_jobs(limits[wanted.project], settings.jobs)
        ):
            wants[wanted.job] += sum(wanted.units.values())
    return [(settings.jobs[name], units) for name, units in wants.most_common(MAX_JOBS) if units]


# -- ladders of changes ------------------------------------------------------------------------------------------------

_MINUTE_STEPS = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30)
_HOUR_STEPS = (1, 2, 3, 4, 6, 8, 12, 24)


def slower(job: JobSettings) -> list[str]:
    """Schedules of the same kind that start fewer ticks, the nearest first, down to one a day.

    Intervals are whole minutes. Cron lines have even steps of the hour and of the day, on the same days.
    """
    assert job.schedule is not None  # noqa: S101  # only scheduled jobs use a limit in a plan
    schedule = parse_schedule(job.schedule, job.timezone)
    if isinstance(schedule, Every):
        first = schedule.interval_ms // MINUTE_MS + 1
        return [f"every {format_duration(minutes * MINUTE_MS)}" for minutes in range(first, DAY_MS // MINUTE_MS + 1)]
    _, hours_text, *days = job.schedule.split()
    minute, hours = schedule.minutes[0], len(schedule.hours)
    steps = [step for step in _MINUTE_STEPS if minute < step]
    lines = [(f"{minute}-59/{step}" if minute else f"*/{step}", hours_text, 60 // step * hours) for step in steps]
    lines.append((str(minute), hours_text, hours))
    if hours_text == "*" or hours_text.startswith("*/"):
        spelled = {1: "*", 24: "0"}
        lines += [(str(minute), spelled.get(step, f"*/{step}"), 24 // step) for step in _HOUR_STEPS]
    else:
        lines.append((str(minute), str(schedule.hours[0]), 1))
    fewer: dict[int, str] = {}
    for minutes, of_day, count in lines:
        if count < len(schedule.minutes) * hours:
            fewer.setdefault(count, " ".join((minutes, of_day, *days)))
    return [fewer[count] for count in sorted(fewer, reverse=True)]


def _spelled(value: str | tuple[str, ...] | int) -> str:
    """A setting, spelled as in the configuration. Of regions, their number."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(len(value) if isinstance(value, tuple) else value)
