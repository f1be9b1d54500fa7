"""Text for people and logs. Every message is built with these.

    show            a value as Python writes it, shortened
    printable       text with its control characters escaped
    spaced          text with its control characters replaced
    shorten         text cut at its end
    one_line        any value as text: escaped, and cut in the middle
    describe        an error: its kind and what it says
    quoted          a value in a line of the log
    listed          names, the first dozen of them
    nearest         the hint after an unknown name
    spell           a duration

Whatever it quotes, a message stays short, on one line, and moves no cursor.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def show(value: object) -> str:
    """A value as Python writes it, at most 60 characters on one line. A value that cannot be written is named by its
    type.
    """
    try:
        text = repr(value)
    except Exception:  # Python writes no very long numbers, and a value may have a `__repr__` of its own
        return "a number that large" if isinstance(value, int) else f"this {type(value).__name__}"
    return shorten(text if text.isprintable() else ascii(text)[1:-1], 60)


def shorten(text: str, maximum: int) -> str:
    """The text itself, or its beginning with `...` where it has more than `maximum` characters."""
    return text if len(text) <= maximum else f"{text[: maximum - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint after an unknown name: the nearest known one, or all of them when none is near."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name[:100], names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {listed(names)}" if names else "none is known"


def quoted(value: object) -> str:
    """A value in a line of the log: as it is where it has no spaces, else as a JSON string."""
    import json

    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def listed(names: Iterable[str]) -> str:
    """Names for a message: all of them, or the first dozen."""
    first = list(islice(names, 13))
    return ", ".join(first[:12]) + (", ..." if len(first) > 12 else "")


def printable(text: str) -> str:
    """`text` as one line that moves no cursor: escapes stand for line ends, control sequences, changes of direction.

    For whatever others wrote: a ledger's log, upstream, a file.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def spaced(text: str, instead: str = " ") -> str:
    """`text` as one line, with `instead` in the place of each control character: for what others wrote as prose."""
    return text if text.isprintable() else "".join(c if c.isprintable() else instead for c in text)


def one_line(value: object) -> str:
    """A value as text without control characters; of a very long one, the beginning and the end."""
    text = printable(str(value))
    return text if len(text) <= 400 else f"{text[:199]}...{text[-198:]}"


def describe(error: BaseException) -> str:
    """An error for people: its kind and what it says, on one line of at most 300 characters."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    return shorten(f"{kind}: {text}" if text else kind, 300)


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
