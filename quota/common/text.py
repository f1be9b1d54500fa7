"""Text for people: short, on one line, with the nearest known name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def show(value: object) -> str:
    """A value for a message: short, on one line."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number that large"  # Python refuses to print the very long ones
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint after an unknown name: the nearest known one, or all of them when none is near."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name[:100], names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {listed(names)}" if names else "none is known"


def listed(names: Iterable[str]) -> str:
    """Names for a message: all of them, or the first dozen."""
    first = list(islice(names, 13))
    return ", ".join(first[:12]) + (", ..." if len(first) > 12 else "")


def one_line(value: object) -> str:
    """Text without control characters, whatever it was; of what is very long, the beginning and the end."""
    text = printable(str(value))
    return text if len(text) <= 400 else f"{text[:199]}...{text[-198:]}"


def printable(text: str) -> str:
    """`text` as one line that moves no cursor: escapes stand for line ends, control sequences, changes of direction.

    For whatever is shown and was written by others: a ledger's log, upstream, a file.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def spell(duration_ms: int) -> str:
    """A duration for people, its two largest units: 86_399_000 -> `23h 59m`, 4_200 -> `4s`."""
    seconds = max(0, duration_ms) // 1000
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}h"
