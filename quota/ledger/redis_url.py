"""What a url of Redis names: a client of the server, and a label for people.

    client_maker    checks a url, and returns a function that makes its client
    label_of        the url without its secrets, with the database that it means
    user_of         as whom it logs in
    database_of     in which database

The schemes are `redis`, `unix`, `redis+sentinel`, `redis+cluster`, and with TLS `rediss`, `rediss+sentinel` and
`rediss+cluster`. `ssl` is imported only for those with TLS, and for sentinels with `sentinel_ssl=true`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from quota.common.text import nearest
from quota.errors import ConfigError
from quota.ledger.redis_connection import Connections, Server
from quota.ledger.redis_errors import Failed, Misconfigured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quota.ledger.redis_cluster import Cluster
    from quota.ledger.redis_connection import Line, Socket
    from quota.ledger.redis_tls import Tls

    Why = Callable[[Server, Failed], Failed]

_TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
_NEEDLESS = (
    *("health_check_interval", "max_connections", "retry_on_timeout", "retry_on_error"),
    *("encoding", "encoding_errors", "decode_responses"),
)
"""What redis-py may be told, and a connection of ours has no need of."""
_OPTIONS = ("db", "username", "password", "client_name", "protocol", "socket_keepalive", *_TIMEOUTS)
_OF_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
_OF_SENTINELS = ("sentinel_username", "sentinel_password", "sentinel_ssl")

FALSE = ("0", "F", "FALSE", "N", "NO")
_LONGEST_S = 1e6


def client_maker(
    url: str, label: str, timeout_s: float, what: str = "ledger url"
) -> Callable[[], Connections | Cluster]:
    """A function that makes the client. The url is checked now; the server is contacted at the first command.

    Raises ConfigError, with `what` and `label` for the url.
    """
    if not all(map(_is_database, _databases(url))):
        raise ConfigError(f"{what} {label}: its database is no number; end it in /0, or in ?db=0 after a unix socket")
    try:
        return _maker(_parts(url), timeout_s)
    except (_WrongError, Misconfigured) as error:
        raise ConfigError(f"{what} {label}: {error}") from None
    except (ValueError, TypeError):
        # The parser's message quotes what it took for a port or an option, and that may be a piece of a password.
        raise ConfigError(
            f"{what} {label}: one of its parts cannot be read; write redis://HOST:PORT/DB, a password as "
            "USER:PASSWORD@ before HOST and with %XX for its special characters"
        ) from None


class _WrongError(Exception):
    """A url that can be read and not be used: the text says why."""


class _Parts(NamedTuple):
    """A url, taken apart. `kind` is what the scheme says of the server: "", "unix", "sentinel" or "cluster"."""

    kind: str
    is_secure: bool
    sentinels_are_secure: bool
    nodes: Sequence[tuple[str, int | None]]
    path: str
    db: int
    options: Mapping[str, str]

    def scheme(self, *, secure: bool) -> str:
        """The scheme of the same url with TLS, or without."""
        return f"redis{'s' if secure else ''}{'+' if self.kind else ''}{self.kind}"

    def remedy(self, *, of_sentinels: bool = False) -> str:
        """What to write where a server, or a sentinel, speaks TLS and the url says that it does not, or the reverse."""
        scheme = f"write {self.scheme(secure=not self.is_secure)}://"
        if self.kind != "sentinel":
            return scheme
        if self.sentinels_are_secure != self.is_secure:
            return "remove sentinel_ssl" if of_sentinels else scheme
        if of_sentinels:
            return f"{scheme}, or sentinel_ssl = {_flag(not self.is_secure)} where only the sentinels differ"
        return f"{scheme} and sentinel_ssl = {_flag(self.is_secure)}"


def _parts(url: str) -> _Parts:
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        raise ValueError("nobody can say which of its parts is the host")
    base, _, kind = scheme.partition("+")
    kind, is_secure = "unix" if base == "unix" else kind, base == "rediss"
    if kind in ("sentinel", "cluster"):
        place, _, query = rest.partition("?")
        authority, _, path = place.partition("/")
        userinfo, _, hosts = authority.rpartition("@")
        parts = [urlsplit(f"//{node}") for node in hosts.split(",")]
        if not all(part.hostname for part in parts):
            raise ValueError("a host has no name")
        path = path.strip("/")
    else:
        whole = urlsplit(url)
        parts, path, query = [whole], unquote(whole.path), whole.query
        userinfo = whole.netloc.rpartition("@")[0]
    options = _given(query, kind, is_secure=is_secure)
    sentinel_ssl = options.get("sentinel_ssl", _flag(is_secure))
    if sentinel_ssl not in ("true", "false"):
        raise _WrongError("sentinel_ssl is true or false (by default as the scheme says)")
    username, _, password = userinfo.partition(":")
    for name, text in (("username", username), ("password", password)):
        if text:
            options[name] = unquote(text)
    return _Parts(
        kind=kind,
        is_secure=is_secure,
        sentinels_are_secure=kind == "sentinel" and sentinel_ssl == "true",
        nodes=[(unquote(part.hostname or ""), part.port) for part in parts],
        path=path,
        db=database_of(url),
        options=options,
    )


def _given(query: str, kind: str, *, is_secure: bool) -> dict[str, str]:
    """The options of a url. Raises _WrongError for one that nobody reads."""
    elsewhere = {"": ("host", "port"), "unix": ("path",)}.get(kind, ())
    given = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
    of_sentinels = _OF_SENTINELS if kind == "sentinel" else ()
    secure = _OF_TLS if is_secure or (of_sentinels and given.get("sentinel_ssl") == "true") else ()
    known = (*_OPTIONS, *elsewhere, *secure, *of_sentinels, *_NEEDLESS)
    for name in given:
        if name in known:
            continue
        if "@" in query or not re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,39}", name):
            raise ValueError("what looks like an option may be a piece of a password")
        if name in _OF_TLS:
            remedy = "remove it" if kind == "unix" else f"write rediss{'+' if kind else ''}{kind}://"
            raise _WrongError(f"{name} is an option of TLS, which this url does not speak; {remedy}")
        if name in _OF_SENTINELS:
            raise _WrongError(f"{name} is an option of redis+sentinel:// only; remove it")
        raise _WrongError(f"it has no option {name!r}; {nearest(name, known)}")
    return {name: text for name, text in given.items() if text}


def _maker(parts: _Parts, timeout_s: float) -> Callable[[], Connections | Cluster]:
    tls = _tls(parts) if parts.is_secure or parts.sentinels_are_secure else None
    server = _server(parts, timeout_s, tls)
    if parts.kind in ("", "unix"):
        return server.connections
    if parts.kind == "cluster":
        if parts.db or parts.path.strip("0"):
            raise _WrongError("a cluster has no database numbers")
        from quota.ledger import redis_cluster

        seeds = [server._replace(host=host, port=port or 6379) for host, port in parts.nodes]
        return partial(redis_cluster.Cluster, seeds)
    from quota.ledger.redis_sentinel import SENTINEL_TIMEOUT_S, Sentinels

    service = parts.path.partition("/")[0]
    if not service:
        secure = "s" if parts.is_secure else ""
        raise _WrongError(f"name the service too: redis{secure}+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB")
    sentinels = [
        Server(
            SENTINEL_TIMEOUT_S,
            SENTINEL_TIMEOUT_S,
            host=host,
            port=port or 26379,
            username=parts.options.get("sentinel_username", ""),
            password=parts.options.get("sentinel_password", ""),
            secured=_secured(parts, tls, of_sentinels=True),
            explain=_why(parts.remedy(of_sentinels=True)),
        )
        for host, port in parts.nodes
    ]
    return Sentinels(sentinels, service, server).connections


def _server(parts: _Parts, timeout_s: float, tls: Tls | None) -> Server:
    """The server that a url names, or what is the same for all the servers that it may mean."""
    given = parts.options
    if given.get("protocol", "2") not in ("2", "3") or not all(
        given.get(name, "0").isdecimal() for name in ("health_check_interval", "max_connections")
    ):
        raise ValueError("an option is none")
    answer_s, connect_s = (float(given.get(name, timeout_s)) for name in _TIMEOUTS)
    if not (0 < answer_s <= _LONGEST_S and 0 < connect_s <= _LONGEST_S):
        raise ValueError("no time to wait")
    host, port = parts.nodes[0]
    return Server(
        answer_s,
        connect_s,
        host=host or given.get("host", "localhost"),
        port=port or int(given.get("port", "6379")),
        path=parts.path or given.get("path", "") if parts.kind == "unix" else "",
        db=parts.db,
        username=given.get("username", ""),
        password=given.get("password", ""),
        client_name=given.get("client_name", ""),
        keepalive=given.get("socket_keepalive", "0").upper() not in FALSE,
        secured=_secured(parts, tls),
        explain=None if parts.kind == "unix" else _why(parts.remedy()),
    )


def _tls(parts: _Parts) -> Tls:
    from quota.ledger.redis_tls import Tls

    given = parts.options
    if given.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise _WrongError("ssl_cert_reqs is required (by default) or none")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise _WrongError("ssl_keyfile has no effect without ssl_certfile; name the certificate too")
    tls = Tls(
        ca_certs=given.get("ssl_ca_certs", ""),
        certfile=given.get("ssl_certfile", ""),
        keyfile=given.get("ssl_keyfile", ""),
        key_password=given.get("ssl_password", ""),
        verify=given.get("ssl_cert_reqs", "required") != "none",
        check_hostname=given.get("ssl_check_hostname", "1").upper() not in FALSE,
    )
    tls.context()
    return tls


def _secured(parts: _Parts, tls: Tls | None, *, of_sentinels: bool = False) -> Callable[[Socket, Server], Line] | None:
    if tls is None or not (parts.sentinels_are_secure if of_sentinels else parts.is_secure):
        return None
    return tls._replace(remedy=parts.remedy(of_sentinels=of_sentinels)).line


def _why(remedy: str) -> Why:
    def why(server: Server, error: Failed) -> Failed:
        from quota.ledger.redis_tls import why_plain, why_secured

        return why_plain(server, error, remedy) if server.secured is None else why_secured(server, error)

    return why


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _databases(url: str) -> tuple[str, str]:
    """The database in a url's path, and the one in its option `db`, which wins; "" for none."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("#")[0].partition("?")
    path = place.partition("/")[2].strip("/")
    if scheme.endswith("+sentinel"):
        path = path.partition("/")[2]
    elif scheme == "unix" or scheme.endswith("+cluster"):  # a socket's path; a cluster's url has none
        path = ""
    return path, parse_qs(query).get("db", [""])[0]


