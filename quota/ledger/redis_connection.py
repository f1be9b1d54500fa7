"""Connections to one Redis server, made by redis-py and used without its pool.

A decision is one short round trip, and redis-py's client with its pool takes nearly as long around it as the round trip
itself: locks, events, callbacks for each reply, a read that must time out. What connects is still redis-py's own class
for the kind of url, so that passwords, TLS, databases and client names are its business.

There are as many connections as calls under way at once. A call has one to itself, and nobody else ever sees it before
its reply was read to the end. After anything else (a timeout, half a reply, an interrupt) it is closed, never used
again: so no reply can be taken for the answer to another question. Nothing is sent twice.
"""

from __future__ import annotations

import os
import select
from functools import partial
from typing import TYPE_CHECKING, Any

import hiredis
from redis.exceptions import ResponseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.connection import AbstractConnection

    # A connection, and what tells without waiting whether there is something to be read from it.
    Line = tuple[AbstractConnection, Callable[[], object]]


_pack: Callable[[tuple[str | bytes, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub is wrong
"""A command as the server reads it. Every word must be text or bytes, never a number.

hiredis (3.5 and before) makes text of a number itself, and does not look whether that failed. A signal handler may
raise just there, and then the interpreter crashes.
"""


class Connections:
    """As much of redis-py's client as a ledger uses. Safe to use from several threads and after a fork."""

    def __init__(self, make: Callable[[], AbstractConnection]) -> None:
        self._make = make
        self._idle: list[Line] = []  # threads share it without a lock: append and pop are atomic

    def execute_command(self, *command: str) -> Any:
        """The server's reply, as it came. Raises what redis-py raises."""
        words = _pack(command)
        idle = self._idle
        line = _pop(idle) or self._connect()
        connection = line[0]
        answered = False
        try:
            connection.send_packed_command([words])
            reply = connection.read_response()
            answered = True
        except ResponseError:  # an answer too
            answered = True
            raise
        finally:
            if answered:
                idle.append(line)
                if idle is not self._idle:  # `close` came meanwhile
                    _close(idle)
            else:
                connection.disconnect()
                _close(idle)  # what silenced one may have silenced all, and the repeat must not find that out slowly
        return reply

    def close(self) -> None:
        """Let go of all connections: of those in use when their call ends. The next call connects again."""
        idle, self._idle = self._idle, []
        _close(idle)

    def _connect(self) -> Line:
        connection = self._make()
        try:
            connection.connect()
            return connection, _watch(connection._sock)
        except BaseException:
            connection.disconnect()
            raise


class Packer:
    """Packs what redis-py itself asks while it connects, for example SELECT with the database's number."""

    def pack(self, *command: str | bytes | float) -> list[bytes]:
        first, *rest = command
        # The driver's name of a command may be two words.
        words = first.split() if isinstance(first, (str, bytes)) else [str(first)]
        return [_pack((*words, *(word if isinstance(word, (str, bytes)) else str(word) for word in rest)))]


def _pop(idle: list[Line]) -> Line | None:
    """A connection that can be used. The others on the way to it are closed: what can be read from a connection while
    nobody asks is its end, and a forked child must not talk on its parent's (which closing it there leaves alone).
    """
    while idle:
        try:
            line = idle.pop()
        except IndexError:  # another thread was quicker
            break
        connection, readable = line
        if connection.pid == os.getpid() and not readable():
            return line
        connection.disconnect()
    return None


def _close(idle: list[Line]) -> None:
    while idle:
        try:
            idle.pop()[0].disconnect()
        except IndexError:
            break


def _watch(sock: Any) -> Callable[[], object]:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return partial(poll.poll, 0)
    return lambda: select.select([sock], [], [], 0)[0]
