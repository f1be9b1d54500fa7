"""Work that can be done blocking or awaited: a generator yields what must be waited for, and is sent the answer.

A *step* is a callable without arguments: to call it does the step, and blocks. `run` calls each of them. Whoever must
not block calls them in a thread, or does better with the kinds of steps that it knows. A step that is a bare method
changes nothing for its caller, and may be done once for several. What a step raises is thrown into the generator. The
generator holds no lock while it waits for an answer, so it may be given up there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Steps = Generator[Callable[[], Any], Any, T]
"""A generator of steps. It returns T."""


class InSteps(Generic[T]):
    """A step that can be taken apart: called, it does all of `steps`. Who does several things side by side may do these
    steps instead, each at its own time."""

    __slots__ = ("steps",)

    def __init__(self, steps: Callable[[], Steps[T]]) -> None:
        self.steps = steps

    def __call__(self) -> T:
        return run(self.steps())


def run(steps: Steps[T]) -> T:
    """Do all steps, one after the other, and return what they lead to."""
    try:
        step = next(steps)
        while True:
            try:
                answer = step()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
