"""Reading the secret that a key reference points to."""

from __future__ import annotations

import os

from quota.common.text import one_line
from quota.errors import ConfigError


def read_key(ref: str, what: str = "key", setting: str = "") -> str:
    """The secret that a reference points to, without a trailing line break.

    `what` it is and the `setting` that names it (as `what` by default) are for messages.

    Raises ConfigError, which names the variable or file and never the value.
    """
    kind, _, name = ref.partition(":")
    if kind == "env":
        where = f"environment variable {name}"
        text = os.environ.get(name)
        if text is None:
            raise ConfigError(f'{where} is not set; put the {what} into it, or use {setting or what} = "file:/path"')
    else:
        where = f"{what} file {one_line(name)}"
        try:
            with open(name, "rb") as file:
                text = file.read(_MAX_KEY_CHARS + 1).decode("latin-1")
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None
    key = text.rstrip("\r\n")
    if not key:
        raise ConfigError(f"{where} is empty; put the {what} into it")
    if len(key) > _MAX_KEY_CHARS:
        raise ConfigError(f"{where} holds more than {_MAX_KEY_CHARS} characters, so this is not {_a(what)}")
    # The key travels in a header: any other character would fail later, inside a client that prints the value.
    if not all(" " < c <= "~" for c in key):
        raise ConfigError(
            f"{where} holds a space, a line break or another character that no {what} has; store only the {what} in it"
        )
    return key


_MAX_KEY_CHARS = 8_192


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeio' else 'a'} {what}"
