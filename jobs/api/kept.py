"""Answers that were written already, for as long as the store stays as it is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

MAX_BYTES = 32_000_000
OVERHEAD_BYTES = 500

T = TypeVar("T")


class KeptAnswers(Generic[T]):
    """At most MAX_BYTES of answers by question; the one that was not asked for longest goes first.

    `state` is the store's when the answer was about to be read: an answer that is newer than its state is forgotten a
    little early, never late.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._state: object = None
        self._answers: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def get(self, state: object, question: str) -> T | None:
        if state != self._state:
            self._answers.clear()
            self._bytes = 0
            self._state = state
        kept = self._answers.get(question)
        if kept is None:
            return None
        self._answers.move_to_end(question)
        return kept[0]

    def put(self, state: object, question: str, answer: T, size: int) -> None:
        """Keep the answer, of `size` bytes. Nothing is kept of a state that is over."""
        size += len(question) + OVERHEAD_BYTES
        if state != self._state or size > self._max_bytes // 10 or question in self._answers:
            return
        self._answers[question] = (answer, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, gone) = self._answers.popitem(last=False)
            self._bytes -= gone
