"""What happened, for whoever runs it: lines that begin with a stable name and carry their values.

For modules that every cold start imports. What logs is imported only when there is something to say.
"""

from __future__ import annotations


def warn(message: str, *values: object) -> None:
    """A warning of the logger `quota`; `message` is a format for `values`, as in `logging`."""
    import logging

    logging.getLogger("quota").warning(message, *values)


def line(event: str, **fields: object) -> str:
    """One line of a log: the event's stable name, then its fields, those that are None or "" left out."""
    return " ".join([event, *(f"{name}={_shown(value)}" for name, value in fields.items() if value not in (None, ""))])


def _shown(value: object) -> str:
    """A value without spaces as it is, any other as a JSON string: one line, one way to read it."""
    import json

    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())
