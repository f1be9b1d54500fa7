"""The status for operators, as data: how full each limit is, and which buckets upstream closed.

`quota.wording` turns it into text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from quota.budget import Budget, project_of
from quota.common.clock import NEVER, host_clock, rfc3339
from quota.common.text import many, members
from quota.deciding.history import charges
from quota.deciding.outlook import Outlook
from quota.deciding.project import Project
from quota.decision import AllowanceState, Decision, LimitState
from quota.errors import ConfigError, LedgerError, OtherApi, Refused, UnusableLedger
from quota.rules.calls import cap
from quota.rules.entry import others_units
from quota.rules.facts import Exhaustion, Facts, Grant, Loss, merged
from quota.rules.spent import Spent
from quota.session import Session, machine_jitter_ms, projects_of
from quota.settings.model import BUILT_IN_FETCHES, CredentialSettings, Settings
from quota.terms.costs import Bucket, CostBook, upstream_grant
from quota.terms.limits import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    Calendar,
    Limit,
    Selector,
    View,
    Window,
    as_long,
    cutoff,
    paced_until,
)

if TYPE_CHECKING:
    from quota.rules.facts import Compared


class LimitRow(NamedTuple):
    """The current state of one limit. `next_capacity_ms` is the time when it has more capacity, because its oldest
    charge leaves or its pace releases more (None: nothing is used, it has no end, or the caller did not ask).
    `state.limit_units` is the limit's number, or the part that its pace has released; `enforced_units` is the number
    without the pace, which is lower than configured if upstream grants less (`grant`). `room_ms` is the time when the
    cheapest call that it counts fits again (None: it fits now). `shut`: upstream closed every bucket that the limit
    counts, or grants less than any call costs, so nothing remains.

    `reserved_units` are part of the used units: reservations of the last hour that are not settled yet.
    `upstream_units` are part of them too: only upstream counted them, and the last of them leave at
    `upstream_until_ms`.

    `resets_ms` is the time when upstream resets its own count, at a calendar edge in `zone` (None: upstream has no
    calendar). If the log does not cover the window, the limit counts since `counts_since_ms` and is exact from
    `exact_from_ms` on.
    """

    limit: Limit
    state: LimitState
    next_capacity_ms: int | None
    resets_ms: int | None
    zone: str | None
    counts_since_ms: int
    exact_from_ms: int | None
    room_ms: int | None
    shut: bool
    enforced_units: int
    grant: Grant | None
    reserved_units: int
    upstream_units: int
    upstream_until_ms: int

    @property
    def level(self) -> Literal["open", "near", "full"]:
        """The mark of the limit; `near`: less than a tenth is left."""
        if self.shut or self.room_ms is not None:
            return "full"
        return "near" if self.state.remaining_units * 10 < self.state.limit_units else "open"


class EarlyExhaustion(NamedTuple):
    """Upstream closed a bucket, and we had charged far less than it grants: somebody else uses this project, or its
    quota is smaller."""

    bucket: str
    used_units: int
    quota_units: int


class JobRow(NamedTuple):
    """A job. The machines in `runs_on` have its regions. `seen_ms` is the last sign, from `seen_on`, of a run that has
    not ended: it is under way, or was killed (None: there is none). `next_ms` is the next tick of its schedule (None:
    it has no schedule). `refusal` is the decision that would refuse the first call of a run now (None: the run would go
    on), and `why` has it in words. Until `until_ms` other runs or machines have all of its regions, and a run here
    would fetch nothing (None: it would)."""

    job: str
    credential: str
    runs_on: str
    seen_ms: int | None
    next_ms: int | None
    why: str = ""
    refusal: Decision | None = None
    until_ms: int | None = None
    seen_on: str = ""

    @property
    def retry_ms(self) -> int | None:
        """When a run could go on."""
        return None if self.refusal is None else self.refusal.retry_at_ms

    @property
    def refused_by(self) -> str | None:
        return None if self.refusal is None else self.refusal.refused_by

    @property
    def is_closed(self) -> bool:
        """Whether upstream has closed the bucket of that call."""
        return self.refusal is not None and self.refusal.reason in ("exhausted", "closed")


class CredentialRow(NamedTuple):
    """One credential: whether any call may leave, its limits, the buckets that upstream closed, and the units that
    this machine drew on its local allowance while the ledger could not answer and has not handed over yet.

    `shared_with` names the other credentials of its project, which share its budget. `ahead_ms` is the time of the
    newest charge if a wrong clock dated it in the future, else 0. `put_back` has the losses that machines put back in
    the last day. `allowance` is what this machine may spend while the ledger does not answer. `jobs` are the
    credential's jobs, if the caller asked for them. `compared` has upstream's count of each bucket beside ours, from
    the last `quota reconcile`.
    """

    outlook: Outlook
    settings: CredentialSettings
    owed_units: int
    limits: tuple[LimitRow, ...]
    exhausted: tuple[Exhaustion, ...]
    shared_with: tuple[str, ...] = ()
    ahead_ms: int = 0
    put_back: tuple[Loss, ...] = ()
    early: tuple[EarlyExhaustion, ...] = ()
    compared: tuple[Compared, ...] = ()
    allowance: AllowanceState | None = None
    jobs: tuple[JobRow, ...] = ()

    @property
    def losses(self) -> list[Loss]:
        """Each loss of the last day once, even if several machines put back parts of it."""
        return merged(self.put_back)

    @property
    def remaining_units(self) -> int | None:
        """What the limits that count every unit of the main bucket still admit; None if none of them does. While the
        ledger accepts no charges, what the allowance admits."""
        if self.outlook.unwritable and self.allowance is not None:
            return self.allowance.remaining_units
        return min((row.state.remaining_units for row in self.limits if self.counts_all(row)), default=None)

    def counts_all(self, row: LimitRow) -> bool:
        """Whether this limit counts every unit of the main bucket."""
        selector, main = row.limit.view.selector, self.settings.book.main_bucket.name
        return (
            not (row.limit.narrow or row.limit.shadow)
            and selector.count == "units"
            and main in (selector.buckets or (main,))
        )

    @property
    def admits(self) -> bool:
        """Whether the cheapest call of the main bucket may leave."""
        return self.outlook.closed is None and self.outlook.full is None

    @property
    def stopped(self) -> JobRow | None:
        """The job that goes on first, if calls are admitted and no job could go on now."""
        if not self.admits or not self.jobs or not all(job.why for job in self.jobs):
            return None
        return min(self.jobs, key=lambda job: job.retry_ms or NEVER)

    @property
    def open(self) -> bool:
        """Whether the cheapest call of the main bucket may leave and, if there are jobs, the first call of any job."""
        return self.admits and self.stopped is None

    @property
    def next_ms(self) -> int | None:
        """When it is `open` again."""
        return self.outlook.next_ms if self.stopped is None else self.stopped.retry_ms


class Status(NamedTuple):
    """Everything that `quota status` shows, read at `at_ms` by the ledger's clock. `built_in`: no file was found."""

    at_ms: int
    ledger: str
    shared: bool
    built_in: bool
    credentials: tuple[CredentialRow, ...]

    @property
    def unwritable(self) -> str:
        """Why the ledger accepts no charges now; "" if nothing is known."""
        return next((row.outlook.unwritable for row in self.credentials if row.outlook.unwritable), "")

    @property
    def exit_status(self) -> int:
        """The exit status of `quota status --check`: the worst over all credentials."""
        return 0 if all(credential.open for credential in self.credentials) else Refused.exit_status

    def as_json(self) -> dict[str, object]:
        credentials = [_credential_json(row) for row in self.credentials]
        return {**members(self, "at ledger", if_any="unwritable"), "credentials": credentials}


