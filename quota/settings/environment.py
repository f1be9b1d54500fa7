"""Every key of the configuration from the environment: `QUOTA__LEDGER__URL`, `QUOTA__JOBS__TRENDING__PAGES`.

Two underscores stand between the names of tables and the key, all in capitals. A variable matches a name in the file
whatever its case, with `_` for each character that a variable cannot have; it adds a name that the file lacks, in small
letters. A limit goes by its `name`. A text is written as it is, any other value as in TOML: `500`, `["DE", "FR"]`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from quota.common.text import listed, nearest, show
from quota.errors import ConfigError
from quota.settings.tables import ROOT
from quota.settings.toml import Either, Keys, Kind, Rows, Table, Text, dotted

PREFIX = "QUOTA__"


def overlaid(data: dict[str, Any], variables: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables with the values of these variables, and the variable of each path.

    Raises ConfigError, which names the variable, if it sets no key or another variable sets the same.
    """
    merged = deepcopy(data) if variables else data
    paths: dict[str, str] = {}
    for variable, text in variables.items():
        path = _put(merged, variable, text)
        if path in paths:
            raise ConfigError(f"environment variables {paths[path]} and {variable} set the same key; remove one")
        paths[path] = variable
    return merged, paths


def _put(data: dict[str, Any], variable: str, text: str) -> str:
    """Set the value of one variable. Returns its dotted path."""
    kind: Kind = Table(keys=ROOT)
    into: Any = data
    at: Any = None
    path, begun = "", PREFIX
    for segment in variable.removeprefix(PREFIX).split("__"):
        if at is not None:
            into = _inner(into, at, list if isinstance(kind, Rows) else dict)
        at, kind, path = _step(kind, into, segment, path, variable, begun)
        begun += f"{segment}__"
    into[at] = _value(kind, text, variable)
    return path


def _inner(into: Any, at: Any, wanted: type[Any]) -> Any:
    """The table or array there, or a new empty one: a limit's window may have been a text."""
    if isinstance(at, int):
        return into[at]
    if not isinstance(into.get(at), wanted):
        into[at] = wanted()
    return into[at]


def _step(kind: Kind, into: Any, segment: str, path: str, variable: str, begun: str) -> tuple[Any, Kind, str]:
    """The key or index of a segment, its kind and its path."""
    if isinstance(kind, Either):
        kind = next((inner for inner in kind.kinds if isinstance(inner, Table)), kind)
    if isinstance(kind, Rows) and "name" in kind.keys and segment:
        rows = [row.get("name") if isinstance(row, dict) else None for row in into]
        name = _meant(segment, rows, variable)
        if name not in rows:
            into.append({"name": name})
            rows.append(name)
        index = rows.index(name)
        return index, Table(keys=kind.keys), f"{path}[{index}]"
    keys = kind.keys if isinstance(kind, Table) and not isinstance(kind, Rows) else Keys({})
    key = segment.lower()
    if key in keys:
        return key, keys[key], dotted(path, key)
    if keys.others is not None and segment:
        key = _meant(segment, into, variable)
        return key, keys.others, dotted(path, key)
    variables = [f"{begun}{key.upper()}" for key in keys]
    raise ConfigError(f"environment variable {show(variable)[1:-1]}: no such key; {nearest(variable, variables)}")


def _meant(segment: str, names: Iterable[Any], variable: str) -> str:
    """The name in the file that a segment means; a new name if there is none."""
    meant = [
        name for name in names if isinstance(name, str) and re.sub(r"[^A-Z0-9]", "_", name.upper()) == segment.upper()
    ]
    if len(meant) > 1:
        raise ConfigError(f"environment variable {variable} may mean {listed(meant)}; rename one of them in the file")
    return meant[0] if meant else segment.lower()


def _value(kind: Kind, text: str, variable: str) -> Any:
    if isinstance(kind, Text):
        return text
    try:
        (value,) = tomllib.loads(f"value = {text}").values()
    except (ValueError, RecursionError):
        kinds = kind.kinds if isinstance(kind, Either) else (kind,)
        if any(isinstance(kind, Text) or type(kind) is Kind for kind in kinds):  # it may be a text
            return text
        raise ConfigError(
            f'environment variable {variable}: not a value of TOML; write for example 500, true or ["DE", "FR"]'
        ) from None
    return value
