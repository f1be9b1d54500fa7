"""Keeps secrets out of messages: `redact(text)`. `quota.common.log_lines` does it for logs.

It finds secrets in two ways, because neither is enough alone. It replaces the literal values of this process's own
secrets, wherever they appear. For other secrets, it recognizes the usual forms of keys and tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from string import ascii_lowercase, ascii_uppercase
from urllib.parse import quote

REDACTED = "[redacted]"

MIN_SECRET_LENGTH = 8
"""Shorter values are not registered: a "key" of two letters would blank out half of every message."""

MIN_PIECE_LENGTH = 4
"""If a text was cut, this many characters of a secret are enough to recognize it."""

_CUT = "..."
"""`quota.common.text` writes this in place of the text that it cuts."""

_HIDDEN = r"[^\s\"'\\&,;<>\[\]{}()]+"

_SHAPES = (
    # A parameter of a URL or a form, under the names that Google and others use.
    rf"(?i)([?&](?:key|api[_-]?key)=|\b(?:api[_-]?key|(?:access|oauth|refresh|id)_token|client_secret)=){_HIDDEN}",
    # Outside a URL, `key=` may mean anything, so the value must look like a key.
    r"(?i)(\bkey=)[A-Za-z0-9_\-]{16,}",
    # A header, as text, as a dict's repr, or as JSON. A matched scheme is not taken for the token: a
    # repeated lookahead does not backtrack. (`?+` would do the same, but skips a letter before Python 3.11.3.)
    rf"(?i)(x-goog-api-key(?:\\?[\"'])?\s*[:=,]\s*b?(?:\\?[\"'])?){_HIDDEN}",
    rf"(?i)(authorization(?:\\?[\"'])?\s*[:=,]\s*b?(?:\\?[\"'])?(?=(?P<scheme>(?:[a-z]+ +)?))(?P=scheme)){_HIDDEN}",
    r"(?i)(\bbearer +)[A-Za-z0-9._~+/=\-]{8,}",
    # A password inside a URL. Without a bound on the scheme, a text like "a.a.a.a" would take quadratic time.
    r"(\b[a-z][a-z0-9+.\-]{0,39}://[^\s/:@\"']*:)[^\s/@\"']+(?=@)",
    # The prefixes of Google's API keys and access tokens.
    r"()\bAIza[A-Za-z0-9_\-]{20,}",
    r"()\bya29\.[A-Za-z0-9_.\-]{8,}",
)

_secrets: tuple[str, ...] = ()


_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)


def spellings(secret: str) -> list[str]:
    """A secret as it is, quoted as in a URL or a form, and escaped as Python, JSON and HTML do; the longest first,
    because one may contain another. ASCII is in lower case: encoders differ in the case of their digits."""
    quoted = [quote(secret, safe=safe) for safe in ("/", "", "*", "!*()", "!*()'")]
    quoted += [text.replace("~", "%7e") for text in quoted]
    quoted += [text.replace("%20", "+") for text in quoted]
    in_json, in_html = json.dumps(secret)[1:-1], escape(secret)
    json_for_html = re.sub("[&+<>'`]", lambda char: f"\\u{ord(char[0]):04x}", in_json)
    texts = [secret, *quoted, repr(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]]
    texts += [in_json, in_json.replace("/", "\\/"), json_for_html]
    texts += [in_html, in_html.replace("&#x27;", "&#39;").replace("&quot;", "&#34;")]
    return _longest_first({text.translate(_LOWER) for text in texts})


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=lambda text: (-len(text), text))


def register(secret: str | None) -> None:
    """Remember a secret, in all its spellings, for the rest of the process.

    Ignores None and values shorter than MIN_SECRET_LENGTH.
    """
    global _secrets
    if secret is not None and len(secret) >= MIN_SECRET_LENGTH:
        # Readers of a new tuple need no lock.
        _secrets = tuple(_longest_first({*_secrets, *spellings(secret)}))


def redact(text: str) -> str:
    """Replace every part of `text` that is a secret, or looks like one, by `[redacted]`."""
    lower = text.translate(_LOWER)
    for secret in _secrets:
        if secret in lower:
            text = re.sub(re.escape(secret), REDACTED, text, flags=re.ASCII | re.IGNORECASE)
            lower = text.translate(_LOWER)
    if _CUT in text and _secrets:
        text = _without_pieces(text)
    for shape in _SHAPES:
        text = re.sub(shape, rf"\g<1>{REDACTED}", text)
    return text


def _without_pieces(text: str) -> str:
    """Redact pieces of a secret beside a cut: its start before the dots, or its end after them."""
    parts = text.split(_CUT)
    for at, part in enumerate(parts):
        for secret in _secrets:
            lengths = range(min(len(secret) - 1, len(part)), MIN_PIECE_LENGTH - 1, -1)
            lower = part.translate(_LOWER)
            if at < len(parts) - 1 and (length := next((n for n in lengths if lower.endswith(secret[:n])), 0)):
                part = part[:-length] + REDACTED
            if at and (length := next((n for n in lengths if lower.startswith(secret[-n:])), 0)):
                part = REDACTED + part[length:]
        parts[at] = part
    return _CUT.join(parts)