def read_status(
    session: Session,
    credential: str | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    next_capacity: bool = True,
    jobs: bool = False,
    here: bool = False,
) -> Status:
    """The status of every credential of a session, or of one. `progress` takes lines that say how many are read.
    `next_capacity=False` leaves out the `next_capacity_ms` of limits, which may need the log; `jobs` adds the jobs;
    with `here` a job goes on only if this process could run it: the dashboard's process need not have the key. Raises
    LedgerError, whose message has what this machine may spend meanwhile. If some projects can be read and others
    cannot, as while a node of a cluster is silent, the rows of these others have no limits.

    Each project is read once, so its credentials show the same numbers. A few threads read at once.
    """
    try:
        ledger = session.ledger
        at_ms = ledger.now_ms()
        credentials = session.settings.credentials
        allowed = allowances(session, credential)
        sharing: dict[str, list[str]] = {}
        for name, settings in credentials.items():
            sharing.setdefault(settings.project, []).append(name)
        methods = _first_methods(session.settings)
        names = credentials if credential is None else [credential]
        firsts: dict[Project, str] = {}
        for name in names:
            firsts.setdefault(session.project(name), name)
        jitter_ms = machine_jitter_ms()
        silent: list[LedgerError] = []

        def reading(name: str) -> CredentialRow:
            settings, budget = credentials[name], session.budget(name)
            project, allowance = project_of(budget), allowed.get(settings.project)
            try:
                outlook = budget.outlook(methods.get(settings.project, []))
                facts, newest_ms = project.reading.facts, project.reading.seen[0]  # as the outlook saw them
                # On each machine a closed bucket opens a little later than upstream's reset, and is shown until then.
                exhausted = [fact for fact in facts.exhaustions if _shown_until(fact, jitter_ms) > at_ms]
                closed = {fact.bucket: fact.opens_ms(jitter_ms) for fact in exhausted if not fact.reopened_ms}
                limits = tuple(_limit_rows(budget, outlook, closed, at_ms, next_capacity=next_capacity))
            except UnusableLedger:
                raise
            except LedgerError as error:
                silent.append(error)
                outlook = budget.outlook_without_ledger(error)
                return CredentialRow(outlook, settings, budget.owed_units(), (), (), allowance=allowance)
            return CredentialRow(
                outlook=outlook,
                settings=settings,
                owed_units=budget.owed_units(),
                limits=limits,
                exhausted=tuple(exhausted),
                ahead_ms=newest_ms if newest_ms > at_ms + MINUTE_MS else 0,
                put_back=tuple(loss for loss in facts.losses if loss.at_ms > at_ms - DAY_MS),
                early=tuple(_early(settings.book.at(at_ms), limits, exhausted)) if exhausted else (),
                compared=facts.compared,
                allowance=allowance,
            )

        read: dict[Project, CredentialRow] = {}
        for project, row in zip(firsts, _read_several(reading, firsts.values()), strict=True):
            read[project] = row
            if progress is not None:
                progress(f"{len(read):,} of {many(len(firsts), 'project')} read")
        if firsts and len(silent) == len(firsts):
            raise silent[0]
        every, rows = list(all_jobs(session, here=here)) if jobs else [], []
        for name in names:
            settings = credentials[name]
            shared_with = tuple(other for other in sharing[settings.project] if other != name)
            of_name = tuple(job for job in every if job.credential == name)
            row = read[session.project(name)]
            rows.append(row._replace(settings=settings, shared_with=shared_with, jobs=of_name))
        return Status(
            at_ms=at_ms,
            ledger=ledger.label,
            shared=ledger.shared,
            built_in=session.settings.path is None,
            credentials=tuple(rows),
        )
    except LedgerError as error:
        raise with_allowances(error, session, credential) from error


