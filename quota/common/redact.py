"""Keeps secrets out of logs and messages: `redact(text)` for a string, `RedactingFilter` for a logging handler.

It finds secrets in two ways, because neither is enough alone. It replaces the literal values of the secrets that this
process was given, wherever they appear. For other secrets, it recognizes the usual forms of keys and tokens.
"""

from __future__ import annotations

import logging
import re
from urllib.parse import quote

from quota.common.text import printable

REDACTED = "[redacted]"

MIN_SECRET_LENGTH = 8
"""Shorter values are not registered: a "key" of two letters would blank out half of every message."""

_HIDDEN = r"[^\s\"'\\&,;<>\[\]{}()]+"

_SHAPES = (
    # A parameter of a URL or a form, under the names that Google and others use.
    rf"(?i)([?&](?:key|api[_-]?key)=|\b(?:api[_-]?key|access_token|refresh_token|id_token|client_secret)=){_HIDDEN}",
    # Outside a URL, `key=` may mean anything, so the value must look like a key.
    r"(?i)(\bkey=)[A-Za-z0-9_\-]{16,}",
    # A header, as text, as a dict's repr, or as JSON. `?+` keeps a matched scheme from being taken for the token.
    rf"(?i)(x-goog-api-key(?:\\?[\"'])?\s*[:=,]\s*b?(?:\\?[\"'])?){_HIDDEN}",
    rf"(?i)(authorization(?:\\?[\"'])?\s*[:=,]\s*b?(?:\\?[\"'])?(?:[a-z]+ +)?+){_HIDDEN}",
    r"(?i)(\bbearer +)[A-Za-z0-9._~+/=\-]{8,}",
    # A password inside a URL. Without a bound on the scheme, a text like "a.a.a.a" would take quadratic time.
    r"(\b[a-z][a-z0-9+.\-]{0,39}://[^\s/:@\"']*:)[^\s/@\"']+(?=@)",
    # The prefixes of Google's API keys and access tokens.
    r"()\bAIza[A-Za-z0-9_\-]{20,}",
    r"()\bya29\.[A-Za-z0-9_.\-]{8,}",
)

_secrets: tuple[str, ...] = ()


def register(secret: str | None) -> None:
    """Remember a secret for the rest of the process, both as it is and quoted as in a URL.

    Ignores None and values shorter than MIN_SECRET_LENGTH.
    """
    global _secrets
    if secret is not None and len(secret) >= MIN_SECRET_LENGTH:
        # Sort the longest first, because one secret may contain another. Readers of a new tuple need no lock.
        known = {*_secrets, secret, quote(secret, safe=""), quote(secret)}
        _secrets = tuple(sorted(known, key=lambda value: (-len(value), value)))


def redact(text: str) -> str:
    """Replace every part of `text` that is a secret, or looks like one, by `[redacted]`."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, REDACTED)
    for shape in _SHAPES:
        text = re.sub(shape, rf"\g<1>{REDACTED}", text)
    return text


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
