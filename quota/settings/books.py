"""Reads cost books from TOML, and the limits of a credential: from its table, or the default limits of its cost book.

A book has the prices of calls, upstream's quotas, and how to read the API's requests and answers. The models are
`quota.terms.costs`, `quota.terms.api` and `quota.terms.limits`; `quota.settings.tables` has the tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quota.common.files import list_names, read_text
from quota.common.text import listed, nearest, one_line, show
from quota.errors import ConfigError
from quota.settings.model import DEFAULT_HEADROOM_PERCENT
from quota.settings.tables import BOOK, DATED, LEVEL, QUOTA
from quota.settings.toml import TomlTable, dotted, parse_toml, read_file, read_label, tables_in
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
    Pointer,
    Reserve,
    Route,
    Used,
)
from quota.terms.costs import Bucket, CostBook, Metric, Monitoring, Part, Pool, Price, Probe, Quota
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

MAX_ROUTES = 1_000

_SPAN_NAMES = {MINUTE_MS: "minute", HOUR_MS: "hour", DAY_MS: "day"}


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
        return parse_toml(read_file(path), one_line(path)), one_line(path.stem), one_line(path)
    names = book_names()
    if name not in names:
        own = f"{name}.toml"
        hint = nearest(name, names, f"known: {listed(names)}; `quota book new` drafts another")
        if os.path.isfile(os.path.join(folder or "", own)):
            hint = f"did you mean {show(own)}?"
        raise ConfigError(f"there is no cost book {show(name)}; {hint}")
    text, source = read_text("quota.config", f"costs/{name}.toml"), f"cost book {name}"
    return parse_toml(text, source), name, source


def book_and_tables(name: str) -> tuple[CostBook, dict[str, object]]:
    """A cost book, and the tables of its file with dates as text, for programs in other languages. A shell's `<(...)`
    can be read once. Raises as `load_book` does."""
    import json  # late: few processes need it

    tables, title, source = _tables(name, None)
    return book_of(tables, title, source), json.loads(json.dumps(tables, default=lambda day: day.isoformat()))


def book_names() -> list[str]:
    """The names of the built-in cost books, sorted."""
    return list_names("quota.config", "costs", ".toml")


# -- mistakes ----------------------------------------------------------------------------------------------------------

MAX_MISTAKES = 20
"""A message lists at most this many mistakes of a file."""

T = TypeVar("T")


class Mistakes(list[str]):
    """The mistakes of a file, which are listed together."""

    def tried(self, read: Callable[..., T], *given: Any) -> T | None:
        """What `read` returns; None after a mistake."""
        try:
            return read(*given)
        except ConfigError as error:
            self.append(str(error))
            return None

    def rows(self, read: Callable[[TomlTable], T], rows: Iterable[TomlTable]) -> list[T]:
        """What `read` returns for each row that has no mistake."""
        return [value for row in rows if (value := self.tried(read, row)) is not None]

    def look_for(self, table: TomlTable) -> None:
        """Check this table and all tables below it, and read each key by itself."""
        self.tried(table.check)
        passed_over = table.misspelt()
        for key, value in table.data.items():
            # A price has several forms: `_prices` reads it.
            if key in passed_over or (key == "methods" and table.keys is BOOK):
                continue
            self.tried(table.read, key)
            kind = table.keys.get(key, table.keys.others)
            if kind is None or not kind.takes(value):
                continue
            for path, keys, inner in tables_in(kind, value, dotted(table.path, key)):
                if isinstance(inner, dict):
                    self.look_for(replace(table, data=inner, path=path, keys=keys))

    def error(self, source: str) -> ConfigError:
        """The error that names the mistakes, each once."""
        mistakes, start = tuple(dict.fromkeys(self)), f"{source}: "
        if len(mistakes) == 1:
            return ConfigError(mistakes[0])
        shown = [mistake.removeprefix(start) for mistake in mistakes[:MAX_MISTAKES]]
        if more := mistakes[MAX_MISTAKES:]:
            shown.append(f"and {len(more):,} more")
        numbered = [f"({n}) {mistake}" for n, mistake in enumerate(shown, 1)]
        error = ConfigError(f"{start}{len(mistakes):,} mistakes: {' '.join(numbered)}")
        error.mistakes = mistakes
        return error


def read_root(read: Callable[[TomlTable], T], root: TomlTable) -> T:
    """What `read` returns for the tables of a file. Raises ConfigError: it lists the first mistakes that the reader
    meets, each misspelt key, and each value that is wrong by itself."""
    try:
        return read(root)
    except ConfigError as error:  # only now, because each command reads its files at its start
        wrong = Mistakes(error.mistakes or (str(error),))
        wrong.look_for(root)
        raise wrong.error(root.source) from None


# -- prices ------------------------------------------------------------------------------------------------------------


def book_of(data: dict[str, Any], name: str, source: str) -> CostBook:
    """The cost book in these tables. Messages call it `source`. Raises ConfigError."""
    root = TomlTable(data, source, keys=BOOK, places={"window": "a cost book calls it 'resets' or 'windows'"})
    return read_root(partial(_book_of, name), root)


def _book_of(name: str, root: TomlTable) -> CostBook:
    root.check()
    wrong = Mistakes()
    buckets = {bucket: Bucket(bucket, _quotas(row)) for bucket, row in root.read("buckets").all().items()}
    if not buckets:
        raise root.error("at least one bucket is needed", "buckets")
    defaults, table = root.read("default"), root.read("methods")
    methods: dict[str, tuple[Price, ...]] = {}
    for method, value in table.data.items():
        wrong.tried(read_label, table, method, "")
        methods[method] = tuple(wrong.tried(_prices, table, method, buckets, value) or ())
    if wrong:
        raise wrong.error(root.source)
    pools = tuple(_pool(pool, row, methods) for pool, row in root.read("pools").all().items())
    routes = _routes(root.read("routes"), methods, wrong)
    answers = _answers(root.read("answers"), buckets, pools, wrong) if "answers" in root else AnswerRules()
    if wrong:
        raise wrong.error(root.source)
    book = CostBook(
        name=name,
        **root.members("api source read_on hosts scopes"),
        retention_ms=root.read("retention"),
        buckets=buckets,
        methods=methods,
        default_get=Price(_parts(defaults.read("get"), buckets)),
        default_other=Price(_parts(defaults.read("other"), buckets)),
        pools=pools,
        probe=_probe(root.read("probe"), methods) if "probe" in root else None,
        monitoring=_monitoring(root.read("monitoring"), buckets, pools) if "monitoring" in root else None,
        key=_key(root.read("key")) if "key" in root else GOOGLES_KEY,
        routes=routes,
        answers=answers,
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
        dated = "{ prices = [{ units = 1 }, { units = 2, since = 2026-06-01 }] }"
        raise table.error(f"write dated prices as {dated}; a list means several buckets", method)
    for key in value if isinstance(value, dict) else ():
        if key not in DATED:
            quotes = "" if "." in method else f'a method "{method}.{key}" needs these quotes; '
            hint = nearest(key, DATED, f"{quotes}known: {listed(DATED)}")
            raise table.inner(value, method).error(f"unknown key; {hint}", key)
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
            raise row.error("only the first bucket can have it: an answer tells of that bucket alone", "reserve")
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
        reserve = Reserve(pointers=_places(bound), **bound.members("default bytes_per_unit"))
        return (Part(bucket, reserve.default, reserve),)
    units = row.read("units")
    return (Part(bucket, units),) if units else ()


def _pool(name: str, row: TomlTable, methods: Mapping[str, object]) -> Pool:
    stopped = row.read("methods")
    for index, method in enumerate(stopped):
        row.check_choice(method, methods, "methods", f"no method {show(method)} in this book", index)
    return Pool(name, row.read("marks"), stopped)


def _probe(row: TomlTable, methods: Mapping[str, object]) -> Probe:
    return Probe(row.choose("method", methods), dict(row.read("parameters").data))


def _monitoring(table: TomlTable, buckets: Mapping[str, Bucket], pools: Sequence[Pool]) -> Monitoring:
    """The names in Cloud Monitoring. Raises ConfigError for a bucket that upstream does not count by the calendar."""
    service = table.read("service")
    counted = [*buckets, *(pool.name for pool in pools)]
    metrics = []
    for name, row in table.read("buckets").all().items():
        row.check_choice(name, counted, "", "no bucket or pool of this book")
        if name in buckets and not isinstance(buckets[name].window, Calendar):
            raise row.error("`quota reconcile` compares figures since a reset, and this bucket has none")
        metrics.append(Metric(name, row.read("metric"), row.read("limit")))
    if not metrics:
        raise table.error("at least one bucket is needed", "buckets")
    return Monitoring(service, tuple(metrics), table.read("resources").all())


# -- requests ----------------------------------------------------------------------------------------------------------


def _key(row: TomlTable) -> KeyPlace:
    """Where the API wants its key: `{ header = "X-Api-Key" }`, with a `scheme` or none, or `{ query = "key" }`."""
    header, scheme, query = map(row.read, ("header", "scheme", "query"))
    if ("header" in row) == ("query" in row):
        raise row.error('name one place: { header = "X-Api-Key" } or { query = "key" }')
    if query and scheme:
        raise row.error("is only for a key in a header; remove it", "scheme")
    return KeyPlace(header or "", scheme or "", query or "")


def _routes(table: TomlTable, methods: Collection[str], wrong: Mistakes) -> tuple[Route, ...]:
    """The routes, in the file's order. A route that no request reaches, or whose method has no price, is a mistake."""
    routes: list[Route] = []
    for key, method in table.data.items():
        route = wrong.tried(_route, table, key, method, methods, routes)
        if route is not None:
            routes.append(route)
        if len(routes) > MAX_ROUTES:
            raise table.error(f"more than {MAX_ROUTES:,} routes; match several paths by one route with {{x}} or **")
    return tuple(routes)


