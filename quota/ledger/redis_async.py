"""Connections to one Redis server for event loops: one for each loop, which all of its tasks share.

What tasks ask in one turn of their loop leaves in one piece, and the server answers in that order. So each reply
belongs to the oldest question that waits for one. After anything else (silence, more than was asked for, what is no
reply) the connection is closed, and all that waited for it get Lost: no question gets another's reply. At most
MAX_IN_FLIGHT questions wait for replies. The others wait here, and are asked on the next connection where one ends.

A task that is cancelled gives up its reply, and nothing else: a question that has left is answered in its turn, and one
that has not is withdrawn.

A thread makes the connection, as for blocking callers (`quota.ledger.redis_connection`): a look into the DNS, or a
handshake, would block the loop. A loop that was itself held up blames nobody: whoever seems late is looked at again
after the loop has read what had come meanwhile.
"""

from __future__ import annotations

import copy
import sys
import threading
from asyncio import _get_running_loop
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quota.common.clock import elapsed_s
from quota.common.fork import start_over_in_child
from quota.ledger.redis_connection import PIECE_BYTES, Line
from quota.ledger.redis_decision import says_more
from quota.ledger.redis_errors import Failed, Lost, NoAnswer, NotRedis, error_of
from quota.ledger.resp import MAX_REPLY_BYTES, RawError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import Callable

    from quota.ledger.redis_connection import Connections

    Question = tuple[Future[Any], bytes, float]
    """Who waits for the reply, what is asked, and since when (`elapsed_s`)."""

MAX_IN_FLIGHT = 64

FEW = 8
"""So many are in flight on a new connection, and while the server answers that it has more to read (L21)."""

AT_ONCE = 16
"""So many questions leave together, before the turn of the loop ends: the server has something to do meanwhile."""

UNSENT_S = 0.15
"""A question is given up unsent so long after the time of two answers, which a decision with one retry may take. One
that was sent has the wall of the connections."""

TICK_S = 0.02
LOOK_AGAIN_S = 0.005


class AsyncConnections:
    """The connections to a server of all event loops that ask. Safe to use from several threads and after a fork.

    `connections` gives the blocking ones, which know how to make one.
    """

    def __init__(self, connections: Callable[[], Connections]) -> None:
        self._connections = connections
        self._lines: dict[AbstractEventLoop, LoopLine] = {}
        start_over_in_child(self)

    def ask(self, loop: AbstractEventLoop, words: bytes, since_s: float) -> Future[Any]:
        """The server's reply to a packed command, unchanged, or a Failed in its place.

        `since_s` is when the decision began that asks (`elapsed_s`): it ends within the second, whatever it waits for.
        """
        return (self._lines.get(loop) or self._add(loop)).ask(words, since_s)

    def _add(self, loop: AbstractEventLoop) -> LoopLine:
        for other in list(self._lines):
            if other.is_closed():
                line = self._lines.pop(other, None)  # another thread may have been quicker
                if line is not None:
                    line.close()
        line = self._lines[loop] = LoopLine(loop, self._connections())
        return line

    def close(self) -> None:
        """Close all connections; who still waits gets Lost. The next question connects again."""
        lines, self._lines = self._lines, {}
        for loop, line in list(lines.items()):  # a thread may be adding one
            if loop is _get_running_loop() or loop.is_closed():
                line.close()
                continue
            with suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(line.close)

    def start_over_in_child(self) -> None:
        """Connect anew. To close a line would take it from the parent's loop: both watch with the same selector."""
        _left_to_parent.append(self._lines)
        self._lines = {}


_left_to_parent: list[object] = []
"""Lines inherited over a fork, which are not even closed."""