def with_allowances(error: LedgerError, session: Session, credential: str | None = None) -> LedgerError:
    """The error, whose message has what this machine may spend meanwhile: nothing in a project of another API."""
    if isinstance(error, OtherApi):
        return error
    drawn = [f"project {project}: {stands}" for project, stands in allowances(session, credential).items()]
    return type(error)("; ".join([str(error), *(text for text in drawn if text not in str(error))]))


def allowances(session: Session, credential: str | None = None) -> dict[str, AllowanceState]:
    """What this machine may spend, and has drawn, while the ledger does not answer; by project."""
    stands: dict[str, AllowanceState] = {}
    if session.settings.ledger.unavailable is None:
        return stands
    for project, settings in projects_of(session, credential).items():
        with suppress(LedgerError, ConfigError):
            if (allowance := session.budget(settings.name).allowance()) is not None:
                stands[project] = allowance
    return stands


def unread_json(session: Session, error: LedgerError) -> dict[str, object]:
    """The status while the ledger does not answer: what this machine may spend meanwhile, what is known of the jobs
    here, and nothing of the budget."""
    allowed = {} if isinstance(error, OtherApi) else allowances(session)
    stands = {project: allowance.as_json() for project, allowance in allowed.items()}
    at = rfc3339(host_clock())
    unread = {"at": at, "ledger": session.ledger.label, "error": str(error), "credentials": [], "allowances": stands}
    return {**unread, "jobs": [_job_json(job) for job in all_jobs(session, here=True)]}


