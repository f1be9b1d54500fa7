"""Keeps secrets out of logs and messages: `redact(text)` for a string, `RedactingFilter` for a logging handler.

Two nets, because neither is enough alone: the literal values of the secrets this process was given, wherever they
turn up, and the shapes in which keys and tokens usually travel, for those it was never told about.
"""

from __future__ import annotations

import logging
import re
from urllib.parse import quote

from quota.common.text import printable

REDACTED = "[redacted]"

MIN_SECRET_LENGTH = 8
"""Shorter values are not replaced literally: a "key" of two letters would blank out half of every message."""

_HIDDEN = r"[^\s\"'\\&,;<>\[\]{}()]+"

_SHAPES = (
    # In a URL's query or a form, under the names that Google and others use.
    re.compile(
        rf"(?i)([?&](?:key|api[_-]?key)=|\b(?:api[_-]?key|access_token|refresh_token|id_token|client_secret)=){_HIDDEN}"
    ),
    # Outside a URL `key=` may mean anything, so what follows must look like one.
    re.compile(r"(?i)(\bkey=)[A-Za-z0-9_\-]{16,}"),
    # A header, as text, as a dict's repr, or as JSON. `?+`: a scheme, once seen, is not itself taken for the token.
    re.compile(rf"(?i)(x-goog-api-key(?:\\?[\"'])?\s*[:=,]\s*b?(?:\\?[\"'])?){_HIDDEN}"),
    re.compile(rf"(?i)(authorization(?:\\?[\"'])?\s*[:=,]\s*b?(?:\\?[\"'])?(?:[a-z]+ +)?+){_HIDDEN}"),
    re.compile(r"(?i)(\bbearer +)[A-Za-z0-9._~+/=\-]{8,}"),
    # A password inside a URL. Unbounded, the scheme would make this quadratic in a text like "a.a.a.a".
    re.compile(r"(\b[a-z][a-z0-9+.\-]{0,39}://[^\s/:@\"']*:)[^\s/@\"']+(?=@)"),
    # Google's own spellings of an API key and an access token.
    re.compile(r"()\bAIza[A-Za-z0-9_\-]{20,}"),
    re.compile(r"()\bya29\.[A-Za-z0-9_.\-]{8,}"),
)

_secrets: tuple[str, ...] = ()


def register(secret: str | None) -> None:
    """Remember a secret's literal value for the rest of the process, also as it looks inside a URL.

    None and values shorter than MIN_SECRET_LENGTH are ignored.
    """
    global _secrets
    if secret is not None and len(secret) >= MIN_SECRET_LENGTH:
        # Longest first: one secret may contain another. A new tuple, so that readers need no lock.
        known = {*_secrets, secret, quote(secret, safe=""), quote(secret)}
        _secrets = tuple(sorted(known, key=lambda value: (-len(value), value)))


def redact(text: str) -> str:
    """`text` with everything that is, or looks like, a secret replaced by `[redacted]`."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, REDACTED)
    for shape in _SHAPES:
        text = shape.sub(rf"\g<1>{REDACTED}", text)
    return text


class RedactingFilter(logging.Filter):
    """Lets every record pass, without its secrets: in the message, its arguments, extra fields and the traceback.

    Belongs on handlers: a logger's own filters do not see the records of the loggers below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact `record` in place. A record without secrets stays as it is, arguments and all."""
        try:
            message = record.getMessage()
        except Exception:
            # The message does not fit its arguments. Logging would print both to say so.
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
    """A record on one line without control sequences; one with a traceback on as many as that has."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        traced = record.exc_text or record.stack_info
        return "\n".join(map(printable, text.split("\n"))) if traced else printable(text)


_FORMATTER = logging.Formatter()
_PLAIN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) - {"exc_text", "stack_info"} | {"message", "asctime"}


def install(*handlers: logging.Handler) -> None:
    """Put the filter on these handlers, by default on the root logger's and on logging's handler of last resort.

    May be called again, after handlers were added: no handler gets it twice.
    """
    targets = list(handlers) or [*logging.getLogger().handlers]
    if not handlers and logging.lastResort is not None:
        targets.append(logging.lastResort)
    for handler in targets:
        if not any(isinstance(known, RedactingFilter) for known in handler.filters):
            handler.addFilter(RedactingFilter())
