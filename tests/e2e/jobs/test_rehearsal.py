"""`--dry-run` and `--clock` show what a run would do, and leave everything as it was; `--all` runs all jobs."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quota.jobs.emulator import Emulator
from quota.jobs.plan.simulation import EMPTY, read_state
from quota.session import Session
from quota.settings.load import load_settings
from support.commands import Quota, one_line
from support.configurations import configuration

JOB = """
[jobs.trending]
fetch = "trending"
regions = ["US", "DE"]
pages = 4
ping = "env:PING"
{more}
[notify]
command = ["sh", "-c", "cat >> {folder}/events"]
"""


def configure(quota: Quota, address: str, ledger: str = "sqlite:///ledger.db", more: str = "") -> None:
    (quota.folder / "key").write_text("a-key")
    quota.env["PING"] = f"{address}/ping"
    jobs = JOB.format(folder=quota.folder, more=more)
    quota.configure(f'textfile = "{quota.folder}"' + configuration(address, jobs, units=5, ledger=ledger))


def files(folder: Path) -> dict[str, bytes]:
    """All that there is, but for SQLite's own bookkeeping beside its files, and the test's programs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def test_a_rehearsal_of_tomorrow_goes_on_where_the_run_stopped_and_changes_nothing(
    quota: Quota, upstream: Emulator, ledger_url: str
) -> None:
    configure(quota, upstream.address, ledger_url)
    assert "stopped after 5 pages" in quota("run", "trending", "--quiet", "--fail-on-refusal").stdout
    before = files(quota.folder)
    sooner = quota("run", "trending", "--clock", "+23h")
    assert (sooner.returncode, "(in 59m" in sooner.stdout) == (0, True)
    assert "stopped after 0 pages" in sooner.stdout
    done = quota("run", "trending", "--clock", "+1d")
    line = "rehearsal: trending: done: 1 region, 150 items, 3 pages (3 units); this round had covered US before\n"
    assert done.stdout == line
    assert done.stderr == "rehearsal: trending DE: done, 3 pages, 150 items\n"
    report = quota.json("run", "trending", "--clock", "+1d")
    assert (report["rehearsal"], report["outcome"], report["units"]) == (True, "done", 3)
    limits = quota.json("status", "--clock", "+1d")["credentials"][0]["limits"]
    assert [limit["used_units"] for limit in limits] == [0]
    shown = quota("status", "--clock", "+6h", COLUMNS="").stdout.splitlines()
    assert shown[0].startswith(f"rehearsal: ledger copy of {ledger_url.partition(':')[0]}://")
    assert [line for line in shown if not line.startswith("rehearsal: ")] == []
    narrow = quota("status", "--clock", "+6h", COLUMNS="60").stdout.splitlines()
    assert max(map(len, narrow)) <= 60
    assert files(quota.folder) == before
    assert [row["used_units"] for row in quota.json("status")["credentials"][0]["limits"]] == [5]
    with closing(sqlite3.connect(quota.folder / "videos.db")) as db, db:
        db.execute("UPDATE checkpoints SET started_at_ms = 1")  # the first page is older than `retention`
    assert quota.json("run", "trending", "--dry-run")["regions"] == [{"region": "DE", "page": 1}]


def test_a_rehearsal_calls_no_other_machine_and_no_sink_and_has_a_valid_time(quota: Quota, upstream: Emulator) -> None:
    configure(quota, "https://youtube.googleapis.com")
    refused = quota("run", "trending", "--clock", "+1d")
    assert (refused.returncode, refused.stderr.count("\n")) == (78, 1)
    assert "start `quota emulate`" in refused.stderr
    for at in ("", "+1y", "-1d", "2026-11-29", "+999999d"):
        assert "--clock" in one_line(quota("run", "trending", "--clock", at), 2), at
    (quota.folder / "mine.py").write_text(
        "import socket\n"
        "from quota.jobs.job import Page\n"
        "def fetch(client, region, cursor):\n"
        "    if region == 'away':\n"
        "        socket.create_connection(('192.0.2.1', 80), 1)\n"
        "    return Page(rows={'things': [{'id': region}]})\n"
        "def sink(page, job, region):\n"
        "    open('written', 'w').close()\n"
    )
    more = '[jobs.mine]\nfetch = "mine:fetch"\nsink = "mine:sink"\nregions = ["here"]\npages = 1\n'
    configure(quota, upstream.address, more=more)
    assert "done: 1 region" in quota("run", "mine", "--clock", "+1d").stdout
    assert not (quota.folder / "written").exists()
    configure(quota, upstream.address, more=more.replace("here", "away"))
    failed = quota("run", "mine", "--clock", "+1d")
    assert failed.returncode == 1
    assert "a rehearsal does not call 192.0.2.1" in failed.stderr


