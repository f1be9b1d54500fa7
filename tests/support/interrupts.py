"""Exceptions out of signal handlers, at every place where Python lets one out.

CPython runs a handler when a function begins, when a call of something written in C has returned, and when a loop goes
back: nowhere else between two instructions. `at_place` visits these places one by one, in code of ours and in what of
the standard library stands between, and does there what a handler would do.
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

OURS = (*(f"{Path(__file__).parents[2] / folder}{os.sep}" for folder in ("quota", "jobs")), contextlib.__file__)


class Interrupted(Exception):  # noqa: N818  # what a handler of somebody else's may raise
    """A job queue's time limit, for example."""


def interrupt() -> None:
    raise Interrupted


def at_place(
    number: int, handler: Callable[[], object], work: Callable[[], object], within: tuple[str, ...] = OURS
) -> bool:
    """Do `work`, and what `handler` does at the place of this number, from 0; whether there are as many places.

    `within`: how the files begin whose places count.
    """
    passed = 0
    before: dict[FrameType, int] = {}

    def arrive() -> None:
        nonlocal passed
        passed += 1
        if passed == number + 1:
            handler()

    def step(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            last = before.get(frame)
            before[frame] = frame.f_lasti
            if last is not None and (frame.f_lasti < last or last in _calls(frame.f_code)):
                arrive()
        return step

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(within):
            return None
        if frame.f_code.co_name == "__del__":  # nothing that is raised there comes out
            return None
        frame.f_trace_opcodes = True
        arrive()
        return step

    others = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(others)
    return passed > number


def at_every_place(
    handler: Callable[[], object], work: Callable[[], object], within: tuple[str, ...] = OURS, step: int = 1
) -> Iterator[Exception | None]:
    """Do `work` again and again, each time with `handler` at the next place, or so many further, and give what came out
    of it."""
    number = 0
    while True:
        error = None
        try:
            if not at_place(number, handler, work, within):
                return
        except Exception as raised:
            error = raised
        yield error
        number += step


@lru_cache
def _calls(code: CodeType) -> frozenset[int]:
    return frozenset(one.offset for one in dis.get_instructions(code) if one.opname.startswith("CALL"))
