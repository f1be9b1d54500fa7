"""Helpers for calls: the kind of result that a call makes, and the same call for many things at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4
"""How many threads call at once. More gain nothing: one interpreter reads all answers."""


def made_by(func: Any) -> str:
    """The kind of object that a call of `func` returns: "coroutine", "generator", "async generator", or "" for its
    result. A caller who expects a result would not await or run it. `func` may be any callable object."""
    while isinstance(func, partial):
        func = func.func
    if not inspect.isroutine(func):
        func = type(func).__call__
    kinds = {
        "coroutine": inspect.iscoroutinefunction,
        "generator": inspect.isgeneratorfunction,
        "async generator": inspect.isasyncgenfunction,
    }
    return next((kind for kind, is_one in kinds.items() if is_one(func)), "")


def several(look: Callable[[T], R], each: Iterable[T]) -> Iterator[R]:
    """The results of `look` for each thing, in their order. A few threads work at once, because most of the time is
    waiting. The first error ends it. A single thing needs no thread."""
    things = list(each)
    if len(things) < 2:
        yield from map(look, things)
        return
    from concurrent.futures import ThreadPoolExecutor
    from contextvars import copy_context

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="quota-look") as threads:
        contexts = [copy_context() for _ in things]
        yield from threads.map(lambda context, thing: context.run(look, thing), contexts, things)
