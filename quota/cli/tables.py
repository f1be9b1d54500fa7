"""Tables that fit any terminal width."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quota.common.text import printable
from quota.common.values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.padding import PaddingDimensions


# -- any width ---------------------------------------------------------------------------------------------------------


class FirstThatFits:
    """The first candidate that fits the width; the last one if none does."""

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
"""The padding of a column, by the number of spaces between two columns."""

_FOLDS = (40, 32, 24, 16, 12)
_PIECE = re.compile(r"(?:[^ @/._-]|(?<=\d)-(?=\d))*[ @/._-]*")
"""A word with the separators after it; a date counts as one word."""


class Column(NamedTuple):
    """One column of `tables`. Numbers are aligned right."""

    heading: str
    number: bool = False


def tables(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    styles: Sequence[str] = (),
    footer: Sequence[str] = (),
    without: Sequence[int] = (),
    least_fold: int = 0,
) -> list[RenderableType]:
    """The same table ever narrower: first with less space between the columns, then with lines folded between words,
    then without the columns in `without`, dropped one by one. With `least_fold`, columns are dropped
    before lines are folded to less than that. Cells are shown as plain text.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    found: list[RenderableType] = []
    layouts = [*((gap, 0) for gap in _PADDING), *((1, fold) for fold in _FOLDS)]
    for least in (least_fold, 0) if least_fold else (0,):
        for left_out in range(len(without) + 1):
            kept = [n for n in range(len(columns)) if n not in without[:left_out]]
            for gap, maximum in layouts:
                if not maximum or maximum >= least:
                    found.append(_Layout(columns, rows, styles, footer, kept, gap, maximum))
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    """A table with the columns `kept`, `gap` spaces apart, folded to `maximum` characters (0: not folded). Its width is
    known before it is rendered, because rendering many rows takes long.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str]
    footer: Sequence[str]
    kept: Sequence[int]
    gap: int
    maximum: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.cells import cell_len
        from rich.measure import Measurement

        width = self.gap * (len(self.kept) - 1)
        for n in self.kept:
            cells = {self.columns[n].heading, *(row[n] for row in (*self.rows, self.footer) if row)}
            width += max(cell_len(line) for cell in cells for line in fold(cell, self.maximum).split("\n"))
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
                Text(fold(heading, self.maximum)),
                self.footer[n] if self.footer else "",
                justify="right" if number else "left",
                no_wrap=number,
                overflow="fold",
            )
        for n, row in enumerate(self.rows):
            cells = (Text(fold(row[k], self.maximum)) for k in self.kept)
            table.add_row(*cells, style=self.styles[n] if self.styles else "")
        yield table


def fold(text: str, maximum: int) -> str:
    """`text` in lines of at most `maximum` characters, broken between words only (0: one line)."""
    if not maximum:
        return text
    lines = [""]
    for piece in _PIECE.findall(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > maximum:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
