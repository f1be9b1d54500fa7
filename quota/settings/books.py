"""Cost books from TOML. The model is `quota.terms.costs`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import cast

from quota.common.resources import list_names, read_text
from quota.common.text import nearest, one_line, show
from quota.errors import ConfigError
from quota.rules.calls import MAX_CHARGE_UNITS
from quota.settings.api import parse_answers, parse_hosts, parse_key, parse_pointer, parse_routes
from quota.settings.kinds import Texts
from quota.settings.tables import CALENDAR, SCOPE
from quota.settings.toml import TomlTable, parse_span, parse_toml, read_toml
from quota.terms.costs import MAX_PARTS, Bucket, CostBook, Metric, Monitoring, Part, Pool, Price, Probe, Quota
from quota.terms.limits import Calendar, Sliding, Window
from quota.terms.reserve import Reserve


def load_book(name: str, folder: Path | None = None) -> CostBook:
    """The cost book of this name: a built-in one, or a TOML file (a name with a `/` or ending in `.toml`).

    A relative file name is relative to `folder` (default: the working folder).
    Raises ConfigError for an unknown name or a file that is not a cost book.
    """
    return _book(*_tables(name, folder))


def _tables(name: str, folder: Path | None) -> tuple[dict[str, object], str, str]:
    """The tables of a book, its name, and what messages call it."""
    if "/" in name or name.endswith(".toml"):
        path = (folder or Path()) / Path(name)
        return read_toml(path), one_line(path.stem), one_line(path)
    known = book_names()
    if name not in known:
        raise ConfigError(f"there is no cost book {show(name)}; {nearest(name, known)}")
    text, source = read_text("quota.config", f"costs/{name}.toml"), f"cost book {name}"
    return parse_toml(text, source), name, source


def book_tables(name: str) -> dict[str, object]:
    """A book as its file has it, dates as text: for programs in other languages. Raises as `load_book` does."""
    load_book(name)
    return cast("dict[str, object]", _plain(_tables(name, None)[0]))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.isoformat() if isinstance(value, date) else value


def book_names() -> list[str]:
    """The names of the built-in cost books, sorted."""
    return sorted(name.removesuffix(".toml") for name in list_names("quota.config", "costs") if name.endswith(".toml"))


def parse_book(text: str, name: str) -> CostBook:
    """A cost book from TOML text; `name` is used in messages and as the book's name. Raises ConfigError."""
    return _book(parse_toml(text, f"cost book {name}"), name, f"cost book {name}")


_API_KEYS = ("hosts", "key", "scopes", "routes", "answers")
_BOOK_KEYS = (
    "api",
    "source",
    "read_on",
    "retention",
    "buckets",
    "default",
    "methods",
    "pools",
    "probe",
    "monitoring",
    *_API_KEYS,
)


def _book(data: dict[str, object], name: str, source: str) -> CostBook:
    root = TomlTable(data, source, keys=_BOOK_KEYS, places={"window": "a cost book calls it 'resets'"})
    buckets = {
        row.check_name(bucket): Bucket(bucket, _quotas(row))
        for bucket, row in root.table("buckets").tables(("quota", "resets", "windows")).items()
    }
    if not buckets:
        raise root.error("at least one bucket is needed", "buckets")
    defaults = root.table("default", ("get", "other"))
    table = root.table("methods")
    methods = {
        table.check_label(method): tuple(_prices(table, method, value, buckets)) for method, value in table.items()
    }
    pools = tuple(
        _pool(pool, row, methods) for pool, row in root.table("pools", default={}).tables(("marks", "methods")).items()
    )
    return CostBook(
        name=name,
        api=root.check_label(root.text("api"), "api"),
        source=root.text("source"),
        read_on=root.day("read_on"),
        retention_ms=parse_span(root, "retention") if "retention" in root else None,
        buckets=buckets,
        methods=methods,
        default_get=Price(_parts(defaults, "get", defaults.value("get"), buckets, least=1)),
        default_other=Price(_parts(defaults, "other", defaults.value("other"), buckets, least=1)),
        pools=pools,
        probe=_probe(root.table("probe", ("method", "parameters")), methods) if "probe" in root else None,
        monitoring=_monitoring(root, buckets, pools) if "monitoring" in root else None,
        hosts=parse_hosts(root),
        key=parse_key(root),
        scopes=Texts(each=SCOPE).read(root, "scopes"),
        routes=parse_routes(root, methods),
        answers=parse_answers(root, buckets, [pool.name for pool in pools]),
    )


