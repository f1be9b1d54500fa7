"""Event loops of both kinds, for tests of what is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine in a loop of its own."""

KINDS = ["asyncio", "uvloop"]


def runner(kind: str) -> Run:
    if kind == "asyncio":
        return asyncio.run
    return pytest.importorskip("uvloop").run  # type: ignore[no-any-return]
