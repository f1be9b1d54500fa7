"""What `quota check` and `quota doctor` ask this package: the entry points `quota.checks` and `quota.doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from itertools import chain

import quota
from quota.common.findings import Finding, examine_folder, finding_of, obstacle, warning
from quota.common.text import nearest, one_line
from quota.jobs.emulator.catalogue import REGIONS
from quota.jobs.job import NotImported, fetch_to_look_at, sink_to_look_at
from quota.jobs.store.file import StoreError, is_made, path_of
from quota.jobs.store.store import Store
from quota.ledger.files import refuse_others
from quota.settings.model import BUILT_IN_FETCHES, JobSettings, Settings


def fetches(settings: Settings) -> Iterator[tuple[str, str] | Finding]:
    """Each job whose fetch function or sink cannot be used: its place in the configuration and what `quota run` would
    say; and the regions of built-in jobs that upstream does not know."""
    looks: tuple[tuple[str, Callable[[Settings, JobSettings], object]], ...]
    looks = (("fetch", fetch_to_look_at), ("sink", sink_to_look_at))
    # A function of the user's own names its regions as it likes, and may have stored rankings under these names.
    own = (job.regions for job in settings.jobs.values() if job.fetch not in BUILT_IN_FETCHES)
    regions = {*REGIONS, *chain.from_iterable(own)}
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
        if job.fetch in BUILT_IN_FETCHES:
            yield from _unknown_regions(job, regions)


def _unknown_regions(job: JobSettings, regions: Container[str]) -> Iterator[Finding]:
    for index, region in enumerate(job.regions):
        if region in regions:
            continue
        location, code = f"jobs.{job.name}.regions[{index}]", region.upper()
        if region == code and len(code) == 2 and code.isascii() and code.isalpha() and code != "UK":
            yield warning(location, f"upstream lists no region {region!r}", "ignore this if it takes the code")
        else:
            near = "did you mean 'GB'?" if code == "UK" else nearest(code, REGIONS)
            yield Finding("error", location, f"{region!r} is no region code of ISO 3166-1, like 'US'", near)


def store(settings: Settings) -> Iterator[tuple[str, str] | Finding]:
    """What a run would say of the store if it cannot be read or written. One that is not there yet is not made."""
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
    prevented = obstacle(path) if os.path.isdir(os.path.dirname(path)) else None  # a folder that is missing is told
    if prevented is not None:
        why, remedy = prevented
        yield warning("store.url", f"store {one_line(path)} cannot be written: {why}", remedy)


def store_health(settings: Settings) -> Iterator[Finding]:
    """The local store: where it lies, whether it can be opened, and how much room it has. Does not create it."""
    path = settings.store.file
    if not path:
        return
    yield from examine_folder("store", os.path.dirname(path), "what was fetched")
    for finding in store(settings):
        if isinstance(finding, Finding):
            yield replace(finding, location="store")
        else:
            yield finding_of("error", "store", finding[1])
