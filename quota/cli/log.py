"""`quota log`: single charges, and single refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from quota.cli.output import output_lost, print_json, print_rich, say
from quota.cli.render import render_charges, render_refusals
from quota.common.clock import rfc3339, weekday
from quota.common.members import members
from quota.deciding.history import whole_since_ms
from quota.deciding.project import Project
from quota.reports.spending import read_charges, read_refusals
from quota.rules.spent import Spent
from quota.terms.costs import CostBook

TABLE_ROWS = 1_000
"""The most rows of a table; then another one begins."""


class Wanted(NamedTuple):
    """What is to be shown: of these projects, each with its cost book, since `start_ms`, which the user wrote as
    `since`; of a job or a method alone, where one is named."""

    books: Mapping[str, CostBook]
    since: str
    start_ms: int
    job: str | None
    method: str | None

    def has(self, project: str, job: str, method: str) -> bool:
        named = self.books[project].canonical
        return self.job in (None, job) and (self.method is None or named(self.method) == named(method))

    def nothing(self, done: str) -> str:
        like = "" if self.job is None is self.method else "like that "
        return f"nothing {like}was {done} in the last {self.since}"


def print_charges(projects: Sequence[Project], wanted: Wanted, *, as_json: bool) -> None:
    """The charges, oldest first."""
    start_ms = wanted.start_ms
    since_ms = max(map(whole_since_ms, projects))
    charges = (row for row in read_charges(projects, start_ms) if wanted.has(row[0], row[2].job, row[2].method))
    nothing = True
    while output_lost() is None and (rows := list(islice(charges, TABLE_ROWS))):
        nothing = False
        if as_json:
            for row in rows:
                print_json(_charge_json(*row), indent=None)
        else:
            print_rich(render_charges(rows, projects=len(projects) > 1))
    if as_json:
        return
    if nothing:
        say(wanted.nothing("charged"))
    if since_ms > start_ms:
        say(f"only since {weekday(since_ms)}, not {wanted.since}: the ledger has dropped older charges")


def print_refusals(projects: Sequence[Project], wanted: Wanted, *, as_json: bool) -> None:
    """The last refusals, oldest first."""
    kept = (refusal for project in projects for refusal in read_refusals(project))
    refusals = [x for x in kept if x.at_ms >= wanted.start_ms and wanted.has(x.project, x.job, x.method)]
    refusals.sort(key=lambda refusal: refusal.at_ms)
    if as_json:
        for refusal in refusals:
            print_json({**refusal.data, "calls": refusal.calls}, indent=None)
    elif refusals:
        print_rich(render_refusals(refusals))
    else:
        say(wanted.nothing("refused"))


def _charge_json(project: str, call_id: str, charge: Spent) -> dict[str, object]:
    return {
        "id": call_id,
        "at": rfc3339(charge.id[0]),
        "project": project,
        **members(charge, "method bucket units charged_units job region run"),
    }
