"""A record as JSON has it, its fields under their own names.

    members(row, "name used_units resets_at", if_any="owed_units")

A time is `resets_ms` in a record, and `resets_at` or `resets` in JSON, as text: null where there is none.
"""

from __future__ import annotations

from quota.common.clock import NEVER, rfc3339


def members(record: object, names: str = "", *, if_any: str = "") -> dict[str, object]:
    """The fields of a record with these names, separated by spaces, in this order; then those of `if_any` that are
    neither None, 0 nor empty."""
    found = {name: _value(record, name) for name in names.split()}
    return found | {name: value for name in if_any.split() if (value := _value(record, name))}


def _value(record: object, name: str) -> object:
    if hasattr(record, name):
        return getattr(record, name)
    field = f"{name}_ms"
    at_ms = getattr(record, field) if hasattr(record, field) else getattr(record, f"{name.removesuffix('_at')}_ms")
    return None if at_ms in (None, NEVER) else rfc3339(at_ms)
