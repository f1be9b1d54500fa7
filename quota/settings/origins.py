"""Every value in force, and its origin: `quota check --show`.

Origin      one value: its key, and the file, the variable or the default that gave it
in_force    all values, in the order of the file, then the defaults
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quota.common.redact import REDACTED, redact
from quota.errors import ConfigError
from quota.ledger.factory import file_of
from quota.settings.load import read_config, settings_of
from quota.settings.model import Settings
from quota.settings.references import ADDRESS, is_reference
from quota.settings.tables import CALENDAR, ROOT
from quota.settings.toml import Either, Keys, Needs, Table, Text, dotted, in_toml, tables_in


class Origin(NamedTuple):
    """One value. `place` is "file", "environment", "default" or "cost book"; `detail` is the variable or the book."""

    key: str
    value: Any
    place: str
    detail: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "from": self.place, "detail": self.detail}

    def __str__(self) -> str:
        return f"{self.key} = {_as_toml(self.value)}  # {self.detail or self.place}"


def in_force(config: str | Path | None) -> tuple[Settings, list[Origin]]:
    """The settings of a configuration, and each of its values. Raises ConfigError as `load_settings` does."""
    tables, path = read_config(config)
    settings = settings_of(tables, path)
    rows: list[Origin] = []
    for key, value, is_default in _values(ROOT, tables.data, ""):
        variable = next((tables.variables[above] for above in _above(key) if above in tables.variables), None)
        if is_default:
            rows.append(Origin(key, value, "default"))
        elif variable is not None:
            rows.append(Origin(key, value, "environment", variable))
        else:
            rows.append(Origin(key, value, "default" if path is None else "file"))
    written = {above for row in rows for above in _above(row.key)}
    rows += [row for row in _computed(settings) if written.isdisjoint((row.key, row.key.partition("[")[0]))]
    places = [*ROOT]
    return settings, sorted(rows, key=lambda row: places.index(row.key.partition(".")[0]))


def _computed(settings: Settings) -> Iterator[Origin]:
    """The values that the reader computes where the configuration has none."""
    yield Origin("ledger.url", _hidden(settings.ledger.url), "default")
    yield Origin("store.url", settings.store.url, "default")
    for credential in settings.credentials.values():
        path = dotted("credentials", credential.name)
        yield Origin(dotted(path, "project"), credential.project, "default")
        for index, limit in enumerate(() if credential.limited_by else credential.limits):
            values = {"name": limit.name, "quota": limit.quota_units, "headroom": limit.headroom_units}
            for key, value in {**values, "window": limit.view.window.name}.items():
                yield Origin(f"{path}.limits[{index}].{key}", value, "cost book", f"cost book {credential.api}")


def _values(keys: Keys, data: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, bool]]:
    """The path and the value of each key in a table, and whether it is the default."""
    for key, kind in keys.items():
        at = dotted(path, key)
        if key in data:
            yield from _of(kind, data[key], at)
        elif isinstance(kind, Table) and kind.empty:
            yield from _values(kind.keys, {}, at)
        elif keys is not CALENDAR and kind.default is not None:
            needed = next((rule.needed for rule in keys.rules if isinstance(rule, Needs) and key in rule.keys), None)
            if needed is None or needed in data:
                yield at, kind.default, True
    for key in data:
        if key not in keys:  # of [inbound]: a rule
            yield from _of(keys.others, data[key], dotted(path, key))


def _of(kind: Any, value: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    """The values inside one value."""
    if isinstance(kind, Either):
        kind = kind.kind_of(value)
    if isinstance(kind, Table):
        for at, keys, row in tables_in(kind, value, path):
            yield from _values(keys, row, at)
    elif isinstance(value, str) and isinstance(kind, Text) and kind.secret and not is_reference(value):
        yield path, _hidden(value) if kind is ADDRESS["url"] else REDACTED, False
    else:
        yield path, _redacted(value), False


def _redacted(value: Any) -> Any:
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    if isinstance(value, dict):
        return {name: _redacted(item) for name, item in value.items()}
    return redact(value) if isinstance(value, str) else value


def _hidden(url: str) -> str:
    """A url without its passwords: one begins at the user's first colon, and ends at the last @. A lone word there may
    be a password by mistake, as may any part of a url that cannot be used."""
    from quota.ledger.redis_url import checked_target  # late: it imports the driver

    scheme, slashes, _ = url.partition("://")
    try:
        if file_of(url) is None:
            checked_target(url, 1)
    except ConfigError:
        return f"{scheme}://{REDACTED}" if slashes else REDACTED
    url = re.sub(r"(?<=password=)[^&]*", REDACTED, url)
    return redact(re.sub(r"(://(?:[^:@]*:)?).*(?=@)", rf"\1{REDACTED}", url, flags=re.DOTALL))


def _above(path: str) -> list[str]:
    """A path, and the paths of the tables around it."""
    paths = [path]
    while (end := max(path.rfind("."), path.rfind("["))) > 0:
        path = path[:end]
        paths.append(path)
    return paths


def _as_toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    return in_toml(value) if isinstance(value, str) else str(value).lower()
