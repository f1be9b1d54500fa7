"""The configuration as typed, frozen values. Reading it is strict: see `quota.settings.toml`.

    Settings               everything, from `load_settings`
    LedgerSettings         where charges live, and what may be spent while that cannot be reached
    CredentialSettings     a named key: its cost book, its project, its limits
    JobSettings            a job: whose credential, what it fetches, when, and what it leaves for others
    StoreSettings          where jobs keep what they fetched

The file is `--config`, else QUOTA_CONFIG, else ./quota.toml, else quota.toml in the user's configuration folder. If
there is none, the settings come from `config/default.toml`. A file that nobody named is read only if nobody else could
have written it. `quota.settings.lint` warns of valid but unwise settings.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from platformdirs import user_config_path

from quota.common.hosts import is_readable_on_the_way
from quota.common.owners import doubt_of_path
from quota.common.resources import read_text
from quota.common.text import listed, many, nearest, one_line, show
from quota.errors import ConfigError, UsageError
from quota.ledger.factory import file_of, ledger_schemes
from quota.settings.address import KEYS as ADDRESS_KEYS
from quota.settings.address import Address, address_of, file_url, path_at, place_of, reference
from quota.settings.books import load_book, parse_window
from quota.settings.folders import state_folder
from quota.settings.inbound import check_keys
from quota.settings.model import (
    BUILT_IN,
    BUILT_IN_FETCHES,
    DEFAULT_HEADROOM_PERCENT,
    DEFAULT_MAX_ANSWER_S,
    DEFAULT_MAX_BODY_MB,
    DEFAULT_MAX_ITEMS,
    DEFAULT_MISFIRE_GRACE_MS,
    DEFAULT_RETENTION_MS,
    MAX_MISFIRE_GRACE_MS,
    CredentialSettings,
    JobSettings,
    LedgerSettings,
    NotifySettings,
    Settings,
    StoreSettings,
    TableSettings,
    Unavailable,
    check_table,
)
from quota.settings.schedules import Every, load_zone, parse_schedule
from quota.settings.toml import TomlTable, parse_span, parse_toml, read_toml
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
    format_duration,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quota.terms.costs import CostBook


def find_config(named: str | Path | None = None) -> Path | None:
    """The configuration file to read: the one named, QUOTA_CONFIG, ./quota.toml or the user's; None if there is none.

    A file that was named is returned even if it does not exist: the error comes when it is read.
    """
    if named is None:
        named = os.environ.get("QUOTA_CONFIG") or None
    if named is not None:
        with suppress(TypeError):
            if named != "":  # an unset variable of a script: another configuration has another budget
                return Path(named)
        raise UsageError(f"configuration {show(named)} is not the path of a file")
    here = Path("quota.toml")
    if os.path.lexists(here):
        return here
    users = user_config_path("quota-ledger") / "quota.toml"
    return users if os.path.lexists(users) else None


def load_settings(config: str | Path | None = None) -> Settings:
    """The settings from the file that `find_config` finds, or the built-in ones.

    Raises ConfigError, one line naming file and key, for anything that cannot be used.
    """
    path = find_config(config)
    if path is not None and config is None and not os.environ.get("QUOTA_CONFIG"):
        _check_found(path)
    if path is None:
        data = parse_toml(read_text("quota.config", "default.toml"), BUILT_IN)
        return _settings(data, None, BUILT_IN, state_folder())
    return _settings(read_toml(path), path, one_line(path), path.absolute().parent)


def _check_found(path: Path) -> None:
    """A configuration may run code, and send any variable of the environment anywhere. A file that was named is
    trusted. One that is read only because it is there must be this user's or root's, and nobody else's to change."""
    try:
        why = doubt_of_path(path)
    except OSError as error:
        raise ConfigError(f"{one_line(path)}: cannot be read: {error.strerror or error}") from error
    if why:
        raise ConfigError(
            f"{one_line(path)}: not read, because {why}; nobody named it, so if you trust it, "
            f"use --config {one_line(path)}, or QUOTA_CONFIG"
        )


