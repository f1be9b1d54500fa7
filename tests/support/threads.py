"""Threads of a test's own. What fails in one of them fails the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def in_threads(target: Callable[..., T], *rows: tuple[object, ...]) -> list[T]:
    """What `target` returns for each row of arguments. Each has a thread of its own, and all begin together."""
    ready = Barrier(len(rows))

    def begin(row: tuple[object, ...]) -> T:
        ready.wait()
        return target(*row)

    with ThreadPoolExecutor(len(rows)) as threads:
        return list(threads.map(begin, rows))
