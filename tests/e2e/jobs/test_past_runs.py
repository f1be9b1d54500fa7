"""`quota runs`: what a machine remembers of its runs."""

from __future__ import annotations

import html
import itertools
import json
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
from quota.dashboard.pages import Site
from quota.decision import Decision, LimitState
from quota.jobs.contributions import jobs
from quota.jobs.job import RunReport
from quota.jobs.store.runs import KEPT_MS, MAX_REFUSAL_CHARACTERS, UNFINISHED, run_json
from quota.jobs.store.store import Store
from quota.reports.runs import RegionOfRun, Run
from quota.terms.limits import DAY_MS, HOUR_MS
from support.commands import Quota, one_line
from support.configurations import configuration
from support.emulator import Emulator
from support.processes import Children
from support.servers import until

JOBS = """
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 2
[jobs.broken]
fetch = "trending"
regions = ["XX"]
pages = 1
"""


@pytest.fixture
def command(tmp_path: Path, upstream: Emulator) -> Quota:
    quota = Quota(tmp_path)
    quota.configure(configuration(upstream.address, JOBS, units=5))
    (tmp_path / "key").write_text("a-key-for-runs")
    return quota


def runs(command: Quota, *args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = command.json("runs", *args)["runs"]
    return found


def test_a_run_that_spent_max_units_reports_it(command: Quota) -> None:
    config = (command.folder / "quota.toml").read_text(encoding="utf-8")
    told = '[notify]\ncommand = ["sh", "-c", "cat >> told.json"]\n'
    command.configure(told + config.replace("pages = ", "max_units = 3\npages = ", 1))
    assert command.json("run", "trending")["refused_by"] == "max_units"
    assert runs(command)[0]["why"] == "this run has spent 3 of its 3 units"
    assert "this run has spent 3 of" in command("runs").stdout
    assert not (command.folder / "told.json").exists(), "the next run goes on with it"


def test_a_run_of_some_regions_names_them(command: Quota) -> None:
    command("run", "trending", "--region", "DE")
    assert re.search(r" 1 of 1: DE  ", command("runs", COLUMNS="").stdout)


def test_each_run_is_kept_with_how_it_ended(command: Quota) -> None:
    told = [command.json("run", "trending")]
    assert command("run", "broken").returncode == 1
    assert "invalidRegionCode" in command("runs").stdout, "more than: 1 of 1 regions failed"
    told.append(command.json("run", "trending"))  # refused: 5 units are used
    refused, failed, done = runs(command)
    assert [one["outcome"] for one in (refused, failed, done)] == ["stopped", "failed", "done"]
    for kept, report in ((done, told[0]), (refused, told[1])):
        for field in ("run", "job", "outcome", "units", "attempts", "refused_by", "retry_at"):
            assert kept[field] == report[field], field
        plain = [{k: v for k, v in region.items() if k != "cursor"} for region in report["regions"]]
        assert sorted(kept["regions"], key=str) == sorted(plain, key=str)
        assert kept["began_at"] <= kept["ended_at"]
    assert (done["units"], done["exit_status"], done["refusal"]) == (4, 0, None)
    assert (failed["exit_status"], failed["regions"][0]["outcome"]) == (1, "failed")
    assert "invalidRegionCode" in failed["regions"][0]["error"]
    assert refused["project"] == "main"
    assert "limit 'day' has 5 of 5 units used" in refused["why"]
    assert (refused["refusal"]["reason"], refused["refusal"]["refused_by"]) == ("limit", "day")
    assert refused["refusal"]["limits"][0]["used_units"] == 5


def test_runs_lists_runs_newest_first_and_by_job(command: Quota) -> None:
    assert "there is no store" in one_line(command("runs"), 1)
    for job in ("trending", "broken", "trending"):
        command("run", job)
    assert [one["job"] for one in runs(command)] == ["trending", "broken", "trending"]
    assert [one["job"] for one in runs(command, "--job", "broken")] == ["broken"]
    assert len(runs(command, "--limit", "1")) == 1
    assert runs(command, "--job", "nobody") == []
    shown = command("runs")
    assert shown.returncode == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for words in ("began", "outcome", "stopped", "failed", "2 of 2", "limit 'day'"):
        assert words in shown.stdout
    for name, hint in (("trendign", "did you mean 'trending'?"), ("", "known: trending, broken"), ("\udcff", "known:")):
        none = command("runs", "--job", name)
        assert none.stdout.startswith(f"no run of {name!r} in the last 7d on this machine; {hint}")
        assert (none.returncode, none.stderr) == (0, "")
    assert "--since" in one_line(command("runs", "--since", "soon"), 2)
    assert "--limit" in one_line(command("runs", "--limit", "0"), 2)


def test_a_run_that_was_killed_has_no_end(command: Quota, upstream: Emulator) -> None:
    upstream.fault("hang", ms=20_000)
    run = command.start("run", "trending", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: upstream.usage()["requests"] > 0)
    (row,) = runs(command)
    assert (row["outcome"], row["ended_at"], row["exit_status"]) == ("unfinished", None, None)
    run.send_signal(signal.SIGKILL)
    run.wait()
    (row,) = runs(command)
    assert row["outcome"] == "unfinished"
    assert "unfinished" in command("runs").stdout


def test_only_the_newest_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.jobs.store.runs.MAX_KEPT", 5)
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        for number in range(12):
            store.runs.begin(f"run{number}", "p", "j")
            assert [run.run for run in store.runs.read()] == [f"run{n}" for n in range(number, -1, -1)][:5]


def test_a_stored_run_is_bounded(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        row = store.runs.begin("r", "p", "j")
        regions = (RegionOfRun("DE", "failed", error="e" * 5_000),)
        store.runs.end(row, RunReport("r", "j", "failed", regions, why="w" * 5_000))
        (run,) = store.runs.read()
    assert len(run.why) == len(run.regions[0].error or "") == 1_000
    assert MAX_REFUSAL_CHARACTERS == 4_000


def test_a_refusal_by_one_of_many_limits_is_kept_without_the_others(tmp_path: Path) -> None:
    limits = tuple(LimitState(f"limit-{n}", 1, 5, 5, 0) for n in range(200))
    refusal = Decision(False, None, None, "main", "p", "x.y", 1, "limit", "limit-7", 0, DAY_MS, None, limits)
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        store.runs.end(store.runs.begin("r", "p", "j"), RunReport("r", "j", "stopped", (), refusal=refusal.as_json()))
        (run,) = store.runs.read()
    assert run.refusal is not None
    assert [one["name"] for one in run.refusal["limits"]] == ["limit-7"]
    assert (run.refusal["limits_left_out"], run.refusal["refused_by"]) == (199, "limit-7")


def test_why_a_run_stopped_takes_a_line_or_two(command: Quota, upstream: Emulator) -> None:
    text = (command.folder / "quota.toml").read_text(encoding="utf-8")
    command.configure(text.replace('key = "file:key"', 'key = "env:A_KEY_OF_WHICH_NOBODY_HAS_EVER_HEARD_ANYTHING"'))
    assert command("run", "trending").returncode == 78
    assert len(command("runs", COLUMNS="120").stdout.splitlines()) <= 5
    assert "instead of env:A_KEY_OF_WHICH_NOBODY_HAS_EVER_HEARD_ANYTHING" in command("runs", COLUMNS="").stdout
    command.configure(text)
    upstream.fault("exhaust", bucket="units")
    assert command("run", "trending").returncode == 0
    row = runs(command)[0]
    assert (row["refusal"]["reason"], row["refused_by"]) == ("exhausted", "units")
    assert len(command("runs").stdout.splitlines()) <= 7
    assert command.json("explain", "--job", "trending")["refused_by"] == "units"


def test_the_errors_of_many_regions_share_their_room(tmp_path: Path) -> None:
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        regions = tuple(RegionOfRun(f"R{n}", "failed", error="e" * 5_000) for n in range(100))
        store.runs.end(store.runs.begin("r", "p", "j"), RunReport("r", "j", "failed", regions))
        (run,) = store.runs.read()
    assert {len(one.error or "") for one in run.regions} == {200}


def test_runs_of_five_weeks_are_those_that_began(tmp_path: Path) -> None:
    """Against a list of them all: runs that end, runs that are killed, a clock that steps to and fro."""
    dice, now_ms = random.Random(3), 400 * DAY_MS
    begun: list[tuple[int, str, str, str]] = []
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS, clock=lambda: now_ms) as store:
        for number in range(500):
            now_ms += dice.choices([0, HOUR_MS, 9 * HOUR_MS, -3 * HOUR_MS, 30 * HOUR_MS], [1, 10, 5, 1, 0.3])[0]
            job, outcome = dice.choice(["a", "b"]), dice.choice(["done", "stopped", UNFINISHED])
            row = store.runs.begin(f"run{number}", "p", job)
            begun = [one for one in begun if one[0] > now_ms - KEPT_MS] + [(now_ms, f"run{number}", job, outcome)]
            if outcome != UNFINISHED:
                began_ms, now_ms = now_ms, now_ms + dice.choice([1, 90_000])
                store.runs.end(row, report_of(f"run{number}", job, outcome))
                now_ms = max(now_ms, began_ms)
            since_ms, wanted = now_ms - dice.randint(0, 40) * DAY_MS, dice.choice(["a", None])
            expected = [one for one in reversed(begun) if one[0] > since_ms and wanted in (None, one[2])]
            found = store.runs.read(wanted, since_ms, 30)
            assert [(run.began_ms, run.run, run.job, run.outcome) for run in found] == expected[:30]
            for run in found:
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
    url, dice, told = f"sqlite:///{tmp_path}/videos.db", random.Random(5), 0
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
        told += len(ended)
        with Store(url, retention_ms=DAY_MS) as store:
            found = [run for run in store.runs.read() if run.run.startswith(f"c{child_number}-")]
        assert [run.run for run in reversed(found) if run.ended_ms is not None][: len(ended)] == ended
        assert len(found) <= len(ended) + 1
        assert all(run.ended_ms is not None for run in found[1:])
        for run in found:
            assert_whole(run)
    assert told > 20


def report_of(name: str, job: str, outcome: Any) -> RunReport:
    """A report whose parts can be told to belong together."""
    regions = (RegionOfRun(name, "partial", 1, 1, 7),)
    limits = (LimitState(name, 1, 5, 5, 0),)
    refusal = Decision(False, None, None, "main", "p", "x.y", 1, "limit", name, 0, DAY_MS, 2 * DAY_MS, limits)
    refused = {} if outcome == "done" else {"refused_by": name, "retry_at_ms": 2 * DAY_MS, "refusal": refusal.as_json()}
    return RunReport(name, job, outcome, regions, units=7, **refused)  # type: ignore[arg-type]


def assert_whole(run: Run) -> None:
    """A run has all of its end, or nothing of it."""
    end = (run.units, run.refused_by, [one.region for one in run.regions], run.refusal and run.refusal["refused_by"])
    if run.outcome == UNFINISHED:
        assert (*end, run.ended_ms, run.retry_at_ms, run.exit_status) == (0, None, [], None, None, None, None)
    else:
        name = None if run.outcome == "done" else run.run
        assert end == (7, name, [run.run], name)
        assert run.ended_ms is not None


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("regions", "{"),
        ("regions", '[{"items": "many"}]'),
        ("units", "many"),
        ("began_at_ms", -1),
        ("outcome", b"x"),
        ("regions", "[" * 100_000),
    ],
)
def test_a_row_that_nobody_wrote_so_is_left_out(tmp_path: Path, column: str, value: object) -> None:
    path = tmp_path / "videos.db"
    with Store(f"sqlite:///{path}", retention_ms=DAY_MS) as store:
        for name in ("one", "two"):
            store.runs.end(store.runs.begin(name, "p", "j"), RunReport(name, "j", "done"))
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE past_runs SET {column} = ? WHERE run = 'one'", (value,))  # noqa: S608  # the test's own names
    db.close()
    with Store(f"sqlite:///{path}", retention_ms=DAY_MS) as store:
        assert [run.run for run in store.runs.read(since_ms=-2)] == ["two"]
        assert json.dumps([run_json(run) for run in store.runs.read()])