def test_a_dry_run_shows_the_cost_of_a_run_and_does_nothing(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address)
    before = files(quota.folder)
    done = quota("run", "trending", "--dry-run")
    assert done.stderr == ""
    first, second, third = done.stdout.splitlines()
    assert [first, second] == ["trending: would cover US, DE", "trending: at most 8 calls of videos.list, 8 units"]
    assert third.startswith("trending: the first 5 calls (5 units) fit now; then limit 'day' has 5 of 5 units used; ")
    assert (upstream.usage()["requests"], files(quota.folder)) == (0, before)
    assert quota("run", "trending", "--dry-run", "--fail-on-refusal").returncode == 75
    with Session(load_settings(quota.folder / "quota.toml")) as session:
        assert read_state(session) is EMPTY, "one simulation is enough"
    quota("run", "trending")
    with Session(load_settings(quota.folder / "quota.toml")) as session:
        _, de = read_state(session).checkpoints["trending"]
    assert (de.region, de.pending, de.pages) == ("DE", True, 1), "a plan begins there"
    for lost in quota.folder.glob("ledger.db*"):
        lost.unlink()
    assert quota.json("run", "trending", "--dry-run")["fitting_units"] == 0, "this machine's charges come back first"
    ahead = quota.json("run", "trending", "--dry-run", "--clock", "+1d")
    assert ahead["regions"] == [{"region": "DE", "page": 2}]
    assert ahead["calls"] == [{"method": "videos.list", "calls": 3, "units": 3}]
    assert (ahead["rehearsal"], ahead["dry_run"], ahead["fits"], ahead["retry_at"]) == (True, True, True, None)
    path = quota.folder / "quota.toml"
    path.write_text(path.read_text().replace("pages = 4", "pages = 1"))
    assert quota("run", "trending", "--dry-run").stdout.startswith(f"{first}\ntrending: at most 2 calls")
    assert quota("place", "list").stdout.count("this round is done") == 2, "page 2 of DE does not come"


def test_a_dry_run_knows_what_one_run_may_spend_and_calls_without_a_price(quota: Quota) -> None:
    (quota.folder / "mine.py").write_text("def fetch(client, region, cursor): ...\n")
    more = 'max_units = 3\n[jobs.mine]\nfetch = "mine:fetch"\npages = 2\n'
    configure(quota, "http://127.0.0.1:9", more=more)
    ahead, mine = quota.json("run", "--all", "--dry-run")
    assert (ahead["fitting_calls"], ahead["refused_by"]) == (3, "max_units")
    assert mine["calls"] == [{"method": "unknown", "calls": 2, "units": 2}]
    assert mine["fits"], "what the first job leaves"


def test_a_dry_run_under_a_pace_has_what_is_released(quota: Quota) -> None:
    configure(quota, "http://127.0.0.1:9")
    path = quota.folder / "quota.toml"
    paced = 'units = 16, window = { calendar = "day", zone = "UTC" }, pacing = true'
    path.write_text(path.read_text().replace('units = 5, window = "24h"', paced))
    tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}T00:00:00Z"
    assert quota.json("run", "trending", "--dry-run", "--clock", tomorrow)["fitting_calls"] == 2


def test_a_rehearsal_leaves_out_what_another_program_wrote_into_the_ledger(quota: Quota) -> None:
    configure(quota, "http://127.0.0.1:9")
    quota("charge", "videos.list")
    with closing(sqlite3.connect(quota.folder / "ledger.db", isolation_level=None)) as ledger:
        ledger.execute("UPDATE log SET line = 'x'")
    assert quota.json("status", "--clock", "+1h")["credentials"][0]["limits"][0]["used_units"] == 0


@pytest.mark.parametrize(
    ("job", "status"), [('fetch = "mine:fetch"', 2), ('fetch = "trending"\nsink = "mine:gone"', 78)]
)
def test_a_dry_run_and_a_plan_refuse_a_job_that_cannot_run(quota: Quota, job: str, status: int) -> None:
    (quota.folder / "mine.py").write_text(
        "from quota.jobs.job import first_attempt\n@first_attempt('none')\ndef fetch(client, region, cursor): ...\n"
    )
    configure(quota, "http://127.0.0.1:9", more=f'[jobs.mine]\n{job}\nschedule = "every 6h"\n')
    for command in (["run", "mine", "--dry-run"], ["plan"], ["run", "mine", "--quiet"]):
        assert "mine:" in one_line(quota(*command), status), command


