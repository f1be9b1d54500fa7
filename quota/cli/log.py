"""`quota log`: single charges, and single refusals."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from quota.cli.output import output_lost, print_json, print_rich, say
from quota.cli.render import render_charges, render_refusals
from quota.common.clock import rfc3339, weekday
from quota.common.members import members
from quota.ledger.contract import Ledger
from quota.ledger.entry import Entry
from quota.ledger.history import RUN_CHARS
from quota.reports.spending import read_charges, read_refusals
from quota.terms.costs import CostBook

TABLE_ROWS = 1_000
"""The most rows of a table; then another one begins. So a long log needs no memory."""


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


def print_charges(ledger: Ledger, wanted: Wanted, *, as_json: bool) -> None:
    """The charges, oldest first."""
    books, start_ms = wanted.books, wanted.start_ms
    after_ms = max(ledger.whole_after_ms(project) for project in books)  # first: a ledger that has moved says so here
    charges = (
        (project, entry)
        for project, entry in read_charges(ledger, books, start_ms)
        if wanted.has(project, entry.job, entry.method)
    )
    found = False
    while output_lost() is None and (some := list(islice(charges, TABLE_ROWS))):
        found = True
        if as_json:
            for project, entry in some:
                print_json(_charge_json(project, entry), indent=None)
        else:
            print_rich(render_charges(some, projects=len(books) > 1))
    if as_json:
        return
    if not found:
        say(wanted.nothing("charged"))
    if after_ms >= start_ms > 0:
        say(f"only since {weekday(after_ms)}, not {wanted.since}: older charges are in `quota spend`, by the hour")


def print_refusals(ledger: Ledger, wanted: Wanted, *, as_json: bool) -> None:
    """The last refusals, oldest first."""
    kept = (one for project in wanted.books for one in read_refusals(ledger, project))
    refusals = [x for x in kept if x.at_ms >= wanted.start_ms and wanted.has(x.project, x.job, x.method)]
    refusals.sort(key=lambda one: one.at_ms)
    if as_json:
        for one in refusals:
            print_json({**one.data, "calls": one.calls}, indent=None)
    elif refusals:
        print_rich(render_refusals(refusals))
    else:
        say(wanted.nothing("refused"))


def _charge_json(project: str, entry: Entry) -> dict[str, object]:
    return {
        "id": entry.id,
        "at": rfc3339(entry.ms),
        "project": project,
        **members(entry, "method bucket units charged_units job region"),
        "run": entry.idempotency_key[:RUN_CHARS],
    }
