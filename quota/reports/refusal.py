"""Why a call was refused, as data, from three separate sources:

then    the refusal as the ledger keeps it, with its numbers
now     a peek at the same call
log     the single charges of both windows, as far as the log and the past have them: who filled the limit

A fourth part are the changes of the configuration that would have admitted the call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Literal, NamedTuple

from quota.budget import Budget, project_of
from quota.common.clock import NEVER, rfc3339, stamp
from quota.common.text import members
from quota.deciding.decide import decide
from quota.deciding.history import whole_since_ms
from quota.deciding.project import Project
from quota.decision import Decision, LimitState
from quota.errors import UsageError
from quota.reports.spending import KeptRefusal, counted, entries_of_window, read_refusals
from quota.reports.status import reserved_of
from quota.rules.calls import Checklist, cap, charge_units, granted_units
from quota.rules.entry import Entry, ids_of_calls, just_before, others_units
from quota.rules.facts import Exhaustion
from quota.rules.retry import LimitAtCall, room_at
from quota.rules.spent import spent
from quota.rules.total import total_of
from quota.session import Session, budgets_of, projects_of
from quota.terms.costs import CostBook, upstream_grant
from quota.terms.limits import MAX_UNITS, SLACK_MS, Calendar, Limit, Selector, View, cutoff, leaves_at

EXPIRIES = 10
"""How many of the next expiries are shown."""

MAX_LAG_MS = 5
"""The time of a refusal is a lower bound of the ledger's clock: it may be so much earlier than the charges that it
counted."""


class Filled(NamedTuple):
    """The units that a limit counts of one job, method and region: at the refusal, and now. `then_units` is None if the
    history no longer has all of them."""

    job: str
    method: str
    region: str
    then_units: int | None
    now_units: int


class Fill(NamedTuple):
    """The units that fill the limit `name`, at the refusal and now: charges, and units that only upstream counted, the
    last of which leave at `upstream_until_ms`. `reserved_units` count now; an answer may lower them. Unless `is_whole`,
    the history no longer has all charges of the refusal, and the numbers of then are missing."""

    name: str | None = None
    rows: tuple[Filled, ...] = ()
    is_whole: bool = False
    upstream_then_units: int = 0
    upstream_units: int = 0
    upstream_until_ms: int = 0
    reserved_units: int = 0

    @property
    def then_units(self) -> int:
        """The charged units that counted at the refusal."""
        return sum(row.then_units or 0 for row in self.rows)

    def as_json(self) -> dict[str, object]:
        return {
            **members(self, "name upstream_units reserved_units"),
            "log_whole": self.is_whole,
            "upstream_until": rfc3339(self.upstream_until_ms) if self.upstream_units else None,
            "by": [row._asdict() for row in self.rows],
        }


class Expiry(NamedTuple):
    """Units that stop counting at `at_ms`. The `kind` is a `charge`, units that only `upstream` counted, or a `reset`
    of all; or the limit rises, because its `pace` releases more or a smaller `grant` of upstream ends. If it
    `makes_room`, the call then fits."""

    at_ms: int
    units: int
    kind: Literal["charge", "upstream", "reset", "pace", "grant"]
    makes_room: bool = False
    job: str = ""
    charge: str | None = None
    method: str | None = None


class Setting(NamedTuple):
    """One setting of a change: the number of a `limit`, its `headroom`, what the job leaves of it (`leave`), its `pace`
    (0: none), or a reopened bucket (`reopen`).

    `upstream_units` is upstream's grant in such a window or a longer one; 0: not known.
    """

    kind: Literal["limit", "headroom", "leave", "pace", "reopen"]
    name: str
    units: int
    was_units: int
    upstream_units: int = 0


Change = tuple[Setting, ...]
"""Settings that together would have admitted the call."""


class RefusalExplained(NamedTuple):
    """Why a call was refused, asked at `asked_ms` by the ledger's clock.

    `now` is the decision on the same call or calls now. If the refusal is of several calls and lacks their costs, `now`
    is about a single call that costs as much. `never` is the reason if today's configuration can never admit it.
    `limits` are the configured limits by name, `now_limits` the limits that count the call now. `rooms_ms` has the time
    when each refusing limit has room again.

    `fill` belongs to the limit that refused, or to the bucket that upstream closed. `expiries` belong to the limit
    `expiring`, which refuses now, or else refused then. `exhaustion` is the record of the closed bucket, and
    `granted_units` its grant by the cost book (0: none known). `admits` is empty if no change is known that would have
    admitted the call. `admitted_today`: today's configuration would have.
    """

    kept: KeptRefusal
    asked_ms: int
    now: Decision | None
    never: str
    limits: Mapping[str, Limit]
    now_limits: Mapping[str, LimitState]
    rooms_ms: Mapping[str, int]
    fill: Fill
    expiring: str | None
    expiries: tuple[Expiry, ...]
    exhaustion: Exhaustion | None
    granted_units: int
    book: CostBook
    admits: tuple[Change, ...]
    admitted_today: bool

    @property
    def then_limits(self) -> dict[str, LimitState]:
        """The limits as the refusal met them."""
        return {state.name: state for state in self.kept.limits}

    @property
    def names(self) -> list[str]:
        """The limits that counted the call at its refusal, and the limits that count it now."""
        return [*dict.fromkeys([*self.then_limits, *self.now_limits])]

    def noun(self, name: str | None) -> str:
        """What a limit counts: units, or calls. A bucket counts units."""
        limit = None if self.kept.closed_by_upstream else self.limits.get(name or "")
        return "unit" if limit is None else limit.view.selector.noun

    def as_json(self) -> dict[str, object]:
        kept, now = self.kept, self.now
        if now is None:
            again = {"admitted": False, "reason": "never", "refused_by": None, "why": self.never, "retry_at": None}
        else:
            retry_at = None if now.retry_at_ms is None else rfc3339(now.retry_at_ms)
            again = {**members(now, "admitted reason refused_by"), "why": now.why(), "retry_at": retry_at}
        return {
            "refused_at": rfc3339(kept.at_ms),
            **members(self, "asked_at"),
            **members(kept, "credential project method cost_units calls job region run machine"),
            **members(kept, "reason refused_by why retry_at"),
            "now": again,
            "limits": [self._limit_json(name) for name in self.names],
            "filled": self.fill.as_json(),
            "expiring": self.expiring,
            "expiries": [members(expiry, "at units kind makes_room job charge method") for expiry in self.expiries],
            "exhaustion": self._exhaustion_json(),
            "admits": [[setting._asdict() for setting in change] for change in self.admits],
            "admitted_today": self.admitted_today,
        }

    def _exhaustion_json(self) -> dict[str, object] | None:
        record = self.exhaustion
        if record is None:
            return None
        return {
            **members(record, "bucket since until evidence reported_by"),
            "granted_units": self.granted_units or None,
            "reopened_at": rfc3339(record.reopened_ms) if record.reopened_ms else None,
        }

    def _limit_json(self, name: str) -> dict[str, object]:
        limit, room_ms = self.limits.get(name), self.rooms_ms.get(name)
        row: dict[str, object] = {
            "name": name,
            "window": None if limit is None else limit.view.window.name,
            "room_at": None if room_ms is None else rfc3339(room_ms),
        }
        for moment, states in (("then", self.then_limits), ("now", self.now_limits)):
            row[moment] = members(states[name], "cost_units used_units limit_units") if name in states else None
        return row


def explain_refusal(session: Session, credential: str | None = None, job: str | None = None) -> RefusalExplained | None:
    """The last refusal that the ledger keeps of these credentials' projects, or of one job; None if it keeps none.

    Raises LedgerError.
    """
    projects = map(project_of, budgets_of(session, credential))
    refusals = [kept for project in projects for kept in read_refusals(project) if job in (None, kept.job)]
    if not refusals:
        return None
    now_ms = session.ledger.now_ms()
    # A refusal that a wrong clock dated in the future does not stay the last. Processes report refusals in any order,
    # each process in its own.
    dated = [kept for kept in refusals if kept.at_ms <= now_ms + SLACK_MS]
    return explain_kept(session, max(reversed(dated), key=attrgetter("at_ms"), default=refusals[-1]))


def unreported(session: Session, credential: str | None, job: str | None, since_ms: int) -> str:
    """A line about the newest run of this machine that began after `since_ms` and that was refused without the ledger;
    "" if none is known. Other packages know runs: an entry point is a function `(session, projects,
    job, since_ms) -> Run | None`."""
    from importlib.metadata import entry_points

    for point in entry_points(group="quota.explain"):
        if (run := point.load()(session, projects_of(session, credential), job, since_ms)) is not None:
            began = f"run {run.run} of job {run.job}, begun at {stamp(run.began_ms)}"
            if (run.refusal or {}).get("reason") == "run":
                return f"{began}, had spent its max_units, and the ledger has no such refusal; see `quota runs`"
            return f"{began}, was refused without the ledger, and could not report it; see `quota runs`"
    return ""


def explain_kept(session: Session, kept: KeptRefusal) -> RefusalExplained:
    """One refusal that the ledger keeps of a configured project. If its credential is no longer configured, another one
    of the project takes its place. Raises LedgerError."""
    credentials = session.settings.credentials.values()
    of_project = [settings.name for settings in credentials if settings.project == kept.project]
    budget = session.budget(kept.credential if kept.credential in of_project else of_project[0])
    project, limits = project_of(budget), {limit.name: limit for limit in budget.limits_of(kept.job)}
    now: Decision | None = None
    never, compared = "", dict[str, LimitAtCall]()
    try:
        now, compared = _ask_again(budget, _checklist(budget, kept))
    except UsageError as error:
        never = str(error)
    met = budget.usage(kept.job) if now is None else now.limits
    asked_ms = project.now_ms() if now is None else now.decided_at_ms
    then_names = {state.name for state in kept.limits}
    refusing = [(name, room_at(state, project, asked_ms)) for name, state in compared.items() if state.refuses]
    rooms_ms = {name: at_ms for name, at_ms in refusing if at_ms != NEVER}
    subject = _subject(budget, kept)
    expiring = kept.refused_by if now is None or now.reason not in ("limit", "leave") else now.refused_by
    expiries: tuple[Expiry, ...] = ()
    if expiring is not None and expiring in compared:
        expiries = _expiries(project, compared[expiring], rooms_ms.get(expiring), asked_ms)
    exhaustion, granted_units = _exhaustion(budget, kept, limits.values())
    admits, admitted_today = changes_that_admit(budget, kept)
    return RefusalExplained(
        kept=kept,
        asked_ms=asked_ms,
        now=now,
        never=never,
        limits=limits,
        now_limits={state.name: state for state in met if now is not None or state.name in then_names},
        rooms_ms=rooms_ms,
        fill=Fill() if subject is None else _fill(project, subject, kept, asked_ms),
        expiring=expiring if expiries else None,
        expiries=expiries,
        exhaustion=exhaustion,
        granted_units=granted_units,
        book=budget.book,
        admits=admits,
        admitted_today=admitted_today,
    )


# -- now ---------------------------------------------------------------------------------------------------------------


def _checklist(budget: Budget, kept: KeptRefusal) -> Checklist:
    """The checklist of the same call or calls. Raises UsageError if they can never be admitted."""
    units = charge_units(kept.cost_units)
    if kept.calls == 1 or not kept.tells_costs:
        return budget.checklists.make((kept.method, units, None, kept.job))
    costs = {state.name: state.cost_units for state in kept.limits}
    closed = kept.refused_by if kept.closed_by_upstream else None
    return budget.checklists.of_former(kept.method, units, kept.job, kept.calls, costs, closed)


def _ask_again(budget: Budget, checklist: Checklist) -> tuple[Decision, dict[str, LimitAtCall]]:
    """The decision about a call now, and each limit that it was compared with: none if the clocks disagree, or the
    ledger still counts."""
    answers = budget.answers
    outcome = decide(project_of(budget), checklist, commit=False)
    decision = answers.decision(checklist, outcome, commit=False)
    if outcome.reason in ("clock", "counting"):
        return decision, {}
    return decision, {state.limit.name: state for state in answers.limits_at_call(checklist, outcome, 0)}


def _exhaustion(budget: Budget, kept: KeptRefusal, limits: Iterable[Limit]) -> tuple[Exhaustion | None, int]:
    """The record of the exhaustion that refused, until a newer exhaustion replaces it; and upstream's grant of the
    bucket, as the limits on all its calls have it (0: none known)."""
    if not kept.closed_by_upstream:
        return None, 0
    record = project_of(budget).state.facts().exhaustion(kept.refused_by or "")
    if record is None or record.since_ms > kept.at_ms + SLACK_MS:
        return None, 0
    bucket = budget.book.buckets.get(record.bucket)
    if bucket is None or record.until_ms == NEVER:
        return record, 0
    granted_units, all_calls = budget.answers.granted_now().get(bucket.name), Selector(buckets=(bucket.name,))
    whole = [limit for limit in limits if limit.view.selector == all_calls and not limit.shadow]
    grants = [upstream_grant(limit, bucket, granted_units) for limit in whole]
    return record, max(grants, default=bucket.quota_units)


# -- who filled it -----------------------------------------------------------------------------------------------------


def _subject(budget: Budget, kept: KeptRefusal) -> Limit | None:
    """The limit that refused. For a closed bucket, a limit that counts as upstream does. None if neither is known."""
    book, name = budget.book, kept.refused_by or ""
    if not kept.closed_by_upstream:
        return next((limit for limit in budget.limits_of(kept.job) if limit.name == name), None)
    pools = {pool.name: pool for pool in book.pools}
    if name in book.buckets:
        bucket, selector = book.buckets[name], Selector((name,))
    elif name in pools:
        bucket, selector = book.main_bucket, Selector(methods=pools[name].methods)
    else:
        return None
    return Limit(name, bucket.quota_units, View(selector, bucket.window), bucket.quota_units, 0)


def _fill(project: Project, subject: Limit, kept: KeptRefusal, now_ms: int) -> Fill:
    """By job, method and region, the largest first: at the refusal, or now if the history no longer has that."""
    view, then_ms = subject.view, kept.at_ms
    is_whole = whole_since_ms(project) <= cutoff(view.window, then_ms)
    then: list[Entry] = []
    if is_whole:
        used_units = sum(state.used_units for state in kept.limits if state.name == kept.refused_by)
        behind = entries_of_window(project, view.window, then_ms, just_before(then_ms + MAX_LAG_MS + 1))
        before = [entry for entry in behind if entry.id[0] <= then_ms]
        then = before if total_of(view, before, then_ms).used_units >= used_units else behind
    now = entries_of_window(project, view.window, now_ms)
    then_units, now_units = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    charged = spent(now)
    for sums, charges in ((then_units, spent(then)), (now_units, charged)):
        for charge, units in counted(view.selector, charges):
            sums[charge.job, charge.method, charge.region] += units
    rows = [Filled(*who, then_units[who] if is_whole else None, now_units[who]) for who in {**then_units, **now_units}]
    rows.sort(key=lambda row: (-(row.then_units or 0), -row.now_units, row[:3]))
    total = total_of(view, now, now_ms)
    return Fill(
        name=subject.name,
        rows=tuple(rows),
        is_whole=is_whole,
        upstream_then_units=others_units(total_of(view, then, then_ms).others_after(then_ms)),
        upstream_units=others_units(total.others_after(now_ms)),
        upstream_until_ms=max([leaves_ms for _, leaves_ms in total.others], default=0),
        reserved_units=reserved_of(charged, [subject], now_ms).get(subject.name, 0),
    )


# -- expiries ---------------------------------------------------------------------------------------------------------


def _expiries(project: Project, state: LimitAtCall, room_ms: int | None, now_ms: int) -> tuple[Expiry, ...]:
    """The next ten expiries of a limit, and the one at `room_ms` with which the call fits."""
    view, window = state.limit.view, state.limit.view.window
    behind = entries_of_window(project, window, now_ms)
    total = total_of(view, behind, now_ms)
    rows = [Expiry(at_ms, units, "upstream") for at_ms, units in total.others_leave(now_ms)]
    charges = spent(behind)
    if isinstance(window, Calendar):
        units = sum(units for _, units in counted(view.selector, charges))
        if units:
            rows.append(Expiry(window.edges(now_ms)[1], units, "reset"))
    else:
        keys = [charge.key for charge in charges]
        names = dict(zip(keys, ids_of_calls([(charge.id[0], charge.key) for charge in charges]), strict=True))
        for charge, units in counted(view.selector, charges):
            at_ms, name = leaves_at(window, charge.id[0]), names[charge.key]
            rows.append(Expiry(at_ms, units, "charge", job=charge.job, charge=name, method=charge.method))
    if room_ms is not None and state.lapses_ms <= room_ms:
        rows.append(Expiry(state.lapses_ms, state.lapsed_units - state.cap_units, "grant"))
    if room_ms is not None and all(row.at_ms != room_ms for row in rows):
        rows.append(Expiry(room_ms, 0, "pace"))
    rows.sort(key=lambda row: row.at_ms)
    fits: int | None = None
    lacking_units = state.used_units + state.cost_units - state.cap_units
    for n, row in enumerate(rows):
        if row.at_ms == room_ms and (fits is None or lacking_units > 0 or state.limit.paced):
            fits = n
        lacking_units -= row.units
    if fits is not None:
        rows[fits] = rows[fits]._replace(makes_room=True)
    return tuple([row for n, row in enumerate(rows) if n < EXPIRIES or n == fits])


# -- changes that would have admitted it -------------------------------------------------------------------------------


class _Met(NamedTuple):
    """A limit at the refusal: the call's cost, the use at `at_ms`, and what the job left to others."""

    limit: Limit
    cost_units: int
    leave_units: int
    used_units: int
    granted: Mapping[str, int]
    at_ms: int

    @property
    def fits(self) -> bool:
        """Whether the call fits, as a decision compares it."""
        cap_units = cap(self.limit, self.leave_units, self.cost_units, self.at_ms, self.granted)
        return self.limit.shadow or self.used_units + self.cost_units <= cap_units

    def changed(self, **terms: object) -> _Met:
        """The same with other terms of the limit."""
        return self._replace(limit=replace(self.limit, **terms))  # type: ignore[arg-type]  # the fields of a Limit


