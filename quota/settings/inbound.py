"""The keys of `[inbound]`. What they mean is the business of `quota.inbound`, which a gate never imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quota.settings.tables import INBOUND, INBOUND_RULE
from quota.settings.toml import TomlTable


def check_keys(root: TomlTable) -> Mapping[str, Any]:
    """The table `[inbound]` as it stands in the file. Raises ConfigError for a key that nobody reads."""
    # A hint at another table would be wrong: its keys mean something else.
    alone = TomlTable({"inbound": root.value("inbound")}, root.source, variables=root.variables)
    table = alone.table("inbound")
    for name, value in table.items():
        if isinstance(value, dict) and name in INBOUND:
            raise table.error("a key of [inbound] is called so; give the rule another name", name)
    names = rule_names(table)
    alone.table("inbound", (*INBOUND, *names))
    for name in names:
        row = table.table(name, tuple(INBOUND_RULE))
        if isinstance(row.value("limits") if "limits" in row else None, list):
            row.array("limits", tuple(INBOUND_RULE["limits"].keys))
    return dict(table.items())


def rule_names(table: TomlTable) -> list[str]:
    """The names of the rules, in the order of the file: every table in `[inbound]` is one."""
    return [name for name, value in table.items() if isinstance(value, dict) and name not in INBOUND]
