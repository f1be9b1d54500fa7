"""Whether the configured schedule fits the budget. `make_plan` simulates it; `plan_parts` words the answer.
`look_ahead` says what one run would cost, and how much of it fits now: it sends nothing and writes nothing.

    Plan        the answer: the use of each limit hour by hour, the refusals, and changes that would make it fit
    LimitPlan   one limit: how much of it the schedule needs, and its days
    Ahead       the calls of one run

A schedule fits if no tick is refused. Refusals that come only from current spending or a closed bucket do not count
against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from itertools import accumulate
from typing import Literal, NamedTuple
from zoneinfo import ZoneInfo

from quota.cli.output import takes_unicode
from quota.common.clock import moment, rfc3339, stamp, utc
from quota.common.text import listed, many, members, spell
from quota.decision import Decision
from quota.errors import UsageError
from quota.jobs.fetches import WALKS
from quota.jobs.job import (
    Away,
    Fetch,
    NotImported,
    attempt_of,
    check_job,
    fetch_to_look_at,
    regions_of,
    sink_to_look_at,
)
from quota.jobs.places import checkpoints_of
from quota.jobs.plan import simulation
from quota.jobs.plan.simulation import EMPTY, SLOT_MS, JobPlan, RefusedTick, Simulated, SlotSums, State, simulate
from quota.jobs.plan.suggestions import Change, smallest_changes
from quota.jobs.store.checkpoints import Checkpoint, by_rotation, in_round
from quota.jobs.store.store import Store
from quota.reports.runs import stands_out
from quota.reports.status import held_to
from quota.rules.spent import spent as charges_in
from quota.rules.total import total_of
from quota.session import Session
from quota.settings.model import CredentialSettings, JobSettings, Settings
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, leaves_at, of_jobs
from quota.wording import Line, Part, Table, Tone

DEFAULT_DAYS = 7
MAX_DAYS = 92


class DayPlan(NamedTuple):
    """One day of one limit in its zone. `hours` are the units (or calls) used in each of its 23 to 25 hours.

    `left_units` is what remains at the end of the day. It is None for a shadow, if the limit's window is not a day, or
    if the plan ends before the day does. `dry_ms` is when the limit first refused a tick that day.
    """

    start_ms: int
    hours: tuple[int, ...]
    used_units: int
    left_units: int | None
    refused_ticks: int
    dry_ms: int | None


class LimitPlan(NamedTuple):
    """One limit. `needs_units` is the most that the ticks of any 24 hours, or of a calendar limit's days, would use if
    nothing were refused. `enforced_units` is the number at the beginning, which is lower than configured if upstream
    grants less."""

    project: str
    limit: Limit
    zone: str
    needs_units: int
    enforced_units: int
    days: tuple[DayPlan, ...]


class Plan(NamedTuple):
    """The answer. `outcome` has what would be charged and refused. Each of the `changes` alone makes the schedule fit;
    see `quota.jobs.plan.suggestions`. `held_up_ms` is the time of the last refusal of a schedule that fits, because of
    current spending or a closed bucket; None if it has none."""

    outcome: Simulated
    fits: bool
    limits: tuple[LimitPlan, ...]
    jobs: tuple[JobPlan, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    held_up_ms: int | None

    def as_json(self) -> dict[str, object]:
        """The plan as `quota plan --json` prints it."""
        return {
            "from": rfc3339(self.outcome.start_ms),
            "until": rfc3339(self.outcome.until_ms),
            "fits": self.fits,
            "ticks": sum(job.ticks for job in self.jobs),
            "refused_ticks": sum(job.refused_ticks for job in self.jobs),
            "refused_regions": sum(job.refused_regions for job in self.jobs),
            "limits": [
                {
                    "project": row.project,
                    "window": row.limit.view.window.name,
                    **members(row.limit, "name limit_units paced shadow"),
                    "enforced_units": row.enforced_units,
                    "needs_units_per_day": row.needs_units,
                    "days": [
                        {"from": rfc3339(day.start_ms), "hours": list(day.hours)}
                        | members(day, "used_units left_units refused_ticks dry_at")
                        for day in row.days
                    ],
                }
                for row in self.limits
            ],
            "jobs": [
                {"job": job.name, "passes": job.passes}
                | members(job, "ticks refused_ticks refused_regions first_refused_at first_refused_by")
                for job in self.jobs
            ],
            "changes": [change._asdict() for change in self.changes],
            "notes": list(self.notes),
        }


def make_plan(
    settings: Settings,
    now_ms: int,
    *,
    days: int | None = None,
    first_day: date | Literal["next"] | None = None,
    state: State = EMPTY,
    find_changes: bool = True,
    progress: Callable[[int], None] = lambda ticks: None,
) -> Plan:
    """Simulate the schedule from `now_ms` to the end of the day and over `days` whole days, by upstream's calendar; by
    default over DEFAULT_DAYS, or until each limit has had a whole window.

    With `first_day` it begins at that day's midnight instead, or at the next one. The schedule fits even if jobs are
    refused, if that is only because of the `state`. `progress` is that of `simulate`. Raises UsageError for too many
    days. Also raises ConfigError and UsageError if a run of one of the jobs would.
    """
    if days is not None and not 1 <= days <= MAX_DAYS:
        raise UsageError(f"--days {days}: choose 1 to {MAX_DAYS} days")
    zone = next(iter(settings.credentials.values())).book.zone
    calendar = Calendar("day", zone)
    start_ms = calendar.edges(now_ms)[1] if first_day == "next" else now_ms
    if isinstance(first_day, date):
        midnight = datetime(first_day.year, first_day.month, first_day.day, tzinfo=ZoneInfo(zone))
        start_ms = int(midnight.timestamp()) * 1000
    # A plan that begins at midnight covers whole days only. Any other plan also covers the rest of its first day.
    until_ms = start_ms if calendar.edges(start_ms)[0] == start_ms else calendar.edges(start_ms)[1]
    windows = _whole_windows(settings, start_ms)
    through_all_ms = max((end_ms for _, end_ms in windows), default=start_ms)
    least_ms = through_all_ms if days is None else start_ms
    for _ in range(days or DEFAULT_DAYS):
        until_ms = calendar.edges(until_ms)[1]
    while until_ms < least_ms:
        until_ms = calendar.edges(until_ms)[1]
    fetches = {job.name: fetch_to_look_at(settings, job) for job in settings.jobs.values()}
    for job in settings.jobs.values():
        check_job(settings, job)
        with suppress(NotImported):
            sink_to_look_at(settings, job)

    outcome = simulate(settings, start_ms, until_ms, state=state, fetches=fetches, progress=progress)
    alone = outcome  # the outcome as if nothing were spent yet
    if outcome.refusals and state != EMPTY:
        whole_ms, lasting = max(until_ms, through_all_ms), state.lasting(until_ms)
        alone = simulate(settings, start_ms, whole_ms, state=lasting, fetches=fetches, progress=progress)
    fits = not alone.refusals
    held_up_ms = outcome.refusals[-1].at_ms if fits and outcome.refusals else None
    changes: tuple[Change, ...] = ()
    notes = [*_notes(settings, fetches), *(f"in the last 7 days {row}" for row in stands_out(state.bought))]
    if fits and (cut := dict.fromkeys(name for name, end_ms in windows if end_ms > until_ms)):
        notes.append(f"too short to judge, because no whole window is in the plan: {', '.join(cut)}; leave --days out")
    if not fits and find_changes:
        changes, more = smallest_changes(settings, alone, state.lasting(until_ms), fetches)
        notes += more
    return Plan(
        outcome=outcome,
        fits=fits,
        limits=tuple(_limit_plans(settings, outcome, state)),
        jobs=tuple(outcome.jobs[job.name] for job in settings.jobs.values() if job.schedule is not None),
        changes=changes,
        notes=tuple(notes),
        held_up_ms=held_up_ms,
    )


def _whole_windows(settings: Settings, start_ms: int) -> list[tuple[str, int]]:
    """The name of each limit, and the first time by which a whole window of it has passed since `start_ms`."""
    windows = []
    for credential in settings.credentials.values():
        for limit in credential.limits:
            window = limit.view.window
            begins_ms = window.edges(start_ms - 1)[1] if isinstance(window, Calendar) else start_ms
            windows.append((limit.name, leaves_at(window, begins_ms)))
    return windows


def _zone(credential: CredentialSettings, limit: Limit) -> str:
    """The zone in which the days of a limit begin: the zone of its window, otherwise upstream's."""
    book = credential.book
    windows = [limit.view.window, *(book.buckets[name].window for name in limit.view.selector.buckets)]
    return next((window.zone for window in windows if isinstance(window, Calendar)), book.zone)


