"""Connections to Redis. redis-py makes them and talks on them. This module bounds how long a call takes, and tells what
a failure means for a charge.

    Connections    to one server, or to the primary that sentinels name
    Cluster        to the nodes of a cluster: the library finds the node that has a key

A call uses a connection alone until it has read its whole reply. After a timeout, half a reply or an interrupt, the
connection is closed and never used again, so no call can take another call's reply for its own. Nothing is sent twice:
the library's own retries are off. Connecting and replying share the time until the call's end (`elapsed_s`). A reply
that comes in pieces may take longer, if each piece comes in time.

Every word of a command is text or bytes, never a number: hiredis turns a number into text without checking for errors,
and the interpreter crashes if a signal handler raises at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any
from weakref import finalize

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, NodesManager
from redis.crc import key_slot
from redis.exceptions import AskError, InvalidResponse, MovedError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from quota.common.clock import elapsed_s
from quota.common.fork import start_over_in_child
from quota.common.hosts import has_hung_up
from quota.ledger.redis_errors import (
    ErrorReply,
    Failed,
    Lost,
    Misconfigured,
    NoAnswer,
    NotRedis,
    behind_plain,
    behind_secured,
    error_of,
)
from quota.ledger.redis_url import TIMEOUTS, Target

Words = list[bytes]
"""A packed command, in pieces."""

SPARE_S = 0.25
"""A call may take this long beyond the time of two answers. If an answer may take 0.35 s, a call ends within a
second."""

LEAST_S = 0.001
"""The shortest wait: with 0 s a socket would become non-blocking."""

DISCOVERY_S = 0.3
"""How long all sentinels together may take, or all nodes that are asked for the slots. Each has an even share, because
several may be dead before one answers."""

MAX_REDIRECTIONS = 8
"""The most redirections of a command. After that the nodes do not agree, and the call is refused."""

PAUSE_S = 0.05
"""The pause between two tries, while some of a project's keys have moved and others have not."""

KEY_AT: dict[str | bytes, int] = {"EVAL": 3, "EVALSHA": 3}
"""The place of the key in a command, if it is not the first argument."""

_NO_RETRIES = Retry(NoBackoff(), 0)


def left_s(most_s: float, ends_s: float) -> float:
    """How long something may take: at most `most_s`, and not beyond its end (`elapsed_s`)."""
    return max(min(most_s, ends_s - elapsed_s()), LEAST_S)