def changes_that_admit(budget: Budget, kept: KeptRefusal) -> tuple[tuple[Change, ...], bool]:
    """The changes that would each have admitted the call alone; and whether today's configuration would have.

    Each change is the smallest of its kind. A search tries values with the comparison of a decision, the numbers of the
    refusal, and upstream's grants of today.
    """
    if kept.reason in ("ledger-unavailable", "clock", "counting") or kept.limits_left_out:
        return (), False
    limits = {limit.name: limit for limit in budget.limits_of(kept.job)}
    if not kept.closed_by_upstream and kept.refused_by not in limits:
        return (), True
    leaves, granted = budget.checklists.leave.get(kept.job, {}), budget.answers.granted_now()
    each = [
        _Met(limits[state.name], state.cost_units, leaves.get(state.name, 0), state.used_units, granted, kept.at_ms)
        for state in kept.limits
        if state.name in limits
    ]
    price = budget.book.at(kept.at_ms).methods.get(kept.method)
    if kept.calls == 1 and (price is None or len(price[0].parts) == 1):
        each = [met._replace(cost_units=met.limit.view.selector.cost(kept.cost_units)) for met in each]
    full = [met for met in each if not met.fits]
    reopen: Change = ()
    if kept.closed_by_upstream:
        spends = [] if price is None or kept.calls > 1 else [part.bucket for part in price[0].parts]
        reopen = tuple(Setting("reopen", bucket, 0, 0) for bucket in _closed_then(budget, kept, spends))
        if not full:
            return (reopen,), False
    elif not full:
        return (), True
    changes: list[Change] = []
    for kind in ("limit", "headroom", "leave", "pace"):
        settings = [_smallest(kind, met, budget.book) for met in full]
        change = tuple([setting for setting in settings if setting is not None])
        if len(change) == len(full):
            changes.append((*reopen, *change))
    return tuple(changes), False


