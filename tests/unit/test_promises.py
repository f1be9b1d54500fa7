"""Each fault on the page on faults, and each promise on the page on security, names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_page_on_security_says_how_to_report_and_is_found() -> None:
    assert "## Report a vulnerability" in SECURITY
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "SECURITY.md" in (ROOT / page).read_text(encoding="utf-8")
