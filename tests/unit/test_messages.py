"""What messages say about counts, and that the commands and options they name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for wing in ("quota", "jobs") for path in (ROOT / wing).rglob("*.py"))
COUNTED = (
    "units|calls|charges|pages|items|regions|ticks|jobs|days|hours|errors|warnings|limits|attempts|requests|entries"
)
COUNTED += "|machines|methods|videos|searches|steps|processes|passes|credentials"


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def is_constant(value: ast.expr) -> bool:
    """A name in capitals: a number that is known to be large."""
    return isinstance(value, ast.Name) and value.id.isupper()


def test_a_noun_behind_a_count_is_written_by_the_one_function_for_it() -> None:
    """`1 units` is how it looks otherwise."""
    found = []
    for path, tree in trees().items():
        for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
            for value, after in zip(text.values, text.values[1:], strict=False):
                if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                    continue
                if re.match(rf" ({COUNTED})\b", str(after.value)) and not is_constant(value.value):
                    spec = "" if value.format_spec is None else ":" + ast.literal_eval(value.format_spec.values[0])
                    found.append(
                        f"{path.relative_to(ROOT)}:{text.lineno} {{{ast.unparse(value.value)}{spec}}}{after.value}"
                    )
    assert [one for one in found if one.partition(" ")[2] not in NEVER_ONE] == []


NEVER_ONE = (
    "{steps} steps in a row without completing a page",
    "{items:,} items, more than ",
    "{len(regions)} regions failed (",
)
