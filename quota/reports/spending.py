"""Who spent the budget, and which calls were refused: from the log and the past, for people.

Spending          charges, summed
ChargeExplained   a single charge, and what it did to the limits
KeptRefusal       a single refusal
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from quota.budget import MAX_CHARGES, Budget, project_of
from quota.common.clock import LATEST_MS, NEVER, moment, rfc3339, stamp, utc
from quota.common.text import members, one_line, show
from quota.deciding.history import charges, entries, sums, whole_since_ms
from quota.deciding.project import Project
from quota.decision import SHADOW, LimitState
from quota.errors import LedgerError, UnknownCharge, UsageError
from quota.ledger.state import begin
from quota.rules.entry import END, Entry, Id, call_keys, id_of_call, ids_of_calls, just_before, parts_of_id
from quota.rules.refusals import RefusedSum
from quota.rules.spent import ChargedSum, Spent, spent
from quota.rules.total import total_of
from quota.session import Session, budgets_of
from quota.terms.arguments import MAX_NUMBER, checked, text, texts, whole
from quota.terms.limits import HOUR_MS, Limit, Selector, Window, cutoff, leaves_at

if TYPE_CHECKING:
    from quota.journal.draws import Draw

SPEND_FIELDS = ("method", "job", "region", "run", "day", "hour", "bucket")


class Spending(NamedTuple):
    """Charges summed by some of SPEND_FIELDS: rows of (values of `by`, charges, units), dearest first.

    It covers all charges since `since_ms`, which is later than requested if the ledger does not reach back so far. The
    rows lack the units that only upstream counted: `upstream_units`, as the limits count them now. A call to several
    buckets is one charge in `total_charges`, and in a row that has all of them. `refused`, most calls first, covers
    whole hours; `would_refuse` has the admitted calls that a shadow limit would have refused. `adds_buckets_up`: some
    row sums several buckets. `most` rows are shown; the total covers all.
    """

    since_ms: int
    until_ms: int
    by: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], int, int], ...]
    upstream_units: int = 0
    refused: tuple[RefusedSum, ...] = ()
    adds_buckets_up: bool = False
    would_refuse: tuple[RefusedSum, ...] = ()
    most: int | None = None
    total_charges: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.by, "charges", "units")

    @property
    def total_units(self) -> int:
        return sum(units for _, _, units in self.rows)

    def as_json(self) -> dict[str, object]:
        return {
            **members(self, "since until"),
            "by": list(self.by),
            "rows": self.rows_json(),
            **members(self, "total_units", if_any="upstream_units"),
            "refused": [count._asdict() for count in self.refused],
            **({"would_refuse": [count._asdict() for count in self.would_refuse]} if self.would_refuse else {}),
        }

    def rows_json(self) -> list[dict[str, object]]:
        """The rows that are shown, by `columns`."""
        rows = [(*values, calls, units) for values, calls, units in self.rows[: self.most]]
        return [dict(zip(self.columns, row, strict=True)) for row in rows]


def read_spending(
    projects: Iterable[Project],
    by: str | Iterable[str],
    since_ms: int,
    *,
    job: str | None = None,
    local: bool = False,
) -> Spending:
    """The charges to these projects since `since_ms`, or since the time from which the history is whole, with
    corrections applied: of all jobs, or of one job. Days and hours are in UTC, or in the local zone. Raises
    LedgerError."""
    projects, by = list(projects), texts(by, "field")
    since_ms = max([since_ms, *map(whole_since_ms, projects)])
    units, calls, total_charges = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), 0
    buckets: dict[tuple[str, ...], set[str]] = {}
    for project in projects:
        for charge in charges(project, since_ms):
            if job not in (None, charge.job):
                continue
            row = tuple([_value(charge, field, local) for field in by])
            units[row] += charge.units
            # A call of several buckets is a charge in each of them, and counts once.
            calls[row] += charge.is_first or "bucket" in by
            total_charges += charge.is_first
            buckets.setdefault(row, set()).add(charge.bucket)
    ranked = sorted(((row, calls[row], n) for row, n in units.items()), key=lambda row: (-row[2], row[0]))
    refused = [count for count in _refused(projects, since_ms) if job in (None, count.job)]
    return Spending(
        since_ms=since_ms,
        until_ms=projects[0].log.now_ms(),
        by=by,
        rows=tuple(ranked),
        refused=tuple([count for count in refused if count.reason != SHADOW]),
        adds_buckets_up=any(len(names) > 1 for names in buckets.values()),
        would_refuse=tuple([count for count in refused if count.reason == SHADOW]),
        total_charges=total_charges,
    )


def _refused(projects: Iterable[Project], since_ms: int) -> list[RefusedSum]:
    """The refused calls since the hour of a time, most calls first."""
    calls: Counter[tuple[str, str, str]] = Counter()
    for project in projects:
        for count in project.state.refusals(since_ms).counts:
            if count.hour_ms + HOUR_MS > since_ms:
                calls[count.limit, count.job, count.reason] += count.calls
    return [RefusedSum(*kind, number) for kind, number in sorted(calls.items(), key=lambda row: (-row[1], row[0]))]


def _value(charge: Spent, field: str, local: bool) -> str:
    """What stands in a row for one of SPEND_FIELDS."""
    if field not in ("day", "hour"):
        return str(getattr(charge, field))
    at = stamp(charge.id[0])
    hour = f"{at[:13]}:00:00{at[19:]}" if local else rfc3339(charge.id[0] // HOUR_MS * HOUR_MS)
    return hour[:10] if field == "day" else hour


_KINDS = {
    **dict.fromkeys(("limit", "leave", SHADOW), "limit"),
    "exhausted": "bucket",
    "closed": "upstream's grant for",  # a bucket, or a limit
}
"""What refused a call, by the reason."""


def refused_by(refused: Iterable[RefusedSum]) -> dict[str, int]:
    """Refused calls by their cause: a limit, a closed bucket or another reason, most calls first."""
    calls: Counter[str] = Counter()
    for count in refused:
        kind = _KINDS.get(count.reason)
        calls[f"{kind} {show(count.limit)}" if kind else count.limit or count.reason] += count.calls
    return dict(sorted(calls.items(), key=lambda row: (-row[1], row[0])))


def read_charges(projects: Iterable[Project], since_ms: int) -> list[tuple[str, str, Spent]]:
    """Single charges since `since_ms`, oldest first, each with its project and the id of its call. Raises
    LedgerError."""
    rows: list[tuple[str, str, Spent]] = []
    for project in projects:
        spent = charges(project, since_ms)
        names = ids_of_calls([(charge.id[0], charge.key) for charge in spent])
        rows += ((project.name, *row) for row in zip(names, spent, strict=True))
    return sorted(rows, key=lambda row: row[2].id[0])


def entries_of_window(project: Project, window: Window, at_ms: int, before: Id = END) -> list[Entry]:
    """The entries in a window at a time that stand before an id, as far as the history has them."""
    after = just_before(max(0, cutoff(window, at_ms) + 1))
    return list(takewhile(lambda entry: entry.id < before, entries(project, after)))


def counted(selector: Selector, spent: Iterable[Spent]) -> Iterator[tuple[Spent, int]]:
    """The charges that a limit with this selector counts, each with the units that it counts of it."""
    for charge in spent:
        if charge.units and selector.counts(charge.bucket, charge.method, charge.job):
            yield charge, selector.cost(charge.units)


def read_sums(project: Project) -> tuple[Sequence[ChargedSum], Sequence[RefusedSum]]:
    """All charges by method and job, and all refusals that were handed over, by limit, job and reason. Raises
    LedgerError."""
    return sums(project), project.state.refused_sums()


# -- a single charge ---------------------------------------------------------------------------------------------------


class LimitAround(NamedTuple):
    """A limit that counts a charge: its units just before and after it, and when it stops counting. Unless `whole`, the
    history does not cover the limit's window, and the limit counted more than is shown."""

    window: str
    name: str
    limit_units: int
    before_units: int
    after_units: int
    whole: bool
    leaves_ms: int


