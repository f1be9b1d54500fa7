"""`quota reconcile`: compares our count with upstream's, and tightens ours if upstream counted more.

    1. ask the ledger once: it gets back lost charges, and the draws that this machine owes
    2. read all of upstream's figures (quota.reconcile.monitoring); if a request fails, change nothing
    3. compare each bucket, for upstream's present period and the previous period
    4. append the units that only upstream counted in its present period to the log (`others`); every limit on the
       whole bucket counts them until that period ends
    5. store a grant that is smaller than configured in the ledger; it lowers the limits
    6. store both counts of the present period there too, for the status and the metrics

It never frees units. It reports units that only we charged, with the method whose price looks wrong. Every step may run
again: the same figures change nothing.

Both counts of a bucket start at upstream's reset. We charge a call before it leaves. Upstream counts it when it
arrives, by its own clock, and publishes it some minutes later. So neither count is exact near its end, and TOLERANCE_MS
allows for that:

    unknown     units that upstream counted and we never charged. At each of upstream's points, at a moment s: its
                count up to s, less our charges up to TOLERANCE_MS later. The largest of these numbers
    drift       units that we charged and upstream did not count: our charges up to its newest point and more than
                TOLERANCE_MS ago, less its count

For example, points of 100 units each at 10:00 and 11:00, and our charges of 100 at 09:59 and 10:40. At 10:00 both
counts are 100, and at 11:00 both are 200. If somebody else then uses 50, upstream's count at 11:10 is 250 and ours 200:
50 units are unknown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from quota.budget import Budget, project_of
from quota.common.clock import rfc3339
from quota.common.text import members
from quota.deciding.history import charges, whole_since_ms
from quota.errors import ConfigError
from quota.ledger.log import PAST_MS
from quota.rules.calls import granted_units, wanted_grants
from quota.rules.entry import CALLS, others_units
from quota.rules.evidence import others_name, whole_limits
from quota.rules.facts import Compared, Grant
from quota.rules.spent import Spent
from quota.terms.costs import CostBook, Metric, Monitoring
from quota.terms.limits import DAY_MS, MINUTE_MS, Calendar, Limit

if TYPE_CHECKING:
    from quota.session import Session
    from quota.settings.model import CredentialSettings

BELIEVED_MS = 7 * DAY_MS
"""How long a smaller grant holds, unless a later run reads another. Upstream samples it once a day."""

TOLERANCE_MS = 10 * MINUTE_MS


class Counted(NamedTuple):
    """Units of a method: our charge at `at_ms`, or upstream's count of the interval that ended then."""

    at_ms: int
    units: int
    method: str


class Figures(NamedTuple):
    """Upstream's figures: the units `used` by quota_metric, in order of time, by the book's methods. `limits` has its
    newest number by (quota_metric, limit_name); -1 or less: no limit.

    `newest_ms` is the end of its newest point of usage; None: it has no point, so the usage is 0.
    """

    used: dict[str, list[Counted]]
    limits: dict[tuple[str, str], int]

    @property
    def newest_ms(self) -> int | None:
        return max((point.at_ms for points in self.used.values() for point in points), default=None)


class Period(NamedTuple):
    """One of upstream's own periods, from one reset to the next."""

    since_ms: int
    until_ms: int


class MethodCount(NamedTuple):
    """Both counts of one method: upstream's units, our units, and our calls.

    `price_units` is the book's price of one call; None if the book does not have the method. `upstream_price_units` is
    upstream's price of each of our calls, if it differs from the book's and its units are a whole multiple of our
    calls; else None.
    """

    method: str
    upstream_units: int
    our_units: int
    our_calls: int
    price_units: int | None
    upstream_price_units: int | None


class BucketCount(NamedTuple):
    """Both counts of one bucket in one period, up to `through_ms`.

    We charged `near_units` so close to that moment, and so recently, that upstream may not have them. Only upstream
    counted `unknown_units`, and only we `drift_units`. `methods` has the largest difference first. Upstream grants
    `granted_units` (None: not known).
    """

    bucket: str
    period: Period
    through_ms: int
    upstream_units: int
    our_units: int
    near_units: int
    unknown_units: int
    drift_units: int
    methods: tuple[MethodCount, ...]
    granted_units: int | None = None

    def as_json(self) -> dict[str, object]:
        fields = "through upstream_units our_units near_units unknown_units drift_units granted_units"
        methods = [row._asdict() for row in self.methods]
        return {"bucket": self.bucket, **members(self.period, "since"), **members(self, fields), "methods": methods}


