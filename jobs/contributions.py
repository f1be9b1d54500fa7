"""What jobs add to other commands: the functions that the entry points in `pyproject.toml` name.

fetches, store    findings for `quota check`: fetch functions, regions, first calls, the store
store_health,     findings on the store and on the jobs for `quota doctor`
job_health
jobs              where each job stands in each region, the last runs, and pages that bring few items for their
                  units: for `quota dashboard`
forecast          the charges of the schedule, from the simulation of `quota plan`: for `quota dashboard`
bought            what the pages of each job brought: for `quota spend`
unreported        the last run that a silent ledger refused: for `quota explain`
standing          the machine of each job, and whether a run could go on now: for `quota status`
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

import quota
from quota import Decision, Session
from quota.common.clock import host_clock, stamp
from quota.common.findings import Finding, Level, examine_folder, finding_of, obstacle, warning
from quota.common.text import listed, many, one_line, spell
from quota.deciding.run_limit import RunLimit
from quota.jobs.afterwards import ledgers_clock, samples_of_job
from quota.jobs.fetches import PAGE_COMMENTS, PAGE_ITEMS
from quota.jobs.job import (
    READ_STORED,
    Fetch,
    NotImported,
    attempt_of,
    check_job,
    fault_of_region,
    fetch_to_look_at,
    names_in,
    regions_of_users,
    sink_to_look_at,
)
from quota.jobs.lock import is_running, made_lock
from quota.jobs.places import away_now, checkpoints_of, runs_on
from quota.jobs.store.checkpoints import Checkpoint, by_rotation, is_stale
from quota.jobs.store.file import StoreError, lack_of_space
from quota.jobs.store.runs import UNFINISHED
from quota.jobs.store.store import Store
from quota.jobs.ticks import streams
from quota.ledger.files import refuse_others
from quota.reports.metrics import Sample
from quota.reports.runs import Bought, Contribution, Expected, Forecast, LimitAhead, Region, Run, Stand, stands_out
from quota.reports.status import JobRow
from quota.rules.calls import Checklists
from quota.settings.model import BUILT_IN_FETCHES, JobSettings, Settings, state_folder
from quota.terms.limits import DAY_MS

# -- findings ----------------------------------------------------------------------------------------------------------


def fetches(settings: Settings) -> Iterator[Finding]:
    """Findings for fetch functions and sinks that `quota run` could not use, for regions of built-in jobs that upstream
    does not know, and for first calls that fit no limit."""
    from quota.jobs.emulator.catalogue import REGIONS  # the other commands need no names of regions

    looks: dict[str, Callable[[Settings, JobSettings], object]] = {"fetch": fetch_to_look_at, "sink": sink_to_look_at}
    for job in settings.jobs.values():
        for key, look in looks.items():
            try:
                look(settings, job)
            except quota.ConfigError as error:
                level: Level = "warning" if isinstance(error, NotImported) else "error"
                message = str(error).removeprefix(f"{key} = ")
                yield finding_of(level, f"jobs.{job.name}.{key}", message, "no run of this job can begin: correct it")
        with suppress(quota.ConfigError):  # reported above
            fetch = fetch_to_look_at(settings, job)
            yield from _unfit_call(settings, job, fetch)
            yield from _odd_ids(job, fetch)
        if job.fetch in BUILT_IN_FETCHES:
            yield from _unknown_regions(job, regions_of_users(settings, job), REGIONS)
            yield from _nothing_stored(settings, job)
            items = PAGE_COMMENTS if job.fetch == "comments" else PAGE_ITEMS
            if job.max_items < items:
                message = f"a page of this job has up to {items} items, and a longer page fails its region"
                yield warning(f"jobs.{job.name}.max_items", message, f"raise it to {items}, or remove it")


def _unknown_regions(job: JobSettings, users: frozenset[str], codes: Collection[str]) -> Iterator[Finding]:
    for index, region in enumerate(job.regions):
        location = f"jobs.{job.name}.regions[{index}]"
        if fault := fault_of_region(region, users):
            yield Finding("error", location, *fault)
        elif region not in codes and region not in users:
            yield warning(location, f"upstream lists no region {region!r}", "ignore this if upstream takes the code")


def _nothing_stored(settings: Settings, job: JobSettings) -> Iterator[Finding]:
    """A warning if a job reads what is stored, perhaps by the charts of its regions, and no job stores that."""
    if job.fetch not in READ_STORED or READ_STORED[job.fetch] in job.options:
        return
    stored_by = [other for other in settings.jobs.values() if READ_STORED.get(other.fetch) in (None, *other.options)]
    charts = [other.regions or ("",) for other in stored_by if other.fetch not in READ_STORED]
    missing = [region for region in job.regions or ("",) if not any(region in chart for chart in charts)]
    message, remedy = f"no job fetches a chart for {listed(map(repr, missing))}", "add one"
    if not job.regions and job.fetch == "channels":
        message, remedy = "it has neither regions nor `ids`", "add some"
    elif not job.regions:
        message, missing = "no other job stores what it reads", [] if stored_by else missing
    if missing:
        yield warning(f"jobs.{job.name}.regions", message, f"{remedy}, or there is nothing to fetch")


def _unfit_call(settings: Settings, job: JobSettings, fetch: Fetch) -> Iterator[Finding]:
    """A finding if the job's first call can never fit."""
    method = attempt_of(fetch, None)
    if method is None:
        return
    credential = settings.credentials[job.credential]
    leave = dict(job.leave)
    for limit in credential.limits:
        if limit.name in leave:  # another check reports a `leave` that leaves too little for any call
            most = limit.limit_units - credential.book.least_units(limit.view.selector)
            leave[limit.name] = min(leave[limit.name], max(0, most))
    try:
        checklists = Checklists(credential.name, credential.book, credential.limits, {job.name: leave}, host_clock)
        units = checklists.make((method, checklists.least_reserved(method), None, job.name)).units
        if job.max_units is not None and job.fetch not in BUILT_IN_FETCHES:
            RunLimit(job.max_units).take(units)
    except quota.UsageError as error:
        yield finding_of("error", f"jobs.{job.name}.fetch", str(error))


