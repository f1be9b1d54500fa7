"""Why a call was refused, and what a charge did to the limits, as data.

A refusal is explained from three sources, which are kept apart:

    then    the refusal as the ledger keeps it: the numbers that decided (L30)
    now     the same call asked again, without charging: what has changed since
    log     who filled the limit: the single charges of both windows, as far as the log has them

`quota.cli.explain` displays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Literal

from quota.attribution import machine_name
from quota.budget import ask, draw_of, drawn_units, leaves_of
from quota.checklist import Together, cap
from quota.common.clock import NEVER, rfc3339
from quota.common.text import one_line
from quota.common.values import NamedTuple, replace
from quota.errors import UnknownCharge, UsageError
from quota.ledger.contract import CLOCK_SLACK_MS, RETENTION_SLACK_MS, entries_between, just_before, read_entries
from quota.ledger.history import RUN_CHARS, hours_of
from quota.ledger.state_fields import read_id
from quota.ledger.unlogged import UPSTREAM
from quota.limits import MAX_UNITS, Calendar, Limit, Selector, View
from quota.retry_at import counted, room_at
from quota.spending import KeptRefusal, read_refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from quota.budget import Asked, Budget
    from quota.costs import CostBook
    from quota.decision import LimitState
    from quota.ledger.contract import Exhaustion, Ledger
    from quota.ledger.entry import Charge, Entry, Id
    from quota.ledger.history import HourOfLog
    from quota.recovery.allowance import Draw
    from quota.retry_at import Clocks, Standing
    from quota.session import Session

EXPIRIES = 10
"""So many of the next expiries are shown."""


# -- a refusal ---------------------------------------------------------------------------------------------------------


class LimitThenAndNow(NamedTuple):
    """One limit at the refusal and now. `window` is None if the configuration no longer has the limit, `then` if the
    refusal does not tell of it, `now` if the limit no longer counts the call or the clocks disagree.

    `then_unlogged_units` of what was used stood for charges that the log lacked. `room_ms` is the time when the call
    fits into this limit; None: it does now, or never will. `noun` is what it counts: units, or calls.
    """

    name: str
    window: str | None
    then: LimitState | None
    now: LimitState | None
    then_unlogged_units: int
    room_ms: int | None
    noun: str


class Filled(NamedTuple):
    """What one job charged for a method in a region and the limit counts: at the refusal, and now. `then_units` is None
    where the log no longer has all of it."""

    job: str
    method: str
    region: str
    then_units: int | None
    now_units: int


class Expiry(NamedTuple):
    """Units that stop counting at `at_ms`: of a charge, of charges that the ledger `lost`, of what only `upstream`
    counted, or all at a `reset`; or the `pace` of the limit has released enough by then. With it the call fits if it
    `makes_room`."""

    at_ms: int
    units: int
    kind: Literal["charge", "lost", "upstream", "reset", "pace"]
    makes_room: bool = False
    charge_id: str = ""
    method: str = ""
    job: str = ""


class Setting(NamedTuple):
    """One setting that is another in a change: the number of a `limit`, what the job leaves of it (`leave`), its `pace`
    (0: none), the `price` of the method, a bucket reopened (`reopen`), or the allowance's `max_cost` and `allowance`.

    `upstream_units` is what upstream grants of it in such a window or a longer one; 0: nothing that is known.
    """

    kind: Literal["limit", "leave", "pace", "price", "reopen", "max_cost", "allowance"]
    name: str
    units: int
    was_units: int
    upstream_units: int = 0


Change = tuple[Setting, ...]
"""Settings that together would have admitted the call."""


@dataclass(frozen=True, slots=True)
class RefusalExplained:
    """Why a call was refused, asked at `asked_ms` by the ledger's clock.

    `now` is what it would be told now; `never` says why it could not be admitted any more, by today's configuration.
    `filled` and `filled_name` are of the limit that decided, or of the bucket that upstream closed; if `log_whole`, the
    log has all that counted there at the refusal. `expiries` are of the limit `expiring`: the one that refuses now, or
    else the one that decided. `exhaustion` is the record that refused; `granted_units` is what the cost book says that
    upstream grants of that bucket, 0 where it does not say. `admits` is empty where nothing is known that would have
    admitted it; `admitted_today` if today's configuration would have.
    """

    kept: KeptRefusal
    asked_ms: int
    now: Asked | None
    never: str
    limits: tuple[LimitThenAndNow, ...]
    filled_name: str | None
    filled: tuple[Filled, ...]
    log_whole: bool
    unlogged_units: int
    upstream_units: int
    unlogged_until_ms: int
    expiring: str | None
    expiries: tuple[Expiry, ...]
    exhaustion: Exhaustion | None
    granted_units: int
    admits: tuple[Change, ...]
    admitted_today: bool

    @property
    def closed_by_upstream(self) -> bool:
        """Whether upstream had closed a bucket; else a limit refused, or nothing could be decided."""
        return _closed_by_upstream(self.kept)

    @property
    def same_asked(self) -> bool:
        """Whether `now` is of the same call or calls. Of several calls whose limits the refusal does not tell, it is of
        one call that costs as much."""
        return self.kept.calls == 1 or _tells_costs(self.kept)

    def limit(self, name: str | None) -> LimitThenAndNow | None:
        return next((one for one in self.limits if one.name == name), None)

    def as_json(self) -> dict[str, object]:
        kept, now, x = self.kept, self.now, self.exhaustion
        decision = None if now is None else now.decision
        return {
            "refused_at": rfc3339(kept.at_ms),
            "asked_at": rfc3339(self.asked_ms),
            "credential": kept.credential,
            "project": kept.project,
            "method": kept.method,
            "cost_units": kept.cost_units,
            "calls": kept.calls,
            "job": kept.job,
            "region": kept.region,
            "run": kept.run,
            "machine": kept.machine,
            "reason": kept.reason,
            "refused_by": kept.refused_by,
            "why": kept.why,
            "retry_at": _time(kept.retry_at_ms),
            "now": {
                "admitted": decision is not None and decision.admitted,
                "reason": "never" if decision is None else decision.reason,
                "refused_by": None if decision is None else decision.refused_by,
                "why": self.never if decision is None else decision.why(),
                "retry_at": None if decision is None else _time(decision.retry_at_ms),
            },
            "limits": [
                {
                    "name": one.name,
                    "window": one.window,
                    "then": _state_json(one.then, one.then_unlogged_units),
                    "now": _state_json(one.now, 0 if one.now is None else one.now.unlogged_units),
                    "room_at": _time(one.room_ms),
                }
                for one in self.limits
            ],
            "filled": {
                "name": self.filled_name,
                "log_whole": self.log_whole,
                "unlogged_units": self.unlogged_units,
                "upstream_units": self.upstream_units,
                "unlogged_until": rfc3339(self.unlogged_until_ms) if self.unlogged_units else None,
                "by": [one._asdict() for one in self.filled],
            },
            "expiring": self.expiring,
            "expiries": [
                {
                    "at": rfc3339(one.at_ms),
                    "units": one.units,
                    "kind": one.kind,
                    "makes_room": one.makes_room,
                    "charge": one.charge_id or None,
                    "method": one.method or None,
                    "job": one.job,
                }
                for one in self.expiries
            ],
            "exhaustion": None
            if x is None
            else {
                "bucket": x.bucket,
                "since": rfc3339(x.since_ms),
                "until": None if x.until_ms == NEVER else rfc3339(x.until_ms),
                "evidence": x.evidence,
                "reported_by": x.reported_by,
                "granted_units": self.granted_units or None,
                "reopened_at": rfc3339(x.reopened_ms) if x.reopened_ms else None,
            },
            "admits": [[one._asdict() for one in change] for change in self.admits],
            "admitted_today": self.admitted_today,
        }


def explain_refusal(session: Session, credential: str | None = None, job: str | None = None) -> RefusalExplained | None:
    """The last refusal that the ledger keeps of these credentials' projects, or of one job; None if it keeps none.

    Raises LedgerError.
    """
    credentials = session.settings.credentials.values() if credential is None else [session.credential(credential)]
    names = {one.project: one.name for one in reversed(list(credentials))}
    found = [one for project in names for one in read_refusals(session.ledger, project) if job in (None, one.job)]
    if not found:
        return None
    now_ms = session.ledger.now_ms()

    def when(one: KeptRefusal) -> int:
        """One that a wrong clock dated ahead is not the last for ever."""
        return one.at_ms if one.at_ms <= now_ms + CLOCK_SLACK_MS else 0

    last = max(reversed(found), key=when)  # processes tell of theirs in any order, each in its own
    return explain_kept(session, last)


def explain_kept(session: Session, kept: KeptRefusal) -> RefusalExplained:
    """One refusal that the ledger keeps of a configured project, by the credential that was refused where it is still
    configured. Raises LedgerError."""
    credentials = session.settings.credentials.values()
    of_project = [one.name for one in credentials if one.project == kept.project]
    budget = session.budget(kept.credential if kept.credential in of_project else of_project[0])
    ledger, then_ms = session.ledger, kept.at_ms
    asked: Asked | None = None
    never = ""
    try:
        asked = ask(budget, kept.method, kept.cost_units, kept.job, _together(kept))
    except UsageError as error:
        never = str(error)
    now_ms = ledger.now_ms() if asked is None else asked.clocks.now_ms
    standings = {} if asked is None else {one.limit.name: one for one in asked.standings}
    states = {one.name: one for one in (budget.usage(kept.job) if asked is None else asked.decision.limits)}

    def read(since_ms: int, until_ms: int) -> Iterator[Entry]:
        return read_entries(ledger, kept.project, since_ms, until_ms)

    room_ms = {} if asked is None else {name: _room_at(one, asked.clocks, read) for name, one in standings.items()}
    known = {limit.name: limit for limit in budget.limits}
    names = dict.fromkeys([*(one.name for one in kept.limits), *(name for name in states if name in standings)])
    then = {one.name: one for one in kept.limits}
    limits = tuple(
        LimitThenAndNow(
            name,
            known[name].view.window.name if name in known else None,
            then.get(name),
            states.get(name),
            kept.unlogged_units.get(name, 0),
            room_ms.get(name),
            known[name].view.selector.count.removesuffix("s") if name in known else "unit",
        )
        for name in names
    )
    subject = _subject(budget, kept)
    filled: tuple[Filled, ...] = ()
    log_whole = False
    if subject is not None:
        log_whole = ledger.whole_after_ms(kept.project) <= _cutoff(subject.view, then_ms)
        filled = _filled(ledger, kept.project, subject.view, then_ms if log_whole else None, now_ms)
    lost = [] if subject is None else [states[one.name] for one in _same(budget, subject, kept) if one.name in states]
    expiring = kept.refused_by
    if asked is not None and asked.decision.reason in ("limit", "leave"):
        expiring = asked.decision.refused_by
    expiries: tuple[Expiry, ...] = ()
    if asked is not None and expiring in standings:
        expiries = _expiries(standings[expiring], asked.clocks, room_ms[expiring], read)
    exhaustion, buckets = _exhaustion(session, kept), budget.book.buckets
    admits, admitted_today = _admits(session, budget, kept, {} if asked is None else asked.granted)
    return RefusalExplained(
        kept,
        now_ms,
        asked,
        never,
        limits,
        None if subject is None else subject.name,
        filled,
        log_whole,
        sum(state.unlogged_units for state in lost),
        sum(state.upstream_units for state in lost),
        max((state.unlogged_until_ms for state in lost), default=0),
        expiring if expiries else None,
        expiries,
        exhaustion,
        0 if exhaustion is None or exhaustion.bucket not in buckets else buckets[exhaustion.bucket].quota_units,
        admits,
        admitted_today,
    )


def _subject(budget: Budget, kept: KeptRefusal) -> Limit | None:
    """The limit that decided; where upstream closed a bucket, what upstream itself counts there. None where neither
    is known."""
    book, name = budget.book, kept.refused_by
    if not _closed_by_upstream(kept):
        return next((limit for limit in budget.limits if limit.name == name), None)
    for bucket in book.buckets.values():
        if bucket.name == name:
            view = View(Selector((bucket.name,)), bucket.window)
            return Limit(bucket.name, bucket.quota_units, view, bucket.quota_units, 0)
    for pool in book.pools:
        if pool.name == name:
            view = View(Selector(methods=pool.methods), book.main_bucket.window)
            return Limit(pool.name, book.main_bucket.quota_units, view, book.main_bucket.quota_units, 0)
    return None


def _same(budget: Budget, subject: Limit, kept: KeptRefusal) -> list[Limit]:
    """The limit that decided; where upstream closed a bucket, one that counts what upstream counts there."""
    if not _closed_by_upstream(kept):
        return [subject]
    return [limit for limit in budget.limits if limit.view == subject.view][:1]


def _closed_by_upstream(kept: KeptRefusal) -> bool:
    """Whether a bucket was closed. A limit too is "closed" to a call for which upstream grants too little."""
    too_little = any(one.name == kept.refused_by and one.cost_units > one.limit_units for one in kept.limits)
    return kept.reason == "exhausted" or (kept.reason == "closed" and not too_little)


def _together(kept: KeptRefusal) -> Together | None:
    """Several calls, as far as the refusal tells of them."""
    if kept.calls == 1 or not _tells_costs(kept):
        return None
    closed = kept.refused_by if _closed_by_upstream(kept) else None
    return Together(kept.calls, {one.name: one.cost_units for one in kept.limits}, closed)


def _tells_costs(kept: KeptRefusal) -> bool:
    """Whether a refusal has each limit that counted it, and so what it cost there."""
    return bool(kept.limits) and not kept.limits_left_out


def _exhaustion(session: Session, kept: KeptRefusal) -> Exhaustion | None:
    """The record of the exhaustion that refused, as long as no newer one has taken its place."""
    if not _closed_by_upstream(kept):
        return None
    records = session.ledger.exhaustions(kept.project)
    return next((x for x in records if x.bucket == kept.refused_by and x.since_ms <= kept.at_ms + CLOCK_SLACK_MS), None)


def _filled(ledger: Ledger, project: str, view: View, then_ms: int | None, now_ms: int) -> tuple[Filled, ...]:
    """By job, method and region, the largest at the refusal first; without `then_ms` the largest now.

    Each charge is read once: the log is added up between the moments where one of both windows begins or ends.
    """
    now_after_ms = _cutoff(view, now_ms)
    then_after_ms = now_after_ms if then_ms is None else _cutoff(view, then_ms)
    edges_ms = sorted({then_after_ms, now_after_ms, NEVER, *(() if then_ms is None else (then_ms,))})
    calls = view.selector.count == "calls"
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for after_ms, through_ms in pairwise(edges_ms):
        then = then_ms is not None and then_after_ms <= after_ms and through_ms <= then_ms
        now = now_after_ms <= after_ms
        if not (then or now):
            continue
        for row in _added_up(ledger, project, just_before(after_ms + 1), (through_ms, NEVER), calls=calls):
            if units := counted(view, row):
                key = row.job, row.method, row.region
                then_units, now_units = sums.get(key, (0, 0))
                sums[key] = then_units + units * then, now_units + units * now
    first = 1 if then_ms is None else 0
    ranked = sorted(sums.items(), key=lambda row: (-row[1][first], -row[1][1], row[0]))
    return tuple(Filled(*key, None if then_ms is None else units[0], units[1]) for key, units in ranked)


def _added_up(ledger: Ledger, project: str, after: Id, through: Id, *, calls: bool) -> Iterator[HourOfLog]:
    """What was charged there; charge by charge where `calls` are counted, because one that was given back is none."""
    if calls:
        return hours_of(entries_between(ledger, project, after, through))
    return ledger.add_up(project, after, through)


def _expiries(
    standing: Standing, clocks: Clocks, room_ms: int | None, read: Callable[[int, int], Iterable[Entry]]
) -> tuple[Expiry, ...]:
    """The next ten expiries, and the one at `room_ms` with which the call fits. Where that one is far, it is the first
    that leaves at this moment: what lies between is not shown, and not read.
    """
    view, now_ms = standing.limit.view, clocks.now_ms
    lost = [
        Expiry(until_ms, units, "upstream" if usage.epoch.startswith(UPSTREAM) else "lost")
        for usage in standing.unlogged
        for units, until_ms in usage.expiries
        if until_ms > now_ms and units
    ]
    lost.sort()
    if isinstance(view.window, Calendar):
        edge_ms = view.window.edges(now_ms)[1]
        logged_units = standing.used_units - sum(one.units for one in lost)
        rows = [*lost, *([Expiry(edge_ms, logged_units, "reset")] if logged_units > 0 else [])]
        if room_ms is not None and all(one.at_ms != room_ms for one in rows):
            rows.append(Expiry(room_ms, 0, "pace"))
        found: Iterable[Expiry] = sorted(rows)
    else:
        window_ms = view.window.window_ms

        def leaving(since_ms: int) -> Iterator[Expiry]:
            for e in read(since_ms, clocks.newest_ms):
                if units := counted(view, e):
                    yield Expiry(e.ms + window_ms, units, "charge", False, e.id, e.method, e.job)

        found = merge(leaving(now_ms - window_ms + 1), lost, key=lambda one: one.at_ms)
        if standing.leaving_ms is not None and not lost:
            nearest = list(islice(found, EXPIRIES + 1))
            if nearest and nearest[-1].at_ms < standing.leaving_ms + window_ms:
                first = (one._replace(makes_room=True) for one in leaving(standing.leaving_ms) if one.at_ms == room_ms)
                return (*nearest[:EXPIRIES], *islice(first, 1))
            found = chain(nearest, found)
    shown: list[Expiry] = []
    fits: Expiry | None = None
    lacking_units = standing.used_units + standing.cost_units - standing.cap_units
    for one in found:
        if room_ms is not None and one.at_ms > room_ms:
            shown, room_ms = _marked(shown, fits), None
        if len(shown) >= EXPIRIES and room_ms is None:
            return tuple(shown)
        if one.at_ms == room_ms and (fits is None or lacking_units > 0 or standing.limit.paced):
            fits = one
        shown += [one] if len(shown) < EXPIRIES else []
        lacking_units -= one.units
    return tuple(shown if room_ms is None else _marked(shown, fits))


def _room_at(standing: Standing, clocks: Clocks, read: Callable[[int, int], Iterable[Entry]]) -> int | None:
    """When a full limit has room again; None where it has room now, or never will: upstream grants too little."""
    if not standing.full or standing.cost_units > standing.cap_units:
        return None
    return room_at(standing, clocks, read, clocks.now_ms)


def _marked(shown: list[Expiry], fits: Expiry | None) -> list[Expiry]:
    """With the expiry that makes room marked. It is one of those shown, or comes after them."""
    if fits is None:
        return shown
    marked, at = fits._replace(makes_room=True), shown.index(fits) if fits in shown else len(shown)
    return [*shown[:at], marked, *shown[at + 1 :]]


# -- what would have admitted it ---------------------------------------------------------------------------------------


class _Counted(NamedTuple):
    """A limit that counted a refused call: what the call cost there, what was used, and what its job left to others."""

    limit: Limit
    cost_units: int
    leave_units: int
    used_units: int
    granted: Mapping[str, int]

    def fits(self, at_ms: int) -> bool:
        """Whether the call fits, as a decision compares it (L9)."""
        cost = self.cost_units
        return self.used_units + cost <= cap(self.limit, self.leave_units, cost, at_ms, self.granted)

    def costing(self, units: int) -> _Counted:
        """The same for a call of so many units."""
        return self._replace(cost_units=self.limit.view.selector.cost(units))


def _admits(
    session: Session, budget: Budget, kept: KeptRefusal, granted: Mapping[str, int]
) -> tuple[tuple[Change, ...], bool]:
    """The changes of which each alone would have admitted the call; and whether today's configuration would have.

    Each is the smallest of its kind, found by trying: the comparison is that of a decision, with the numbers that the
    refusal found, and what upstream grants today.
    """
    if kept.reason == "ledger-unavailable":
        return _allowances(session, budget, kept), False
    if kept.reason in ("clock", "counting") or kept.limits_left_out:
        return (), False
    leaves, then_ms = leaves_of(budget, kept.job), kept.at_ms
    known = {limit.name: limit for limit in budget.limits}
    if not _closed_by_upstream(kept) and kept.refused_by not in known:
        return (), True
    each = [
        _Counted(known[one.name], one.cost_units, leaves.get(one.name, 0), one.used_units, granted)
        for one in kept.limits
        if one.name in known
    ]
    if kept.calls == 1:
        each = [one.costing(kept.cost_units) for one in each]
    full = [one for one in each if not one.fits(then_ms)]
    reopen: Change = ()
    if _closed_by_upstream(kept):
        reopen = (Setting("reopen", kept.refused_by or "", 0, 0),)
        if not full:
            return (reopen,), False
    elif not full:
        return (), True
    found = [_numbers(budget.book, full, then_ms), _less_left(full, then_ms), _unpaced(full, then_ms)]
    if kept.calls == 1:  # of several the prices are not known
        found.append(_cheaper(each, kept.method, kept.cost_units, then_ms))
    return tuple((*reopen, *change) for change in found if change), False


def _numbers(book: CostBook, full: Sequence[_Counted], at_ms: int) -> Change:
    """The least number of each full limit."""
    change: list[Setting] = []
    for one in full:

        def enough(units: int, one: _Counted = one) -> bool:
            return one._replace(limit=replace(one.limit, limit_units=units)).fits(at_ms)

        low = one.limit.limit_units
        needed = _least(enough, low, min(MAX_UNITS, 16 * (one.used_units + one.cost_units + one.leave_units + low)))
        if needed is None:
            return ()
        change.append(Setting("limit", one.limit.name, needed, low, _granted(book, one.limit)))
    return tuple(change)


def _granted(book: CostBook, limit: Limit) -> int:
    """What upstream grants of what a limit counts, where both count units, and upstream no shorter window."""
    names = limit.view.selector.buckets or tuple(book.buckets)
    buckets = [book.buckets[name] for name in names if name in book.buckets]
    shorter = [one for one in buckets if one.window.longest_ms < limit.view.window.longest_ms]
    if not buckets or shorter or limit.view.selector.count == "calls":
        return 0
    return sum(one.quota_units for one in buckets)


def _less_left(full: Sequence[_Counted], at_ms: int) -> Change:
    """The most that the job may leave of each full limit to others."""
    change: list[Setting] = []
    for one in full:

        def enough(less: int, one: _Counted = one) -> bool:
            return one._replace(leave_units=one.leave_units - less).fits(at_ms)

        less = _least(enough, 0, one.leave_units)
        if less is None:
            return ()
        change.append(Setting("leave", one.limit.name, one.leave_units - less, one.leave_units))
    return tuple(change)


def _unpaced(full: Sequence[_Counted], at_ms: int) -> Change:
    """Without their pace, if that is enough."""
    if all(one.limit.paced and one._replace(limit=replace(one.limit, paced=False)).fits(at_ms) for one in full):
        return tuple(Setting("pace", one.limit.name, 0, 1) for one in full)
    return ()


def _cheaper(each: Sequence[_Counted], method: str, cost: int, at_ms: int) -> Change:
    """The highest price that every limit has room for."""
    less = _least(lambda n: all(one.costing(cost - n).fits(at_ms) for one in each), 0, cost - 1)
    return () if less is None else (Setting("price", method, cost - less, cost),)


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number above `low`, which is not enough, and up to `high` that is; None if `high` is not."""
    if high <= low or not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _allowances(session: Session, budget: Budget, kept: KeptRefusal) -> tuple[Change, ...]:
    """The allowance that would have let the call through without the ledger. Only its own machine knows what it had
    drawn."""
    if kept.machine != one_line(machine_name())[:64]:
        return ()
    allowed = session.settings.ledger.unavailable
    most, allowance = (0, 0) if allowed is None else (allowed.max_cost_units, allowed.allowance_units)
    needed = drawn_units(budget, kept.at_ms) + kept.cost_units
    settings = []
    if most < kept.cost_units:
        if kept.calls > 1:
            return ()  # what the dearest of them cost is not known
        settings.append(Setting("max_cost", "", kept.cost_units, most))
    if allowance < needed:
        settings.append(Setting("allowance", "", needed, allowance))
    return (tuple(settings),) if settings else ()


