"""What an answer says that its call used, found while the caller reads it.

    usage = attempt.usage(status, headers)    # None where nothing in the body settles the call
    usage.feed(piece)                         # each piece of the unpacked body, before the caller has it
    usage.end()                               # the caller has read all
    usage.take()                              # after each of both: what the call used, as soon as that is known

Of a stream of events the last one that says it counts: of a sum, for each of its figures. Nothing is held back, and at
most MAX_EVENT_BYTES of one event are kept, or MAX_BODY_BYTES of an answer that is one JSON document. Who stops before
the end is told nothing: the call may have cost more than was said until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quota.clients.upstream_errors import MAX_BODY_BYTES

Found = Sequence[int | None]

MAX_EVENT_BYTES = 64 * 1024
"""A longer event says nothing."""

DONE = b"[DONE]"
"""The data of the event by which many upstreams end a stream. Its readers often stop there."""


class Usage:
    """`read` finds the figures in a JSON document, of which `total` makes the units. `events`: the body is a stream of
    documents (text/event-stream)."""

    def __init__(self, read: Callable[[bytes], Found], total: Callable[[Found], int | None], *, events: bool) -> None:
        self._read = read
        self._total = total
        self._events = events
        self._kept = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._said: Found = ()
        self._over = False

    def take(self) -> int | None:
        """What the call used, once. None until the body is over, and where it does not say."""
        if not self._over:
            return None
        said, self._said = self._said, ()
        return self._total(said) if said else None

    def feed(self, piece: bytes) -> None:
        """The caller is about to read this piece."""
        if self._over:
            return
        if self._events:
            self._feed_lines(piece)
        elif len(self._kept) <= MAX_BODY_BYTES:
            self._kept += piece

    def end(self) -> None:
        """The caller has read all."""
        if self._over:
            return
        if self._events:
            self._feed_lines(b"\n\n")
        elif len(self._kept) <= MAX_BODY_BYTES:
            self._hear(bytes(self._kept))
        self._over = True
        self._kept.clear()

    # -- events ------------------------------------------------------------------------------------------------------

    def _feed_lines(self, piece: bytes) -> None:
        """Lines end with LF, CR, or both, which may come in two pieces."""
        for part in piece.splitlines(keepends=True):
            if self._over:
                return
            if self._kept.endswith(b"\r") and part != b"\n":
                self._end_line()
            if len(self._kept) <= MAX_EVENT_BYTES:
                self._kept += part
            if part.endswith(b"\n"):
                self._end_line()

    def _end_line(self) -> None:
        line = bytes(self._kept).rstrip(b"\r\n")
        self._kept.clear()
        if line:
            self._size += len(line)
            if self._size <= MAX_EVENT_BYTES and line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            self._over = self._data == [DONE]  # its reader may not read the empty line behind it
            return
        data, whole = b"\n".join(self._data), self._size <= MAX_EVENT_BYTES
        self._data, self._size = [], 0
        if data and whole:
            self._hear(data)

    def _hear(self, document: bytes) -> None:
        found = self._read(document)
        before = self._said or [None] * len(found)
        self._said = [old if new is None else new for old, new in zip(before, found, strict=True)]
