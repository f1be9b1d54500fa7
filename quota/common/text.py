"""Text for people, logs and programs. Every message is built with these functions.

    show            a value as Python writes it, shortened
    printable       text with its control characters escaped
    spaced          text with its control characters replaced
    shorten         text cut at its end
    one_line        any value as text: escaped, and cut in the middle
    describe        an error: its type and its message
    first_of        the first error of a group
    quoted          a value for a line of the log
    listed          names, the first dozen of them
    nearest         the hint after an unknown name
    many            a count with its noun
    spell           a duration
    number_in       the whole number in a text
    members         a record as JSON has it
    csv_writer      rows as CSV has them

They keep every message short and on one line, and no value in it can move the cursor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import IO, Any

from quota.common.clock import NEVER, rfc3339

_OF_TITLES = "[\u00a0\u2000-\u200a\u202f\u3000\u200c\u200d\U0001f900-\U0001faff\U000e0061-\U000e007f]"
"""Matches what titles have and Python does not call printable: wide and narrow spaces, the joiners of Persian words and
of emoji, emoji newer than Python, and the letters in the flags of England, Scotland and Wales."""


def show(value: object) -> str:
    """A value as Python writes it, in at most 60 characters on one line.

    A value that Python cannot write is described by its type.
    """
    try:
        text = repr(value)
    except Exception:  # Python refuses to write very long numbers, and a `__repr__` may raise
        return "a number that large" if isinstance(value, int) else f"this {type(value).__name__}"
    return shorten(text if text.isprintable() else ascii(text)[1:-1], 60)


def shorten(text: str, maximum: int) -> str:
    """The text itself, or its beginning and `...` if it has more than `maximum` characters."""
    return text if len(text) <= maximum else f"{text[: maximum - 3]}..."


def nearest(name: object, choices: Iterable[str], otherwise: str = "") -> str:
    """The hint after an unknown name: the nearest of the choices; if none is near, `otherwise`, or all of them."""
    from difflib import get_close_matches  # late: few processes meet an unknown name

    names = {choice.lower(): choice for choice in choices}
    near = get_close_matches(name[:100].lower(), names, n=1, cutoff=0.6) if isinstance(name, str) else []
    if near:
        return f"did you mean {names[near[0]]!r}?"
    return otherwise or (f"known: {listed(names.values())}" if names else "none is known")


def many(count: int, noun: str) -> str:
    """A count with its noun: `1 unit`, `9,500 units`, `2 searches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def quoted(value: object) -> str:
    """A value for a line of the log: as it is, or as a JSON string if it has spaces or other special characters."""
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


def listed(names: Iterable[str]) -> str:
    """Names for a message: all of them, or the first twenty and `...`. No table of the configuration has more keys."""
    first = list(islice(names, 21))
    return ", ".join(first[:20]) + (", ..." if len(first) > 20 else "")


def printable(text: str) -> str:
    """`text` as one line that cannot move the cursor. Escapes line ends, control characters and direction marks.

    Use it for text from outside: a ledger's log, upstream, a file.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or re.match(_OF_TITLES, c) else repr(c)[1:-1] for c in text)


def spaced(text: str, instead: str = " ") -> str:
    """`text` as one line, with `instead` in place of each control character. Use it for prose from outside."""
    return text if text.isprintable() else "".join(c if c.isprintable() else instead for c in text)


def one_line(value: object) -> str:
    """A value as text without control characters. A very long text is cut in the middle."""
    text = printable(str(value))
    return text if len(text) <= 400 else f"{text[:199]}...{text[-198:]}"


def describe(error: BaseException) -> str:
    """An error for people: its type and its message, on one line of at most 300 characters. A group of errors is the
    first of them."""
    error = first_of(error)
    text, kind = " ".join(str(error).split()), type(error).__name__
    return shorten(f"{kind}: {text}" if text else kind, 300)


def first_of(error: BaseException) -> BaseException:
    """The first error of a group, which `asyncio.TaskGroup` makes of those of its tasks; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def spell(duration_ms: int) -> str:
    """A duration for people, in its two largest units: 86_399_000 -> `23h 59m`, 4_200 -> `4s`."""
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


def number_in(text: str, least: int, most: int) -> int | None:
    """The whole number that a text writes in the digits 0 to 9; None for any other text, and out of these bounds."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1
    return number if least <= number <= most else None


def members(record: object, names: str = "", *, if_any: str = "") -> dict[str, object]:
    """A record as JSON has it: its fields with these names, separated by spaces, in this order; then those of `if_any`
    that are neither None, 0 nor empty.

        members(row, "name used_units resets_at", if_any="owed_units")

    A time is `resets_ms` in a record, and `resets_at` or `resets` in JSON, as text: null where there is none.
    """
    fields = {name: _member(record, name) for name in names.split()}
    return fields | {name: value for name in if_any.split() if (value := _member(record, name))}


def _member(record: object, name: str) -> object:
    if hasattr(record, name):
        return getattr(record, name)
    field = f"{name}_ms"
    at_ms = getattr(record, field) if hasattr(record, field) else getattr(record, f"{name.removesuffix('_at')}_ms")
    return None if at_ms in (None, NEVER) else rfc3339(at_ms)


def csv_writer(file: IO[str], columns: Sequence[str]) -> Callable[[Mapping[str, Any]], object]:
    """Write the header of a CSV with a line for each row. Returns a function that writes a row: a list or an object
    becomes JSON. A terminal gets no control characters."""
    import csv  # late: few commands write it

    shown = printable if file.isatty() else str
    # With a line feed as its own ending, csv would leave a carriage return unquoted.
    lines: Any = SimpleNamespace(write=lambda row: file.write(row.removesuffix("\r\n") + "\n"))
    writer = csv.DictWriter(lines, columns, restval="", extrasaction="ignore", lineterminator="\r\n")

    def write_row(row: Mapping[str, Any]) -> None:
        cells = {}
        for name, value in row.items():
            text = "" if value is None else str(value)
            if isinstance(value, bool | dict | list | tuple):
                text = json.dumps(value, ensure_ascii=False)
            cells[name] = shown(text)
        writer.writerow(cells)

    write_row(dict(zip(columns, columns, strict=True)))
    return write_row