def database_of(url: str) -> int:
    """The number of its database."""
    in_path, option = _databases(url)
    return int(option or in_path or 0)


def _is_database(text: str) -> bool:
    return not text or (text.isascii() and text.isdigit() and len(text) <= 9)


def label_of(url: str) -> str:
    """The url with the database it means, without its secrets and its other options."""
    shown, db = _without_secrets(url), _databases(url)[1]
    scheme, _, place = shown.partition("://")
    if not db or place == "..." or not _is_database(db):
        return shown
    if scheme == "unix":
        return f"{shown}?db={db}"
    named = place.split("/")[: 2 if scheme.endswith("+sentinel") else 1]
    return f"{scheme}://{'/'.join([*named, db])}"


def user_of(url: str) -> str:
    """As whom a url logs in. Where its one word before the @ is a password by mistake, this is that word."""
    place, _, query = url.partition("://")[2].partition("?")
    named = unquote(place.rpartition("@")[0].partition(":")[0])
    return named or parse_qs(query).get("username", ["default"])[0]


def sentinels_user_of(url: str) -> str:
    """As whom a url logs in to its sentinels; "" where it names nobody."""
    return parse_qs(url.partition("?")[2]).get("sentinel_username", [""])[0]


def _without_secrets(url: str) -> str:
    """The url up to its host and path: no user, no password, no options.

    Where a password holds unescaped separators nobody can say where it ends: then the whole place is left out.
    """
    scheme, slashes, rest = url.partition("://")
    if not slashes:  # nobody can say what its parts are
        return f"{url.partition(':')[0]}:..."
    userinfo, at, place = rest.rpartition("@")
    if at and re.search(r"[/?#]", userinfo):
        return f"{scheme}://..."
    return f"{scheme}://{re.split('[?#]', place)[0]}"
