"""Exceptions out of signal handlers, at every place where Python lets one out.

CPython runs a handler when a function begins, when a call of something written in C has returned (not when it raised),
and when a loop goes back: nowhere else between two instructions. `at_place` visits these places one by one, in our code
and in the standard library's code between, and does there what a handler would do.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

OURS = (*(f"{Path(__file__).parents[2] / folder}{os.sep}" for folder in ("quota", "jobs")), contextlib.__file__)

STEP = 1 if os.environ.get("QUOTA_TEST_INTERRUPTED") else 5
"""Every fifth place is tried; in `make soak` every one."""


class Interrupted(Exception):  # noqa: N818  # what a handler of somebody else's may raise
    """A job queue's time limit, for example."""


def interrupt() -> None:
    raise Interrupted


def others_can_write(path: Path) -> bool:
    """Whether another process could write an SQLite file, at once. An exception that is still being handled keeps its
    traceback, and so the frames."""
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
    return True


def at_place(
    number: int, handler: Callable[[], object], work: Callable[[], object], within: tuple[str, ...] = OURS
) -> bool:
    """Do `work`, and what `handler` does at the place of this number, from 0; whether there are as many places.

    `within`: how the files begin whose places count.
    """
    return count_places(work, within, lambda passed: handler() if passed == number + 1 else None) > number


def count_places(
    work: Callable[[], object], within: tuple[str, ...] = OURS, arrived: Callable[[int], object] = lambda passed: None
) -> int:
    """Do `work`, and count its places. `arrived` is told of each."""
    passed = 0

    def arrive() -> None:
        nonlocal passed
        passed += 1
        arrived(passed)

    end = _visit(arrive, within)
    gc.disable()  # CPython 3.11 crashed once in a frame that it was about to trace
    try:
        work()
    finally:
        end()
        gc.enable()
    return passed


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
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opname.startswith("CALL"))


def _is_visited(code: CodeType, within: tuple[str, ...]) -> bool:
    # Nothing comes out that is raised there; `_disconnect` is a finalizer's, too.
    return code.co_filename.startswith(within) and code.co_name not in ("__del__", "_disconnect")


def _is_behind(before: dict[FrameType, int], frame: FrameType, at: int) -> bool:
    """Whether a call has returned before this instruction, or a loop has gone back to it."""
    last = before.get(frame)
    before[frame] = at
    return last is not None and (at < last or last in _calls(frame.f_code))


if sys.version_info >= (3, 12):
    # There `sys.settrace` does not tell of all instructions, and in 3.13 of few.
    _TOOL = 4

    def _visit(arrive: Callable[[], None], within: tuple[str, ...]) -> Callable[[], None]:
        before: dict[FrameType, int] = {}
        monitoring = sys.monitoring

        seen: set[CodeType] = set()

        def enter(code: CodeType, _: int) -> None:
            if not _is_visited(code, within):
                return
            if code not in seen:
                seen.add(code)
                monitoring.set_local_events(_TOOL, code, events.INSTRUCTION)
            arrive()

        def step(_: CodeType, at: int) -> None:
            if _is_behind(before, sys._getframe(1), at):
                arrive()

        def catch(*_: object) -> None:
            before.pop(sys._getframe(1), None)

        events = monitoring.events
        always = {events.PY_START: enter, events.PY_RESUME: enter, events.RAISE: catch}
        callbacks = {**always, events.INSTRUCTION: step}

        def end() -> None:
            before.clear()  # else these frames would keep what they have
            monitoring.set_events(_TOOL, 0)
            for code in seen:
                monitoring.set_local_events(_TOOL, code, 0)
            for event in callbacks:
                monitoring.register_callback(_TOOL, event, None)
            monitoring.free_tool_id(_TOOL)

        monitoring.use_tool_id(_TOOL, "interrupts")
        for event, callback in callbacks.items():
            monitoring.register_callback(_TOOL, event, callback)
        monitoring.set_events(_TOOL, sum(always))
        return end

else:

    def _visit(arrive: Callable[[], None], within: tuple[str, ...]) -> Callable[[], None]:
        before: dict[FrameType, int] = {}

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "exception":
                before.pop(frame, None)
            elif event == "opcode" and _is_behind(before, frame, frame.f_lasti):
                arrive()
            return step

        def enter(frame: FrameType, event: str, _: Any) -> Any:
            if not _is_visited(frame.f_code, within):
                return None
            frame.f_trace_opcodes = True
            arrive()
            return step

        def end() -> None:
            sys.settrace(others)
            before.clear()  # else these frames would keep what they have

        others = sys.gettrace()
        sys.settrace(enter)
        return end
