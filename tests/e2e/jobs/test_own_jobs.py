"""A user's own folder `jobs/` beside the configuration keeps its name: ours is `quota.jobs`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from quota.jobs.emulator import Emulator
from support.commands import ROOT, Quota, one_line

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = [sys.executable, "-P", "-m", "quota"]
"""As the installed `quota` starts: without the current folder among those of modules."""

CONFIG = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "youtube-v3"
key = "file:key"
endpoint = "{address}"
limits = [{{ name = "day", units = 100, window = "24h" }}]
[store]
url = "sqlite:///videos.db"
[jobs.daily]
fetch = "{fetch}"
regions = ["US"]
"""

DAILY = """
from {module} import Page, first_attempt

from jobs.names import PARTS

@first_attempt("videos.list")
def daily(client, region, cursor):
    answer = client.videos().list(part=PARTS, chart="mostPopular", regionCode=region).execute()
    return Page(videos=answer["items"])
"""


def run(folder: Path, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args],
        cwd=cwd or folder,
        env=Quota(folder).env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write(folder: Path, fetch: str, address: str = "http://127.0.0.1:9", module: str = "quota.jobs.job") -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "names.py").write_text('PARTS = "snippet,statistics"\n')
    (folder / "jobs" / "etl.py").write_text(DAILY.format(module=module))
    (folder / "mine.py").write_text(DAILY.format(module=module))
    (folder / "key").write_text("a-key")
    (folder / "quota.toml").write_text(CONFIG.format(fetch=fetch, address=address))


def test_a_job_in_the_users_folder_jobs_is_checked_and_run(tmp_path: Path) -> None:
    """From beside the configuration and, as cron does, from elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Emulator() as upstream:
        write(tmp_path, "jobs.etl:daily", upstream.address)
        checked = run(tmp_path, "check")
        assert checked.returncode == 0, checked.stdout + checked.stderr
        for cwd in (tmp_path, elsewhere):
            done = run(tmp_path, "run", "daily", "--config", str(tmp_path / "quota.toml"), cwd=cwd)
            assert (done.returncode, "daily: done" in done.stdout) == (0, True), done.stderr
        assert upstream.usage()["requests"] == 2


def test_what_a_fetch_function_prints_is_not_in_the_report(tmp_path: Path) -> None:
    with Emulator() as upstream:
        write(tmp_path, "mine:daily", upstream.address)
        code = (tmp_path / "mine.py").read_text().replace("    answer =", '    print("asking", region)\n    answer =')
        (tmp_path / "mine.py").write_text(f'print("imported")\n{code}')
        done = run(tmp_path, "run", "daily", "--json")
        others = [run(tmp_path, *command, "--json") for command in (("check",), ("plan", "--days", "1"))]
    assert json.loads(done.stdout)["outcome"] == "done"
    assert {"imported", "asking US"} <= set(done.stderr.splitlines())
    for other in others:
        json.loads(other.stdout)
        assert "imported" in other.stderr.splitlines()


@pytest.mark.parametrize("own_folder", [True, False], ids=["beside a folder jobs", "alone"])
def test_a_module_that_imports_jobs_is_told_the_name_of_quotas(tmp_path: Path, own_folder: bool) -> None:
    write(tmp_path, "mine:daily", module="jobs.job")
    if not own_folder:
        shutil.rmtree(tmp_path / "jobs")
    said = one_line(run(tmp_path, "run", "daily"), 78)
    assert "fetch = 'mine:daily' cannot be imported: ModuleNotFoundError: No module named 'jobs" in said
    assert said.endswith(
        "; quota-ledger's module is quota.jobs.job: write for example `from quota.jobs.job import Page`"
    )
    checked = run(tmp_path, "check")
    assert checked.returncode == 78, checked.stdout + checked.stderr
    assert "from quota.jobs.job import Page" in " ".join((checked.stdout + checked.stderr).split())


def test_the_folder_imported_under_another_name_says_its_own() -> None:
    """As a program does that runs in this repository."""
    done = subprocess.run(
        [sys.executable, "-c", "from jobs.job import Page"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = "quota-ledger's package for jobs is quota.jobs: write for example `from quota.jobs.job import Page`"
    assert done.stderr.splitlines()[-1] == f"ImportError: {said}"


EXITS = """
import sys
from quota.jobs.job import Page, first_attempt

@first_attempt(lambda cursor: {}["no such method"])
def lost(client, region, cursor):
    answer = client.videos().list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return Page(videos=answer["items"])

def exits(client, region, cursor):
    sys.exit(0)
"""


def test_a_function_that_ends_the_program_is_a_failed_run(tmp_path: Path) -> None:
    """Its `sys.exit(0)` must not pass for success."""
    write(tmp_path, "mine:exits")
    (tmp_path / "mine.py").write_text(EXITS)
    said = one_line(run(tmp_path, "run", "daily", "--quiet"), 1)
    assert said == "daily: fetch ended with SystemExit: 0; let it return a page, or raise an error"
    past = json.loads(run(tmp_path, "runs", "--json").stdout)["runs"][0]
    assert (past["outcome"], past["why"], past["exit_status"]) == ("failed", "SystemExit: 0", 1)


def test_a_script_that_ends_the_program_where_it_is_imported_is_told(tmp_path: Path) -> None:
    """It must not end `quota check` or `quota schedule` with status 0, and without a word."""
    write(tmp_path, "mine:daily")
    config = tmp_path / "quota.toml"
    config.write_text(config.read_text() + 'schedule = "every 1h"\n')
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    said = "fetch = 'mine:daily' cannot be imported: SystemExit: 0"
    for command in (("schedule",), ("run", "daily"), ("plan",)):
        assert one_line(run(tmp_path, *command), 78) == said
    checked = run(tmp_path, "check")
    assert (
        checked.returncode,
        "'mine:daily' cannot be imported: SystemExit: 0" in checked.stdout + checked.stderr,
    ) == (
        78,
        True,
    )


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ('lambda cursor: {}["no such method"]', "KeyError: 'no such method'"),
        ("lambda cursor: 5", "TypeError: 5 is no method"),
        ('["videos.list"]', "TypeError: ['videos.list'] is no method"),
    ],
)
def test_a_first_attempt_that_fails_is_one_line_and_the_run_goes_on(tmp_path: Path, mark: str, said: str) -> None:
    with Emulator() as upstream:
        write(tmp_path, "mine:lost", upstream.address)
        (tmp_path / "mine.py").write_text(EXITS.replace('lambda cursor: {}["no such method"]', mark))
        done = run(tmp_path, "run", "daily", "--quiet")
        assert one_line(done, 0) == f"first_attempt_failed fetch=lost: {said}"
        assert upstream.usage()["requests"] == 1
        assert run(tmp_path, "plan").returncode == 0
