"""The pages for maintainers are true where that can be checked: what they cite exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
RULES = (ROOT / "docs" / "ledger-rules.md").read_text(encoding="utf-8")
IN_DEPTH = [
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("recovery", "decisions", "glossary")
]
PAGES = (PAGE, RULES, *IN_DEPTH)
OTHERS = [
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "FAULTS.md", "lua/README.md")
]
WINGS = ("quota", "jobs", "lua", "config", "tests", "docs")
DIAGRAM = re.search(r"^```\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def cited_in(page: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return sorted(set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL))))


CITED = sorted({word for page in PAGES for word in cited_in(page)})


@cache
def sources() -> str:
    """All code and configuration, without comments' line breaks mattering."""
    files = [
        path for wing in WINGS for path in (ROOT / wing).rglob("*") if path.suffix in (".py", ".lua", ".sql", ".toml")
    ]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path != Path(__file__))


def test_every_file_path_in_the_pages_exists() -> None:
    cited = [word for page in (*PAGES, *OTHERS) for word in cited_in(page)]
    paths = [word for word in cited if re.fullmatch(r"\.?[\w@-]+(/[\w@.-]+)+/?", word) and word.split("/")[0] in WINGS]
    assert DIAGRAM is not None
    paths += re.findall(r"\b(?:quota|jobs|lua)/[\w/]+(?:\.\w+)?", DIAGRAM[1])
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_name_in_the_architecture_is_in_the_code() -> None:
    names = {
        part
        for word in CITED
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?(\(\))?", word) and not word.endswith((".py", ".db"))
        for part in word.removesuffix("()").split(".")
    }
    assert len(names) > 60
    assert sorted(names - set(re.findall(r"\w+", sources()))) == []


def test_every_rule_that_the_architecture_names_exists() -> None:
    rules = [int(number) for number in re.findall(r"^\*\*L(\d+)\.", RULES, flags=re.MULTILINE)]
    assert rules == [*range(1, len(rules) + 1)]
    assert {int(number) for page in PAGES for number in re.findall(r"\bL(\d+)\b", page)} <= {*rules}


FAULTS, SECURITY = ((ROOT / name).read_text(encoding="utf-8") for name in ("FAULTS.md", "SECURITY.md"))


@pytest.mark.parametrize(("page", "least"), [(FAULTS, 20), (SECURITY, 10)], ids=["faults", "security"])
def test_every_test_that_is_named_exists(page: str, least: int) -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > least
    assert {name for name in named if f"def {name}(" not in tests} == set()


@pytest.mark.parametrize(
    ("part", "least"),
    [(FAULTS.partition("## What is not")[0], 15), (SECURITY.partition("## What is promised")[2], 4)],
    ids=["fault", "promise"],
)
def test_every_row_of_the_promises_names_a_test(part: str, least: int) -> None:
    heads = ("| fault |", "| promise |", "| --- |")
    rows = [line for line in part.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    assert len(rows) > least
    assert [row for row in rows if "`test_" not in row] == []


def test_the_figures_in_faults_are_those_of_a_run() -> None:
    figures = FAULTS.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    for row in ("seed", "faults", "units overspent beyond that and the allowance | 0 |", "lost / stored twice"):
        assert row in figures