def test_a_run_under_way_does_not_hide_how_the_last_one_ended(
    command: Quota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("run", "broken").returncode == 1
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS) as store:
        store.runs.begin("run-2", "main", "broken")
    monkeypatch.setenv("QUOTA_STATE_DIR", command.env["QUOTA_STATE_DIR"])
    with quota.open(tmp_path / "quota.toml") as session:
        told = {one.family: one.value for one in jobs(session).samples}
    assert told["quota_run_last_exit_status"] == 1
    assert "quota_run_last_end_timestamp_seconds" in told


BEGAN_MS = 30_000 * DAY_MS
"""In 2052: runs of the last 35 days are told, whatever the day is."""


TRENDING: dict[str, Any] = {
    "run": "run-4",
    "project": "research",
    "job": "trending",
    "outcome": "unfinished",
    "why": "",
    "refused_by": None,
    "retry_at": None,
    "units": 0,
    "attempts": 0,
    "exit_status": None,
    "began_at": "2052-02-20T02:01:01.000Z",
    "ended_at": None,
    "regions": [],
    "refusal": None,
}
DONE_US = {"region": "US", "outcome": "done", "pages": 1, "items": 50, "units": 1, "error": None}
DONE_US = {"region": "US", "outcome": "done", "pages": 1, "items": 50, "units": 1, "error": None}
FAILED_XX = {"region": "XX", "outcome": "failed", "pages": 0, "items": 0, "units": 0, "error": "no <b>"}
LIMITS = (LimitState("day", 1, 5, 5, 0), LimitState("search", 1, 2, 9, 7))
REFUSAL = Decision(
    *(False, None, None, "main", "research", "x.y", 1, "limit", "day", 0, BEGAN_MS, BEGAN_MS + DAY_MS), limits=LIMITS
)
TOLD: list[dict[str, Any]] = [
    TRENDING,
    TRENDING
    | {"run": "run-3", "job": "broken", "outcome": "failed", "why": "no <b>", "exit_status": 1}
    | {"began_at": "2052-02-20T02:00:00.000Z", "ended_at": "2052-02-20T02:01:01.000Z", "regions": [FAILED_XX]},
    TRENDING
    | {"run": "run-2", "outcome": "stopped", "why": "limit 'day' has 5 of 5 units used", "refused_by": "day"}
    | {"retry_at": "2052-02-21T00:00:00.000Z", "units": 2, "attempts": 3, "exit_status": 0}
    | {"began_at": "2052-02-20T01:00:00.000Z", "ended_at": "2052-02-20T01:01:01.000Z"}
    | {"regions": [DONE_US, {**DONE_US, "region": "DE", "outcome": "partial"}], "refusal": REFUSAL.as_json()},
    TRENDING
    | {"run": "run-1", "outcome": "done", "units": 2, "attempts": 2, "exit_status": 0}
    | {"began_at": "2052-02-20T00:00:00.000Z", "ended_at": "2052-02-20T00:01:01.000Z"}
    | {"regions": [DONE_US | {"pages": 2, "items": 100, "units": 2}]},
]

