"""The README does what it says: its commands and its examples run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quota.cli.commands import cli
from quota.jobs.emulator import Emulator
from support.commands import Quota

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


def test_every_command_is_in_the_readme() -> None:
    context = cli.make_context("quota", ["status"], resilient_parsing=True)
    for name in cli.list_commands(context):
        assert f"`quota {name}" in README, name


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


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


def test_the_plan_is_what_quota_plan_says(quota: Quota) -> None:
    """Of the built-in search in seven regions, under the default limits."""
    (block,) = re.findall(r"^\$ quota plan.*?(?=^```)", README, flags=re.MULTILINE | re.DOTALL)
    command, *expected = block.splitlines()
    quota.configure(
        '[credentials.main]\napi = "youtube-v3"\n[jobs.concerts]\nfetch = "search"\nschedule = "every 45m"\n'
        'regions = ["US", "GB", "DE", "FR", "IN", "BR", "AU"]\noptions = { words = "live concert" }\n'
    )
    done = quota(*shlex.split(command)[2:])
    assert (done.returncode, done.stderr) == (1, "")
    told = done.stdout.splitlines()
    assert [line for line in expected if line != "..." and line not in told] == []


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
    assert quota.json("spend")["total_units"] == 102


def test_the_example_of_a_job_of_ones_own_is_a_fetch_function(quota: Quota) -> None:
    (example,) = (block for block in blocks("python") if "def fetch" in block)
    (quota.folder / "my_module.py").write_text(example, encoding="utf-8")
    path = quota.folder / "quota.toml"
    config = path.read_text(encoding="utf-8")
    address = config.partition('endpoint = "')[2].partition('"')[0]
    query = "part=snippet&chart=mostPopular&regionCode=DE&key=somebody-elses-key"
    with urllib.request.urlopen(f"{address}/youtube/v3/videos?{query}") as answer:  # noqa: S310  # loopback
        channel = json.load(answer)["items"][0]["snippet"]["channelId"]
    path.write_text(config.replace("PLAYLIST", "UU" + channel[2:]), encoding="utf-8")
    report = quota.json("run", "mine")
    assert (report["outcome"], report["units"]) == ("done", 1), report
    assert report["regions"][0]["items"] > 0
