"""Reads cost books from TOML: the prices of calls, upstream's quotas, and how to read the API's requests and answers.

The models are `quota.terms.costs` and `quota.terms.api`; `quota.settings.tables` has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import cast

from quota.common.files import list_names, read_text
from quota.common.text import nearest, one_line, show
from quota.errors import ConfigError
from quota.settings.tables import BOOK, DATED, LEVEL, QUOTA
from quota.settings.toml import Label, TomlTable, parse_toml, read_toml
from quota.terms.api import (
    GOOGLES_KEY,
    VERBS,
    AnswerRules,
    ClosedRule,
    Field,
    Figure,
    KeyPlace,
    LevelRule,
    Match,
    Reserve,
    Route,
    Used,
)
from quota.terms.costs import Bucket, CostBook, Metric, Monitoring, Part, Pool, Price, Probe, Quota
from quota.terms.limits import Calendar

MAX_ROUTES = 1_000


def load_book(name: str, folder: Path | None = None) -> CostBook:
    """The cost book of this name: a built-in one, or a TOML file (a name with a `/` or ending in `.toml`).

    A relative file name is relative to `folder` (default: the working folder).
    Raises ConfigError for an unknown name or a file that is not a cost book.
    """
    return book_of(*_tables(name, folder))


def _tables(name: str, folder: Path | None) -> tuple[dict[str, object], str, str]:
    """The tables of a book, its name, and its name in messages."""
    if "/" in name or name.endswith(".toml"):
        path = (folder or Path()) / Path(name)
        return read_toml(path), one_line(path.stem), one_line(path)
    names = book_names()
    if name not in names:
        raise ConfigError(f"there is no cost book {show(name)}; {nearest(name, names)}")
    text, source = read_text("quota.config", f"costs/{name}.toml"), f"cost book {name}"
    return parse_toml(text, source), name, source


def book_tables(name: str) -> dict[str, object]:
    """The tables of a book's file, with dates as text, for programs in other languages. Raises as `load_book` does."""
    import json  # late: few processes need it

    load_book(name)
    tables, _, _ = _tables(name, None)
    return cast("dict[str, object]", json.loads(json.dumps(tables, default=lambda day: day.isoformat())))


def book_names() -> list[str]:
    """The names of the built-in cost books, sorted."""
    return sorted(name.removesuffix(".toml") for name in list_names("quota.config", "costs") if name.endswith(".toml"))


# -- prices ------------------------------------------------------------------------------------------------------------


def book_of(data: dict[str, object], name: str, source: str) -> CostBook:
    """The cost book in these tables. Messages call it `source`. Raises ConfigError."""
    root = TomlTable(data, source, keys=BOOK, places={"window": "a cost book calls it 'resets'"})
    buckets = {bucket: Bucket(bucket, _quotas(row)) for bucket, row in root.read("buckets").items()}
    if not buckets:
        raise root.error("at least one bucket is needed", "buckets")
    defaults, table = root.read("default"), root.read("methods")
    methods = {
        Label().parse(table, method): tuple(_prices(table, method, buckets, value)) for method, value in table.items()
    }
    pools = tuple(_pool(pool, row, methods) for pool, row in root.read("pools").items())
    book = CostBook(
        name=name,
        **root.members("api source read_on"),
        retention_ms=root.read("retention"),
        buckets=buckets,
        methods=methods,
        default_get=Price(_parts(defaults.read("get"), buckets)),
        default_other=Price(_parts(defaults.read("other"), buckets)),
        pools=pools,
        probe=_probe(root.read("probe"), methods) if "probe" in root else None,
        monitoring=_monitoring(root.read("monitoring"), buckets, pools) if "monitoring" in root else None,
        hosts=root.read("hosts"),
        key=_key(root.read("key")) if "key" in root else GOOGLES_KEY,
        scopes=root.read("scopes"),
        routes=_routes(root.read("routes"), methods),
        answers=_answers(root.read("answers"), buckets, pools) if "answers" in root else AnswerRules(),
    )
    return book if "key" in root or book.googles else book._replace(key=KeyPlace())


def _quotas(row: TomlTable) -> tuple[Quota, ...]:
    """Upstream's quotas of a bucket: `quota` and `resets`, or several such rows in `windows`."""
    if "windows" not in row:
        return (Quota(*map(row.read, QUOTA)),)
    quotas: list[Quota] = []
    for window in row.read("windows"):
        quota = Quota(*map(window.read, QUOTA))
        if any(quota.window == earlier.window for earlier in quotas):
            raise window.error("this window is listed twice; keep the smaller quota", "resets")
        quotas.append(quota)
    return tuple(quotas)