def _notes(settings: Settings, fetches: Mapping[str, Fetch]) -> Iterator[str]:
    """Assumptions of the plan that a reader might not expect."""
    jobs = settings.jobs.values()
    machines = max(map(settings.machines_of, jobs), default=1)
    silent = [job.name for job in jobs if attempt_of(fetches[job.name], None) is None]
    assumptions = {
        "not in the plan, because they have no schedule": [job.name for job in jobs if job.schedule is None],
        f"counted {machines} times, for as many machines as `unavailable` names": [
            job.name for job in jobs if settings.machines_of(job) > 1
        ],
        "counted as one call of the default price per page (no @first_attempt)": silent,
        "counted as one call of their first method per page": [
            job.name for job in jobs if _calls_others(job) and job.name not in silent
        ],
    }
    for assumption, names in assumptions.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield f"{assumption}: {', '.join(names[:5])}{more}"


def _calls_others(job: JobSettings) -> bool:
    """Whether a page of the job may take calls of other methods than its first one, which no plan knows."""
    return ":" in job.fetch or job.fetch in WALKS


def _limit_plans(settings: Settings, outcome: Simulated, state: State) -> Iterable[LimitPlan]:
    projects = {credential.project: credential for credential in settings.credentials.values()}
    project_of = {job.name: settings.credentials[job.credential].project for job in settings.jobs.values()}
    for project, credential in projects.items():
        spent = [*outcome.spent, *_before(project, state)]
        for limit in of_jobs(credential.limits, (job for job, of in project_of.items() if of == project)):
            refusals = [r for r in outcome.refusals if r.limit == limit.name and project_of[r.job] == project]
            needs = _needs(limit, _counted(limit, project, outcome.wanted))
            holds = held_to(limit, state.facts_of(project).grants, outcome.start_ms)
            row = LimitPlan(project, limit, _zone(credential, limit), needs, holds, ())
            days = _days(row, _counted(limit, project, spent), refusals, outcome, state)
            yield row._replace(days=tuple(days))


