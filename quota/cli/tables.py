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
    from rich.segment import Segment
    from rich.style import Style
    from rich.table import Table


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


class Line:
    """One paragraph as plain text. Rich folds it where it is too long; else it is written as it is, because rich takes
    a tenth of a millisecond for that."""

    def __init__(self, text: str, style: str = "") -> None:
        self._text, self._style = printable(text), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType | Segment]:
        from rich.cells import cell_len
        from rich.segment import Segment
        from rich.text import Text

        if cell_len(self._text) > options.max_width:
            yield Text(self._text, self._style, overflow="fold")
        else:
            yield Segment(self._text, console.get_style(self._style) if self._style else None)
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement
        from rich.text import Text

        return Measurement.get(console, options, Text(self._text))


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
                    found.append(Layout(columns, rows, styles, footer, kept, gap, maximum))
    return found


@dataclass(frozen=True, slots=True)
class Layout:
    """A table with the columns `kept`, `gap` spaces apart, folded to `maximum` characters (0: not folded).

    Where it fits, it writes its lines itself: they look as rich's, which takes a millisecond for a few rows. Where even
    the narrowest one is too wide, rich folds the cells; and it knows how to draw without a line character.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str]
    footer: Sequence[str]
    kept: Sequence[int]
    gap: int
    maximum: int

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(self.width, self.width)

    @property
    def width(self) -> int:
        return sum(self._widths()) + self.gap * (len(self.kept) - 1)

    def _widths(self) -> list[int]:
        """Of each column kept."""
        from rich.cells import cell_len

        widths = []
        for n in self.kept:
            cells = {self.columns[n].heading, *(row[n] for row in self.rows)}
            lines = [line for cell in cells for line in fold(cell, self.maximum).split("\n")]
            widths.append(max(map(cell_len, [*lines, self.footer[n] if self.footer else ""])))
        return widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType | Segment]:
        from rich.segment import Segment

        widths, head = self._widths(), console.get_style("table.header")
        whole = sum(widths) + self.gap * (len(widths) - 1)
        if whole > options.max_width or options.ascii_only:
            yield self._by_rich()
            return
        headings = self._folded([column.heading for column in self.columns])
        height = max(map(len, headings))
        yield from self._lines([[""] * (height - len(lines)) + lines for lines in headings], widths, head)
        yield Segment("\u2500" * whole)
        yield Segment.line()
        for n, row in enumerate(self.rows):
            style = self.styles[n] if self.styles else ""
            yield from self._lines(self._folded(row), widths, console.get_style(style) if style else None)
        if self.footer:
            yield Segment(" " * whole)
            yield Segment.line()
            footer = [[self.footer[n]] for n in self.kept]
            yield from self._lines(footer, widths, console.get_style("table.footer"))

    def _folded(self, row: Sequence[str]) -> list[list[str]]:
        """The lines of each cell kept."""
        return [fold(row[n], self.maximum).split("\n") for n in self.kept]

    def _lines(self, cells: Sequence[Sequence[str]], widths: Sequence[int], style: Style | None) -> Iterable[Segment]:
        """One row: as many lines as its highest cell has."""
        from rich.cells import cell_len
        from rich.segment import Segment

        for at in range(max(map(len, cells))):
            parts = []
            for n, lines, width in zip(self.kept, cells, widths, strict=True):
                line = lines[at] if at < len(lines) else ""
                space = " " * (width - cell_len(line))
                parts.append(space + line if self.columns[n].number else line + space)
            yield Segment((" " * self.gap).join(parts), style)
            yield Segment.line()

    def _by_rich(self) -> Table:
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
        return table


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
