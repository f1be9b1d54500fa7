"""Reads the rules in `[inbound]` of quota.toml, and checks them for `quota check` (`examine` is an entry point of the
group `quota.checks`).

[inbound]                         for all rules: the storage, and how to tell visitors apart
url = "redis://127.0.0.1:6379/0"

[inbound.search]                  the rule `search`; the first rule that matches counts a request
path = "/search"
limit = 100
window = "60s"
"""

from __future__ import annotations

import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from http import HTTPMethod
from pathlib import Path
from typing import Any

from quota.common.files import read_named
from quota.common.findings import Finding, finding_of, obstacle, problem, warning
from quota.common.text import nearest, one_line, show
from quota.errors import ConfigError, StorageAway
from quota.inbound.contract import MAX_WINDOW_MS, Limit
from quota.inbound.identity import KnowsKey, UserOf, as_text, digest
from quota.inbound.rules import Rule, Rules, open_storage
from quota.ledger.factory import file_of
from quota.settings.books import Mistakes
from quota.settings.load import load_settings
from quota.settings.model import Settings
from quota.settings.references import address_of, file_url, path_at, place_of
from quota.settings.tables import rule_names
from quota.settings.toml import TomlTable

MAX_KEYS_BYTES = 8 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_A_RULE = 'add [inbound.default] with limit = 600 and window = "60s"'


def load_rules(config: str | Path | None = None, *, keys: KnowsKey = None, user: UserOf = None) -> Rules:
    """The rules of a configuration: `config`, or the file that the command line finds.

    `keys` and `user` are functions of yours, see `Rules`. Raises ConfigError, which names file and key.
    """
    settings = load_settings(config)
    if settings.path is None and settings.inbound is None:
        in_code = "Rules in code need no file, and `quota inbound` does not know them"
        raise ConfigError(f"no quota.toml was found: set QUOTA_CONFIG. {in_code}")
    rules = rules_of(settings, keys=keys, user=user)
    if rules is None:
        raise ConfigError(f"{settings.source}: inbound: missing; {_A_RULE}")
    return rules


def rules_of(
    settings: Settings, *, keys: KnowsKey = None, user: UserOf = None, exempt: Sequence[str] = ()
) -> Rules | None:
    """The rules of these settings; None if they have no `[inbound]`. Raises ConfigError.

    `exempt` adds path patterns that no rule counts.
    """
    table = settings.inbound
    if table is None:
        return None
    if keys is None and "keys" in table:
        keys = _keys_in_file(table)
    given: dict[str, Any] = table.members("key_field trusted_proxies x_fields") | {
        "url": _url(table, settings),
        "exempt": (*table.read("exempt"), *exempt),
        "forwarded": table.read("forwarded").lower(),
    }
    rules = [rule_of(table, name) for name in rule_names(table)]
    if not rules:
        raise table.error(f"at least one rule is needed; {_A_RULE}")
    try:
        return Rules(rules, keys=keys, user=user, **given)
    except ConfigError as error:
        raise _at(table, error) from None


def rule_of(table: TomlTable, name: str) -> Rule:
    """One rule. Raises ConfigError."""
    row = table.read(name)
    limits = []
    for limit in row.read("limits") or [row]:
        window_ms = limit.read("window")
        if window_ms % 1000 or window_ms > MAX_WINDOW_MS:  # responses have whole seconds
            wrong = f"{show(limit.value('window'))} is not in whole seconds, at most 31 days"
            raise limit.error(f'{wrong}; write for example "60s"', "window")
        limits.append(Limit(limit.read("limit"), window_ms, limit.read("burst")))
    given = row.members("path methods algorithm cost fail shadow count_rejected")
    try:
        return Rule(name, limits, **given)
    except ConfigError as error:
        raise _at(row, error, f"rule {name}: ") from None


def _at(table: TomlTable, error: ConfigError, prefix: str = "") -> ConfigError:
    """The error with its place in the file. An error about one key begins with the key."""
    message = str(error).removeprefix(prefix)
    key, colon, rest = message.partition(": ")
    return table.error(rest, key) if colon and key in table else table.error(message)


def _url(table: TomlTable, settings: Settings) -> str | None:
    """The storage."""
    address = address_of(table)
    if address is None:
        return None
    if file_of(address.url) is None:
        return address.url
    url = file_url(table, address.url)
    for what, used in ("ledger", settings.ledger.url), ("store", settings.store.url):
        if place_of(url) == place_of(used):
            raise table.error(f"the {what} uses this file already; give the inbound limits a file of their own", "url")
    return url


