"""What `quota check` asks this package about a configuration: the entry points of the group `quota.checks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import quota
from quota.jobs.job import load_fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quota.settings.model import Settings


def fetches(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each job whose fetch function cannot be used: its place in the configuration and what `quota run` would say."""
    folder = None if settings.path is None else settings.path.absolute().parent
    for job in settings.jobs.values():
        try:
            load_fetch(job.fetch, job.options, folder)
        except quota.ConfigError as error:
            message = str(error).removeprefix("fetch = ")
            remedy = "" if "; " in message else "; no run of this job can begin: correct it"
            yield f"jobs.{job.name}.fetch", message + remedy
