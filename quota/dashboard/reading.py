"""What the page reads from the ledger, each part in one go.

Now          the status and the last refusals: quick, and read for every request
Curves       the use of each limit over the day
Spent        who spent it, over a day, a week and all that is kept
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from quota.budget import Budget, project_of
from quota.dashboard.contract import Forecast
from quota.dashboard.curves import Curve, Event, curve, since
from quota.dashboard.words import Searches
from quota.deciding.history import charges
from quota.deciding.project import Project
from quota.decision import enforced
from quota.errors import UsageError
from quota.reports.metrics import Sample, of_silence, of_status, of_sums
from quota.reports.spending import KeptRefusal, read_refusals, read_spending, read_sums
from quota.reports.status import Status, read_status
from quota.rules.refusals import RefusedSum
from quota.session import Session, projects_of
from quota.terms.limits import DAY_MS

SEARCH = "search.list"
"""What people count by: the call that most of a budget is spent on. Other APIs have none, and are told in units."""

SPANS_MS = (DAY_MS, 7 * DAY_MS, 35 * DAY_MS)


class Now(NamedTuple):
    """The ledger as it was at `status.at_ms`. `calls` are by credential. `refusals` are of all projects, the newest
    first."""

    status: Status
    calls: Mapping[str, Searches]
    refusals: tuple[KeptRefusal, ...]


Curves = dict[tuple[str, str], "Curve"]
"""The use of limits, by project and name."""


class SpentRow(NamedTuple):
    """Units of one job, method and region in each of SPANS_MS."""

    job: str
    method: str
    region: str
    units: tuple[int, ...]


class Spent(NamedTuple):
    """Who spent a project's units: rows, those who spent most lately first. In `since_ms` each span begins; `refused`
    and `would_refuse` are of the longest."""

    project: str
    at_ms: int
    since_ms: tuple[int, ...]
    rows: tuple[SpentRow, ...]
    totals: tuple[int, ...]
    refused: tuple[RefusedSum, ...]
    would_refuse: tuple[RefusedSum, ...]


def read_now(session: Session) -> Now:
    """The state of the ledger. Raises LedgerError."""
    status = read_status(session)
    calls = {row.name: left for row in status.credentials if row.open and (left := _calls(session, row.name))}
    projects = [session.project(credential.name) for credential in projects_of(session).values()]
    refusals = [kept for project in projects for kept in read_refusals(project)]
    refusals.sort(key=lambda kept: kept.at_ms, reverse=True)
    return Now(status, calls, tuple(refusals))


def read_curves(session: Session, forecast: Forecast | None = None) -> Curves:
    """How much of each limit was used, and will be by what `forecast` expects. Raises LedgerError."""
    status = read_status(session)
    known_ms = forecast.until_ms if forecast is not None and forecast.scheduled else None
    curves: Curves = {}
    for project, credential in projects_of(session).items():
        budget = session.budget(credential.name)
        row = next(row for row in status.credentials if row.project == project)
        events, coming = _events(budget, status.at_ms), _expected(budget, forecast)
        for n, (limit, state) in enumerate(zip(budget.limits, row.limits, strict=True)):
            until_ms = max(
                (at_ms for at_ms in (state.resets_ms, state.next_capacity_ms, state.room_ms) if at_ms), default=None
            )
            others = [(heard.units, heard.until_ms) for heard in project_of(budget).others(limit.view)]
            made = curve(limit.view.window, status.at_ms, until_ms, events[n], coming[n], others, known_ms)
            curves[project, limit.name] = made
    return curves


def _events(budget: Budget, at_ms: int) -> list[list[Event]]:
    """What each limit counts, oldest first."""
    firsts_ms = [since(limit.view.window, at_ms) for limit in budget.limits]
    events: list[list[Event]] = [[] for _ in budget.limits]
    for charge in charges(project_of(budget), max(0, min(firsts_ms, default=at_ms))):
        for n, limit in enumerate(budget.limits if charge.units else ()):
            selector = limit.view.selector
            if charge.id[0] >= firsts_ms[n] and selector.counts(charge.bucket, charge.method, charge.job):
                events[n].append(Event(charge.id[0], selector.cost(charge.units), charge.job))
    return events


def _expected(budget: Budget, forecast: Forecast | None) -> list[list[Event]]:
    events: list[list[Event]] = [[] for _ in budget.limits]
    for coming in forecast.expected if forecast is not None else ():
        for n, limit in enumerate(budget.limits if coming.project == budget.project else ()):
            selector = limit.view.selector
            if selector.counts(coming.bucket, coming.method, coming.job):
                units = coming.calls if selector.count == "calls" else coming.units
                events[n].append(Event(coming.at_ms, units, coming.job))
    return events


def _calls(session: Session, credential: str) -> Searches | None:
    """How many searches a credential has left; None of an API that has none, or where they are free."""
    budget = session.budget(credential)
    book = session.settings.credentials[credential].book.at(session.ledger.now_ms())
    if SEARCH not in book.methods:
        return None
    price = book.price(SEARCH)
    if not price.parts:
        return None
    try:
        decision = budget.peek(SEARCH, units=price.units)
    except UsageError as error:
        return Searches(0, str(error))
    if not decision.admitted:
        why = decision.why()
        brief = why.partition(" (")[0] if decision.reason in ("exhausted", "closed") else why  # its words stand below
        return Searches(0, brief, decision.retry_at_ms)
    left = [state.remaining_units // state.cost_units for state in enforced(decision.limits) if state.cost_units]
    return Searches(min(left)) if left else None


def read_spent(session: Session) -> tuple[Spent, ...]:
    """Who spent it, for each project. Raises LedgerError."""
    return tuple(_spent(session.project(credential.name)) for credential in projects_of(session).values())


def _spent(project: Project) -> Spent:
    by, at_ms = ("job", "method", "region"), project.log.now_ms()
    spans = [read_spending([project], by, max(0, at_ms - span_ms)) for span_ms in SPANS_MS]
    sums = [{values: units for values, _, units in span.rows} for span in spans]
    keys = dict.fromkeys(values for span in spans for values, _, _ in span.rows)
    rows = [SpentRow(key[0], key[1], key[2], tuple(span.get(key, 0) for span in sums)) for key in keys]
    rows.sort(key=lambda row: (*(-units for units in row.units), row[:3]))
    longest = spans[-1]
    return Spent(
        project.name,
        at_ms,
        tuple(span.since_ms for span in spans),
        tuple(rows),
        tuple(span.total_units for span in spans),
        longest.refused,
        longest.would_refuse,
    )


def read_samples(session: Session, status: Status) -> list[Sample]:
    """What `/metrics` exports of the ledger. Raises LedgerError."""
    samples: list[Sample] = []
    for project, credential in projects_of(session).items():
        samples += [*of_status(status, project), *of_sums(project, *read_sums(session.project(credential.name)))]
    return samples


def samples_of_silence(session: Session) -> list[Sample]:
    """What `/metrics` exports while the ledger does not answer."""
    samples: list[Sample] = []
    for project, credential in projects_of(session).items():
        samples += of_silence(project, session.budget(credential.name).owed_units())
    return samples


def key_of(kept: KeptRefusal) -> str:
    """What names a refusal in an address: the same for as long as it is kept."""
    text = json.dumps([kept.project, kept.data], sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()


def find_refusal(refusals: Iterable[KeptRefusal], key: str) -> KeptRefusal | None:
    return next((one for one in refusals if key_of(one) == key), None)
