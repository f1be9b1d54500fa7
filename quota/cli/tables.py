"""Tables that fit any width."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quota.common.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.padding import PaddingDimensions


# -- any width ---------------------------------------------------------------------------------------------------------


class FirstThatFits:
    """The first of some renderables that fits the width as it is; the last where none does."""

    def __init__(self, candidates: Sequence[RenderableType]) -> None:
        self._candidates = candidates

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        unbound = options.update_width(_ANY_WIDTH)
        for candidate in self._candidates:
            if console.measure(candidate, options=unbound).maximum <= options.max_width:
                break
        yield candidate


_ANY_WIDTH = 10_000
_PADDING: dict[int, PaddingDimensions] = {3: (0, 1), 2: (0, 1, 0, 0), 1: (0, 0)}
"""Around a column, by the spaces between two."""

_FOLDS = (40, 32, 24, 16, 12)
_PIECE = re.compile(r"(?:[^ @/._-]|(?<=\d)-(?=\d))*[ @/._-]*")
"""A word with what follows it; a date is one."""


class Column(NamedTuple):
    """One column of `tables`. Numbers stand at the right."""

    heading: str
    number: bool = False


def tables(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    styles: Sequence[str] = (),
    footer: Sequence[str] = (),
    without: Sequence[int] = (),
) -> list[RenderableType]:
    """One table for ever less width: first with less space between its columns, then folded between words, then
    without the columns that `without` lists, one after the other. Whatever is in them is shown as text."""
    rows = [[printable(cell) for cell in row] for row in rows]
    found: list[RenderableType] = []
    for left_out in range(len(without) + 1):
        kept = [n for n in range(len(columns)) if n not in without[:left_out]]
        for gap, most in [*((gap, 0) for gap in _PADDING), *((1, fold) for fold in _FOLDS)]:
            found.append(_Layout(columns, rows, styles, footer, kept, gap, most))
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    """A table with the columns `kept`, `gap` spaces apart, folded to `most` characters (0: not at all). It knows its
    width before it is made: of one with many rows making it is what takes long."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str]
    footer: Sequence[str]
    kept: Sequence[int]
    gap: int
    most: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        width = self.gap * (len(self.kept) - 1)
        for n in self.kept:
            cells = {self.columns[n].heading, *(row[n] for row in (*self.rows, self.footer) if row)}
            width += max(cell_len(line) for cell in cells for line in fold(cell, self.most).split("\n"))
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        padding = _PADDING[self.gap]
        table = Table(box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, show_footer=bool(self.footer))
        for n in self.kept:
            heading, number = self.columns[n]
            table.add_column(
                Text(fold(heading, self.most)),
                self.footer[n] if self.footer else "",
                justify="right" if number else "left",
                no_wrap=number,
                overflow="fold",
            )
        for n, row in enumerate(self.rows):
            cells = (Text(fold(row[k], self.most)) for k in self.kept)
            table.add_row(*cells, style=self.styles[n] if self.styles else "")
        yield table


def fold(text: str, most: int) -> str:
    """`text` in lines of at most `most` characters where words allow it (0: in one line)."""
    if not most:
        return text
    lines = [""]
    for piece in _PIECE.findall(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > most:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
