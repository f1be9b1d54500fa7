"""The smallest changes of one setting that would make a schedule fit. A simulation verifies each.

The search tries the jobs that use most of the refusing limits: a longer interval, fewer pages, fewer regions, a smaller
`leave`. If no change of a single job is enough, it tries the same change on all jobs of the credential.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, TypeVar

from quota.common.clock import elapsed_s
from quota.jobs.job import Fetch
from quota.jobs.plan.simulation import Simulated, State, pass_steps, prices_between, simulate
from quota.settings.model import JobSettings, Settings
from quota.settings.schedules import Cron, Every, parse_schedule
from quota.terms.limits import DAY_MS, MINUTE_MS, Limit, format_duration, of_jobs

MAX_JOBS = 5
"""The most jobs to try one by one: the jobs that use most. A binary search finds each of their changes, and each of its
simulations ends with the first refusal."""

T = TypeVar("T")


class Change(NamedTuple):
    """One setting of one job, or of all jobs of `credential` if `job` is None, spelled as in the configuration. If the
    schedules of these jobs differ, the setting is `ticks`: how many remain of how many."""

    job: str | None
    credential: str
    setting: str
    before: str
    after: str

    def sentence(self) -> str:
        """`searches: schedule = "every 103m" instead of "every 45m"`."""
        whose = self.job if self.job is not None else f"every job of {self.credential}"
        if self.setting in ("regions", "ticks"):
            setting = self.setting.removesuffix("s") if self.after == "1" else self.setting
            return f"{whose}: {self.after} {setting} instead of {self.before}"
        return f"{whose}: {self.setting} = {self.after} instead of {self.before}"


SEARCH_WITHIN_S = 10.0
"""How long a plan looks for changes: many jobs over a month take seconds for each try."""


@dataclass
class Search:
    """Looks for changes that would avoid the refusals of `outcome`."""

    settings: Settings
    outcome: Simulated
    state: State
    fetches: Mapping[str, Fetch]
    may_be_refused: Sequence[str]

    def __post_init__(self) -> None:
        self.ends_s, self.cut = elapsed_s() + SEARCH_WITHIN_S, False
        self.refused = {r.job for r in self.outcome.refusals if r.job not in self.may_be_refused}

    def smallest_changes(self) -> tuple[tuple[Change, ...], list[str]]:
        """The changes, and notes on what could not be found."""
        if changes := self.single():
            return tuple(changes), self._cut()
        if changes := self.together():
            return tuple(changes), self._cut() or ["no change of one job alone makes it fit"]
        return (), self._cut() or ["no single change of interval, pages, regions or leave makes it fit"]

    def _cut(self) -> list[str]:
        return [f"the search for changes ended after {SEARCH_WITHIN_S:g} s; smaller ones may fit"] if self.cut else []

    # -- the changes -------------------------------------------------------------------------------------------------

    def single(self) -> list[Change]:
        changes = []
        for job in self._suspects():
            ladders = {
                "schedule": [job._replace(schedule=text) for text in slower(job)],
                "pages": [job._replace(pages=pages) for pages in range(job.pages - 1, 0, -1)],
                "regions": [job._replace(regions=job.regions[:n]) for n in range(len(job.regions) - 1, 0, -1)],
                "leave": self._leaves(job),
            }
            for setting, changed in ladders.items():
                smallest = first_that_fits(changed, lambda candidate: self._fits([candidate]))
                if smallest is not None:
                    before, after = _spelled(job, setting), _spelled(smallest, setting)
                    changes.append(Change(job.name, job.credential, setting, before, after))
        return changes

    def together(self) -> list[Change]:
        """The same change for all jobs of the credential whose jobs are refused, if it is only one credential."""
        credentials = {self.settings.jobs[name].credential for name in self.refused}
        if len(credentials) != 1:
            return []
        (credential,) = credentials
        jobs = [job for job in self.settings.jobs.values() if job.credential == credential and job.schedule is not None]
        changes = []
        percent = first_that_fits(_PERCENTS, lambda percent: self._fits([_slowed(job, percent) for job in jobs]))
        if percent is not None:
            schedules = {(job.schedule, _slowed(job, percent).schedule) for job in jobs}
            if len(schedules) == 1:
                before, after = schedules.pop()
                changes.append(Change(None, credential, "schedule", f'"{before}"', f'"{after}"'))
            else:
                ticks, remaining = Fraction(percent, 100).as_integer_ratio()
                changes.append(Change(None, credential, "ticks", str(ticks), str(remaining)))
        most = max(job.pages for job in jobs)
        pages = first_that_fits(
            range(most - 1, 0, -1),
            lambda pages: self._fits([job._replace(pages=min(job.pages, pages)) for job in jobs]),
        )
        if pages is not None:
            changes.append(Change(None, credential, "pages", f"up to {most}", f"up to {pages}"))
        return changes

    def _suspects(self) -> list[JobSettings]:
        """The jobs that use a refusing limit; the jobs that use most come first."""
        settings = self.settings
        full = {(settings.credentials[settings.jobs[r.job].credential].project, r.limit) for r in self.outcome.refusals}
        limits = {credential.project: credential.limits for credential in settings.credentials.values()}
        wants: Counter[str] = Counter()
        for wanted in self.outcome.wanted:
            if any(
                (wanted.project, limit.name) in full
                and limit.view.selector.counts(wanted.bucket, wanted.method, wanted.job)
                for limit in of_jobs(limits[wanted.project], settings.jobs)
            ):
                wants[wanted.job] += sum(wanted.units.values())
        return [settings.jobs[name] for name, units in wants.most_common(MAX_JOBS) if units]

    def _leaves(self, job: JobSettings) -> list[JobSettings]:
        """The job with other numbers for `leave`: less for a refused job, more for one that may be refused."""
        main = self.settings.credentials[job.credential]
        limits = {limit.name: limit for limit in main.limits}
        if job.name in self.refused and any(job.leave.values()):
            highest = max(job.leave.values())
            return [
                job._replace(leave={name: min(units, highest - less) for name, units in job.leave.items()})
                for less in _steps(highest)
            ]
        if job.name in self.may_be_refused:
            bucket = main.book.main_bucket.name
            names = list(job.leave) or [
                x.name for x in main.limits if not (x.narrow or x.shadow) and bucket in x.view.selector.buckets
            ]
            held = [(limits[name], job.leave.get(name, 0)) for name in names]
            rooms = [limit.limit_units - left - self._dearest(job, limit) for limit, left in held]
            return [
                job._replace(leave={name: job.leave.get(name, 0) + more for name in names})
                for more in _steps(max(0, min(rooms, default=0)))
            ]
        return []

    def _dearest(self, job: JobSettings, limit: Limit) -> int:
        """The most that a limit counts for one call of a job during the plan. The limit must always have room for
        it."""
        book, selector = self.settings.credentials[job.credential].book, limit.view.selector
        steps = pass_steps(job, self.fetches[job.name])
        return max(
            sum(selector.cost(part.units) for part in price.parts if selector.counts(part.bucket, method, job.name))
            for method in {book.canonical(step.method) for step in steps}
            for price in prices_between(book, method, self.outcome.start_ms, self.outcome.until_ms)
        )

    # -- trying a change ---------------------------------------------------------------------------------------------

    def _fits(self, changed: Sequence[JobSettings]) -> bool:
        self.cut = self.cut or elapsed_s() > self.ends_s
        if self.cut:
            return False
        outcome = simulate(
            self.settings._replace(jobs={**self.settings.jobs, **{job.name: job for job in changed}}),
            self.outcome.start_ms,
            self.outcome.until_ms,
            state=self.state,
            fetches=self.fetches,
            stop_at_refusal=lambda name: name not in self.may_be_refused,
        )
        return outcome.refuses_only(self.may_be_refused)


def first_that_fits(candidates: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """The first of `candidates` that fits, by binary search. They go from the smallest change to the largest."""
    if not candidates or not fits(candidates[-1]):
        return None
    return candidates[bisect_left(candidates, True, hi=len(candidates) - 1, key=fits)]


# -- ladders of changes ------------------------------------------------------------------------------------------------

_PERCENTS = (125, 150, 200, 250, 300, 400, 500, 600, 800, 1_200, 1_600, 2_400)
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
    return [text for text, _ in _slower_crons(job.schedule, schedule)]


def _slower_crons(text: str, schedule: Cron) -> list[tuple[str, int]]:
    """Slower cron lines, each with its ticks per day."""
    _, hours_text, *days = text.split()
    minute, hours = schedule.minutes[0], len(schedule.hours)
    lines = [
        (" ".join((f"*/{step}" if not minute else f"{minute}-59/{step}", hours_text, *days)), 60 // step * hours)
        for step in _MINUTE_STEPS
        if minute < step
    ]
    lines.append((" ".join((str(minute), hours_text, *days)), hours))
    if hours_text == "*" or hours_text.startswith("*/"):
        for step in _HOUR_STEPS:
            every = {1: "*", 24: "0"}.get(step, f"*/{step}")
            lines.append((" ".join((str(minute), every, *days)), 24 // step))
    else:
        lines.append((" ".join((str(minute), str(schedule.hours[0]), *days)), 1))
    now = len(schedule.minutes) * hours
    fewer: dict[int, str] = {}
    for line, count in lines:
        if count < now:
            fewer.setdefault(count, line)
    return [(fewer[count], count) for count in sorted(fewer, reverse=True)]


def _slowed(job: JobSettings, percent: int) -> JobSettings:
    """The job with an interval of at least `percent` of its own, or the longest interval there is."""
    assert job.schedule is not None  # noqa: S101  # only scheduled jobs are slowed
    schedule = parse_schedule(job.schedule, job.timezone)
    if isinstance(schedule, Every):
        minutes = -(-schedule.interval_ms * percent // 100 // MINUTE_MS)
        return job._replace(schedule=f"every {format_duration(max(1, minutes) * MINUTE_MS)}")
    now = len(schedule.minutes) * len(schedule.hours)
    lines = _slower_crons(job.schedule, schedule)
    longest = lines[-1][0] if lines else job.schedule
    return job._replace(schedule=next((text for text, count in lines if count * percent <= now * 100), longest))


def _steps(units: int) -> list[int]:
    """Even steps up to and including `units`, at most about a thousand."""
    step = max(1, units // 1_000)
    return [*range(step, units, step), units] if units else []


def _spelled(job: JobSettings, setting: str) -> str:
    """A setting, spelled as in the configuration."""
    if setting == "schedule":
        return f'"{job.schedule}"'
    if setting == "regions":
        return str(len(job.regions))
    if setting == "leave":
        numbers = set(job.leave.values())
        if len(numbers) <= 1:
            return f"{max(numbers, default=0):_}"
        return "{ " + ", ".join(f'"{name}" = {units:_}' for name, units in job.leave.items()) + " }"
    return str(job.pages)
