"""The configuration as typed, frozen values. Reading it is strict: see `quota.settings.toml`.

    Settings               everything, from `load_settings`
    LedgerSettings         where charges live, and what may be spent while that cannot be reached
    CredentialSettings     a named key: its cost book, its project, its limits
    JobSettings            a job: whose credential, what it fetches, when, and what it leaves for others
    StoreSettings          where jobs keep what they fetched

The file is `--config`, else QUOTA_CONFIG, else ./quota.toml, else quota.toml in the user's configuration folder. If
there is none, the settings come from `config/default.toml`. Variables `QUOTA__...` say any key otherwise. A file that
nobody named is read only if nobody else could have written it. `quota.settings.lint` warns of valid but unwise
settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_config_path

from quota.common.clock import host_clock
from quota.common.hosts import is_http_address, is_readable_on_the_way
from quota.common.owners import doubt_of_path
from quota.common.resources import read_text
from quota.common.text import many, nearest, one_line, show
from quota.errors import ConfigError, UsageError
from quota.ledger.factory import file_of, ledger_schemes
from quota.settings.address import Address, address_of, file_url, path_at, place_of, reference
from quota.settings.books import load_book
from quota.settings.environment import PREFIX, overlaid, variables_of
from quota.settings.folders import state_folder
from quota.settings.inbound import check_keys
from quota.settings.jobs import parse_jobs
from quota.settings.limits import default_limits, headrooms, parse_limits
from quota.settings.model import (
    BUILT_IN,
    GIVEN,
    CredentialSettings,
    JobSettings,
    LedgerSettings,
    NotifySettings,
    Settings,
    StoreSettings,
    Unavailable,
)
from quota.settings.tables import A_CREDENTIAL, NO_ADDRESS, PLACES, ROOT
from quota.settings.toml import NO_PLACES, TomlTable, parse_toml, read_file
from quota.terms.costs import CostBook
from quota.terms.limits import Limit


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
    with suppress(RuntimeError):  # this user may have no home
        users = user_config_path("quota-ledger").expanduser() / "quota.toml"
        return users if os.path.lexists(users) else None
    return None


class Config(NamedTuple):
    """A configuration as tables, before it is checked: its file with the `variables` of the environment in it."""

    data: dict[str, Any]
    path: Path | None
    source: str
    folder: Path
    text: str = ""
    variables: Mapping[str, str] = NO_PLACES


def read_config(config: str | Path | None = None) -> Config:
    """The file that `find_config` finds, or the built-in configuration, and what the environment says of its keys."""
    path = find_config(config)
    if path is not None and config is None and not os.environ.get("QUOTA_CONFIG"):
        _check_found(path)
    variables = variables_of(os.environ)
    if path is None:
        # The credential of the built-in one is for those who have none.
        alone = any(name.startswith(f"{PREFIX}CREDENTIALS__") for name in variables)
        text, source, folder = "" if alone else read_text("quota.config", "default.toml"), BUILT_IN, state_folder()
    else:
        text, source, folder = read_file(path), one_line(path), path.absolute().parent
    data, paths = overlaid(parse_toml(text, source), variables)
    return Config(data, path, source, folder, text, paths)


def load_settings(config: str | Path | None = None) -> Settings:
    """The settings from the file that `find_config` finds, or the built-in ones; with what the environment says.

    Raises ConfigError, one line naming file and key, for anything that cannot be used.
    """
    return settings_of(read_config(config))


def given_settings(tables: Mapping[str, Any]) -> Settings:
    """The settings that a program made, as the tables of a file. Nothing is read from a file or the environment.

    Relative paths are relative to the working folder. Raises ConfigError as `load_settings` does.
    """
    try:
        data = _plain(tables)
    except RecursionError:
        raise ConfigError(f"{GIVEN}: nested too deep") from None
    if not isinstance(data, dict):
        raise ConfigError(f'{GIVEN}: give a dict, as {{"credentials": {{"main": {{"api": "youtube-v3"}}}}}}')
    return settings_of(Config(data, None, GIVEN, Path.cwd()))


def _plain(value: Any) -> Any:
    """The value as TOML has it: any mapping as a dict, a tuple as a list."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else show(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


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


def settings_of(config: Config) -> Settings:
    """The checked values. Raises ConfigError."""
    folder, path = config.folder, config.path
    root = TomlTable(config.data, config.source, keys=ROOT, places=PLACES, variables=config.variables)
    credentials = _credentials(root, folder) if "credentials" in root else {}
    identity = "" if config.source == GIVEN else _identity(path)
    ledger = _ledger(root.read("ledger"), folder, identity, credentials)
    jobs = parse_jobs(root.read("jobs"), credentials, folder)
    return Settings(
        path=path,
        ledger=ledger,
        credentials=credentials,
        jobs=jobs,
        store=_store(root.read("store"), folder, ledger, jobs),
        textfile=path_at(root, folder, "textfile", root.read("textfile")) if "textfile" in root else None,
        notify=_notify(root.read("notify"), folder) if "notify" in root else None,
        inbound=check_keys(root) if "inbound" in root else None,
        variables=config.variables,
        called=config.source,
    )


def _notify(table: TomlTable, folder: Path) -> NotifySettings:
    command = table.read("command")
    if command and "/" in command[0]:  # without one it is looked up in PATH
        command = (path_at(table, folder, "command", command[0]), *command[1:])
    url_ref = reference(table, folder, "url") if "url" in table else None
    return NotifySettings(command, url_ref, table.read("stale"), table.read("insecure_endpoint"))