# -- from tables to values ---------------------------------------------------------------------------------------------


def _settings(data: dict[str, Any], path: Path | None, source: str, folder: Path) -> Settings:
    tables = ("ledger", "credentials", "jobs", "store", "textfile", "notify", "inbound")
    root = TomlTable(data, source, keys=tables, places=_PLACES)
    if "credentials" not in root and ("inbound" not in root or "jobs" in root):
        raise root.error(f"missing; {A_CREDENTIAL}", "credentials")
    credentials = _credentials(root.table("credentials"), folder) if "credentials" in root else {}
    ledger = _ledger(root.table("ledger", _LEDGER_KEYS, default={}), folder, path)
    return Settings(
        path=path,
        ledger=ledger,
        credentials=credentials,
        jobs=_jobs(root.table("jobs", default={}), credentials, folder),
        store=_store(root.table("store", _STORE_KEYS, default={}), folder, ledger),
        textfile=path_at(root, folder, "textfile", root.text("textfile")) if "textfile" in root else None,
        notify=_notify(root.table("notify", ("command", "url", "stale", "insecure_endpoint")), folder)
        if "notify" in root
        else None,
        inbound=_inbound(root) if "inbound" in root else None,
    )


_LEDGER_KEYS = (*ADDRESS_KEYS, "name", "unavailable")
_UNAVAILABLE_KEYS = ("max_cost", "allowance", "machines")
_STORE_KEYS = ("url", "retention", "name")


def _inbound(root: TomlTable) -> Mapping[str, Any]:
    return check_keys(TomlTable({"inbound": root.value("inbound")}, root.source))  # its keys mean something else


def _notify(table: TomlTable, folder: Path) -> NotifySettings:
    command = table.list_of_texts("command")
    if command and "/" in command[0]:  # without one it is looked up in PATH
        command = (path_at(table, folder, "command", command[0]), *command[1:])
    url_ref = reference(table, folder, "url") if "url" in table else None
    if not command and url_ref is None:
        raise table.error('nobody is told; add command = ["program", "argument"] or url = "env:VARIABLE"', "command")
    stale_ms = parse_span(table, "stale") if "stale" in table else None
    return NotifySettings(command, url_ref, stale_ms, table.flag("insecure_endpoint", False))


def _ledger(table: TomlTable, folder: Path, path: Path | None) -> LedgerSettings:
    unavailable = None
    if "unavailable" in table:
        row = table.table("unavailable", _UNAVAILABLE_KEYS)
        unavailable = Unavailable(
            row.whole("max_cost"), row.whole("allowance"), row.whole("machines", 1, maximum=1_000)
        )
        if unavailable.max_cost_units > unavailable.allowance_units:
            raise row.error(
                f"a call of {many(unavailable.max_cost_units, 'unit')} never fits in an allowance of "
                f"{unavailable.allowance_units}; lower max_cost or raise allowance",
                "max_cost",
            )
    name = table.check_name(table.text("name"), "name") if "name" in table else None
    identity = f"name {name}" if name is not None else _identity(path)
    url, secrets = _address(table, address_of(table, folder), folder, "ledger.db", ledger_schemes())
    return LedgerSettings(url, unavailable, name, identity, secrets)


def _identity(path: Path | None) -> str:
    """Which ledger is meant by a configuration that does not name it: see `LedgerSettings`.

    Links stay: the file behind a link may be another with each update, as with a Kubernetes ConfigMap.
    """
    if path is None:
        return BUILT_IN
    absolute = str(path.absolute())
    is_passed_on = absolute.startswith(("/dev/", "/proc/")) and not absolute.startswith("/dev/shm/")  # noqa: S108
    if is_passed_on or not os.path.isfile(absolute):
        return ""
    normal = os.path.normpath(absolute)
    return normal if os.path.exists(normal) and os.path.samefile(normal, absolute) else absolute


