"""Reads the parts of the page from the ledger, in threads beside the requests. No request waits for a slow ledger, and
the page keeps its last state while the ledger does not answer.

    Now        the status and the last refusals: quick, and read for every request
    Curves     the use of each limit over the day
    Spent      who spent the budget, over a day, a week and 35 days
    Kept       one part that is read again and again
    Reading    its last value, the time of that, and since when reading fails
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from quota.budget import project_of
from quota.common.clock import elapsed_s, host_clock
from quota.common.redact import redact
from quota.common.text import describe
from quota.dashboard.charts import Curve, Event, curve, since
from quota.deciding.history import charges
from quota.errors import LedgerError, QuotaError
from quota.reports.metrics import Sample, of_silence, of_status, of_sums
from quota.reports.runs import Contribution, Forecast
from quota.reports.spending import KeptRefusal, Spending, counted, read_refusals, read_spending, read_sums
from quota.reports.status import Status, read_status
from quota.session import Session, budgets_of
from quota.terms.limits import parse_duration

SPANS = ("24h", "7d", "35d")
SPANS_MS = tuple(map(parse_duration, SPANS))


class Now(NamedTuple):
    """The ledger as it was at `status.at_ms`. `refusals` are of all projects, the newest first."""

    status: Status
    refusals: tuple[KeptRefusal, ...]


class Curves(NamedTuple):
    """The use of limits, by project and name, and the forecast that they show."""

    of: dict[tuple[str, str], Curve]
    forecast: Forecast


Spent = dict[str, list[Spending]]
"""Who spent the units, by project: in each of SPANS_MS."""


def read_now(session: Session) -> Now:
    """The state of the ledger. Raises LedgerError."""
    status = read_status(session, jobs=True)
    refusals: list[KeptRefusal] = []
    for budget in budgets_of(session):
        with suppress(LedgerError):  # its verdict says why
            refusals += read_refusals(project_of(budget))
    refusals.sort(key=lambda kept: kept.at_ms, reverse=True)
    return Now(status, tuple(refusals))


def read_curves(session: Session, forecast: Forecast) -> Curves:
    """The use of each limit, and its use by the `forecast`. Raises LedgerError."""
    status = read_status(session)
    known_ms = forecast.until_ms if forecast.scheduled else None
    curves: dict[tuple[str, str], Curve] = {}
    for budget in budgets_of(session):
        project = budget.project
        limits = next(row.limits for row in status.credentials if row.settings.project == project)
        if not limits:
            continue
        first_ms = min((since(limit.view.window, status.at_ms) for limit in budget.limits), default=status.at_ms)
        past = charges(project_of(budget), max(0, first_ms))
        coming = [charge for charge in forecast.expected if charge.project == project]
        for row in limits:
            view, selector = row.limit.view, row.limit.view.selector
            ends_ms = [at_ms for at_ms in (row.resets_ms, row.next_capacity_ms, row.room_ms) if at_ms]
            events = [Event(charge.id[0], units, charge.job) for charge, units in counted(selector, past)]
            expected = [
                Event(charge.at_ms, charge.calls if selector.count == "calls" else charge.units, charge.job)
                for charge in coming
                if selector.counts(charge.bucket, charge.method, charge.job)
            ]
            others = [(heard.units, heard.until_ms) for heard in project_of(budget).others(view)]
            most_units = None if row.limit.shadow else max(row.state.limit_units, row.enforced_units)
            curves[project, row.limit.name] = curve(
                view.window, status.at_ms, max(ends_ms, default=None), events, expected, others, known_ms, most_units
            )
    return Curves(curves, forecast)


def read_spent(session: Session) -> Spent:
    """Who spent the budget, for each project. Raises LedgerError."""
    by, spent, at_ms = ("job", "method", "region"), Spent(), session.ledger.now_ms()
    for budget in budgets_of(session):
        project = project_of(budget)
        with suppress(LedgerError):
            spent[project.name] = [read_spending([project], by, max(0, at_ms - span_ms)) for span_ms in SPANS_MS]
    return spent


def forecast_of(added: Iterable[Reading[Contribution]]) -> Forecast:
    """The forecast among the parts of other packages that were read; one without a schedule if there is none."""
    parts = (reading.value for reading in added)
    forecasts = (part.forecast for part in parts if part is not None and part.forecast is not None)
    return next(forecasts, Forecast(0, (), {}, scheduled=False))


def read_samples(session: Session, status: Status | None) -> list[Sample]:
    """The samples of the ledger for `/metrics`. No status: the ledger does not answer."""
    samples: list[Sample] = []
    for budget in budgets_of(session):
        of_project = [*of_silence(budget.project, budget.owed_units())]
        if status is not None:
            with suppress(LedgerError):
                charged, refused = read_sums(project_of(budget))
                of_project = [*of_status(status, budget.project), *of_sums(budget.project, charged, refused)]
        samples += of_project
    return samples


def key_of(kept: KeptRefusal) -> str:
    """The name of a refusal in an address. It never changes."""
    text = json.dumps([kept.project, kept.data], sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=9).hexdigest()


# -- the parts are kept ------------------------------------------------------------------------------------------------

T = TypeVar("T")

FRESH_S = 1.0
TIMES = 20
"""A value is kept for this many times the duration of its reading, so an open page takes at most 5% of a core."""

LONGEST_S = 60.0
RETRY_S = 2.0
"""The pause after a failure."""

FIRST_S = 3.0
"""How long a request waits if the page has no value yet, or only one older than OLD_S."""

OLD_S = 5.0


class Reading(NamedTuple, Generic[T]):
    """`value` is None until the first reading, at `read_ms`. While reading fails, `error` is the reason and
    `failing_ms` the time of the first failure."""

    value: T | None = None
    read_ms: int | None = None
    error: str | None = None
    failing_ms: int | None = None


class Kept(Generic[T]):
    """A value that `read` returns. One thread reads it at a time. `read` raises QuotaError."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._changed = threading.Condition()
        self.last: Reading[T] = Reading()
        self._under_way = False
        self._due_s = 0.0  # of the monotonic clock
        self._read_s = 0.0

    def begin(self) -> None:
        """Begin to read the value, if it is due."""
        with self._changed:
            if not self._under_way and elapsed_s() >= self._due_s:
                self._under_way = True
                try:
                    threading.Thread(target=self._read_once, name="quota-dashboard", daemon=True).start()
                except RuntimeError as error:  # no more threads can be started
                    self._keep(None, str(error), 0)

    def get(self, patience_s: float) -> Reading[T]:
        """The last value, or if it is due, the value that is read within `patience_s`."""
        self.begin()
        with self._changed:
            if self._under_way:
                old = elapsed_s() - self._read_s > OLD_S and self.last.error is None
                wait_s = max(patience_s, FIRST_S) if self.last.value is None or old else patience_s
                self._changed.wait_for(lambda: not self._under_way, wait_s)
            return self.last

    def _read_once(self) -> None:
        began_s = elapsed_s()
        value, error = None, None
        try:
            value = self._read()
        except QuotaError as wrong:
            error = str(wrong)
        except BaseException as wrong:  # the page goes on, and shows it
            error = describe(wrong)
        with self._changed:
            self._keep(value, error, elapsed_s() - began_s)

    def _keep(self, value: T | None, error: str | None, took_s: float) -> None:
        """End a reading that took `took_s`. The caller holds `_changed`."""
        last, now_ms = self.last, host_clock()
        if error is None:
            self.last = Reading(value, now_ms)
            self._read_s = elapsed_s()
        else:
            failing_ms = now_ms if last.failing_ms is None else last.failing_ms
            self.last = Reading(last.value, last.read_ms, redact(error), failing_ms)
        keeps_s = min(max(FRESH_S, TIMES * took_s), LONGEST_S) if error is None else RETRY_S
        self._due_s = elapsed_s() + keeps_s
        self._under_way = False
        self._changed.notify_all()