class ChargeExplained(NamedTuple):
    """A charge, read at `asked_ms` by the ledger's clock. `limits` are those that count it; `not_counted_by` names the
    others.

    `draw` is set if the charge was drawn on this machine's allowance. Unless it is `in_log`, only the journal has it.
    If the call charged several buckets, this is the first charge, and `also` has the others.
    """

    id: str
    credential: str
    project: str
    asked_ms: int
    charge: Spent
    draw: Draw | None
    in_log: bool
    limits: tuple[LimitAround, ...]
    not_counted_by: tuple[str, ...]
    also: tuple[ChargeExplained, ...] = ()

    @property
    def charged_units(self) -> int | None:
        """The units as charged; None if only the journal has the charge: the journal keeps the present units."""
        return self.charge.charged_units if self.in_log else None

    @property
    def entry(self) -> str | None:
        """The name of the entry in the log; None if only the journal has the charge."""
        return id_of_call(self.charge.id[0], self.charge.key, 0) if self.in_log else None

    @property
    def at_ms(self) -> int:
        return self.charge.id[0] if self.draw is None else self.draw.entry.id[0]

    def as_json(self) -> dict[str, object]:
        draw, charge, drawn = self.draw, self.charge, None
        if draw is not None:
            drawn = {"at": rfc3339(self.at_ms), "repaid": draw.handed_id is not None, "entry": self.entry}
        return {
            **members(self, "id asked_at at credential project"),
            **members(charge, "run"),
            **members(self, "charged_units"),
            **members(charge, "method bucket job region units"),
            "drawn": drawn,
            "limits": [
                members(row, "window name limit_units before_units after_units whole leaves_at") for row in self.limits
            ],
            "not_counted_by": list(self.not_counted_by),
            **({"also": [further.as_json() for further in self.also]} if self.also else {}),
        }