def _odd_ids(job: JobSettings, fetch: Fetch) -> Iterator[Finding]:
    """Findings for ids in the options that do not look like upstream's, though it might accept them, and for ids that
    several regions would fetch."""
    for option, shape, values in names_in(fetch, job.options):
        if shape is not None and len(job.regions) > 1:
            message = f"each of {len(job.regions)} regions fetches the same `{option}`"
            yield warning(f"jobs.{job.name}.regions", message, "remove all but one")
        for value in values:
            if shape is not None and not re.fullmatch(shape.pattern, value):
                message = f"{value!r:.100} does not look like {shape.like}"
                remedy = "a run names it if upstream has nothing for it"
                yield warning(f"jobs.{job.name}.options.{option}", message, remedy)


def store(settings: Settings, location: str = "store.url", remedy: str = "correct it") -> Iterator[Finding]:
    """The error of a run if it cannot read or write the store, or its tables there. Does not create the store."""
    if (fault := _fault_of_store(settings, here=False)) is not None:
        level, why = fault
        yield finding_of(level, location, why, remedy)
        return
    with suppress(OSError), Store.if_made(settings.store) as made:
        for job in settings.jobs.values():
            try:
                made.check_keys(job, declared=True)
            except StoreError as error:
                yield finding_of("error", f"jobs.{job.name}.tables", error)


def _fault_of_store(settings: Settings, *, here: bool) -> tuple[Level, str] | None:
    """Why a run could not use the store, in one line, and how bad that is; None if it could. `here`: whether this
    process could, and now; otherwise another check reports a missing folder. Does not create the store."""
    path, folder = settings.store.file, os.path.dirname(settings.store.file)
    if lack := lack_of_space(path):  # the configuration is right
        return "warning", str(lack)
    try:
        with Store.if_made(settings.store) as made:
            if here:
                made.check_writable()
        refuse_others(path, "store")
    except (quota.ConfigError, StoreError) as error:
        return "error", str(error)
    except OSError as error:
        return ("error", f"store {one_line(path)}: {error.strerror}") if here else None
    if not os.path.isdir(folder):
        if not here:
            return None
        if folder != str(state_folder()):  # a run makes the state folder
            return "error", f"store {one_line(path)}: {one_line(folder)} is no folder; make it, or correct the path"
    if prevented := obstacle(path):
        return "warning", f"store {one_line(path)} cannot be written: {'; '.join(prevented)}"
    return None