class Connections:
    """The connections to a server. Safe to use from several threads, from a signal handler, and after a fork.

    There are as many connections as simultaneous calls. It contacts nothing before the first call.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pool = _pool_of(target)
        self._make: Callable[[], redis.Connection] = self._pool.make_connection  # type: ignore[assignment]  # no cache
        self._sentinels: list[redis.Redis] = []
        if isinstance(self._pool, SentinelConnectionPool):
            self._sentinels = self._pool.sentinel_manager.sentinels
        self.timeout_s = target.timeout_s
        self.wall_s = 2 * self.timeout_s + SPARE_S
        """How long a call may take if the caller sets no end."""
        self._idle: list[redis.Connection] = []  # threads share it without a lock, because append and pop are atomic
        self._era = object()  # each `close` makes a new era
        # If nobody closed a reference cycle, Python may close the sockets first; calls at the end of a process need
        # them.
        finalize(self, _disconnect, self._idle).atexit = False
        start_over_in_child(self)

    pack = staticmethod(redis.Connection().pack_command)
    """Packs a command."""

    def execute_command(self, *command: str | bytes, ends_s: float | None = None) -> Any:
        """The server's reply, unchanged. Raises Failed. The call must end at `ends_s` (`elapsed_s`)."""
        return self.ask(self.pack(*command), ends_s)

    def ask(self, words: Words, ends_s: float | None = None, *, asking: bool = False) -> Any:
        """As `execute_command`, for a packed command. `asking`: sends it to a node that is just taking over the
        slot."""
        if asking:
            words = [*self.pack("ASKING"), *words]
        ends_s = elapsed_s() + self.wall_s if ends_s is None else ends_s
        era = self._era
        quiet = self._quiet()
        line = self._connected(ends_s) if quiet is None else quiet
        failure: Failed | None = None
        try:
            line.send_packed_command(words, check_health=False)
            if elapsed_s() + self.timeout_s > ends_s and not line.can_read(left_s(self.timeout_s, ends_s)):
                self.close()
                raise NoAnswer("no answer")
            if asking:
                line.read_response()
            reply = line.read_response()
        except ResponseError as error:  # an answer
            failure = self.failure_of(error, is_new=quiet is None)
        except RedisError as error:
            line.disconnect()
            self.close()  # the other connections may be dead too, and the retry has no time to find out
            raise self.failure_of(error, is_new=quiet is None) from error
        except BaseException:
            line.disconnect()
            raise
        self._idle.append(line)
        if era is not self._era:  # `close` was called meanwhile
            self._let_go()
        if failure is not None:
            raise failure
        return reply

    def _quiet(self) -> redis.Connection | None:
        """A usable idle connection; None if there is none. If one has anything to read, the server closed it or sent an
        unexpected reply; then this closes it.

        hiredis and the system are asked first, because the library uses an exception to learn that there is nothing to
        read. With that alone a decision takes an eighth longer.
        """
        while self._idle:
            try:
                line = self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            hiredis_reader, sock = getattr(line._parser, "_reader", None), line._sock
            may_have_data = hiredis_reader is None or hiredis_reader.has_data()
            if not may_have_data and sock is not None and not has_hung_up(sock):
                return line
            with suppress(RedisError):
                if not line.can_read(0):
                    return line
            line.disconnect()
        return None

    def scan(self, pattern: str) -> Iterator[str]:
        """The matching keys."""
        cursor = "0"
        while True:
            cursor, keys = self.execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
            yield from keys
            if cursor == "0":
                return

    def _connected(self, ends_s: float) -> redis.Connection:
        line = self._make()
        half_s = (ends_s - elapsed_s()) / 2  # it connects, then it authenticates
        line.socket_connect_timeout = left_s(min(self._target.options["socket_connect_timeout"], half_s), ends_s)
        try:
            line.connect()
        except RedisError as error:
            line.disconnect()
            raise self.failure_of(error, is_new=True) from error
        except (LookupError, TypeError, ValueError) as error:  # the library cannot read a sentinel's answer
            line.disconnect()
            raise NotRedis("its answer cannot be read") from error
        except BaseException:
            line.disconnect()
            raise
        return line

    def failure_of(self, error: RedisError, *, is_new: bool) -> Failed:
        """The failure that an error of the library means. On a new connection, its cause may be that only one side
        speaks TLS."""
        failure, target = _failure_of(error), self._target
        if not is_new or not isinstance(failure, Lost):
            return failure
        if isinstance(error, MasterNotFoundError) and target.sentinels is not None:
            return _without_primary(target.sentinels)
        if target.kind == "unix" or isinstance(error.__context__, ConnectionRefusedError):
            return failure
        if isinstance(failure, NoAnswer) and not target.is_secure:
            return failure
        host, port = getattr(self._pool, "master_address", None) or target.nodes[0]
        if not target.is_secure:
            return behind_plain(host, port, target.remedy) or failure
        return behind_secured(error, self._make, host, port, target.options, target.remedy) or failure

    def close(self) -> None:
        """Close all connections; a connection in use closes when its call ends. The next call connects again."""
        self._era = object()
        self._let_go()

    def start_over_in_child(self) -> None:
        # A forked child must not use its parent's connections. Closing its copies leaves the parent's open. The library
        # closes those to sentinels under a lock, which another thread of the parent may have held.
        self._era = object()
        _disconnect(self._idle)

    def _let_go(self) -> None:
        _disconnect(self._idle)
        for sentinel in self._sentinels:
            sentinel.connection_pool.disconnect(inuse_connections=False)  # another thread may be asking


def _disconnect(idle: list[redis.Connection]) -> None:
    with suppress(IndexError):  # none is left, or another thread was quicker
        while True:
            idle.pop().disconnect()