def _before(project: str, state: State) -> list[SlotSums]:
    """The charges of the live log, which are older than the plan."""
    rows: dict[tuple[str, str, str], SlotSums] = {}
    for charge in charges_in(state.entries.get(project, ())):
        key = (charge.bucket, charge.method, charge.job)
        spent = rows.setdefault(key, SlotSums(project, *key))
        spent.add(charge.id[0] // SLOT_MS, charge.units, min(charge.units, 1))
    return list(rows.values())


def _counted(limit: Limit, project: str, spent: Iterable[SlotSums]) -> dict[int, int]:
    """The part of `spent` that a limit counts: units or calls, by slot."""
    selector = limit.view.selector
    total: Counter[int] = Counter()
    for row in spent:
        if row.project == project and selector.counts(row.bucket, row.method, row.job):
            total.update(row.calls if selector.count == "calls" else row.units)
    return total


def _needs(limit: Limit, slots: Mapping[int, int]) -> int:
    """The most units of any 24 hours, or of a calendar limit's days."""
    window, of_a_day = limit.view.window, DAY_MS // SLOT_MS
    if isinstance(window, Calendar):
        calendar, days = Calendar("day", window.zone), Counter[int]()
        for slot, units in slots.items():
            days[calendar.edges(slot * SLOT_MS)[0]] += units
        return max(days.values(), default=0)
    moments = sorted({*slots, *(slot + of_a_day for slot in slots)})
    return max(accumulate(slots.get(slot, 0) - slots.get(slot - of_a_day, 0) for slot in moments), default=0)


def _days(
    row: LimitPlan, slots: Mapping[int, int], refusals: Sequence[RefusedTick], outcome: Simulated, state: State
) -> Iterable[DayPlan]:
    limit, calendar = row.limit, Calendar("day", row.zone)
    start_ms = calendar.edges(outcome.start_ms)[0]
    window = limit.view.window
    daily = window.period == "day" if isinstance(window, Calendar) else window.window_ms == DAY_MS
    others = [entry for entry in state.entries.get(row.project, ()) if entry.kind == "others"]
    while start_ms < outcome.until_ms:
        end_ms = calendar.edges(start_ms)[1]
        hours = tuple(
            sum(slots.get(slot, 0) for slot in range(at_ms // SLOT_MS, min(at_ms + HOUR_MS, end_ms) // SLOT_MS))
            for at_ms in range(start_ms, end_ms, HOUR_MS)
        )
        used = sum(hours)
        refused = [refusal.at_ms for refusal in refusals if start_ms <= refusal.at_ms < end_ms]
        left = None
        if daily and not limit.shadow and end_ms <= outcome.until_ms:
            # What the limit holds at the end of the day, less the units that only upstream has counted.
            holds = held_to(limit, state.facts_of(row.project).grants, end_ms - 1)
            of_others = total_of(limit.view, others, outcome.start_ms).used_after(end_ms - 1) or 0
            left = max(0, holds - of_others - used)
        yield DayPlan(start_ms, hours, used, left, len(refused), refused[0] if refused else None)
        start_ms = end_ms


# -- the drawing -------------------------------------------------------------------------------------------------------

_NOTHING_DUE = "nothing is due in this time, so nothing would be refused"
_NOTHING_SCHEDULED = 'nothing is scheduled: no job has a schedule, such as "*/30 * * * *"'
MAX_JOBS_SHOWN = 12
_BARS, _PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


def plan_parts(plan: Plan) -> Iterator[Part]:
    """The plan for people: a chart for each group of limits that count the same, then the refusals and the changes
    that would make it fit."""
    refused = sum(job.refused_ticks for job in plan.jobs)
    total = sum(job.ticks for job in plan.jobs)
    span = f"{stamp(plan.outcome.start_ms)} to {moment(plan.outcome.until_ms)}"
    regions = sum(job.refused_regions for job in plan.jobs)
    if not total:
        verdict = Line(_NOTHING_DUE if plan.jobs else _NOTHING_SCHEDULED, "strong")
    elif plan.held_up_ms is not None:
        now = f"current spending or a closed bucket refuses {refused:,} of {many(total, 'tick')}"
        verdict = Line(f"fits; {now}, the last at {moment(plan.held_up_ms)}", "note")
    elif plan.fits:
        verdict = Line(f"fits: {many(total, 'tick')}, {refused:,} refused", "open")
    else:
        left = f"{many(regions, 'region')} left for later ticks"
        verdict = Line(f"does not fit: {refused:,} of {many(total, 'tick')} refused, {left}", "verdict")
    yield from (Line(span), verdict)
    groups: dict[tuple[object, ...], list[LimitPlan]] = {}
    for row in plan.limits:
        groups.setdefault((row.project, row.limit.view.selector, row.zone), []).append(row)
    several = len({row.project for row in plan.limits}) > 1
    unused = []
    for rows in groups.values():
        if any(row.needs_units or any(day.used_units for day in row.days) for row in rows):
            yield Line("")
            yield from _chart(rows, several=several)
        else:
            unused += [_name(row, several=several) for row in rows]
    if unused:
        yield from (Line(""), Line(f"not used: {', '.join(unused)}"))
    if refused:
        yield from (Line(""), _refused_jobs(plan))
    if plan.changes:
        yield from (Line(""), Line("any one of these makes it fit:", "strong"))
    for change in plan.changes:
        yield Line(f"  {change.sentence()}")
    if plan.notes:
        yield Line("")
    yield from map(Line, plan.notes)


def _chart(rows: Sequence[LimitPlan], *, several: bool) -> Iterator[Part]:
    """One line a day, one bar an hour, scaled to the busiest hour. Days and hours are upstream's."""
    for row in rows:
        name = _name(row, several=several)
        kind = (", paced" if row.limit.paced else "") + (", a shadow: it refuses nothing" if row.limit.shadow else "")
        window = row.limit.view.window
        span = "" if window.longest_ms // DAY_MS == 1 else f" in {window.name}"
        needs = f"needs {many(row.needs_units, row.limit.view.selector.noun)} a day, holds {row.enforced_units:,}{span}"
        enforced = not row.limit.shadow and window.longest_ms >= DAY_MS
        tone: Tone = "bad" if enforced and row.needs_units > row.enforced_units else "strong"
        yield Line(f"{name} ({window.name}{kind}): {needs}", tone)
    yield Line(f"days and hours of {rows[0].zone}")
    yield _days_of(rows)


def _days_of(rows: Sequence[LimitPlan]) -> Table:
    """The days of limits that count the same. If a limit runs dry, its row says when."""
    first = rows[0]
    bars, zone = _BARS if takes_unicode() else _PLAIN_BARS, ZoneInfo(first.zone)
    busiest = max((units for day in first.days for units in day.hours), default=0)
    cells = []
    for index, day in enumerate(first.days):
        same = [row.days[index] for row in rows]
        lefts = [other.left_units for other in same if other.left_units is not None]
        dries = [other.dry_ms for other in same if other.dry_ms is not None]
        cells.append(
            (
                utc(day.start_ms).astimezone(zone).strftime("%a %d %b"),
                "".join(bars[-(-units * 8 // busiest) if busiest else 0] for units in day.hours),
                f"{day.used_units:,}",
                f"{min(lefts):,}" if lefts else "",
                moment(min(dries)) if dries else "",
            )
        )
    tones: list[Tone] = ["bad" if dry else "" for *_, dry in cells]
    headings = ("day", "0     6     12    18", "used", "left", "dry at")
    return Table(headings, cells, numbers=(2, 3), whole=(1, 4), tones=tones, without=(4, 3))


def _name(row: LimitPlan, *, several: bool) -> str:
    return f"{row.project}: {row.limit.name}" if several else row.limit.name


def _refused_jobs(plan: Plan) -> Table:
    refused = sorted((job for job in plan.jobs if job.refused_ticks), key=lambda job: job.first_refused_ms or 0)
    rows = [
        (
            job.name,
            *(f"{count:,}" for count in (job.ticks, job.refused_ticks, job.refused_regions)),
            moment(job.first_refused_ms or 0),
            job.first_refused_by or "",
        )
        for job in refused[:MAX_JOBS_SHOWN]
    ]
    if len(refused) > MAX_JOBS_SHOWN:
        rows.append((f"and {len(refused) - MAX_JOBS_SHOWN} more", "", "", "", "", ""))
    headings = ("job", "ticks", "refused", "regions left", "first refused", "by")
    return Table(headings, rows, numbers=(1, 2, 3), without=(5, 3))


# -- one run -----------------------------------------------------------------------------------------------------------


class Ahead(NamedTuple):
    """What a run would do: the regions that it covers, in their order, and the most calls. The first `fitting` calls
    fit now; `refusal` is the decision about the next call, None if all fit. `assumed`: the user's own function may make
    other calls. `away`: the machine whose region stays away for longest; None if the run gets all regions."""

    job: str
    regions: Sequence[Checkpoint]
    calls: Sequence[simulation.PricedCall]
    fitting: int
    refusal: Decision | None
    now_ms: int
    assumed: bool
    away: Away | None

    def as_json(self) -> dict[str, object]:
        """The answer as `quota run --dry-run --json` prints it."""
        refusal = {} if self.refusal is None else self.refusal.as_json()
        numbers = Counter(call.method for call in self.calls)
        return {
            "job": self.job,
            **({} if self.away is None else members(self.away, "runs_on until")),
            "regions": [{"region": place.region, "page": place.pages + 1} for place in self.regions],
            "calls": [
                {"method": method, "calls": number, "units": _units(self.calls, method)}
                for method, number in numbers.items()
            ],
            "units": _units(self.calls),
            "fits": self.refusal is None,
            "fitting_calls": self.fitting,
            "fitting_units": _units(self.calls[: self.fitting]),
            "refused_by": refusal.get("refused_by"),
            "retry_at": refusal.get("retry_at"),
        }

    def lines(self) -> Iterator[str]:
        """The lines for people."""
        pages = [f" from page {place.pages + 1}" if place.pages else "" for place in self.regions]
        names = [f"{place.region}{page}".strip() for place, page in zip(self.regions, pages, strict=True)]
        if names not in ([""], []):
            yield f"{self.job}: would cover {', '.join(names)}"
        if self.away is not None:
            yield f"{self.job}: {'the rest ' if names else ''}{self.away}"
        if not names:
            return
        numbers = Counter(call.method for call in self.calls)
        calls = listed([f"{many(number, 'call')} of {method}" for method, number in numbers.items()])
        cost = f"{calls}, {many(_units(self.calls), 'unit')}"
        yield f"{self.job}: {cost}, if each page is one such call" if self.assumed else f"{self.job}: at most {cost}"
        if self.refusal is None:
            yield f"{self.job}: all of it fits now"
            return
        fits = "none of it fits now:"
        if self.fitting:
            first, fit = ("call", "fits") if self.fitting == 1 else (many(self.fitting, "call"), "fit")
            fits = f"the first {first} ({many(_units(self.calls[: self.fitting]), 'unit')}) {fit} now; then"
        again = ""
        if (retry_ms := self.refusal.retry_at_ms) is not None:
            again = f"; the next fits at {moment(retry_ms)} (in {spell(retry_ms - self.now_ms)})"
        yield f"{self.job}: {fits} {self.refusal.why()}{again}"


def _units(calls: Iterable[simulation.PricedCall], method: str | None = None) -> int:
    """The units of these calls, or of those of one method."""
    return sum(call.units for call in calls if method in (None, call.method))


def look_ahead(copy: Session, name: str, fetch: Fetch, regions: Sequence[str], elsewhere: Mapping[str, Away]) -> Ahead:
    """What a run of the job `name` would do now, without the regions that are `elsewhere`. It charges the ledger of
    `copy`, which must be a copy of the real one (`quota.cli.rehearsal.copied`). Raises UsageError, StoreError and
    LedgerError."""
    job, now_ms = copy.settings.jobs[name], copy.ledger.now_ms()
    chosen = set(regions_of(job, regions))
    away = max(
        (elsewhere[region] for region in chosen & elsewhere.keys()), key=lambda there: there.until_ms, default=None
    )
    with Store.if_made(copy.settings.store, copy.ledger.now_ms) as store:
        store.check_keys(job)
        work = simulation.Pass(job, copy.budget(job.credential), fetch, store.runs.stopped_at(name))
        standing = [place for place in checkpoints_of(copy, job, store) if place.region in chosen - elsewhere.keys()]
        places = list(map(in_round, by_rotation(standing)))  # the same as in `Store.start_round`
    of_run, done, refusal = work.of_run(), 0, None
    with simulation.naming(name):
        priced = work.calls(now_ms)
        calls: list[simulation.PricedCall] = []
        for place in places:
            calls += priced[simulation.step_at(job, place) :]
        while done < len(calls) and refusal is None:
            count, refusal = work.admit(calls[done : done + work.at_once], of_run)
            done += count
    return Ahead(name, places, calls, done, refusal, now_ms, _calls_others(job), away)
