"""Attribution of charges: the job and region that a charge carries, and the run in each attempt's idempotency key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count

from quota.common.fork import start_over_in_child
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


class AttemptKeys:
    """Makes idempotency keys for attempts, unique across processes: the run's 8-character id, then a counter.

    All budgets of a process share one instance. A forked child gets a run id of its own.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = run or run_id()
        self._counter = count(1)
        start_over_in_child(self)

    def start_over_in_child(self) -> None:
        """Start over in a forked child, with a run id of its own."""
        self.run, self._counter = run_id(), count(1)

    def next(self) -> str:
        return f"{self.run}{next(self._counter)}"


RESERVED = "~"
"""Ends the idempotency key of a reservation: a charge that is an upper bound, until the true cost is known. No ledger
goes by it; it tells those who read the log."""


def is_reservation(idempotency_key: str) -> bool:
    return idempotency_key.endswith(RESERVED)


def attempt_number(idempotency_key: str) -> int:
    """The counter in an idempotency key that `AttemptKeys` made; 0 for any other."""
    number = idempotency_key[8:].removesuffix(RESERVED)
    return int(number) if number.isdigit() else 0


def machine_name() -> str:
    """This machine's host name."""
    return os.uname().nodename


def run_id() -> str:
    """8 random characters that name one run."""
    return os.urandom(5).hex()[:8]