def _failure_of(error: RedisError) -> Failed:
    cause = error.__context__
    if isinstance(cause, TimeoutError) and str(cause) == "Timeout reading from socket":  # by the library's parser
        cause = cause.__context__
    if isinstance(cause, OSError) and cause.errno is None and not str(cause).endswith("timed out"):
        raise cause  # a signal handler's TimeoutError is an OSError too, but not the connection's
    message, code = str(error), getattr(error, "status_code", None)
    if isinstance(error, InvalidResponse):
        return NotRedis(message)
    if code is not None:  # the server's own error, without its first word: the library has cut that off
        return error_of(f"{code} {message}")
    if isinstance(error, ResponseError):
        return error_of(message)
    return NoAnswer(message) if isinstance(error, redis.TimeoutError) else Lost(message)


def client_of(target: Target) -> Connections | Cluster:
    """The client for a url. Contacts nothing."""
    return Cluster(target) if target.kind == "cluster" else Connections(target)


# -- a server, or the primary of sentinels -----------------------------------------------------------------------------


class _UnixConnection(redis.UnixDomainSocketConnection):
    """If connecting takes too long, the library reads the port for its message. Without this attribute, its
    AttributeError would hide the timeout, and a signal handler's TimeoutError too."""

    port = None


def _pool_of(target: Target) -> redis.ConnectionPool:
    """The library's pool for a server. It only makes connections."""
    options = {**target.options, "retry": _NO_RETRIES}
    if target.kind == "unix":
        return redis.ConnectionPool(_UnixConnection, path=target.path, **options)
    if target.sentinels is not None:
        each_s = DISCOVERY_S / len(target.nodes)
        of_sentinels = {**target.sentinels.options, **dict.fromkeys(TIMEOUTS, each_s), "retry": _NO_RETRIES}
        of_sentinels["ssl"] = target.sentinels.is_secure
        sentinels = Sentinel(target.nodes, sentinel_kwargs=of_sentinels)
        return SentinelConnectionPool(target.service, sentinels, ssl=target.is_secure, **options)
    (host, port), *_ = target.nodes
    kind = redis.SSLConnection if target.is_secure else redis.Connection
    return redis.ConnectionPool(kind, host=host, port=port, **options)


def _without_primary(sentinels: Target) -> Failed:
    """Why the sentinels name no primary. The library asks them in turn, but does not report their answers."""
    failure: Failed = NoAnswer("no sentinel answers")
    ends_s = elapsed_s() + DISCOVERY_S
    for host, port in sentinels.nodes:
        if elapsed_s() > ends_s:
            break
        name = f"sentinel {host}:{port}"
        with closing(Connections(sentinels.at(host, port))) as sentinel:
            try:
                services = sentinel.execute_command("SENTINEL", "MASTERS", ends_s=ends_s)
            except Misconfigured as error:
                return Misconfigured(f"{name}: {error}")
            except ErrorReply as error:
                if error.code == "NOAUTH":
                    return Misconfigured(f"{name} wants a password; add sentinel_password")
                if error.asks_for_password:
                    remedy = "correct sentinel_username and sentinel_password"
                    return Misconfigured(f"{name} refused the password; {remedy}")
                return error
            except Failed as error:
                failure = error
                continue
        if isinstance(services, list) and not any(sentinels.service in service for service in services):
            remedy = "write the name after `sentinel monitor`"
            return Misconfigured(f"{name} knows no service {sentinels.service!r}; {remedy}")
        return Lost("its sentinels see no primary")
    return failure


# -- a cluster ---------------------------------------------------------------------------------------------------------