# -- a charge ----------------------------------------------------------------------------------------------------------


class LimitAroundCharge(NamedTuple):
    """A limit that counts a charge: what it counted without it at that moment, and with it, other charges with the
    corrections they have today. The charge stops counting at `leaves_ms`. If not `whole`, the log has let go of a part
    of that window, and what was used before was more."""

    limit: Limit
    before_units: int
    after_units: int
    leaves_ms: int
    whole: bool


@dataclass(frozen=True, slots=True)
class ChargeExplained:
    """What a charge was, asked at `asked_ms` by the ledger's clock. `entry` is None while a charge that was `drawn` on
    this machine's allowance is owed, or if the log has let go of it. `not_counted_by` names limits that do not count
    it."""

    charge_id: str
    credential: str
    project: str
    asked_ms: int
    entry: Entry | None
    drawn: Draw | None
    limits: tuple[LimitAroundCharge, ...]
    not_counted_by: tuple[str, ...]

    @property
    def method(self) -> str:
        return self._fields[0]

    @property
    def job(self) -> str:
        return self._fields[1]

    @property
    def region(self) -> str:
        return self._fields[2]

    @property
    def bucket(self) -> str:
        return self._fields[3]

    @property
    def run(self) -> str:
        return self._fields[4][:RUN_CHARS]

    @property
    def units(self) -> int:
        """What it counts now."""
        return self._source.units

    @property
    def charged_units(self) -> int | None:
        """What it was charged; None where only the journal has it, which keeps what it counts now."""
        return None if self.entry is None else self.entry.charged_units

    @property
    def at_ms(self) -> int:
        if self.drawn is not None:
            return self.drawn.drawn_ms
        assert self.entry is not None  # noqa: S101  # one of both is there
        return self.entry.ms

    @property
    def _source(self) -> Entry | Charge:
        if self.entry is not None:
            return self.entry
        assert self.drawn is not None  # noqa: S101  # one of both is there
        return self.drawn.charge

    @property
    def _fields(self) -> tuple[str, str, str, str, str]:
        one = self._source
        return one.method, one.job, one.region, one.bucket, one.idempotency_key

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.charge_id,
            "asked_at": rfc3339(self.asked_ms),
            "at": rfc3339(self.at_ms),
            "credential": self.credential,
            "project": self.project,
            "method": self.method,
            "bucket": self.bucket,
            "job": self.job,
            "region": self.region,
            "run": self.run,
            "charged_units": self.charged_units,
            "units": self.units,
            "drawn": None
            if self.drawn is None
            else {
                "at": rfc3339(self.drawn.drawn_ms),
                "repaid": self.drawn.repaid,
                "entry": self.entry and self.entry.id,
            },
            "limits": [
                {
                    "name": one.limit.name,
                    "window": one.limit.view.window.name,
                    "limit_units": one.limit.limit_units,
                    "before_units": one.before_units,
                    "after_units": one.after_units,
                    "whole": one.whole,
                    "leaves_at": rfc3339(one.leaves_ms),
                }
                for one in self.limits
            ],
            "not_counted_by": list(self.not_counted_by),
        }


