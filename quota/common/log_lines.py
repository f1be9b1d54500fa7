"""Writes lines of the log, without secrets and control characters, as text or as JSON.

`install` puts a `RedactingFilter` on handlers, `LineFormatter` keeps each record on one line, and `JsonFormatter`
writes an object a line, for programs that collect logs:

    page_stored job=trending region=US page=2 took_ms=81
    {"time": "2026-11-22T05:45:12.031Z", "level": "debug", "logger": "quota.jobs", "event": "page_stored",
     "job": "trending", "region": "US", "page": 2, "took_ms": 81}

A line of ours is an event, its fields, and perhaps a sentence after a colon, which becomes `message`. A line of another
library is a `message` alone.
"""

from __future__ import annotations

import json
import logging
import time

from quota.common.clock import rfc3339
from quota.common.log import Line, line
from quota.common.redact import redact
from quota.common.text import printable


class RedactingFilter(logging.Filter):
    """Passes every record, but removes secrets from its message, arguments, extra fields and traceback.

    Add it to handlers, not loggers: a logger's own filters do not see the records of the loggers below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact `record` in place. A record without secrets reads as before."""
        written, further = line_of(record)
        if written is not None:
            fields = {name: redact(text) if isinstance(text, str) else text for name, text in written.fields.items()}
            record.args = (line(written.event, **fields), *(redact(str(text)) for text in further))
        try:
            message = record.getMessage()
        except Exception:
            # The message does not fit its arguments. `logging` would report that, and print both.
            message = f"{record.msg} {record.args!r}"
            record.msg, record.args = message, ()
        clean = redact(message)
        if clean != message:
            record.msg, record.args = clean, ()
        if record.exc_info and not record.exc_text:
            trace = _FORMATTER.formatException(record.exc_info)
            clean = redact(trace)
            if clean != trace:
                record.exc_text = clean  # formatters print this instead of formatting the exception again
        for name, value in list(record.__dict__.items()):
            if isinstance(value, str) and name not in _PLAIN_FIELDS:
                record.__dict__[name] = redact(value)
        return True


class LineFormatter(logging.Formatter):
    """Writes a record on one line without control sequences, its time in UTC. A traceback keeps its own lines."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        traced = record.exc_text or record.stack_info
        return "\n".join(map(printable, text.split("\n"))) if traced else printable(text)


_FORMATTER = logging.Formatter()
_PLAIN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) - {"exc_text", "stack_info"} | {"message", "asctime"}


def install() -> None:
    """Add the filter to the root logger's handlers and to logging's last resort.

    Call it again after adding handlers: no handler gets the filter twice.
    """
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None and not any(isinstance(each, RedactingFilter) for each in handler.filters):
            handler.addFilter(RedactingFilter())


# -- as JSON -----------------------------------------------------------------------------------------------------------

RESERVED = ("time", "level", "logger", "event", "message", "traceback")


def line_of(record: logging.LogRecord) -> tuple[Line | None, list[object]]:
    """The line of ours in a record, and the further arguments; None if it has none."""
    first, *further = record.args if isinstance(record.args, tuple) and record.args else (None,)
    return (first if isinstance(first, Line) else None), further


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        super().format(record)  # it fills in `exc_text` if the redacting filter has not
        traceback = "\n".join(filter(None, (record.exc_text, record.stack_info)))
        at = rfc3339(int(record.created * 1000))
        fields: dict[str, object] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        (written, _), message = line_of(record), record.getMessage()
        if written is not None:
            message = message.removeprefix(written).removeprefix(": ")
            fields["event"] = written.event
            fields |= {f"{name}_" if name in RESERVED else name: value for name, value in written.fields.items()}
        further = {"message": message, "traceback": traceback}
        return json.dumps(fields | {name: text for name, text in further.items() if text})