class LoopLine:
    """The connection of one loop. Everything here runs in that loop, but `_connect`."""

    def __init__(self, loop: AbstractEventLoop, connections: Connections) -> None:
        self._loop = loop
        self._connections = connections
        self._wall_s = connections.wall_s
        self._line: Line | None = None
        self._connecting = self._closed = False
        self._will_flush = self._ticks = False
        self._waiting: deque[Question] = deque()
        """Not sent yet."""
        self._awaited: deque[Question] = deque()
        """Sent, at least in part, and not answered yet."""
        self._rest = memoryview(b"")
        """What the server was too slow to take."""
        self._spoke = False
        self._unheard: Failed | None = None
        """How a connection ended on which nothing was ever heard."""
        self._heard_s = 0.0
        """When the server last answered, or was asked after it had answered all."""
        self._part_bytes = 0
        """So much has come of a reply that is not whole yet."""
        self._at_most = FEW
        """So many questions may be in flight."""
        self._complaint = ""
        """The server's last word, where that was an error: it may close the connection after it."""

    def ask(self, words: bytes, since_s: float) -> Future[Any]:
        """The reply, an error among them as a value: a future whose exception nobody fetches makes a noise."""
        future = self._loop.create_future()
        self._waiting.append((future, words, since_s))
        if len(self._waiting) == AT_ONCE and self._line is not None:
            self._flush()
        elif not self._will_flush:
            self._will_flush = True
            self._loop.call_soon(self._flush_soon)
        if not self._ticks:
            self._ticks = True
            self._loop.call_later(TICK_S, self._tick)
        return future

    # -- sending and receiving -------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        self._will_flush = False
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as there is room for it."""
        line, waiting, awaited = self._line, self._waiting, self._awaited
        if line is None:
            self._begin_to_connect()
            return
        if self._rest:
            return
        if not awaited and line.readable(0):  # closed by the server, or no answer to anything we asked
            self._drop(Lost("ended while idle"))
            return
        pieces = []
        was_quiet = not awaited
        while waiting and len(awaited) < self._at_most:
            question = waiting.popleft()
            if not question[0].done():
                awaited.append(question)
                pieces.append(question[1])
        if pieces:
            if was_quiet:
                self._heard_s = elapsed_s()
            self._send(line, memoryview(b"".join(pieces)))

    def _send(self, line: Line, words: memoryview) -> None:
        sent = False
        try:
            self._rest = words[line.send_some(words) :]
            sent = True
        except Lost as error:
            self._receive()  # a server that closes a connection may have said why
            if self._line is line:
                self._drop(error)
            sent = True
        finally:
            if not sent:  # interrupted
                self._drop(Lost("interrupted"))
        if self._rest and self._line is line:
            self._loop.add_writer(line.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        line = self._line
        if line is not None:
            self._loop.remove_writer(line.fileno())
            self._send(line, self._rest)
            if not self._rest:
                self._flush()

    def _receive(self) -> None:
        line, awaited = self._line, self._awaited
        if line is None:
            return
        received = False
        try:
            replies, size, is_part_left = line.receive_some()
            if len(replies) + is_part_left > len(awaited):
                raise NotRedis("more than was asked for")
            self._hear(len(replies), size)
            if replies:
                self._at_most = FEW if any(map(says_more, replies)) else MAX_IN_FLIGHT
                self._complaint = str(replies[-1]) if type(replies[-1]) is RawError else ""
            received = True
        except Failed as error:
            received = True
            self._drop(Lost(self._complaint) if self._complaint and type(error) is Lost else error)
            return
        finally:
            if not received:  # interrupted
                self._drop(Lost("interrupted"))
        self._answer([awaited.popleft()[0] for _ in replies], replies)
        if replies and self._waiting:  # before the tasks run that were answered: the server works meanwhile
            self._flush()

    def _answer(self, futures: list[Future[Any]], replies: list[Any]) -> None:
        """Tell them, the newest first: it saw most of the ledger, and what it keeps of that the others need not."""
        moved: Lost | None = None
        for future, reply in zip(reversed(futures), reversed(replies), strict=True):
            said = reply
            if type(reply) is RawError:
                said = error_of(str(reply))
                try:
                    self._connections.check_primary(reply)
                except Lost as error:  # the next connection is made to the new primary
                    said = moved = error
            if not future.done():
                future.set_result(said)
        if moved is not None:
            self._drop(moved)

    def _hear(self, replies: int, size: int) -> None:
        """A server is silent that sends no whole reply, and no further PIECE_BYTES of a long one."""
        before_bytes = 0 if replies else self._part_bytes
        self._part_bytes = 0 if replies else before_bytes + size
        if replies:
            self._spoke = True
        if replies or self._part_bytes // PIECE_BYTES > before_bytes // PIECE_BYTES:
            self._heard_s = elapsed_s()
        if self._part_bytes > MAX_REPLY_BYTES:
            raise NotRedis("no end")

    # -- the connection ----------------------------------------------------------------------------------------------

    def _begin_to_connect(self) -> None:
        if self._connecting or self._closed or not self._waiting:
            return
        try:
            if sys.is_finalizing():  # it would never begin, and be waited for
                raise RuntimeError("this process ends")
            threading.Thread(target=self._connect, name="quota-connect", daemon=True).start()
            self._connecting = True
        except RuntimeError as error:  # no more threads can be started
            self._refuse(Lost(str(error)))

    def _connect(self) -> None:
        made: Line | Exception
        unheard, self._unheard = self._unheard, None
        try:
            if unheard is not None and (why := self._connections.why(unheard)) is not unheard:
                raise why
            made = self._connections.new_line()
        except Exception as error:
            made = error
        try:
            self._loop.call_soon_threadsafe(self._connected, made)
        except RuntimeError:  # the loop was closed meanwhile
            if isinstance(made, Line):
                made.close()

    def _connected(self, made: Line | Exception) -> None:
        self._connecting = False
        if isinstance(made, Exception):
            self._refuse(made)
        elif self._closed:
            made.close()
        else:
            self._line, self._spoke, self._part_bytes, self._at_most, self._complaint = made, False, 0, FEW, ""
            self._loop.add_reader(made.fileno(), self._receive)
            self._flush()

    def _refuse(self, error: Exception) -> None:
        """There is no connection: tell those who wait for one. Nothing of what they asked has left."""
        waiting, self._waiting = self._waiting, deque()
        for future, _, _ in waiting:
            if not future.done():
                one = copy.copy(error)  # each is raised in a task of its own
                if isinstance(one, Lost):
                    one.left = False
                future.set_result(one)

    def _drop(self, error: Failed) -> None:
        """Close the connection, and make another one for those who still wait to ask."""
        line, self._line = self._line, None
        awaited, self._awaited, self._rest = self._awaited, deque(), memoryview(b"")
        if line is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(line.fileno())
                self._loop.remove_writer(line.fileno())
            line.close()
        if not self._spoke:
            self._unheard = error
        elif not isinstance(error, Lost):
            error = Lost(str(error))  # it is Redis, and something between us is broken
        for future, _, _ in awaited:
            if not future.done():
                future.set_result(copy.copy(error))
        self._begin_to_connect()

    def close(self) -> None:
        self._closed = True
        closed = Lost("closed by this process")
        self._drop(closed)
        self._refuse(closed)

    # -- what takes too long -----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_s = elapsed_s()
        if self._is_late(now_s):
            self._loop.call_later(LOOK_AGAIN_S, self._give_up, now_s)
        elif self._waiting or self._awaited:
            self._loop.call_later(TICK_S, self._tick)
        else:
            self._ticks = False

    def _is_late(self, now_s: float) -> bool:
        """Whether the server is silent, or a question is too old."""
        return (
            self._is_silent(now_s)
            or any(since_s <= now_s - self._unsent_s for _, _, since_s in self._waiting)
            or any(since_s <= now_s - self._wall_s for future, _, since_s in self._awaited if not future.done())
        )

    def _give_up(self, at_s: float) -> None:
        """Give up what was late then and still is. The reply to a question that is too old is read in its turn."""
        for future, _, since_s in self._awaited:
            if since_s <= at_s - self._wall_s and not future.done():
                future.set_result(NoAnswer("no answer"))
        waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            future, _, since_s = question
            if future.done():
                continue
            if since_s <= at_s - self._unsent_s:
                future.set_result(NoAnswer("not sent", left=False))
            else:
                self._waiting.append(question)
        if self._is_silent(at_s):
            self._drop(NoAnswer("no answer"))
        self._tick()

    def _is_silent(self, at_s: float) -> bool:
        return bool(self._awaited) and self._heard_s <= at_s - self._connections.timeout_s

    @property
    def _unsent_s(self) -> float:
        return 2 * self._connections.timeout_s + UNSENT_S