class Lowered(NamedTuple):
    """A limit that is lower than configured, because upstream grants `granted_units`."""

    limit: str
    configured_units: int
    granted_units: int
    until_ms: int
    limit_units: int


class OthersUnits(NamedTuple):
    """A limit of ours, and the units in it that only upstream counted, until `until_ms`."""

    limit: str
    units: int
    until_ms: int


class Reconciled(NamedTuple):
    """The result for one project.

    `newest_ms` is the end of upstream's newest point (None: it has no point). `buckets` has the present period of each
    bucket, then the previous period, if our log reaches back so far. `apart` are pools that upstream counts and this
    cost book has no bucket for: they change nothing. `tightened`: some limit is tighter than before; `lifted` names the
    limits that are higher. `log_after_ms` is 0, or the time up to which our log lacks charges of the present period:
    that is not compared then.
    """

    credential: CredentialSettings
    book: CostBook
    at_ms: int
    newest_ms: int | None
    buckets: tuple[BucketCount, ...]
    apart: tuple[BucketCount, ...]
    others: tuple[OthersUnits, ...]
    lowered: tuple[Lowered, ...]
    tightened: bool
    lifted: tuple[str, ...]
    changed: bool
    log_after_ms: int

    @property
    def differs(self) -> bool:
        """Whether the two counts differ."""
        return bool(self.lowered or self.others) or any(
            count.unknown_units or count.drift_units for count in (*self.buckets, *self.apart)
        )

    def as_json(self) -> dict[str, object]:
        return {
            "credential": self.credential.name,
            **members(self.credential, "project cloud_project"),
            **members(self, "at"),
            "newest_point": None if self.newest_ms is None else rfc3339(self.newest_ms),
            "lag_ms": None if self.newest_ms is None else max(0, self.at_ms - self.newest_ms),
            "tolerance_ms": TOLERANCE_MS,
            "buckets": [count.as_json() for count in self.buckets],
            "apart": [count.as_json() for count in self.apart],
            "others": [members(row, "limit units until") for row in self.others],
            "lowered": [members(row, "limit configured_units granted_units until limit_units") for row in self.lowered],
            "changed": self.changed,
            **(members(self, "log_after") if self.log_after_ms else {}),
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
            f"cost book {book.name!r} has no [monitoring]: `quota reconcile` reads Google's Cloud Monitoring; of "
            "another API, `quota status` shows what its answers say"
        )
    return names


ReadFigures = Callable[["CredentialSettings", Monitoring, int, int], Figures]
"""Reads upstream's figures of a credential's project, from a time to another: `quota.reconcile.monitoring` does."""