def test_a_dry_run_has_the_prices_of_its_day(quota: Quota) -> None:
    (quota.folder / "own.toml").write_text(
        'api = "own"\nsource = "x"\nread_on = 2026-11-01\n[buckets.units]\nquota = 100\nresets = "24h"\n'
        "[default]\nget = 1\nother = 1\n[methods]\nnew = 1\n"
        "old = { prices = [{ units = 10 }, { units = 25, since = 2099-12-01 }] }\n"
    )
    (quota.folder / "mine.py").write_text(
        "from quota.jobs.job import first_attempt\n@first_attempt('old')\ndef fetch(client, region, cursor): ...\n"
    )
    limits = 'limits = [{ name = "new", units = 5, window = "24h", methods = ["new"] }]'
    quota.configure(f'[credentials.main]\napi = "./own.toml"\n{limits}\n[jobs.j]\nfetch = "mine:fetch"\npages = 1\n')
    assert quota.json("run", "j", "--dry-run")["calls"] == [{"method": "old", "calls": 1, "units": 10}]
    assert "(10 units) on main; no limit counts it" in quota("peek", "old").stdout
    book = (quota.folder / "own.toml").read_text().replace("new = 1", "new = 2").replace("2099", "2030")
    (quota.folder / "own.toml").write_text(book.replace("units = 10", "units = 1"))
    (quota.folder / "free.py").write_text("def fetch(client, region, cursor): ...\n")
    text = (quota.folder / "quota.toml").read_text().replace(', methods = ["new"]', "")
    quota.configure(text.replace("mine", "free"))
    for later in ("+1d", "+3600d"):  # the cheapest call stands for the job, whose function names none
        assert quota.json("status", "--clock", later)["credentials"][0]["jobs"][0]["could_go_on"], later


def test_a_dry_run_of_a_search_has_both_of_its_calls(quota: Quota) -> None:
    configure(quota, "http://127.0.0.1:9")
    path = quota.folder / "quota.toml"
    text = path.read_text().replace("units = 5", "units = 301").replace('fetch = "trending"', 'fetch = "search"')
    path.write_text(text.replace("pages = 4", 'pages = 2\noptions = { words = "x" }'))
    ahead = quota.json("run", "trending", "--dry-run", "--region", "DE")
    assert [tuple(row.values()) for row in ahead["calls"]] == [("search.list", 2, 200), ("videos.list", 2, 2)]
    assert ahead["fits"]
    assert quota.json("run", "trending", "--dry-run")["fitting_units"] == 202, "the third search does not fit"
    path.write_text(path.read_text().replace("units = 301", "units = 100"))
    assert "trending: the first call (100 units) fits now; then " in quota("run", "trending", "--dry-run").stdout
    broken = '[jobs.broken]\nfetch = "nothing:here"\nregions = ["US"]\npages = 1\n[jobs.trending]'
    path.write_text(path.read_text().replace("units = 100", "units = 99").replace("[jobs.trending]", broken))
    assert one_line(quota("run", "trending", "--dry-run"), 2).startswith("trending: search.list costs 100 units")
    worst = quota("run", "--all", "--dry-run")
    assert (worst.returncode, "quota: trending: search.list costs 100 " in worst.stderr) == (78, True)


def test_the_next_job_tries_an_address_once_that_did_not_answer_the_last(quota: Quota) -> None:
    configure(quota, "http://127.0.0.1:9", more='[jobs.more]\nfetch = "trending"\nregions = ["FR", "IN"]\npages = 1\n')
    first, second = quota.json("run", "--all", status=1)
    assert [region["outcome"] for region in first["regions"] + second["regions"]] == ["failed"] * 3 + ["skipped"]
    assert "in 1 attempt to reach http://127.0.0.1:9" in second["regions"][0]["error"]


def test_all_jobs_run_in_their_order_and_the_worst_status_counts(quota: Quota, upstream: Emulator) -> None:
    more = (
        '[jobs.broken]\nfetch = "nothing:here"\nregions = ["US"]\npages = 1\n'
        '[jobs.more]\nfetch = "trending"\nregions = ["FR"]\npages = 1\n'
    )
    configure(quota, upstream.address, more=more)
    done = quota("run", "--all")
    assert done.returncode == 78
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["trending", "broken", "more"]
    assert "nothing" in done.stderr
    reports = quota.json("run", "--all", status=78)
    assert [row["outcome"] for row in reports] == ["stopped", "failed", "stopped"]
    assert len({row["run"] for row in reports}) == 3
    fits = quota("run", "--all", "--dry-run")
    assert ("broken: " in one_line(fits, 78), "more: would cover FR" in fits.stdout) == (True, True)
    rehearsal = quota.json("run", "--all", "--clock", "+1d", status=78)
    assert [(row["rehearsal"], row["units"]) for row in rehearsal] == [(True, 3), (True, 0), (True, 1)]
    for words in (["run"], ["run", "trending", "--all"], ["run", "--all", "--region", "US"]):
        one_line(quota(*words), 2)
    assert os.listdir(quota.folder).count("events") == 1
