"""Every page in docs/ does what it says: its files, commands and programs are tried in their order."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.explain.admits import Setting
from quota.explain.refusal import Filled
from quota.jobs.emulator import Emulator
from quota.rules.refusals import RefusedSum
from support.commands import Quota
from support.pages import differs, try_page
from support.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import RedisServer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Quota]:
    quota = Quota(tmp_path)
    quota.env["YOUTUBE_API_KEY"] = "a-key-for-the-docs"
    return quota


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, quota: Quota, redis_server: RedisServer) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for tool in ("curl", "node", "php"):
        if f"$ {tool} " in text and shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    key = 'api = "youtube-v3"\n'  # a page that shows the emulator's address says itself where that goes
    with Emulator(allocation="buckets" if "emulate --allocation buckets" in text else "pool") as upstream:
        replace = {
            "http://127.0.0.1:8765": upstream.address,
            "8080": str(free_port()),
            "8790": str(free_port()),
            "redis://ledger.internal:6379": f"redis://127.0.0.1:{redis_server.port}",
            **({} if "http://127.0.0.1:8765" in text else {key: f'{key}endpoint = "{upstream.address}"\n'}),
            "https://api.weather.example": upstream.address,
            "api.weather.example": upstream.address.partition("://")[2],
        }
        told = try_page(text, quota, replace)
    wrong = [(command.line, differs(command.output, printed), printed) for command, printed in told]
    assert [row for row in wrong if row[1]] == []


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "lua" / "README.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_a_pages_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [target for target in re.findall(r"\]\(([^)]+)\)", text) if not target.startswith("https://")]
    for file, _, heading in (target.partition("#") for target in links):
        there = page.parent / file if file else page
        assert there.exists(), file
        assert not heading or heading in headings_of(there), heading


def headings_of(page: Path) -> list[str]:
    """As links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_index_leads_to_every_page_and_to_each_once() -> None:
    """A page that stands in two sections is two pages."""
    linked = re.findall(r"\]\(([\w-]+)\.md\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert sorted(linked) == [page for page in PAGES if page != "index"]


def test_no_page_is_longer_than_somebody_reads() -> None:
    """The rules are looked up by their numbers."""
    pages = {
        page: (DOCS / f"{page}.md").read_text(encoding="utf-8").count("\n") for page in PAGES if page != "ledger-rules"
    }
    assert {page: lines for page, lines in pages.items() if lines > 200} == {}


def test_all_pages_together_are_read_in_an_evening() -> None:
    pages = [ROOT / "README.md", ROOT / "lua" / "README.md", *DOCS.glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 29_100


def fields_in(*nodes: ast.AST) -> set[str]:
    """The fields of JSON that code writes: keys of its dicts, and what it names to `members`."""
    found: set[str] = set()
    for node in (below for one in nodes for below in ast.walk(one)):
        if isinstance(node, ast.Dict):
            found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "members":
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            found |= {name for one in given if isinstance(one, ast.Constant) for name in str(one.value).split()}
    return found


def test_every_field_of_a_status_is_described() -> None:
    tree = ast.parse((ROOT / "quota/reports/status.py").read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.endswith("_json")]
    fields = fields_in(*functions)
    page = (DOCS / "deploy.md").read_text(encoding="utf-8")
    plain = {"at", "ledger", "credentials", "name", "project", "api"}
    assert len(fields) > 25
    assert sorted(field for field in fields - plain if f"`{field}`" not in page) == []


def test_every_field_of_a_spending_is_described() -> None:
    tree = ast.parse((ROOT / "quota/reports/spending.py").read_text(encoding="utf-8"))
    fields = fields_in(tree) | {*RefusedSum._fields}
    page = (DOCS / "who-spent-it.md").read_text(encoding="utf-8")
    assert len(fields) > 15
    assert sorted(field for field in fields if not re.search(rf"`{field}`|\b{field}, |, {field}\b", page)) == []


def test_every_field_of_an_explanation_is_described() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "quota/explain").glob("*.py")]
    fields = fields_in(*trees) | {*Filled._fields, *Setting._fields}
    page = (DOCS / "explain.md").read_text(encoding="utf-8") + (DOCS / "who-spent-it.md").read_text(encoding="utf-8")
    refusal = {"cost_units", "credential", "job", "machine", "method", "project", "reason", "refused_by", "region"}
    assert len(fields) > 40
    assert sorted(field for field in fields - refusal if f"`{field}`" not in page) == []


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^\$ make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(targets) > 4
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
