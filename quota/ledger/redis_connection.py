"""Connections to one Redis server, made by redis-py and used without its pool.

A decision is one short round trip. redis-py's client and pool take nearly as long again: locks, events, callbacks for
each reply, a read that must time out. redis-py's own connection classes still connect, so passwords, TLS, databases and
client names stay their business.

There are as many connections as calls under way at once. A call has a connection to itself until it has read its reply
to the end. After anything else (a timeout, half a reply, an interrupt) the connection is closed and never used again,
so no call can take another call's reply for its own. Nothing is sent twice.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

import hiredis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from quota.common.fork import start_over_in_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.connection import AbstractConnection

    # A connection, and a function that waits so many ms, and tells whether there is something to read from it.
    Line = tuple[AbstractConnection, Callable[[float], object]]


_pack: Callable[[tuple[str | bytes, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub is wrong
"""Packs a command as the server reads it. Every word must be text or bytes, never a number.

hiredis (3.5 and before) turns a number into text itself, and does not check whether that failed. If a signal handler
raises just there, the interpreter crashes.
"""


class Connections:
    """The part of redis-py's client that a ledger uses. Safe to use from several threads and after a fork."""

    def __init__(self, make: Callable[[], AbstractConnection]) -> None:
        self._make = make
        self._idle: list[Line] = []  # threads share it without a lock: append and pop are atomic
        start_over_in_child(self)

    def execute_command(self, *command: str | bytes, within_s: float | None = None) -> Any:
        """The server's reply, unchanged. Raises redis-py's own errors.

        With `within_s` the reply may take no longer, and no new connection is made for it.
        """
        words = _pack(command)
        idle = self._idle
        line = _pop(idle)
        if line is None:
            if within_s is not None:
                raise RedisTimeoutError("no connection is open")
            line = self._connect()
        connection = line[0]
        answered = False
        try:
            connection.send_packed_command([words])
            if within_s is None or connection.can_read(timeout=within_s):
                reply = connection.read_response()
            else:
                raise RedisTimeoutError("no answer")
            answered = True
        except ResponseError:  # an answer too
            answered = True
            raise
        finally:
            self._end(line, idle, answered=answered)
        return reply

    def _end(self, line: Line, idle: list[Line], *, answered: bool) -> None:
        if answered:
            idle.append(line)
            if idle is not self._idle:  # `close` was called meanwhile
                _close(idle)
        else:
            line[0].disconnect()
            _close(idle)  # the others may be dead too, and the retry has no time to find out

    def begin(self, *command: str | bytes) -> Call | None:
        """Send a command on an idle connection, so that its reply can be waited for in pieces. None where none is idle:
        nothing was sent then; `connect` makes one."""
        words = _pack(command)
        idle = self._idle
        line = _pop(idle)
        if line is None:
            return None
        call = Call(self, line, idle)
        call.send(words)
        return call

    def connect(self) -> None:
        """Make an idle connection."""
        self._idle.append(self._connect())

    def close(self) -> None:
        """Close all connections; those in use are closed when their call ends. The next call connects again."""
        idle, self._idle = self._idle, []
        _close(idle)

    def start_over_in_child(self) -> None:
        """A forked child must not talk on its parent's connections. Closing them here leaves the parent's alone."""
        self.close()

    def _connect(self) -> Line:
        connection = self._make()
        try:
            connection.connect()
            return connection, _watch(connection._sock)
        except BaseException:
            connection.disconnect()
            raise


class Call:
    """A command under way, with a connection to itself. One thread at a time waits for its reply, to the end."""

    __slots__ = ("_connections", "_idle", "_line")

    def __init__(self, connections: Connections, line: Line, idle: list[Line]) -> None:
        self._connections = connections
        self._line = line
        self._idle = idle

    def send(self, words: bytes) -> None:
        sent = False
        try:
            self._line[0].send_packed_command([words])
            sent = True
        finally:
            if not sent:
                self._connections._end(self._line, self._idle, answered=False)

    def is_answered(self, within_s: float) -> bool:
        """Whether the reply has begun to come."""
        return bool(self._line[1](within_s * 1000))

    def reply(self, within_s: float) -> Any:
        """The server's reply, unchanged; the call has ended then, however it went. Raises redis-py's own errors."""
        answered = False
        connection, readable = self._line
        try:
            if not readable(max(within_s, 0) * 1000):
                raise RedisTimeoutError("no answer")
            reply = connection.read_response()
            answered = True
        except ResponseError:  # an answer too
            answered = True
            raise
        finally:
            self._connections._end(self._line, self._idle, answered=answered)
        return reply


class Packer:
    """Packs the commands that redis-py itself sends while it connects, for example SELECT with the database's
    number."""

    def pack(self, *command: str | bytes | float) -> list[bytes]:
        first, *rest = command
        # The driver may give a command as two words in one.
        words = first.split() if isinstance(first, (str, bytes)) else [str(first)]
        return [_pack((*words, *(word if isinstance(word, (str, bytes)) else str(word) for word in rest)))]


def _pop(idle: list[Line]) -> Line | None:
    """An idle connection that can be used; None if there is none. It closes those on the way that cannot: if an idle
    connection has something to read, the server has closed it.
    """
    while idle:
        try:
            line = idle.pop()
        except IndexError:  # another thread was quicker
            break
        connection, readable = line
        if not readable(0):
            return line
        connection.disconnect()
    return None


def _close(idle: list[Line]) -> None:
    while idle:
        try:
            idle.pop()[0].disconnect()
        except IndexError:
            break


def _watch(sock: Any) -> Callable[[float], object]:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll
    return lambda within_ms: select.select([sock], [], [], within_ms / 1000)[0]
