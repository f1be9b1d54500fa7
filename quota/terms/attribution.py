"""Attribution of charges: the job and region that a charge carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from quota.errors import UsageError
from quota.terms.arguments import text

_labels: ContextVar[tuple[str, str]] = ContextVar("quota_labels")
_of_process = ("", "")


def current_attribution(of_run: tuple[str, str] | None = None) -> tuple[str, str]:
    """(job, region) as set by the enclosing `labels`, else by the run that is under way, else by `label_process`; empty
    strings where none did."""
    return _labels.get(of_run or _of_process)


def label_process(job: str) -> None:
    """Label the charges of this process, in all threads, where no `labels` do."""
    global _of_process
    check_name("job", text(job, "job"))
    _of_process = (job, "")


@contextmanager
def labels(*, job: str = "", region: str = "") -> Iterator[None]:
    """Label the charges made inside this block: they carry this job and region unless they name their own."""
    job, region = text(job, "job"), text(region, "region")
    check_name("job", job)
    check_name("region", region)
    reset = _labels.set((job, region))
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that holds it may be ended in another context
            _labels.reset(reset)


def attribution(job: str | None, region: str | None, of_run: tuple[str, str] | None = None) -> tuple[str, str]:
    """Who spends: this job and region, or `current_attribution`. Raises UsageError."""
    labelled_job, labelled_region = current_attribution(of_run)
    job = labelled_job if job is None else text(job, "job")
    if region is None:
        return job, labelled_region
    region = text(region, "region")
    check_name("region", region)
    return job, region


def check_name(what: str, name: str, least: int = 0) -> None:
    """Raises UsageError for a name that no charge may have."""
    if not least <= len(name) <= 64 or not name.isprintable():
        raise UsageError(f"{what} {name[:80]!r}: a name has 1 to 64 printable characters")


def machine_name() -> str:
    """This machine's host name."""
    return os.uname().nodename
