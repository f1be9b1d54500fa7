"""Who spent the budget, and which calls were refused: from the history and the log, for people.

The history has 35 days by the hour (`quota.ledger.history`). The log has its end, and whatever is younger than 49 h.
Each charge is taken from one of them:

    the log         the part of an hour at the beginning, all that was not rolled up yet, and hours with more rows than
                    the history keeps
    the history     everything between

`quota.cli.render` displays it.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from quota.common.clock import LATEST_MS, NEVER, host_clock, rfc3339, utc
from quota.common.members import members
from quota.decision import SHADOW, LimitState
from quota.errors import LedgerError, UsageError
from quota.ledger.contract import Ledger, entries_between, just_before, read_entries
from quota.ledger.entry import Entry, Id
from quota.ledger.history import HISTORY_MS, OTHER, RUN_CHARS, History, HourOfSpending, RefusedSum, RunningSum
from quota.ledger.parts import history_in
from quota.terms.arguments import MAX_NUMBER, texts, whole
from quota.terms.limits import DAY_MS, HOUR_MS

SUMS_S, SUMS_READ = 0.002, 100
"""How long the sums may take to be rolled up, and how many charges behind them are read."""

SPEND_FIELDS = ("method", "job", "region", "run", "day", "hour", "bucket")

CATCH_UP_S = 0.3
"""How long a reader rolls up what nobody has rolled up yet; it reads the rest from the log."""


class Refusals(NamedTuple):
    """Calls that were refused, in hours: the limit, or the bucket that upstream closed, the job and the reason."""

    limit: str
    job: str
    reason: str
    calls: int


class Spending(NamedTuple):
    """Charges summed by some of SPEND_FIELDS: rows of (values of `by`, charges, units), dearest first.

    It covers all charges since `since_ms`, which is later than requested where the history does not reach back so far,
    and up to an hour earlier where the log does not. Within `gap_ms` charges may be missing that the ledger lost. The
    rows lack all that the ledger has lost, and what only upstream counted: its limits count `unlogged_units` for both
    now, of which `upstream_units` only upstream counted. In a row of several buckets a call of all of them is one
    charge: what a job charged for a method and region in one hour is as many as in the bucket that has most.
    `refused`, most calls first, covers whole hours; `would_refuse` has the calls that left, and that a shadow limit
    would have refused. `adds_buckets_up`: some row has the units of several buckets.
    """

    since_ms: int
    until_ms: int
    by: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], int, int], ...]
    gap_ms: tuple[int, int] | None = None
    unlogged_units: int = 0
    upstream_units: int = 0
    refused: tuple[Refusals, ...] = ()
    adds_buckets_up: bool = False
    would_refuse: tuple[Refusals, ...] = ()

    @property
    def total_units(self) -> int:
        return sum(units for _, _, units in self.rows)

    def as_json(self) -> dict[str, object]:
        gap = None if self.gap_ms is None else [*map(rfc3339, self.gap_ms)]
        return {
            **members(self, "since until"),
            "by": list(self.by),
            "rows": [
                {**dict(zip(self.by, values, strict=True)), "charges": charges, "units": units}
                for values, charges, units in self.rows
            ],
            **members(self, "total_units", if_any="unlogged_units upstream_units"),
            **({} if gap is None else {"gap": {"from": gap[0], "to": gap[1]}}),
            "refused": [one._asdict() for one in self.refused],
            **({"would_refuse": [one._asdict() for one in self.would_refuse]} if self.would_refuse else {}),
        }


def read_spending(ledger: Ledger, projects: str | Iterable[str], by: str | Iterable[str], since_ms: int) -> Spending:
    """The charges to these projects since `since_ms`, or since the time from which all of them are known, with
    corrections applied. Runs are known as long as the log has them. Raises LedgerError.
    """
    by, names = texts(by, "field"), list(dict.fromkeys(texts(projects, "project")))
    until_ms = ledger.now_ms()
    parts = [_Part.read(ledger, project, since_ms, until_ms) for project in names]
    known = [part.log_after_ms if "run" in by else part.known_after_ms for part in parts]
    after_ms = max(known, default=0)
    if since_ms <= after_ms:
        since_ms = after_ms + 1 if after_ms else since_ms
    if "run" not in by and any(0 < part.log_after_ms >= since_ms for part in parts):
        since_ms = max(since_ms // HOUR_MS * HOUR_MS, after_ms + 1)
    units, calls = Counter[tuple[str, ...]](), dict[tuple[Any, ...], Counter[str]]()
    for part in parts:
        logged = part.logged(ledger, just_before(since_ms), (NEVER, NEVER))
        for row in logged if "run" in by else part.rows(ledger, since_ms):
            key = tuple(_FIELD_OF[field](row) for field in by)
            units[key] += row.units
            alike = key, part.project, row.hour_ms, row.method, row.job, row.region
            calls.setdefault(alike, Counter())[row.bucket] += row.charges
    # A call of several buckets is a charge in each of them, and counts once.
    charges, buckets = Counter[tuple[str, ...]](), dict[tuple[str, ...], set[str]]()
    for (key, *_), of_buckets in calls.items():
        charges[key] += max(of_buckets.values())
        buckets.setdefault(key, set()).update(of_buckets)
    mixed = any(len(names) > 1 for names in buckets.values())
    ranked = sorted(((key, charges[key], n) for key, n in units.items()), key=lambda row: (-row[2], row[0]))
    gaps_ms = [part.history.gap for part in parts if part.history.gap is not None and part.history.gap[1] >= since_ms]
    gap_ms = (min(gap[0] for gap in gaps_ms), max(gap[1] for gap in gaps_ms)) if gaps_ms else None
    refused = _refused(parts, since_ms)
    return Spending(
        since_ms,
        until_ms,
        by,
        tuple(ranked),
        gap_ms,
        refused=tuple(one for one in refused if one.reason != SHADOW),
        adds_buckets_up=mixed,
        would_refuse=tuple(one for one in refused if one.reason == SHADOW),
    )


def refused_by(refused: Iterable[Refusals]) -> dict[str, int]:
    """Refused calls by what refused them, most calls first."""
    calls: Counter[str] = Counter()
    for one in refused:
        calls[one.limit or one.reason] += one.calls
    return dict(sorted(calls.items(), key=lambda row: (-row[1], row[0])))


def read_charges(ledger: Ledger, projects: Iterable[str], since_ms: int) -> Iterator[tuple[str, Entry]]:
    """Single charges since `since_ms` with their projects, oldest first, in bounded memory. Raises LedgerError."""

    def of(project: str) -> Iterator[tuple[str, Entry]]:
        return ((project, entry) for entry in read_entries(ledger, project, since_ms, NEVER))

    return heapq.merge(*map(of, projects), key=lambda charge: charge[1].ms)


class Bought(NamedTuple):
    """What the pages of one number of a job brought: `new` of their `items` were not in the store before. `units` are
    those of all attempts, also of attempts that brought no page."""

    job: str
    page: int
    pages: int
    items: int
    new: int
    units: int


ENOUGH_NEW, ENOUGH_UNITS = 50, 10
"""Of fewer new entries or units nothing stands out."""

CHEAPER_BY = 4


def stands_out(bought: Iterable[Bought]) -> Iterator[str]:
    """A line for each job whose last pages brought at most a quarter of the new entries that their units would have
    brought in the others' place."""
    by_job: dict[str, list[Bought]] = {}
    for one in bought:
        by_job.setdefault(one.job, []).append(one)
    for job, rows in by_job.items():
        new, units = sum(one.new for one in rows), sum(one.units for one in rows)
        if new < ENOUGH_NEW or units < ENOUGH_UNITS:
            continue
        rows.sort(key=lambda one: one.page)
        for number in range(1, len(rows)):
            last = rows[number:]
            theirs, cost = sum(one.new for one in last), sum(one.units for one in last)
            if theirs * units * CHEAPER_BY <= cost * new and cost * 10 >= units:
                yield (
                    f"{_pages([one.page for one in last])} of {job} brought {theirs / new:.0%} of the new entries for "
                    f"{'half' if abs(cost * 2 - units) * 50 <= units else f'{cost / units:.0%}'} of its units"
                )
                break


