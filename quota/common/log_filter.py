"""Log lines without secrets and control characters: `install()` puts a `RedactingFilter` on handlers, and
`LineFormatter` keeps each record on one line.
"""

from __future__ import annotations

import logging

from quota.common.redact import redact
from quota.common.text import printable


class RedactingFilter(logging.Filter):
    """Passes every record, but removes secrets from its message, arguments, extra fields and traceback.

    Add it to handlers, not loggers: a logger's own filters do not see the records of the loggers below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact `record` in place. A record without secrets stays as it is, and keeps its arguments."""
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
    """Writes a record on one line without control sequences. A traceback keeps its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        traced = record.exc_text or record.stack_info
        return "\n".join(map(printable, text.split("\n"))) if traced else printable(text)


_FORMATTER = logging.Formatter()
_PLAIN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) - {"exc_text", "stack_info"} | {"message", "asctime"}


def install(*handlers: logging.Handler) -> None:
    """Add the filter to these handlers. The default is the root logger's handlers and logging's last resort.

    Call it again after adding handlers: no handler gets the filter twice.
    """
    targets = list(handlers) or [*logging.getLogger().handlers]
    if not handlers and logging.lastResort is not None:
        targets.append(logging.lastResort)
    for handler in targets:
        if not any(isinstance(known, RedactingFilter) for known in handler.filters):
            handler.addFilter(RedactingFilter())