def _first_methods(settings: Settings) -> dict[str, list[str]]:
    """The methods that the built-in jobs of each project call first."""
    methods: dict[str, list[str]] = {}
    for job in settings.jobs.values():
        if job.fetch in BUILT_IN_FETCHES:
            project = settings.credentials[job.credential].project
            methods.setdefault(project, []).append(BUILT_IN_FETCHES[job.fetch])
    return methods


def all_jobs(session: Session, *, here: bool) -> Iterator[JobRow]:
    """The jobs. Other packages know them: an entry point is a function `(session, *, here) -> iterable of JobRow`."""
    from importlib.metadata import entry_points

    for point in entry_points(group="quota.status"):
        yield from point.load()(session, here=here)


AT_ONCE = 4
"""How many threads read at once. More gain nothing: one interpreter reads all answers."""


def _read_several(read: Callable[[str], CredentialRow], names: Collection[str]) -> Iterator[CredentialRow]:
    """The rows of these credentials, in their order. A few threads work at once, because most of the time is waiting.
    The first error ends it. A single credential needs no thread."""
    if len(names) < 2:
        yield from map(read, names)
        return
    from concurrent.futures import ThreadPoolExecutor
    from contextvars import copy_context

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="quota-look") as threads:
        contexts = [copy_context() for _ in names]
        yield from threads.map(lambda context, name: context.run(read, name), contexts, names)


def _shown_until(fact: Exhaustion, jitter_ms: int) -> int:
    """The time until which an exhaustion is shown: its own end, or if it was permanent, a day after it was lifted."""
    return fact.reopened_ms + DAY_MS if fact.reopened_ms and fact.until_ms == NEVER else fact.opens_ms(jitter_ms)


def _limit_rows(
    budget: Budget, outlook: Outlook, closed: Mapping[str, int], at_ms: int, *, next_capacity: bool
) -> Iterator[LimitRow]:
    project = project_of(budget)
    facts = project.reading.facts  # as the outlook saw them
    counts_since_ms = project.reading.trimmed[0]
    reserved: Mapping[str, int] = {}  # read from the log: no decision uses it
    if any(state.used_units for state in outlook.states):
        reserved = reserved_of(charges(project, at_ms - RESERVED_MS + 1), budget.limits, at_ms)
    grants = {grant.bucket: grant for grant in facts.grants if grant.believed_at(at_ms)}
    for limit, state, room_ms in zip(budget.limits, outlook.states, outlook.room_ms, strict=True):
        window, selector = limit.view.window, limit.view.selector
        enforced_units = held_to(limit, facts.grants, at_ms)
        resets_ms, zone = _upstreams_reset(budget.book.buckets, limit.view, at_ms)
        next_ms = None
        if next_capacity and state.used_units:
            next_ms = _next_capacity(project, limit, enforced_units, state, at_ms)
        opens_ms = _opens(budget.book, selector, closed) if closed else None
        if opens_ms is not None:
            state = state._replace(remaining_units=0)
            next_ms = room_ms = max(opens_ms, room_ms or 0)
        never = room_ms == NEVER
        if never:
            next_ms = room_ms = None
        others = project.others(limit.view)
        yield LimitRow(
            limit=limit,
            state=state,
            next_capacity_ms=next_ms,
            resets_ms=resets_ms,
            zone=zone,
            counts_since_ms=counts_since_ms,
            exact_from_ms=exact_from(window, counts_since_ms, at_ms),
            room_ms=room_ms,
            shut=opens_ms is not None or never or not enforced_units,
            enforced_units=enforced_units,
            grant=grants[selector.buckets[0]] if enforced_units < limit.limit_units else None,
            reserved_units=reserved.get(limit.name, 0),
            upstream_units=others_units(others),
            upstream_until_ms=max((heard.until_ms for heard in others), default=0),
        )


