"""What the configuration refers to: secrets (`env:NAME`, `file:PATH`), files, and the server of a ledger or a storage.

read_key, read_secret    the secret that a reference points to
read_address             the address that it points to
FilePath                 the kind of a path
Reference                the kind of a place where a secret is
Login                    the kind of a caller without a key
TextOrReference          the kind of a text that may stand elsewhere
ADDRESS, address_of      where a ledger or a storage is: the keys that `[ledger]` and `[inbound]` share. Each key
                         beside `url` becomes an option of the url, under redis-py's name
completed                a url with what the url of the same server has

Every path that is read is absolute.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, unquote_plus, urlsplit

from quota.common.files import read_named
from quota.common.hosts import is_ambiguous, is_readable_on_the_way
from quota.common.redact import register
from quota.common.text import one_line
from quota.errors import ConfigError
from quota.ledger.factory import canonical, file_of
from quota.ledger.files import absolute, absolute_path
from quota.settings.toml import Flag, Text, TomlTable

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
REFERENCE = rf"env:{VARIABLE}|file:.+"

_LIKE_A_KEY = r"AIza.{30,}|.*(?=[A-Za-z]*[0-9])(?=[A-Z0-9]*[a-z])[A-Za-z0-9]{16}.*"
"""Matches most keys and tokens, and hardly any name of a variable: small letters with digits in a long row."""

_LOGIN = r"://[^/?#]*:[^/?#@]+@|[?&](sentinel_|ssl_)?password=[^&]"
_URL = re.compile(r"^([^?]*?://|)([^?]*@|)([^?]*?)(/\d*|)(?:\?(.*))?\Z", re.DOTALL)
"""The scheme, the login, the server, the database and the options of the url of a server."""

_MAX_CHARS = 8_192


# -- secrets -----------------------------------------------------------------------------------------------------------


def read_key(ref: str, what: str = "key") -> str:
    """The secret that a reference points to, for a header.

    Raises ConfigError as `read_secret` does, and for a character that a header cannot have.
    """
    key = read_secret(ref, what)
    # Any other character would fail later, inside a client that prints the value.
    if not all(" " < c <= "~" for c in key):
        raise ConfigError(f"{_where(ref, what)} has a space or an invalid character; store only the {what} in it")
    return key


def read_address(ref: str, setting: str, *, insecure: bool) -> str:
    """The address that `env:NAME` or `file:PATH` names. Raises ConfigError, which never shows it.

    `setting` is the key of the configuration that holds the reference. An address holds a secret, so it must be https://
    or on this machine, unless the configuration allows `insecure`.
    """
    url = read_key(ref, "address")
    register(url)
    sound = False
    with suppress(ValueError):  # its message shows the port or the host, which may be part of the secret
        parts = urlsplit(url)
        is_host = re.fullmatch(r"[\w.:%-]+", parts.hostname or "") is not None and "\\" not in parts.netloc
        sound = url.startswith(("https://", "http://")) and is_host and parts.port != 0
        # A question mark right behind the host may belong to a password.
        sound = sound and not is_ambiguous(url) and (bool(parts.path) or "@" not in parts.query)
    if not sound:
        raise ConfigError(f"{one_line(ref)} holds no https:// address; store one, with %XX for special characters")
    if not insecure and is_readable_on_the_way(url):
        raise ConfigError(
            f"{one_line(ref)} holds an http:// address on another machine, which would get it in plain text; store an "
            f"https:// one, or set insecure_endpoint = true beside {setting}"
        )
    return url


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
    if len(secret) > _MAX_CHARS or not secret.isprintable():
        raise ConfigError(f"{where} is too long, or has an invalid character; store only the {what} in it")
    return secret


def _where(ref: str, what: str) -> str:
    kind, _, name = ref.partition(":")
    return f"environment variable {name}" if kind == "env" else f"{what} file {one_line(name)}"


# -- kinds of values ---------------------------------------------------------------------------------------------------


class FilePath(Text):
    """The path of a file or a folder."""

    def parse(self, table: TomlTable, value: str, key: str = "", index: int | None = None) -> Any:
        return path_at(table, key, value)


@dataclass(eq=False, repr=False, kw_only=True)
class TextOrReference(Text):
    """A text, or where it is. Reads as the text and its reference ("": the configuration itself has the text)."""

    what: str = "password"

    def parse(self, table: TomlTable, value: str, key: str = "", index: int | None = None) -> Any:
        if not is_reference(value):
            if not value.isprintable():
                raise table.error(f"a {self.what} has no control characters", key)
            return value, ""
        ref = _reference(table, value, key)
        with table.blamed(key):
            return read_secret(ref, self.what), ref


def is_reference(text: str) -> bool:
    return text.startswith(("env:", "file:"))


def _reference(table: TomlTable, text: str, key: str, index: int | None = None, *, kind_of: str = "") -> str:
    """Where a secret is. The text begins with `kind_of`, for example `bearer:`; the answer does not."""
    ref = text.removeprefix(kind_of)
    kind, colon, rest = ref.partition(":")
    is_name = re.fullmatch(VARIABLE, rest) is not None and (rest in os.environ or not re.fullmatch(_LIKE_A_KEY, rest))
    if kind == "env" and colon and is_name:
        return ref
    if kind == "file" and colon and rest and rest.isprintable():
        return f"file:{path_at(table, key, rest)}"
    # The message does not show the value: it may be the secret itself.
    secret = "token" if kind_of else key
    raise table.error(
        f'do not write the {secret} itself here; write "{kind_of}env:VARIABLE" or "{kind_of}file:/path"', key
    )


Reference = partial(Text, pattern=REFERENCE, reads=_reference)
"""Where a secret is: `env:VARIABLE` or `file:PATH`."""


def _login(table: TomlTable, text: str, key: str, index: int | None) -> str:
    kind, _, rest = text.partition(":")
    if text == "adc":
        return text
    if kind == "bearer":
        return f"bearer:{_reference(table, text, key, kind_of='bearer:')}"
    if kind in ("service-account", "authorized-user") and rest and rest.isprintable():
        return f"{kind}:{path_at(table, key, rest)}"
    # The message does not show the value: it may be a token.
    raise table.error('write "adc", "service-account:PATH", "authorized-user:PATH" or "bearer:env:VARIABLE"', key)


Login = partial(Text, pattern=rf"adc|(service-account|authorized-user):.+|bearer:({REFERENCE})", reads=_login)
"""Who calls without a key: `adc`, `service-account:PATH`, `authorized-user:PATH` or `bearer:` and a reference."""


def path_at(table: TomlTable, key: str, text: str) -> str:
    """The path at a key, made absolute."""
    with table.blamed(key):
        return absolute_path(text, table.folder)


# -- where a ledger or a storage is ------------------------------------------------------------------------------------

ADDRESS = {
    "url": TextOrReference('redis://..., sqlite:///file.db; or "env:NAME", "file:PATH".', secret=True, what="url"),
    "username": TextOrReference("The user on the server.", what="user name"),
    "password": TextOrReference('Its password: "env:NAME", "file:PATH", or the password itself.', secret=True),
    "sentinel_username": TextOrReference("The user on the sentinels.", what="user name"),
    "sentinel_password": TextOrReference('Its password: "env:NAME", "file:PATH", or the password itself.', secret=True),
    "ssl_password": TextOrReference("The password of the client's key.", secret=True),
    "ssl_ca_certs": FilePath("The CAs to trust. Default: the system's."),
    "ssl_certfile": FilePath("The client's certificate."),
    "ssl_keyfile": FilePath("The client's key."),
    "ssl_cert_reqs": Text('"none" trusts any server.', choices=("required", "none")),
    "ssl_check_hostname": Flag("Whether the certificate must have the server's name.", default=True),
    "sentinel_ssl": Flag("Whether the sentinels speak TLS, if they differ from their servers."),
}
_FILES = "|".join(key for key, kind in ADDRESS.items() if isinstance(kind, FilePath))


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


def file_url(table: TomlTable, url: str) -> str:
    """The URL of a file, its path made absolute. Raises ConfigError if the URL names no file."""
    with table.blamed("url"):
        return absolute(url, table.folder)


def address_of(table: TomlTable) -> Address | None:
    """The address in a table; None without `url`. Raises ConfigError, which shows no secret."""
    if "url" not in table:
        return None
    url, ref = table.read("url")
    url = canonical(url)
    secrets = [("url", ref)] if re.search(_LOGIN, url) else []
    userinfo, at, _ = url.partition("://")[2].partition("?")[0].rpartition("@")
    user, _, password = userinfo.partition(":")
    login = {"username": user, "password": password} if at else {}
    options = {}
    for key in [key for key in ADDRESS if key in table and key != "url"]:
        if file_of(url) is not None:
            raise table.error("an embedded ledger has no server; remove this key", key)
        in_url = login[key] if key in login else re.search(rf"[?&]{key}=", url)
        if in_url:
            raise table.error("the url has one too; keep one of them", key)
        kind, value = ADDRESS[key], table.read(key)
        if isinstance(kind, TextOrReference):
            value, ref = value
            if kind.secret:
                secrets.append((key, ref))
        options[key] = str(value).lower() if isinstance(value, bool) else value
    return Address(_with_options(table, url, options), tuple(secrets))


def completed(url: str, ours: str) -> str:
    """The url of a ledger. If it names the server of the url `ours`, it has the login and the options of `ours` that it
    lacks: they belong to the server, whatever the database."""
    scheme, login, server, database, options = _URL.findall(canonical(url))[0]
    our_scheme, our_login, our_server, _, our_options = _URL.findall(ours)[0]
    if (scheme, server) != (our_scheme, our_server):
        return url
    taken = {"db", *(option.partition("=")[0] for option in options.split("&"))}
    if login or taken & {"username", "password"}:
        taken |= {"username", "password"}
        our_login = ""
    own = [option for option in our_options.split("&") if option.partition("=")[0] not in taken]
    return f"{scheme}{login or our_login}{server}{database}?{'&'.join(filter(None, [options, *own]))}"


def _with_options(table: TomlTable, url: str, options: dict[str, str]) -> str:
    def with_path(option: re.Match[str]) -> str:
        return f"{option[1]}={quote(path_at(table, 'url', unquote_plus(option[2])), safe='/')}"

    url = re.sub(rf"(?<=[?&])({_FILES})=([^&#]*)", with_path, url)
    for name, text in options.items():
        url += f"{'&' if '?' in url else '?'}{name}={quote(text, safe='')}"
    return url