def _keys_in_file(table: TomlTable) -> Callable[[str], bool]:
    """A function that tells whether a text is a key in the file, which has one per line. Only hashes stay in memory."""
    ref = table.read("keys")
    kind, _, name = ref.partition(":")
    if kind != "file" or not name:
        raise table.error('write "file:/path" of a file with one key per line', "keys")
    path = path_at(table, "keys", name)
    try:
        data = read_named(path, MAX_KEYS_BYTES + 1)
    except OSError as error:
        raise table.error(f"the file cannot be read: {error.strerror or error}", "keys") from None
    if len(data) > MAX_KEYS_BYTES:
        raise table.error(f"the file is larger than {MAX_KEYS_BYTES >> 20} MiB, so it is not a list of keys", "keys")
    lines = [line.strip(" \t\r") for line in data.removeprefix(BOM_UTF8).decode("latin-1").split("\n")]
    for number, key in enumerate(lines, 1):
        if _CONTROL.search(key):  # of UTF-16, for example
            raise table.error(f"line {number} of the file has a character that no header field has", "keys")
    hashes = frozenset(digest(as_text(key)) for key in lines if key)
    if not hashes:
        raise table.error("the file has no key; write one key per line", "keys")
    return lambda key: digest(key) in hashes


# -- what `quota check` says -------------------------------------------------------------------------------------------

_NEEDS = {"keys": "key_field", "key_field": "keys", "forwarded": "trusted_proxies"}

_WEBDAV = ("COPY", "LOCK", "MKCALENDAR", "MKCOL", "MOVE", "PROPFIND", "PROPPATCH", "REPORT", "SEARCH", "UNLOCK")
METHODS = (*(method.value for method in HTTPMethod), *_WEBDAV, "PURGE", "QUERY")
"""The methods that clients send."""


def examine(settings: Settings) -> Iterator[Finding]:
    """The mistakes in the rules."""
    table, wrong = settings.inbound, Mistakes()
    if table is None:
        return
    for name in rule_names(table):
        wrong.tried(rule_of, table, name)
    rules = None if wrong else wrong.tried(rules_of, settings)
    if rules is not None:
        yield from _together(rules)
        for key, needed in _NEEDS.items():
            if key in table and needed not in table:
                remedy = f"add {needed}, or remove this key"
                yield problem(f"inbound.{key}", f"has no effect without {needed}", remedy)
    for mistake in wrong:
        location, _, message = mistake.removeprefix(f"{settings.source}: ").partition(": ")
        yield finding_of("error", location, message, "correct it")


def _together(rules: Rules) -> Iterator[Finding]:
    for number, rule in enumerate(rules.rules):
        location = f"inbound.{rule.name}"
        for method in sorted(rule.methods.difference(METHODS)):
            yield warning(f"{location}.methods", f"{method} is not a usual method", nearest(method, METHODS))
        before = next((earlier for earlier in rules.rules[:number] if earlier.hides(rule)), None)
        if before is not None:
            takes = "has no path, so it takes every request" if before.path is None else f"takes {show(before.path)}"
            message = f"no request reaches it: rule {before.name} before it {takes}"
            yield problem(location, message, f"put {rule.name} before it")
        elif any(pattern.covers(rule.pattern) for pattern in rules.exempt):
            message = "no request reaches it: exempt covers all of its paths"
            yield problem(location, message, "remove this rule or change exempt")
    yield from _storage(rules)


def _storage(rules: Rules) -> Iterator[Finding]:
    """Check the storage: a bad storage limits nobody, or refuses everybody. Asks no server, and creates no file."""
    if rules.url is None:
        return
    path = file_of(rules.url)
    try:
        with closing(open_storage(rules.url)) as storage:
            if path and os.path.exists(path) and os.path.getsize(path) > 0:
                storage.totals()
    except (ConfigError, StorageAway) as error:
        yield finding_of("error", "inbound.url", error, "correct it")
        return
    prevented = obstacle(path) if path else None
    if prevented is not None:
        why, remedy = prevented
        yield warning("inbound.url", f"inbound storage {one_line(path)} cannot be written: {why}", remedy)
