"""The sources of the site, as `make docs` lays them out. Sphinx itself is too heavy for the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quota

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    subprocess.run([sys.executable, ROOT / "docs/site/assemble.py", folder], check=True, timeout=300)
    return folder


def test_every_page_is_in_the_contents_and_there(laid_out: Path) -> None:
    trees = re.findall(r"^```{toctree}\n(.*?)```", (laid_out / "index.md").read_text(encoding="utf-8"), re.M | re.S)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {path.relative_to(laid_out).with_suffix("").as_posix() for path in laid_out.rglob("*.md")}
    assert len(trees) == 5
    assert sorted(listed) == sorted(pages - {"index"})


def test_every_link_leads_somewhere_in_the_site(laid_out: Path) -> None:
    lost = []
    for page in laid_out.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
        lost += [(page.name, to) for to in targets if "://" not in to and not (page.parent / to).exists()]
    assert lost == []


def test_the_reference_has_every_command_setting_and_name(laid_out: Path) -> None:
    options, settings, package = (
        (laid_out / "reference" / f"{page}.md").read_text(encoding="utf-8")
        for page in ("options", "settings", "package")
    )
    assert "## quota ledger move\n" in options
    assert options.count("Usage: quota ") > 30
    assert (ROOT / "config" / "quota.toml").read_text(encoding="utf-8") in settings
    assert "| `credentials.NAME.limits.window` | " in settings
    assert settings.count("\n| `") > 80
    assert [name for name in quota.__all__ if f"## quota.{name}\n" not in package] == []
    assert "### quota.Decision.when\n" in package
