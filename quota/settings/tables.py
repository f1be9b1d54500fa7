"""Every table of the configuration: its keys, what each may hold, and what it means.

The reader, the JSON Schema, `quota check --show` and the variables `QUOTA__...` use these tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quota.settings.model import (
    BUILT_IN_FETCHES,
    DEFAULT_MAX_ANSWER_S,
    DEFAULT_MAX_BODY_MB,
    DEFAULT_MAX_ITEMS,
    DEFAULT_MISFIRE_GRACE_MS,
    DEFAULT_RETENTION_MS,
)
from quota.settings.toml import (
    Apart,
    Either,
    Flag,
    Keys,
    Kind,
    Label,
    Name,
    Named,
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
from quota.terms.limits import LAST_DAY, PERIODS, WEEKDAYS, Calendar, Sliding

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_REFERENCE = rf"env:{VARIABLE}|file:.+"
_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"

_SHARE = Text(pattern="[0-9]{1,2}%", says='write whole units, or a share of the quota such as "10%"')

# -- where a ledger or a storage is ------------------------------------------------------------------------------------

SECRETS = {
    "username": "user name",
    "password": "password",
    "sentinel_username": "user name",
    "sentinel_password": "password",
    "ssl_password": "password",
}
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
FLAGS = ("ssl_check_hostname", "sentinel_ssl")

_ADDRESS = {
    "url": Text('redis://..., sqlite:///file.db; or where it is: "env:NAME", "file:PATH".', secret=True),
    "username": Text("The user on the server."),
    "password": Text('Its password: "env:NAME", "file:PATH", or the password itself.', secret=True),
    "sentinel_username": Text("The user on the sentinels."),
    "sentinel_password": Text('Its password: "env:NAME", "file:PATH", or the password itself.', secret=True),
    "ssl_password": Text("The password of the client's key.", secret=True),
    "ssl_ca_certs": Text("The CAs to trust. Default: the system's."),
    "ssl_certfile": Text("The client's certificate."),
    "ssl_keyfile": Text("The client's key."),
    "ssl_cert_reqs": Text('"none" trusts any server.', choices=("required", "none")),
    "ssl_check_hostname": Flag("Whether the certificate must have the server's name.", default=True),
    "sentinel_ssl": Flag("Whether the sentinels speak TLS, if they differ from their servers."),
}
ADDRESS_KEYS = tuple(_ADDRESS)
_SERVER = Needs(ADDRESS_KEYS[1:], "url", "has no effect without a url of Redis; add one, or remove this key")

UNAVAILABLE = Keys(
    {
        "max_cost": Whole("The most that one call may draw, in units.", required=True),
        "allowance": Either(
            'What each machine may draw within the longest window: units, or "10%" of the smallest headroom.',
            required=True,
            kinds=(_SHARE, Whole()),
        ),
        "machines": Whole("How many machines there are.", default=1, maximum=1_000),
    }
)
LEDGER = Keys(
    {
        **_ADDRESS,
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
        "starts": Text("The weekday on which a week begins.", choices=WEEKDAYS, default="monday"),
    }
)


@dataclass(frozen=True)
class WindowKind(Either):
    """A duration such as `"24h"`, or `{ calendar = "day", zone = "America/Los_Angeles" }`. A month may have the `day`
    on which it begins, a week the weekday on which it `starts`."""

    kinds: tuple[Kind, ...] = (Span(), Table(keys=CALENDAR))

    def read(self, table: TomlTable, key: str) -> Any:
        if not isinstance(table.value(key), str | dict):
            raise table.error('a window is a duration such as "24h" or { calendar = "day", zone = "..." }', key)
        window = super().read(table, key)
        if isinstance(window, int):
            return Sliding(window)
        period = window.read("calendar")
        for name, of in (("day", "month"), ("starts", "week")):
            if name in window and period != of:
                raise window.error(f'only calendar = "{of}" has it; remove this key', name)
        zone, day, starts = window.read("zone"), window.read("day"), window.read("starts")
        with window.blamed("zone"):
            return Calendar(period, zone, day, starts)


LIMIT = Keys(
    {
        "name": Label("The name that refusals show.", required=True),
        "quota": Whole("What upstream grants."),
        "headroom": Either(
            'How much of the quota to leave unspent, in units or as "5%".',
            kinds=(_SHARE, Whole(minimum=0)),
        ),
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
    Apart(
        "per",
        ("jobs",),
        "gives each job a limit of its own and cannot be combined with jobs; remove one of them",
    ),
)

SCOPE = Text(
    pattern=r"[!#-\[\]-~]{1,200}",  # RFC 6749, 3.3
    says='not a scope; write for example "https://www.googleapis.com/auth/spreadsheets"',
)
NO_PROJECT = 'not a project id such as "my-project-123456" or its number; the Google Cloud console shows both'
NO_ADDRESS = "not an address such as http://127.0.0.1:8765, without user, query or fragment"
CREDENTIAL = Keys(
    {
        "api": Text("The cost book: a shipped one by name, or the path of a book.toml.", required=True),
        "project": Name("Upstream counts by project: keys of one project share one budget."),
        "key": Text('Where the key is: "env:NAME" or "file:PATH".', pattern=_REFERENCE),
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
        "auth": Text(
            'Who calls without a key: "adc", "service-account:PATH", "authorized-user:PATH", "bearer:env:NAME".',
            pattern=rf"adc|(service-account|authorized-user):.+|bearer:({_REFERENCE})",
        ),
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
            required=True,
        ),
        "regions": Texts("Country codes, or other names. The job covers them one by one.", each=Label()),
        "pages": Whole("The most pages to fetch for each region in a run.", default=1, maximum=100_000),
        "schedule": Text('When `quota schedule` runs it: a cron line, or "every 45m".'),
        **_NEEDS_SCHEDULE,
        "misfire_grace": Span(
            "A tick or run that cannot start within this time is dropped.", default_ms=DEFAULT_MISFIRE_GRACE_MS
        ),
        "leave": Either(
            'What the job leaves to others: units or "5%" of each main limit\'s quota; or units by limit.',
            kinds=(_SHARE, Values(each=Whole(minimum=0)), Whole(minimum=0)),
        ),
        "max_units": Whole("The most that one run spends."),
        "tables": Named(
            "The tables of the job's own rows.",
            Keys(
                {
                    "key": Texts("The fields that identify a row."),
                    "history": Texts("The fields whose changes are kept."),
                }
            ),
            names=Text(pattern="[A-Za-z][A-Za-z0-9_]{0,63}"),
        ),
        "sink": Text(
            'Gets each page before it is stored: "package.module:function".',
            pattern=_FUNCTION,
            says='not a function; write it as "package.module:function"',
        ),
        "options": Values("Arguments of the fetch function, by name.", names="[A-Za-z_][A-Za-z0-9_]*", empty=True),
        "max_body_mb": Whole("The largest answer, in MB.", default=DEFAULT_MAX_BODY_MB, maximum=1_000),
        "max_answer_s": Whole("The longest time for an answer, in s.", default=DEFAULT_MAX_ANSWER_S, maximum=3_600),
        "max_items": Whole("The most items of a page.", default=DEFAULT_MAX_ITEMS, maximum=1_000_000),
        "machines": Text(
            '"each": every machine runs the job, into its own store.', choices=("one", "each"), default="one"
        ),
        "ping": Text('The address of a health check: "env:NAME" or "file:PATH".', pattern=_REFERENCE),
        "insecure_endpoint": Flag("The address may be an http:// address on another machine."),
    },
    Needs(tuple(_NEEDS_SCHEDULE), "schedule", "has no effect without a schedule; add one, or remove this key"),
)

# -- the rest ----------------------------------------------------------------------------------------------------------

STORE = Keys(
    {
        "url": Text('Where jobs keep what they fetched: sqlite:///file.db; or "env:NAME", "file:PATH".'),
        "retention": Span(
            "Items are deleted if no run fetched them again for this long.", default_ms=DEFAULT_RETENTION_MS
        ),
        "name": Label("The store's name in a shared ledger, if its file does not last."),
        "places": Text(
            'Where the place of each region is kept: "ledger" for machines without a disk.',
            choices=("store", "ledger"),
            default="store",
        ),
    }
)
NOTIFY = Keys(
    {
        "command": Texts("A command that reads JSON, with its arguments.", several=True),
        "url": Text('An address that gets it: "env:NAME" or "file:PATH".', pattern=_REFERENCE),
        "stale": Span("A message reports a region whose last complete pass, or else the job's first run, is older."),
        "insecure_endpoint": Flag("The address may be an http:// address on another machine."),
    },
    Some(
        (("url",), ("command",)),
        'nobody is told; add command = ["program", "argument"] or url = "env:VARIABLE"',
    ),
)

_MISSING = "missing; the key is required"
_INBOUND_LIMIT = {
    "limit": Whole("How many, within the window."),
    "window": Span("The window, in whole seconds."),
    "burst": Whole("With gcra: how many requests may come at once.", default=0),
}
INBOUND_RULE = Keys(
    {
        "path": Text("Which paths: /search, /users/{id}, /files/*. Default: all."),
        "methods": Texts("Which methods, such as GET. Default: all."),
        **_INBOUND_LIMIT,
        "limits": Rows("Several limits at once.", Keys(_INBOUND_LIMIT, Some((("window", "limit"),), _MISSING))),
        "algorithm": Text("How it counts.", choices=("counter", "gcra", "log"), default="counter"),
        "cost": Whole("What one request counts.", default=1),
        "fail": Text("What happens while the storage does not answer.", choices=("open", "closed"), default="open"),
        "shadow": Flag("Count and never refuse."),
        "count_rejected": Flag("A refused request counts, too."),
    },
    Apart("limits", tuple(_INBOUND_LIMIT), "stands in each of limits, or without limits beside path", at_other=True),
    Some((("limits",), ("window", "limit")), _MISSING),
)
INBOUND = Keys(
    {
        **_ADDRESS,
        "exempt": Texts("Paths that no rule counts."),
        "trusted_proxies": Texts('Addresses and networks of trusted proxies, and "unix".'),
        "forwarded": Text(
            "The field in which proxies name the client: x-forwarded-for, forwarded or cf-connecting-ip.",
            default="x-forwarded-for",
        ),
        "key_field": Text("The header field that has the API key."),
        "keys": Text('"file:PATH" with the valid keys, one on each line.', secret=True),
        "x_fields": Flag("Answers have the X-RateLimit-* fields, too."),
    },
    _SERVER,
    others=Table("A rule; the first that matches counts a request.", INBOUND_RULE),
)


def rule_names(table: TomlTable) -> list[str]:
    """The names of the rules in `[inbound]`, in the order of the file: each table in it is a rule."""
    return [name for name, value in table.items() if isinstance(value, dict) and name not in INBOUND]


A_CREDENTIAL = 'add [credentials.main] with api = "youtube-v3"'
ROOT = Keys(
    {
        "ledger": Table("Where charges are kept.", LEDGER, empty=True),
        "credentials": Named("Keys, each with its cost book and its limits.", CREDENTIAL, names=Name(), least=1),
        "jobs": Named("What is fetched, when, and for which regions.", JOB, names=Label()),
        "store": Table("Where jobs keep what they fetched.", STORE, empty=True),
        "textfile": Text("Each run writes metrics into this folder, for node_exporter."),
        "notify": Table("Who gets messages.", NOTIFY),
        "inbound": Table("Limits on the visitors of your application.", INBOUND),
    },
    Some((("inbound",), ("credentials",)), f"missing; {A_CREDENTIAL}"),
    Needs(("jobs",), "credentials", f"missing; {A_CREDENTIAL}", at="credentials"),
)


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
    places_of: dict[str, list[str]] = {}
    for place, keys in tables.items():
        for key in keys:
            places_of.setdefault(key, []).append(place)
    return {
        key: f"it belongs in {places[0]}" for key, places in places_of.items() if len(places) == 1 and key not in ROOT
    }


PLACES = _places()


def json_schema() -> str:
    """The JSON Schema of the whole configuration, as text."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "The configuration of quota-ledger: quota.toml",
        **schema_of(ROOT),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