def _ledger(
    table: TomlTable, folder: Path, identity: str, credentials: Mapping[str, CredentialSettings]
) -> LedgerSettings:
    unavailable = None
    if "unavailable" in table:
        row = table.read("unavailable")
        max_cost_units, allowance = row.read("max_cost"), row.read("allowance")
        if isinstance(allowance, str):
            allowance = _share_of_headroom(row, int(allowance[:-1]), max_cost_units, credentials)
        unavailable = Unavailable(max_cost_units, allowance, row.read("machines"))
        if unavailable.max_cost_units > unavailable.allowance_units:
            raise row.error(
                f"a call of {many(unavailable.max_cost_units, 'unit')} never fits in an allowance of "
                f"{unavailable.allowance_units}; lower max_cost or raise allowance",
                "max_cost",
            )
    name = table.read("name")
    identity = f"name {name}" if name is not None else identity
    url, secrets = _address(table, address_of(table, folder), folder, "ledger.db", ledger_schemes())
    return LedgerSettings(url, unavailable, name, identity, secrets)


def _share_of_headroom(
    row: TomlTable, percent: int, max_cost_units: int, credentials: Mapping[str, CredentialSettings]
) -> int:
    """A share of the smallest headroom in which calls of that cost find room, rounded up."""
    found = [
        units
        for one in credentials.values()
        for units, _ in headrooms(one.limits, one.book.at(host_clock()), max_cost_units)
    ]
    if not found:
        raise row.error("no limit counts all calls of that cost, so there is no headroom; give units", "allowance")
    return -(-min(found) * percent // 100)


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


def _store(table: TomlTable, folder: Path, ledger: LedgerSettings, jobs: Mapping[str, JobSettings]) -> StoreSettings:
    given = Address(table.read("url")) if "url" in table else None
    url, _ = _address(table, given, folder, "videos.db", ("sqlite",))
    if place_of(url) == place_of(ledger.url):
        raise table.error("the ledger uses this file already; give the store a file of its own", "url")
    name, places_in_ledger = table.read("name") or "", table.read("places") == "ledger"
    if places_in_ledger and name:
        raise table.error('has no effect with places = "ledger": any machine may go on; remove it', "name")
    each = next((job.name for job in jobs.values() if job.on_each_machine), "")
    if places_in_ledger and each:
        raise table.error(
            f'"ledger" gives all machines one round, and jobs.{each} runs on each; remove its machines = "each"',
            "places",
        )
    return StoreSettings(url, table.read("retention"), name, places_in_ledger)


def _address(table: TomlTable, given: Address | None, folder: Path, default: str, schemes: tuple[str, ...]) -> Address:
    """The address in a table, checked, an SQLite path made absolute. The default is a file in the state folder.

    No message shows the URL: it may hold a password.
    """
    if given is None:
        return Address(f"sqlite:///{state_folder() / default}")
    url = given.url
    if url == "memory:" and "memory" in schemes:
        return given
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in schemes or scheme == "memory":
        # The message shows a valid scheme and nothing else: the rest may hold a password.
        shown = f" {scheme}://" if colon and re.fullmatch(_SCHEME, scheme) else ""
        kind = f"unsupported URL scheme{shown}"
        known = ", ".join("memory:" if name == "memory" else f"{name}://" for name in schemes)
        raise table.error(f"{kind}; use one of {known}", "url")
    if not url.isprintable():
        raise table.error("a URL has no control characters", "url")
    return given if file_of(url) is None else Address(file_url(table, folder, url))


# -- credentials -------------------------------------------------------------------------------------------------------

_SCHEME = r"[a-z][a-z0-9+.-]{0,19}"
_AUTHS = ("adc", "service-account", "authorized-user", "bearer")


def _credentials(root: TomlTable, folder: Path) -> dict[str, CredentialSettings]:
    rows: dict[str, TomlTable] = root.read("credentials")
    if not rows:
        raise root.error(f"at least one is needed; {A_CREDENTIAL}", "credentials")
    books: dict[str, tuple[CostBook, tuple[Limit, ...]]] = {}
    credentials: dict[str, CredentialSettings] = {}
    first_of: dict[str, CredentialSettings] = {}
    limited: dict[str, str] = {}
    for name, row in rows.items():
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
        if (first := limited.get(credential.project, name)) != name:
            credentials[name] = replace(credential, limits=credentials[first].limits, limited_by=first)
    return credentials


def _credential(
    name: str, row: TomlTable, folder: Path, books: dict[str, tuple[CostBook, tuple[Limit, ...]]]
) -> CredentialSettings:
    api = row.read("api")
    if api not in books:
        with row.blamed("api"):
            book = load_book(api, folder)
        books[api] = book, default_limits(book)
    book, its_limits = books[api]
    project = row.read("project") or name
    endpoint = row.read("endpoint")
    if endpoint is not None and not is_http_address(endpoint):
        raise row.error(NO_ADDRESS, "endpoint")
    insecure_endpoint = row.read("insecure_endpoint")
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
        limits=parse_limits(row, book) if "limits" in row else its_limits,
        cloud_project=str(row.read("cloud_project")) if "cloud_project" in row else None,
        auth_ref=_auth_ref(row, folder) if "auth" in row else None,
        insecure_endpoint=insecure_endpoint,
        scopes=row.read("scopes") or book.scopes,
        on_refusal=row.read("on_refusal"),
        limited_by=name if "limits" in row else "",
    )


def _auth_ref(row: TomlTable, folder: Path) -> str:
    ref: str = row.read("auth")
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
