"""Log lines for operators: each begins with the stable name of an event, and continues with its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quota.common.text import quoted, shorten

begin: Callable[[], None] | None = None
"""Sets up the log of a command before its first warning. None in a program of the user."""


def warn(event: str, detail: object = "", /, **fields: object) -> None:
    """Log a warning with the logger `quota`: a `line`, and after a colon the `detail`."""
    import logging  # late: most processes never warn

    if begin is not None:
        begin()
    given = (line(event, **fields), detail) if detail else (line(event, **fields),)
    logging.getLogger("quota").warning(": ".join(["%s"] * len(given)), *given)


class Line(str):
    """A line of a log, which knows its `event` and its `fields`."""

    event: str
    fields: Mapping[str, object]


def line(event: str, /, **fields: object) -> Line:
    """One line of a log: the stable name of the event, then its fields, except those that are None or "". It cuts long
    values, because a stranger may have sent them."""
    given = {
        name: value if isinstance(value, int) else shorten(str(value), 300)
        for name, value in fields.items()
        if value not in (None, "")
    }
    written = Line(" ".join([event, *(f"{name}={quoted(value)}" for name, value in given.items())]))
    written.event, written.fields = event, given
    return written