def _store(table: TomlTable, folder: Path, ledger: LedgerSettings) -> StoreSettings:
    retention_ms = parse_span(table, "retention") if "retention" in table else DEFAULT_RETENTION_MS
    given = Address(table.text("url")) if "url" in table else None
    url, _ = _address(table, given, folder, "videos.db", ("sqlite",))
    if place_of(url) == place_of(ledger.url):
        raise table.error("the ledger uses this file already; give the store a file of its own", "url")
    name = table.check_label(table.text("name"), "name") if "name" in table else ""
    return StoreSettings(url, retention_ms, name)


def _address(table: TomlTable, given: Address | None, folder: Path, default: str, schemes: tuple[str, ...]) -> Address:
    """The address in a table, checked, an SQLite path made absolute. The default is a file in the state folder.

    No message shows the URL: it may hold a password.
    """
    if given is None:
        return Address(f"sqlite:///{state_folder() / default}")
    url = given.url
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in schemes:
        # The message shows a valid scheme and nothing else: the rest may hold a password.
        shown = f" {scheme}://" if colon and re.fullmatch(_SCHEME, scheme) else ""
        kind = f"unsupported URL scheme{shown}"
        known = ", ".join(f"{name}://" for name in schemes)
        raise table.error(f"{kind}; use one of {known}", "url")
    if not url.isprintable():
        raise table.error("a URL has no control characters", "url")
    return given if file_of(url) is None else Address(file_url(table, folder, url))


# -- credentials -------------------------------------------------------------------------------------------------------

_SCHEME = r"[a-z][a-z0-9+.-]{0,19}"
_ENDPOINT = r"https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._~%/-]*)?"
A_CREDENTIAL = 'add [credentials.main] with api = "youtube-v3"'
_CREDENTIAL_KEYS = ("api", "project", "key", "endpoint", "insecure_endpoint", "cloud_project", "auth", "limits")
_CLOUD_PROJECT = r"[a-z][a-z0-9.:-]{4,62}[a-z0-9]|[0-9]{1,20}"
_AUTHS = ("adc", "service-account", "authorized-user", "bearer")


def _credentials(table: TomlTable, folder: Path) -> dict[str, CredentialSettings]:
    rows = table.tables(_CREDENTIAL_KEYS)
    if not rows:
        raise table.error(f"at least one is needed; {A_CREDENTIAL}")
    books: dict[str, tuple[CostBook, tuple[Limit, ...]]] = {}
    credentials: dict[str, CredentialSettings] = {}
    first_of: dict[str, CredentialSettings] = {}
    limited: dict[str, str] = {}
    for name, row in rows.items():
        row.check_name(name)
        credential = _credential(name, row, folder, books)
        other = first_of.setdefault(credential.project, credential)
        if other.book is not credential.book and other.book != credential.book:
            raise row.error(
                f"credential {other.name!r} of the same project {other.project!r} has api {other.api!r}: "
                "one project has one cost book; give them the same api, or different projects",
                "api",
            )
        if "limits" in row:
            first = limited.setdefault(credential.project, name)
            if first != name:
                raise row.error(
                    f"credential {first!r} of the same project {credential.project!r} already has limits: "
                    "credentials of one project share one budget; give its limits once",
                    "limits",
                )
        credentials[name] = credential
    # A credential without limits has the limits of its project, wherever in the file these are.
    for name, credential in credentials.items():
        if credential.project in limited:
            credentials[name] = replace(credential, limits=credentials[limited[credential.project]].limits)
    return credentials


