"""Every promise on the page on security has a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_every_promise_names_a_test() -> None:
    lines = PAGE.partition("## What is promised")[2].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| promise |", "| --- |"))]
    assert len(rows) > 4
    assert [row for row in rows if "`test_" not in row] == []


def test_it_says_how_to_report_and_is_found() -> None:
    assert "## Report a vulnerability" in PAGE
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "SECURITY.md" in (ROOT / page).read_text(encoding="utf-8")
