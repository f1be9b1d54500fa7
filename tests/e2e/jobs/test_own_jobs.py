"""A user's own folder `jobs/` beside the configuration keeps its name: ours is `quota.jobs`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quota.jobs.emulator import Emulator
from quota.jobs.job import line_of
from support.commands import ROOT, Quota, one_line
from support.configurations import configuration

AS_INSTALLED = "import sys; sys.path.pop(0); from quota.cli.entry import main; sys.exit(main())"
"""Starts `quota` without the current folder among those of modules."""

DAILY = """
from {module} import Page, first_attempt

from jobs.names import PARTS

@first_attempt("videos.list")
def daily(client, region, cursor):
    answer = client.videos().list(part=PARTS, chart="mostPopular", regionCode=region).execute()
    return Page(videos=answer["items"])
"""


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return Quota(folder)(*args, script=AS_INSTALLED)


def write(folder: Path, fetch: str, address: str = "http://127.0.0.1:9", module: str = "quota.jobs.job") -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "names.py").write_text('PARTS = "snippet,statistics"\n')
    (folder / "jobs" / "etl.py").write_text(DAILY.format(module=module))
    (folder / "mine.py").write_text(DAILY.format(module=module))
    (folder / "key").write_text("a-key")
    job = f'[jobs.daily]\nfetch = "{fetch}"\nregions = ["US"]'
    (folder / "quota.toml").write_text(configuration(address, job))


def test_a_job_in_the_users_folder_jobs_is_checked_and_run(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Emulator() as upstream:
        write(tmp_path, "jobs.etl:daily", upstream.address)
        checked = run(tmp_path, "check")
        assert checked.returncode == 0, checked.stdout + checked.stderr
        for cwd in (tmp_path, elsewhere):
            done = run(cwd, "run", "daily", "--config", str(tmp_path / "quota.toml"))
            assert (done.returncode, "daily: done" in done.stdout) == (0, True), done.stderr
        assert upstream.usage()["requests"] == 2


def test_the_report_excludes_prints_of_a_fetch_function(tmp_path: Path) -> None:
    with Emulator() as upstream:
        write(tmp_path, "mine:daily", upstream.address)
        prints = '    print("asking", region)\n    os.system("echo started")\n    answer ='
        code = (tmp_path / "mine.py").read_text().replace("    answer =", prints)
        named = code.replace('"videos.list"', 'lambda cursor: print("named") or "videos.list"')
        (tmp_path / "mine.py").write_text(f'import os\nos.system("echo imported")\n{named}')
        done = run(tmp_path, "run", "daily", "--json")
        commands = ("check",), ("plan", "--days", "1"), ("run", "daily", "--dry-run"), ("status",)
        others = [run(tmp_path, *command, "--json") for command in commands]
    assert json.loads(done.stdout)["outcome"] == "done"
    assert {"imported", "asking US", "started"} <= set(done.stderr.splitlines())
    for other in others:
        json.loads(other.stdout)
        assert {"imported", "named"} <= set(other.stderr.splitlines())


def test_charges_that_a_function_makes_have_the_id_of_its_run(tmp_path: Path) -> None:
    write(tmp_path, "mine:daily")
    (tmp_path / "mine.py").write_text(
        "import quota\nfrom quota.jobs.job import Page\ndef daily(client, region, cursor):\n"
        "    with quota.open() as q: q.budget().charge('videos.list')\n    return Page(rows={'t': [{'id': 1}]})\n"
    )
    done = "daily: done: 1 region, 1 item, 1 page (no call of `client` was charged)\n"
    assert run(tmp_path, "run", "daily").stdout == done
    (spent,) = json.loads(run(tmp_path, "spend", "--by", "run", "--json").stdout)["rows"]
    assert spent["run"] == json.loads(run(tmp_path, "runs", "--json").stdout)["runs"][0]["run"]


def test_an_import_of_jobs_names_quota_jobs(tmp_path: Path) -> None:
    write(tmp_path, "mine:daily", module="jobs.job")
    line = one_line(run(tmp_path, "run", "daily"), 78)
    assert "fetch = 'mine:daily' cannot be imported: ModuleNotFoundError: No module named 'jobs" in line
    assert line.endswith("quota.jobs.job: write for example `from quota.jobs.job import Page`")
    checked = run(tmp_path, "check")
    assert checked.returncode == 78, checked.stdout + checked.stderr
    assert "from quota.jobs.job import Page" in " ".join((checked.stdout + checked.stderr).split())
    command = [sys.executable, "-c", "from jobs.job import Page"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    message = "quota-ledger's package for jobs is quota.jobs: write for example `from quota.jobs.job import Page`"
    assert done.stderr.splitlines()[-1] == f"ImportError: {message}"


EXITS = """
import signal, sys
from quota.jobs.job import Page, first_attempt

@first_attempt(lambda cursor: sys.exit("no such method"))
def lost(client, region, cursor):
    answer = client.videos().list(part="snippet", chart="mostPopular", regionCode=region).execute()
    return Page(videos=answer["items"])

def exits(client, region, cursor):
    ends(lost(client, region, cursor))

def ends(page, *given):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for output in sys.stdout, sys.stderr: output.buffer.raw.close(), output.close()
    raise {end}
"""


@pytest.mark.parametrize("end", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
@pytest.mark.parametrize("fetch", ["mine:exits", 'jobs.etl:daily"\nsink = "mine:ends'])
def test_a_function_that_ends_the_program_fails_its_region_with_its_units(tmp_path: Path, fetch: str, end: str) -> None:
    with Emulator() as upstream:
        write(tmp_path, fetch, upstream.address)
        (tmp_path / "mine.py").write_text(EXITS.replace("{end}", end))
        line = one_line(run(tmp_path, "run", "daily", "--quiet"), 1)
    assert line.startswith((f"daily: RuntimeError: fetch ended with {end}; ", f"daily: sink = 'mine:ends': {end} ("))
    assert f" ({tmp_path / 'mine.py'}, line {EXITS.count(chr(10))})" in line
    past = json.loads(run(tmp_path, "runs", "--json").stdout)["runs"][0]
    assert (past["outcome"], past["exit_status"], past["units"]) == ("failed", 1, 1)


def test_an_error_that_ends_a_program_with_handlers_ends_its_run(tmp_path: Path) -> None:
    write(tmp_path, "mine:killed")
    (tmp_path / "mine.py").write_text("def killed(*_):\n    raise GeneratorExit\n")
    program = "import quota, signal, quota.jobs.runner as r; signal.signal(2, print); r.run_job(quota.open(), 'daily')"
    assert Quota(tmp_path)(script=program).stderr.endswith("\nGeneratorExit\n")


def test_a_first_attempt_that_fails_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    with Emulator() as upstream:
        write(tmp_path, "mine:lost", upstream.address)
        (tmp_path / "mine.py").write_text(EXITS)
        done = run(tmp_path, "run", "daily", "--quiet")
        assert f"fetch=lost: SystemExit: no such method ({tmp_path / 'mine.py'}, line " in one_line(done, 0)
        assert upstream.usage()["requests"] == 1
        assert run(tmp_path, "plan").returncode == 0


def test_a_line_of_python_itself_below_the_users_folder_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("at_home")
    module.__file__ = str(Path(json.__file__).parents[1] / "at_home.py")
    monkeypatch.setitem(sys.modules, "at_home", module)
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert line_of(caught.value, "at_home:fetch") == ""