def _credential(
    name: str, row: TomlTable, folder: Path, books: dict[str, tuple[CostBook, tuple[Limit, ...]]]
) -> CredentialSettings:
    api = row.text("api")
    if api not in books:
        try:
            book = load_book(api, folder)
        except ConfigError as error:
            raise row.error(str(error), "api") from None
        books[api] = book, default_limits(book)
    book, its_limits = books[api]
    project = row.check_name(row.text("project", name), "project")
    endpoint = row.text("endpoint", None)
    if endpoint is not None and not _is_address(endpoint):
        # The message does not show it: people have put `?key=...` into it.
        raise row.error("not an address such as http://127.0.0.1:8765, without user, query or fragment", "endpoint")
    insecure_endpoint = row.flag("insecure_endpoint", False)
    if endpoint is not None and "key" in row and not insecure_endpoint and is_readable_on_the_way(endpoint):
        raise row.error(
            "the key would go there in plain text; give an https:// address, or set insecure_endpoint = true",
            "endpoint",
        )
    return CredentialSettings(
        name=name,
        api=api,
        book=book,
        project=project,
        key_ref=reference(row, folder) if "key" in row else None,
        endpoint=None if endpoint is None else endpoint.rstrip("/"),
        limits=_limits(row, book) if "limits" in row else its_limits,
        cloud_project=_cloud_project(row) if "cloud_project" in row else None,
        auth_ref=_auth_ref(row, folder) if "auth" in row else None,
        insecure_endpoint=insecure_endpoint,
    )


def _cloud_project(row: TomlTable) -> str:
    name = row.value("cloud_project")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    elif not isinstance(name, str):
        name = row.text("cloud_project")
    if not re.fullmatch(_CLOUD_PROJECT, name):
        # The message does not show it: people have put the key here.
        raise row.error(
            'not a project id such as "my-project-123456" or its number; the Google Cloud console shows both',
            "cloud_project",
        )
    return name


def _auth_ref(row: TomlTable, folder: Path) -> str:
    ref = row.text("auth")
    kind, _, rest = ref.partition(":")
    if ref == "adc":
        return ref
    if kind == "bearer":
        return f"bearer:{reference(row, folder, 'auth', 'bearer:')}"
    if kind in ("service-account", "authorized-user") and rest and rest.isprintable():
        return f"{kind}:{path_at(row, folder, 'auth', rest)}"
    # The message does not show the value: it may be a token.
    hint = nearest(kind, _AUTHS)
    near = f"; {hint}" if hint.startswith("did") else ""
    raise row.error(
        f'write "adc", "service-account:PATH", "authorized-user:PATH" or "bearer:env:VARIABLE"{near}', "auth"
    )


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return bool(re.fullmatch(_ENDPOINT, endpoint) and parts.hostname and parts.port != 0)
    except ValueError:  # a port out of range, an unmatched bracket
        return False


# -- limits ------------------------------------------------------------------------------------------------------------

_LIMIT_KEYS = ("name", "quota", "headroom", "units", "window", "methods", "jobs", "per", "count", "bucket", "pacing")
_SPAN_NAMES = {MINUTE_MS: "minute", HOUR_MS: "hour", DAY_MS: "day"}


def default_limits(book: CostBook) -> tuple[Limit, ...]:
    """Two limits for each window in which upstream counts a bucket, each with 5% of its quota as headroom: a sliding
    window as long as upstream's period, and upstream's own calendar window (`day` and `pacific-day`). One that slides
    needs no other. Of two quotas for the same window the smaller holds.
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
            headroom = quota_units * DEFAULT_HEADROOM_PERCENT // 100
            view = View(Selector(buckets=(bucket.name,)), window)
            limits.append(Limit(prefix + names[window], quota_units - headroom, view, quota_units, headroom))
    return tuple(limits)


def _windows_of(window: Window) -> list[tuple[str, Window]]:
    """The windows, with the names of their limits, that hold one of upstream's."""
    if isinstance(window, Sliding):
        return [(_SPAN_NAMES.get(window.window_ms, window.name), window)]
    sliding = Sliding(PERIOD_MS[window.period])
    return [(window.period, sliding), (f"{_zone_name(window.zone)}-{window.kind}", window)]


def _zone_name(zone: str) -> str:
    if zone == "America/Los_Angeles":
        return "pacific"
    return zone.rpartition("/")[2].lower().replace("_", "-")


