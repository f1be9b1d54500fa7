"""Checks of jobs and the store for `quota check` and `quota doctor`: the entry points `quota.checks`,
`quota.doctor`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

import quota
from quota.common.clock import host_clock
from quota.common.findings import Finding, examine_folder, finding_of, obstacle, warning
from quota.common.text import one_line
from quota.deciding.run_limit import RunLimit
from quota.jobs.emulator.catalogue import REGIONS
from quota.jobs.job import Fetch, NotImported, attempt_of, fetch_to_look_at, names_in, sink_to_look_at
from quota.jobs.runner import no_region_codes, regions_of_users
from quota.jobs.store.file import StoreError, is_made, path_of
from quota.jobs.store.store import Store
from quota.ledger.files import refuse_others
from quota.rules.calls import Checklists
from quota.settings.model import BUILT_IN_FETCHES, JobSettings, Settings
from quota.terms.limits import Limit


def fetches(settings: Settings) -> Iterator[tuple[str, str] | Finding]:
    """Findings for fetch functions and sinks that `quota run` could not use, for regions of built-in jobs that upstream
    does not know, and for first calls that fit no limit."""
    looks: tuple[tuple[str, Callable[[Settings, JobSettings], object]], ...]
    looks = (("fetch", fetch_to_look_at), ("sink", sink_to_look_at))
    users = regions_of_users(settings)
    listed = {*REGIONS, *users}
    limits = {name: _limits_by_job(credential.limits) for name, credential in settings.credentials.items()}
    for job in settings.jobs.values():
        for key, look in looks:
            try:
                look(settings, job)
            except NotImported as error:
                yield finding_of("warning", f"jobs.{job.name}.{key}", str(error).removeprefix(f"{key} = "))
            except quota.ConfigError as error:
                message = str(error).removeprefix(f"{key} = ")
                remedy = "" if "; " in message else "; no run of this job can begin: correct it"
                yield f"jobs.{job.name}.{key}", message + remedy
        with suppress(quota.ConfigError):  # reported above
            fetch = fetch_to_look_at(settings, job)
            yield from _unfit_call(settings, job, fetch, limits[job.credential])
            yield from _odd_ids(job, fetch)
        if job.fetch in BUILT_IN_FETCHES:
            yield from _unknown_regions(job, users, listed)


def _unknown_regions(job: JobSettings, users: frozenset[str], listed: Set[str]) -> Iterator[Finding]:
    errors = {location: (message, near) for location, message, near in no_region_codes(job, users)}
    for index, region in enumerate(job.regions):
        location = f"jobs.{job.name}.regions[{index}]"
        if location in errors:
            yield Finding("error", location, *errors[location])
        elif region not in listed:
            yield warning(location, f"upstream lists no region {region!r}", "ignore this if it takes the code")


LimitsByJob = Mapping[str, Sequence[tuple[int, Limit]]]
"""The limits that name each job, with their places in the configuration; under "" the limits that name none."""


def _limits_by_job(limits: Sequence[Limit]) -> LimitsByJob:
    by_job: dict[str, list[tuple[int, Limit]]] = {}
    for place, limit in enumerate(limits):
        for name in limit.view.selector.jobs or ("",):
            by_job.setdefault(name, []).append((place, limit))
    return by_job


def _unfit_call(settings: Settings, job: JobSettings, fetch: Fetch, by_job: LimitsByJob) -> Iterator[Finding]:
    """A finding if the job's first call can never fit."""
    method = attempt_of(fetch, None)
    if method is None:
        return
    credential = settings.credentials[job.credential]
    limits = tuple([limit for _, limit in sorted((*by_job.get("", ()), *by_job.get(job.name, ())), key=itemgetter(0))])
    leave = dict(job.leave)
    for limit in limits:
        if limit.name in leave:  # another check reports a `leave` that leaves too little for any call
            most = limit.limit_units - credential.book.least_units(limit.view.selector)
            leave[limit.name] = min(leave[limit.name], max(0, most))
    try:
        checklists = Checklists(credential.name, credential.book, limits, {job.name: leave}, host_clock)
        units = checklists.make((method, None, None, job.name)).units
        if job.max_units is not None and job.fetch not in BUILT_IN_FETCHES:
            RunLimit(job.max_units).take(units)
    except quota.UsageError as error:
        yield finding_of("error", f"jobs.{job.name}.fetch", str(error))


def _odd_ids(job: JobSettings, fetch: Fetch) -> Iterator[Finding]:
    """Findings for ids in the options that do not look like upstream's, though it might accept them."""
    for names, values in names_in(fetch, job.options):
        for value in values:
            if names.kind and not re.fullmatch(names.shape, value):
                location = f"jobs.{job.name}.options.{names.option}"
                yield warning(
                    location,
                    f"{value!r:.100} does not look like {names.like}",
                    "a run names it if upstream does not know it",
                )


def store(settings: Settings) -> Iterator[tuple[str, str] | Finding]:
    """The error of a run if it cannot read or write the store. Does not create the store."""
    path = path_of(settings.store.url)
    try:
        if is_made(settings.store.url):
            Store.existing(settings.store).close()
        else:
            refuse_others(path, "store")
    except OSError:
        return
    except (quota.ConfigError, StoreError) as error:
        yield "store.url", str(error)
        return
    prevented = obstacle(path) if os.path.isdir(os.path.dirname(path)) else None  # another check: missing folder
    if prevented is not None:
        why, remedy = prevented
        yield warning("store.url", f"store {one_line(path)} cannot be written: {why}", remedy)


def store_health(settings: Settings) -> Iterator[Finding]:
    """Findings for the local store: its place, whether it opens, and the free space. Does not create the store."""
    path = settings.store.file
    if not path:
        return
    yield from examine_folder("store", os.path.dirname(path), "what was fetched")
    for finding in store(settings):
        if isinstance(finding, Finding):
            yield replace(finding, location="store")
        else:
            yield finding_of("error", "store", finding[1])