def held_to(limit: Limit, grants: Iterable[Grant], at_ms: int) -> int:
    """The number of a limit at a time, without its pace: lower than configured if upstream grants less."""
    return cap(limit, 0, 1, None, Facts(grants=tuple(grants)).granted(at_ms))


def _upstreams_reset(buckets: Mapping[str, Bucket], view: View, at_ms: int) -> tuple[int | None, str | None]:
    """When upstream itself resets what a view counts, and in which zone; None if it has no single calendar. Of several
    windows of a bucket, the one as long as the view's counts."""
    counted = set()
    for bucket in [bucket for name, bucket in buckets.items() if view.selector.counts_bucket(name)]:
        alike = [quota.window for quota in bucket.quotas if as_long(quota.window.longest_ms, view.window.longest_ms)]
        counted.add(alike[0] if alike else bucket.window)
    window = counted.pop() if len(counted) == 1 else None
    return (window.edges(at_ms)[1], window.zone) if isinstance(window, Calendar) else (None, None)


def _next_capacity(project: Project, limit: Limit, enforced_units: int, state: LimitState, at_ms: int) -> int:
    """When a limit with used units has more capacity."""
    window = limit.view.window
    if isinstance(window, Calendar):
        edges, now_units = window.edges(at_ms), state.limit_units
        more = limit.paced and now_units < enforced_units
        return paced_until(enforced_units, edges, now_units + 1) if more else edges[1]
    frees_ms = project.frees_at_ms(limit.view, 1)
    return at_ms if frees_ms is None else frees_ms


RESERVED_MS = HOUR_MS
"""How long the status shows a reservation that is not settled. After that it counts as spent."""


def reserved_of(spent: Iterable[Spent], limits: Sequence[Limit], at_ms: int) -> Mapping[str, int]:
    """The units of each limit that these charges reserve at `at_ms`."""
    reserved = Counter[str]()
    for charge in spent:
        for limit in limits if charge.reserved_units and charge.id[0] > at_ms - RESERVED_MS else ():
            window, selector = limit.view.window, limit.view.selector
            counts = selector.count == "units" and selector.counts(charge.bucket, charge.method, charge.job)
            if counts and charge.id[0] > cutoff(window, at_ms):
                reserved[limit.name] += charge.reserved_units
    return reserved


def _early(book: CostBook, limits: Sequence[LimitRow], exhausted: Sequence[Exhaustion]) -> Iterable[EarlyExhaustion]:
    """The exhaustions that our count does not explain: even the dearest call would have fit."""
    for fact in exhausted:
        bucket = book.buckets.get(fact.bucket)
        if bucket is None or fact.reopened_ms or fact.is_pause or fact.until_ms == NEVER:
            continue
        dearest = max(price.units_in(fact.bucket) for prices in book.methods.values() for price in prices)
        counts = []
        for row in limits:
            is_whole = not (row.limit.narrow or row.limit.shadow)
            if is_whole and row.limit.view.selector == Selector(buckets=(fact.bucket,)):
                quota_units = upstream_grant(row.limit, bucket, None if row.grant is None else row.grant.quota_units)
                counts.append((row.limit.view.window.longest_ms, row.state.used_units, quota_units))
        if counts and all(used_units + dearest <= quota_units for _, used_units, quota_units in counts):
            _, used_units, quota_units = max(counts)  # in the longest window
            yield EarlyExhaustion(fact.bucket, used_units, quota_units)


