"""The caller's side of one request: its body as it comes, and whether the caller is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quota.terms.reserve import RequestBody

MAX_HELD_BYTES = 64 * 1024
"""How much of a body is held at most. What is charged for a longer one follows from its length alone."""

WATCH_AFTER_S = 0.1
"""When a request is slow. The others end before anybody could end them for a caller that went away."""


class CallerGoneError(Exception):
    """The caller went away before it had sent its whole body. Nothing may look as if that were whole."""


class CallerSide:
    """One reader at a time: `beginning`, then `pieces`, then what watches."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], length: int | None) -> None:
        self.gone = False
        self._receive = receive
        self._length = length
        self._head = b""
        self._more = True
        self._read = asyncio.Event()
        if length == 0:
            self._read.set()

    @property
    def is_read(self) -> bool:
        """Whether the whole body was read."""
        return self._read.is_set() and not self.gone

    async def beginning(self) -> RequestBody:
        """The body, where it is short enough to be held; else its length. Raises CallerGoneError."""
        while self._more and len(self._head) <= MAX_HELD_BYTES:
            self._head += await self._next()
        return RequestBody.of(None, self._length) if self._more else RequestBody.of(self._head)

    async def pieces(self, leaves: Callable[[], object]) -> AsyncIterator[bytes]:
        """The body, piece by piece. `leaves` is called before the first piece leaves, and with it the request. Raises
        CallerGoneError."""
        piece, self._head = self._head, b""
        while piece or self._more:
            if piece:
                leaves()
                yield piece
            piece = await self._next() if self._more else b""
        leaves()
        self._read.set()

    @contextmanager
    def watched(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Until the block ends, the task is cancelled if the caller goes away while it is slow."""
        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        timer = loop.call_later(WATCH_AFTER_S, lambda: watching.append(loop.create_task(self._watch(task))))
        try:
            yield
        finally:
            timer.cancel()
            for one in watching:
                one.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        await self._read.wait()
        while not self.gone:
            self.gone = (await self._receive())["type"] == "http.disconnect"
        task.cancel()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            self._read.set()
            raise CallerGoneError
        self._more = message.get("more_body", False)
        piece: bytes = message["body"]
        return piece
