"""Tables and lines look as rich draws them, though few of them are drawn by it."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from quota.cli.tables import Column, FirstThatFits, Line, Parts, tables

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


def shown(what: object, width: int, *, colours: bool = False) -> str:
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


@pytest.mark.parametrize("seed", range(40))
def test_a_table_that_fits_looks_as_rich_draws_it(seed: int) -> None:
    for layout in layouts(random.Random(seed)):
        for width in (layout.width, layout.width + 7):
            assert shown(layout, width) == shown(layout._by_rich(), width)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_layout_that_fits_is_shown(seed: int) -> None:
    found = layouts(random.Random(seed))
    for width in (10, 20, 40, 80):
        first = next((layout for layout in found if layout.width <= width), found[-1])
        assert shown(FirstThatFits(found), width) == shown(first, width)


def test_rich_is_asked_once_for_all_lines_and_tables_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status of many projects has five parts for each. What does not fit is left to rich."""
    parts: list[Any] = []
    for seed in range(20):
        parts += [Line("of a project"), FirstThatFits(iter(layouts(random.Random(seed)))), Parts([Line("its notes")])]
    expected = "".join(shown(part, 200) for part in parts)
    asked, render = [], Console.render

    def rendering(console: Console, *args: Any) -> Any:
        asked.append(args)
        return render(console, *args)

    monkeypatch.setattr(Console, "render", rendering)
    together = Parts(parts)
    assert shown(together, 200) == expected
    assert len(asked) == 1
    assert shown(together, 200) == expected, "as a display that is drawn again"
    assert shown(together, 20) == "".join(shown(part, 20) for part in parts)


def test_headings_and_rows_have_their_styles_on_a_terminal() -> None:
    layout, *_ = tables(
        [Column("limit"), Column("used", number=True)], [["day", "5"]], styles=["red"], footer=["all", "5"]
    )
    assert shown(layout, 80, colours=True).splitlines() == [
        "\x1b[1mlimit   used\x1b[0m",
        "────────────",
        "\x1b[31mday        5\x1b[0m",
        " " * 12,
        "\x1b[1mall        5\x1b[0m",
    ]


@pytest.mark.parametrize(
    "text", ["", "open", "  indented", "名前 " * 9, "a long line that is folded", "y" * 45, "a\x1bb"]
)
@pytest.mark.parametrize("width", [10, 24, 80])
def test_a_line_looks_as_rich_draws_it(text: str, width: int) -> None:
    assert shown(Line(text), width) == shown(Text(text.replace("\x1b", "\\x1b"), overflow="fold"), width)
