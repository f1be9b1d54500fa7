"""Servers behind TLS, sentinels and clusters, which redis-py reaches. This module imports it.

redis-py finds the server, and makes and introduces the connection. What is said on it afterwards is said as on every
other one: see `quota.ledger.redis_connection`. A cluster is asked through redis-py's own client.
"""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel

from quota.ledger.redis_connection import Connections, Line
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, NoAnswer, NotRedis, error_of
from quota.ledger.resp import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from redis.connection import AbstractConnection

T = TypeVar("T")

SENTINEL_TIMEOUT_S = 0.1
"""How long a sentinel's answer may take: several may be dead before a living one is found."""

FAILED = (RedisError, RedisClusterException)
"""Everything that redis-py raises; the second does not derive from the first."""


# -- makers of clients: they raise ValueError and TypeError for a url that cannot be read ------------------------------


def server_maker(url: str, timeout_s: float) -> Callable[[], Connections]:
    options = {**_options(parse_url(url), timeout_s), "command_packer": Packer()}
    options.pop("max_connections", None)  # there are as many connections as threads that call at once
    make = partial(options.pop("connection_class", redis.Connection), **options)
    _check(make)  # raises for an unknown option
    return lambda: Connections(_line_maker(make), options["socket_timeout"])


def sentinel_maker(
    nodes: Sequence[tuple[str, int]], service: str, options: dict[str, Any]
) -> Callable[[], Connections]:
    sentinel = _check(partial(Sentinel, nodes, sentinel_kwargs=_options({}, SENTINEL_TIMEOUT_S), **options))
    # redis-py's client is not used, only its pool, which knows how to make a connection to the primary.
    make = _check(partial(sentinel.master_for, service, command_packer=Packer())).connection_pool.make_connection
    return lambda: Connections(_line_maker(make), options["socket_timeout"], may_move=True)


def cluster_maker(nodes: Sequence[tuple[str, int]], options: dict[str, Any]) -> Callable[[], Cluster]:
    return lambda: Cluster(nodes, options)


def several(rest: str, default_port: int, timeout_s: float) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
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


