"""The README does what it says: its commands and its examples run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.cli.program import cli
from quota.jobs.emulator import Emulator
from support.commands import Quota
from support.pages import differs, try_page

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Quota]:
    """A folder with a configuration whose upstream is the emulator."""
    with Emulator() as emulator:
        quota = Quota(tmp_path)
        quota.configure(
            f'[credentials.main]\napi = "youtube-v3"\nkey = "env:YOUTUBE_API_KEY"\nendpoint = "{emulator.address}"\n'
            '[jobs.mine]\nfetch = "my_module:fetch"\nregions = ["DE"]\npages = 1\n'
            'options = { playlist = "PLAYLIST" }\n'
        )
        quota.env["YOUTUBE_API_KEY"] = "a-key-for-the-readme"
        yield quota


def test_it_can_be_read_in_five_minutes() -> None:
    assert len(README.split()) <= 900


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    context = cli.make_context("quota", ["status"], resilient_parsing=True)
    for name in cli.list_commands(context):
        assert f"`quota {name}" in page, name


def test_the_commands_of_the_installation_are_those_of_this_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (block,) = (block for block in blocks("sh") if "install" in block)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[0] for line in lines] == ["pipx", "uv", "pip", "make"]
    for line in lines:
        if line[0] == "make":
            assert re.search(rf"^{line[1]}:", makefile, flags=re.MULTILINE)
        else:
            assert line[-1] == project["name"]


def test_the_first_minute_is_what_it_shows(tmp_path: Path) -> None:
    (block,) = (block for block in blocks("console") if "quota demo" in block)
    quota = Quota(tmp_path)
    quota.env["TMPDIR"] = "/tmp"  # noqa: S108  # as there: a line with a longer name is folded
    ((command, printed),) = try_page(f"\n```console\n{block}```\n", quota, {})
    assert differs(command.output, printed) == ""


def test_the_commands_for_ones_own_key_run_in_order(tmp_path: Path) -> None:
    """`quota init` writes the configuration; only the upstream's address is changed, to the emulator's."""
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


def test_a_run_that_is_refused_says_what_the_readme_shows(quota: Quota) -> None:
    (shown,) = re.findall(r"^trending: stopped .*$", README, flags=re.MULTILINE)
    config = (quota.folder / "quota.toml").read_text(encoding="utf-8").partition("[jobs.mine]")[0]
    quota.configure(
        config + '[[credentials.main.limits]]\nname = "day"\nunits = 10\nwindow = "24h"\n'
        '[jobs.trending]\nfetch = "trending"\nregions = ["US", "GB", "DE", "FR"]\npages = 4\n'
    )
    done = quota("run", "trending")
    assert done.returncode == 0
    assert differs(["...", shown, "..."], (done.stdout + done.stderr).splitlines()) == ""


def test_the_python_example_runs(quota: Quota) -> None:
    (example,) = (block for block in blocks("python") if "quota.open()" in block)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=quota.folder,
        env=quota.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert quota.json("spend")["total_units"] == 2