def _closed_then(budget: Budget, kept: KeptRefusal, spends: Iterable[str]) -> Iterator[str]:
    """The bucket that refused, and those of the call's other buckets that were closed, too."""
    project, refused_by = project_of(budget), kept.refused_by or ""
    yield refused_by
    for bucket in spends:
        record = None if bucket == refused_by else project.state.facts().exhaustion(bucket)
        if record is None or 0 < record.reopened_ms <= kept.at_ms:
            continue
        if record.since_ms <= kept.at_ms + SLACK_MS and kept.at_ms < record.opens_ms(project.jitter_ms):
            yield bucket


def _smallest(kind: str, met: _Met, book: CostBook) -> Setting | None:
    """The smallest change of a kind with which a full limit has room; None if there is none."""
    limit, leave, low = met.limit, met.leave_units, met.limit.limit_units
    if kind == "limit":
        high = min(MAX_UNITS, 16 * (met.used_units + met.cost_units + leave + low))
        needed = _least(lambda units: met.changed(limit_units=units).fits, low, high)
        return None if needed is None else Setting("limit", limit.name, needed, low, _granted(book, limit))
    if kind == "headroom":
        headroom, most = limit.headroom_units, granted_units(limit, met.granted)
        if most is None or most >= low:  # upstream's grant has not lowered it
            return None
        less = _least(
            lambda less: met.changed(limit_units=low + less, headroom_units=headroom - less).fits, 0, headroom
        )
        return None if less is None else Setting("headroom", limit.name, headroom - less, headroom)
    if kind == "leave":
        less = _least(lambda less: met._replace(leave_units=leave - less).fits, 0, leave)
        return None if less is None else Setting("leave", limit.name, leave - less, leave)
    return Setting("pace", limit.name, 0, 1) if limit.paced and met.changed(paced=False).fits else None


def _granted(book: CostBook, limit: Limit) -> int:
    """Upstream's grant for the buckets of a limit; 0 unless both count units and upstream's window is as long."""
    names = limit.view.selector.buckets or tuple(book.buckets)
    buckets = [book.buckets[name] for name in names if name in book.buckets]
    longest_ms = limit.view.window.longest_ms
    granted = [[quota.units for quota in bucket.quotas if quota.window.longest_ms >= longest_ms] for bucket in buckets]
    if not all(granted) or limit.view.selector.count == "calls":
        return 0
    return sum(map(min, granted))


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number above `low`, and at most `high`, that is enough; None if `high` is not. `low` is not enough."""
    least = bisect_left(range(high + 1), True, lo=low + 1, key=enough)
    return least if least <= high else None