def reconcile(
    session: Session, credential: CredentialSettings, read_figures: ReadFigures, *, commit: bool = True
) -> Reconciled:
    """Compare one project's counts, and with `commit` tighten ours.

    Raises LedgerError; ConfigError if `auth` cannot be used, or the cost book lacks Cloud Monitoring's names; BadAnswer
    unless upstream's figures are whole. Then it has changed nothing.
    """
    names, book = _monitoring(credential.book), credential.book
    budget = session.budget(credential.name)
    project = project_of(budget)
    budget.usage()  # so the ledger has this machine's draws and lost charges: upstream counted them
    now_ms = project.log.now_ms()
    book = book.at(now_ms)
    metrics = [metric for metric in names.metrics if _window(book, metric) is not None]
    since_ms = min(_periods(book, metric, now_ms)[-1].since_ms for metric in metrics)
    figures = read_figures(credential, names, since_ms, now_ms)

    whole_after_ms = whole_since_ms(project)
    granted = {m.bucket: figures.limits.get((m.quota_metric, m.limit_name), -1) for m in metrics}
    grants = {bucket: units for bucket, units in granted.items() if units >= 0}
    ours = charges(project, since_ms - TOLERANCE_MS)
    counts = [
        count._replace(granted_units=grants.get(count.bucket))
        for metric in metrics
        for count in _counts(book, metric, figures, ours, whole_after_ms, now_ms)
    ]
    buckets = tuple(count for count in counts if count.bucket in book.buckets)
    facts = project.state.facts()
    wanted = wanted_grants(credential.limits, grants, facts.grants, now_ms, BELIEVED_MS)
    believed = [grant for grant in facts.grants if grant.believed_at(now_ms)]
    lowered = tuple(_lowered(credential.limits, wanted))
    held = {low.limit: low.limit_units for low in _lowered(credential.limits, believed)}
    now_held = {low.limit: low.limit_units for low in lowered}
    added = False
    if commit:
        present = [count for count in buckets if count.period.until_ms > now_ms]
        added = _count_others(budget, book, present)
        budget.grant(wanted, _remembered(facts.compared, present, now_ms))
    is_whole = all(_periods(book, metric, now_ms)[0].since_ms > whole_after_ms for metric in metrics)
    others = []
    for limit in budget.limits:
        heard = project.others(limit.view)
        if units := others_units(heard):
            others.append(OthersUnits(limit.name, units, max(entry.until_ms for entry in heard)))
    return Reconciled(
        credential=credential,
        book=book,
        at_ms=now_ms,
        newest_ms=figures.newest_ms,
        buckets=buckets,
        apart=tuple(count for count in counts if count.bucket not in book.buckets and count.upstream_units),
        others=tuple(others),
        lowered=lowered,
        tightened=added or any(low.limit_units < held.get(low.limit, low.configured_units) for low in lowered),
        lifted=tuple(name for name, units in held.items() if units < now_held.get(name, units + 1)),
        changed=added or (commit and wanted != facts.grants),
        log_after_ms=0 if is_whole else whole_after_ms,
    )


def _window(book: CostBook, metric: Metric) -> Calendar | None:
    """The calendar by which upstream resets a bucket. A pool that the book charges to another bucket has the calendar
    of the main bucket."""
    window = book.buckets.get(metric.bucket, book.main_bucket).window
    return window if isinstance(window, Calendar) else None


def _periods(book: CostBook, metric: Metric, now_ms: int) -> tuple[Period, Period]:
    """Upstream's present period, and the previous period: a limit over 24 hours still counts a part of it."""
    window = _window(book, metric)
    assert window is not None  # noqa: S101  # metrics without a window were left out
    since_ms, until_ms = window.edges(now_ms)
    return Period(since_ms, until_ms), Period(*window.edges(since_ms - 1))


# -- both counts -------------------------------------------------------------------------------------------------------


def _counts(
    book: CostBook, metric: Metric, figures: Figures, ours: Sequence[Spent], whole_after_ms: int, now_ms: int
) -> Iterator[BucketCount]:
    """Both counts of a bucket in its present and its previous period, as far as our log is whole. A past period without
    any count is left out."""
    through_ms = now_ms if figures.newest_ms is None else min(figures.newest_ms, now_ms)
    theirs = figures.used.get(metric.quota_metric, [])
    if metric.bucket in book.buckets:
        counted = [Counted(row.id[0], row.units, row.method) for row in ours if row.bucket == metric.bucket]
    else:  # for a pool without a bucket in the book, its calls
        methods = next(pool.methods for pool in book.pools if pool.name == metric.bucket)
        counted = [Counted(row.id[0], min(row.units, 1), row.method) for row in ours if row.method in methods]
    for period in _periods(book, metric, now_ms):
        if period.since_ms > whole_after_ms:
            count = compare(metric.bucket, period, through_ms, theirs, counted, book, now_ms)
            if period.until_ms > now_ms or count.upstream_units or count.our_units:
                yield count


