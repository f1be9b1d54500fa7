"""What people install: wheel and sdist, beside a folder `jobs/` of their own. Each Python: see `make release`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quota.jobs.emulator import Emulator

ROOT = Path(__file__).resolve().parents[2]
NOT_SHIPPED = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")

OWN_JOB = """
from quota.jobs.job import Page, first_attempt


@first_attempt("videos.list")
def daily(client, region, cursor):
    answer = client.videos().list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return Page(videos=answer["items"])
"""

CONFIG = """
[credentials.main]
api = "youtube-v3"
key = "env:OWN_KEY"
endpoint = "{address}"

[jobs.daily]
fetch = "jobs.etl:daily"
regions = ["DE"]
"""


@pytest.fixture(scope="module")
def built(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A folder with the sdist, and the wheel that was built from it. `make release` builds them in an environment of
    their own."""

    def build(folder: Path) -> None:
        source = shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SHIPPED))
        command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source))
        done = run(*command, cwd=folder)
        lines = (done.stdout + done.stderr).splitlines()
        assert [line for line in lines if re.search(r"(?i)\bwarning|deprecat", line)] == []

    return made_once("package", build) / "dist"


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A command in a clean environment that must end well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUOTA_", "PYTHON", "PYTEST_"))}
    cas = os.environ["CAS_OUTSIDE"]
    kept = {**kept, "SSL_CERT_FILE": cas} if cas else {name: kept[name] for name in kept if name != "SSL_CERT_FILE"}
    done = subprocess.run(command, cwd=cwd, env={**kept, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done


def test_the_sdist_holds_what_builds_tests_and_explains_it(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "LICENSE",
        "README.md",
        "FAULTS.md",
        "SECURITY.md",
        "Makefile",
        ".ci/run",
        "config/deploy/crontab",
        "tests/support/one_ca.pem",
    ):
        assert name in names
    shipped = [
        *(ROOT / "tests").rglob("*.py"),
        *ROOT.glob("*.md"),
        *(ROOT / "lua").rglob("*.*"),
        *(ROOT / "config").iterdir(),
    ]
    assert {str(path.relative_to(ROOT)) for path in shipped if "__pycache__" not in path.parts} - names == set()


def test_the_readme_has_no_link_that_an_index_page_cannot_follow() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]*)\)", readme)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_the_wheel_holds_one_top_level_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"quota"}
    for name in (
        "quota/py.typed",
        "quota/lua/charge.lua",
        "quota/lua/parts/clock.lua",
        "quota/config/costs/youtube-v3.toml",
        "quota/ledger/log.sql",
        "quota/jobs/api/openapi.json",
        "quota/jobs/api/page.html",
        "quota/jobs/api/style.css",
        "quota/jobs/emulator/methods.toml",
        "quota/jobs/emulator/words.toml",
    ):
        assert name in names
    page = [path for folder in ("static", "templates") for path in (ROOT / "quota/dashboard" / folder).iterdir()]
    assert len(page) > 6
    assert {path.relative_to(ROOT).as_posix() for path in page} - set(names) == set()


@pytest.mark.timeout(600)
def test_the_wheel_works_where_nothing_else_of_the_package_is(built: Path, tmp_path: Path) -> None:
    """The demo from an empty folder, then a job of the user's own in a folder called `jobs`.

    What the wheel depends on is lent by the tests' own environment; `make release` installs it.
    """
    (wheel,) = built.glob("*.whl")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine" / "jobs").mkdir(parents=True)
    (tmp_path / "mine" / "jobs" / "etl.py").write_text(OWN_JOB, encoding="utf-8")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    installed = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", installed]
    run(*pip, "install", "--no-compile", "--no-deps", str(wheel), cwd=tmp_path)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    quota = str(tmp_path / "venv" / "bin" / "quota")
    env = {"QUOTA_STATE_DIR": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "none"), "OWN_KEY": "a-key"}

    demo = run(quota, "demo", cwd=tmp_path / "empty", **env)
    assert "upstream counted 32 requests, the ledger charged 32" in demo.stdout
    assert list((tmp_path / "empty").iterdir()) == []

    zipped = f"PYTHONPATH={wheel} {sys.executable} -m quota costs 2>&1 || true"
    assert "quota cannot run from a zip file; " in run("sh", "-c", zipped, cwd=tmp_path / "empty", **env).stdout
    output = run(installed, "-m", "quota", "--version", cwd=tmp_path / "empty", **env)
    assert output.stdout.startswith("quota, version ")

    with Emulator() as emulator:
        (tmp_path / "mine" / "quota.toml").write_text(CONFIG.format(address=emulator.address), encoding="utf-8")
        ran = run(quota, "run", "daily", cwd=tmp_path / "mine", **env)
        assert "daily: done: 1 region" in ran.stdout
        assert emulator.usage()["requests"] == 1
