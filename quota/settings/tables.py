"""Every table of the configuration and of a cost book: its keys, what each may hold, and what it means.

The reader, the JSON Schema, `quota check --show` and the variables `QUOTA__...` use the tables of the configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from quota.common.text import show
from quota.settings.model import BUILT_IN_FETCHES
from quota.settings.references import ADDRESS, FilePath, Login, Reference, TextOrReference
from quota.settings.toml import (
    MISSING,
    Apart,
    Day,
    Either,
    Flag,
    Keys,
    Kind,
    Label,
    Name,
    Needs,
    Rows,
    Some,
    Span,
    Table,
    Text,
    Texts,
    TomlTable,
    Values,
    Whole,
    schema_of,
)
from quota.terms.api import Field, Form, Hosts, Refill
from quota.terms.costs import MAX_PARTS
from quota.terms.limits import LAST_DAY, PERIODS, Calendar, Sliding

_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"

_SHARE = Text(pattern="[0-9]{1,2}%", says='write whole units, or a share below 100%, such as "10%"')
_UNITS = partial(Whole, wanted='whole units, or a share such as "10%",')

# -- the ledger --------------------------------------------------------------------------------------------------------

_SERVER = Needs(
    tuple(key for key in ADDRESS if key != "url"),
    "url",
    "has no effect without a url of Redis; add one, or remove this key",
)

UNAVAILABLE = Keys(
    {
        "max_cost": Whole("The most that one call may draw, in units.", required=True),
        "allowance": Either(
            'What each machine may draw: units, or "10%" of the headroom.',
            required=True,
            kinds=(_SHARE, _UNITS()),
        ),
        "machines": Whole("How many state folders draw: one for each user of a machine.", default=1, maximum=1_000),
    }
)
LEDGER = Keys(
    {
        **ADDRESS,
        "name": Name("The ledger's identity, if this file's path changes."),
        "unavailable": Table("What may be spent while the ledger does not answer.", UNAVAILABLE),
    },
    _SERVER,
)

# -- credentials and their limits --------------------------------------------------------------------------------------

CALENDAR = Keys(
    {
        "calendar": Text("The period.", choices=PERIODS, required=True),
        "zone": Text("The time zone of the period, such as America/Los_Angeles.", required=True),
        "day": Whole("The day on which a month begins.", default=1, maximum=LAST_DAY),
    }
)


@dataclass(eq=False, repr=False)
class WindowKind(Either):
    """A duration such as `"24h"`, or `{ calendar = "day", zone = "America/Los_Angeles" }`. A month may have the `day`
    on which it begins."""

    kinds: tuple[Kind, ...] = (Span(), Table(keys=CALENDAR))

    def read(self, table: TomlTable, key: str) -> Any:
        value = table.value(key)
        if not isinstance(value, str | dict):
            raise table.error('a window is a duration such as "24h" or { calendar = "day", zone = "..." }', key)
        if isinstance(value, str) and (period := value.partition("@")[0]) in PERIODS:
            zone = value.partition("@")[2] or "UTC"
            raise table.error(f'a calendar window is written {{ calendar = "{period}", zone = "{zone}" }}', key)
        window = super().read(table, key)
        if isinstance(window, int):
            return Sliding(window)
        period = window.read("calendar")
        if "day" in window and period != "month":
            raise window.error('only calendar = "month" has it; remove this key', "day")
        zone, day = window.read("zone"), window.read("day")
        with window.blamed("zone"):
            return Calendar(period, zone, day)


LIMIT = Keys(
    {
        "name": Label("The name that refusals show.", required=True),
        "quota": Whole("What upstream grants."),
        "headroom": Either('What to leave unspent: units, or "5%" of the quota.', kinds=(_SHARE, _UNITS(minimum=0))),
        "units": Whole("The number to enforce, in place of quota and headroom."),
        "window": WindowKind('"24h": any 24 hours; or a calendar period of a time zone.', required=True),
        "methods": Texts("Count these methods only."),
        "jobs": Texts("Count these jobs only.", each=Label()),
        "per": Text('"job": each job has a limit of its own.', choices=("job",)),
        "count": Text('"calls" counts each call as one.', choices=("units", "calls"), default="units"),
        "bucket": Either("A bucket of the cost book, or several.", kinds=(Text(), Texts())),
        "shadow": Flag("Count and report, and never refuse: a limit on trial."),
        "pacing": Flag("Release the units of a calendar window evenly until its reset."),
    },
    Apart("units", ("quota", "headroom"), "cannot be combined with {other}; give quota and headroom, or units alone"),
    Some((("units",), ("quota",)), "missing; give quota (granted by upstream) and headroom, or units (enforced)"),
    Apart("per", ("jobs",), "gives each job a limit of its own and cannot be combined with jobs; remove one of them"),
)

SCOPE = Text(
    pattern=r"[!#-\[\]-~]{1,200}",  # RFC 6749, 3.3
    says='not a scope; write for example "https://www.googleapis.com/auth/spreadsheets"',
)
NO_PROJECT = 'not a project id such as "my-project-123456" or its number; the Google Cloud console shows both'
NO_ADDRESS = "not an address such as http://127.0.0.1:8765, without user, query or fragment"
CREDENTIAL = Keys(
    {
        "api": Text("The name of a shipped cost book, or the path of a book.toml.", required=True),
        "project": Name("Upstream counts by project: keys of one project share one budget."),
        "key": Reference('Where the key is: "env:NAME" or "file:PATH".'),
        "endpoint": Text(
            "Another address for the API.",
            pattern=r"https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~%/-]*)?",
            says=NO_ADDRESS,  # without the value: people put `?key=...` into it
        ),
        "insecure_endpoint": Flag("The key may go to an http:// endpoint on another machine."),
        "cloud_project": Either(
            "The project's id or number in Google Cloud, for `quota reconcile`.",
            kinds=(
                Whole(minimum=0, maximum=10**20 - 1, says=NO_PROJECT),
                # The message shows no value: people put the key here.
                Text(pattern="[a-z][a-z0-9.:-]{4,62}[a-z0-9]|[0-9]{1,20}", says=NO_PROJECT),
            ),
        ),
        "auth": Login('Instead of a key: "adc", "service-account:PATH", "authorized-user:PATH", "bearer:env:NAME".'),
        "scopes": Texts("The scopes that an account asks for. Default: the cost book's.", each=SCOPE),
        "limits": Rows("The limits of its project. Default: the cost book's.", LIMIT),
        "on_refusal": Text(
            'What an instrumented program gets for a refused call: an "error" of its library, or an answer of "429".',
            choices=("error", "429"),
            default="error",
        ),
    }
)

# -- jobs --------------------------------------------------------------------------------------------------------------

_OWN_TABLE = Keys(
    {"key": Texts("The fields that identify a row."), "history": Texts("The fields whose changes are kept.")}
)
_NEEDS_SCHEDULE = {
    "timezone": Text("The time zone of a cron line.", default="UTC"),
    "stagger": Span("Each region starts this much after the region before."),
    "jitter": Span("Each start is late by up to this much."),
}
JOB = Keys(
    {
        "credential": Text("The credential whose budget the job spends. Optional if there is only one."),
        "fetch": Text(
            'What to run: a built-in job, or your own "package.module:function".',
            pattern="|".join([*BUILT_IN_FETCHES, _FUNCTION]),
            says=f'write {", ".join(BUILT_IN_FETCHES)}, or your own "package.module:function"',
            required=True,
        ),
        "regions": Texts("Country codes, or other names. The job covers them one by one.", each=Label()),
        "pages": Whole("The most pages of a region. The next run begins at page 1 again.", default=1, maximum=100_000),
        "schedule": Text('When `quota schedule` runs it: a cron line, or "every 45m".'),
        **_NEEDS_SCHEDULE,
        "misfire_grace": Span("A tick or run that cannot start this soon is dropped.", default="10m", most_days=7),
        "leave": Either(
            'What the job leaves to others: units or "5%" of each main limit\'s quota; or units by limit.',
            kinds=(_SHARE, Values(each=Whole(minimum=0)), Whole(minimum=0)),
        ),
        "max_units": Whole("The most that one run spends."),
        "tables": Values(
            "The tables of the job's own rows.",
            each=Table(keys=_OWN_TABLE),
            names=Text(pattern="[A-Za-z][A-Za-z0-9_]{0,63}"),
        ),
        "sink": Text(
            'Gets each page before it is stored: "package.module:function".',
            pattern=_FUNCTION,
            says='not a function; write it as "package.module:function"',
        ),
        "options": Values("Arguments of the fetch function, by name.", names=Text(pattern="[A-Za-z_][A-Za-z0-9_]*")),
        "max_body_mb": Whole("The largest answer, in MB.", default=16, maximum=1_000),
        "max_answer_s": Whole("The longest time for an answer, in s.", default=120, maximum=3_600),
        "max_items": Whole("The most items of a page.", default=10_000, maximum=1_000_000),
        "machines": Text('"each": all machines run it, into their own stores.', choices=("one", "each"), default="one"),
        "ping": Reference('The address of a health check: "env:NAME" or "file:PATH".'),
        "insecure_endpoint": Flag("The address may be an http:// address on another machine."),
    },
    Needs(tuple(_NEEDS_SCHEDULE), "schedule", "has no effect without a schedule; add one, or remove this key"),
)

# -- the rest ----------------------------------------------------------------------------------------------------------

STORE = Keys(
    {
        "url": TextOrReference('sqlite:///file.db; or where it is: "env:NAME", "file:PATH".', what="url"),
        "retention": Span("Items are deleted if no run fetched them again for this long.", default="30d"),
        "name": Label("The store's name in a shared ledger, if its file does not last."),
        "places": Text(
            'Keeps the places of regions: "ledger" if no disk lasts.', choices=("store", "ledger"), default="store"
        ),
    }
)
NOTIFY = Keys(
    {
        "command": Texts("A command that reads JSON, with its arguments.", several=True),
        "url": Reference('An address that gets the JSON: "env:NAME" or "file:PATH".'),
        "stale": Span("A message reports a region whose last complete pass, or else the job's first run, is older."),
        "insecure_endpoint": Flag("The address may be an http:// address on another machine."),
    },
    Some((("url",), ("command",)), 'nobody is told; add command = ["program", "argument"] or url = "env:VARIABLE"'),
)

_INBOUND_LIMIT = {
    "limit": Whole("How many requests, within the window."),
    "window": Span("The window, in whole seconds."),
    "burst": Whole("With gcra: how many requests may come at once.", default=0, minimum=0),
}
INBOUND_RULE = Keys(
    {
        "path": Text("Which paths: /search, /users/{id}, /files/*. Default: all."),
        "methods": Texts("Which methods, such as GET. Default: all."),
        **_INBOUND_LIMIT,
        "limits": Rows("Several limits at once.", Keys(_INBOUND_LIMIT, Some((("window", "limit"),), MISSING))),
        "algorithm": Text("How it counts.", choices=("counter", "gcra", "log"), default="counter"),
        "cost": Whole("How many units one request counts.", default=1),
        "fail": Text("What happens while the storage does not answer.", choices=("open", "closed"), default="open"),
        "shadow": Flag("Count and never refuse."),
        "count_rejected": Flag("A refused request counts, too."),
    },
    Apart("limits", tuple(_INBOUND_LIMIT), "stands in each of limits, or without limits beside path", at_other=True),
    Some((("limits",), ("window", "limit")), MISSING),
)
INBOUND = Keys(
    {
        **ADDRESS,
        "exempt": Texts("Paths that no rule counts."),
        "trusted_proxies": Texts('Addresses and networks of trusted proxies, and "unix".'),
        "forwarded": Text(
            "How proxies name the client: x-forwarded-for, forwarded, cf-connecting-ip.", default="x-forwarded-for"
        ),
        "key_field": Text("The header field that has the API key."),
        "keys": Text('"file:PATH" with the valid keys, one on each line.', secret=True),
        "x_fields": Flag("Answers have the X-RateLimit-* fields, too."),
    },
    _SERVER,
    others=Table("A rule. The first rule that matches a request counts it.", INBOUND_RULE),
)


def rule_names(table: TomlTable) -> list[str]:
    """The names of the rules in `[inbound]`, in the order of the file: each table in it is a rule."""
    return [name for name, value in table.data.items() if isinstance(value, dict) and name not in INBOUND]


A_CREDENTIAL = 'add [credentials.main] with api = "youtube-v3"'
ROOT = Keys(
    {
        "ledger": Table("Where charges are kept.", LEDGER, empty=True),
        "credentials": Values(
            "Keys, each with its cost book and its limits.", each=Table(keys=CREDENTIAL), names=Name(), least=1
        ),
        "jobs": Values("What is fetched, when, and for which regions.", each=Table(keys=JOB), names=Label()),
        "store": Table("Where jobs keep what they fetched.", STORE, empty=True),
        "textfile": FilePath("Each run writes metrics into this folder, for node_exporter."),
        "notify": Table("Who gets messages.", NOTIFY),
        "inbound": Table("Limits on the visitors of your application.", INBOUND),
    },
    Some((("inbound",), ("credentials",)), f"missing; {A_CREDENTIAL}"),
    Needs(("jobs",), "credentials", f"missing; {A_CREDENTIAL}", at="credentials"),
)

OPTIONS = ("category", "channels", "ids", "order", "published_after", "videos", "words")
"""The options of the built-in jobs."""


def _places() -> Mapping[str, str]:
    """A hint for each key that only one sort of table has: where it belongs."""
    tables = {
        "[[credentials.NAME.limits]]": LIMIT,
        "[credentials.NAME]": CREDENTIAL,
        "[jobs.NAME]": JOB,
        "`unavailable` of [ledger]": UNAVAILABLE,
        "[ledger]": LEDGER,
        "[store]": STORE,
        "[notify]": NOTIFY,
    }
    places_of = {key: ["[jobs.NAME.options]"] for key in OPTIONS}
    for place, keys in tables.items():
        for key in keys:
            places_of.setdefault(key, []).append(place)
    alone = {key: places[0] for key, places in places_of.items() if len(places) == 1}
    # `[credential.main]` is a misspelt table, not the key of a job.
    return {key: f"it belongs in {place}" for key, place in alone.items() if not any(x.startswith(key) for x in ROOT)}


PLACES = _places()


def json_schema() -> str:
    """The JSON Schema of the whole configuration, as text."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "The configuration of quota-ledger: quota.toml",
        **schema_of(ROOT),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