def _limits(row: TomlTable, book: CostBook) -> tuple[Limit, ...]:
    limits: dict[str, Limit] = {}
    for table in row.array("limits", _LIMIT_KEYS):
        limit = _limit(table, book)
        if limit.name in limits:
            raise table.error(f"{show(limit.name)} is the name of an earlier limit of this credential", "name")
        limits[limit.name] = limit
    return tuple(limits.values())


def _limit(table: TomlTable, book: CostBook) -> Limit:
    name = table.check_label(table.text("name"), "name")
    quota_units, headroom_units = _numbers(table)
    methods = _methods(table, book)
    selector = Selector(
        buckets=_buckets(table, book, methods),
        methods=methods,
        jobs=tuple(table.check_label(job, "jobs", index) for index, job in enumerate(table.texts("jobs"))),
        count=table.text("count", "units", choices=("units", "calls")),  # type: ignore[arg-type]  # one of the choices
    )
    view = View(selector, parse_window(table, "window"))
    paced, per_job = _pacing(table, view.window), "per" in table and table.text("per", choices=("job",)) == "job"
    if per_job and selector.jobs:
        raise table.error(
            "each job has this limit for itself, so `jobs` cannot be given too; remove one of them", "per"
        )
    return Limit(name, quota_units - headroom_units, view, quota_units, headroom_units, paced, per_job)


def _pacing(table: TomlTable, window: Window) -> bool:
    paced = table.flag("pacing", False)
    if paced and not isinstance(window, Calendar):
        raise table.error(
            "only a calendar window can be paced, because only it has a reset; remove the key here, and pace a "
            "calendar limit instead",
            "pacing",
        )
    return paced


def _numbers(table: TomlTable) -> tuple[int, int]:
    """(quota, headroom) of a limit; `units` is a quota without headroom."""
    if "units" in table:
        for other in ("quota", "headroom"):
            if other in table:
                raise table.error(f"cannot be combined with {other}; give quota and headroom, or units alone", "units")
        return table.whole("units"), 0
    if "quota" not in table:
        raise table.error("missing; give quota (granted by upstream) and headroom, or units (enforced)", "quota")
    quota_units = table.whole("quota")
    headroom_units = _headroom(table, quota_units) if "headroom" in table else 0
    if headroom_units >= quota_units:
        raise table.error(f"{headroom_units} of a quota of {quota_units} leaves nothing to spend", "headroom")
    return quota_units, headroom_units


