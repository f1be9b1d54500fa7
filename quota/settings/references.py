"""What the configuration refers to: secrets (`env:NAME`, `file:PATH`), files, and the server of a ledger or a storage.

read_key, read_secret    the secret that a reference points to
reference, path_at       a reference and a path in a table, made absolute
address_of               where a ledger or a storage is: the keys that `[ledger]` and `[inbound]` share. Each key
                         beside `url` becomes an option of the url, under redis-py's name
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote_plus

from quota.common.files import read_named
from quota.common.text import one_line
from quota.errors import ConfigError
from quota.ledger.factory import canonical, file_of
from quota.ledger.files import absolute, absolute_path
from quota.settings.tables import ADDRESS_KEYS, FILES, FLAGS, SECRETS, VARIABLE
from quota.settings.toml import TomlTable

_LOGIN = r"://[^/?#]*:[^/?#@]+@|[?&](sentinel_|ssl_)?password=[^&]"
_MAX_CHARS = 8_192
_FILE = rf"(?<=[?&])({'|'.join(FILES)})=([^&#]*)"


# -- secrets -----------------------------------------------------------------------------------------------------------


def read_key(ref: str, what: str = "key") -> str:
    """The secret that a reference points to, for a header.

    Raises ConfigError as `read_secret` does, and for a character that a header cannot have.
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

    Messages call it `what`. Raises ConfigError, which names the variable or file and never the value.
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
        article = "an" if what[0] in "aeio" else "a"
        raise ConfigError(f"{where} holds more than {_MAX_CHARS} characters, so this is not {article} {what}")
    if not secret.isprintable():
        raise ConfigError(
            f"{where} holds a line break or another character that no {what} has; store only the {what} in it"
        )
    return secret


def _where(ref: str, what: str) -> str:
    kind, _, name = ref.partition(":")
    return f"environment variable {name}" if kind == "env" else f"{what} file {one_line(name)}"


# -- references and addresses ------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """A url with all of its options, its paths absolute. `secrets` has the origin of each password: the key, and its
    reference ("": the configuration itself has the password)."""

    url: str
    secrets: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """Without the url: it may hold a password."""
        return f"<Address {self.url.partition(':')[0]}>"


def place_of(url: str) -> str:
    """The file that a URL points to, with symbolic links resolved; any other URL as it is."""
    path = file_of(url)
    return os.path.realpath(path) if path else url


def file_url(table: TomlTable, folder: Path, url: str) -> str:
    """The URL of a file, its path made absolute. Raises ConfigError if the URL names no file."""
    with table.blamed("url"):
        return absolute(url, folder)


def is_reference(text: str) -> bool:
    return text.startswith(("env:", "file:"))


def address_of(table: TomlTable, folder: Path) -> Address | None:
    """The address in a table; None without `url`. Raises ConfigError, which shows no secret."""
    if "url" not in table:
        return None
    keys = [key for key in ADDRESS_KEYS[1:] if key in table]
    url, ref = _secret(table, folder, "url", "url")
    url = canonical(url)
    secrets = [("url", ref)] if re.search(_LOGIN, url) else []
    options = {}
    for key in keys:
        if file_of(url) is not None:
            raise table.error("an embedded ledger has no server; remove this key", key)
        if _stands_in(url, key):
            raise table.error("the url has one too; keep one of them", key)
        if key in SECRETS:
            options[key], ref = _secret(table, folder, key, SECRETS[key])
            if SECRETS[key] == "password":
                secrets.append((key, ref))
        elif key in FLAGS:
            options[key] = str(table.read(key)).lower()
        elif key in FILES:
            options[key] = path_at(table, folder, key, table.read(key))
        else:
            options[key] = table.read(key)
    return Address(_with_options(url, options, table, folder), tuple(secrets))


def _secret(table: TomlTable, folder: Path, key: str, what: str) -> tuple[str, str]:
    """A text, and its reference."""
    text = table.read(key)
    if not is_reference(text):
        if not text.isprintable():
            raise table.error(f"a {what} has no control characters", key)
        return text, ""
    ref = reference(table, folder, key)
    with table.blamed(key):
        return read_secret(ref, what), ref


def reference(table: TomlTable, folder: Path, key: str = "key", kind_of: str = "") -> str:
    """Where a secret is: `env:VARIABLE` or `file:/path`, made absolute. The value begins with `kind_of`, for example
    `bearer:`; the answer does not."""
    text: str = table.read(key)
    ref = text.removeprefix(kind_of)
    kind, colon, rest = ref.partition(":")
    if kind == "env" and colon and re.fullmatch(VARIABLE, rest) and not (rest.startswith("AIza") and len(rest) > 30):
        return ref
    if kind == "file" and colon and rest and rest.isprintable():
        return f"file:{path_at(table, folder, key, rest)}"
    # The message does not show the value: it may be the secret itself.
    secret = "token" if kind_of else key
    raise table.error(
        f'do not write the {secret} itself here; write "{kind_of}env:VARIABLE" or "{kind_of}file:/path"', key
    )


def path_at(table: TomlTable, folder: Path, key: str, text: str) -> str:
    """The path at a key, made absolute."""
    with table.blamed(key):
        return absolute_path(text, folder)


def _stands_in(url: str, key: str) -> bool:
    userinfo, at, _ = url.partition("://")[2].partition("?")[0].rpartition("@")
    if at and key in ("username", "password"):
        name, _, password = userinfo.partition(":")
        return bool(name if key == "username" else password)
    return re.search(rf"[?&]{key}=", url) is not None


def _with_options(url: str, options: dict[str, str], table: TomlTable, folder: Path) -> str:
    if not options and "ssl_" not in url:
        return url

    def with_path(option: re.Match[str]) -> str:
        return f"{option[1]}={quote(path_at(table, folder, 'url', unquote_plus(option[2])), safe='/')}"

    url = re.sub(_FILE, with_path, url)
    for name, text in options.items():
        url += f"{'&' if '?' in url else '?'}{name}={quote(text, safe='')}"
    return url
