"""`quota ledger repair`, `scripts` and `move` as a user types them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import quota
from quota.ledger.redis_log import script, script_names
from quota.session import ledger_trouble
from quota.terms.limits import DAY_MS
from support.commands import Quota, one_line
from support.configurations import limited

CONFIGURATION = """
[ledger]
url = "{url}"
unavailable = {{ max_cost = 1, allowance = 3, machines = 1 }}
[credentials.main]
api = "youtube-v3"
project = "p"
limits = [{{ name = "day", quota = 10_000, headroom = 500, window = "24h" }}]
"""


@pytest.fixture
def command(ledger_url: str, tmp_path: Path) -> Quota:
    command = Quota(tmp_path)
    command.configure(CONFIGURATION.format(url=ledger_url))
    return command


def ahead(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    """One search while all clocks of this machine and the server's stand a year ahead."""
    for name in ("QUOTA_STATE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, command.env[name])
    with quota.open(command.folder / "quota.toml", clock=lambda: time.time_ns() // 1_000_000 + 365 * DAY_MS) as session:
        assert session.budget().charge("search.list").admitted


def test_a_repair_corrects_a_charge_a_year_ahead(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert command("charge", "search.list").returncode == 0
    ahead(command, monkeypatch)
    peeked = command("peek", "search.list")
    assert peeked.returncode == 0
    assert peeked.stderr.startswith("quota: ledger_ahead project=p"), "as every line that is not the log's"
    assert peeked.stderr.count("ledger_ahead project=p") == 1
    assert "quota ledger repair" in peeked.stderr
    status = " ".join(command("status").stdout.split())
    assert "a clock was wrong and dated a charge 20" in status
    assert "`quota ledger repair`" in status
    assert command.json("status")["credentials"][0]["newest_charge_at"] > time.strftime("%Y-%m-%dT", time.gmtime())

    shown = command("ledger", "repair")
    assert shown.returncode == 0
    assert "project p: 1 charge of 100 units dated ahead, the newest 20" in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("Nothing was changed.")
    rows = command.json("ledger", "repair")
    assert (rows["repaired"], rows["projects"][0]["charges"], rows["projects"][0]["units"]) == (False, 1, 100)

    done = command.json("ledger", "repair", "--yes")
    assert (done["repaired"], done["projects"][0]["charges"]) == (True, 1)
    assert "nothing is dated ahead" in command("ledger", "repair", "--yes").stdout
    assert "--dry-run and --yes cannot be combined" in one_line(command("ledger", "repair", "--dry-run", "--yes"), 2)
    shown = command("ledger", "repair", "--dry-run").stdout
    assert shown.splitlines()[-1] == "Nothing was changed.", "and there is nothing to repair"
    peeked = command("peek", "search.list")
    assert (peeked.returncode, peeked.stderr) == (0, "")
    with quota.open(command.folder / "quota.toml") as session:
        assert sum(session.budget().charge("search.list").admitted for _ in range(100)) == 91
    assert command.json("peek", "search.list", status=75)["retry_after_ms"] <= DAY_MS


def test_a_clock_that_disagrees_repairs_nothing(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead(command, monkeypatch)
    from quota.cli import ledger as module
    from quota.cli.entry import main

    monkeypatch.chdir(command.folder)
    monkeypatch.setattr(module, "host_clock", lambda: time.time_ns() // 1_000_000 + 6_000)
    monkeypatch.setattr("sys.argv", ["quota", "ledger", "repair", "--yes"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert command.json("ledger", "repair")["projects"][0]["charges"] == 1


def test_ledger_scripts_writes_the_ledgers_scripts_again_after_an_upgrade(quota: Quota, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "charge.lua").write_text("of an older version")
    done = quota("ledger", "scripts", "a/b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {len(script_names())} scripts into a/b\n"
    assert quota.shell("umask 0; quota ledger scripts new/folder").returncode == 0
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "new", *sorted((tmp_path / "new").rglob("*")))]
    assert modes == [0o755, 0o755, *[0o644] * len(script_names())], "nobody else may change what programs run"
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "a" / "b").iterdir()}
    assert written == {f"{name}.lua": script(name)[0] for name in script_names()}


def test_a_path_that_is_not_a_folder_is_one_line(quota: Quota, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "charge.lua").mkdir(parents=True)
    for words in (("file",), ("file/below",), ("taken",), ("",), ()):
        done = quota("ledger", "scripts", *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


@pytest.fixture
def mover(quota: Quota) -> Quota:
    quota.configure(limited(500, ledger=f"sqlite:///{quota.folder}/ledger.db"))
    return quota


def test_a_move_there_and_back_keeps_all_that_counts(mover: Quota, shared: str) -> None:
    here = f"sqlite:///{mover.folder}/ledger.db"
    ids = [mover.json("charge", "search.list")["id"] for _ in range(3)]
    assert mover("settle", ids[0], "40").returncode == 0
    assert mover("charge", "videos.list", "--units", "400").returncode == 75
    moved = mover("ledger", "move", here, shared)
    assert moved.returncode == 0, moved.stderr
    assert moved.stdout.startswith("project p: 3 charges moved to ")
    for command in ("charge videos.list", "log", "log --refused", f"explain {ids[0]}", "ledger repair --dry-run"):
        assert "has moved to" in one_line(mover(*command.split()), 69), command
    drawn = mover("peek", "videos.list", QUOTA__LEDGER__UNAVAILABLE="{ max_cost = 1, allowance = 2 }")
    assert drawn.stdout.rstrip().endswith(f"allowance: ledger {here} has moved to {shared}"), drawn
    with quota.open(mover.folder / "quota.toml") as session:
        assert ledger_trouble(session) == "the ledger cannot be used; if it has moved, restart", "as health says it"
    checked = mover("check")
    assert (checked.returncode, "has moved to" in checked.stderr) == (78, True)
    assert "-> put that url into [ledger]" in mover("doctor").stdout
    again = mover("ledger", "move", here, shared)
    assert (again.returncode, again.stdout.splitlines()[0][:24]) == (0, "project p: moved already")

    mover.configure(limited(500, '[jobs.t]\nfetch = "trending"', ledger=shared))
    assert mover("charge", "videos.list", "--units", "100").returncode == 0
    assert mover("refund", ids[1]).returncode == 0
    assert mover("ledger", "move", shared, here).returncode == 0
    assert [job["job"] for job in json.loads(mover("status", "--json").stdout)["jobs"]] == ["t"]
    mover.configure(limited(500, ledger=here))
    (limit,) = mover.json("status")["credentials"][0]["limits"]
    assert limit["used_units"] == 240


def test_an_impossible_move_is_one_line_and_changes_nothing(mover: Quota, shared: str) -> None:
    here = f"sqlite:///{mover.folder}/ledger.db"
    assert "holds nothing of project p" in one_line(mover("ledger", "move", here, shared), 1)
    assert mover("charge", "videos.list").returncode == 0
    assert mover("ledger", "move", here, "redis://127.0.0.1:9/0").returncode == 69
    for new in ("sqlite:///", "sqlite://", "memory:"):
        assert "in memory is lost when the command ends" in one_line(mover("ledger", "move", here, new, "--yes"), 2)
    (mover.folder / "key").write_text("hunter2")
    assert "hunter2" not in one_line(mover("ledger", "move", here, "file:key", "--yes"), 2)
    assert mover("charge", "videos.list").returncode == 0, "its fence is given back, or over"


def test_a_project_does_not_move_to_that_of_another_api(mover: Quota, shared: str) -> None:
    here = f"sqlite:///{mover.folder}/ledger.db"
    assert mover("charge", "videos.list").returncode == 0
    mover.configure(f'[ledger]\nurl = "{shared}"\n[credentials.p]\napi = "asana"\n')
    assert mover("charge", "read").returncode == 0
    why = "project 'p' has the charges of api 'asana', and upstream counts 'youtube' separately"
    line = one_line(mover("ledger", "move", here, shared), 78)
    assert line.endswith(f"{why}; give this credential another project")