def explain_charge(session: Session, name: str, credential: str | None = None) -> ChargeExplained:
    """The charge with this id in any project, with the further charges of its call.

    Raises UnknownCharge if no charge has the id, or the ledger no longer keeps it; LedgerError.
    """
    ms, key, further = parts_of_id(text(name, "charge"))
    keys = call_keys(key, further)
    chosen = budgets_of(session, credential)
    for budget in chosen if key else ():
        logged, draws = _records(project_of(budget), ms, keys)
        explained = [
            _explained(budget, name, logged.get(key), draws.get(key)) for key in keys if key in logged or key in draws
        ]
        if explained and explained[0].charge.key == key:
            return explained[0]._replace(also=tuple(explained[1:]))
    projects = ", ".join(repr(budget.project) for budget in chosen)
    unknown = f"no charge {one_line(name)[:80]!r} in project {projects}"
    since_ms = max([whole_since_ms(project_of(budget)) for budget in chosen], default=0)
    if key and ms < since_ms:
        raise UnknownCharge(f"{unknown} any more: the ledger has single charges since {moment(since_ms)}")
    raise UnknownCharge(f"{unknown}; `quota log` lists the charges")


def _records(project: Project, since_ms: int, keys: Collection[str]) -> tuple[dict[str, Spent], dict[str, Draw]]:
    """These charges in the history: since their time, or anywhere in the log if a repair dated them anew. And their
    draws in this machine's journal."""
    drawn = [] if project.journal is None else project.journal.draws.drawn(project.wall(), NEVER)
    logged = {charge.key: charge for charge in charges(project, since_ms) if charge.key in keys}
    if not logged:
        trimmed_ms = project.log.begin(project.name).trimmed[0]
        logged = {charge.key: charge for charge in charges(project, trimmed_ms) if charge.key in keys}
    return logged, {draw.entry.key: draw for draw in drawn if draw.entry.key in keys}


def _explained(budget: Budget, name: str, logged: Spent | None, draw: Draw | None) -> ChargeExplained:
    project, charge = project_of(budget), logged
    if charge is None:
        assert draw is not None  # noqa: S101  # one of the two is there
        (charge,) = spent([draw.entry])
    limits = [*dict.fromkeys([*budget.limits, *budget.limits_of(charge.job)])] if logged is not None else []
    counting = [limit for limit in limits if limit.view.selector.counts(charge.bucket, charge.method, charge.job)]
    return ChargeExplained(
        id=name,
        credential=budget.credential,
        project=budget.project,
        asked_ms=project.log.now_ms(),
        charge=charge,
        draw=draw,
        in_log=logged is not None,
        limits=tuple(_around(project, charge, counting)),
        not_counted_by=tuple([limit.name for limit in limits if limit not in counting]),
    )