def explain_charge(session: Session, charge_id: str, credential: str | None = None) -> ChargeExplained:
    """The charge of this id, of whichever project has it.

    Raises UnknownCharge for an id that no charge has, or whose charge has left the log; UsageError if several projects
    have one of that id; LedgerError.
    """
    credentials = session.settings.credentials.values() if credential is None else [session.credential(credential)]
    names = {one.project: one.name for one in reversed(list(credentials))}
    found = [one for name in names.values() if (one := _find(session, session.budget(name), charge_id)) is not None]
    if len(found) > 1:
        raise UsageError(
            f"several projects have a charge {charge_id}; name the credential, for example {found[0].credential!r}"
        )
    if found:
        return found[0]
    raise UnknownCharge(_why_unknown(session, list(names), charge_id))


def _why_unknown(session: Session, projects: Sequence[str], charge_id: str) -> str:
    named = f"no charge {one_line(charge_id)[:80]!r} in project {', '.join(map(repr, projects))}"
    made = _id_of(charge_id)
    if made is None:
        if charge_id.startswith("allowance-"):
            return f"{named}: it was drawn on another machine, or this one's journal no longer has it"
        return f"{named}: an id is as `quota log` shows it, for example 1795233255077-0"
    after_ms = max(map(session.ledger.whole_after_ms, projects), default=0)
    if made[0] <= after_ms:
        return (
            f"{named} any more: it is older than the log, which has single charges since {rfc3339(after_ms)}; "
            "`quota spend` has older ones by the hour"
        )
    return f"{named}; `quota log` lists those that there are"