def _prices(table: TomlTable, method: str, buckets: Mapping[str, Bucket], value: object) -> list[Price]:
    """The prices of one method, oldest first."""
    rows = value if isinstance(value, list) else [value]
    if any(isinstance(row, dict) and "since" in row for row in rows):
        raise table.error(
            "write dated prices as { prices = [{ units = 1 }, { units = 2, since = 2026-06-01 }] }; "
            "a list is what one call costs in several buckets",
            method,
        )
    if not (isinstance(value, dict) and "prices" in value):
        return [Price(_parts(table.read(method), buckets))]
    prices: list[Price] = []
    for row in table.inner(value, method, DATED).read("prices"):
        cost = row.read("parts") if "parts" in row else row
        price = Price(_parts(cost, buckets), row.read("since") or date.min)
        if prices and price.since <= prices[-1].since:
            raise row.error("not later than in the row before; list the oldest price first", "since")
        prices.append(price)
    return prices


def _parts(cost: int | TomlTable | list[TomlTable], buckets: Mapping[str, Bucket]) -> tuple[Part, ...]:
    """The price of one call in each bucket. Empty: the call is free."""
    if isinstance(cost, int):
        return (Part(next(iter(buckets)), cost),) if cost else ()
    if isinstance(cost, TomlTable):
        return _part(cost, buckets)
    parts: dict[str, Part] = {}
    for row in cost:
        (part,) = _part(row, buckets)
        if parts and part.reserve:
            raise row.error(
                "only the first bucket can have it: an answer says only what a call used of that bucket", "reserve"
            )
        if part.bucket in parts:
            raise row.error(f"bucket {show(part.bucket)} is listed twice; add its units up", "bucket")
        parts[part.bucket] = part
    return tuple(parts.values())


def _part(row: TomlTable, buckets: Mapping[str, Bucket]) -> tuple[Part, ...]:
    bucket = row.choose("bucket", buckets) or next(iter(buckets))
    if "reserve" in row:
        if "units" in row:
            raise row.error("cannot be combined with reserve, which says how many units a call may cost", "units")
        bound = row.read("reserve")
        reserve = Reserve(pointer=bound.read("json"), **bound.members("default bytes_per_unit"))
        return (Part(bucket, reserve.default, reserve),)
    units = row.read("units")
    return (Part(bucket, units),) if units else ()


def _pool(name: str, row: TomlTable, methods: Mapping[str, object]) -> Pool:
    stopped = row.read("methods")
    for index, method in enumerate(stopped):
        if method not in methods:
            raise row.error(f"no method {show(method)} in this book; {nearest(method, methods)}", "methods", index)
    return Pool(name, row.read("marks"), stopped)


def _probe(row: TomlTable, methods: Mapping[str, object]) -> Probe:
    return Probe(row.choose("method", methods), dict(row.read("parameters").items()))


def _monitoring(table: TomlTable, buckets: Mapping[str, Bucket], pools: Sequence[Pool]) -> Monitoring:
    """The names in Cloud Monitoring. Raises ConfigError for a bucket that upstream does not count by the calendar."""
    service = table.read("service")
    counted = [*buckets, *(pool.name for pool in pools)]
    metrics = []
    for name, row in table.read("buckets").items():
        if name not in counted:
            raise row.error(f"no bucket or pool of this book; {nearest(name, counted)}")
        if name in buckets and not isinstance(buckets[name].window, Calendar):
            raise row.error("`quota reconcile` compares figures since a reset, and this bucket has none")
        metrics.append(Metric(name, row.read("metric"), row.read("limit")))
    if not metrics:
        raise table.error("at least one bucket is needed", "buckets")
    resources = table.read("resources")
    return Monitoring(
        service=service,
        metrics=tuple(metrics),
        resources={name: resources.read(name) for name, _ in resources.items()},
    )


# -- requests ----------------------------------------------------------------------------------------------------------


def _key(row: TomlTable) -> KeyPlace:
    """Where the API wants its key: `{ header = "X-Api-Key" }`, with a `scheme` or none, or `{ query = "key" }`."""
    header, scheme, query = map(row.read, ("header", "scheme", "query"))
    if ("header" in row) == ("query" in row):
        raise row.error('name one place: { header = "X-Api-Key" } or { query = "key" }')
    if query and scheme:
        raise row.error("is only for a key in a header; remove it", "scheme")
    return KeyPlace(header or "", scheme or "", query or "")


