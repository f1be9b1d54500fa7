"""What a call of a function makes: a caller who expects a result awaits no coroutine, and runs no generator."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any


def made_by(func: Any) -> str:
    """ "coroutine", "generator", "async generator", or "" for its result. `func` may be any object that is callable."""
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
