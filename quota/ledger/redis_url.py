"""What a url of Redis names: a client of the server, and a label for people.

    client_maker    checks a url, and returns a function that makes its client
    label_of        the url without its secrets, with the database that it means
    user_of         as whom it logs in
    database_of     in which database

The schemes are `redis`, `rediss`, `unix`, `redis+sentinel` and `redis+cluster`. redis-py is imported only for those
that need it: that alone takes longer than all of `quota charge` without it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from quota.errors import ConfigError
from quota.ledger.redis_connection import Connections, Server

if TYPE_CHECKING:
    from collections.abc import Callable

    from quota.ledger.redis_driver import Cluster

_TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
_NEEDLESS = ("health_check_interval", "max_connections", "retry_on_timeout", "retry_on_error")
"""What redis-py may be told, and a connection of ours has no need of."""
_OPTIONS = frozenset(
    (
        *("db", "username", "password", "client_name", "protocol", "host", "port", "path", "socket_keepalive"),
        *_TIMEOUTS,
        *_NEEDLESS,
    )
)
"""The options of redis-py that do not need redis-py. A url with any other is left to it."""

_FALSE = ("0", "F", "FALSE", "N", "NO")


def client_maker(
    url: str, label: str, timeout_s: float, what: str = "ledger url"
) -> Callable[[], Connections | Cluster]:
    """A function that makes the client. The url is checked now; the server is contacted at the first command.

    Raises ConfigError, with `what` and `label` for the url.
    """
    databases = _databases(url)
    if not all(map(_is_database, databases)):  # redis-py would take database 0
        raise ConfigError(f"{what} {label}: its database is no number; end it in /0, or in ?db=0 after a unix socket")
    try:
        scheme, _, rest = url.partition("://")
        server = _server(url, timeout_s) if scheme in ("redis", "unix") else None
        if server is not None:
            return lambda: Connections(server.connect, server.timeout_s)
        from quota.ledger import redis_driver

        if scheme == "redis+cluster":
            nodes, path, options = redis_driver.several(rest, 6379, timeout_s)
            if options.pop("db", path.strip("0")):
                raise ConfigError(f"{what} {label}: a cluster has no database numbers")
            return redis_driver.cluster_maker(nodes, options)
        if scheme == "redis+sentinel":
            nodes, path, options = redis_driver.several(rest, 26379, timeout_s)
            service = path.partition("/")[0]
            if not service:
                raise ConfigError(
                    f"{what} {label}: name the service too: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB"
                )
            options["db"] = database_of(url)
            return redis_driver.sentinel_maker(nodes, service, options)
        return redis_driver.server_maker(url, timeout_s)
    except (ValueError, TypeError):
        # The parser's message quotes what it took for a port or an option, and that may be a piece of a password.
        raise ConfigError(
            f"{what} {label}: one of its parts cannot be read; write redis://HOST:PORT/DB, a password as "
            "USER:PASSWORD@ before HOST and with %XX for its special characters"
        ) from None


def _server(url: str, timeout_s: float) -> Server | None:
    """The server that a url names, as redis-py reads it; None where it has options that only redis-py knows."""
    parts = urlsplit(url)
    given = {name: unquote(values[0]) for name, values in parse_qs(parts.query).items()}
    is_path = parts.scheme == "unix"
    elsewhere = ("host", "port", "socket_keepalive") if is_path else ("path",)
    if not given.keys() <= _OPTIONS or any(name in given for name in elsewhere):
        return None
    if given.get("protocol", "2") not in ("2", "3") or not all(
        given.get(name, "0").isdecimal() for name in ("health_check_interval", "max_connections")
    ):
        raise ValueError("an option is none")
    answer_s, connect_s = (float(given.get(name, timeout_s)) for name in _TIMEOUTS)
    if not (0 < answer_s <= _LONGEST_S and 0 < connect_s <= _LONGEST_S):
        raise ValueError("no time to wait")
    keepalive = given.get("socket_keepalive", "0")
    return Server(
        answer_s,
        connect_s,
        host=unquote(parts.hostname or given.get("host", "localhost")),
        port=parts.port or int(given.get("port", "6379")),
        path=unquote(parts.path) if is_path else "",
        db=int(given.get("db") or ("" if is_path else unquote(parts.path).replace("/", "")) or 0),
        username=unquote(parts.username or "") or given.get("username", ""),
        password=unquote(parts.password or "") or given.get("password", ""),
        client_name=given.get("client_name", ""),
        keepalive=keepalive.upper() not in _FALSE,
    )


_LONGEST_S = 1e6


def _databases(url: str) -> tuple[str, str]:
    """The database in a url's path, and the one in its option `db`, which wins; "" for none."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("#")[0].partition("?")
    path = place.partition("/")[2].strip("/")
    if scheme == "redis+sentinel":
        path = path.partition("/")[2]
    elif scheme in ("unix", "redis+cluster"):  # a socket's path; a cluster's url has none
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
    named = place.split("/")[: 2 if scheme == "redis+sentinel" else 1]
    return f"{scheme}://{'/'.join([*named, db])}"


def user_of(url: str) -> str:
    """As whom a url logs in. Where its one word before the @ is a password by mistake, this is that word."""
    place, _, query = url.partition("://")[2].partition("?")
    named = unquote(place.rpartition("@")[0].partition(":")[0])
    return named or parse_qs(query).get("username", ["default"])[0]


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
