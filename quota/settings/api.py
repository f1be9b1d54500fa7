"""What a cost book says of its API: `hosts`, `key`, `scopes`, `routes`, `answers`. The model: `quota.terms.api`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import cast, get_args

from quota.common.text import many, nearest, show
from quota.settings.toml import TomlTable, parse_span
from quota.terms.api import (
    VERBS,
    AnswerRules,
    ClosedRule,
    Field,
    Figure,
    Form,
    KeyPlace,
    LevelRule,
    Match,
    Pointer,
    Refill,
    Route,
    Used,
)
from quota.terms.hosts import Hosts

MAX_ROUTES = 1_000
MAX_RULES = 100
MAX_PATTERN_LENGTH = 200


def parse_hosts(root: TomlTable) -> tuple[str, ...]:
    """The hosts of the API. Raises ConfigError for what is no host."""
    hosts = root.texts("hosts")
    for index, host in enumerate(hosts):
        with root.blamed("hosts", index):
            Hosts(host)
    return hosts


def parse_key(root: TomlTable) -> KeyPlace:
    """Where the API wants its key: `{ header = "X-Api-Key" }`, with a `scheme` or none, or `{ query = "key" }`."""
    if "key" not in root:
        return KeyPlace()
    row = root.table("key", ("header", "scheme", "query"))
    for key in ("header", "scheme", "query"):
        if key in row and not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", row.text(key)):
            raise row.error("1 to 64 characters that a header's name may have", key)
    if ("header" in row) == ("query" in row):
        raise row.error('name one place: { header = "X-Api-Key" } or { query = "key" }')
    if "query" in row:
        if "scheme" in row:
            raise row.error("stands before a key in a header; remove it", "scheme")
        return KeyPlace("", "", row.text("query"))
    return KeyPlace(row.text("header"), row.text("scheme", ""))


# -- routes ------------------------------------------------------------------------------------------------------------


def parse_routes(root: TomlTable, methods: Collection[str]) -> tuple[Route, ...]:
    """The routes, in the file's order. Raises ConfigError for one that no request can take, or whose method has no
    price."""
    table = root.table("routes", default={})
    routes: list[Route] = []
    for key, method in table.items():
        if not isinstance(method, str) or method not in methods:
            raise table.error(f"no method {show(method)} in this book; {nearest(method, methods)}", key)
        route = _route(table, key, method)
        first = next((one for one in routes if one.covers(route)), None)
        if first is not None:
            said = f"{first.verb} {first.path}".strip()
            raise table.error(f"never reached: {show(said)} above it takes all of it; put this one first", key)
        routes.append(route)
        if len(routes) > MAX_ROUTES:
            raise table.error(f"more than {MAX_ROUTES:,} routes; let one with {{x}} or ** stand for several")
    return tuple(routes)


def _route(table: TomlTable, key: str, method: str) -> Route:
    verb, space, path = key.rpartition(" ")
    if space and verb not in VERBS:
        raise table.error(f"{show(verb)} is no verb; {nearest(verb.upper(), VERBS)}", key)
    wrong = ""
    if not path.startswith("/") and path != "**":
        wrong = "a path begins with /"
    elif not path.isprintable() or re.search(r"[?#\\]", path):
        wrong = "a path alone decides, without a query"
    elif "*" in path.removesuffix("/**") and path != "**":
        wrong = "** stands for any rest at the end of a path, after a /"
    elif "}{" in path or re.search(r"[{}]", re.sub(r"\{[^{}/]+\}", "", path)):
        wrong = "{x} stands for one segment"
    if wrong:
        raise table.error(f'{wrong}; write for example "GET /users/{{id}}" or "POST /search/**"', key)
    return Route(verb, path, method)


# -- answers -----------------------------------------------------------------------------------------------------------

_LEVEL_KEYS = ("remaining", "limit", "reset", "bucket")
_ANSWER_KEYS = (*_LEVEL_KEYS, "levels", "units", "free", "closed")
_FIELD_KEYS = ("header", "json", "pattern", "as")
_MATCH_KEYS = ("status", "body", "json", "is")


def parse_answers(root: TomlTable, buckets: Collection[str], pools: Iterable[str]) -> AnswerRules:
    """What an answer tells. Raises ConfigError."""
    if "answers" not in root:
        return AnswerRules()
    table = root.table("answers", _ANSWER_KEYS)
    levels = [_level(table, None)] if "remaining" in table else []
    for key in _LEVEL_KEYS:
        if key in table and not levels:
            raise table.error("says nothing without `remaining`; name the header that says it", key)
    for row in _rows(table, "levels", _LEVEL_KEYS):
        levels.append(_level(row, row.text("bucket", choices=buckets)))
    free = [_match(row) for row in _rows(table, "free", _MATCH_KEYS)]
    closed: list[ClosedRule] = []
    for row in _rows(table, "closed", (*_MATCH_KEYS, "bucket", "lasts")):
        rule = _closed(row, [*buckets, *pools])
        first = next((number for number, one in enumerate(closed) if one.when.covers(rule.when)), None)
        if first is not None:
            raise row.error(f"never reached: closed[{first}] takes all of it; put this one first")
        closed.append(rule)
    used = _used(table) if "units" in table else None
    return AnswerRules(tuple(levels), used, tuple(free), tuple(closed))


def _used(table: TomlTable) -> Used:
    """What a call used: one figure, or a list of those in the JSON that add up, each in one of several places."""
    if not isinstance(table.value("units"), list):
        return Used((Figure((_field(table, "units"),)),))
    return Used(
        tuple(
            Figure(tuple(Field(pointer=place) for place in _places(row)), row.whole("default", None, minimum=0))
            for row in _rows(table, "units", ("json", "default"))
        )
    )


def _places(row: TomlTable) -> list[Pointer]:
    if not isinstance(row.value("json"), list):
        return [parse_pointer(row, "json")]
    return [_pointer(row, "json", text, index) for index, text in enumerate(row.texts("json"))]


def _rows(table: TomlTable, key: str, keys: Collection[str]) -> list[TomlTable]:
    if key not in table:
        return []
    rows = table.array(key, keys)
    if len(rows) > MAX_RULES:
        raise table.error(f"{many(len(rows), 'rule')}; {MAX_RULES} are the most", key)
    return rows


def _level(table: TomlTable, bucket: str | None) -> LevelRule:
    remaining = _field(table, "remaining", ("remaining", "used", "limit"))
    limit = _field(table, "limit") if "limit" in table else None
    groups = set() if remaining.pattern is None else set(remaining.pattern.groupindex)
    if groups and "remaining" not in groups and not ("used" in groups and ("limit" in groups or limit is not None)):
        raise table.error(
            "the pattern needs a group (?P<remaining>...), or (?P<used>...) and (?P<limit>...)", "remaining"
        )
    reset = _field(table, "reset") if "reset" in table else None
    named = bucket or (_field(table, "bucket") if "bucket" in table else None)
    return LevelRule(remaining, limit, reset, named)


def _closed(row: TomlTable, buckets: Collection[str]) -> ClosedRule:
    match = _match(row)
    if match.status is not None and match.status < 400 and not match.reads_body:
        raise row.error(f"every good answer has status {match.status}; say by `body` or `json` which one closes")
    lasts: int | Field | Refill | None = None
    if isinstance(value := row.value("lasts") if "lasts" in row else None, dict):
        if "asked" in value:
            refill = row.table("lasts", Refill._fields)
            lasts = Refill(*(parse_pointer(refill, key) for key in Refill._fields))
        else:
            lasts = _field(row, "lasts")
    elif value is not None:
        lasts = parse_span(row, "lasts")
    return ClosedRule(match, row.text("bucket", "", choices=buckets), lasts)


def _match(row: TomlTable) -> Match:
    status = row.whole("status", None, minimum=100, maximum=599)
    body = row.text("body", "").lower()
    pointer = parse_pointer(row, "json") if "json" in row else None
    value = row.value("is") if "is" in row else None
    if status is None and not body and pointer is None:
        raise row.error("it says of no answer that it is meant; give `status`, `body` or `json`")
    if value is not None and pointer is None:
        raise row.error("belongs to `json`: the place in the answer that has this value", "is")
    if not isinstance(value, str | int | None):
        raise row.error("a text, a whole number, true or false is needed", "is")
    return Match(status, body, pointer, value)


_TIMES = ("reset", "lasts")


def _field(table: TomlTable, key: str, groups: tuple[str, ...] = ()) -> Field:
    """The header at a key, or `{ header | json, pattern, as }`. `groups` are those that a pattern may have, where it
    is not the key alone that it must have."""
    value = table.value(key)
    row = table.as_table({"header": value} if isinstance(value, str) else value, key, _FIELD_KEYS)
    header = row.text("header", "")
    if bool(header) == ("json" in row):
        raise row.error('give either a header or, as in { json = "/usage/total" }, a place in the answer')
    if header and not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", header):
        raise row.error(f"{show(header)} is not the name of a header", *(() if isinstance(value, str) else ("header",)))
    forms = get_args(Form)
    form = None
    if key in _TIMES:
        form = cast("Form", row.text("as", None, choices=forms))
        if form is None:
            raise row.error(f'say how the time is written, as = "epoch" for example; {nearest(None, forms)}')
    elif "as" in row:
        raise row.error("is for times, as `reset` has one; remove it", "as")
    pointer = parse_pointer(row, "json") if "json" in row else None
    return Field(header.lower(), pointer, _pattern(row, groups or (key,)) if "pattern" in row else None, form)


def parse_pointer(row: TomlTable, key: str) -> Pointer:
    """A place in a JSON document, as the key has it. Raises ConfigError."""
    return _pointer(row, key, row.text(key))


def _pointer(row: TomlTable, key: str, pointer: str, index: int | None = None) -> Pointer:
    if not pointer.startswith("/") or re.search(r"~(?![01])", pointer):
        raise row.error(f'{show(pointer)} is no JSON pointer; write for example "/errors/0/code"', key, index)
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer[1:].split("/"))


_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?:|(?:[*+?]|\{[0-9,]+\})[+?]?|.", re.DOTALL)


def _pattern(row: TomlTable, groups: tuple[str, ...]) -> re.Pattern[str]:
    """The pattern, in which each repeat takes all it can and gives nothing back: so no text takes long."""
    text = row.text("pattern")
    if len(text) > MAX_PATTERN_LENGTH:
        raise row.error(f"longer than {MAX_PATTERN_LENGTH} characters", "pattern")
    parts = _PART.findall(text)
    for number, part in enumerate(parts):
        if not re.fullmatch(r"[*+?][?+]?|\{[0-9,]+\}[?+]?", part):
            continue
        before = parts[number - 1] if number else ""
        if before == ")" and part != "?":
            raise row.error("a group is not repeated; repeat characters, as in [0-9]+", "pattern")
        if before == "." and part != "?" and number + 1 < len(parts):
            raise row.error("a repeated . takes all that follows; name the characters, as in [0-9]+", "pattern")
        if before != ")":
            parts[number] = f"{part.rstrip('?+') or part[0]}+"
    try:
        pattern = re.compile("".join(parts), re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise row.error(f"no pattern: {error}", "pattern") from None
    for name in pattern.groupindex:
        if name not in groups:
            raise row.error(f"no group {show(name)} is read here; {nearest(name, groups)}", "pattern")
    if not pattern.groupindex:
        raise row.error(f"the pattern needs a group, (?P<{groups[0]}>[0-9]+) for example", "pattern")
    return pattern