class Cluster:
    """Connects at the first command, to any of the nodes that the url names. Safe to use as Connections are.

    The library keeps the map of slots and nodes. It reads the map again if a node is lost, or says that a slot has
    moved (MOVED) or is moving (ASK). In both cases that node has done nothing, so the command goes to the node that it
    names. A command whose answer was lost is not sent again.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.timeout_s = target.timeout_s
        self.wall_s = 2 * self.timeout_s + SPARE_S
        self._nodes: NodesManager | None = None
        self._connections: dict[tuple[str, int], Connections] = {}

    def execute_command(self, *command: str | bytes, ends_s: float | None = None) -> Any:
        """The reply of the node that has the command's key, unchanged. Raises Failed. TIME has no key: its reply is the
        earliest clock of the nodes that answer."""
        ends_s = elapsed_s() + self.wall_s if ends_s is None else ends_s
        if command[0] == "TIME":
            return self._earliest(ends_s)
        key = command[KEY_AT.get(command[0], 1)]
        words, slot = Connections.pack(*command), key_slot(key.encode() if isinstance(key, str) else key)
        connections, asking = self._owner(slot), False
        for _ in range(MAX_REDIRECTIONS):
            try:
                return connections.ask(words, ends_s, asking=asking)
            except Lost:
                self._nodes = None  # the next call reads the map again
                raise
            except ErrorReply as error:
                if error.code == "TRYAGAIN" and elapsed_s() + PAUSE_S + self.timeout_s < ends_s:
                    time.sleep(PAUSE_S)
                    connections, asking = self._owner(slot), False
                    continue
                if error.code not in ("MOVED", "ASK"):
                    raise
                asking = error.code == "ASK"
                connections = self._pointed_to(error, slot)
        self._nodes = None
        raise ErrorReply("its nodes do not agree who has this slot", "TRYAGAIN")

    def scan(self, pattern: str) -> Iterator[str]:
        """The matching keys of all nodes."""
        for connections in self._primaries():
            yield from connections.scan(pattern)

    def close(self) -> None:
        """Close all connections. The next command connects again."""
        for connections in list(self._connections.values()):
            connections.close()

    def _discovered_nodes(self) -> NodesManager:
        nodes = self._nodes
        if nodes is None:
            # First the nodes in the url, then all nodes met since: the former may be gone for good.
            seeds = [ClusterNode(*place) for place in dict.fromkeys([*self._target.nodes, *self._connections])]
            options = {**self._target.options, "ssl": self._target.is_secure}
            options |= dict.fromkeys(TIMEOUTS, DISCOVERY_S / len(seeds))
            del options["db"]
            try:
                nodes = self._nodes = NodesManager(seeds, **options)
            except (RedisClusterException, LookupError, TypeError, ValueError) as error:
                # The library does not report the reason: ask the first node for it.
                self._at(*self._target.nodes[0]).execute_command("CLUSTER", "SLOTS")
                raise Lost(str(error)) from error
            places = {(str(node.host), int(node.port)) for node in nodes.nodes_cache.values()}
            for place in self._connections.keys() - places:  # otherwise it would ask every node that ever existed
                self._connections.pop(place).close()
        return nodes

    def _primaries(self) -> list[Connections]:
        nodes = self._discovered_nodes().get_nodes_by_server_type("primary")
        return [self._at(str(node.host), int(node.port)) for node in nodes]

    def _earliest(self, ends_s: float) -> list[str]:
        times, failure = [], Lost("no node answers")
        for connections in self._primaries():
            try:
                times.append(connections.execute_command("TIME", ends_s=ends_s))
            except Lost as error:
                self._nodes, failure = None, error
        if not times:
            raise failure
        return min(times, key=lambda time: [*map(int, time)])

    def _owner(self, slot: int) -> Connections:
        try:
            node = self._discovered_nodes().get_node_from_slot(slot)
        except RedisClusterException as error:
            self._nodes = None
            raise ErrorReply("no node has this slot", "CLUSTERDOWN") from error
        return self._at(str(node.host), int(node.port))

    def _pointed_to(self, error: ErrorReply, slot: int) -> Connections:
        """The node in `MOVED SLOT HOST:PORT`, or in ASK."""
        try:
            owner = (MovedError if error.code == "MOVED" else AskError)(str(error).partition(" ")[2])
        except (ValueError, IndexError):
            raise error from None
        if error.code == "MOVED":
            if not owner.host:
                self._nodes = None
                return self._owner(slot)
            self._discovered_nodes().move_slot(owner)
        return self._at(str(owner.host), int(owner.port))

    def _at(self, host: str, port: int) -> Connections:
        connections = self._connections.get((host, port))
        if connections is None:
            node = Connections(self._target.at(host, port))
            connections = self._connections.setdefault((host, port), node)
        return connections
