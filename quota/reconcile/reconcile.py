"""`quota reconcile`: compares our count with upstream's, and tightens ours if upstream counted more.

    1. ask the ledger once: it gets back lost charges, and the draws that this machine owes
    2. read all of upstream's figures (quota.reconcile.monitoring); if a request fails, change nothing
    3. compare each bucket, for upstream's present period and the previous period (quota.reconcile.comparison)
    4. append the units that only upstream counted in its present period to the log (`others`); every limit on the
       whole bucket counts them until that period ends
    5. store a grant that is smaller than configured in the ledger; it lowers the limits
    6. store both counts of the present period there too, for the status and the metrics

It never frees units. It reports units that only we charged, with the method whose price looks wrong. Every step may run
again: the same figures change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quota.budget import Budget, project_of
from quota.clients.evidence import others_name
from quota.common.clock import rfc3339
from quota.common.text import members
from quota.deciding.history import charges, whole_since_ms
from quota.deciding.project import Project
from quota.errors import ConfigError
from quota.ledger.log import PAST_MS
from quota.reconcile.comparison import TOLERANCE_MS, BucketCount, Counted, Period, compare
from quota.rules.calls import granted_units, wanted_grants
from quota.rules.entry import CALLS
from quota.rules.facts import Compared, Grant
from quota.rules.spent import Spent
from quota.terms.costs import CostBook, Metric, Monitoring, Pool
from quota.terms.evidence import whole_limits
from quota.terms.limits import DAY_MS, Calendar, Limit

if TYPE_CHECKING:
    from quota.session import Session
    from quota.settings.model import CredentialSettings

BELIEVED_MS = 7 * DAY_MS
"""How long a smaller grant holds, unless a later run reads another. Upstream samples it once a day."""


class Lowered(NamedTuple):
    """A limit that is lower than configured, because upstream grants `granted_units`."""

    limit: str
    configured_units: int
    enforced_units: int
    granted_units: int
    until_ms: int


class OthersUnits(NamedTuple):
    """A limit of ours, and the units in it that only upstream counted, until `until_ms`."""

    limit: str
    units: int
    until_ms: int


class Reconciled(NamedTuple):
    """The result for one project.

    `newest_ms` is the end of upstream's newest point (None: it has no point). `buckets` has the present period of each
    bucket, then the previous period, if our log reaches back so far. `apart` are pools that upstream counts and this
    cost book has no bucket for: they change nothing. `grants` is upstream's number by bucket, if it has one.
    `tightened`: some limit is tighter than before; `lifted` names the limits that are higher.
    `log_after_ms` is 0, or the time up to which our log lacks charges of the present period: that is not compared then.
    """

    credential: str
    project: str
    cloud_project: str
    book: str
    zone: str
    at_ms: int
    newest_ms: int | None
    buckets: tuple[BucketCount, ...]
    apart: tuple[BucketCount, ...]
    grants: Mapping[str, int]
    others: tuple[OthersUnits, ...]
    lowered: tuple[Lowered, ...]
    tightened: bool
    lifted: tuple[str, ...]
    changed: bool
    log_after_ms: int = 0

    @property
    def differs(self) -> bool:
        """Whether the two counts differ."""
        return bool(self.lowered or self.others) or any(
            count.unknown or count.drift_units for count in (*self.buckets, *self.apart)
        )

    def as_json(self) -> dict[str, object]:
        return {
            **members(self, "credential project cloud_project at"),
            "newest_point": None if self.newest_ms is None else rfc3339(self.newest_ms),
            "lag_ms": None if self.newest_ms is None else max(0, self.at_ms - self.newest_ms),
            "tolerance_ms": TOLERANCE_MS,
            "buckets": [_bucket_json(count, self.grants.get(count.bucket)) for count in self.buckets],
            "apart": [_bucket_json(count, self.grants.get(count.bucket)) for count in self.apart],
            "others": [members(row, "limit units until") for row in self.others],
            "lowered": [
                members(row, "limit configured_units granted_units until") | {"limit_units": row.enforced_units}
                for row in self.lowered
            ],
            "changed": self.changed,
            **(members(self, "log_after") if self.log_after_ms else {}),
        }


def _bucket_json(count: BucketCount, granted: int | None) -> dict[str, object]:
    return {
        "bucket": count.bucket,
        **members(count.period, "since"),
        **members(count, "through upstream_units our_units near_units unknown_units drift_units"),
        "granted_units": granted,
        "methods": [
            members(row, "method upstream_units our_units our_calls")
            | {"price_units": row.price, "upstream_price_units": row.upstream_price}
            for row in count.methods
        ],
    }


def chosen_credentials(session: Session, name: str | None) -> list[CredentialSettings]:
    """The credentials to reconcile: the named credential, or one of each project that has a `cloud_project`.

    Raises ConfigError if there is none.
    """
    credentials = session.settings.credentials.values() if name is None else [session.credential(name)]
    chosen: dict[str, CredentialSettings] = {}
    for credential in credentials:
        if credential.cloud_project is not None:
            chosen.setdefault(credential.project, credential)
    if not chosen:
        first = next(iter(credentials))
        _monitoring(first.book)
        raise ConfigError(
            f"{session.settings.source}: credentials.{first.name}.cloud_project: missing; give the id or number of the "
            "project in Google Cloud: `project` is only our name for it"
        )
    return list(chosen.values())


def _monitoring(book: CostBook) -> Monitoring:
    names = book.monitoring
    if names is None or not any(_window(book, metric) for metric in names.metrics):
        raise ConfigError(
            f"cost book {book.name!r} has no [monitoring]: upstream's names of its buckets are needed; see "
            "docs/own-cost-book.md"
        )
    return names


def reconcile(session: Session, credential: CredentialSettings, *, commit: bool = True) -> Reconciled:
    """Compare one project's counts, and with `commit` tighten ours.

    Raises LedgerError; ConfigError if `auth` cannot be used, or the cost book lacks Cloud Monitoring's names; BadAnswer
    unless upstream's figures are whole. Then it has changed nothing.
    """
    from quota.reconcile.monitoring import read_figures

    names, book = _monitoring(credential.book), credential.book
    assert credential.cloud_project is not None  # noqa: S101
    budget = session.budget(credential.name)
    project = project_of(budget)
    budget.usage()  # so the ledger has this machine's draws and lost charges: upstream counted them
    now_ms = project.log.now_ms()
    book = book.at(now_ms)
    metrics = [metric for metric in names.metrics if _window(book, metric) is not None]
    since_ms = min(_periods(book, metric, now_ms)[-1].since_ms for metric in metrics)
    figures = read_figures(credential, names, since_ms, now_ms)
    through_ms = now_ms if figures.newest_ms is None else min(figures.newest_ms, now_ms)

    whole_after_ms = whole_since_ms(project)
    entries = charges(project, since_ms - TOLERANCE_MS)
    counts: list[BucketCount] = []
    for metric in metrics:
        theirs = figures.used.get(metric.quota_metric, [])
        whole = [period for period in _periods(book, metric, now_ms) if period.since_ms > whole_after_ms]
        counts += _compared(book, metric, whole, theirs, entries, through_ms, now_ms)
    buckets = tuple(count for count in counts if count.bucket in book.buckets)
    apart = tuple(count for count in counts if count.bucket not in book.buckets and count.upstream_units)
    present = [_periods(book, metric, now_ms)[0] for metric in metrics]
    granted = {m.bucket: figures.limits.get((m.quota_metric, m.limit_name)) for m in metrics}
    grants = {bucket: units for bucket, units in granted.items() if units is not None and units >= 0}
    facts = project.state.facts()
    standing = tuple(facts.grants)
    wanted = wanted_grants(credential.limits, grants, standing, now_ms, BELIEVED_MS)
    lowered = tuple(_lowered(credential.limits, wanted))
    believed = [grant for grant in standing if grant.believed_at(now_ms)]
    held, now_held = (
        {low.limit: low.enforced_units for low in each} for each in (_lowered(credential.limits, believed), lowered)
    )
    added = False
    if commit:
        added = _count_others(project, budget, book, buckets, now_ms)
        project.state.grant(wanted, _remembered(facts.compared, buckets, now_ms))
    return Reconciled(
        credential=credential.name,
        project=credential.project,
        cloud_project=credential.cloud_project,
        book=book.name,
        zone=book.zone,
        at_ms=now_ms,
        newest_ms=figures.newest_ms,
        buckets=buckets,
        apart=apart,
        grants=grants,
        others=tuple(_others_units(project, budget)),
        lowered=lowered,
        tightened=added or any(low.enforced_units < held.get(low.limit, low.configured_units) for low in lowered),
        lifted=tuple(name for name, units in held.items() if units < now_held.get(name, units + 1)),
        changed=added or (commit and wanted != standing),
        log_after_ms=whole_after_ms if any(p.since_ms <= whole_after_ms for p in present) else 0,
    )


def _remembered(before: Sequence[Compared], counts: Sequence[BucketCount], now_ms: int) -> list[Compared]:
    """The last comparison of each bucket: the present ones, and older ones that are not too old."""
    newest = {compared.bucket: compared for compared in before if now_ms - PAST_MS < compared.at_ms <= now_ms}
    for count in counts:
        if count.period.since_ms <= now_ms < count.period.until_ms:
            newest[count.bucket] = Compared(
                bucket=count.bucket,
                upstream_units=count.upstream_units,
                our_units=count.our_units,
                unknown_units=count.unknown_units,
                drift_units=count.drift_units,
                since_ms=count.period.since_ms,
                through_ms=max(count.through_ms, 0),
                at_ms=now_ms,
            )
    return list(newest.values())


def _window(book: CostBook, metric: Metric) -> Calendar | None:
    """The calendar by which upstream resets a bucket. A pool that the book charges to another bucket has the calendar
    of the main bucket."""
    window = book.buckets.get(metric.bucket, book.main_bucket).window
    return window if isinstance(window, Calendar) else None


def _periods(book: CostBook, metric: Metric, now_ms: int) -> tuple[Period, Period]:
    """Upstream's present period, and the previous period: a limit over 24 hours still counts a part of it."""
    window = _window(book, metric)
    assert window is not None  # noqa: S101  # metrics without a window were left out
    since_ms, until_ms, _ = window.edges(now_ms)
    return Period(since_ms, until_ms), Period(window.edges(since_ms - 1)[0], since_ms)