def _options(given: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The url's options over our timeouts, without redis-py's own retries: these would charge the same call twice."""
    options = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, **given, "protocol": 2}
    options.pop("retry_on_error", None)
    options.pop("retry_on_timeout", None)
    return {**options, "decode_responses": True, "encoding_errors": "replace", "retry": Retry(NoBackoff(), 0)}


def _check(make: Callable[[], T]) -> T:
    try:
        return make()
    except RedisError:
        raise ValueError("an option that redis-py does not take") from None


class Packer:
    """Packs the commands that redis-py itself sends while it connects, for example SELECT with the database's
    number."""

    def pack(self, *command: str | bytes | float) -> list[bytes]:
        first, *rest = command
        # redis-py may give a command as two words in one.
        words = first.split() if isinstance(first, (str, bytes)) else [str(first)]
        return [pack((*words, *(word if isinstance(word, (str, bytes)) else str(word) for word in rest)))]


# -- connections that redis-py makes -----------------------------------------------------------------------------------


class DriverLine(Line):
    """A connection that redis-py made."""

    __slots__ = ("_connection",)

    def __init__(self, connection: AbstractConnection) -> None:
        assert connection._sock is not None  # noqa: S101  # it is connected
        super().__init__(connection._sock)
        self._connection: AbstractConnection = connection

    def close(self) -> None:
        self._connection.disconnect()


class TlsLine(DriverLine):
    """One with TLS, where something may be readable that is no part of a reply."""

    __slots__ = ()

    def send(self, words: bytes, within_s: float) -> None:
        connected: Any = self._socket
        try:
            connected.settimeout(within_s)
            connected.sendall(words)
            connected.settimeout(0)
        except TimeoutError as error:
            if str(error) != "The write operation timed out":  # a signal handler's
                raise
            raise NoAnswer("not all could be sent") from error
        except OSError as error:
            self._send_failed(error)

    def send_some(self, words: bytes | memoryview) -> int:
        try:
            return super().send_some(words)
        except Lost as error:
            if isinstance(error.__cause__, (ssl.SSLWantWriteError, ssl.SSLWantReadError)):
                return 0
            raise

    def _receive(self) -> bytes:
        try:
            return super()._receive()
        except Lost as error:
            if isinstance(error.__cause__, ssl.SSLWantReadError):
                return b""
            raise


def _line_maker(make: Callable[[], AbstractConnection]) -> Callable[[], Line]:
    """Makes our connections of redis-py's, which `make` makes."""

    def connect() -> Line:
        connection = make()
        try:
            connection.connect()
            secure = isinstance(connection._sock, ssl.SSLSocket)
            return TlsLine(connection) if secure else DriverLine(connection)
        except FAILED as error:
            connection.disconnect()
            raise translated(error) from error
        except BaseException:
            connection.disconnect()
            raise

    return connect


# -- clusters ----------------------------------------------------------------------------------------------------------


class Cluster:
    """redis-py's client of a cluster, with our errors. It connects when it is made.

    It knows which node has a key, and follows where keys move. What is packed already is asked on connections of ours.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]], options: dict[str, Any]) -> None:
        try:
            client: Any = RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in nodes], **options)
        except FAILED as error:
            raise translated(error) from error
        self._client = client
        self._timeout_s = options["socket_timeout"]
        self._connections: dict[str, Connections] = {}  # by node

    def execute_command(self, *command: str | bytes) -> Any:
        try:
            return self._client.execute_command(*command)
        except FAILED as error:
            raise translated(error) from error

    def ask_owner(self, key: str, words: bytes) -> Any:
        """The reply to a packed command of the node that had this key when we last heard of it. If it has it no more,
        it answers MOVED or ASK, and has done nothing: then `execute_command` finds out who has it."""
        try:
            node = self._client.nodes_manager.get_node_from_slot(key_slot(key.encode()))
            connections = self._connections.get(node.name)
            if connections is None:
                make = self._client.get_redis_connection(node).connection_pool.make_connection
                connections = self._connections[node.name] = Connections(_line_maker(make), self._timeout_s)
        except FAILED as error:
            raise translated(error) from error
        return connections.ask(words)

    def scan(self, pattern: str) -> Iterator[str]:
        """The keys that match, of all nodes."""
        try:
            yield from self._client.scan_iter(match=pattern, count=1_000)
        except FAILED as error:
            raise translated(error) from error

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()
        self._client.close()


# -- errors ------------------------------------------------------------------------------------------------------------

_CODES: dict[type[Exception], str] = {
    BusyLoadingError: "LOADING",
    NoScriptError: "NOSCRIPT",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    NoPermissionError: "NOPERM",
    TryAgainError: "TRYAGAIN",
    ClusterDownError: "CLUSTERDOWN",
    MasterDownError: "MASTERDOWN",
    AuthenticationError: "WRONGPASS",
    AuthorizationError: "WRONGPASS",
}
"""redis-py removes these words, with which the server's errors begin."""


def _refusal_behind(error: BaseException | None) -> NoPermissionError | None:
    """redis-py says of a user who may not ask for a cluster's slots that this is no cluster."""
    while error is not None and not isinstance(error, NoPermissionError):
        error = error.__cause__ or error.__context__
    return error


def translated(error: Exception) -> Failed:
    """What redis-py raised, as this package calls it."""
    if isinstance(error, RedisClusterException):
        error = _refusal_behind(error) or error
    said = str(error)
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return ErrorReply(said, code)
    if isinstance(error, InvalidResponse):
        return NotRedis(said)
    if isinstance(error, RedisTimeoutError):
        return NoAnswer(said)
    if isinstance(error, (RedisConnectionError, RedisClusterException)):
        return Lost(said)
    return error_of(said) if isinstance(error, ResponseError) else Failed(said)