def _routes(table: TomlTable, methods: Collection[str]) -> tuple[Route, ...]:
    """The routes, in the file's order. Raises ConfigError for a route that no request reaches, or whose method has no
    price."""
    routes: list[Route] = []
    for key, method in table.items():
        if not isinstance(method, str) or method not in methods:
            raise table.error(f"no method {show(method)} in this book; {nearest(method, methods)}", key)
        route = _route(table, key, method)
        first = next((earlier for earlier in routes if earlier.covers(route)), None)
        if first is not None:
            above = show(f"{first.verb} {first.path}".strip())
            raise table.error(f"never reached: {above} above it matches the same requests; put this route first", key)
        routes.append(route)
        if len(routes) > MAX_ROUTES:
            raise table.error(f"more than {MAX_ROUTES:,} routes; match several paths by one route with {{x}} or **")
    return tuple(routes)


def _route(table: TomlTable, key: str, method: str) -> Route:
    verb, space, path = key.rpartition(" ")
    if space and verb not in VERBS:
        raise table.error(f"{show(verb)} is no verb; {nearest(verb.upper(), VERBS)}", key)
    wrong = ""
    if not path.startswith("/") and path != "**":
        wrong = "a path begins with /"
    elif not path.isprintable() or re.search(r"[?#\\]", path):
        wrong = "a route is a path without a query"
    elif "*" in path.removesuffix("/**") and path != "**":
        wrong = "** matches the rest of a path: put it at the end, after a /"
    elif "}{" in path or re.search(r"[{}]", re.sub(r"\{[^{}/]+\}", "", path)):
        wrong = "{x} matches one segment"
    if wrong:
        raise table.error(f'{wrong}; write for example "GET /users/{{id}}" or "POST /search/**"', key)
    return Route.of(verb, path, method)


# -- answers -----------------------------------------------------------------------------------------------------------


def _answers(table: TomlTable, buckets: Collection[str], pools: Iterable[Pool]) -> AnswerRules:
    levels = [_level(table, table.read("bucket"))] if "remaining" in table else []
    for key in (*LEVEL, "bucket"):
        if key in table and not levels:
            raise table.error("has no effect without `remaining`; add the header that says what remains", key)
    levels += [_level(row, row.choose("bucket", buckets)) for row in table.read("levels")]
    free = [_match(row) for row in table.read("free")]
    closed: list[ClosedRule] = []
    for row in table.read("closed"):
        rule = _closed(row, [*buckets, *(pool.name for pool in pools)])
        first = next((number for number, earlier in enumerate(closed) if earlier.when.covers(rule.when)), None)
        if first is not None:
            raise row.error(f"never reached: closed[{first}] matches the same answers; put this rule first")
        closed.append(rule)
    used = _used(table.read("units")) if "units" in table else None
    return AnswerRules(tuple(levels), used, tuple(free), tuple(closed))


def _used(units: Field | list[TomlTable]) -> Used:
    """Where an answer says what a call used: one figure, or a list of figures in the JSON that add up."""
    if isinstance(units, Field):
        return Used((Figure((units,)),))
    figures = []
    for row in units:
        places = row.read("json") if isinstance(row.value("json"), list) else [row.read("json")]
        figures.append(Figure(tuple(Field(pointer=place) for place in places), row.read("default")))
    return Used(tuple(figures))


def _level(table: TomlTable, bucket: str | Field | None) -> LevelRule:
    remaining, limit = table.read("remaining"), table.read("limit")
    groups = set() if remaining.pattern is None else set(remaining.pattern.groupindex)
    if groups and "remaining" not in groups and not ("used" in groups and ("limit" in groups or limit is not None)):
        raise table.error(
            "the pattern needs a group (?P<remaining>...), or (?P<used>...) and (?P<limit>...)", "remaining"
        )
    return LevelRule(remaining, limit, table.read("reset"), bucket)


def _closed(row: TomlTable, buckets: Collection[str]) -> ClosedRule:
    match = _match(row)
    if match.status is not None and match.status < 400 and not match.reads_body:
        raise row.error(
            f"every good answer has status {match.status}; add `body` or `json` to match only those that close"
        )
    lasts = row.read("lasts")
    return ClosedRule(match, row.choose("bucket", buckets) or "", lasts)


def _match(row: TomlTable) -> Match:
    status, body, pointer, value = map(row.read, ("status", "body", "json", "is"))
    if status is None and not body and pointer is None:
        raise row.error("the rule has no condition; give `status`, `body` or `json`")
    if value is not None and pointer is None:
        raise row.error("needs `json`: the place in the answer that has this value", "is")
    if not isinstance(value, str | int | None):
        raise row.error("write a text, a whole number, true or false", "is")
    return Match(status, (body or "").lower(), pointer, value)