MAX_WINDOWS = 10
"""The most windows in which upstream counts one bucket."""


def _quotas(row: TomlTable) -> tuple[Quota, ...]:
    """What upstream grants of a bucket: `quota` and `resets`, or several of them in `windows`."""
    if "windows" not in row:
        return (Quota(row.whole("quota"), parse_window(row, "resets")),)
    for other in ("quota", "resets"):
        if other in row:
            raise row.error("cannot be combined with windows; put it into each of these", other)
    rows, quotas = row.array("windows", ("quota", "resets")), list[Quota]()
    if len(rows) > MAX_WINDOWS:
        raise row.error(f"a bucket has {MAX_WINDOWS} windows at most", "windows")
    for one in rows:
        quota = Quota(one.whole("quota"), parse_window(one, "resets"))
        if any(quota.window == earlier.window for earlier in quotas):
            raise one.error("this window stands here twice; keep the smaller quota", "resets")
        quotas.append(quota)
    return tuple(quotas)


def _prices(table: TomlTable, method: str, value: object, buckets: Mapping[str, Bucket]) -> list[Price]:
    """The prices of one method, oldest first."""
    rows = value if isinstance(value, list) else [value]
    if any(isinstance(row, dict) and "since" in row for row in rows):
        raise table.error(
            "write dated prices as { prices = [{ units = 1 }, { units = 2, since = 2026-06-01 }] }; "
            "a list is what one call costs in several buckets",
            method,
        )
    if not (isinstance(value, dict) and "prices" in value):
        return [Price(_parts(table, method, value, buckets))]
    dated = _alone(table.as_table(value, method, (*_PART_KEYS, "prices")), "prices")
    prices: list[Price] = []
    for row in dated.array("prices", (*_PART_KEYS, "parts", "since")):
        if "parts" in row:
            parts = _parts(_alone(row, "parts"), "parts", row.value("parts"), buckets)
        else:
            parts = _part(row, buckets)
        price = Price(parts, row.day("since") if "since" in row else date.min)
        if prices and price.since <= prices[-1].since:
            raise row.error("not later than in the row before; list the oldest price first", "since")
        prices.append(price)
    return prices


def _alone(row: TomlTable, key: str) -> TomlTable:
    """The same row. Raises ConfigError if it gives units or a bucket beside a key that has them inside."""
    for other in _PART_KEYS:
        if other in row:
            raise row.error(f"cannot be combined with {key}; put it into each of these", other)
    return row


_PART_KEYS = ("units", "bucket", "reserve")


def _parts(
    table: TomlTable, key: str, value: object, buckets: Mapping[str, Bucket], least: int = 0
) -> tuple[Part, ...]:
    """What one call costs: a number of the first bucket, a table for another one, or a list of tables. 0: it is
    free."""
    if isinstance(value, dict):
        return _part(table.as_table(value, key, _PART_KEYS), buckets, least)
    if not isinstance(value, list):
        units = table.as_whole(value, key, minimum=least)
        return (Part(next(iter(buckets)), units),) if units else ()
    rows = table.array(key, _PART_KEYS)
    if len(rows) > MAX_PARTS:
        raise table.error(f"one call is charged to {MAX_PARTS} buckets at most", key)
    parts: dict[str, Part] = {}
    for row in rows:
        (part,) = _part(row, buckets, least=1)
        if parts and part.reserve:
            raise row.error("only the first bucket can have it: of that one an answer says what was used", "reserve")
        if part.bucket in parts:
            raise row.error(f"bucket {show(part.bucket)} stands here twice; add its units up", "bucket")
        parts[part.bucket] = part
    return tuple(parts.values())