def store_health(session: Session) -> Iterator[Finding]:
    """Findings for the local store: its place, whether it opens, and the free space. Does not create the store."""
    of_folder = [*examine_folder("store", os.path.dirname(session.settings.store.file), "what was fetched")]
    yield from of_folder
    if "error" not in {finding.level for finding in of_folder}:  # which the store would repeat
        yield from store(session.settings, "store", remedy="")


def job_health(session: Session) -> Iterator[Finding]:
    """Findings for the locks of the jobs, and for runs of the last day that were killed or failed and whose regions
    were not fetched since. Does not create the store."""
    settings = session.settings
    for job in settings.jobs.values():
        try:
            with made_lock(settings.store.url, job.name):  # raises if no run could lock it
                pass
        except quota.ConfigError as error:
            yield finding_of("error", f"job {job.name}", error)
    reported = (OSError, quota.ConfigError, StoreError, quota.LedgerError)  # by other findings
    with suppress(*reported), Store.if_made(settings.store) as store:
        for job in settings.jobs.values():
            runs_here = is_running(settings.store.url, job.name)
            runs = store.runs.read(job.name, host_clock() - DAY_MS)
            places = checkpoints_of(session, job, store)
            killed = [run for run in runs if run.outcome == UNFINISHED][runs_here:]  # only the newest may be under way
            failed = [run for run in runs if run.outcome == "failed"]
            search = "find out what killed it; the next run of its regions goes on where it stopped"
            for ended, how, remedy in ((killed, "noted no end", search), (failed, "failed", "see `quota runs`")):
                late = [(run, missing) for run in ended if (missing := _not_fetched_since(run, places))]
                if late:
                    regions = listed(dict.fromkeys(region for _, missing in late for region in missing))
                    last, number = late[0][0], many(len(late), "run")
                    message = f"{number} of the last day {how}, the last began at {stamp(last.began_ms)}"
                    message += f": {last.causes[0]}" if last.causes[0] else ""
                    message += f"; not fetched here since: {regions}" if regions else ""
                    yield warning(f"job {job.name}", message, remedy)


def _not_fetched_since(run: Run, places: Sequence[Checkpoint]) -> list[str]:
    """The regions of a run that no pass has completed since it began. A run that ended before it chose regions
    wanted all."""
    regions = [region.region for region in run.regions]
    late = [place.region for place in places if (place.completed_at_ms or 0) < run.began_ms]
    return [region for region in late if region in regions or not regions]


# -- reports -----------------------------------------------------------------------------------------------------------

RUNS = 50
RUNS_SINCE_MS = 35 * DAY_MS
BOUGHT_SINCE_MS = 7 * DAY_MS


def jobs(session: Session) -> Contribution:
    """Where each job stands and its last runs. Does not create the store. Raises StoreError and LedgerError."""
    now_ms = ledgers_clock(session)
    regions: list[Region] = []
    samples: list[Sample] = []
    notes: list[str] = []
    with Store.if_made(session.settings.store) as store:
        for job in session.settings.jobs.values():
            checkpoints = checkpoints_of(session, job, store)
            regions += _regions(session, job, checkpoints, store, now_ms)
            labels = {"project": session.credential(job.credential).project, "quota_job": job.name}
            ended = store.runs.read(job.name, count=1, ended=True)
            samples += samples_of_job(labels, ended, checkpoints)
        runs = store.runs.read(None, max(0, now_ms - RUNS_SINCE_MS), RUNS)
        for away in store.elsewhere():
            age = None if away.fetched_ms is None else spell(now_ms - away.fetched_ms)
            data = "this store has no data of it" if age is None else f"its data here is {age} old"
            notes.append(f"{away.job} runs on {away.runs_on}; {data}")
        brought = store.runs.bought(max(0, now_ms - BOUGHT_SINCE_MS))
        notes += [f"in the last 7 days {line}" for line in stands_out(brought)]
    return Contribution(tuple(regions), tuple(runs), samples=tuple(samples), notes=tuple(notes))