def compare(
    bucket: str,
    period: Period,
    through_ms: int,
    upstream: Sequence[Counted],
    ours: Sequence[Counted],
    book: CostBook,
    now_ms: int,
) -> BucketCount:
    """Compare the counts of one bucket in one period. Pure. `through_ms` is the end of upstream's newest point.

    `upstream` and `ours` are in order of time. `ours` reaches TOLERANCE_MS further on both sides, if there are charges.
    """
    end_ms = min(through_ms, period.until_ms)
    theirs = [point for point in upstream if period.since_ms < point.at_ms <= end_ms]
    times = [charge.at_ms for charge in ours]
    sums = [0, *accumulate(charge.units for charge in ours)]

    def charged(from_ms: int, to_ms: int) -> int:
        """Our units from one moment to another, both included."""
        return max(0, sums[bisect_right(times, to_ms)] - sums[bisect_right(times, from_ms - 1)])

    unknown_units, counted = 0, 0
    for point in theirs:
        counted += point.units
        maybe_ours = charged(period.since_ms - TOLERANCE_MS, point.at_ms + TOLERANCE_MS)
        unknown_units = max(unknown_units, counted - maybe_ours)
    sure_ms = min(end_ms, now_ms - TOLERANCE_MS, period.until_ms - TOLERANCE_MS)
    surely_ours = charged(period.since_ms + TOLERANCE_MS, sure_ms)
    last_ms = min(end_ms, period.until_ms - 1)
    return BucketCount(
        bucket=bucket,
        period=period,
        through_ms=end_ms,
        upstream_units=counted,
        our_units=charged(period.since_ms, last_ms),
        near_units=charged(max(period.since_ms, sure_ms + 1), end_ms + TOLERANCE_MS),
        unknown_units=unknown_units,
        drift_units=max(0, surely_ours - counted),
        methods=_by_method(theirs, [charge for charge in ours if period.since_ms <= charge.at_ms <= last_ms], book),
    )


def _by_method(upstream: Iterable[Counted], ours: Iterable[Counted], book: CostBook) -> tuple[MethodCount, ...]:
    theirs, charged, calls = Counter[str](), Counter[str](), Counter[str]()
    for point in upstream:
        theirs[point.method] += point.units
    for charge in ours:
        if charge.units:  # a refunded charge is not a call
            charged[charge.method] += charge.units
            calls[charge.method] += 1
    rows = []
    for method in {**theirs, **charged}:
        units, number = theirs[method], calls[method]
        price_units = book.price(method).units if method in book.methods else None
        differs = number and units and units % number == 0 and units != charged[method]
        upstream_price_units = units // number if differs else None
        rows.append(MethodCount(method, units, charged[method], number, price_units, upstream_price_units))
    return tuple(sorted(rows, key=lambda row: (-abs(row.upstream_units - row.our_units), row.method)))


# -- tightening --------------------------------------------------------------------------------------------------------


def _count_others(budget: Budget, book: CostBook, present: Sequence[BucketCount]) -> bool:
    """Count the units that only upstream counted in its present periods, in each limit on a whole bucket. Returns
    whether units were added. They count once: `quota.deciding.levels` gives them the same name."""
    added, project = False, project_of(budget)
    for count in present:
        limits = list(whole_limits(budget.limits, count.bucket, book))
        name = others_name(count.bucket, count.period.since_ms)
        if any(others_units(project.others(limit.view), name) < count.unknown_units for limit in limits):
            window_ms = book.buckets[count.bucket].window.longest_ms
            noun = CALLS if any(limit.view.selector.count == "calls" for limit in limits) else ""
            budget.add_others(count.bucket, count.unknown_units, *count.period, name, window_ms=window_ms, noun=noun)
            added = True
    return added


def _lowered(limits: Sequence[Limit], grants: Sequence[Grant]) -> Iterator[Lowered]:
    for limit in limits:
        for grant in grants:
            most = granted_units(limit, {grant.bucket: grant.quota_units})
            if most is not None and most < limit.limit_units:
                yield Lowered(limit.name, limit.limit_units, grant.quota_units, grant.until_ms, most)


def _remembered(before: Sequence[Compared], present: Sequence[BucketCount], now_ms: int) -> list[Compared]:
    """The last comparison of each bucket: the present ones, and older ones that are not too old."""
    newest = {compared.bucket: compared for compared in before if now_ms - PAST_MS < compared.at_ms <= now_ms}
    for count in present:
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