def _part(row: TomlTable, buckets: Mapping[str, Bucket], least: int = 0) -> tuple[Part, ...]:
    bucket = row.text("bucket", next(iter(buckets)), choices=buckets)
    if "reserve" in row:
        if "units" in row:
            raise row.error("cannot be combined with reserve, which says how many units a call may cost", "units")
        reserve = _reserve(row.table("reserve", ("json", "default", "bytes_per_unit")))
        return (Part(bucket, reserve.default, reserve),)
    units = row.whole("units", minimum=least)
    return (Part(bucket, units),) if units else ()


def _reserve(row: TomlTable) -> Reserve:
    return Reserve(
        default=row.whole("default", maximum=MAX_CHARGE_UNITS),
        pointer=parse_pointer(row, "json") if "json" in row else None,
        bytes_per_unit=row.whole("bytes_per_unit", None),
    )


def _pool(name: str, row: TomlTable, methods: Mapping[str, object]) -> Pool:
    stopped = row.texts("methods")
    for index, method in enumerate(stopped):
        if method not in methods:
            raise row.error(f"no method {show(method)} in this book; {nearest(method, methods)}", "methods", index)
    return Pool(row.check_name(name), row.texts("marks"), stopped)


def _probe(row: TomlTable, methods: Mapping[str, object]) -> Probe:
    method = row.text("method", choices=methods)
    return Probe(method, dict(row.table("parameters", default={}).items()))


def _monitoring(root: TomlTable, buckets: Mapping[str, Bucket], pools: Sequence[Pool]) -> Monitoring:
    """The names in Cloud Monitoring. Raises ConfigError for a bucket that upstream does not count by the calendar."""
    table = root.table("monitoring", ("service", "buckets", "resources"))
    service = _word(table, "service")
    known = {**dict.fromkeys(buckets), **dict.fromkeys(pool.name for pool in pools)}
    metrics = []
    rows = table.table("buckets")
    for name, row in rows.tables(("metric", "limit")).items():
        if name not in known:
            raise rows.error(f"no bucket or pool of this book; {nearest(name, known)}", name)
        if name in buckets and not isinstance(buckets[name].window, Calendar):
            raise rows.error("upstream's figures are compared from a reset on, and this bucket has none", name)
        metrics.append(Metric(name, _word(row, "metric"), _word(row, "limit")))
    if not metrics:
        raise rows.error("at least one bucket is needed")
    resources = table.table("resources", default={})
    return Monitoring(
        service=service,
        metrics=tuple(metrics),
        resources={name: resources.check_label(resources.text(name), name) for name, _ in resources.items()},
    )


def _word(row: TomlTable, key: str) -> str:
    """A name that becomes part of a filter."""
    word = row.text(key)
    if not re.fullmatch(r"[A-Za-z0-9._/-]{1,128}", word):
        raise row.error(f"{show(word)}: a name here has 1 to 128 characters out of A-Z a-z 0-9 . _ / -", key)
    return word


def parse_window(table: TomlTable, key: str) -> Window:
    """The window at a key: a duration such as `"24h"`, or `{ calendar = "day", zone = "America/Los_Angeles" }`; of a
    month also the `day` on which it begins, of a week the weekday on which it `starts`."""
    value = table.value(key)
    if isinstance(value, str):
        return Sliding(parse_span(table, key))
    if not isinstance(value, dict):
        raise table.error('a window is a duration such as "24h" or { calendar = "day", zone = "..." }', key)
    row = table.as_table(value, key, CALENDAR)
    period = row.read("calendar")
    for name, of in (("day", "month"), ("starts", "week")):
        if name in row and period != of:
            raise row.error(f'only calendar = "{of}" has it; remove this key', name)
    zone, day, starts = row.read("zone"), row.read("day"), row.read("starts")
    with row.blamed("zone"):
        return Calendar(period, zone, day, starts)
