"""Random histories: each is a list of steps, drawn from a seed. One that fails is made short before it is shown."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Step = tuple[str, tuple[Any, ...]]
"""A method of a history and its arguments. What it finds impossible it leaves out, so any step may be dropped."""


class WrongError(AssertionError):
    """Something does not hold that was promised."""


def hold(holds: bool, what: str) -> None:
    if not holds:
        raise WrongError(what)


def run_all(
    histories: int, seed: int, plan: Callable[[random.Random], list[Step]], run: Callable[[Sequence[Step]], str | None]
) -> None:
    """Run so many histories. `run` returns what was wrong with one, or None."""
    for number in range(histories):
        steps = plan(random.Random(f"{seed} {number}"))
        if (wrong := run(steps)) is not None:
            short = shortest(steps, lambda some: run(some) is not None)
            lines = "\n".join(f"    ({name!r}, {arguments})," for name, arguments in short)
            raise AssertionError(f"history {number} of seed {seed}: {wrong}; the shortest: {run(short)}\n{lines}")


def shortest(steps: list[Step], fails: Callable[[Sequence[Step]], bool]) -> list[Step]:
    """The steps without every one that the failure does not need."""
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            less = steps[:at] + steps[at + size :]
            if fails(less):
                steps = less
            else:
                at += size
        size //= 2
    return steps
