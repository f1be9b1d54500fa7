"""The log as JSON, one object a line, for programs that collect logs.

    page_stored job=trending region=US page=2 took_ms=81
    {"time": "2026-11-22T05:45:12.031Z", "level": "debug", "logger": "quota.jobs", "event": "page_stored",
     "job": "trending", "region": "US", "page": 2, "took_ms": 81}

A line of ours is an event, its fields, and perhaps a sentence after a colon, which becomes `message`. A line of another
library is a `message` alone.
"""

from __future__ import annotations

import json
import logging
import re

from quota.common.clock import rfc3339

RESERVED = ("time", "level", "logger", "event", "message", "traceback")

_EVENT = re.compile(r"([a-z]+(?:_[a-z]+)+)(?= \w+=|: |; |$)")
_FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|.*?)(?= \w+=|: |; |$)')
_WHOLE = re.compile(r"-?[0-9]{1,15}")
_CONSTANTS = {"True": True, "False": False}


def parse_line(text: str) -> dict[str, object]:
    """The event, the fields and the message of one line of the log, as they were given to it."""
    found = _EVENT.match(text)
    if found is None:
        return {"message": text}
    parsed: dict[str, object] = {"event": found[1]}
    at = found.end()
    while (field := _FIELD.match(text, at)) is not None:
        name, value = field.groups()
        parsed[f"{name}_" if name in RESERVED else name] = _value(value)
        at = field.end()
    rest = text[at:].removeprefix(":").removeprefix(";").strip()
    return parsed | ({"message": rest} if rest else {})


def _value(text: str) -> object:
    if text.startswith('"'):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return int(text) if _WHOLE.fullmatch(text) else _CONSTANTS.get(text, text)


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": rfc3339(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        super().format(record)  # it writes the traceback, where the redacting filter has not
        traceback = "\n".join(filter(None, (record.exc_text, record.stack_info)))
        return json.dumps(
            {**head, **parse_line(record.getMessage()), **({"traceback": traceback} if traceback else {})}
        )
