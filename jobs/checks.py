"""What `quota check` and `quota doctor` ask this package: the entry points `quota.checks` and `quota.doctor`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import quota
from quota.common.findings import Finding, finding_of
from quota.common.storage import examine_folder
from quota.jobs.job import NotImported, fetch_to_look_at
from quota.jobs.store.store import Store, StoreError, is_made

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.settings.model import Settings


def fetches(settings: Settings) -> Iterator[tuple[str, str] | Finding]:
    """Each job whose fetch function cannot be used: its place in the configuration and what `quota run` would say."""
    for job in settings.jobs.values():
        try:
            fetch_to_look_at(settings, job)
        except NotImported as error:
            yield finding_of("warning", f"jobs.{job.name}.fetch", str(error).removeprefix("fetch = "))
        except quota.ConfigError as error:
            message = str(error).removeprefix("fetch = ")
            remedy = "" if "; " in message else "; no run of this job can begin: correct it"
            yield f"jobs.{job.name}.fetch", message + remedy


def store(settings: Settings) -> Iterator[tuple[str, str]]:
    """What a run would say of the store if it cannot be read. A store that is not there yet is none."""
    try:
        if is_made(settings.store.url):
            Store(settings.store.url, retention_ms=settings.store.retention_ms, create=False).close()
    except OSError:
        return
    except quota.ConfigError as error:
        yield "store.url", str(error)
    except StoreError as error:
        message, _, remedy = str(error).rpartition(": ")
        yield "store.url", str(error) if "; " in str(error) else f"{message}; {remedy}"


def store_health(settings: Settings) -> Iterator[Finding]:
    """The local store: where it lies, whether it can be opened, and how much room it has. Does not create it."""
    path = settings.store.url.removeprefix("sqlite:///")
    if not path:
        return
    yield from examine_folder("store", os.path.dirname(path), "what was fetched")
    for _, said in store(settings):
        yield finding_of("error", "store", said)
