"""The progress of a run, on stderr.

    Watcher     follows a run
    watching    the watcher that fits: a live line at a terminal, otherwise one line for each region
    named       a job and its region

A failure to print never stops a run.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quota.cli.output import say
from quota.common.text import many, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quota.jobs.store.checkpoints import Checkpoint
    from quota.reports.runs import RegionOfRun


def named(job: str, region: str) -> str:
    """`trending DE`, or just the job where it has no regions."""
    return f"{job} {region}".rstrip()


def _region_line(job: str, outcome: RegionOfRun) -> str | None:
    """The line of a region that fetched something. Errors are printed at the end; the last line names who is next."""
    if outcome.outcome == "failed" or not (outcome.pages or outcome.outcome == "done"):
        return None
    pages, items = many(outcome.pages, "page"), many(outcome.items, "item")
    return f"{named(job, outcome.region)}: {outcome.outcome}, {pages}, {items}"


class Watcher:
    """Follows the progress of a run, and says nothing. The methods of others must not raise."""

    def began(self, checkpoints: Sequence[Checkpoint]) -> None: ...

    def page(self, checkpoint: Checkpoint) -> None: ...

    def retry(self, checkpoint: Checkpoint, message: str, wait_s: float) -> None: ...

    def ended(self, outcome: RegionOfRun) -> None: ...


class _Lines(Watcher):
    """For logs and cron: one line for each region."""

    def __init__(self, job: str) -> None:
        self.job = job

    def ended(self, outcome: RegionOfRun) -> None:
        line = _region_line(self.job, outcome)
        if line is not None:
            say(line, err=True)


class _Live(_Lines):
    """For people: one live line. When a region ends, its own line appears above."""

    def __init__(self, job: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__(job)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("regions", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(job, total=None)

    def __enter__(self) -> _Live:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def began(self, checkpoints: Sequence[Checkpoint]) -> None:
        self._progress.update(self._task, total=len(checkpoints))

    def page(self, checkpoint: Checkpoint) -> None:
        where = named(self.job, checkpoint.region)
        items = many(checkpoint.items, "item")
        self._progress.update(self._task, description=f"{where} page {checkpoint.pages}, {items}")

    def retry(self, checkpoint: Checkpoint, message: str, wait_s: float) -> None:
        text = printable(f"{named(self.job, checkpoint.region)}: {message}; again in {wait_s:.1f} s")
        self._progress.update(self._task, description=text)

    def ended(self, outcome: RegionOfRun) -> None:
        line = _region_line(self.job, outcome)
        if line is not None:
            self._progress.console.print(line, markup=False, highlight=False)
        self._progress.advance(self._task)


@contextmanager
def watching(job: str, quiet: bool = False) -> Iterator[Watcher]:
    """The watcher for a run of this job: none if `quiet`, live at a terminal, otherwise lines."""
    if quiet:
        yield Watcher()
        return
    if not sys.stderr.isatty():
        yield _Lines(job)
        return
    with _Live(job) as live:
        yield live
