"""Why a call was refused, as data, from three sources that are kept apart:

then    the refusal as the ledger keeps it: the numbers that decided (L30)
now     the same call asked again, without charging: what has changed since
log     who filled the limit: the single charges of both windows, as far as the log has them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from itertools import chain, islice, pairwise
from typing import Literal, NamedTuple

from quota.budget import Budget, account_of
from quota.common.clock import NEVER, rfc3339
from quota.common.members import members
from quota.deciding.checklist import Together
from quota.deciding.outlook import Answer, ask
from quota.deciding.retry_at import Clocks, Occupancy, room_at
from quota.decision import LimitState
from quota.errors import UsageError
from quota.explain.admits import Change, changes_that_admit, closed_by_upstream
from quota.ledger.contract import CLOCK_SLACK_MS, Exhaustion, Ledger, read_entries
from quota.ledger.entry import Entry, counted
from quota.ledger.parts import notes_in
from quota.ledger.unlogged import UPSTREAM
from quota.reports.spending import KeptRefusal, read_refusals
from quota.session import Session, projects_of
from quota.terms.limits import Calendar, Limit, Selector, View, cutoff

EXPIRIES = 10
"""How many of the next expiries are shown."""


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
    counted, or all at a `reset`; or the `pace` of the limit has released enough, or the `grant` that lowered the limit
    is believed no more. With it the call fits if it `makes_room`."""

    at_ms: int
    units: int
    kind: Literal["charge", "lost", "upstream", "reset", "pace", "grant"]
    makes_room: bool = False
    charge_id: str = ""
    method: str = ""
    job: str = ""