TOLD_PAGES = {
    "1": "Run of trending Began 24 h TIME , took 1 min done Units 2 Attempts 2 Project research Run run-1 Exit status "
    "0 Regions What the run did in each region region outcome pages items units US done 2 100 2 All runs",
    "2": "Run of trending Began 23 h TIME , took 1 min stopped: limit 'day' has 5 of 5 units used Units 2 Attempts 3 "
    "Project research Run run-2 Exit status 0 Refused by day Goes on TIME just now Regions What the run did in "
    "each region region outcome pages items units US done 1 50 1 DE partial 1 50 1 All runs",
    "3": "Run of broken Began 22 h TIME , took 1 min failed: no <b> Units 0 Attempts 0 Project research Run run-3 Exit "
    "status 1 Regions What the run did in each region region outcome pages items units XX failed no <b> 0 0 0 All "
    "runs",
    "4": "Run of trending Began 21 h 58 min TIME unfinished Units 0 Attempts 0 Project research Run run-4 It has no "
    "end: it is still running, or it was killed. All runs",
}


@pytest.fixture
def told(tmp_path: Path) -> Quota:
    command = Quota(tmp_path)
    command.configure(configuration("http://127.0.0.1:9", JOBS))
    us, de = RegionOfRun("US", "done", 50, 1, 1), RegionOfRun("DE", "partial", 50, 1, 1, {"token": "x"})
    broken = RegionOfRun("XX", "failed", error="no <b>")
    refused: dict[str, Any] = {
        "refused_by": "day",
        "retry_at_ms": BEGAN_MS + DAY_MS,
        "why": "limit 'day' has 5 of 5 units used",
        "refusal": REFUSAL.as_json(),
    }
    reports = [
        RunReport("run-1", "trending", "done", (RegionOfRun("US", "done", 100, 2, 2),), units=2, attempts=2),
        RunReport("run-2", "trending", "stopped", (us, de), units=2, attempts=3, refused=True, **refused),
        RunReport("run-3", "broken", "failed", (broken,), why="no <b>", exit_status=1),
    ]
    now_ms = BEGAN_MS
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=DAY_MS, clock=lambda: now_ms) as store:
        for number, report in enumerate(reports):
            now_ms = BEGAN_MS + number * HOUR_MS
            row = store.runs.begin(report.run, "research", report.job)
            now_ms += 61_000
            store.runs.end(row, report)
        store.runs.begin("run-4", "research", "trending")
    return command


