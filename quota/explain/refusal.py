"""Why a call was refused, as data, from three separate sources:

then    the refusal as the ledger keeps it, with its numbers
now     a peek at the same call
log     the single charges of both windows, as far as the log and the past have them: who filled the limit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Literal, NamedTuple

from quota.budget import Budget, project_of
from quota.common.clock import NEVER, rfc3339
from quota.common.text import members
from quota.deciding.history import entries, whole_since_ms
from quota.deciding.project import Project
from quota.decision import Decision, LimitState
from quota.errors import UsageError
from quota.explain.admits import Change, changes_that_admit, closed_by_upstream
from quota.ledger.log import SLACK_MS
from quota.reports.spending import KeptRefusal, ids_of_calls, read_refusals
from quota.rules.calls import Checklist, Together, charge_units
from quota.rules.entry import END, Entry, just_before
from quota.rules.facts import Exhaustion
from quota.rules.retry import Full, room_at
from quota.rules.spent import Spent, spent
from quota.rules.total import total_of
from quota.session import Session, projects_of
from quota.terms.limits import Calendar, Limit, Selector, View, cutoff, leaves_at

EXPIRIES = 10
"""How many of the next expiries are shown."""


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
    last of which leave at `upstream_until_ms`. Unless `is_whole`, the history no longer has all charges of the refusal,
    and the numbers of then are missing."""

    name: str | None = None
    rows: tuple[Filled, ...] = ()
    is_whole: bool = False
    upstream_then_units: int = 0
    upstream_units: int = 0
    upstream_until_ms: int = 0

    @property
    def then_units(self) -> int:
        """The charged units that counted at the refusal."""
        return sum(row.then_units or 0 for row in self.rows)

    @property
    def now_units(self) -> int:
        return sum(row.now_units for row in self.rows)

    def as_json(self) -> dict[str, object]:
        return {
            **members(self, "name upstream_units"),
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
    charge_id: str = ""
    method: str = ""
    job: str = ""


class RefusalExplained(NamedTuple):
    """Why a call was refused, asked at `asked_ms` by the ledger's clock.

    `now` is the decision on the same call now. `never` is the reason if today's configuration can never admit it.
    `limits` are the configured limits by name, `now_limits` the limits that count the call now. `rooms_ms` has the time
    when each refusing limit has room again.

    `fill` belongs to the limit that refused, or to the bucket that upstream closed. `expiries` belong to the limit
    `expiring`, which refuses now, or else refused then. `exhaustion` is the record of the closed bucket, and
    `granted_units` its grant by the cost book (0: not known). `comparable`: upstream's count can be read. `admits` is
    empty if no change is known that would have admitted the call. `admitted_today`: today's configuration would have.
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
        limit = None if self.closed_by_upstream else self.limits.get(name or "")
        return "unit" if limit is None else limit.view.selector.noun

    def as_json(self) -> dict[str, object]:
        kept, now, x = self.kept, self.now, self.exhaustion
        return {
            "refused_at": rfc3339(kept.at_ms),
            **members(self, "asked_at"),
            **members(
                kept, "credential project method cost_units calls job region run machine reason refused_by why retry_at"
            ),
            "now": {"admitted": False, "reason": "never", "refused_by": None, "why": self.never, "retry_at": None}
            if now is None
            else {
                **members(now, "admitted reason refused_by"),
                "why": now.why(),
                "retry_at": None if now.retry_at_ms is None else rfc3339(now.retry_at_ms),
            },
            "limits": [self._limit_json(name) for name in self.names],
            "filled": self.fill.as_json(),
            "expiring": self.expiring,
            "expiries": [
                members(expiry, "at units kind makes_room job")
                | {"charge": expiry.charge_id or None, "method": expiry.method or None}
                for expiry in self.expiries
            ],
            "exhaustion": None
            if x is None
            else {
                **members(x, "bucket since until evidence reported_by"),
                "granted_units": self.granted_units or None,
                "reopened_at": rfc3339(x.reopened_ms) if x.reopened_ms else None,
            },
            "admits": [[setting._asdict() for setting in change] for change in self.admits],
            "admitted_today": self.admitted_today,
        }

    def _limit_json(self, name: str) -> dict[str, object]:
        limit, room_ms = self.limits.get(name), self.rooms_ms.get(name)
        return {
            "name": name,
            "window": None if limit is None else limit.view.window.name,
            "room_at": None if room_ms is None else rfc3339(room_ms),
            "then": _state_json(self.then_limits.get(name)),
            "now": _state_json(self.now_limits.get(name)),
        }


def _state_json(state: LimitState | None) -> dict[str, object] | None:
    return None if state is None else members(state, "cost_units used_units limit_units")


def explain_refusal(session: Session, credential: str | None = None, job: str | None = None) -> RefusalExplained | None:
    """The last refusal that the ledger keeps of these credentials' projects, or of one job; None if it keeps none.

    Raises LedgerError.
    """
    projects = [session.project(settings.name) for settings in projects_of(session, credential).values()]
    refusals = [kept for project in projects for kept in read_refusals(project) if job in (None, kept.job)]
    if not refusals:
        return None
    now_ms = session.ledger.now_ms()

    def when(kept: KeptRefusal) -> int:
        """A refusal that a wrong clock dated into the future does not stay the last."""
        return kept.at_ms if kept.at_ms <= now_ms + SLACK_MS else 0

    last = max(reversed(refusals), key=when)  # processes report refusals in any order, each process in its own
    return explain_kept(session, last)


def explain_kept(session: Session, kept: KeptRefusal) -> RefusalExplained:
    """One refusal that the ledger keeps of a configured project. If its credential is no longer configured, another one
    of the project takes its place. Raises LedgerError."""
    credentials = session.settings.credentials.values()
    of_project = [settings.name for settings in credentials if settings.project == kept.project]
    budget = session.budget(kept.credential if kept.credential in of_project else of_project[0])
    project, limits = project_of(budget), {limit.name: limit for limit in budget.limits_of(kept.job)}
    now: Decision | None = None
    never, full = "", dict[str, Full]()
    try:
        now, full = _ask_again(budget, _checklist(budget, kept))
    except UsageError as error:
        never = str(error)
    met = budget.usage(kept.job) if now is None else now.limits
    asked_ms = project.now_ms() if now is None else now.decided_at_ms
    then_names = {state.name for state in kept.limits}
    rooms_ms = {name: room_at(limit, project, asked_ms) for name, limit in full.items() if limit.refuses}
    rooms_ms = {name: at_ms for name, at_ms in rooms_ms.items() if at_ms != NEVER}
    subject = _subject(budget, kept)
    expiring = kept.refused_by if now is None or now.reason not in ("limit", "leave") else now.refused_by
    expiries: tuple[Expiry, ...] = ()
    if expiring is not None and expiring in full:
        expiries = _expiries(project, full[expiring], rooms_ms.get(expiring), asked_ms)
    exhaustion, buckets = _exhaustion(project, kept), budget.book.buckets
    admits, admitted_today = changes_that_admit(session, budget, kept)
    return RefusalExplained(
        kept=kept,
        asked_ms=asked_ms,
        now=now,
        never=never,
        limits=limits,
        now_limits={state.name: state for state in met if now is not None or state.name in then_names},
        rooms_ms=rooms_ms,
        fill=Fill() if subject is None else _fill(project, subject, kept.at_ms, asked_ms),
        expiring=expiring if expiries else None,
        expiries=expiries,
        exhaustion=exhaustion,
        granted_units=0
        if exhaustion is None or exhaustion.bucket not in buckets
        else buckets[exhaustion.bucket].quota_units,
        comparable=budget.book.monitoring is not None,
        admits=admits,
        admitted_today=admitted_today,
    )


# -- now ---------------------------------------------------------------------------------------------------------------


def _checklist(budget: Budget, kept: KeptRefusal) -> Checklist:
    """The checklist of the same call or calls. Raises UsageError if they can never be admitted."""
    units = charge_units(kept.cost_units)
    if kept.calls == 1 or not _tells_costs(kept):
        return budget.checklists.make((kept.method, units, None, kept.job))
    closed = kept.refused_by if closed_by_upstream(kept) else None
    together = Together(kept.calls, {state.name: state.cost_units for state in kept.limits}, closed)
    return budget.checklists.of_former(kept.method, units, kept.job, together)


def _ask_again(budget: Budget, checklist: Checklist) -> tuple[Decision, dict[str, Full]]:
    """The decision about a call now, and each limit that it was compared with: none if the clocks disagree, or the
    ledger still counts."""
    answers = budget.answers
    outcome = project_of(budget).decide(answers.question(checklist), commit=False)
    decision = answers.decision(checklist, outcome, commit=False)
    compared = outcome.reason not in ("clock", "counting")
    return decision, {full.limit.name: full for full in answers.full_limits(checklist, outcome, 0)} if compared else {}


def _tells_costs(kept: KeptRefusal) -> bool:
    """Whether a refusal has every limit that counted it, with its cost there."""
    return bool(kept.limits) and not kept.limits_left_out


def _exhaustion(project: Project, kept: KeptRefusal) -> Exhaustion | None:
    """The record of the exhaustion that refused, until a newer exhaustion replaces it."""
    if not closed_by_upstream(kept):
        return None
    record = project.state.facts().exhaustion(kept.refused_by or "")
    return record if record is not None and record.since_ms <= kept.at_ms + SLACK_MS else None


# -- who filled it -----------------------------------------------------------------------------------------------------


def _subject(budget: Budget, kept: KeptRefusal) -> Limit | None:
    """The limit that refused. For a closed bucket, a limit that counts as upstream does. None if neither is known."""
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


def _fill(project: Project, subject: Limit, then_ms: int, now_ms: int) -> Fill:
    """By job, method and region, the largest first: at the refusal, or now if the history no longer has that."""
    view = subject.view
    is_whole = whole_since_ms(project) <= cutoff(view.window, then_ms)
    then = _window(project, view, then_ms, then_ms) if is_whole else []
    now = _window(project, view, now_ms)
    then_units, now_units = _units_by_who(view, then), _units_by_who(view, now)
    rows = [Filled(*who, then_units[who] if is_whole else None, now_units[who]) for who in {**then_units, **now_units}]
    rows.sort(key=lambda row: (-(row.then_units or 0), -row.now_units, row[:3]))
    total = total_of(view, now, now_ms)
    return Fill(
        name=subject.name,
        rows=tuple(rows),
        is_whole=is_whole,
        upstream_then_units=total_of(view, then, then_ms).others_after(then_ms),
        upstream_units=total.others_after(now_ms),
        upstream_until_ms=max([leaves_ms for _, leaves_ms in total.others], default=0),
    )


def _window(project: Project, view: View, at_ms: int, until_ms: int = END[0]) -> list[Entry]:
    """The entries of a view's window at a time, as far as the history has them."""
    behind = entries(project, just_before(max(0, cutoff(view.window, at_ms) + 1)))
    return list(takewhile(lambda entry: entry.id[0] <= until_ms, behind))


def _counted(view: View, behind: list[Entry]) -> Iterator[tuple[str, Spent, int]]:
    """The charges that a view counts: the id of the call, the charge, and the units that the view counts."""
    selector, charges = view.selector, spent(behind)
    for name, charge in zip(ids_of_calls(charges), charges, strict=True):
        if charge.units and selector.counts(charge.bucket, charge.method, charge.job):
            yield name, charge, selector.cost(charge.units)


def _units_by_who(view: View, behind: list[Entry]) -> Counter[tuple[str, str, str]]:
    """The units that a view counts, by job, method and region."""
    sums = Counter[tuple[str, str, str]]()
    for _, charge, units in _counted(view, behind):
        sums[charge.job, charge.method, charge.region] += units
    return sums


# -- expiries ---------------------------------------------------------------------------------------------------------


def _expiries(project: Project, full: Full, room_ms: int | None, now_ms: int) -> tuple[Expiry, ...]:
    """The next ten expiries of a limit, and the one at `room_ms` with which the call fits."""
    view, window = full.limit.view, full.limit.view.window
    behind = _window(project, view, now_ms)
    total = total_of(view, behind, now_ms)
    rows = []
    for at_ms in {leaves_ms for _, leaves_ms in total.others if leaves_ms > now_ms}:
        units = total.others_after(at_ms - 1) - total.others_after(at_ms)
        rows.append(Expiry(at_ms, units, "upstream"))
    if isinstance(window, Calendar):
        units = sum(units for _, _, units in _counted(view, behind))
        rows += [Expiry(window.edges(now_ms)[1], units, "reset")] if units else []
    else:
        for name, charge, units in _counted(view, behind):
            at_ms = leaves_at(window, charge.id[0])
            rows.append(Expiry(at_ms, units, "charge", charge_id=name, method=charge.method, job=charge.job))
    if room_ms is not None and full.lapses_ms <= room_ms:
        rows.append(Expiry(full.lapses_ms, full.lapsed_units - full.cap_units, "grant"))
    if room_ms is not None and all(row.at_ms != room_ms for row in rows):
        rows.append(Expiry(room_ms, 0, "pace"))
    rows.sort(key=lambda row: row.at_ms)
    fits: int | None = None
    lacking_units = full.used_units + full.cost_units - full.cap_units
    for n, row in enumerate(rows):
        if row.at_ms == room_ms and (fits is None or lacking_units > 0 or full.limit.paced):
            fits = n
        lacking_units -= row.units
    if fits is not None:
        rows[fits] = rows[fits]._replace(makes_room=True)
    return tuple([row for n, row in enumerate(rows) if n < EXPIRIES or n == fits])
