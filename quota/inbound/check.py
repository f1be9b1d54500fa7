"""Checks `[inbound]` for `quota check`: an entry point of the group `quota.checks`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from http import HTTPMethod

from quota.common.findings import Finding, obstacle, warning
from quota.common.text import nearest, one_line, show
from quota.errors import ConfigError, StorageAway
from quota.inbound.configured import rule_of, rules_of, table_of
from quota.inbound.rules import Rule, Rules, open_storage
from quota.ledger.factory import file_of
from quota.settings.model import Settings
from quota.settings.tables import rule_names

_NEEDS = {"keys": "key_field", "forwarded": "trusted_proxies"}

_WEBDAV = ("COPY", "LOCK", "MKCALENDAR", "MKCOL", "MOVE", "PROPFIND", "PROPPATCH", "REPORT", "SEARCH", "UNLOCK")
METHODS = (*(method.value for method in HTTPMethod), *_WEBDAV, "PURGE", "QUERY")
"""The methods that clients send."""


def examine(settings: Settings) -> Iterator[tuple[str, str] | Finding]:
    """Yield the mistakes in the rules: the key, what is wrong, and what to do."""
    wrong = []
    try:
        table = table_of(settings)
        if table is None:
            return
        for name in rule_names(table):
            try:
                rule_of(table, name)
            except ConfigError as error:
                wrong.append(error)
        rules = None if wrong else rules_of(settings)
        if rules is not None:
            yield from _together(rules)
            for key, needed in _NEEDS.items():
                if key in table and needed not in table:
                    yield f"inbound.{key}", f"has no effect without {needed}; add {needed}, or remove this key"
    except ConfigError as error:
        wrong.append(error)
    for mistake in wrong:
        location, _, message = str(mistake).removeprefix(f"{settings.source}: ").partition(": ")
        yield location, message


def _together(rules: Rules) -> Iterator[tuple[str, str] | Finding]:
    for number, rule in enumerate(rules.rules):
        location = f"inbound.{rule.name}"
        for method in sorted(rule.methods.difference(METHODS)):
            yield warning(f"{location}.methods", f"{method} is not a usual method", nearest(method, METHODS))
        before = next((earlier for earlier in rules.rules[:number] if earlier.hides(rule)), None)
        if before is not None:
            yield location, f"no request reaches it: {_takes(before)}; put {rule.name} before it"
        elif any(pattern.covers(rule.pattern) for pattern in rules.exempt):
            yield location, "no request reaches it: exempt covers all of its paths; remove this rule or change exempt"
    if rules.any_key:
        yield (
            "inbound.key_field",
            f"{show(rules.key_field)} has no effect without valid keys: a client could invent a key for each request; "
            'add keys = "file:/path", a file with one key per line',
        )
    yield from _storage(rules)


def _takes(rule: Rule) -> str:
    if rule.path is None:
        return f"rule {rule.name} before it has no path, so it takes every request"
    return f"rule {rule.name} before it takes {show(rule.path)}"


def _storage(rules: Rules) -> Iterator[tuple[str, str] | Finding]:
    """Check the storage: a bad storage limits nobody, or refuses everybody. Asks no server, and creates no file."""
    if rules.url is None:
        return
    path = file_of(rules.url)
    try:
        with closing(open_storage(rules.url)) as storage:
            if path and os.path.exists(path) and os.path.getsize(path) > 0:
                storage.totals()
    except (ConfigError, StorageAway) as error:
        yield "inbound.url", str(error)
        return
    prevented = obstacle(path) if path else None
    if prevented is not None:
        why, remedy = prevented
        yield warning("inbound.url", f"inbound storage {one_line(path)} cannot be written: {why}", remedy)
