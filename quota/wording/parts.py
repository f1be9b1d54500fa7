"""What a text for people is made of: lines and tables. The command line draws them in a terminal, the page as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Tone = Literal["", "strong", "note", "bad", "verdict"]
"""How a line is meant: plain, its point, something unusual, something wrong, or a refusal's cause."""


class Line(NamedTuple):
    """One paragraph."""

    text: str
    tone: Tone = ""


class Table(NamedTuple):
    """Rows under headings. `numbers` are the columns with numbers, `bad` the rows that are marked, and `without` the
    columns that a narrow terminal leaves out first."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    footer: Sequence[str] = ()
    without: Sequence[int] = ()


Part = Line | Table