_PATH = r"\*\*|(?=/)(/(?!:)([^/?#\\*{}<>]|\{[^/?#\\*{}]+\}(?!\{))*)*(/\*\*)?"
"""A path, in which `{x}` is one segment or a part of it, and `**` the rest. Other tools write <x> and :x."""


def _route(table: TomlTable, key: str, method: object, methods: Collection[str], earlier: Iterable[Route]) -> Route:
    if not isinstance(method, str) or method not in methods:
        raise table.error(f"no method {show(method)} in this book; {nearest(method, methods)}", key)
    verb, path = key.split(" ", 1) if " " in key else ("", key)
    if " " in key and verb not in VERBS:
        raise table.error(f"{show(verb)} is no verb; {nearest(verb.upper(), VERBS)}", key)
    if not path.isprintable() or path != path.strip() or not re.fullmatch(_PATH, path):
        raise table.error(f'{show(path)} is no path; write for example "GET /users/{{id}}" or "POST /search/**"', key)
    route = Route.of(verb, path, method)
    first = next((other for other in earlier if other.covers(route)), None)
    if first is not None:
        above = show(f"{first.verb} {first.path}".strip())
        remedy = "delete this route" if first.method == method else "put this route first"
        raise table.error(f"never reached: {above} above it matches the same requests; {remedy}", key)
    return route


