"""Tables that fit any terminal width."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from quota.common.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.measure import Measurement
    from rich.padding import PaddingDimensions
    from rich.segment import Segment
    from rich.table import Table


# -- any width ---------------------------------------------------------------------------------------------------------


Written = list[tuple[str, str]]
"""Lines, each with the name of its style."""


class Parts:
    """Lines and tables, one below the other. Rich is asked once for all: to find out what one of them is takes it as
    long as that takes to write its lines."""

    def __init__(self, parts: Iterable[RenderableType]) -> None:
        self._parts = list(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        return _segments(self._written(console, options), console)

    def _written(self, console: Console, options: ConsoleOptions) -> Iterator[Written | RenderableType]:
        for part in self._parts:
            if isinstance(part, Parts):
                yield from part._written(console, options)
            else:
                yield part.written(console, options) if isinstance(part, (Line, FirstThatFits)) else part


def _segments(found: Iterable[Written | RenderableType], console: Console) -> list[RenderableType | Segment]:
    """What rich is given: a segment for each line with a style, and one for all those without a style up to the next.
    Each segment takes rich as long as a short line takes us. Where there are no colours, no line has a style."""
    from rich.segment import Segment

    coloured = console.color_system is not None
    segments: list[RenderableType | Segment] = []
    plain: list[str] = []
    for one in found:
        if not isinstance(one, list):
            segments += Segment("".join(plain)), one
            plain = []
            continue
        for text, style in one:
            if style and coloured:
                segments += Segment("".join(plain)), Segment(text, console.get_style(style))
                plain = ["\n"]
            else:
                plain += text, "\n"
    return [*segments, Segment("".join(plain))]


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

    def written(self, console: Console, options: ConsoleOptions) -> Written | RenderableType:
        for candidate in self._candidates():
            if isinstance(candidate, Layout):
                width = candidate.width
            else:
                width = console.measure(candidate, options=options.update_width(_ANY_WIDTH)).maximum
            if width <= options.max_width:
                break
        return candidate.written(console, options) if isinstance(candidate, Layout) else candidate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        return _segments([self.written(console, options)], console)


_ANY_WIDTH = 10_000


class Line:
    """One paragraph as plain text. Rich folds it where it is too long; else it is written as it is, because rich takes
    a tenth of a millisecond for that."""

    def __init__(self, text: str, style: str = "") -> None:
        self._text, self._style = printable(text), style

    def written(self, console: Console, options: ConsoleOptions) -> Written | RenderableType:
        if _cells(self._text) > options.max_width:
            from rich.text import Text

            return Text(self._text, self._style, overflow="fold")
        return [(self._text, self._style)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        return _segments([self.written(console, options)], console)

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
        lines = self._folded([column.heading for column in columns], from_below=True)
        self._head_lines = len(lines)
        self._styles = ["table.header"] * len(lines)
        for n, row in enumerate(rows):
            of_row = self._folded(row)
            lines += of_row
            self._styles += [styles[n] if styles else ""] * len(of_row)
        if footer:
            lines.append([footer[n] for n in kept])
            self._styles.append("table.footer")
        self._cells = [*zip(*lines, strict=True)]  # by column
        self._widths = [max(map(len if "".join(cells).isascii() else _cells, cells)) for cells in self._cells]
        self.width = sum(self._widths) + gap * (len(kept) - 1)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(self.width, self.width)

    def _folded(self, row: Sequence[str], *, from_below: bool = False) -> list[Sequence[str]]:
        """The lines of a row, each the columns kept. Lower cells begin at the top, or else end at the bottom."""
        if not self.maximum:
            return [[row[n] for n in self.kept]]
        cells = [fold(row[n], self.maximum).split("\n") for n in self.kept]
        height = max(map(len, cells))
        missing = [[""] * (height - len(lines)) for lines in cells]
        filled = [above + lines if from_below else lines + above for lines, above in zip(cells, missing, strict=True)]
        return [*zip(*filled, strict=True)]

    def written(self, console: Console, options: ConsoleOptions) -> Written | RenderableType:
        if self.width > options.max_width or options.ascii_only:
            return self._by_rich()
        each = zip(self.kept, self._cells, self._widths, strict=True)
        columns = [_padded(cells, width, self.columns[n].number) for n, cells, width in each]
        written = [*zip(map((" " * self.gap).join, zip(*columns, strict=True)), self._styles, strict=True)]
        if self.footer:
            written.insert(-1, (" " * self.width, ""))
        written.insert(self._head_lines, ("\u2500" * self.width, ""))
        return written

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> list[RenderableType | Segment]:
        return _segments([self.written(console, options)], console)

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


def _padded(cells: Sequence[str], width: int, number: bool) -> list[str]:
    """The cells of a column, all of one width."""
    if "".join(cells).isascii():
        return [cell.rjust(width) for cell in cells] if number else [cell.ljust(width) for cell in cells]
    spaces = [" " * (width - _cells(cell)) for cell in cells]
    each = zip(spaces, cells, strict=True)
    return [space + cell if number else cell + space for space, cell in each]


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