def _opens(book: CostBook, selector: Selector, closed: Mapping[str, int]) -> int | None:
    """The time when the first call that a selector counts may leave again; None unless upstream closed them all."""
    if selector.methods:
        calls = [book.closed_by(method, book.price(method).bucket) for method in selector.methods]
    else:
        calls = [(bucket,) for bucket in selector.buckets or book.buckets]
    open_ms = []
    for names in calls:
        closing = [closed[name] for name in names if name in closed]
        if not closing:
            return None
        open_ms.append(max(closing))
    return min(open_ms)


def exact_from(window: Window, whole_after_ms: int, at_ms: int) -> int | None:
    """The time when a log that is complete after `whole_after_ms` covers the window; None if it does so at `at_ms`.

    A log keeps enough for the longest window that any configuration of the project has named. A new, longer window
    starts with the entries that are there.
    """
    if isinstance(window, Calendar):
        return window.edges(whole_after_ms)[1] if window.edges(at_ms)[0] <= whole_after_ms else None
    exact_ms = whole_after_ms + window.window_ms
    return exact_ms if exact_ms > at_ms else None


def _credential_json(credential: CredentialRow) -> dict[str, object]:
    outlook, stopped = credential.outlook, credential.stopped
    closed_by = outlook.closed.bucket if outlook.closed is not None else None
    full_by = outlook.full.refused_by if outlook.full is not None else None
    if stopped is not None and stopped.is_closed:
        closed_by = stopped.refused_by
    elif stopped is not None:
        full_by = stopped.refused_by
    put_back = [members(loss, "at machine charges units") for loss in credential.put_back]
    early = {record.bucket: record.used_units for record in credential.early}
    compared = [
        {
            **members(count, "bucket since through"),
            "compared_at": rfc3339(count.at_ms),
            **members(count, "upstream_units our_units unknown_units drift_units"),
        }
        for count in credential.compared
    ]
    return {
        **members(credential.settings, "name project api"),
        **members(credential, "open"),
        "closed_by": closed_by,
        "full_by": full_by,
        **members(credential, "next_at"),
        "limits": [_limit_json(row) for row in credential.limits],
        **({"jobs": [_job_json(job) for job in credential.jobs]} if credential.jobs else {}),
        **members(credential, if_any="owed_units"),
        **({"allowance": credential.allowance.as_json()} if credential.allowance is not None else {}),
        **({"newest_charge_at": rfc3339(credential.ahead_ms)} if credential.ahead_ms else {}),
        **({"put_back": put_back} if put_back else {}),
        "exhausted": [
            {
                **members(fact, "bucket since until evidence"),
                **({"used_units": early[fact.bucket], "early": True} if fact.bucket in early else {}),
                **({"reopened_because": fact.reopened_because} if fact.reopened_ms else {}),
            }
            for fact in credential.exhausted
        ],
        **({"upstream": compared} if compared else {}),
    }


def _job_json(job: JobRow) -> dict[str, object]:
    could_go_on = not job.why and job.until_ms is None
    stands = {**members(job, "job"), "could_go_on": could_go_on, "runs_on": job.runs_on or None}
    stands |= {"running": job.seen_ms is not None, **members(job, "next_at", if_any="until")}
    return {**stands, **(members(job, "refused_by retry_at why") if job.why else {})}


def _limit_json(row: LimitRow) -> dict[str, object]:
    limit, grant = row.limit, row.grant
    return {
        "name": limit.name,
        "window": limit.view.window.name,
        **members(limit, "quota_units headroom_units limit_units"),
        **({} if grant is None else {"granted_units": grant.quota_units, "enforced_units": row.enforced_units}),
        **({"paced_units": row.state.limit_units} if limit.paced else {}),
        **members(row.state, "used_units remaining_units"),
        **({"shadow": True, "would_refuse": row.state.would_refuse} if limit.shadow else {}),
        **members(row, if_any="reserved_units upstream_units"),
        **({} if row.exact_from_ms is None else members(row, "counts_since exact_from")),
        **members(row, "next_capacity_at resets_at"),
    }