def _around(project: Project, charge: Spent, limits: Sequence[Limit]) -> Iterator[LimitAround]:
    """Each of these limits around a charge that it counts."""
    if not limits:
        return
    at_ms = charge.id[0]
    longest = min((limit.view.window for limit in limits), key=lambda window: cutoff(window, at_ms))
    behind = entries_of_window(project, longest, at_ms, charge.id)
    whole_ms = whole_since_ms(project)
    for limit in limits:
        window = limit.view.window
        before_units = total_of(limit.view, behind, at_ms).used_units
        yield LimitAround(
            window=window.name,
            name=limit.name,
            limit_units=limit.limit_units,
            before_units=before_units,
            after_units=before_units + limit.view.selector.cost(charge.charged_units),
            whole=whole_ms <= cutoff(window, at_ms),
            leaves_ms=leaves_at(window, at_ms),
        )


# -- a single refusal --------------------------------------------------------------------------------------------------


class KeptRefusal(NamedTuple):
    """One refused call as the ledger keeps it: `data` is all of it, as `quota.rules.refusals.refusal_text` wrote it.

    `limits_left_out` limits are missing, because they did not fit. For several `calls` together, `method` is the first
    call's, and `cost_units` the sum.
    """

    at_ms: int
    credential: str
    project: str
    method: str
    cost_units: int
    job: str
    region: str
    run: str
    machine: str
    reason: str
    refused_by: str | None
    retry_at_ms: int | None
    why: str
    limits: tuple[LimitState, ...]
    limits_left_out: int
    data: Mapping[str, Any]
    calls: int = 1

    @property
    def closed_by_upstream(self) -> bool:
        """Whether upstream had closed a bucket; else a limit refused, or nothing could be decided. The reason is
        "closed" also for a limit, if upstream grants less than the call needs."""
        too_little = any(
            state.name == self.refused_by and state.cost_units > state.limit_units for state in self.limits
        )
        return self.reason == "exhausted" or (self.reason == "closed" and not too_little)

    @property
    def tells_costs(self) -> bool:
        """Whether it has every limit that counted it, with its cost there."""
        return bool(self.limits) and not self.limits_left_out


def read_refusals(project: Project) -> Iterator[KeptRefusal]:
    """The last refusals of a project, oldest first. Raises LedgerError."""
    begin(project.log, project.name)
    for kept in project.state.refusals(END[0]).newest:
        try:
            yield _kept(json.loads(kept), project.name)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError) as error:
            raise LedgerError(
                f"ledger {project.log.label} holds data that no quota program writes: {kept!r:.200}"
            ) from error


def _kept(data: Mapping[str, Any], project: str) -> KeptRefusal:
    fields = ("credential", "method", "job", "region", "run", "machine", "reason", "why")
    words: dict[str, Any] = {field: text(data[field], field) for field in fields}
    states = [{field: row[field] for field in LimitState._fields if field in row} for row in data["limits"]]
    return KeptRefusal(
        at_ms=_moment(data["at"]),
        project=project,
        cost_units=_units(data["cost_units"]),
        refused_by=None if data["refused_by"] is None else text(data["refused_by"], "refused_by"),
        retry_at_ms=None if data["retry_at"] is None else _moment(data["retry_at"]),
        limits=tuple([checked(LimitState(**state)) for state in states]),
        limits_left_out=_units(data.get("limits_left_out", 0)),
        data=data,
        calls=whole(data.get("calls", 1), "in a refusal: calls", 1, MAX_CHARGES),
        **words,
    )


def _units(value: object) -> int:
    return whole(value, "in a refusal: that", 0, MAX_NUMBER)


def _moment(written: str) -> int:
    at = datetime.fromisoformat(written)
    if at.tzinfo is None:
        raise ValueError(written)
    return whole(round((at - utc(0)) / timedelta(milliseconds=1)), "ms: a time", 0, LATEST_MS)