class RefusalExplained(NamedTuple):
    """Why a call was refused, asked at `asked_ms` by the ledger's clock.

    `now` is what it would be told now; `never` says why it could not be admitted any more, by today's configuration.
    `filled` and `filled_name` are of the limit that decided, or of the bucket that upstream closed; if `log_whole`, the
    log has all that counted there at the refusal. `expiries` are of the limit `expiring`: the one that refuses now, or
    else the one that decided. `exhaustion` is the record that refused; `granted_units` is what the cost book says that
    upstream grants of that bucket, 0 where it does not say; `comparable` if upstream's count can be read. `admits` is
    empty where nothing is known that would have admitted it; `admitted_today` if today's configuration would have.
    """

    kept: KeptRefusal
    asked_ms: int
    now: Answer | None
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
    comparable: bool
    admits: tuple[Change, ...]
    admitted_today: bool

    @property
    def closed_by_upstream(self) -> bool:
        """Whether upstream had closed a bucket; else a limit refused, or nothing could be decided."""
        return closed_by_upstream(self.kept)

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
            **members(self, "asked_at"),
            **members(
                kept, "credential project method cost_units calls job region run machine reason refused_by why retry_at"
            ),
            "now": {"admitted": False, "reason": "never", "refused_by": None, "why": self.never, "retry_at": None}
            if decision is None
            else {
                **members(decision, "admitted reason refused_by"),
                "why": decision.why(),
                "retry_at": None if decision.retry_at_ms is None else rfc3339(decision.retry_at_ms),
            },
            "limits": [
                {
                    **members(one, "name window room_at"),
                    "then": _state_json(one.then, one.then_unlogged_units),
                    "now": _state_json(one.now, 0 if one.now is None else one.now.unlogged_units),
                }
                for one in self.limits
            ],
            "filled": {
                "name": self.filled_name,
                **members(self, "log_whole unlogged_units upstream_units"),
                "unlogged_until": rfc3339(self.unlogged_until_ms) if self.unlogged_units else None,
                "by": [one._asdict() for one in self.filled],
            },
            "expiring": self.expiring,
            "expiries": [
                members(one, "at units kind makes_room job")
                | {"charge": one.charge_id or None, "method": one.method or None}
                for one in self.expiries
            ],
            "exhaustion": None
            if x is None
            else {
                **members(x, "bucket since until evidence reported_by"),
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
    projects = projects_of(session, credential)
    found = [one for project in projects for one in read_refusals(session.ledger, project) if job in (None, one.job)]
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
    asked: Answer | None = None
    never = ""
    try:
        asked = ask(account_of(budget), kept.method, kept.cost_units, kept.job, _together(kept))
    except UsageError as error:
        never = str(error)
    now_ms = ledger.now_ms() if asked is None else asked.clocks.now_ms
    occupancies = {} if asked is None else {one.limit.name: one for one in asked.occupancies}
    states = {one.name: one for one in (budget.usage(kept.job) if asked is None else asked.decision.limits)}

    def read(since_ms: int, until_ms: int) -> Iterator[Entry]:
        return read_entries(ledger, kept.project, since_ms, until_ms)

    room_ms = {} if asked is None else {name: _room_at(one, asked.clocks, read) for name, one in occupancies.items()}
    subject = _subject(budget, kept)
    filled: tuple[Filled, ...] = ()
    log_whole = False
    if subject is not None:
        log_whole = ledger.whole_after_ms(kept.project) <= cutoff(subject.view.window, then_ms)
        filled = _filled(ledger, kept.project, subject.view, then_ms if log_whole else None, now_ms)
    lost = [] if subject is None else [states[one.name] for one in _same(budget, subject, kept) if one.name in states]
    expiring = kept.refused_by
    if asked is not None and asked.decision.reason in ("limit", "leave"):
        expiring = asked.decision.refused_by
    expiries: tuple[Expiry, ...] = ()
    if asked is not None and expiring in occupancies:
        expiries = _expiries(occupancies[expiring], asked.clocks, room_ms[expiring], read)
    exhaustion, buckets = _exhaustion(session, kept), budget.book.buckets
    admits, admitted_today = changes_that_admit(session, budget, kept, {} if asked is None else asked.granted)
    return RefusalExplained(
        kept,
        now_ms,
        asked,
        never,
        tuple(_then_and_now(budget, kept, states, occupancies, room_ms)),
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
        budget.book.monitoring is not None,
        admits,
        admitted_today,
    )


def _then_and_now(
    budget: Budget,
    kept: KeptRefusal,
    states: Mapping[str, LimitState],
    counting: Iterable[str],
    room_ms: Mapping[str, int | None],
) -> Iterator[LimitThenAndNow]:
    """The limits that counted the call at its refusal, and those that are `counting` it now."""
    known = {limit.name: limit for limit in budget.limits_of(kept.job)}
    then = {one.name: one for one in kept.limits}
    for name in dict.fromkeys([*then, *(name for name in states if name in counting)]):
        yield LimitThenAndNow(
            name,
            known[name].view.window.name if name in known else None,
            then.get(name),
            states.get(name),
            kept.unlogged_units.get(name, 0),
            room_ms.get(name),
            known[name].view.selector.noun if name in known else "unit",
        )


def _subject(budget: Budget, kept: KeptRefusal) -> Limit | None:
    """The limit that decided; where upstream closed a bucket, what upstream itself counts there. None where neither
    is known."""
    book, name = budget.book, kept.refused_by or ""
    if not closed_by_upstream(kept):
        return next((limit for limit in budget.limits_of(kept.job) if limit.name == name), None)
    pools = {pool.name: pool for pool in book.pools}
    if name in book.buckets:
        bucket, selector = book.buckets[name], Selector((name,))
    elif name in pools:
        bucket, selector = book.main_bucket, Selector(methods=pools[name].methods)
    else:
        return None
    return Limit(name, bucket.quota_units, View(selector, bucket.window), bucket.quota_units, 0)


def _same(budget: Budget, subject: Limit, kept: KeptRefusal) -> list[Limit]:
    """The limit that decided; where upstream closed a bucket, one that counts what upstream counts there."""
    if not closed_by_upstream(kept):
        return [subject]
    return [limit for limit in budget.limits_of(kept.job) if limit.view == subject.view][:1]


def _together(kept: KeptRefusal) -> Together | None:
    """Several calls, as far as the refusal tells of them."""
    if kept.calls == 1 or not _tells_costs(kept):
        return None
    closed = kept.refused_by if closed_by_upstream(kept) else None
    return Together(kept.calls, {one.name: one.cost_units for one in kept.limits}, closed)


def _tells_costs(kept: KeptRefusal) -> bool:
    """Whether a refusal has each limit that counted it, and so what it cost there."""
    return bool(kept.limits) and not kept.limits_left_out


def _exhaustion(session: Session, kept: KeptRefusal) -> Exhaustion | None:
    """The record of the exhaustion that refused, as long as no newer one has taken its place."""
    if not closed_by_upstream(kept):
        return None
    records = notes_in(session.ledger).notes(kept.project).exhaustions
    return next((x for x in records if x.bucket == kept.refused_by and x.since_ms <= kept.at_ms + CLOCK_SLACK_MS), None)


def _filled(ledger: Ledger, project: str, view: View, then_ms: int | None, now_ms: int) -> tuple[Filled, ...]:
    """By job, method and region, the largest at the refusal first; without `then_ms` the largest now.

    Each charge is read once: the log is read between the moments where one of both windows begins or ends.
    """
    now_after_ms = cutoff(view.window, now_ms)
    then_after_ms = now_after_ms if then_ms is None else cutoff(view.window, then_ms)
    edges_ms = sorted({then_after_ms, now_after_ms, NEVER, *(() if then_ms is None else (then_ms,))})
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for after_ms, through_ms in pairwise(edges_ms):
        then = then_ms is not None and then_after_ms <= after_ms and through_ms <= then_ms
        now = now_after_ms <= after_ms
        if not (then or now):
            continue
        for entry in read_entries(ledger, project, after_ms + 1, through_ms):
            if units := counted(view.selector, entry):
                key = entry.job, entry.method, entry.region
                then_units, now_units = sums.get(key, (0, 0))
                sums[key] = then_units + units * then, now_units + units * now
    first = 1 if then_ms is None else 0
    ranked = sorted(sums.items(), key=lambda row: (-row[1][first], -row[1][1], row[0]))
    return tuple(Filled(*key, None if then_ms is None else units[0], units[1]) for key, units in ranked)


def _expiries(
    occupancy: Occupancy, clocks: Clocks, room_ms: int | None, read: Callable[[int, int], Iterable[Entry]]
) -> tuple[Expiry, ...]:
    """The next ten expiries, and the one at `room_ms` with which the call fits. Where that one is far, it is the first
    that leaves at this moment: what lies between is not shown, and not read.
    """
    view, now_ms, lapses_ms = occupancy.limit.view, clocks.now_ms, occupancy.lapses_ms
    lapse: list[Expiry] = []
    if room_ms is not None and lapses_ms <= room_ms:
        lapse = [Expiry(lapses_ms, occupancy.lapsed_units - occupancy.cap_units, "grant")]
    lost = [
        Expiry(until_ms, units, "upstream" if usage.epoch.startswith(UPSTREAM) else "lost")
        for usage in occupancy.unlogged
        for units, until_ms in usage.expiries
        if until_ms > now_ms and units
    ]
    lost.sort()
    if isinstance(view.window, Calendar):
        edge_ms = view.window.edges(now_ms)[1]
        logged_units = occupancy.used_units - sum(one.units for one in lost)
        rows = [*lost, *lapse, *([Expiry(edge_ms, logged_units, "reset")] if logged_units > 0 else [])]
        if room_ms is not None and all(one.at_ms != room_ms for one in rows):
            rows.append(Expiry(room_ms, 0, "pace"))
        found: Iterable[Expiry] = sorted(rows)
    else:
        window_ms = view.window.window_ms

        def leaving(since_ms: int) -> Iterator[Expiry]:
            for e in read(since_ms, clocks.newest_ms):
                if units := counted(view.selector, e):
                    yield Expiry(e.ms + window_ms, units, "charge", False, e.id, e.method, e.job)

        found = merge(leaving(now_ms - window_ms + 1), lost, lapse, key=lambda one: one.at_ms)
        if room_ms is not None and not lost and not lapse:
            nearest = list(islice(found, EXPIRIES + 1))
            if nearest and nearest[-1].at_ms < room_ms:
                first = (one._replace(makes_room=True) for one in leaving(room_ms - window_ms) if one.at_ms == room_ms)
                return (*nearest[:EXPIRIES], *islice(first, 1))
            found = chain(nearest, found)
    shown: list[Expiry] = []
    fits: Expiry | None = None
    lacking_units = occupancy.used_units + occupancy.cost_units - occupancy.cap_units
    for one in found:
        if room_ms is not None and one.at_ms > room_ms:
            shown, room_ms = _marked(shown, fits), None
        if len(shown) >= EXPIRIES and room_ms is None:
            return tuple(shown)
        if one.at_ms == room_ms and (fits is None or lacking_units > 0 or occupancy.limit.paced):
            fits = one
        shown += [one] if len(shown) < EXPIRIES else []
        lacking_units -= one.units
    return tuple(shown if room_ms is None else _marked(shown, fits))


def _room_at(occupancy: Occupancy, clocks: Clocks, read: Callable[[int, int], Iterable[Entry]]) -> int | None:
    """When a full limit has room again; None where it has room now, or never will: upstream grants too little."""
    if not occupancy.full or occupancy.cost_units > occupancy.cap_units:
        return None
    return room_at(occupancy, clocks, read, clocks.now_ms)


def _marked(shown: list[Expiry], fits: Expiry | None) -> list[Expiry]:
    """With the expiry that makes room marked. It is one of those shown, or comes after them."""
    if fits is None:
        return shown
    marked, at = fits._replace(makes_room=True), shown.index(fits) if fits in shown else len(shown)
    return [*shown[:at], marked, *shown[at + 1 :]]


def _state_json(state: LimitState | None, unlogged_units: int) -> dict[str, object] | None:
    if state is None:
        return None
    return {**members(state, "cost_units used_units limit_units"), "unlogged_units": unlogged_units}
