"""The pages for maintainers are true where that can be checked: what they cite exists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import import_module
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
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


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


def test_the_page_can_be_read_in_one_sitting() -> None:
    assert len(PAGE.split()) <= 2_400


def test_every_file_path_in_the_pages_exists() -> None:
    cited = [word for page in (*PAGES, *OTHERS) for word in cited_in(page)]
    paths = [word for word in cited if re.fullmatch(r"\.?[\w@-]+(/[\w@.-]+)+/?", word) and word.split("/")[0] in WINGS]
    assert DIAGRAM is not None
    paths += re.findall(r"\b(?:quota|jobs|lua)/[\w/]+(?:\.\w+)?", DIAGRAM[1])
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_file_named_in_the_architecture_exists() -> None:
    names = [word for word in CITED if re.fullmatch(r"\w+\.(py|lua|sql|md|toml)", word)]
    known = {path.name for wing in WINGS for path in (ROOT / wing).rglob("*")} | {path.name for path in ROOT.iterdir()}
    assert len(names) > 5
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize("name", [word for word in CITED if re.fullmatch(r"quota(\.\w+)+", word)])
def test_every_module_named_in_the_architecture_can_be_imported(name: str) -> None:
    if name not in {
        f"{group}" for group in ("quota.commands", "quota.checks", "quota.doctor", "quota.bought", "quota.status")
    }:  # entry points
        import_module(name)


def test_every_name_in_the_architecture_is_in_the_code() -> None:
    names = {
        part
        for word in CITED
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?(\(\))?", word) and not word.endswith((".py", ".db"))
        for part in word.removesuffix("()").split(".")
    }
    assert len(names) > 60
    assert sorted(names - set(re.findall(r"\w+", sources()))) == []


def test_the_architecture_names_the_place_that_refuses_a_charge() -> None:
    section = PAGE.partition("### Where a charge is refused")[2].partition("\n#")[0].replace("\n", " ")
    place = re.search(r"`Project\.(\w+)` in `([\w/]+\.py)`, below the comment \"([^\"]+)\"", section)
    assert place is not None
    method, file, comment = place.groups()
    text = (ROOT / file).read_text(encoding="utf-8")
    assert comment in text.partition(f"def {method}(")[2].partition("\n    def ")[0]


def test_every_rule_that_the_architecture_names_exists() -> None:
    rules = [int(number) for number in re.findall(r"^\*\*L(\d+)\.", RULES, flags=re.MULTILINE)]
    assert rules == [*range(1, len(rules) + 1)]
    assert {int(number) for page in PAGES for number in re.findall(r"\bL(\d+)\b", page)} <= {*rules}


def test_the_import_order_is_the_linters() -> None:
    section = PAGE.partition("### What may import what")[2]
    fence = re.search(r"^```\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    assert fence is not None
    (layers,) = (row["layers"] for row in LINTER if row["type"] == "layers" and row["containers"] == ["quota"])
    assert [line.strip() for line in fence[1].splitlines()] == layers


def test_every_module_is_public_for_jobs_or_forbidden() -> None:
    (row,) = (row for row in LINTER if row["type"] == "forbidden" and row["source_modules"] == ["quota.jobs"])
    listed = re.search(r"These modules are public for it:\n\n(.*?)\n\n", PAGE, flags=re.DOTALL)
    assert listed is not None
    public = tuple(re.findall(r"`([\w.]+)`", listed[1]))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "quota").rglob("*.py")
        if path.stem not in ("__init__", "__main__") and path.with_name("__init__.py").exists()
    }
    of_jobs = {name for name in modules if is_in(name, public)}
    others = {name for name in modules if is_in(name, row["forbidden_modules"])}
    assert (of_jobs & others, modules - of_jobs - others) == (set(), set())


def is_in(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


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
