"""Renders the past runs of a machine as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quota.cli.tables import Column, FirstThatFits, tables
from quota.common.clock import weekday
from quota.common.text import many, printable, shorten, spell
from quota.jobs.store.runs import UNFINISHED
from quota.reports.runs import Run

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_WHY = 60
"""The most characters of a reason that are shown; the JSON has all."""

STYLES = {"failed": "red", UNFINISHED: "yellow"}
COLUMNS = (
    *map(Column, ("began", "job", "outcome", "regions")),
    *(Column(heading, number=True) for heading in ("items", "units", "took")),
    Column("why"),
)


def render_runs(found: Sequence[Run]) -> RenderableType:
    """A table of runs, newest first. In a narrow terminal the columns `took` and `items` go first."""
    rows = [
        (
            weekday(run.began_ms),
            run.job,
            run.outcome,
            _regions(run),
            f"{sum(one.items for one in run.regions):,}",
            f"{run.units:,}",
            "" if run.ended_ms is None else spell(run.ended_ms - run.began_ms),
            _why(run),
        )
        for run in found
    ]
    styles = [STYLES.get(run.outcome, "") for run in found]
    return FirstThatFits(tables(COLUMNS, rows, styles=styles, without=(6, 4), least_fold=24))


def _regions(run: Run) -> str:
    done = [one for one in run.regions if one.outcome == "done"]
    return f"{len(done)} of {len(run.regions)}" if run.regions else ""


def _why(run: Run) -> str:
    """What refused a run, or the beginning of the error of the first region that failed, or of its reason."""
    if run.refused_by is not None and (run.refusal is None or run.refusal["reason"] != "run"):
        limit = run.why.startswith("limit ")
        return printable(f"limit {run.refused_by!r}" if limit else f"bucket {run.refused_by!r} closed")
    errors = [one.error for one in run.regions if one.error]
    why = shorten(printable(errors[0] if errors else run.why), MAX_WHY)
    more = len(errors) - 1
    return f"{why} (and {many(more, 'more region')})" if more > 0 else why