def _id_of(text: str) -> Id | None:
    """The id of a charge; None for any other text."""
    try:
        made = read_id(text)
    except ValueError:
        return None
    return made if made[0] else None


def _find(session: Session, budget: Budget, charge_id: str) -> ChargeExplained | None:
    ledger, project = session.ledger, budget.project
    drawn, entry = draw_of(budget, charge_id), None
    if drawn is not None and drawn.repaid:
        # The newest entry of that key is the draw; an earlier one is the same call, whose answer was lost.
        log = read_entries(ledger, project, max(0, drawn.drawn_ms - RETENTION_SLACK_MS), NEVER)
        entry = next(reversed([e for e in log if e.idempotency_key == drawn.charge.idempotency_key]), None)
    made = _id_of(charge_id)
    if made is not None:
        after = (made[0], made[1] - 1) if made[1] else (made[0] - 1, NEVER)
        entry = next((e for e in ledger.read(project, after, made[0], 1) if (e.ms, e.seq) == made), None)
    if entry is None:
        return (
            None
            if drawn is None
            else ChargeExplained(charge_id, budget.credential, project, ledger.now_ms(), None, drawn, (), ())
        )
    limits, others = _around(session, budget, entry)
    return ChargeExplained(charge_id, budget.credential, project, ledger.now_ms(), entry, drawn, limits, others)


