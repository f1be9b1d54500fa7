"""The limits of a credential: from its table, or the default limits of its cost book."""

from __future__ import annotations

from collections.abc import Iterable

from quota.common.text import nearest, show
from quota.settings.model import DEFAULT_HEADROOM_PERCENT
from quota.settings.toml import TomlTable
from quota.terms.costs import CostBook
from quota.terms.limits import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    PERIOD_MS,
    Calendar,
    Limit,
    Selector,
    Sliding,
    View,
    Window,
    named_twice,
)

_SPAN_NAMES = {MINUTE_MS: "minute", HOUR_MS: "hour", DAY_MS: "day"}


def default_limits(book: CostBook) -> tuple[Limit, ...]:
    """Two limits for each calendar window in which upstream counts a bucket, each with 5% of its quota as headroom: a
    sliding window as long as upstream's period, and upstream's own window (`day` and `pacific-day`). A window of
    upstream's that slides needs one limit. Of two quotas for the same window the smaller holds.
    """
    limits = []
    for bucket in book.buckets.values():
        prefix = "" if bucket is book.main_bucket else f"{bucket.name}-"
        names: dict[Window, str] = {}
        quotas: dict[Window, int] = {}
        for quota in bucket.quotas:
            for name, window in _windows_of(quota.window):
                names.setdefault(window, name)
                quotas[window] = min(quota.units, quotas.get(window, quota.units))
        for window, quota_units in quotas.items():
            headroom = share_of(quota_units, DEFAULT_HEADROOM_PERCENT)
            view = View(Selector(buckets=(bucket.name,)), window)
            limits.append(Limit(prefix + names[window], quota_units - headroom, view, quota_units, headroom))
    return tuple(limits)


def share_of(units: int, percent: int) -> int:
    """A share to leave unspent, rounded up, and never all units."""
    return min(-(-units * percent // 100), units - 1)


def covers(limit: Limit, bucket: str, book: CostBook) -> bool:
    """Whether a limit counts every call charged to a bucket, whoever makes it."""
    selector = limit.view.selector
    if bucket not in selector.buckets or selector.jobs or limit.per_job or limit.shadow:
        return False
    charged = {method: units for method in book.methods if (units := book.price(method).units_in(bucket))}
    if selector.count == "calls" and any(units > 1 for units in charged.values()):
        return False
    # The book charges an unknown method by its defaults, and no list of methods selects such a call.
    return not selector.methods or (
        charged.keys() <= set(selector.methods)
        and not any(price.units_in(bucket) for price in (book.default_get, book.default_other))
    )


def headrooms(limits: Iterable[Limit], book: CostBook, max_cost_units: int) -> list[tuple[int, Limit]]:
    """The headroom of each limit that covers a bucket and counts calls of up to `max_cost_units`: calls that the ledger
    does not see must fit into it. It is the part of upstream's quota that the limit leaves unused: its own headroom, or
    the gap to the cost book's quota."""
    rows = []
    for limit in limits:
        selector = limit.view.selector
        if book.least_units(selector) <= max_cost_units and any(covers(limit, name, book) for name in book.buckets):
            granted = min([book.buckets[name].quota_units for name in selector.buckets], default=0)
            rows.append((max(limit.headroom_units, granted - limit.limit_units), limit))
    return rows


def _windows_of(window: Window) -> list[tuple[str, Window]]:
    """The windows that enforce one of upstream's windows, with the names of their limits."""
    if isinstance(window, Sliding):
        return [(_SPAN_NAMES.get(window.window_ms, window.name), window)]
    sliding = Sliding(PERIOD_MS[window.period])
    city = window.zone.rpartition("/")[2].lower().replace("_", "-")
    zone = "pacific" if window.zone == "America/Los_Angeles" else city
    return [(window.period, sliding), (f"{zone}-{window.kind}", window)]


def as_written(window: Window) -> str:
    """A window as a configuration writes it."""
    if not isinstance(window, Calendar):
        return f'"{window.name}"'
    keys = [f'calendar = "{window.period}"', f'zone = "{window.zone}"']
    keys += [f"day = {window.day}"] if window.day != 1 else []
    keys += [f'starts = "{window.starts}"'] if window.starts != "monday" else []
    return f"{{ {', '.join(keys)} }}"


def parse_limits(row: TomlTable, book: CostBook) -> tuple[Limit, ...]:
    tables = tuple(row.read("limits"))
    limits = tuple([_limit(table, book) for table in tables])
    if (n := named_twice(limits)) is not None:
        raise tables[n].error(f"{show(limits[n].name)} is the name of another limit of this credential", "name")
    return limits


def _limit(table: TomlTable, book: CostBook) -> Limit:
    name = table.read("name")
    quota_units, headroom_units = _numbers(table)
    methods = _methods(table, book)
    selector = Selector(
        buckets=_buckets(table, book, methods),
        methods=methods,
        jobs=table.read("jobs"),
        count=table.read("count"),
    )
    view = View(selector, table.read("window"))
    paced = table.read("pacing")
    if paced and not isinstance(view.window, Calendar):
        raise table.error(
            "only a calendar window can be paced, because only it has a reset; remove the key here, and pace a "
            "calendar limit instead",
            "pacing",
        )
    return Limit(
        name=name,
        limit_units=quota_units - headroom_units,
        view=view,
        quota_units=quota_units,
        headroom_units=headroom_units,
        paced=paced,
        per_job=table.read("per") == "job",
        shadow=table.read("shadow"),
    )


def _numbers(table: TomlTable) -> tuple[int, int]:
    """(quota, headroom) of a limit; `units` is a quota without headroom, which may be a share such as `"10%"`."""
    if "units" in table:
        return table.read("units"), 0
    quota_units = table.read("quota")
    headroom: int | str = table.read("headroom") if "headroom" in table else 0
    headroom_units = headroom if isinstance(headroom, int) else share_of(quota_units, int(headroom[:-1]))
    if headroom_units >= quota_units:
        raise table.error(f"{headroom_units} of a quota of {quota_units} leaves nothing to spend", "headroom")
    return quota_units, headroom_units


def _methods(table: TomlTable, book: CostBook) -> tuple[str, ...]:
    methods = tuple(book.canonical(method) for method in table.read("methods"))
    for index, method in enumerate(methods):
        if method not in book.methods:
            message = f"cost book {book.name!r} has no method {show(method)}; {nearest(method, book.methods)}"
            raise table.error(message, "methods", index)
    return tuple(sorted(set(methods)))


def _buckets(table: TomlTable, book: CostBook, methods: tuple[str, ...]) -> tuple[str, ...]:
    if "bucket" in table:
        value: str | tuple[str, ...] = table.read("bucket")
        names = (value,) if isinstance(value, str) else value
        for index, name in enumerate(names):
            if name not in book.buckets:
                message = f"cost book {book.name!r} has no bucket {show(name)}; {nearest(name, book.buckets)}"
                raise table.error(message, "bucket", None if isinstance(value, str) else index)
        return tuple(sorted(names))
    if methods:
        # A call of several buckets counts in the first, so a limit that counts calls counts it once.
        first = {price.bucket for method in methods for price in book.methods[method] if price.parts}
        return tuple(sorted(first)) or (book.main_bucket.name,)
    return (book.main_bucket.name,)