# -- answers -----------------------------------------------------------------------------------------------------------


def _answers(table: TomlTable, buckets: Collection[str], pools: Iterable[Pool], wrong: Mistakes) -> AnswerRules:
    levels = [_level(table, table.read("bucket"))] if "remaining" in table else []
    for key in (*LEVEL, "bucket"):
        if key in table and not levels:
            raise table.error("has no effect without `remaining`; add the header that says what remains", key)
    levels += wrong.rows(lambda row: _level(row, row.choose("bucket", buckets)), table.read("levels"))
    closed: list[ClosedRule] = []
    for row in table.read("closed"):
        rule = wrong.tried(_closed, row, [*buckets, *(pool.name for pool in pools)], closed)
        if rule is not None:
            closed.append(rule)
    used = _used(table.read("units")) if "units" in table else None
    return AnswerRules(tuple(levels), used, tuple(wrong.rows(_match, table.read("free"))), tuple(closed))


def _used(units: Field | list[TomlTable]) -> Used:
    """Where an answer says what a call used: one figure, or a list of figures in the JSON that add up."""
    if isinstance(units, Field):
        return Used((Figure((units,)),))
    figures = []
    for row in units:
        figures.append(Figure(tuple(Field(pointer=place) for place in _places(row)), row.read("default")))
    return Used(tuple(figures))