def _pages(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"page {numbers[0]}"
    return f"pages {numbers[0]}{' and ' if len(numbers) == 2 else ' to '}{numbers[-1]}"


class KeptRefusal(NamedTuple):
    """One refused call as the ledger keeps it: `data` is all of it, as `quota.deciding.recorder.refusal_text` wrote it.

    `limits_left_out` limits are missing, because they did not fit. `unlogged_units` is by limit. Of several `calls`
    together `method` is the first's, and `cost_units` that of all.
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
    unlogged_units: Mapping[str, int]
    data: Mapping[str, Any]
    calls: int = 1


def read_refusals(ledger: Ledger, project: str) -> Iterator[KeptRefusal]:
    """The last refusals of a project, oldest first. Raises LedgerError."""
    for text in history_in(ledger).refusals(project):
        try:
            yield _kept(json.loads(text), project)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError) as error:
            raise LedgerError(f"ledger {ledger.label} holds what no quota program writes: {text!r:.200}") from error


def _kept(data: Mapping[str, Any], project: str) -> KeptRefusal:
    def named(field: str) -> str:
        if type(data[field]) is not str:
            raise ValueError(field)
        return str(data[field])

    limits = tuple(
        LimitState(
            str(one["name"]),
            _units(one["cost_units"]),
            _units(one["used_units"]),
            _units(one["limit_units"]),
            _units(one["remaining_units"]),
        )
        for one in data["limits"]
    )
    words: dict[str, Any] = {field: named(field) for field in _TEXTS}
    return KeptRefusal(
        at_ms=_moment(named("at")),
        project=project,
        cost_units=_units(data["cost_units"]),
        refused_by=None if data["refused_by"] is None else named("refused_by"),
        retry_at_ms=None if data["retry_at"] is None else _moment(named("retry_at")),
        limits=limits,
        limits_left_out=_units(data.get("limits_left_out", 0)),
        unlogged_units={str(name): _units(units) for name, units in data.get("unlogged_units", {}).items()},
        data=data,
        calls=max(1, _units(data.get("calls", 1))),
        **words,
    )


_TEXTS = ("credential", "method", "job", "region", "run", "machine", "reason", "why")


def _units(value: object) -> int:
    return whole(value, "in a refusal: that", 0, MAX_NUMBER)


def _moment(text: str) -> int:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(text)
    return whole(round((at - utc(0)) / timedelta(milliseconds=1)), "ms: a time", 0, LATEST_MS)


class _Row(NamedTuple):
    """Charges of one hour that are alike, as in HourOfSpending. `run` is known of those in the log: the beginning of
    their idempotency keys."""

    hour_ms: int
    method: str
    job: str
    region: str
    bucket: str
    run: str
    charges: int
    units: int


class _Part(NamedTuple):
    """What one project spent. The log has all that is newer than `log_after_ms`; log and history together have all that
    is newer than `known_after_ms`, except for the history's gap."""

    project: str
    history: History
    log_after_ms: int
    known_after_ms: int

    @classmethod
    def read(cls, ledger: Ledger, project: str, since_ms: int, until_ms: int) -> _Part:
        catch_up(ledger, project)
        log_after_ms = ledger.whole_after_ms(project)
        history = history_in(ledger).history(project, since_ms, until_ms)
        known_after_ms = log_after_ms
        if history.rolled_up != (0, 0):
            # Trimming leaves the newest charge that was rolled up. A log without it was lost, unnoticed so far.
            oldest = ledger.read(project, (0, 0), NEVER, 1)
            if not oldest or (oldest[0].ms, oldest[0].seq) > history.rolled_up:
                log_after_ms = max(log_after_ms, history.rolled_up[0])
            # Nor has one without what the history has of an hour before it; a state that was evicted cannot say so.
            elif history.hours and history.hours[0].hour_ms + HOUR_MS <= oldest[0].ms:
                log_after_ms = max(log_after_ms, oldest[0].ms)
            begins_ms = (until_ms - HISTORY_MS) // HOUR_MS * HOUR_MS - 1
            known_after_ms = min(log_after_ms, max(history.whole_after_ms, begins_ms))
        return cls(project, history, log_after_ms, known_after_ms)

    def rows(self, ledger: Ledger, since_ms: int) -> Iterator[_Row]:
        """Each charge since `since_ms` once."""
        from_log = since_ms > self.log_after_ms
        first_ms = -(-since_ms // HOUR_MS) * HOUR_MS if from_log else since_ms // HOUR_MS * HOUR_MS
        hours = [hour for hour in self.history.hours if hour.hour_ms >= first_ms]
        crowded = {hour.hour_ms for hour in hours if _is_other(hour) and hour.hour_ms > self.log_after_ms}
        for hour in hours:
            if hour.charges and hour.hour_ms not in crowded:
                yield _Row(*hour[:5], "", *hour[5:])
        rolled = self.history.rolled_up
        if from_log:
            yield from self.logged(ledger, just_before(since_ms), (first_ms - 1, NEVER))
        for hour_ms in sorted(crowded):
            through = min(rolled, (hour_ms + HOUR_MS - 1, NEVER))
            yield from self.logged(ledger, just_before(hour_ms), through)
        yield from self.logged(ledger, max(just_before(first_ms), rolled), (NEVER, NEVER))

    def logged(self, ledger: Ledger, after: Id, through: Id) -> Iterator[_Row]:
        """Each charge of the log in between as a row of its own."""
        for e in entries_between(ledger, self.project, after, through):
            hour_ms, run = e.ms // HOUR_MS * HOUR_MS, e.idempotency_key[:RUN_CHARS]
            yield _Row(hour_ms, e.method, e.job, e.region, e.bucket, run, 1, e.units)


def catch_up(ledger: Ledger, project: str, within_s: float = CATCH_UP_S, *, present_hour: bool = False) -> None:
    """Roll up what nobody has rolled up yet, but not for long. A user who may only read goes without."""
    ends_s = time.monotonic() + within_s
    with suppress(LedgerError):
        history = history_in(ledger)
        while history.roll_up(project, host_clock(), present_hour=present_hour) and time.monotonic() < ends_s:
            pass


def read_sums(ledger: Ledger, project: str) -> tuple[tuple[RunningSum, ...], tuple[RefusedSum, ...]]:
    """All that was ever charged, by method and job, and all that was refused, by limit, job and reason, as far as it
    was handed over. Raises LedgerError.

    What nobody has rolled up yet is rolled up for SUMS_S, also of the present hour, so that the next reader need not
    read it again. In an hour of thousands of charges the sums may be behind for a while; none ever falls.
    """
    catch_up(ledger, project, SUMS_S, present_hour=True)
    now_ms = ledger.now_ms()
    history = history_in(ledger).history(project, now_ms, now_ms)
    return history.sums_with(ledger.read(project, history.rolled_up, NEVER, SUMS_READ)), history.refused_sums


def _is_other(hour: HourOfSpending) -> bool:
    return (hour.method, hour.job, hour.region, hour.bucket) == (OTHER,) * 4


def _refused(parts: Iterable[_Part], since_ms: int) -> tuple[Refusals, ...]:
    calls: Counter[tuple[str, str, str]] = Counter()
    for part in parts:
        for one in part.history.refused:
            if one.hour_ms >= since_ms // HOUR_MS * HOUR_MS:
                calls[one.limit, one.job, one.reason] += one.calls
    ranked = sorted(calls.items(), key=lambda row: (-row[1], row[0]))
    return tuple(Refusals(*key, count) for key, count in ranked)


_FIELD_OF: dict[str, Callable[[_Row], str]] = {
    "method": lambda row: row.method,
    "job": lambda row: row.job,
    "region": lambda row: row.region,
    "run": lambda row: row.run,
    "day": lambda row: rfc3339(row.hour_ms // DAY_MS * DAY_MS)[:10],
    "hour": lambda row: rfc3339(row.hour_ms),
    "bucket": lambda row: row.bucket,
}
