"""The same look at many things: a few threads look at several at once, because most of the time goes by in waiting."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4
"""How many threads look at once. More gain nothing: one interpreter reads all answers."""


def several(look: Callable[[T], R], each: Iterable[T]) -> Iterator[R]:
    """What `look` returns for each, in their order. The first error ends it. A lone look needs no thread."""
    left = iter(each)
    first = list(islice(left, 2))
    if len(first) < 2:
        yield from map(look, first)
        return
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="quota-look") as threads:
        waiting: list[Future[R]] = []
        try:
            for one in (*first, *left):
                waiting.append(threads.submit(copy_context().run, look, one))
                if len(waiting) > 2 * AT_ONCE:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
