"""What happened, for whoever runs it: lines that begin with a stable name and carry their values.

For modules that every cold start imports. What logs is imported only when there is something to say.
"""

from __future__ import annotations

from quota.common.text import quoted


def warn(message: str, *values: object) -> None:
    """A warning of the logger `quota`; `message` is a format for `values`, as in `logging`."""
    import logging

    logging.getLogger("quota").warning(message, *values)


def line(event: str, **fields: object) -> str:
    """One line of a log: the event's stable name, then its fields, those that are None or "" left out."""
    return " ".join([event, *(f"{name}={quoted(value)}" for name, value in fields.items() if value not in (None, ""))])
