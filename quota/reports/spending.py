"""Who spent the budget, and which calls were refused: summed from the log and the past, for people.

`quota.cli.reports` displays it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any, NamedTuple

from quota.budget import charge_id
from quota.common.clock import LATEST_MS, rfc3339, stamp, utc
from quota.common.text import members, show
from quota.deciding.history import begin, charges, entries, sums, whole_since_ms
from quota.deciding.project import Project
from quota.decision import SHADOW, LimitState
from quota.errors import LedgerError, UsageError
from quota.rules.entry import END, FURTHER, Entry, Id, just_before
from quota.rules.refusals import RefusedSum
from quota.rules.spent import ChargedSum, Spent
from quota.terms.arguments import MAX_NUMBER, texts, whole
from quota.terms.limits import HOUR_MS, Selector, Window, cutoff

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
        """The rows that are shown."""
        return [
            {**dict(zip(self.by, values, strict=True)), "charges": calls, "units": units}
            for values, calls, units in self.rows[: self.most]
        ]


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


_KINDS = {"limit": "limit", "leave": "limit", SHADOW: "limit", "exhausted": "bucket", "closed": "bucket"}
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
        rows += ((project.name, *row) for row in zip(ids_of_calls(spent), spent, strict=True))
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


def ids_of_calls(spent: Sequence[Spent]) -> list[str]:
    """For each of these charges the id of its call."""
    parts = Counter(map(_call_of, spent))
    return [charge_id(charge.id[0], _call_of(charge), parts[_call_of(charge)] - 1) for charge in spent]


def _call_of(charge: Spent) -> str:
    """The key of the first charge of a call."""
    return charge.key.partition(FURTHER)[0]


def read_sums(project: Project) -> tuple[Sequence[ChargedSum], Sequence[RefusedSum]]:
    """All charges by method and job, and all refusals that were handed over, by limit, job and reason. Raises
    LedgerError."""
    return sums(project), project.state.refused_sums()


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
    begin(project)
    for text in project.state.refusals(END[0]).newest:
        try:
            yield _kept(json.loads(text), project.name)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError) as error:
            raise LedgerError(
                f"ledger {project.log.label} holds data that no quota program writes: {text!r:.200}"
            ) from error


def _kept(data: Mapping[str, Any], project: str) -> KeptRefusal:
    def named(field: str) -> str:
        if type(data[field]) is not str:
            raise ValueError(field)
        return str(data[field])

    fields = ("credential", "method", "job", "region", "run", "machine", "reason", "why")
    words: dict[str, Any] = {field: named(field) for field in fields}
    return KeptRefusal(
        at_ms=_moment(named("at")),
        project=project,
        cost_units=_units(data["cost_units"]),
        refused_by=None if data["refused_by"] is None else named("refused_by"),
        retry_at_ms=None if data["retry_at"] is None else _moment(named("retry_at")),
        limits=tuple(map(_state, data["limits"])),
        limits_left_out=_units(data.get("limits_left_out", 0)),
        data=data,
        calls=max(1, _units(data.get("calls", 1))),
        **words,
    )


def _state(row: Mapping[str, Any]) -> LimitState:
    fields = ("cost_units", "used_units", "limit_units", "remaining_units")
    numbers: dict[str, Any] = {field: _units(row[field]) for field in fields}
    return LimitState(name=str(row["name"]), leave_units=_units(row.get("leave_units", 0)), **numbers)


def _units(value: object) -> int:
    return whole(value, "in a refusal: that", 0, MAX_NUMBER)


def _moment(text: str) -> int:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(text)
    return whole(round((at - utc(0)) / timedelta(milliseconds=1)), "ms: a time", 0, LATEST_MS)