def _headroom(table: TomlTable, quota_units: int) -> int:
    """Units, or a share of the quota such as `"10%"`, rounded up."""
    value = table.value("headroom")
    if not isinstance(value, str):
        return table.as_whole(value, "headroom", minimum=0)
    if not re.fullmatch(r"[0-9]{1,2}%", value):
        raise table.error('write whole units, or a share of the quota such as "10%"', "headroom")
    return -(-quota_units * int(value[:-1]) // 100)


def _methods(table: TomlTable, book: CostBook) -> tuple[str, ...]:
    methods = tuple(book.canonical(method) for method in table.texts("methods"))
    for index, method in enumerate(methods):
        if method not in book.methods:
            message = f"cost book {book.name!r} has no method {show(method)}; {nearest(method, book.methods)}"
            raise table.error(message, "methods", index)
    return tuple(sorted(set(methods)))


def _buckets(table: TomlTable, book: CostBook, methods: tuple[str, ...]) -> tuple[str, ...]:
    if "bucket" in table:
        value = table.value("bucket")
        names = (table.text("bucket"),) if isinstance(value, str) else table.texts("bucket")
        for index, name in enumerate(names):
            if name not in book.buckets:
                message = f"cost book {book.name!r} has no bucket {show(name)}; {nearest(name, book.buckets)}"
                raise table.error(message, "bucket", None if isinstance(value, str) else index)
        return tuple(sorted(names))
    if methods:
        # Of a call of several buckets the first: so a limit that counts calls counts it once.
        first = {price.bucket for method in methods for price in book.methods[method] if price.parts}
        return tuple(sorted(first)) or (book.main_bucket.name,)
    return (book.main_bucket.name,)


# -- jobs --------------------------------------------------------------------------------------------------------------

_SCHEDULE_KEYS = ("timezone", "stagger", "jitter", "misfire_grace")
_ANSWER_KEYS = ("max_body_mb", "max_answer_s", "max_items")
_JOB_KEYS = (
    "credential",
    "fetch",
    "regions",
    "pages",
    "schedule",
    *_SCHEDULE_KEYS,
    "leave",
    "max_units",
    "tables",
    "options",
    *_ANSWER_KEYS,
    "machines",
    "ping",
    "insecure_endpoint",
)
_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"

_PLACES = {
    **dict.fromkeys(("quota", "headroom", "units", "per", "count", "bucket", "pacing"), "[[credentials.NAME.limits]]"),
    **dict.fromkeys(("api", "project", "key", "endpoint", "cloud_project", "auth"), "[credentials.NAME]"),
    **dict.fromkeys(
        ("fetch", "regions", "pages", "schedule", *_SCHEDULE_KEYS, "leave", "max_units", "ping"), "[jobs.NAME]"
    ),
    **dict.fromkeys(_ANSWER_KEYS, "[jobs.NAME]"),
    **dict.fromkeys(("max_cost", "allowance"), "`unavailable` of [ledger]"),
    "unavailable": "[ledger]",
    "retention": "[store]",
    "stale": "[notify]",
}
"""Where keys belong that stand in one kind of table only."""


def _jobs(table: TomlTable, credentials: Mapping[str, CredentialSettings], folder: Path) -> dict[str, JobSettings]:
    left: dict[tuple[str, int], dict[str, int]] = {}
    rows = table.tables(_JOB_KEYS)
    jobs = {row.check_label(name): _job(name, row, credentials, left, folder) for name, row in rows.items()}
    first: dict[str, JobSettings] = {}
    for job in jobs.values():
        for name, its in job.tables.items():
            other = first.setdefault(name, job)
            if other.tables[name] != its:
                raise (
                    rows[job.name].table("tables").error(f"job {other.name!r} has another key or history for it", name)
                )
    return jobs


def _job(
    name: str,
    row: TomlTable,
    credentials: Mapping[str, CredentialSettings],
    left: dict[tuple[str, int], dict[str, int]],
    folder: Path,
) -> JobSettings:
    if "credential" not in row and len(credentials) > 1:
        raise row.error(f"missing; name one of these: {listed(credentials)}", "credential")
    credential = row.text("credential", next(iter(credentials)))
    if credential not in credentials:
        raise row.error(f"there is no credential {show(credential)}; {nearest(credential, credentials)}", "credential")
    fetch = row.text("fetch")
    if fetch not in BUILT_IN_FETCHES and not re.fullmatch(_FUNCTION, fetch):
        own = 'not a built-in job; write your own as "package.module:function"'
        raise row.error(f"{own}; {nearest(fetch, BUILT_IN_FETCHES)}", "fetch")
    job = JobSettings(
        name=name,
        credential=credential,
        fetch=fetch,
        regions=tuple(row.check_label(region, "regions", index) for index, region in enumerate(row.texts("regions"))),
        pages=row.whole("pages", 1, maximum=100_000),
        schedule=None,
        stagger_ms=0,
        leave=_leave(row, credentials[credential], left) if "leave" in row else {},
        options=_options(row.table("options", default={})),
        max_body_mb=row.whole("max_body_mb", DEFAULT_MAX_BODY_MB, maximum=1_000),
        max_answer_s=row.whole("max_answer_s", DEFAULT_MAX_ANSWER_S, maximum=3_600),
        max_items=row.whole("max_items", DEFAULT_MAX_ITEMS, maximum=1_000_000),
        on_each_machine=row.text("machines", "one", choices=("one", "each")) == "each",
        ping_ref=reference(row, folder, "ping") if "ping" in row else None,
        insecure_endpoint=row.flag("insecure_endpoint", False),
        max_units=row.whole("max_units", None),
        tables=_tables(row.table("tables", default={})),
    )
    return _scheduled(job, row)


def _tables(table: TomlTable) -> dict[str, TableSettings]:
    tables = {}
    for name, row in table.tables(("key", "history")).items():
        try:
            check_table(name)
        except ValueError as error:
            raise table.error(str(error)) from None
        tables[name] = TableSettings(row.texts("key") or ("id",), row.texts("history"))
    return tables


def _scheduled(job: JobSettings, row: TomlTable) -> JobSettings:
    """`job` with its schedule from the configuration."""
    if "schedule" not in row:
        for key in _SCHEDULE_KEYS:
            if key in row:
                raise row.error("has no effect without a schedule; add one, or remove this key", key)
        return job
    text, zone = " ".join(row.text("schedule").split()), row.text("timezone", "UTC")
    try:
        schedule = parse_schedule(text, zone)
    except ValueError as error:
        raise row.error(str(error), "schedule") from None
    if "timezone" in row:
        if isinstance(schedule, Every):
            raise row.error("an interval does not depend on the time zone; remove this key", "timezone")
        try:
            load_zone(zone)
        except ValueError as error:
            raise row.error(str(error), "timezone") from None
    stagger_ms = parse_span(row, "stagger") if "stagger" in row else 0
    jitter_ms = parse_span(row, "jitter") if "jitter" in row else 0
    # All regions of one tick must start before the next tick does.
    shortest_ms, others = schedule.shortest_ms, max(0, len(job.regions) - 1)
    spread_ms = others * stagger_ms + jitter_ms
    then = f"and {show(text)} starts the next after {format_duration(shortest_ms)}; lower it or run less often"
    if jitter_ms >= shortest_ms:
        raise row.error(f"a start may be {format_duration(jitter_ms)} late, {then}", "jitter")
    if spread_ms >= shortest_ms:
        with_jitter = f" and {format_duration(jitter_ms)} of jitter" if jitter_ms else ""
        raise row.error(
            f"{others} x {format_duration(stagger_ms)}{with_jitter} spread the regions of one tick over "
            f"{format_duration(spread_ms)}, {then}",
            "stagger",
        )
    grace_ms = parse_span(row, "misfire_grace") if "misfire_grace" in row else DEFAULT_MISFIRE_GRACE_MS
    if grace_ms > MAX_MISFIRE_GRACE_MS:
        raise row.error(
            f"{format_duration(grace_ms)} is longer than {format_duration(MAX_MISFIRE_GRACE_MS)}", "misfire_grace"
        )
    return replace(
        job, schedule=text, timezone=zone, stagger_ms=stagger_ms, jitter_ms=jitter_ms, misfire_grace_ms=grace_ms
    )


def _leave(
    row: TomlTable, credential: CredentialSettings, left: dict[tuple[str, int], dict[str, int]]
) -> dict[str, int]:
    """Units by limit name; a bare number applies to every limit that counts all calls of the main bucket.

    `left` caches the result of a bare number: many jobs leave the same number of many limits.
    """
    value = row.value("leave")
    if not isinstance(value, dict):
        units = row.as_whole(value, "leave", minimum=0)
        key = (credential.name, units)
        if key not in left:
            main = credential.book.main_bucket.name
            left[key] = {x.name: units for x in credential.limits if not x.narrow and main in x.view.selector.buckets}
        return left[key]
    table = row.table("leave")
    names = dict.fromkeys(limit.name for limit in credential.limits if not limit.per_job)
    for name, _ in table.items():
        if name not in names:
            raise table.error(f"credential {credential.name!r} has no such limit; {nearest(name, names)}", name)
    return {name: table.whole(name, minimum=0) for name, _ in table.items()}


def _options(table: TomlTable) -> dict[str, object]:
    for name, _ in table.items():
        if not name.isidentifier():
            raise table.error("not a valid argument name; use letters, digits and _", name)
    return dict(table.items())