# -- cost books: kinds of values ---------------------------------------------------------------------------------------


def _host(table: TomlTable, name: str, key: str, index: int | None) -> str:
    """A host of the API."""
    with table.blamed(key, index):
        Hosts(name)
    return name


class _JsonPointer(Text):
    """A place in a JSON document."""

    def parse(self, table: TomlTable, value: str, key: str = "", index: int | None = None) -> Any:
        if not value.startswith("/") or re.search(r"~(?![01])", value):
            raise table.error(f'{show(value)} is no JSON pointer; write for example "/errors/0/code"', key, index)
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in value[1:].split("/"))


@dataclass(eq=False, repr=False, kw_only=True)
class _FieldKind(Kind):
    """Where an answer has a figure: a header's name, or `{ header | json, pattern, as }`.

    `groups` are the names that a pattern's groups may have (default: the key). A `time` also needs its form, `as`.
    """

    groups: tuple[str, ...] = ()
    time: bool = False
    of_type: type[Any] = dict

    def read(self, table: TomlTable, key: str) -> Any:
        value = table.value(key)
        row = table.inner({"header": value} if isinstance(value, str) else value, key, _FIELD)
        header = row.read("header") or ""
        if bool(header) == ("json" in row):
            raise row.error('give either a header or a place in the answer, such as { json = "/usage/total" }')
        is_bare = isinstance(value, str)
        is_path = is_bare and "." in header  # no API has a header with a dot
        if header and (is_path or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", header)):
            place = f"/{re.sub('[./]+', '/', header).strip('/')}"
            json = f'; a place in the JSON is {{ json = "{place}" }}' if re.fullmatch(r"[\w/-]+", place) else ""
            raise row.error(f"{show(header)} is not the name of a header{json}", "" if is_bare else "header")
        if "as" in row and not self.time:
            raise row.error("is only for times, such as `reset`; remove it", "as")
        row.read("as")  # it tells people: every notation is read
        pattern = _pattern(row, self.groups or (key,)) if "pattern" in row else None
        return Field(header.lower(), row.read("json"), pattern)


_PART = r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?:|(?:[*+?]|\{[0-9,]+\})[+?]?|."

MAX_PATTERN_LENGTH = 200


def _pattern(row: TomlTable, groups: tuple[str, ...]) -> re.Pattern[str]:
    """The pattern, with every repeat possessive: it never backtracks, so no text takes long."""
    text = row.read("pattern")
    if len(text) > MAX_PATTERN_LENGTH:
        raise row.error(f"longer than {MAX_PATTERN_LENGTH} characters", "pattern")
    parts = re.findall(_PART, text)
    for number, part in enumerate(parts):
        if not re.fullmatch(r"[*+?][?+]?|\{[0-9,]+\}[?+]?", part):
            continue
        before = parts[number - 1] if number else ""
        if before == ")" and part != "?":
            raise row.error("a group cannot be repeated; repeat characters, as in [0-9]+", "pattern")
        if before == "." and part != "?" and number + 1 < len(parts):
            raise row.error("a repeated . matches all that follows; name the characters, as in [0-9]+", "pattern")
        if before != ")":
            parts[number] = f"{part.rstrip('?+') or part[0]}+"
    try:
        pattern = re.compile("".join(parts), re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise row.error(f"not a pattern: {error}", "pattern") from None
    for name in pattern.groupindex:
        row.check_choice(name, groups, "pattern", f"there is no group {show(name)} here")
    if not pattern.groupindex:
        raise row.error(f"the pattern needs a group, (?P<{groups[0]}>[0-9]+) for example", "pattern")
    return pattern


class _Lasting(_FieldKind):
    """Where an answer says when a bucket opens again: a time, or how fast the bucket refills."""

    def read(self, table: TomlTable, key: str) -> Any:
        if "asked" not in table.value(key):
            return super().read(table, key)
        row = table.inner(table.value(key), key, _REFILL)
        return Refill(*map(row.read, Refill._fields))


MAX_WINDOWS = 10
"""The most windows in which upstream counts one bucket."""

MAX_RULES = 100

_PLACES = (Texts(each=_JsonPointer()), _JsonPointer())
_RESERVE = Keys({"json": Either(kinds=_PLACES), "default": Whole(required=True), "bytes_per_unit": Whole()})


def _part_keys(least: int) -> dict[str, Kind]:
    """The keys of a price in one bucket. A price has at `least` this many units."""
    return {"units": Whole(minimum=least, required=True), "bucket": Text(), "reserve": Table(keys=_RESERVE)}


def _cost(least: int) -> Kind:
    """A price: a number in the first bucket, a table for another bucket, or a list of tables."""
    rows = Rows(keys=Keys(_part_keys(1)), most=MAX_PARTS, says=f"one call is charged to at most {MAX_PARTS} buckets")
    return Either(kinds=(Table(keys=Keys(_part_keys(least))), rows, Whole(minimum=least)), required=True)


def _inside(key: str, others: tuple[str, ...]) -> Apart:
    """The others belong in the rows of a key, and not beside it."""
    return Apart(key, others, f"cannot be combined with {key}; put it into each row of {key}", at_other=True)


_WORD = Text(
    pattern=r"[A-Za-z0-9._/-]{1,128}",
    says="{text}: a name here has 1 to 128 characters out of A-Z a-z 0-9 . _ / -",
    required=True,
)
"""A name that becomes part of a Cloud Monitoring filter."""


# -- cost books: their tables ------------------------------------------------------------------------------------------

QUOTA = {"quota": Whole(required=True), "resets": WindowKind(required=True)}
_BUCKET = Keys(
    {**QUOTA, "windows": Rows(keys=Keys(QUOTA), most=MAX_WINDOWS, says=f"a bucket has at most {MAX_WINDOWS} windows")},
    _inside("windows", tuple(QUOTA)),
)
_DATED_PRICE = Keys({**_part_keys(0), "parts": _cost(0), "since": Day()}, _inside("parts", tuple(_part_keys(0))))
DATED = Keys({**_part_keys(0), "prices": Rows(keys=_DATED_PRICE)}, _inside("prices", tuple(_part_keys(0))))
_MONITORING = Keys(
    {
        "service": _WORD,
        "buckets": Values(each=Table(keys=Keys({"metric": _WORD, "limit": _WORD})), required=True),
        "resources": Values(each=Label()),
    }
)

_HEADER = Text(pattern=r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}", says="1 to 64 characters that a header's name may have")
_FIELD = Keys(
    {"header": Text(blank=True), "json": _JsonPointer(), "pattern": Text(), "as": Text(choices=get_args(Form))}
)
_REFILL = Keys(dict.fromkeys(Refill._fields, _JsonPointer(required=True)))
_MATCH = {"status": Whole(minimum=100, maximum=599), "body": Text(blank=True), "json": _JsonPointer(), "is": Kind()}
LEVEL = {
    "remaining": _FieldKind(groups=("remaining", "used", "limit"), required=True),
    "limit": _FieldKind(),
    "reset": _FieldKind(time=True),
}
_FIGURE = {"json": Either(kinds=_PLACES, required=True), "default": Whole(minimum=0)}
_CLOSED = {"bucket": Text(blank=True), "lasts": Either(kinds=(_Lasting(time=True), Span()))}


def _rules(keys: Mapping[str, Kind]) -> Rows:
    return Rows(keys=Keys(keys), most=MAX_RULES, says=f"{{count:,}} rules; {MAX_RULES} are the most")


_ANSWERS = Keys(
    {
        **LEVEL,
        "bucket": _FieldKind(),
        "levels": _rules({**LEVEL, "bucket": Text(required=True)}),
        "units": Either(kinds=(_rules(_FIGURE), _FieldKind())),
        "free": _rules(_MATCH),
        "closed": _rules({**_MATCH, **_CLOSED}),
    }
)

BOOK = Keys(
    {
        "api": Label(required=True),
        "source": Text(required=True),
        "read_on": Day(required=True),
        "retention": Span(),
        "buckets": Values(each=Table(keys=_BUCKET), names=Name(), required=True),
        "default": Table(
            keys=Keys({"get": _cost(1), "other": _cost(1)}), required=True, example="default = { get = 1, other = 1 }"
        ),
        "methods": Values(each=_cost(0), required=True),
        "pools": Values(each=Table(keys=Keys({"marks": Texts(), "methods": Texts()})), names=Name()),
        "probe": Table(keys=Keys({"method": Text(required=True), "parameters": Table(empty=True)})),
        "monitoring": Table(keys=_MONITORING),
        "hosts": Texts(each=Text(reads=_host)),
        "key": Table(keys=Keys(dict.fromkeys(("header", "scheme", "query"), _HEADER))),
        "scopes": Texts(each=SCOPE),
        "routes": Table(empty=True),
        "answers": Table(keys=_ANSWERS),
    }
)
