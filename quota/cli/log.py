"""`quota log`: single charges, and single refusals."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from quota.cli.output import output_lost, print_json, print_rich, say
from quota.cli.render import render_charges, render_refusals
from quota.common.clock import rfc3339, weekday
from quota.common.members import members
from quota.ledger.history import RUN_CHARS
from quota.reports.spending import read_charges, read_refusals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quota.ledger.contract import Ledger
    from quota.ledger.entry import Entry
    from quota.terms.costs import CostBook

TABLE_ROWS = 1_000
"""The most rows of a table; then another one begins. So a long log needs no memory."""


def print_charges(
    ledger: Ledger,
    books: Mapping[str, CostBook],
    since: str,
    start_ms: int,
    *,
    job: str | None,
    method: str | None,
    as_json: bool,
) -> None:
    """The charges to these projects since `start_ms`, each with its cost book; `since` is how the user wrote it."""
    after_ms = max(ledger.whole_after_ms(project) for project in books)  # first: a ledger that has moved says so here
    charges = (
        (project, entry)
        for project, entry in read_charges(ledger, books, start_ms)
        if (job is None or entry.job == job)
        and (method is None or books[project].canonical(entry.method) == books[project].canonical(method))
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
        say(f"nothing {'' if job is None is method else 'like that '}was charged in the last {since}")
    if after_ms >= start_ms > 0:
        say(f"only since {weekday(after_ms)}, not {since}: older charges are in `quota spend`, by the hour")


def print_refusals(
    ledger: Ledger,
    books: Mapping[str, CostBook],
    since: str,
    start_ms: int,
    *,
    job: str | None,
    method: str | None,
    as_json: bool,
) -> None:
    """The last refusals of these projects since `start_ms`."""
    refusals = [
        one
        for project in books
        for one in read_refusals(ledger, project)
        if one.at_ms >= start_ms
        and job in (None, one.job)
        and (method is None or one.method == books[project].canonical(method))
    ]
    refusals.sort(key=lambda one: one.at_ms)
    if as_json:
        for one in refusals:
            print_json({**one.data, "calls": one.calls}, indent=None)
    elif refusals:
        print_rich(render_refusals(refusals))
    else:
        say(f"nothing {'' if job is None is method else 'like that '}was refused in the last {since}")


def _charge_json(project: str, entry: Entry) -> dict[str, object]:
    return {
        "id": entry.id,
        "at": rfc3339(entry.ms),
        "project": project,
        **members(entry, "method bucket units charged_units job region"),
        "run": entry.idempotency_key[:RUN_CHARS],
    }
