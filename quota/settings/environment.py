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

REMEDY = f"write two underscores between names and all in capitals, as in {PREFIX}LEDGER__URL"
_ALMOST = re.compile(rf"(?i)quota_+({'|'.join(ROOT)})_")


def almost(names: Iterable[str], written: str) -> list[str]:
    """The variables that look like keys and set none, without those that the file names, as in env:NAME."""
    each = (name for name in sorted(names) if _ALMOST.match(name) and not name.startswith(PREFIX))
    return [name for name in each if name not in written]


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
    kind: Any = Table(keys=ROOT)
    into: Any = data
    at: Any = None
    path, begun = "", PREFIX
    for segment in variable.removeprefix(PREFIX).split("__"):
        if isinstance(at, str):
            wanted = list if isinstance(kind, Rows) else dict
            if not isinstance(into.get(at), wanted):  # not there, or a limit's window that was a text
                into[at] = wanted()
        into = into if at is None else into[at]
        if isinstance(kind, Either):
            kind = next((inner for inner in kind.kinds if isinstance(inner, Table)), kind)
        if isinstance(kind, Rows) and "name" in kind.keys and segment:
            rows = [row.get("name") if isinstance(row, dict) else None for row in into]
            name = _meant(segment, rows, variable)
            if name not in rows:
                into.append({"name": name})
                rows.append(name)
            at, kind = rows.index(name), Table(keys=kind.keys)
            path = f"{path}[{at}]"
        else:
            keys = kind.keys if isinstance(kind, Table) and not isinstance(kind, Rows) else Keys({})
            at, kind = segment.lower(), keys.get(segment.lower(), keys.others)
            if kind is None or not segment:
                hint = nearest(variable, [f"{begun}{key.upper()}" for key in keys])
                raise ConfigError(f"environment variable {show(variable)[1:-1]}: no such key; {hint}")
            if at not in keys:
                at = _meant(segment, into, variable)
            path = dotted(path, at)
        begun += f"{segment}__"
    into[at] = _value(kind, text, variable)
    return path


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
