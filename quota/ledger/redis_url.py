"""What a url of Redis names: a client of the driver, and a label for people.

    client_maker    checks a url, and returns a function that makes its client
    label_of        the url without its secrets, with the database that it means

The schemes are `redis`, `rediss`, `unix`, `redis+sentinel` and `redis+cluster`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from quota.errors import ConfigError
from quota.ledger.redis_connection import Connections, Packer

if TYPE_CHECKING:
    from collections.abc import Callable

SENTINEL_TIMEOUT_S = 0.1
"""How long a sentinel's answer may take: several may be dead before a living one is found."""

_DATABASE = re.compile(r"[0-9]{0,9}")


def client_maker(
    url: str, label: str, timeout_s: float, what: str = "ledger url"
) -> Callable[[], redis.Redis | Connections]:
    """A function that makes the client. The url is checked now; the server is contacted at the first command.

    Raises ConfigError, with `what` and `label` for the url.
    """
    if not all(map(_DATABASE.fullmatch, _databases(url))):  # the driver would take database 0
        raise ConfigError(f"{what} {label}: its database is no number; end it in /0, or in ?db=0 after a unix socket")
    try:
        scheme, _, rest = url.partition("://")
        if scheme == "redis+cluster":
            nodes, path, options = _several(rest, 6379, timeout_s)
            if options.pop("db", path.strip("0")):
                raise ConfigError(f"{what} {label}: a cluster has no database numbers")
            return partial(_cluster, nodes, options)
        if scheme == "redis+sentinel":
            nodes, path, options = _several(rest, 26379, timeout_s)
            service = path.partition("/")[0]
            if not service:
                raise ConfigError(
                    f"{what} {label}: name the service too: redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB"
                )
            in_path, option = _databases(url)
            options["db"] = int(option or in_path or 0)
            sentinel = Sentinel(nodes, sentinel_kwargs=_options({}, SENTINEL_TIMEOUT_S), **options)
            # The driver's client is not used, only its pool, which knows how to make a connection to the primary.
            return partial(
                Connections, sentinel.master_for(service, command_packer=Packer()).connection_pool.make_connection
            )
        options = {**_options(parse_url(url), timeout_s), "command_packer": Packer()}
        options.pop("max_connections", None)  # there are as many connections as threads that call at once
        make = partial(options.pop("connection_class", redis.Connection), **options)
        make()  # raises for an unknown option
        return partial(Connections, make)
    except (ValueError, TypeError, RedisError):
        # The parser's message quotes what it took for a port or an option, and that may be a piece of a password.
        raise ConfigError(
            f"{what} {label}: one of its parts cannot be read; write redis://HOST:PORT/DB, a password as "
            "USER:PASSWORD@ before HOST and with %XX for its special characters"
        ) from None


def _options(given: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The url's options over our timeouts, without the driver's own retries: these would charge the same call twice."""
    options = {"protocol": 2, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, **given}
    options.pop("retry_on_error", None)
    options.pop("retry_on_timeout", None)
    return {**options, "decode_responses": True, "encoding_errors": "replace", "retry": Retry(NoBackoff(), 0)}


def _several(rest: str, default_port: int, timeout_s: float) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """The nodes, the path and the options of `[USER:PASSWORD@]HOST:PORT,HOST:PORT/PATH[?OPTIONS]`."""
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    options = _options(parse_url(f"redis://{userinfo}{at}host?{query}"), timeout_s)
    del options["host"]
    parts = [urlsplit(f"//{node}") for node in hosts.split(",")]
    if not all(part.hostname for part in parts):
        raise ValueError("a host has no name")
    return [(str(part.hostname), part.port or default_port) for part in parts], path.strip("/"), options


def _cluster(nodes: list[tuple[str, int]], options: dict[str, Any]) -> redis.Redis:
    cluster: Any = RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in nodes], **options)
    cluster.cluster_error_retry_attempts = 0  # redis-py before 6 keeps its own retries here
    return cluster  # type: ignore[no-any-return]  # the commands used here are the same


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


def label_of(url: str) -> str:
    """The url with the database it means, without its secrets and its other options."""
    shown, db = _without_secrets(url), _databases(url)[1]
    scheme, _, place = shown.partition("://")
    if not db or place == "..." or not _DATABASE.fullmatch(db):
        return shown
    if scheme == "unix":
        return f"{shown}?db={db}"
    named = place.split("/")[: 2 if scheme == "redis+sentinel" else 1]
    return f"{scheme}://{'/'.join([*named, db])}"


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
