"""`quota runs`: what a machine remembers of its runs."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.decision import Decision, LimitState
from quota.jobs.contributions import jobs
from quota.jobs.job import RunReport
from quota.jobs.store.runs import KEPT_MS, UNFINISHED
from quota.jobs.store.store import Store
from quota.reports.runs import RegionOfRun, Run
from quota.terms.limits import DAY_MS, HOUR_MS
from support.commands import Quota, one_line
from support.configurations import configuration
from support.emulator import Emulator
from support.processes import Children
from support.servers import free_port, until

JOBS = """
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 2
[jobs.broken]
fetch = "trending"
regions = ["XX", "YY"]
pages = 1
"""


@pytest.fixture
def command(tmp_path: Path, upstream: Emulator) -> Quota:
    quota = Quota(tmp_path)
    quota.configure(configuration(upstream.address, JOBS, units=6))
    (tmp_path / "key").write_text("a-key-for-runs")
    return quota


def runs(command: Quota, *args: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = command.json("runs", *args)["runs"]
    return rows


def test_a_run_that_spent_max_units_reports_it(command: Quota) -> None:
    config = (command.folder / "quota.toml").read_text(encoding="utf-8")
    notify = '[notify]\ncommand = ["sh", "-c", "cat >> told.json"]\n'
    command.configure(notify + config.replace("pages = ", "max_units = 3\npages = ", 1))
    assert command.json("run", "trending")["refused_by"] == "max_units"
    assert runs(command)[0]["why"] == "this run has spent 3 of its 3 units"
    assert "this run has spent 3 of" in command("runs").stdout
    assert "had spent its max_units" in one_line(command("explain", "--job", "trending"), 1)
    assert not (command.folder / "told.json").exists(), "the next run goes on with it"


def test_each_run_is_kept_with_how_it_ended(command: Quota) -> None:
    reports = [command.json("run", "trending")]
    assert command("run", "broken").returncode == 1
    assert "invalidRegionCode" in command("runs").stdout, "more than: 2 of 2 regions failed"
    assert re.search("the last day failed, .*invalidRegionCode.*since: XX, YY\n", command("doctor", COLUMNS="").stdout)
    reports.append(command.json("run", "trending"))  # refused: 6 units are used
    refused, failed, done = runs(command)
    assert [each["outcome"] for each in (refused, failed, done)] == ["stopped", "failed", "done"]
    for kept, report in ((done, reports[0]), (refused, reports[1])):
        for field in ("run", "job", "outcome", "units", "attempts", "refused_by", "retry_at"):
            assert kept[field] == report[field], field
        plain = [{k: v for k, v in region.items() if k != "cursor"} for region in report["regions"]]
        assert sorted(kept["regions"], key=str) == sorted(plain, key=str)
        assert kept["began_at"] <= kept["ended_at"]
    assert (done["units"], done["exit_status"], done["refusal"]) == (4, 0, None)
    assert (failed["exit_status"], failed["regions"][0]["outcome"]) == (1, "failed")
    assert refused["project"] == "main"
    assert "limit 'day' has 6 of 6 units used" in refused["why"]
    assert (refused["refusal"]["reason"], refused["refusal"]["refused_by"]) == ("limit", "day")
    assert refused["refusal"]["limits"][0]["used_units"] == 6


def test_runs_lists_runs_newest_first_and_by_job(command: Quota) -> None:
    assert "there is no store" in one_line(command("runs"), 1)
    assert not (command.folder / "videos.db").exists(), "reading makes none"
    for job in ("trending", "broken", "trending"):
        command("run", job)
    assert [each["job"] for each in runs(command)] == ["trending", "broken", "trending"]
    assert [each["job"] for each in runs(command, "--job", "broken")] == ["broken"]
    assert len(runs(command, "--limit", "1")) == 1
    assert runs(command, "--job", "nobody") == []
    shown = command("runs")
    assert shown.returncode == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for words in ("began", "outcome", "stopped", "failed", "2 of 2", "limit 'day'", runs(command)[0]["run"]):
        assert words in shown.stdout
    command.configure((command.folder / "quota.toml").read_text(encoding="utf-8").replace('"XX", "YY"', '"DE"'))
    assert "0 of 2: XX, YY" in command("runs", COLUMNS="").stdout, "the job no longer has that region"
    for name, hint in (("trendign", "did you mean 'trending'?"), ("", "known: trending, broken"), ("\udcff", "known:")):
        none = command("runs", "--job", name)
        assert none.stdout.startswith(f"no run of {name!r} in the last 7d on this machine; {hint}")
        assert (none.returncode, none.stderr) == (0, "")


def test_a_run_that_was_killed_has_no_end(command: Quota, upstream: Emulator) -> None:
    upstream.fault("hang", ms=300_000)
    run = command.start("run", "trending", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: upstream.usage()["requests"] > 0)
    (row,) = runs(command)
    assert (row["outcome"], row["ended_at"], row["exit_status"]) == ("unfinished", None, None)
    assert "noted no end" not in command("doctor").stdout
    run.send_signal(signal.SIGKILL)
    run.wait()
    (row,) = runs(command)
    assert (row["outcome"], row["attempts"], row["units"]) == ("unfinished", 1, 1), "as the ledger's log tells"
    assert command("run", "trending", QUOTA__LEDGER__URL=f"redis://127.0.0.1:{free_port()}/0").returncode == 69
    doctor = " ".join(command("doctor").stdout.split())
    assert "1 run of the last day noted no end" in doctor, "whatever came then"
    assert "not fetched here since: US, DE ->" in doctor
    assert re.search(f"{runs(command)[0]['run']}.*`quota runs`", one_line(command("explain"), 1)), "it did not report"
    (command.folder / "open").mkdir()
    (command.folder / "open").chmod(0o777)
    for url in (f"redis://127.0.0.1:{free_port()}/0", f"sqlite:///{command.folder}/open/ledger.db"):
        table = command("runs", QUOTA__LEDGER__URL=url, COLUMNS="")
        assert re.search("[?] of 2 .* it runs, was killed", table.stdout), "without a ledger, too"
        assert table.stderr.startswith("the units of runs without an end are not known: ledger ")
    assert command("run", "trending").returncode == 0
    assert "noted no end" not in command("doctor").stdout, "its regions are fetched"


def test_only_the_newest_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.jobs.store.runs.MAX_KEPT", 5)
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        for number in range(12):
            store.runs.begin(f"run{number}", "p", "j")
            assert [run.run for run in store.runs.read()] == [f"run{n}" for n in range(number, -1, -1)][:5]


def test_a_stored_run_is_bounded(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        row = store.runs.begin("r", "p", "j")
        regions = tuple(RegionOfRun(f"R{n}", "failed", error="e" * 5_000) for n in range(100))
        store.runs.end(row, RunReport("r", "j", "failed", regions, why="w" * 5_000))
        (run,) = store.runs.read()
    assert len(run.why) == 1_000
    assert {len(each.error or "") for each in run.regions} == {200}, "the errors of many regions share their room"


@pytest.mark.parametrize(("column", "value"), [("units", "many"), ("regions", "[" * 100_000), ("outcome", b"x")])
def test_a_row_that_nobody_wrote_so_is_left_out(tmp_path: Path, column: str, value: object) -> None:
    path = tmp_path / "videos.db"
    with Store(f"sqlite:///{path}", retention_ms=DAY_MS) as store:
        for name in ("one", "two"):
            store.runs.end(store.runs.begin(name, "p", "j"), RunReport(name, "j", "done"))
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE past_runs SET {column} = ? WHERE run = 'one'", (value,))  # noqa: S608  # the test's own names
    db.close()
    with Store(f"sqlite:///{path}", retention_ms=DAY_MS) as store:
        assert [run.run for run in store.runs.read()] == ["two"]


def test_runs_of_five_weeks_are_those_that_began(tmp_path: Path) -> None:
    """Against a list of them all: runs that end, runs that are killed, a clock that steps to and fro."""
    dice, now_ms = random.Random(3), 400 * DAY_MS
    begun: list[tuple[int, str, str, str]] = []
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS, clock=lambda: now_ms) as store:
        for number in range(500):
            now_ms += dice.choices([0, HOUR_MS, 9 * HOUR_MS, -3 * HOUR_MS, 30 * HOUR_MS], [1, 10, 5, 1, 0.3])[0]
            job, outcome = dice.choice(["a", "b"]), dice.choice(["done", "stopped", UNFINISHED])
            row = store.runs.begin(f"run{number}", "p", job)
            begun = [each for each in begun if each[0] > now_ms - KEPT_MS] + [(now_ms, f"run{number}", job, outcome)]
            if outcome != UNFINISHED:
                began_ms, now_ms = now_ms, now_ms + dice.choice([1, 90_000])
                store.runs.end(row, report_of(f"run{number}", job, outcome))
                now_ms = max(now_ms, began_ms)
            since_ms, wanted = now_ms - dice.randint(0, 40) * DAY_MS, dice.choice(["a", None])
            expected = [each for each in reversed(begun) if each[0] > since_ms and wanted in (None, each[2])]
            kept = store.runs.read(wanted, since_ms, 30)
            assert [(run.began_ms, run.run, run.job, run.outcome) for run in kept] == expected[:30]
            for run in kept:
                assert_whole(run)
    assert 100 < len(begun) < 450


def _keep_for_ever(url: str, child: str, into: int) -> None:
    with Store(url, retention_ms=DAY_MS) as store:
        for number in itertools.count():
            name = f"{child}-{number}"
            row = store.runs.begin(name, "p", "j")
            store.runs.end(row, report_of(name, "j", "stopped"))
            os.write(into, f"{name}\n".encode())


def test_a_run_is_kept_whole_or_without_an_end_whenever_it_is_killed(tmp_path: Path) -> None:
    url, dice, count = f"sqlite:///{tmp_path}/videos.db", random.Random(5), 0
    Store(url, retention_ms=DAY_MS).close()
    for child_number in range(8):
        out, into = os.pipe()
        child = Children(_keep_for_ever, (url, f"c{child_number}", into))
        os.close(into)
        with open(out, encoding="ascii") as pipe:
            lines = [pipe.readline() for _ in range(dice.randint(1, 9))]
            time.sleep(dice.uniform(0, 0.01))  # whatever it is doing then
            child.kill()
            ended = "".join([*lines, pipe.read()]).split()
        count += len(ended)
        with Store(url, retention_ms=DAY_MS) as store:
            kept = [run for run in store.runs.read() if run.run.startswith(f"c{child_number}-")]
        assert [run.run for run in reversed(kept) if run.ended_ms is not None][: len(ended)] == ended
        assert len(kept) <= len(ended) + 1
        assert all(run.ended_ms is not None for run in kept[1:])
        for run in kept:
            assert_whole(run)
    assert count > 20


def report_of(name: str, job: str, outcome: Any) -> RunReport:
    """A report whose parts can be told to belong together."""
    regions = (RegionOfRun(name, "partial", 1, 1, 7),)
    limits = (LimitState(name, 1, 5, 5, 0),)
    refusal = Decision(False, None, None, "main", "p", "x.y", 1, "limit", name, 0, DAY_MS, 2 * DAY_MS, limits)
    refused = {} if outcome == "done" else {"refused_by": name, "retry_at_ms": 2 * DAY_MS, "refusal": refusal.as_json()}
    return RunReport(name, job, outcome, regions, units=7, **refused)  # type: ignore[arg-type]


def assert_whole(run: Run) -> None:
    end = (run.units, run.refused_by, [each.region for each in run.regions], run.refusal and run.refusal["refused_by"])
    if run.outcome == UNFINISHED:
        assert (*end, run.ended_ms, run.retry_at_ms, run.exit_status) == (0, None, [], None, None, None, None)
    else:
        name = None if run.outcome == "done" else run.run
        assert end == (7, name, [run.run], name)
        assert run.ended_ms is not None


def test_a_run_under_way_does_not_hide_how_the_last_one_ended(
    command: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("run", "broken").returncode == 1
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        store.runs.begin("run-2", "main", "broken")
    monkeypatch.setenv("QUOTA_STATE_DIR", command.env["QUOTA_STATE_DIR"])
    with quota.open(tmp_path / "quota.toml") as session:
        values = {each.family: each.value for each in jobs(session).samples}
    assert values["quota_run_last_exit_status"] == 1
    assert "quota_run_last_end_timestamp_seconds" in values
