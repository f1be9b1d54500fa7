"""The page on faults names tests that exist, and its figures are those of a run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "FAULTS.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_every_fault_names_a_test() -> None:
    lines = PAGE.partition("## What is not")[0].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| fault |", "| --- |"))]
    assert len(rows) > 15
    assert [row for row in rows if "`test_" not in row] == []


def test_the_figures_are_a_runs() -> None:
    figures = PAGE.partition("<!-- figures -->")[2].partition("<!-- /figures -->")[0]
    for row in ("seed", "faults", "units overspent beyond that and the allowance | 0 |", "lost / stored twice"):
        assert row in figures
