"""The keys of `[inbound]`. What they mean is the business of `quota.inbound`, which a gate never imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quota.settings.address import KEYS as ADDRESS_KEYS
from quota.settings.toml import TomlTable

if TYPE_CHECKING:
    from collections.abc import Mapping

KEYS = (*ADDRESS_KEYS, "exempt", "trusted_proxies", "forwarded", "key_field", "keys", "x_fields")
"""What applies to all rules. Every table in `[inbound]` is a rule."""

RULE_KEYS = (
    "path",
    "methods",
    "limit",
    "window",
    "burst",
    "limits",
    "algorithm",
    "cost",
    "fail",
    "shadow",
    "count_rejected",
)
LIMIT_KEYS = ("limit", "window", "burst")


def check_keys(root: TomlTable) -> Mapping[str, Any]:
    """The table `[inbound]` as it stands in the file. Raises ConfigError for a key that nobody reads."""
    table = root.table("inbound")
    names = [name for name, value in table.items() if isinstance(value, dict)]
    root.table("inbound", (*KEYS, *names))
    for name in names:
        if name not in KEYS:
            row = table.table(name, RULE_KEYS)
            if isinstance(row.value("limits") if "limits" in row else None, list):
                row.array("limits", LIMIT_KEYS)
    return dict(table.items())
