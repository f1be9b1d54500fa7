"""The same look at many things: a few threads look at several at once, because most of the time goes by in waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4
"""How many threads look at once. More gain nothing: one interpreter reads all answers."""


def several(look: Callable[[T], R], each: Iterable[T]) -> Iterator[R]:
    """What `look` returns for each, in their order. The first error ends it. A lone look needs no thread."""
    ones = list(each)
    if len(ones) < 2:
        yield from map(look, ones)
        return
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="quota-look") as threads:
        contexts = [copy_context() for _ in ones]
        yield from threads.map(lambda context, one: context.run(look, one), contexts, ones)