def bought(session: Session, since_ms: int) -> Sequence[Bought]:
    """What the pages of each job brought since the day of `since_ms`, from this machine's store. Raises StoreError."""
    with Store.if_made(session.settings.store) as store:
        return store.runs.bought(since_ms)


def unreported(session: Session, projects: Collection[str], job: str | None, since_ms: int) -> Run | None:
    """The newest run of this machine that began after `since_ms` and whose refusal the ledger does not have: the ledger
    did not answer, or the run had spent its `max_units`. None if there is none, or if the store cannot be read."""
    with suppress(OSError, quota.ConfigError, StoreError), Store.if_made(session.settings.store) as store:
        for run in store.runs.read(job, since_ms):
            if run.project in projects and (run.refusal or {}).get("reason") in ("ledger-unavailable", "run"):
                return run
    return None


def standing(session: Session, *, here: bool = False) -> Iterator[JobRow]:
    """The machine of each job, its next tick, and whether a run could go on now; `here`: whether this process could
    run it. If the ledger does not answer, the machine is known only of runs here."""
    fault = _fault_of_store(session.settings, here=True) if here else None
    no_store = "" if fault is None else fault[1]
    try:
        now_ms, answers = session.ledger.now_ms(), True
    except quota.LedgerError as error:
        now_ms, answers = host_clock(), False
        if session.settings.store.places_in_ledger:
            no_store = no_store or f'with places = "ledger" a run begins where the ledger says: {error}'
    decided: dict[tuple[str, str], Decision] = {}
    try:
        store = Store.if_made(session.settings.store)
    except (OSError, StoreError, quota.ConfigError):  # `no_store` says why
        store = Store("", retention_ms=session.settings.store.retention_ms)
    with store:
        for job in session.settings.jobs.values():
            where = runs_on(session, job, answers=answers)
            next_ms = min((stream.after(now_ms).at_ms for stream in streams([job])), default=None)
            why, refusal = _refusal(session, job, store, no_store, {} if answers else decided, here=here)
            yield where._replace(next_ms=next_ms, why=why, refusal=refusal)


def _refusal(
    session: Session,
    job: JobSettings,
    store: Store,
    no_store: str,
    decided: dict[tuple[str, str], Decision],
    *,
    here: bool,
) -> tuple[str, Decision | None]:
    """Why a run could not go on now, in the order in which a run would notice, and the decision if the budget refuses
    its first call; ("", None) if it could. If the fetch function names no call or is not imported here, the call that
    stopped the job's last run stands for it, else the cheapest. `decided` has the decisions without a ledger, which are
    the same for all jobs: each waits for it."""
    budget = session.budget(job.credential)
    checkpoint, method, refused = Checkpoint(job.name, (job.regions or ("",))[0]), None, None
    with suppress(StoreError, quota.ConfigError, quota.LedgerError):
        checkpoint = by_rotation(checkpoints_of(session, job, store))[0]
        refused = store.runs.stopped_at(job.name)
        try:
            store.check_keys(job)
        except StoreError as error:
            no_store = no_store or str(error)
    try:
        check_job(session.settings, job)
        with suppress(NotImported):
            method = attempt_of(fetch_to_look_at(session.settings, job), checkpoint.cursor)
            sink_to_look_at(session.settings, job)
        if here:
            with made_lock(session.settings.store.url, job.name):  # raises if this process could not lock it
                pass
    except quota.ConfigError as error:
        return str(error), None
    if no_store:
        return no_store, None
    book = budget.book.at((session.clock or host_clock)())
    costs = {name: book.price(name).least.units for name in book.methods}
    if method is None:
        cheapest = min(filter(costs.get, costs), key=lambda name: costs[name], default=None)
        method = refused if refused in costs else cheapest
    try:
        if method is not None:
            if (call := (job.credential, method)) not in decided:
                units = budget.checklists.least_reserved(method)
                decided[call] = budget.peek(method, units=units, job=job.name, region=checkpoint.region)
            decision = decided[call]
            if job.max_units is not None:
                RunLimit(job.max_units).take(decision.cost_units)
            if not decision.admitted:
                return decision.why(), decision
        chosen = session.credential(job.credential)
        if here and not (chosen.key_ref or chosen.auth_ref or "").removeprefix("bearer:").startswith("env:"):
            session.check_key(job.credential)  # no check of variables: only cron may have them
    except (quota.ConfigError, quota.UsageError, quota.LedgerError) as error:
        return str(error), None
    return "", None


