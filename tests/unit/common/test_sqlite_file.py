"""What Python's driver asks of our statements."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_no_statement_numbers_its_parameters() -> None:
    """With values in their order, Python 3.12 warns of `?1`, and 3.14 refuses it."""
    files = [path for wing in ("quota", "jobs") for path in (ROOT / wing).rglob("*.py")]
    texts = [
        (path.name, node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert any("SELECT" in text for _, text in texts)
    assert [(name, text) for name, text in texts if re.search(r"\?[0-9]", text)] == []
