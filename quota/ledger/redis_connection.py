"""Connections to one Redis server.

A decision is one short round trip. redis-py's client, its pool and its connections take several times as long, with
locks, events, and callbacks for each reply; to import it takes longer than all else that a short process does. So a
connection is a bare socket here. `Server` makes one, ready for use; `quota.ledger.redis_sentinel` and
`quota.ledger.redis_cluster` find out which server that is, and `quota.ledger.redis_tls` encrypts it.

A call has an end (`elapsed_s`): whatever it takes to make a connection for it, it fails then. Only the system's look
into the DNS takes as long as the system lets it.

There are as many connections as calls under way at once. A call has a connection to itself until it has read its reply
to the end. After anything else (a timeout, half a reply, more than a reply, an interrupt) the connection is closed and
never used again, so no call can take another call's reply for its own. Nothing is sent twice.

The system's `_socket` is used directly: to import `socket` takes 8 ms of a short process.
"""

from __future__ import annotations

import _socket
import errno
import select
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from quota.common.clock import elapsed_s
from quota.common.fork import start_over_in_child
from quota.ledger.redis_errors import ErrorReply, Failed, Lost, NoAnswer, NotRedis, error_of
from quota.ledger.resp import INCOMPLETE, MAX_REPLY_BYTES, RawError, new_replies, pack

if TYPE_CHECKING:
    from collections.abc import Callable

SPARE_S = 0.25
"""A call may take this beyond the time of two answers: with answers that may take 0.35 s, it ends within a second."""

PIECE_BYTES = 65_536
"""So much is received at once, and has as long to come as a whole short reply."""


class Socket(_socket.socket):
    """One that is closed without a word when a call was interrupted where nobody held it yet."""

    def __del__(self) -> None:
        self.close()


