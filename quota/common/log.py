"""Log lines for operators: each begins with the stable name of an event, and continues with its fields."""

from __future__ import annotations

from quota.common.text import quoted


def warn(message: str, *values: object) -> None:
    """Log a warning with the logger `quota`. `message` is a format for `values`, as in `logging`."""
    import logging  # late: most processes have nothing to warn of

    logging.getLogger("quota").warning(message, *values)


def line(event: str, **fields: object) -> str:
    """One line of a log: the stable name of the event, then its fields, except those that are None or ""."""
    return " ".join([event, *(f"{name}={quoted(value)}" for name, value in fields.items() if value not in (None, ""))])
