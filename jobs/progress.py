"""The progress of a run, on stderr.

    Watcher     follows a run: prints a line for each region and each minute
    Live        the same with live lines, for a terminal
    watching    chooses the watcher
    named       a job and its region

A failure to print never stops a run.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quota.cli.output import new_console, say
from quota.common.clock import elapsed_s
from quota.common.text import many, printable, spell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from quota.decision import Decision
    from quota.jobs.store.checkpoints import Checkpoint
    from quota.reports.runs import RegionOfRun

LINE_EVERY_S = 60.0
"""A run without a terminal prints a line at least this often."""


def named(job: str, region: str) -> str:
    """`trending DE`, or only the job if it has no regions."""
    return f"{job} {region}".rstrip()


class Watcher:
    """Follows the progress of a run of `job`: a line for each region, and a line for each minute in which no region
    ends. Without a job it prints nothing. Methods of subclasses must not raise. `clock` is in s.

    `waits`: the run waits for another run of the job. `began` gets the checkpoints of the regions that the run covers,
    and the most pages of each.
    """

    job = ""
    pages = 0
    spent_units = 0
    left_units: int | None = None

    def __init__(self, job: str = "", *, clock: Callable[[], float] = elapsed_s) -> None:
        self.job = job
        self._clock = clock
        self._last_line_s = clock()

    def say(self, line: str) -> None:
        """Print a line, if the watcher has a job."""
        if self.job:
            self._last_line_s = self._clock()
            say(line, err=True)

    def units(self) -> str:
        """The units that the run has spent so far, and the units left in its tightest limit."""
        left = "" if self.left_units is None else f", {self.left_units:,} left"
        return f"{many(self.spent_units, 'unit')}{left}"

    def waits(self) -> None:
        self.say(f"{self.job}: waits for another run of the job to end")

    def began(self, checkpoints: Sequence[Checkpoint], pages: int) -> None:
        self.pages = pages

    def decided(self, decision: Decision) -> None:
        self.spent_units += decision.cost_units if decision.admitted else 0
        if decision.limits:
            self.left_units = decision.remaining_units

    def page(self, checkpoint: Checkpoint) -> None:
        if self.job and self._clock() - self._last_line_s >= LINE_EVERY_S:
            pages, items = f"page {checkpoint.pages:,} of {self.pages:,}", many(checkpoint.items, "item")
            self.say(f"{named(self.job, checkpoint.region)}: {pages}, {items}; {self.units()}")

    def retry(self, checkpoint: Checkpoint, message: str, wait_s: float) -> None:
        if self.job and self._clock() - self._last_line_s >= LINE_EVERY_S:
            self.say(_retry_line(self.job, checkpoint, message, wait_s))

    def ended(self, outcome: RegionOfRun) -> None:
        """Print a line if the region fetched something. The report prints errors at the end, and the next region."""
        if outcome.outcome != "failed" and (outcome.pages or outcome.outcome == "done"):
            pages, items = many(outcome.pages, "page"), many(outcome.items, "item")
            self.say(f"{named(self.job, outcome.region)}: {outcome.outcome}, {pages}, {items}")


class Live(Watcher):
    """For terminals: a line for the run, with the current region. When a region ends, its own line appears above."""

    def __init__(self, job: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(job)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}", markup=False),
            console=new_console(stderr=True),
            transient=True,
        )
        self._run = self.progress.add_task(job, total=None, text="")
        self._pages_of: dict[str, int] = {}  # region -> the pages that it had when the run began
        self._done: dict[str, int] = {}  # region -> the pages that it got since

    def say(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def began(self, checkpoints: Sequence[Checkpoint], pages: int) -> None:
        super().began(checkpoints, pages)
        self._pages_of = {checkpoint.region: checkpoint.pages for checkpoint in checkpoints}
        self.progress.update(self._run, total=sum(max(0, pages - had) for had in self._pages_of.values()))

    def decided(self, decision: Decision) -> None:
        super().decided(decision)
        self._show()

    def page(self, checkpoint: Checkpoint) -> None:
        self._done[checkpoint.region] = max(0, checkpoint.pages - self._pages_of[checkpoint.region])
        self.progress.update(self._run, description=named(self.job, checkpoint.region))
        self._show()

    def retry(self, checkpoint: Checkpoint, message: str, wait_s: float) -> None:
        self.progress.update(self._run, description="", text=_retry_line(self.job, checkpoint, message, wait_s))

    def ended(self, outcome: RegionOfRun) -> None:
        super().ended(outcome)
        task = self.progress.tasks[self._run]
        if task.total is not None and outcome.outcome != "skipped":  # upstream may have fewer pages than the job wants
            missing = max(0, self.pages - self._pages_of[outcome.region] - outcome.pages)
            self.progress.update(self._run, total=max(task.completed, task.total - missing))

    def _show(self) -> None:
        self.progress.update(self._run, completed=sum(self._done.values()))
        task = self.progress.tasks[self._run]
        left_s = task.time_remaining
        togo = f", {spell(max(1, round(left_s)) * 1_000)} to go" if left_s and task.completed else ""
        pages = f"{task.completed:,.0f} of {many(int(task.total or 0), 'page')}"
        self.progress.update(self._run, text=f"{pages}, {self.units()}{togo}")


def _retry_line(job: str, checkpoint: Checkpoint, message: str, wait_s: float) -> str:
    return printable(f"{named(job, checkpoint.region)}: {message}; again in {wait_s:.1f} s")


@contextmanager
def watching(job: str, quiet: bool = False) -> Iterator[Watcher]:
    """The watcher for a run of this job: none if `quiet`, live at a terminal, otherwise lines."""
    if quiet:
        yield Watcher()
    elif sys.stderr.isatty():
        live = Live(job)
        with live.progress:
            yield live
    else:
        yield Watcher(job)
