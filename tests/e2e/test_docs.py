"""Every document does what it says: its files, commands and programs are tried in their order."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quota import __all__ as public_names
from quota.cli.program import cli
from support.commands import Quota
from support.emulator import Emulator
from support.pages import WARNINGS_ARE_ERRORS, differs, try_page
from support.servers import RedisServer, free_port

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.stem for path in DOCS.glob("*.md"))


@pytest.fixture
def quota(quota: Quota) -> Quota:
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
        outputs = try_page(text, quota, replace)
    wrong = [(command.line, differs(command.output, printed), printed) for command, printed in outputs]
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
    linked = re.findall(r"\]\(([\w-]+)\.md\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert sorted(linked) == [page for page in PAGES if page != "index"]


def test_no_page_has_more_than_200_lines() -> None:
    pages = {
        page: (DOCS / f"{page}.md").read_text(encoding="utf-8").count("\n") for page in PAGES if page != "ledger-rules"
    }
    assert {page: lines for page, lines in pages.items() if lines > 200} == {}


def test_all_pages_together_have_a_bounded_length() -> None:
    pages = [ROOT / "README.md", ROOT / "lua" / "README.md", *DOCS.glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 28_000


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def configured(quota: Quota, upstream: Emulator) -> Quota:
    quota.configure(
        f'[credentials.main]\napi = "youtube-v3"\nkey = "env:YOUTUBE_API_KEY"\nendpoint = "{upstream.address}"\n'
        '[jobs.mine]\nfetch = "my_module:fetch"\nregions = ["DE"]\npages = 1\n'
        'options = { playlist = "PLAYLIST" }\n'
    )
    return quota


def test_the_readme_can_be_read_in_five_minutes() -> None:
    assert len(README.split()) <= 900


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    context = cli.make_context("quota", ["status"], resilient_parsing=True)
    for name in cli.list_commands(context):
        assert f"`quota {name}" in page, name


def test_the_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("console") if "quota demo" in block)
    quota = Quota(tmp_path)
    quota.env["TMPDIR"] = "/tmp"  # noqa: S108  # as there: a line with a longer name is folded
    ((command, printed),) = try_page(f"\n```console\n{block}```\n", quota, {})
    assert differs(command.output, printed) == ""


def test_the_commands_for_your_own_key_run_in_order(tmp_path: Path) -> None:
    (console,) = (block for block in blocks("console") if "quota init" in block)
    quota = Quota(tmp_path)
    with Emulator() as emulator:
        for line in console.splitlines():
            words = shlex.split(line.removeprefix("$ "))
            if words[0] == "export":
                name = words[1].partition("=")[0]
                quota.env[name] = "a-key-for-the-readme"
                continue
            done = quota(*words[1:])
            assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
            if words[1] == "init":
                path = tmp_path / "quota.toml"
                text = path.read_text(encoding="utf-8")
                path.write_text(text.replace("# endpoint = ", f'endpoint = "{emulator.address}" # '), encoding="utf-8")
        assert emulator.usage()["requests"] == 32
    assert "9,468" in done.stdout


def test_a_refused_run_prints_what_the_readme_shows(configured: Quota) -> None:
    (shown,) = re.findall(r"^trending: stopped .*$", README, flags=re.MULTILINE)
    config = (configured.folder / "quota.toml").read_text(encoding="utf-8").partition("[jobs.mine]")[0]
    configured.configure(
        config + '[[credentials.main.limits]]\nname = "day"\nunits = 10\nwindow = "24h"\n'
        '[jobs.trending]\nfetch = "trending"\nregions = ["US", "GB", "DE", "FR"]\npages = 4\n'
    )
    done = configured("run", "trending")
    assert done.returncode == 0
    assert differs(["...", shown, "..."], (done.stdout + done.stderr).splitlines()) == ""


def test_the_python_example_runs(configured: Quota) -> None:
    (example,) = (block for block in blocks("python") if "quota.open()" in block)
    done = configured(script=WARNINGS_ARE_ERRORS + example)
    assert (done.returncode, done.stderr) == (0, "")
    assert configured.json("spend")["total_units"] == 2


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    subprocess.run([sys.executable, ROOT / "docs/site/assemble.py", folder], check=True, timeout=300)
    return folder


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
    assert [name for name in public_names if f"## quota.{name}\n" not in package] == []
    assert "### quota.Decision.when\n" in package