def _around(session: Session, budget: Budget, entry: Entry) -> tuple[tuple[LimitAroundCharge, ...], tuple[str, ...]]:
    """Each limit before and after an entry, and the names of those that do not count it."""
    counting = [x for x in budget.limits if x.view.selector.counts(entry.bucket, entry.method, entry.job)]
    cutoffs_ms = [_cutoff(limit.view, entry.ms) for limit in counting]
    before_units = [0] * len(counting)
    edges = [just_before(ms + 1) for ms in sorted(set(cutoffs_ms))]
    last = (entry.ms, entry.seq - 1) if entry.seq else just_before(entry.ms)
    calls = any(limit.view.selector.count == "calls" for limit in counting)
    for begin, through in pairwise([*edges, last]):
        for row in _added_up(session.ledger, budget.project, begin, through, calls=calls):
            for n, limit in enumerate(counting):
                if just_before(cutoffs_ms[n] + 1) <= begin:
                    before_units[n] += counted(limit.view, row)
    whole_after_ms = session.ledger.whole_after_ms(budget.project)
    rows = []
    for limit, cutoff_ms, before in zip(counting, cutoffs_ms, before_units, strict=True):
        window = limit.view.window
        leaves_ms = window.edges(entry.ms)[1] if isinstance(window, Calendar) else entry.ms + window.window_ms
        after = before + limit.view.selector.cost(entry.charged_units)
        rows.append(LimitAroundCharge(limit, before, after, leaves_ms, whole_after_ms <= cutoff_ms))
    return tuple(rows), tuple(limit.name for limit in budget.limits if limit not in counting)


# -- both --------------------------------------------------------------------------------------------------------------


def _cutoff(view: View, at_ms: int) -> int:
    """The newest millisecond that no longer counts (L5)."""
    return view.window.edges(at_ms)[0] - 1 if isinstance(view.window, Calendar) else at_ms - view.window.window_ms


def _time(at_ms: int | None) -> str | None:
    return None if at_ms is None else rfc3339(at_ms)


def _state_json(state: LimitState | None, unlogged_units: int) -> dict[str, object] | None:
    if state is None:
        return None
    return {
        "cost_units": state.cost_units,
        "used_units": state.used_units,
        "limit_units": state.limit_units,
        "unlogged_units": unlogged_units,
    }