def test_the_json_of_runs_is_this_to_the_letter(told: Quota) -> None:
    assert told("runs", "--json").stdout == json.dumps({"runs": TOLD}, indent=2) + "\n"


def test_the_json_of_a_run_is_this_to_the_letter() -> None:
    regions = (RegionOfRun("US", "done", 50, 1, 1), RegionOfRun("DE", "partial", 20, 1, 2, {"token": "x"}, "late"))
    report = RunReport("run-2", "trending", "stopped", regions, 3, 4, "day", BEGAN_MS, refused=True, why="full")
    us = {"region": "US", "outcome": "done", "items": 50, "pages": 1, "units": 1, "cursor": None, "error": None}
    de = {"region": "DE", "outcome": "partial", "items": 20, "pages": 1, "units": 2}
    de |= {"cursor": {"token": "x"}, "error": "late"}
    ended = {"units": 3, "attempts": 4, "refused_by": "day", "retry_at": "2052-02-20T00:00:00.000Z"}
    run = {"run": "run-2", "job": "trending", "outcome": "stopped", "regions": [us, de], **ended}
    assert json.dumps(report.as_json()) == json.dumps(run)


def test_the_page_tells_the_same_runs(told: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTA_STATE_DIR", told.env["QUOTA_STATE_DIR"])
    with quota.open(told.folder / "quota.toml") as session:
        found = jobs(session).runs
        site = Site(session.settings, "in a file", shared=False)
        pages = {one.key: spoken(site.run(one, (), BEGAN_MS + DAY_MS)) for one in found}
    assert pages == TOLD_PAGES


def spoken(page: str) -> str:
    """What a page says, without its markup and without times of the local clock."""
    main = re.sub(r"<[^>]+>", " ", page.partition("<main")[2].partition("</main")[0])
    words = " ".join(html.unescape(main).partition(">")[2].split())
    return re.sub(r"(ago )?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", "TIME", words)