class Line:
    """A connection that is ready for commands. One call at a time may use it."""

    __slots__ = ("_feed", "_gets", "_has_data", "_recv", "_send", "_socket", "readable")

    def __init__(self, connected: _socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._send, self._recv = connected.send, connected.recv
        replies = new_replies()
        self._feed, self._gets, self._has_data = replies.feed, replies.gets, replies.has_data
        self.readable = _watch(connected.fileno())
        """Waits so many ms, and tells whether there is something to read."""

    def ask(self, words: bytes, within_s: float) -> Any:
        """Send a command, and wait for its reply. An error reply is a value here, a RawError. Raises Failed where there
        is no reply; then the connection must be closed."""
        self.send(words, within_s)
        return self.reply(within_s)

    def send(self, words: bytes, within_s: float) -> None:
        try:
            sent = self._send(words)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._send_failed(error)
        if sent < len(words):
            self._send_rest(memoryview(words)[sent:], within_s)

    def _send_rest(self, rest: memoryview, within_s: float) -> None:
        """The server reads slower than we write."""
        ends_s = time.monotonic() + within_s
        while rest:
            if not _writable(self._socket, ends_s - time.monotonic()):
                raise NoAnswer("not all could be sent")
            try:
                rest = rest[self._send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._send_failed(error)

    def _send_failed(self, error: OSError) -> None:
        """A server that closes a new connection may have said why."""
        raise_if_not_the_systems(error)
        try:
            reply = self.reply(0)
        except Failed:
            raise Lost(str(error)) from error
        raise error_of(str(reply)) if type(reply) is RawError else Lost(str(error))

    def reply(self, within_s: float) -> Any:
        """The reply to what was sent, as `ask` gives it."""
        started_s = time.monotonic()
        if not self.readable(within_s * 1000):
            raise NoAnswer("no answer")
        data = self._receive()
        self._feed(data)
        reply = self._gets()
        if reply is INCOMPLETE:
            reply = self._rest(len(data), within_s, started_s)
        self.check_quiet()
        return reply

    def replies(self, count: int, within_s: float) -> list[Any]:
        """The replies to several commands that were sent together."""
        started_s = time.monotonic()
        found = [self._rest(0, within_s, started_s) for _ in range(count)]
        self.check_quiet()
        return found

    def check_quiet(self) -> None:
        """Raises NotRedis where more has come than was asked for."""
        if self._has_data():
            raise NotRedis("more than was asked for")

    def _rest(self, size: int, within_s: float, started_s: float) -> Any:
        """The next reply, after `size` bytes of it. A server may take `within_s` for each PIECE_BYTES."""
        while (reply := self._gets()) is INCOMPLETE:
            left_s = started_s + within_s * (1 + size // PIECE_BYTES) - time.monotonic()
            if not self.readable(max(left_s, 0) * 1000):  # what has come is no silence, however late we look
                raise NoAnswer("half an answer")
            data = self._receive()
            size += len(data)
            if size > MAX_REPLY_BYTES:
                raise NotRedis("no end")
            self._feed(data)
        return reply

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_some(self, words: bytes | memoryview) -> int:
        """Send as much of a command as can be sent without waiting; how many bytes that was."""
        try:
            return self._send(words)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise_if_not_the_systems(error)
            raise Lost(str(error)) from error

    def receive_some(self) -> tuple[list[Any], int, bool]:
        """What has come, without waiting: the whole replies in it, its bytes, and whether part of a reply is left."""
        data = self._receive()
        self._feed(data)
        replies = []
        while (reply := self._gets()) is not INCOMPLETE:
            replies.append(reply)
        return replies, len(data), bool(self._has_data())

    def _receive(self) -> bytes:
        """What has come; nothing where it was no part of a reply."""
        try:
            data = self._recv(PIECE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise_if_not_the_systems(error)
            raise Lost(str(error)) from error
        if not data:
            raise Lost("closed by the server")
        return data

    def close(self) -> None:
        self._socket.close()


class Connections:
    """The connections to a server; `connect` makes one by a given end. Safe to use from several threads and after a
    fork.

    `timeout_s` is how long an answer may take. `why` finds out what is behind a new connection that ended before its
    first answer. `may_move`: another server may become the primary, and whoever connects finds out which one.
    """

    def __init__(
        self,
        connect: Callable[[float], Line],
        timeout_s: float,
        *,
        why: Callable[[Failed, float], Failed] | None = None,
        may_move: bool = False,
    ) -> None:
        self._connect = connect
        self.timeout_s = timeout_s
        self.wall_s = 2 * timeout_s + SPARE_S
        """A call that is told no other end has this long."""
        self._why = why or _as_it_is
        self._may_move = may_move
        self._idle: list[Line] = []  # threads share it without a lock: append and pop are atomic
        start_over_in_child(self)

    def execute_command(self, *command: str | bytes, ends_s: float | None = None, within_s: float | None = None) -> Any:
        """The server's reply, unchanged. Raises Failed.

        `ends_s` is when the call has to end (`elapsed_s`). With `within_s` the reply may take no longer, and no new
        connection is made for it.
        """
        return self.ask(pack(command), ends_s, within_s)

    def ask(self, words: bytes, ends_s: float | None = None, within_s: float | None = None) -> Any:
        """The same for a command that is packed already."""
        idle = self._idle
        line = _pop(idle)
        is_new = line is None
        if ends_s is None:
            ends_s = elapsed_s() + self.wall_s
        if line is None:
            if within_s is not None:
                raise NoAnswer("no connection is open")
            line = self._connect(ends_s)
        try:
            reply = line.ask(words, left_s(self.timeout_s, ends_s) if within_s is None else within_s)
            if type(reply) is RawError:
                self.check_primary(reply)
        except BaseException as error:
            self._end(line, idle, answered=False)
            if is_new and isinstance(error, Failed):
                raise self._why(error, ends_s) from error
            raise
        self._end(line, idle, answered=True)
        if type(reply) is RawError:
            raise error_of(str(reply))
        return reply

    def check_primary(self, reply: RawError) -> None:
        """A primary that was replaced refuses to write: the next connection is made to the new one."""
        if self._may_move and "READONLY " in str(reply):
            raise Lost("the primary is a replica now")

    def _end(self, line: Line, idle: list[Line], *, answered: bool) -> None:
        if answered:
            idle.append(line)
            if idle is not self._idle:  # `close` was called meanwhile
                _close(idle)
        else:
            line.close()
            _close(idle)  # the others may be dead too, and the retry has no time to find out

    def begin(self, *command: str | bytes) -> Call | None:
        """Send a command on an idle connection, so that its reply can be waited for in pieces. None where none is idle:
        nothing was sent then; `connect` makes one."""
        words = pack(command)
        idle = self._idle
        line = _pop(idle)
        if line is None:
            return None
        call = Call(self, line, idle)
        call.send(words)
        return call

    def connect(self, ends_s: float) -> None:
        """Make an idle connection."""
        self._idle.append(self._connect(ends_s))

    def why(self, error: Failed) -> Failed:
        """What is behind this error, the first thing that came of a new connection."""
        return self._why(error, elapsed_s() + self.timeout_s)

    def close(self) -> None:
        """Close all connections; those in use are closed when their call ends. The next call connects again."""
        idle, self._idle = self._idle, []
        _close(idle)

    def start_over_in_child(self) -> None:
        """A forked child must not talk on its parent's connections. Closing them here leaves the parent's alone."""
        self.close()


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
            self._line.send(words, self._connections.timeout_s)
            sent = True
        finally:
            if not sent:
                self._connections._end(self._line, self._idle, answered=False)

    def is_answered(self, within_s: float) -> bool:
        """Whether the reply has begun to come."""
        return bool(self._line.readable(within_s * 1000))

    def reply(self, within_s: float) -> Any:
        """The server's reply, unchanged; the call has ended then, however it went. Raises Failed."""
        answered = False
        try:
            reply = self._line.reply(max(within_s, 0))
            if type(reply) is RawError:
                self._connections.check_primary(reply)
            answered = True
        finally:
            self._connections._end(self._line, self._idle, answered=answered)
        if type(reply) is RawError:
            raise error_of(str(reply))
        return reply


def _pop(idle: list[Line]) -> Line | None:
    """An idle connection that can be used; None if there is none. It closes those on the way that cannot: if an idle
    connection has something to read, the server has closed it.
    """
    while idle:
        try:
            line = idle.pop()
        except IndexError:  # another thread was quicker
            break
        if not line.readable(0):
            return line
        line.close()
    return None


def _close(idle: list[Line]) -> None:
    while idle:
        try:
            idle.pop().close()
        except IndexError:
            break


def _watch(fd: int) -> Callable[[float], object]:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return poll.poll
    return lambda within_ms: select.select([fd], [], [], within_ms / 1000)[0]


def _writable(connected: _socket.socket, within_s: float) -> object:
    """Wait until something can be sent, or until the connection is made or has failed."""
    within_s = max(within_s, 0)
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(connected.fileno(), select.POLLOUT)
        return poll.poll(within_s * 1000)
    _, writable, failed = select.select([], [connected], [connected], within_s)
    return writable or failed


def raise_if_not_the_systems(error: OSError) -> None:
    """The TimeoutError of a signal handler is an OSError, and none of the connection's."""
    if error.errno is None:
        raise error


def _as_it_is(error: Failed, ends_s: float) -> Failed:
    return error


def left_s(most_s: float, ends_s: float) -> float:
    """How long something may take that has this time at most, and an end (`elapsed_s`)."""
    left = ends_s - elapsed_s()
    return most_s if left >= most_s else max(left, 0.0)


# -- a server ----------------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """Where a server is, a host and a port or the path of a unix socket, and what it is told first.

    `secured` makes the connection where it is encrypted. `explain` finds out what is behind a server that ended a
    connection before it said anything. Both go by `ends_s`, when all that is asked here has to end (`elapsed_s`).
    """

    timeout_s: float
    connect_timeout_s: float
    host: str = "localhost"
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = ""
    client_name: str = ""
    keepalive: bool = False
    secured: Callable[[Socket, Server], Line] | None = None
    explain: Callable[[Server, Failed], Failed] | None = None
    ends_s: float = float("inf")

    def __repr__(self) -> str:
        """Without the password: it must not be seen where somebody shows the values of variables."""
        return f"<Server {self.path or f'{self.host}:{self.port}'}>"

    def connections(self) -> Connections:
        def connect(ends_s: float) -> Line:
            return self._replace(ends_s=ends_s).connect()

        def why(error: Failed, ends_s: float) -> Failed:
            return self._replace(ends_s=ends_s).why(error)

        return Connections(connect, self.timeout_s, why=why)

    def ask(self, *commands: bytes) -> Any:
        """The reply to the last of these packed commands, on a connection of its own. Raises Failed."""
        line = self.connect()
        try:
            line.send(b"".join(commands), self.left_s(self.timeout_s))
            replies = line.replies(len(commands), self.left_s(self.timeout_s))
        except Failed as error:
            raise self.why(error) from error
        finally:
            line.close()
        for reply in replies:
            if type(reply) is RawError:
                raise error_of(str(reply))
        return replies[-1]

    def left_s(self, most_s: float) -> float:
        return left_s(most_s, self.ends_s)

    def connect(self) -> Line:
        """A connection that is ready for commands. Raises Failed."""
        connected = self.connected()
        line = None
        try:
            line = Line(connected) if self.secured is None else self.secured(connected, self)
            self._introduce(line)
        except BaseException as error:
            (line or connected).close()
            if line is not None and isinstance(error, Failed):
                raise self.why(error) from error
            raise
        return line

    def why(self, error: Failed) -> Failed:
        """What is behind this error, the first thing that came of a new connection."""
        return error if self.explain is None or isinstance(error, (ErrorReply, NoAnswer)) else self.explain(self, error)

    def connected(self) -> Socket:
        """A bare connection."""
        if self.path:
            return self._connected_to(_socket.AF_UNIX, 0, self.path)
        host = self.host.encode() if self.host.isascii() else self.host  # else two modules are imported for it
        try:
            addresses = _socket.getaddrinfo(host, self.port, 0, _socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            raise _lost(error) from error
        failed = Lost("no address")
        for family, _, proto, _, address in addresses:
            try:
                return self._connected_to(family, proto, address)
            except Lost as error:
                failed = error
        raise failed

    def _connected_to(self, family: int, proto: int, address: Any) -> Socket:
        try:
            connected = Socket(family, _socket.SOCK_STREAM, proto)
        except OSError as error:
            raise _lost(error) from error
        try:
            connected.setblocking(False)
            if not self.path:
                connected.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
                if self.keepalive:
                    connected.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
            result = connected.connect_ex(address)
            if result in _UNDER_WAY:
                if not _writable(connected, self.left_s(self.connect_timeout_s)):
                    raise NoAnswer("not connected")
                result = connected.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
            if result:
                raise Lost(errno.errorcode.get(result, str(result)))
        except OSError as error:
            connected.close()
            raise _lost(error) from error
        except BaseException:
            connected.close()
            raise
        return connected

    def _introduce(self, line: Line) -> None:
        """Log in, and choose the database. No other command is sent before the server has agreed: it might be done in
        another database."""
        commands: list[tuple[str, ...]] = []
        if self.username or self.password:
            commands.append(("AUTH", *((self.username,) if self.username else ()), self.password))
        if self.client_name:
            commands.append(("CLIENT", "SETNAME", self.client_name))
        if self.db:
            commands.append(("SELECT", str(self.db)))
        if not commands:
            return
        line.send(b"".join(map(pack, commands)), self.left_s(self.timeout_s))
        for reply in line.replies(len(commands), self.left_s(self.timeout_s)):
            if type(reply) is RawError:
                raise error_of(str(reply))


_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EINPROGRESS))


def _lost(error: OSError | ValueError) -> Lost:
    if isinstance(error, OSError):
        raise_if_not_the_systems(error)
    return Lost(str(error))
