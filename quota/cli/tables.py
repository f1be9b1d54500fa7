"""Tables that fit any terminal width."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from quota.common.text import printable
from quota.common.values import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.padding import PaddingDimensions
    from rich.segment import Segment
    from rich.style import Style
    from rich.table import Table


# -- any width ---------------------------------------------------------------------------------------------------------


class Parts:
    """Lines and tables, one below the other. Rich is asked once for all: to find out what one of them is takes it as
    long as that takes to write its lines."""

    def __init__(self, parts: Iterable[RenderableType]) -> None:
        self._parts = list(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        written: list[RenderableType | Segment] = []
        for part in self._parts:
            if isinstance(part, (Line, FirstThatFits, Parts)):
                written += part.__rich_console__(console, options)
            else:
                written.append(part)
        return written


class FirstThatFits:
    """The first candidate that fits the width; the last one if none does."""

    def __init__(self, candidates: Iterable[RenderableType]) -> None:
        self._not_tried = iter(candidates)
        self._tried: list[RenderableType] = []

    def _candidates(self) -> Iterable[RenderableType]:
        yield from self._tried
        for candidate in self._not_tried:
            self._tried.append(candidate)
            yield candidate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        unbound = options.update_width(_ANY_WIDTH)
        for candidate in self._candidates():
            if isinstance(candidate, Layout):
                width = candidate.width
            else:
                width = console.measure(candidate, options=unbound).maximum
            if width <= options.max_width:
                break
        return candidate.__rich_console__(console, options) if isinstance(candidate, Layout) else [candidate]


_ANY_WIDTH = 10_000


class Line:
    """One paragraph as plain text. Rich folds it where it is too long; else it is written as it is, because rich takes
    a tenth of a millisecond for that."""

    def __init__(self, text: str, style: str = "") -> None:
        self._text, self._style = printable(text), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        from rich.segment import Segment

        if _cells(self._text) > options.max_width:
            from rich.text import Text

            return [Text(self._text, self._style, overflow="fold")]
        return [Segment(self._text, console.get_style(self._style) if self._style else None), Segment("\n")]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement
        from rich.text import Text

        return Measurement.get(console, options, Text(self._text))


def _cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


_PADDING: dict[int, PaddingDimensions] = {3: (0, 1), 2: (0, 1, 0, 0), 1: (0, 0)}
"""The padding of a column, by the number of spaces between two columns."""

_FOLDS = (40, 32, 24, 16, 12)
_LAYOUTS = (*((gap, 0) for gap in _PADDING), *((1, fold) for fold in _FOLDS))
"""How many spaces are between columns, and to how many characters their cells are folded (0: not)."""

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
) -> Iterator[Layout]:
    """The same table ever narrower: first with less space between the columns, then with lines folded between words,
    then without the columns in `without`, dropped one by one. With `least_fold`, columns are dropped
    before lines are folded to less than that. Cells are shown as plain text.
    """
    rows = [row if "".join(row).isprintable() else [printable(cell) for cell in row] for row in rows]
    for least in (least_fold, 0) if least_fold else (0,):
        for left_out in range(len(without) + 1):
            kept = [n for n in range(len(columns)) if n not in without[:left_out]]
            for gap, maximum in _LAYOUTS:
                if not maximum or maximum >= least:
                    yield Layout(columns, rows, styles, footer, kept, gap, maximum)


class Layout:
    """A table with the columns `kept`, `gap` spaces apart, folded to `maximum` characters (0: not folded).

    Where it fits, it writes its lines itself: they look as rich's, which takes a millisecond for a few rows. Where even
    the narrowest one is too wide, rich folds the cells; and it knows how to draw without a line character.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        styles: Sequence[str],
        footer: Sequence[str],
        kept: Sequence[int],
        gap: int,
        maximum: int,
    ) -> None:
        self.columns, self.rows, self.styles, self.footer = columns, rows, styles, footer
        self.kept, self.gap, self.maximum = kept, gap, maximum

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(self.width, self.width)

    @property
    def width(self) -> int:
        return sum(self._widths) + self.gap * (len(self.kept) - 1)

    @cached_property
    def _headings(self) -> list[list[str]]:
        return self._folded([column.heading for column in self.columns])

    @cached_property
    def _body(self) -> list[list[list[str]]]:
        """The lines of each cell kept, by row."""
        return [self._folded(row) for row in self.rows]

    @cached_property
    def _widths(self) -> list[int]:
        """Of each column kept."""
        footer = [[self.footer[n]] for n in self.kept] if self.footer else [[""]] * len(self.kept)
        widths = []
        for cells in zip(self._headings, footer, *self._body, strict=True):
            lines = [line for cell in cells for line in cell]
            widths.append(max(map(len if "".join(lines).isascii() else _cells, lines)))
        return widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        from rich.segment import Segment

        widths, whole, head = self._widths, self.width, console.get_style("table.header")
        if whole > options.max_width or options.ascii_only:
            return [self._by_rich()]
        end, height = Segment("\n"), max(map(len, self._headings))
        written: list[RenderableType | Segment] = []
        written += self._lines([[""] * (height - len(lines)) + lines for lines in self._headings], widths, head, end)
        written += Segment("\u2500" * whole), end
        for n, cells in enumerate(self._body):
            style = self.styles[n] if self.styles else ""
            written += self._lines(cells, widths, console.get_style(style) if style else None, end)
        if self.footer:
            written += Segment(" " * whole), end
            footer = [[self.footer[n]] for n in self.kept]
            written += self._lines(footer, widths, console.get_style("table.footer"), end)
        return written

    def _folded(self, row: Sequence[str]) -> list[list[str]]:
        """The lines of each cell kept."""
        if not self.maximum:
            return [[row[n]] for n in self.kept]
        return [fold(row[n], self.maximum).split("\n") for n in self.kept]

    def _lines(
        self, cells: Sequence[Sequence[str]], widths: Sequence[int], style: Style | None, end: Segment
    ) -> list[Segment]:
        """One row: as many lines as its highest cell has."""
        from rich.segment import Segment

        written: list[Segment] = []
        for at in range(max(map(len, cells))):
            parts = []
            for n, lines, width in zip(self.kept, cells, widths, strict=True):
                line = lines[at] if at < len(lines) else ""
                space = " " * (width - _cells(line))
                parts.append(space + line if self.columns[n].number else line + space)
            written += Segment((" " * self.gap).join(parts), style), end
        return written

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
