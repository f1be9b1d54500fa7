"""Tables that fit any terminal width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quota.common.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.padding import PaddingDimensions
    from rich.table import Table
    from rich.text import Text


def line(text: str, style: str = "") -> Text:
    """One paragraph as plain text, folded where it is too long."""
    from rich.text import Text

    return Text(printable(text), style, overflow="fold")


def stacked(parts: Iterable[RenderableType]) -> RenderableType:
    """Lines and tables, one below the other."""
    from rich.console import Group

    return Group(*parts)


class FirstThatFits:
    """The first candidate that fits the width; the last candidate if none does."""

    def __init__(self, candidates: Iterable[RenderableType]) -> None:
        self._not_tried = iter(candidates)
        self._tried: list[RenderableType] = []

    def _candidates(self) -> Iterator[RenderableType]:
        yield from self._tried
        for candidate in self._not_tried:
            self._tried.append(candidate)
            yield candidate

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        unbounded = options.update_width(ANY_WIDTH)
        for candidate in self._candidates():
            if console.measure(candidate, options=unbounded).maximum <= options.max_width:
                break
        yield candidate


ANY_WIDTH = 10_000
"""More than any line has."""

_WIDE: PaddingDimensions = (0, 1)
_NARROW: PaddingDimensions = (0, 1, 0, 0)
_NARROWEST: PaddingDimensions = (0, 0)
_FOLDS = (40, 32, 24, 16, 12)
_LAYOUTS = ((_WIDE, 0), (_NARROW, 0), (_NARROWEST, 0), *((_NARROWEST, fold) for fold in _FOLDS))
"""The padding of the columns, and to how many characters their cells are folded (0: not)."""

_PIECE = re.compile(r"\d{4}-\d\d-\d\dT|(?:[^ @/._-]|(?<=\d)-(?=\d))*[ @/._-]*")
"""A word with the separators after it. A date is one word, also with a time after it."""


class Column(NamedTuple):
    """One column of `tables`. Numbers are aligned right. A `whole` column is never folded: people copy its values."""

    heading: str
    number: bool = False
    whole: bool = False


def tables(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    styles: Sequence[str] = (),
    footer: Sequence[str] = (),
    without: Sequence[int] = (),
    least_fold: int = 0,
) -> Iterator[Table]:
    """The same table, narrower each time: first with less space between the columns, then with lines folded between
    words, then without the columns in `without`, one after the other. With `least_fold`, columns go before lines are
    folded to less than that. Cells are plain text.
    """
    for least in (least_fold, 0) if least_fold else (0,):
        for left_out in range(len(without) + 1):
            kept = [n for n in range(len(columns)) if n not in without[:left_out]]
            for padding, maximum in _LAYOUTS:
                if not maximum or maximum >= least:
                    yield _table(columns, rows, styles, footer, kept, padding, maximum)


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
    footer: Sequence[str],
    kept: Sequence[int],
    padding: PaddingDimensions,
    maximum: int,
) -> Table:
    """A table with the columns `kept`, its cells folded to `maximum` characters (0: not folded)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False, show_footer=bool(footer))
    for n in kept:
        heading, number, whole = columns[n]
        table.add_column(
            _cell(heading, maximum),
            footer[n] if footer else "",
            justify="right" if number else "left",
            no_wrap=number or whole,
            overflow="fold",
        )
    for n, row in enumerate(rows):
        cells = [_cell(row[k], 0 if columns[k].whole else maximum) for k in kept]
        table.add_row(*cells, style=styles[n] if styles else "")
    return table


def _cell(text: str, maximum: int) -> Text:
    from rich.text import Text

    return Text(fold(printable(text), maximum))


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
