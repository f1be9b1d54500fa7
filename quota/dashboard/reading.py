"""What the page reads from the ledger, each part in one go.

Now          the status and the last refusals: quick, and read for every request
Curves       the use of each limit over the day
Spent        who spent it, over a day, a week and all that is kept
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from hashlib import blake2b
from typing import NamedTuple

from quota.budget import Budget, account_of
from quota.common.clock import NEVER
from quota.dashboard.contract import Forecast
from quota.dashboard.curves import Curve, Event, curve, since
from quota.dashboard.words import Searches
from quota.deciding.outlook import ask, unlogged_usage
from quota.decision import enforced
from quota.errors import UsageError
from quota.ledger.contract import read_entries
from quota.reports.metrics import Sample, of_silence, of_status, of_sums
from quota.reports.spending import KeptRefusal, Refusals, read_refusals, read_spending, read_sums
from quota.reports.status import Status, read_status
from quota.session import Session, projects_of
from quota.terms.limits import DAY_MS, HOUR_MS, Limit

SEARCH = "search.list"
"""What people count by: the call that most of a budget is spent on. Other APIs have none, and are told in units."""

WHOLE_MS = 2 * DAY_MS
"""How far back single charges are read. Limits with longer windows are drawn from the history, by the hour."""

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
    """Who spent a project's units: rows, those who spent most lately first. In `since_ms` each span begins; `gap_ms`,
    `refused` and `would_refuse` are of the longest."""

    project: str
    at_ms: int
    since_ms: tuple[int, ...]
    rows: tuple[SpentRow, ...]
    totals: tuple[int, ...]
    gap_ms: tuple[int, int] | None
    refused: tuple[Refusals, ...]
    would_refuse: tuple[Refusals, ...]


def read_now(session: Session) -> Now:
    """The state of the ledger. Raises LedgerError."""
    status = read_status(session)
    calls = {one.name: found for one in status.credentials if one.open and (found := _calls(session, one.name))}
    kept = [one for project in projects_of(session) for one in read_refusals(session.ledger, project)]
    kept.sort(key=lambda one: one.at_ms, reverse=True)
    return Now(status, calls, tuple(kept))


def read_curves(session: Session, forecast: Forecast | None = None) -> Curves:
    """How much of each limit was used, and will be by what `forecast` expects. Raises LedgerError."""
    status = read_status(session)
    known_ms = forecast.until_ms if forecast is not None and forecast.scheduled else None
    curves: Curves = {}
    for project, credential in projects_of(session).items():
        budget = session.budget(credential.name)
        row = next(one for one in status.credentials if one.project == project)
        events = _events(session, budget, status.at_ms)
        coming = _expected(budget, forecast)
        lost = _lost(budget) if row.unlogged_units else {}
        for n, (limit, state) in enumerate(zip(budget.limits, row.limits, strict=True)):
            until_ms = max(
                (at_ms for at_ms in (state.resets_ms, state.next_capacity_ms, state.room_ms) if at_ms), default=None
            )
            gone = lost.get(limit.view.name, ())
            made = curve(limit.view.window, status.at_ms, until_ms, events[n], coming[n], gone, known_ms)
            curves[project, limit.name] = made
    return curves


def _events(session: Session, budget: Budget, at_ms: int) -> list[list[Event]]:
    """What each limit counts, oldest first."""
    firsts_ms = [since(limit.view.window, at_ms) for limit in budget.limits]
    first_ms = min(firsts_ms, default=at_ms)
    found: list[list[Event]] = [[] for _ in budget.limits]
    counting: dict[tuple[str, str, str], list[tuple[int, Limit]]] = {}

    def add(at_ms: int, key: tuple[str, str, str], units: int, calls: int) -> None:
        """`key` is a bucket, a method and a job."""
        if key not in counting:
            counting[key] = [(n, limit) for n, limit in enumerate(budget.limits) if limit.view.selector.counts(*key)]
        for n, limit in counting[key]:
            if at_ms >= firsts_ms[n]:
                found[n].append(Event(at_ms, calls if limit.view.selector.count == "calls" else units, key[2]))

    single_ms = max(first_ms, (at_ms - WHOLE_MS) // HOUR_MS * HOUR_MS)
    if first_ms < single_ms:
        by = ("hour", "bucket", "method", "job")
        hours = read_spending(session.ledger, budget.project, by, first_ms).rows
        for values, charges, units in sorted(hours):
            hour_ms = _ms(values[0])
            if hour_ms + HOUR_MS <= single_ms:
                add(max(hour_ms, first_ms), (values[1], values[2], values[3]), units, charges)
    for e in read_entries(session.ledger, budget.project, single_ms, NEVER):
        if e.units:
            add(e.ms, (e.bucket, e.method, e.job), e.units, 1)
    return found


def _ms(rfc3339_text: str) -> int:
    return int(datetime.fromisoformat(rfc3339_text).timestamp()) * 1000


def _expected(budget: Budget, forecast: Forecast | None) -> list[list[Event]]:
    found: list[list[Event]] = [[] for _ in budget.limits]
    for one in forecast.expected if forecast is not None else ():
        for n, limit in enumerate(budget.limits if one.project == budget.project else ()):
            selector = limit.view.selector
            if selector.counts(one.bucket, one.method, one.job):
                found[n].append(Event(one.at_ms, one.calls if selector.count == "calls" else one.units, one.job))
    return found


def _lost(budget: Budget) -> dict[str, list[tuple[int, int]]]:
    """What counts without a charge, by view: units, and until when."""
    found: dict[str, list[tuple[int, int]]] = {}
    for usage in unlogged_usage(account_of(budget)):
        found.setdefault(usage.view, []).extend(usage.expiries)
    return found


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
        decision = ask(account_of(budget), SEARCH, price.units, "").decision
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
    return tuple(_spent(session, project) for project in projects_of(session))


def _spent(session: Session, project: str) -> Spent:
    by, at_ms = ("job", "method", "region"), session.ledger.now_ms()
    spans = [read_spending(session.ledger, project, by, max(0, at_ms - span_ms)) for span_ms in SPANS_MS]
    sums = [{values: units for values, _, units in one.rows} for one in spans]
    keys = dict.fromkeys(values for one in spans for values, _, _ in one.rows)
    rows = [SpentRow(key[0], key[1], key[2], tuple(one.get(key, 0) for one in sums)) for key in keys]
    rows.sort(key=lambda row: (*(-units for units in row.units), row[:3]))
    longest = spans[-1]
    return Spent(
        project,
        at_ms,
        tuple(one.since_ms for one in spans),
        tuple(rows),
        tuple(one.total_units for one in spans),
        longest.gap_ms,
        longest.refused,
        longest.would_refuse,
    )


def read_samples(session: Session, status: Status) -> list[Sample]:
    """What `/metrics` exports of the ledger. Raises LedgerError."""
    found: list[Sample] = []
    for project in projects_of(session):
        found += [*of_status(status, project), *of_sums(project, *read_sums(session.ledger, project))]
    return found


def samples_of_silence(session: Session) -> list[Sample]:
    """What `/metrics` exports while the ledger does not answer."""
    found: list[Sample] = []
    for project, credential in projects_of(session).items():
        found += of_silence(project, session.budget(credential.name).owed_units())
    return found


def key_of(kept: KeptRefusal) -> str:
    """What names a refusal in an address: the same for as long as it is kept."""
    text = json.dumps([kept.project, kept.data], sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()


def find_refusal(refusals: Iterable[KeptRefusal], key: str) -> KeptRefusal | None:
    return next((one for one in refusals if key_of(one) == key), None)
