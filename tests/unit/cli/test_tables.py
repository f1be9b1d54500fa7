"""A table takes the first layout that fits, and keeps its styles and what it says."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console

from quota.cli.tables import Column, FirstThatFits, line, stacked, tables

WORDS = (
    "",
    "day",
    "pacific-day",
    "9,500",
    "search.list",
    "in 15h 31m",
    "名前",
    "é",
    "two words",
    "a/b_c-d@e",
    "x" * 30,
)


def shown(what: Any, width: int, *, colours: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        highlight=False,
        force_terminal=colours,
        color_system="standard" if colours else None,
    )
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def layouts(r: random.Random) -> list[Any]:
    columns = [Column(r.choice(WORDS[1:]), number=r.random() < 0.4) for _ in range(r.randint(1, 6))]
    rows = [[r.choice(WORDS) for _ in columns] for _ in range(r.randint(0, 5))]
    footer = ["total", *(r.choice(WORDS) for _ in columns[1:])] if r.random() < 0.4 else ()
    styles = [r.choice(("", "red", "yellow")) for _ in rows] if r.random() < 0.5 else ()
    return [*tables(columns, rows, styles=styles, footer=footer, without=tuple(range(1, len(columns)))[:2])]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_layout_that_fits_is_shown(seed: int) -> None:
    found = layouts(random.Random(seed))
    wide = Console(width=10_000)
    for width in (10, 20, 40, 80):
        first = next((layout for layout in found if wide.measure(layout).maximum <= width), found[-1])
        assert shown(FirstThatFits(iter(found)), width) == shown(first, width)


def test_lines_and_tables_stand_below_each_other_also_when_they_are_drawn_again() -> None:
    parts: list[Any] = []
    for seed in range(20):
        parts += [line("of a project"), FirstThatFits(iter(layouts(random.Random(seed)))), stacked([line("its notes")])]
    together = stacked(parts)
    for width in (200, 20, 200):
        assert shown(together, width) == "".join(shown(part, width) for part in parts)


def test_headings_and_rows_have_their_styles_on_a_terminal() -> None:
    layout, *_ = tables(
        [Column("limit"), Column("used", number=True)], [["day", "5"]], styles=["red"], footer=["all", "5"]
    )
    coloured = shown(layout, 80, colours=True)
    assert "\x1b[1mlimit" in coloured
    assert "\x1b[31mday" in coloured
    assert "\x1b[1mall" in coloured
    assert [row.rstrip() for row in shown(layout, 80).splitlines()] == [
        "limit   used",
        "────────────",
        "day        5",
        "",
        "all        5",
    ]


@pytest.mark.parametrize("text", ["open", "  indented", "a long line that is folded", "y" * 45, "a\x1bb[bold]c"])
def test_a_line_is_plain_text(text: str) -> None:
    found = shown(line(text), 24)
    assert "".join(found.split()) == "".join(text.replace("\x1b", "\\x1b").split())
    assert all(len(row) <= 24 for row in found.splitlines())