def _compared(
    book: CostBook,
    metric: Metric,
    periods: Iterable[Period],
    theirs: Sequence[Counted],
    entries: Sequence[Spent],
    through_ms: int,
    now_ms: int,
) -> Iterator[BucketCount]:
    """Both counts of a bucket in each of these periods. A past period without any count is left out."""
    pool = None if metric.bucket in book.buckets else next(pool for pool in book.pools if pool.name == metric.bucket)
    ours = list(_ours(entries, metric, pool))
    for period in periods:
        count = compare(metric.bucket, period, through_ms, theirs, ours, book, now_ms)
        if period.until_ms > now_ms or count.upstream_units or count.our_units:
            yield count


def _ours(entries: Sequence[Spent], metric: Metric, pool: Pool | None) -> Iterator[Counted]:
    """Our charges to a bucket; for a pool without a bucket in the book, its calls."""
    for entry in entries:
        if pool is None and entry.bucket == metric.bucket:
            yield Counted(entry.id[0], entry.units, entry.method)
        elif pool is not None and entry.method in pool.methods:
            yield Counted(entry.id[0], min(entry.units, 1), entry.method)


# -- tightening --------------------------------------------------------------------------------------------------------


def _count_others(
    project: Project, budget: Budget, book: CostBook, buckets: Sequence[BucketCount], now_ms: int
) -> bool:
    """Count the units that only upstream counted in its present periods, in each limit on a whole bucket. Returns
    whether units were added. They count once: `quota.clients.evidence` gives them the same name."""
    added = False
    for count in buckets:
        if not (count.period.since_ms <= now_ms < count.period.until_ms and count.unknown_units):
            continue
        limits = list(whole_limits(budget.limits, count.bucket, book))
        name = others_name(count.bucket, count.period.since_ms)
        if any(project.others_units(limit.view, name) < count.unknown_units for limit in limits):
            since_ms, until_ms = count.period
            window_ms = book.buckets[count.bucket].window.longest_ms
            noun = CALLS if any(limit.view.selector.count == "calls" for limit in limits) else ""
            budget.add_others(
                count.bucket, count.unknown_units, since_ms, until_ms, name, window_ms=window_ms, noun=noun
            )
            added = True
    return added


def _others_units(project: Project, budget: Budget) -> Iterator[OthersUnits]:
    """The units of each limit that only upstream counted."""
    for limit in budget.limits:
        units = project.upstream_units(limit.view)
        if units:
            yield OthersUnits(limit.name, units, max(project.others_leave_ms(limit.view)))


def _lowered(limits: Sequence[Limit], grants: Sequence[Grant]) -> Iterator[Lowered]:
    for limit in limits:
        for grant in grants:
            most = granted_units(limit, {grant.bucket: grant.quota_units})
            if most is not None and most < limit.limit_units:
                yield Lowered(limit.name, limit.limit_units, most, grant.quota_units, grant.until_ms)
