"""A cluster of servers, through redis-py's client, which knows which node has a key and follows where keys move.

What is packed already is asked on connections of ours. This module imports redis-py: that alone takes longer than all
of `quota charge` without it.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ClusterError,
    InvalidResponse,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from quota.ledger.redis_errors import ErrorReply, Failed, Lost, NoAnswer, NotRedis, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quota.ledger.redis_connection import Connections, Server
    from quota.ledger.redis_tls import Tls

FAILED = (RedisError, RedisClusterException)
"""Everything that redis-py raises; the second does not derive from the first."""


class Cluster:
    """redis-py's client of a cluster, with our errors. It connects when it is made, to any of these nodes."""

    def __init__(self, nodes: Sequence[Server], tls: Tls | None) -> None:
        self._nodes = nodes
        self._connections: dict[str, Connections] = {}  # by node
        node = nodes[0]
        options: dict[str, Any] = {
            "username": node.username or None,
            "password": node.password or None,
            "client_name": node.client_name or None,
            "socket_timeout": node.timeout_s,
            "socket_connect_timeout": node.connect_timeout_s,
            "socket_keepalive": node.keepalive,
            "protocol": 2,
            "decode_responses": True,
            "encoding_errors": "replace",
            "retry": Retry(NoBackoff(), 0),  # redis-py's own retries would charge the same call twice
        }
        if tls is not None:
            options |= {
                "ssl": True,
                "ssl_ca_certs": tls.ca_certs or None,
                "ssl_certfile": tls.certfile or None,
                "ssl_keyfile": tls.keyfile or None,
                "ssl_password": tls.key_password or None,
                "ssl_cert_reqs": "required" if tls.verify else "none",
                "ssl_check_hostname": tls.check_hostname,
            }
        try:
            startup = [ClusterNode(one.host, one.port) for one in nodes]
            self._client: Any = RedisCluster(startup_nodes=startup, **options)
        except FAILED as error:
            raise self._exact(error, always=True) from error

    def execute_command(self, *command: str | bytes) -> Any:
        try:
            return self._client.execute_command(*command)
        except FAILED as error:
            raise self._exact(error) from error

    def ask_owner(self, key: str, words: bytes) -> Any:
        """The reply to a packed command of the node that had this key when we last heard of it. If it has it no more,
        it answers MOVED or ASK, and has done nothing: then `execute_command` finds out who has it."""
        try:
            node = self._client.nodes_manager.get_node_from_slot(key_slot(key.encode()))
        except FAILED as error:
            raise self._exact(error) from error
        connections = self._connections.get(node.name)
        if connections is None:
            server = self._nodes[0]._replace(host=node.host, port=node.port)
            connections = self._connections[node.name] = server.connections()
        return connections.ask(words)

    def scan(self, pattern: str) -> Iterator[str]:
        """The keys that match, of all nodes."""
        try:
            yield from self._client.scan_iter(match=pattern, count=1_000)
        except FAILED as error:
            raise self._exact(error) from error

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()
        self._client.close()

    def _exact(self, error: Exception, *, always: bool = False) -> Failed:
        """What is wrong. redis-py does not say why a node cannot be used, so the first that answers is asked by us."""
        failed = translated(error)
        if not isinstance(failed, Lost) or isinstance(failed, NoAnswer) or not (always or _is_of_tls(error)):
            return failed
        known = [] if always else [(one.host, one.port) for one in self._client.get_nodes()]
        for server in (*self._nodes, *(self._nodes[0]._replace(host=host, port=port) for host, port in known)):
            connections = server.connections()
            try:
                connections.execute_command("PING")
            except ErrorReply as found:
                if found.asks_for_password:
                    return found
            except NoAnswer:
                return failed
            except Lost:
                continue
            except Failed as found:
                return found
            finally:
                connections.close()
        return failed


def _is_of_tls(error: BaseException | None) -> bool:
    """Whether redis-py raised this because of TLS."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


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
    SlotNotCoveredError: "CLUSTERDOWN",
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
    if type(error) is ClusterError:  # it was sent from node to node for too long
        return ErrorReply(said, "TRYAGAIN")
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