def _places(row: TomlTable) -> tuple[Pointer, ...]:
    """The places at `json`: one, a list, or none."""
    places = row.read("json")
    if "json" not in row:
        return ()
    return places if isinstance(row.value("json"), list) else (places,)


def _level(table: TomlTable, bucket: str | Field | None) -> LevelRule:
    remaining, limit = table.read("remaining"), table.read("limit")
    groups = set() if remaining.pattern is None else set(remaining.pattern.groupindex)
    if groups and "remaining" not in groups and not ("used" in groups and ("limit" in groups or limit is not None)):
        raise table.error("needs a group (?P<remaining>...), or (?P<used>...) and (?P<limit>...)", "remaining")
    return LevelRule(remaining, limit, table.read("reset"), bucket)


def _closed(row: TomlTable, buckets: Collection[str], earlier: Sequence[ClosedRule]) -> ClosedRule:
    match = _match(row)
    if match.status is not None and match.status < 400 and not match.reads_body:
        raise row.error(f"every good answer has status {match.status}; add `body` or `json` to match less")
    first = next((number for number, other in enumerate(earlier) if other.when.covers(match)), None)
    if first is not None:
        raise row.error(f"never reached: closed[{first}] matches the same answers; put this rule first")
    return ClosedRule(match, row.choose("bucket", buckets) or "", row.read("lasts"))


def _match(row: TomlTable) -> Match:
    status, body, pointer, value = map(row.read, ("status", "body", "json", "is"))
    if status is None and not body and pointer is None:
        raise row.error("the rule has no condition; give `status`, `body` or `json`")
    if value is not None and pointer is None:
        raise row.error("needs `json`: the place in the answer that has this value", "is")
    if not isinstance(value, str | int | None):
        raise row.error("write a text, a whole number, true or false", "is")
    return Match(status, (body or "").lower(), pointer, value)


# -- limits ------------------------------------------------------------------------------------------------------------


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
    if window.day != 1:
        keys.append(f"day = {window.day}")
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
    named = [book.canonical(method) for method in table.read("methods")]
    for index, method in enumerate(named):
        message = f"cost book {book.name!r} has no method {show(method)}"
        table.check_choice(method, book.methods, "methods", message, index)
    methods = tuple(sorted(set(named)))
    selector = Selector(buckets=_buckets(table, book, methods), methods=methods, **table.members("jobs count"))
    view = View(selector, table.read("window"))
    paced = table.read("pacing")
    if paced and not isinstance(view.window, Calendar):
        raise table.error("only a calendar window can be paced; pace a calendar limit instead", "pacing")
    return Limit(
        name=name,
        limit_units=quota_units - headroom_units,
        view=view,
        quota_units=quota_units,
        headroom_units=headroom_units,
        paced=paced,
        per_job=table.read("per") == "job",
        shadow=table.read("shadow"),
        quota_unwritten="units" in table,
    )


def _numbers(table: TomlTable) -> tuple[int, int]:
    """(quota, headroom) of a limit; `units` is a quota without headroom, which may be a share such as `"10%"`."""
    if "units" in table:
        return table.read("units"), 0
    quota_units = table.read("quota")
    headroom: int | str = table.read("headroom") if "headroom" in table else 0
    headroom_units = headroom if isinstance(headroom, int) else share_of(quota_units, int(headroom[:-1]))
    if headroom_units >= quota_units:
        raise table.error(f"{headroom_units:,} of a quota of {quota_units:,} leaves nothing to spend", "headroom")
    return quota_units, headroom_units


def _buckets(table: TomlTable, book: CostBook, methods: tuple[str, ...]) -> tuple[str, ...]:
    if "bucket" in table:
        value: str | tuple[str, ...] = table.read("bucket")
        names = (value,) if isinstance(value, str) else value
        for index, name in enumerate(names):
            message = f"cost book {book.name!r} has no bucket {show(name)}"
            table.check_choice(name, book.buckets, "bucket", message, None if isinstance(value, str) else index)
        return tuple(sorted(names))
    if methods:
        # A call of several buckets counts in the first, so a limit that counts calls counts it once.
        first = {price.bucket for method in methods for price in book.methods[method] if price.parts}
        return tuple(sorted(first)) or (book.main_bucket.name,)
    return (book.main_bucket.name,)
