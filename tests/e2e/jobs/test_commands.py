"""The application's commands as their users have them: processes of their own."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import time
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import httpx
import pytest

from quota.jobs.emulator import Emulator
from support.commands import Quota, one_line
from support.configurations import configuration
from support.web import Served

BERLIN = ZoneInfo("Europe/Berlin")
OF_AN_OLDER_VERSION = "import sqlite3; sqlite3.connect('videos.db').execute('PRAGMA user_version = 1')"


def configure(quota: Quota, address: str, *, units: int = 9_500, job: str = "") -> None:
    (quota.folder / "key").write_text("a-secret-key-for-tests")
    trending = '[jobs.trending]\nfetch = "trending"\nregions = ["US", "DE"]\npages = 4\n'
    quota.configure(configuration(address, trending + job, units=units))


def test_the_status_is_not_open_if_no_job_could_go_on(quota: Quota) -> None:
    configure(quota, "http://127.0.0.1:9", units=100, job='leave = 50\nschedule = "*/30 * * * *"')
    assert quota("status", "--check").returncode == 0
    assert quota("charge", "videos.list", "--units", "60").returncode == 0
    done = quota("status", "--check", COLUMNS="")
    assert done.returncode == 75
    why = "limit 'day' has 60 of 100 units used, this job leaves 50 to others; other calls have 40 units"
    assert re.search(rf"^FULL for its jobs until \S+: job trending: {why}$", done.stdout, re.MULTILINE)
    (state,) = quota.json("status")["credentials"]
    assert (state["open"], state["full_by"]) == (False, "day")
    (job,) = state["jobs"]
    assert (job["job"], job["could_go_on"], job["retry_at"]) == ("trending", False, state["next_at"])
    assert datetime.fromisoformat(job["next_at"]).minute in (0, 30)
    with (quota.folder / "quota.toml").open("a") as file:
        file.write('[jobs.modest]\nfetch = "trending"\nregions = ["FR"]\npages = 1\n')
        file.write('[jobs.alike]\nfetch = "trending"\nregions = ["IN"]\nleave = 50\n')
    done = quota("status", "--check", COLUMNS="")
    assert done.returncode == 0
    assert "OPEN: 40 units" in done.stdout
    assert "jobs trending, alike could not go on now: limit 'day' has 60 of 100 units used" in done.stdout
    assert quota("charge", "videos.list", "--units", "40").returncode == 0
    assert "job modest could not" not in quota("status").stdout, "the verdict has its reason"


@pytest.mark.parametrize(
    ("job", "status"),
    [
        ('fetch = "search"', 78),
        ('fetch = "search"\nmax_units = 99\noptions = { words = ["cat"] }', 2),
        ('fetch = "trending"\nsink = "nowhere:put"', 78),
        ('fetch = "trending"\nregions = ["US", "UK"]', 78),
    ],
)
def test_a_status_and_a_run_name_the_same_obstacle_of_a_job(
    quota: Quota, upstream: Emulator, job: str, status: int
) -> None:
    configure(quota, upstream.address, job=f"[jobs.words]\n{job}")
    states = {job["job"]: job for job in quota.json("status")["credentials"][0]["jobs"]}
    assert states["trending"]["could_go_on"] is True
    assert states["words"]["could_go_on"] is False
    assert states["words"]["why"] in one_line(quota("run", "words", "--quiet"), status)
    assert upstream.usage()["requests"] == 0


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        ("ln -sf /etc/passwd run-*.lock", 78),
        ("rm key", 78),
        ("""sed -i 's/^key = .*/auth = "service-account:none"/' quota.toml""", 78),
        ("""sed -i 's/^key = .*/auth = "bearer:file:none"/' quota.toml""", 78),
        ("rm videos.db*; echo 'no database' > videos.db", 1),
        (f'{sys.executable} -c "{OF_AN_OLDER_VERSION}"', 1),
        ("sed -i s/youtube-v3/youtube-v3-buckets/ quota.toml", 78),
    ],
)
def test_status_doctor_and_run_name_the_same_obstacle_of_this_machine(
    quota: Quota, upstream: Emulator, spoil: str, status: int
) -> None:
    configure(quota, upstream.address)
    assert quota("run", "trending").returncode == 0
    assert quota.shell(spoil).returncode == 0
    done = quota("status", "--check", COLUMNS="")
    assert done.returncode == 75
    why = one_line(quota("run", "trending", "--quiet"), status).removeprefix("trending: ")
    assert f"STOPPED for its jobs: job trending: {why}" in done.stdout
    doctor = quota("doctor", COLUMNS="")
    assert (doctor.returncode, any(says in doctor.stdout for says in (why.partition(";")[0], "run `quota check`"))) == (
        1,
        True,
    )


def test_a_new_machine_is_not_stopped_because_no_run_has_made_its_state_folder(
    quota: Quota, upstream: Emulator
) -> None:
    configure(quota, upstream.address)
    path = quota.folder / "quota.toml"
    path.write_text(path.read_text().replace('url = "sqlite:///videos.db"', ""))
    assert quota("status", "--check").returncode == 0
    assert not (quota.folder / "state").exists()


def test_people_read_one_moment_in_one_notation_wherever_it_stands(quota: Quota, upstream: Emulator) -> None:
    """In Berlin: local time with its offset, rounded up to the second. Programs get UTC to the millisecond."""
    configure(quota, upstream.address, units=5)
    quota.env["TZ"] = "Europe/Berlin"
    (shown,) = re.findall(r"DE page 2 at (\S+) ", quota("run", "trending").stdout)
    exact = quota.json("peek", "videos.list", status=75)["retry_at"]
    assert exact.endswith("Z")
    local = (datetime.fromisoformat(exact) + timedelta(milliseconds=999)).astimezone(BERLIN)
    assert shown == local.isoformat(timespec="seconds")
    for command in ("status", "peek videos.list", "log --refused", "explain"):
        done = quota(*command.split(), COLUMNS="")
        assert shown in done.stdout + done.stderr, command


def test_the_json_of_a_run_is_all_that_is_on_stdout(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address, units=5)
    report = quota.json("run", "trending", "--region", "DE", "--region", "US")
    assert (report["job"], report["outcome"], report["refused_by"]) == ("trending", "stopped", "day")
    regions = [(region["region"], region["outcome"], region["units"]) for region in report["regions"]]
    assert regions == [("US", "done", 4), ("DE", "partial", 1)]
    assert (report["units"], report["attempts"]) == (5, 5)
    assert report["retry_at"].endswith("Z")
    assert len(report["run"]) == 8
    spent = quota.json("spend", "--by", "job,region,run")
    rows = {(row["job"], row["region"], row["run"]) for row in spent["rows"]}
    assert rows == {("trending", region, report["run"]) for region in ("US", "DE")}


def test_failing_regions_are_one_error_line_each_and_exit_1(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address, job='[jobs.odd]\nfetch = "trending"\nregions = ["US", "XX", "QQ"]')
    done = quota("run", "odd")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("quota: ")]
    assert [error.partition(": upstream said 400 ")[0] for error in errors[:2]] == ["quota: odd XX", "quota: odd QQ"]
    assert done.stdout == "odd: failed after 1 page (3 units)\n"
    assert errors[2:] == ["quota: odd: 2 of 3 regions failed (XX, QQ)"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "trending", "--region", "FR"], 2, "has no region 'FR'; known: US, DE"),
        (["run"], 2, "name a job"),
        (["run", "trending", "--all"], 2, "give --all without a job"),
        (["emulate", "--port", "99999"], 2, "not in the range 0<=x<=65535"),
        *((["emulate", "--listen", at], 2, f"'{at}': write HOST:PORT") for at in ("9000", "::1", "[h:9", "http://h:1")),
        (["emulate", "--listen", "0.0.0.0:9000"], 2, "the emulator listens on 127.0.0.1 only"),
        (["emulate", "--quota", "-1"], 2, "quota must be 0 or more"),
        (["emulate", "--recorded", "nowhere"], 2, "nowhere"),
        (["emulate", "--errors", "101%"], 2, "--errors"),
        (["emulate", "--delay", "soon"], 2, "--delay"),
        (["demo", "--units", "0"], 2, "not in the range 1<=x<=9"),
        (["plan", "--from", "5138-11-01"], 2, "--from '5138-11-01': the year must be from 1971 to 5000"),
    ],
)
def test_invalid_input_is_one_line_with_the_reason(
    quota: Quota, upstream: Emulator, arguments: list[str], status: int, message: str
) -> None:
    configure(quota, upstream.address)
    assert message in one_line(quota(*arguments), status)


def test_a_run_on_a_terminal_shows_its_progress(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address)
    terminal, child_side = pty.openpty()
    with quota.start("run", "trending", env={"TERM": "xterm"}, stderr=child_side) as child:
        os.close(child_side)
        shown = b""
        try:
            while piece := os.read(terminal, 65_536):
                shown += piece
        except OSError:  # the other end is closed
            pass
        assert child.stdout is not None
        assert child.stdout.read() == "trending: done: 2 regions, 400 items, 8 pages (8 units)\n"
    os.close(terminal)
    assert b"trending US: done, 4 pages, 200 items" in shown
    assert b"8 of 8 pages, 8 units, 9,492 left" in shown


def test_a_run_without_the_ledger_gives_the_reason_on_stderr_and_in_json(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address)
    (quota.folder / "ledger.db").write_text("this is no database, however long one looks at it\n" * 100)
    line = one_line(quota("run", "trending"), 69)
    assert re.fullmatch(r"trending: ledger sqlite:///.*ledger.db is not an SQLite database; move it away, .*", line)
    report = quota.json("run", "trending", status=69)
    assert [region["error"] for region in report["regions"]] == [line.removeprefix("trending: "), None]


def test_no_other_library_reports_upstreams_no_more(quota: Quota) -> None:
    with Emulator(quota=3) as upstream:
        configure(quota, upstream.address)
        done = quota("run", "trending")
    assert (done.returncode, "Encountered" in done.stderr) == (0, False)
    assert done.stdout.startswith("trending: stopped after 3 pages")


@pytest.mark.parametrize("where", ["2> /dev/full", "> /dev/full 2>&1", "<&- >&- 2>&-"])
def test_a_run_needs_no_reader_of_its_output(quota: Quota, upstream: Emulator, where: str) -> None:
    configure(quota, upstream.address)
    done = quota.shell(f"quota run trending {where}")
    assert (done.returncode, upstream.usage()["requests"]) == (0, 8)
    assert "Traceback" not in done.stderr


def test_a_result_that_cannot_be_printed_is_reported_on_stderr(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address, units=5)
    done = quota.shell("quota run trending --fail-on-refusal --json > /dev/full")
    assert done.returncode == 75
    line = done.stderr.splitlines()[-1]
    assert line.startswith("quota: stdout cannot be written: No space left on device; trending: stopped after 5 pages")


def test_a_search_shows_videos_with_their_rank_in_each_region(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address, job='[jobs.mine]\nfetch = "trending"\nregions = ["US"]\npages = 1')
    quota("run", "--all")
    (title,) = [video["title"] for video in quota.json("search", "official", "--limit", "1")["videos"]]
    results = quota.json("search", title, "--region", "DE")
    assert results["region"] == "DE"
    assert {ranking["region"] for video in results["videos"] for ranking in video["rankings"]} <= {"DE"}
    lines = quota("search", "official", "--limit", "20").stdout.splitlines()
    assert len(lines) == 20
    assert all(re.search(r"\[.+, [\d,]+ views\]  (mine |trending )?\w\w #\d+", line) for line in lines)
    assert any(re.search(r"  mine US #(\d+), trending US #\1$", line) for line in lines), lines
    results = quota.json("search", "official", "--job", "mine")
    assert (results["job"], len(results["videos"]) > 0) == ("mine", True)
    assert {ranking["job"] for video in results["videos"] for ranking in video["rankings"]} == {"mine"}
    assert quota.json("search", "official", "--job", "mine", "--region", "DE")["videos"] == []
    nothing = quota("search", "official", "--job", "other")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "nothing found; known: trending, mine\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_emulator_says_where_it_listens_and_ends_cleanly(quota: Quota, number: signal.Signals, status: int) -> None:
    with Served(quota.start("emulate", "--port", "0", "--allocation", "buckets", "--quota", "3")) as served:
        configure(quota, served.address)
        report = quota.json("run", "trending")
        assert (report["outcome"], report["refused_by"], report["attempts"]) == ("stopped", "units", 4)
        usage = httpx.get(f"{served.address}/emulator/usage", timeout=100).json()
        assert (usage["requests"], usage["by_method"]) == (4, {"videos.list": 4})
        assert served.end(number) == (status, "")


def test_the_emulator_can_be_slow_and_fail_now_and_then(quota: Quota) -> None:
    with Served(quota.start("emulate", "--port", "0", "--delay", "50ms", "--errors", "50%")) as served:
        started_s, url = time.monotonic(), f"{served.address}/youtube/v3/videos?key=x"
        assert [httpx.get(url, timeout=100).status_code for _ in range(4)] == [400, 503, 400, 503]
        assert time.monotonic() - started_s >= 0.2


def test_the_demo_shows_the_whole_product_and_leaves_nothing_behind(quota: Quota) -> None:
    done = quota("demo", TMPDIR=str(quota.folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trending: done: 8 regions, 1,600 items, 32 pages (32 units)\n")
    assert "upstream counted 32 requests, the ledger charged 32" in done.stdout
    assert "pacific-day" in done.stdout
    assert done.stdout.splitlines()[-1] == "next, with your own key: quota init"
    assert len(done.stderr.splitlines()) == 8
    assert list(quota.folder.iterdir()) == []


def test_a_demo_that_is_kept_goes_on_where_it_was_refused(quota: Quota) -> None:
    assert "--keep '' is not the path of a folder" in one_line(quota("demo", "--keep", ""), 2)
    first = quota.json("demo", "--keep", "kept", "--units", "10")
    assert (first["outcome"], first["attempts"]) == ("stopped", 10)
    second = quota.json("demo", "--keep", "kept", "--units", "40")
    assert (second["outcome"], second["attempts"]) == ("done", 22)
    # The folder is a working installation: the other commands read it.
    assert quota("check", "--config", "kept/quota.toml").returncode == 0
    assert quota("search", "official", "--config", "kept/quota.toml").stdout


def test_a_demo_does_not_overwrite_a_configuration(quota: Quota, upstream: Emulator) -> None:
    configure(quota, upstream.address)
    before = (quota.folder / "quota.toml").read_bytes()
    assert "has a quota.toml that is not the demo" in one_line(quota("demo", "--keep", "."), 2)
    assert "Not a directory; name a folder" in one_line(quota("demo", "--keep", "quota.toml"), 2)
    assert (quota.folder / "quota.toml").read_bytes() == before
