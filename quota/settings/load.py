"""Finds the configuration, and reads it into typed, frozen values; strictly: see `quota.settings.toml`.

    Settings               everything, from `load_settings`
    LedgerSettings         where charges are kept, and what may be spent while the ledger cannot be reached
    CredentialSettings     a named key: its cost book, its project, its limits
    JobSettings            a job: its credential, what it fetches, when, and what it leaves to others
    StoreSettings          where jobs keep what they fetched

The file is `--config`, else QUOTA_CONFIG, else ./quota.toml, else quota.toml in the user's configuration folder. If
there is none, the settings come from `config/default.toml`. Variables `QUOTA__...` override any key. A file that nobody
named is read only if nobody else could have written it. `quota.settings.lint` warns of valid but unwise settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quota.common.clock import host_clock
from quota.common.files import doubt_of_path, read_text
from quota.common.hosts import is_http_address, is_readable_on_the_way, plain_path, without_dots
from quota.common.text import listed, one_line, show
from quota.decision import Allowance
from quota.errors import ConfigError, UsageError
from quota.ledger.factory import SCHEMES, file_of, shown_scheme
from quota.settings.books import default_limits, load_book, parse_limits, read_root
from quota.settings.environment import PREFIX, REMEDY, almost, overlaid
from quota.settings.model import (
    BUILT_IN,
    GIVEN,
    CredentialSettings,
    JobSettings,
    LedgerSettings,
    NotifySettings,
    Settings,
    StoreSettings,
    TableSettings,
    check_table,
    state_folder,
)
from quota.settings.references import Address, address_of, file_url, path_at, place_of
from quota.settings.schedules import Every, parse_schedule
from quota.settings.tables import A_CREDENTIAL, NO_ADDRESS, PLACES, ROOT, rule_names
from quota.settings.toml import TomlTable, parse_toml, read_file
from quota.terms.costs import CostBook, headrooms
from quota.terms.limits import Limit, format_duration, load_zone

MAX_DEPTH = 100
"""How deep tables and lists may be nested."""


def find_config(named: str | Path | None = None) -> Path | None:
    """The configuration file to read: the named file, QUOTA_CONFIG, ./quota.toml or the user's; None without any.

    A named file is returned even if it does not exist: the reader raises the error. Raises FileNotFoundError if none is
    named and the working folder is gone.
    """
    if named is None:
        named = os.environ.get("QUOTA_CONFIG") or None
    if named is not None:
        with suppress(TypeError):
            if named != "":  # an unset variable of a script: another configuration has another budget
                return Path(os.path.expanduser(named))
        raise UsageError(f"configuration {show(named)} is not the path of a file")
    here = Path("quota.toml")
    try:
        os.lstat(here)
        return here
    except FileNotFoundError:
        os.getcwd()  # if the folder is gone, nobody knows which budget its file named
    except OSError:  # the reader says why
        return here
    from platformdirs import user_config_path  # late: it takes 8 ms

    with suppress(RuntimeError):  # this user may have no home
        users = user_config_path("quota-ledger").expanduser() / "quota.toml"
        return users if os.path.lexists(users) else None
    return None


def read_config(config: str | Path | None) -> tuple[TomlTable, Path | None]:
    """The tables of the file that `find_config` finds, or of the built-in configuration, overridden by the environment;
    and the path of the file. Raises ConfigError."""
    path = find_config(config)
    if path is not None and config is None and not os.environ.get("QUOTA_CONFIG"):
        _check_found(path)
    variables = {name: text for name, text in sorted(os.environ.items()) if name.startswith(PREFIX)}
    if path is None:
        # The built-in configuration has a credential for users without any.
        alone = any(name.startswith(f"{PREFIX}CREDENTIALS__") for name in variables)
        text, source, folder = "" if alone else read_text("quota.config", "default.toml"), BUILT_IN, state_folder()
    else:
        text, source, folder = read_file(path), one_line(path), path.absolute().parent
    for name in almost(os.environ, text):
        if "__" in name:  # with single underscores it may be another program's
            raise ConfigError(f"environment variable {name}: sets no key of the configuration; {REMEDY}")
    data, paths = overlaid(parse_toml(text, source), variables)
    return TomlTable(_plain(data, source), source, keys=ROOT, places=PLACES, variables=paths, folder=folder), path


def load_settings(config: str | Path | None = None) -> Settings:
    """The settings from the file that `find_config` finds, or the built-in settings, overridden by the environment.

    Raises ConfigError if they cannot be used: one line with file and key.
    """
    return settings_of(*read_config(config))


def given_settings(tables: Mapping[str, Any]) -> Settings:
    """The settings that a program made, as the tables of a file. Nothing is read from a file or the environment.

    Relative paths are relative to the working folder. Raises ConfigError as `load_settings` does.
    """
    data = _plain(tables, GIVEN)
    if not isinstance(data, dict):
        raise ConfigError(f'{GIVEN}: give a dict, as {{"credentials": {{"main": {{"api": "youtube-v3"}}}}}}')
    return settings_of(TomlTable(data, GIVEN, keys=ROOT, places=PLACES, folder=Path.cwd()))


def _plain(value: Any, source: str, depth: int = 0) -> Any:
    """The value as TOML has it: a mapping as a dict, a tuple as a list. Raises ConfigError if it is nested too deep."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"{source}: nested too deep")
    if isinstance(value, Mapping):
        named = {key if isinstance(key, str) else show(key): item for key, item in value.items()}
        return {key: _plain(item, source, depth + 1) for key, item in named.items()}
    return [_plain(item, source, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def _check_found(path: Path) -> None:
    """Raise ConfigError for a file that nobody named, if others could change it: a configuration may run code, and send
    any variable of the environment anywhere. A named file is trusted."""
    try:
        why = doubt_of_path(path)
    except OSError as error:
        raise ConfigError(f"{one_line(path)}: cannot be read: {error.strerror or error}") from error
    if why:
        raise ConfigError(
            f"{one_line(path)}: not read, because {why}; if you trust it, "
            f"use --config {one_line(path)}, or QUOTA_CONFIG"
        )


# -- from tables to values ---------------------------------------------------------------------------------------------


def settings_of(root: TomlTable, path: Path | None = None) -> Settings:
    """The checked values of all tables, which came from the file at `path`. Raises ConfigError."""
    return read_root(partial(_settings_of, path), root)


def _settings_of(path: Path | None, root: TomlTable) -> Settings:
    root.check()
    credentials = _credentials(root) if "credentials" in root else {}
    ledger = _ledger(root.read("ledger"), _identity(path, root.source), credentials)
    jobs = _jobs(root.read("jobs").all(), credentials)
    return Settings(
        path=path,
        ledger=ledger,
        credentials=credentials,
        jobs=jobs,
        store=_store(root.read("store"), ledger, jobs),
        textfile=root.read("textfile"),
        notify=_notify(root.read("notify")) if "notify" in root else None,
        inbound=_inbound(root.read("inbound")) if "inbound" in root else None,
        variables=root.variables,
        source=root.source,
    )


def _inbound(table: TomlTable) -> TomlTable:
    """The table as it is: `quota.inbound` reads its values, and the gate never imports that."""
    for name in rule_names(table):
        table.read(name).read("limits")  # raises for a misspelt key
    return table


def _notify(table: TomlTable) -> NotifySettings:
    command = table.read("command")
    if command and "/" in command[0]:  # without a slash, PATH has the command
        command = (path_at(table, "command", command[0]), *command[1:])
    return NotifySettings(command, table.read("url"), table.read("stale"), table.read("insecure_endpoint"))


def _ledger(table: TomlTable, identity: str, credentials: Mapping[str, CredentialSettings]) -> LedgerSettings:
    unavailable = None
    if "unavailable" in table:
        row = table.read("unavailable")
        max_cost_units, allowance = row.read("max_cost"), row.read("allowance")
        if isinstance(allowance, str):
            allowance = _share_of_headroom(row, int(allowance[:-1]), max_cost_units, credentials)
        unavailable = Allowance(max_cost_units, allowance, row.read("machines"))
        if unavailable.max_cost_units > unavailable.allowance_units:
            drawn = f"an allowance of {unavailable.allowance_units:,}"
            raise row.error(f"no call of this cost fits in {drawn}; lower max_cost or raise allowance", "max_cost")
    name = table.read("name")
    identity = f"name {name}" if name is not None else identity
    url, secrets = _address(table, "ledger.db", SCHEMES)
    return LedgerSettings(url, unavailable, identity, secrets)


def _share_of_headroom(
    row: TomlTable, percent: int, max_cost_units: int, credentials: Mapping[str, CredentialSettings]
) -> int:
    """A share, rounded up, of the smallest headroom of the limits that count calls of that cost."""
    all_units = [
        units
        for credential in credentials.values()
        for units, _ in headrooms(credential.limits, credential.book.at(host_clock()), max_cost_units)
    ]
    if not all_units:
        raise row.error("no limit counts all calls of that cost, so there is no headroom; give units", "allowance")
    if not min(all_units):
        raise row.error("a limit leaves nothing unspent, so no allowance fits; give it headroom", "allowance")
    return -(-min(all_units) * percent // 100)


def _identity(path: Path | None, source: str) -> str:
    """The identity of the ledger, if the configuration does not name it: see `LedgerSettings`.

    Links stay: each update may put another file behind a link, as with a Kubernetes ConfigMap.
    """
    if path is None:
        return "" if source == GIVEN else source
    absolute = str(path.absolute())
    is_passed_on = absolute.startswith(("/dev/", "/proc/")) and not absolute.startswith("/dev/shm/")  # noqa: S108
    if is_passed_on or not os.path.isfile(absolute):
        return ""
    normal = os.path.normpath(absolute)
    return normal if os.path.exists(normal) and os.path.samefile(normal, absolute) else absolute


def _store(table: TomlTable, ledger: LedgerSettings, jobs: Mapping[str, JobSettings]) -> StoreSettings:
    url, _ = _address(table, "videos.db", ("sqlite",))
    if place_of(url) == place_of(ledger.url):
        raise table.error("the ledger uses this file already; give the store a file of its own", "url")
    name, places_in_ledger = table.read("name") or "", table.read("places") == "ledger"
    if places_in_ledger and name:
        raise table.error('has no effect with places = "ledger": any machine may go on; remove it', "name")
    each = next((job.name for job in jobs.values() if job.on_each_machine), "")
    if places_in_ledger and each:
        raise table.error(f'"ledger" gives all machines one round; remove machines = "each" of jobs.{each}', "places")
    return StoreSettings(url, table.read("retention"), name, places_in_ledger)


def _address(table: TomlTable, default: str, schemes: tuple[str, ...]) -> Address:
    """The checked address in a table, with an absolute SQLite path. The default is a file in the state folder.

    No message shows the URL: it may hold a password.
    """
    given = address_of(table)
    if given is None:
        return Address(f"sqlite:///{state_folder() / default}")
    url = given.url
    if url == "memory:" and "memory" in schemes:
        return given
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in schemes or scheme == "memory":
        supported = ", ".join("memory:" if name == "memory" else f"{name}://" for name in schemes)
        raise table.error(f"unsupported URL scheme{shown_scheme(url)}; use one of {supported}", "url")
    if not url.isprintable():
        raise table.error("a URL has no control characters", "url")
    return given if file_of(url) is None else Address(file_url(table, url))


# -- credentials -------------------------------------------------------------------------------------------------------


def _credentials(root: TomlTable) -> dict[str, CredentialSettings]:
    rows: dict[str, TomlTable] = root.read("credentials").all()
    if not rows:
        raise root.error(f"at least one is needed; {A_CREDENTIAL}", "credentials")
    books: dict[str, tuple[CostBook, tuple[Limit, ...]]] = {}
    credentials: dict[str, CredentialSettings] = {}
    first_of: dict[str, CredentialSettings] = {}
    limited: dict[str, str] = {}
    for name, row in rows.items():
        credential = _credential(name, row, books)
        other = first_of.setdefault(credential.project, credential)
        if other.book._replace(base_path="") != credential.book._replace(base_path=""):
            message = f"credential {other.name!r} of the same project {other.project!r} has api {other.api!r}"
            raise row.error(f"{message}; give them the same api, or different projects", "api")
        if "limits" in row:
            first = limited.setdefault(credential.project, name)
            if first != name:
                message = f"credential {first!r} of the same project {credential.project!r} already has limits"
                raise row.error(f"{message}; give its limits once", "limits")
        credentials[name] = credential
    # A credential without limits has the limits of its project, which may come later in the file.
    for name, credential in credentials.items():
        if (first := limited.get(credential.project, name)) != name:
            credentials[name] = credential._replace(limits=credentials[first].limits, limited_by=first)
    return credentials


def _credential(name: str, row: TomlTable, books: dict[str, tuple[CostBook, tuple[Limit, ...]]]) -> CredentialSettings:
    api = row.read("api")
    if api not in books:
        with row.blamed("api"):
            book = load_book(api, row.folder)
        books[api] = book, default_limits(book)
    book, limits_of_book = books[api]
    project = row.read("project") or name
    endpoint = row.read("endpoint")
    if endpoint is not None and not is_http_address(endpoint):
        raise row.error(NO_ADDRESS, "endpoint")
    is_readable = endpoint is not None and is_readable_on_the_way(endpoint)
    insecure_endpoint = row.read("insecure_endpoint") and is_readable  # else a redirect could lead the key there
    has_secret = "key" in row or "auth" in row
    if is_readable and has_secret and not insecure_endpoint:
        remedy = "give an https:// address, or set insecure_endpoint = true"
        raise row.error(f"the secret would go there in plain text; {remedy}", "endpoint")
    base = [] if endpoint is None else plain_path(urlsplit(endpoint).path).split("/")
    base_path = "/".join(without_dots(base)).rstrip("/")
    return CredentialSettings(
        name=name,
        api=api,
        book=book._replace(base_path=base_path) if base_path else book,
        project=project,
        key_ref=row.read("key"),
        endpoint=None if endpoint is None else endpoint.rstrip("/"),
        limits=parse_limits(row, book) if "limits" in row else limits_of_book,
        cloud_project=str(row.read("cloud_project")) if "cloud_project" in row else None,
        auth_ref=row.read("auth"),
        insecure_endpoint=insecure_endpoint,
        scopes=row.read("scopes") or book.scopes,
        on_refusal=row.read("on_refusal"),
        limited_by=name if "limits" in row else "",
    )


# -- jobs --------------------------------------------------------------------------------------------------------------


Left = dict[tuple[str, int | str], dict[str, int]]
"""What jobs leave, by credential and value: many jobs leave the same units of many limits."""


def _jobs(rows: Mapping[str, TomlTable], credentials: Mapping[str, CredentialSettings]) -> dict[str, JobSettings]:
    left: Left = {}
    jobs = {name: _job(name, row, credentials, left) for name, row in rows.items()}
    first: dict[str, JobSettings] = {}
    for job in jobs.values():
        for name, table in job.tables.items():
            other = first.setdefault(name, job)
            if other.tables[name] != table:
                row = rows[job.name].read("tables").read(name)
                raise row.error(f"job {other.name!r} has another key or history for it")
    tables = {name: job.tables[name] for name, job in first.items()}
    return {name: job._replace(tables=tables) for name, job in jobs.items()} if tables else jobs


def _job(name: str, row: TomlTable, credentials: Mapping[str, CredentialSettings], left: Left) -> JobSettings:
    if "credential" not in row and len(credentials) > 1:
        raise row.error(f"missing; name one of these: {listed(credentials)}", "credential")
    credential = row.read("credential") or next(iter(credentials))
    row.check_choice(credential, credentials, "credential", f"there is no credential {show(credential)}")
    tables = {}
    for table, values in row.read("tables").all().items():
        with row.blamed("tables"):
            check_table(table)
        tables[table] = TableSettings(values.read("key") or ("id",), values.read("history"))
    options = row.read("options")
    for option in options.data:
        if not option.isidentifier():
            raise options.error("not a valid argument name; use letters, digits and _", option)
    return JobSettings(
        name=name,
        credential=credential,
        **row.members("fetch regions pages max_body_mb max_answer_s max_items insecure_endpoint max_units"),
        misfire_grace_ms=row.read("misfire_grace"),
        leave=_leave(row, credentials[credential], left) if "leave" in row else {},
        options=dict(options.data),
        on_each_machine=row.read("machines") == "each",
        ping_ref=row.read("ping"),
        tables=tables,
        own_tables=frozenset(tables),
        sink=row.read("sink") or "",
        **_schedule(row),
    )


def _schedule(row: TomlTable) -> dict[str, Any]:
    """The settings of a job that say when it runs."""
    if "schedule" not in row:
        return {"schedule": None, "stagger_ms": 0}
    text, zone = " ".join(row.read("schedule").split()), row.read("timezone")
    with row.blamed("schedule"):
        schedule = parse_schedule(text, zone)
    if "timezone" in row:
        if isinstance(schedule, Every):
            raise row.error("an interval does not depend on the time zone; remove this key", "timezone")
        with row.blamed("timezone"):
            load_zone(zone)
    stagger_ms, jitter_ms = row.read("stagger") or 0, row.read("jitter") or 0
    # All regions of one tick must start before the next tick does.
    spread_ms = max(0, len(row.read("regions")) - 1) * stagger_ms + jitter_ms
    if spread_ms and spread_ms >= (shortest_ms := schedule.shortest_ms):
        then = f"and {show(text)} starts the next after {format_duration(shortest_ms)}; lower it or run less often"
        if jitter_ms >= shortest_ms:
            raise row.error(f"a start may be {format_duration(jitter_ms)} late, {then}", "jitter")
        raise row.error(f"the regions of one tick start over {format_duration(spread_ms)}, {then}", "stagger")
    return {"schedule": text, "timezone": zone, "stagger_ms": stagger_ms, "jitter_ms": jitter_ms}


def _leave(row: TomlTable, credential: CredentialSettings, left: Left) -> dict[str, int]:
    """Units by limit name. A bare number, or a share of the quota, applies to every limit that counts all calls of the
    main bucket. A share is rounded down, so a small limit still has room.
    """
    value: int | str | TomlTable = row.read("leave")
    if isinstance(value, TomlTable):
        names = dict.fromkeys(limit.name for limit in credential.limits if not limit.per_job)
        for name in value.data:
            if any(limit.per_job and limit.name == name.partition(":")[0] for limit in credential.limits):
                raise value.error("this limit is per job: no other job uses its units; remove this key", name)
            value.check_choice(name, names, name, f"credential {credential.name!r} has no such limit")
        return value.all()
    if (credential.name, value) not in left:
        main = credential.book.main_bucket.name
        left[credential.name, value] = {
            limit.name: value if isinstance(value, int) else limit.quota_units * int(value[:-1]) // 100
            for limit in credential.limits
            if not limit.narrow and main in limit.view.selector.buckets
        }
    return left[credential.name, value]
