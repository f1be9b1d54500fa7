"""Reading the secret that a reference points to."""

from __future__ import annotations

import os

from quota.common.named import read_named
from quota.common.text import one_line
from quota.errors import ConfigError


def read_key(ref: str, what: str = "key") -> str:
    """The secret that a reference points to, as `read_secret` reads it, for a header.

    Raises ConfigError for a character that a header cannot have, too.
    """
    key = read_secret(ref, what)
    # Any other character would fail later, inside a client that prints the value.
    if not all(" " < c <= "~" for c in key):
        raise ConfigError(
            f"{_where(ref, what)} holds a space, a line break or another character that no {what} has; store only the "
            f"{what} in it"
        )
    return key


def read_secret(ref: str, what: str) -> str:
    """The secret that a reference points to, without a trailing line break.

    `what` it is, is for messages. Raises ConfigError, which names the variable or file and never the value.
    """
    where = _where(ref, what)
    kind, _, name = ref.partition(":")
    if kind == "env":
        text = os.environ.get(name)
        if text is None:
            raise ConfigError(f"{where} is not set; put the {what} into it, or write file:/path instead of {ref}")
    else:
        try:
            text = read_named(name, _MAX_CHARS + 1).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None
    secret = text.rstrip("\r\n")
    if not secret:
        raise ConfigError(f"{where} is empty; put the {what} into it")
    if len(secret) > _MAX_CHARS:
        raise ConfigError(f"{where} holds more than {_MAX_CHARS} characters, so this is not {_a(what)}")
    if not secret.isprintable():
        raise ConfigError(
            f"{where} holds a line break or another character that no {what} has; store only the {what} in it"
        )
    return secret


_MAX_CHARS = 8_192


def _where(ref: str, what: str) -> str:
    kind, _, name = ref.partition(":")
    return f"environment variable {name}" if kind == "env" else f"{what} file {one_line(name)}"


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeio' else 'a'} {what}"