def _regions(
    session: Session, job: JobSettings, checkpoints: Iterable[Checkpoint], store: Store, now_ms: int
) -> Iterator[Region]:
    project, notices = session.credential(job.credential).project, session.settings.notify
    nexts: dict[str, int] = {}
    for stream in streams([job]):
        tick = stream.after(now_ms)
        for region in tick.regions or job.regions or ("",):
            nexts[region] = min(tick.at_ms, nexts.get(region, tick.at_ms))
    away = away_now(session, job) if store.path else {}
    for place in checkpoints:
        due_ms = store.due_since(place) if store.path and notices is not None else None
        if place.region in away:
            due_ms = away[place.region].heard_ms
        stale = notices is not None and is_stale(due_ms, now_ms, notices.stale_ms)
        stand, detail = _stand_of(place, now_ms)
        next_ms = nexts.get(place.region)
        yield Region(project, job.name, place.region, place.completed_at_ms, stand, detail, next_ms, stale)


def _stand_of(checkpoint: Checkpoint, now_ms: int) -> tuple[Stand, str]:
    completed_ms, failed_ms = checkpoint.completed_at_ms, checkpoint.failed_at_ms
    if not checkpoint.begun and completed_ms is None and failed_ms is None:
        return ("waits", "never fetched")
    if failed_ms is not None and failed_ms > (completed_ms or 0):
        return ("failed", f"failed {spell(now_ms - failed_ms)} ago")
    if checkpoint.begun and checkpoint.pending:
        return ("going", f"resumes after {many(checkpoint.pages, 'page')}, {many(checkpoint.items, 'item')}")
    if checkpoint.pending:
        return ("pending", "its turn comes in this round")
    return ("waits", "done in this round")


def forecast(session: Session) -> Contribution:
    """The charges of the schedule until tomorrow ends, as in `quota plan`. Raises LedgerError and StoreError."""
    from quota.jobs.plan.plan import make_plan  # only the page needs a plan
    from quota.jobs.plan.simulation import SLOT_MS, read_state

    plan = make_plan(session.settings, host_clock(), days=1, state=read_state(session), find_changes=False)
    expected = []
    for spent in plan.outcome.spent:
        for slot, units in spent.units.items():
            # The middle of the slot, or of the part of it that the plan covers.
            at_ms = (max(slot * SLOT_MS, plan.outcome.start_ms) + (slot + 1) * SLOT_MS) // 2
            calls = spent.calls.get(slot, 0)
            expected.append(Expected(spent.project, spent.bucket, spent.method, spent.job, at_ms, units, calls))
    expected.sort(key=lambda charge: charge.at_ms)
    limits = {}
    for row in plan.limits:
        refused_ticks = sum(day.refused_ticks for day in row.days)
        dry_ms = next((day.dry_ms for day in row.days if day.dry_ms is not None), None)
        limits[row.project, row.limit.name] = LimitAhead(row.days[0].used_units, row.zone, refused_ticks, dry_ms)
    scheduled = any(job.schedule is not None for job in session.settings.jobs.values())
    return Contribution(forecast=Forecast(plan.outcome.until_ms, tuple(expected), limits, scheduled))
