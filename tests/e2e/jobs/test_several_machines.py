"""One job on several machines over one Redis: a region belongs to one store at a time, nothing is fetched twice."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.jobs.contributions import standing
from quota.jobs.emulator import Emulator
from quota.jobs.places import hold_ms
from quota.reports.status import read_status
from quota.settings.load import load_settings
from quota.terms.limits import HOUR_MS, MINUTE_MS
from quota.wording import jobs_alone, status_parts
from support.configurations import configuration
from support.disks import small_disk
from support.explaining import text_of
from support.installation import Installation
from support.servers import RedisServer, until

HOST = socket.gethostname()
START_MS = 1_795_204_800_000

HOLDS = """
import os, time
from quota.jobs.job import Page, first_attempt
from quota.jobs.fetches import trending

@first_attempt("videos.list")
def fetch(client, region, cursor):
    page = trending(client, region, cursor)
    open("at-a-page", "w").close()
    while os.path.exists("hold"):
        time.sleep(0.01)
    return page
"""

FILLS = """
def put(page, job, region):
    __import__("os").system("mkdir disk/page || (SIGNALS; cat /dev/zero > disk/ballast)")
"""

TWO_HOURS_BEHIND = """
import time, runpy
right_ns = time.time_ns
time.time_ns = lambda: right_ns() - 7_200_000_000_000
runpy.run_module("quota", run_name="__main__")
"""


class Machine(Installation):
    """A folder with a state folder and a store of its own, and the job that all machines have."""

    def configure(
        self, ledger: str, *, job: str = "", store: str = "", regions: tuple[str, ...] = ("US", "DE"), **more: str
    ) -> None:
        assert self.upstream is not None
        (self.folder / "holds.py").write_text(HOLDS)
        fetch, unavailable = more.get("fetch", "trending"), more.get("unavailable", "")
        jobs = f'[jobs.t]\nfetch = "{fetch}"\nregions = {json.dumps(regions)}\npages = 2\n{job}'
        address, given = self.upstream.address, {"unavailable": unavailable, "store": store}
        self.quota.configure(configuration(address, jobs, ledger=ledger, **given))

    def outcome(self, *args: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.quota.json("run", "t", *args)
        return answer

    def hold_a_page(self, *args: str) -> subprocess.Popen[str]:
        """A run that stays in its first page until the file `hold` is gone."""
        (self.folder / "at-a-page").unlink(missing_ok=True)
        (self.folder / "hold").touch()
        process = self.start("run", "t", "--json", *args)
        until((self.folder / "at-a-page").exists)
        return process

    def let_go(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        (self.folder / "hold").unlink()
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err
        answer: dict[str, Any] = json.loads(out)
        return answer


@pytest.fixture
def web(tmp_path: Path, upstream: Emulator, shared: str) -> Machine:
    machine = Machine(tmp_path / "web", upstream)
    machine.configure(shared)
    return machine


@pytest.fixture
def other(web: Machine, shared: str) -> Machine:
    machine = Machine(web.folder.with_name("other"), web.upstream)
    machine.configure(shared)
    return machine


def outcomes(answer: dict[str, Any]) -> dict[str, str]:
    return {region["region"]: region["outcome"] for region in answer["regions"]}


def test_the_same_cron_line_at_the_same_second_fetches_nothing_twice(web: Machine, other: Machine) -> None:
    for _ in range(3):
        runs = [machine.start("run", "t", "--json") for machine in (web, other)]
        answers = [json.loads(run.communicate(timeout=300)[0]) for run in runs]
        assert [run.returncode for run in runs] == [0, 0]
        assert sorted(answer["outcome"] for answer in answers) == ["done", "elsewhere"]
    assert web.requests == 3 * 4, "three rounds of two regions with two pages"
    assert sorted(machine.count("rankings") > 0 for machine in (web, other)) == [False, True]


def test_the_other_machine_says_in_one_line_where_the_job_runs(web: Machine, other: Machine) -> None:
    assert web.outcome()["outcome"] == "done"
    done = other.quota("run", "t")
    assert done.returncode == 0
    assert done.stdout.startswith(f"t: runs on {HOST} (last ")
    assert done.stdout.count("\n") == 1
    assert "s ago); taken over if silent until " in done.stdout
    assert done.stdout.endswith("; this store is new to it: `quota run t --here` takes over now\n")
    assert done.stderr == ""
    assert "this store is new to it" not in other.quota("run", "t").stdout, "only once"
    assert "; this store has nothing of it" in other.quota("search", "video").stderr
    quiet = other.quota("run", "t", "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    answer = other.outcome("--fail-on-refusal")
    assert (answer["outcome"], answer["runs_on"]) == ("elsewhere", HOST)
    assert answer["until"].endswith("Z")
    assert outcomes(answer) == {"US": "skipped", "DE": "skipped"}
    assert (answer["units"], answer["attempts"]) == (0, 0)


def test_search_on_the_other_machine_says_how_old_its_data_is(web: Machine, other: Machine, shared: str) -> None:
    other.outcome()
    assert "elsewhere" not in other.quota.json("search", "video")
    web.outcome("--here")
    other.outcome()
    other.configure("redis://127.0.0.1:1/0")  # the ledger is not asked
    done = other.quota("search", "video")
    assert f"t runs on {HOST} (as of " in done.stderr
    assert "; this store has what was fetched here until " in done.stderr
    (row,) = other.quota.json("search", "video")["elsewhere"]
    assert (row["job"], row["runs_on"]) == ("t", HOST)
    assert row["fetched_at"] <= row["heard_at"] <= row["until"]
    other.configure(shared)
    other.outcome("--here")
    assert other.quota("search", "video").stderr == ""


def test_run_here_takes_over_and_the_replaced_machine_keeps_its_page_and_stops(
    web: Machine, other: Machine, shared: str
) -> None:
    web.configure(shared, fetch="holds:fetch")
    other.configure(shared, fetch="holds:fetch")
    process = web.hold_a_page()
    assert other.outcome()["outcome"] == "elsewhere"
    taken = other.outcome("--here")
    assert outcomes(taken) == {"US": "done", "DE": "done"}
    answer = web.let_go(process)
    assert (answer["outcome"], answer["runs_on"]) == ("elsewhere", HOST)
    assert outcomes(answer) == {"US": "partial", "DE": "skipped"}
    assert [region["pages"] for region in answer["regions"]] == [1, 0], "the page in hand is kept"
    assert process.returncode == 0
    assert web.requests == 1 + 4
    assert web.quota("run", "t").stdout.startswith(f"t: runs on {HOST} ")


def test_a_run_fetches_its_regions_and_skips_those_elsewhere(web: Machine, other: Machine) -> None:
    assert outcomes(web.outcome("--region", "DE")) == {"DE": "done"}
    answer = other.outcome()
    assert (answer["outcome"], answer["runs_on"]) == ("done", HOST)
    assert outcomes(answer) == {"US": "done", "DE": "skipped"}
    output = other.quota("run", "t").stdout
    assert output.startswith("t: done: 1 region, ")
    assert f"; the rest runs on {HOST} " in output
    assert other.count("checkpoints WHERE region = 'DE'") == 0
    assert f"t DE: runs on {HOST}; here page 1 comes next" in other.quota("place", "show", "t").stdout
    assert outcomes(web.outcome()) == {"DE": "done", "US": "skipped"}


def test_a_machine_that_cannot_run_the_job_does_not_keep_it(web: Machine, other: Machine) -> None:
    (web.folder / "key").unlink()
    assert web.quota("run", "t").returncode == 78
    assert other.outcome()["outcome"] == "done"
    (web.folder / "key").write_text("a-key")
    assert web.outcome()["outcome"] == "elsewhere"
    assert web.quota("run", "t", "--here", script=TWO_HOURS_BEHIND).returncode == 69, "so that cron sees it"
    assert other.outcome()["outcome"] == "done"


@pytest.mark.parametrize(
    "breaks",
    [
        "cat /dev/zero > disk/ballast",
        "mount -o remount,ro disk",
        "chmod 777 disk/store",
        "mv disk/store disk/gone && touch disk/store",
        "rm disk/store/videos.db* && echo no database > disk/store/videos.db",
        "sed -i 's/DE/UK/' quota.toml",
        *(
            f"echo '{FILLS.replace('SIGNALS', signals)}' > fills.py && echo 'sink = \"fills:put\"' >> quota.toml"
            for signals in ("true", "kill $PPID")
        ),
    ],
)
def test_a_machine_without_a_usable_store_or_job_does_not_keep_it(web: Machine, other: Machine, breaks: str) -> None:
    with small_disk(web.folder / "disk", 12_000):
        (web.folder / "disk" / "store").mkdir(mode=0o700)
        web.config.write_text(web.config.read_text().replace("videos.db", "disk/store/videos.db"))
        assert web.outcome()["outcome"] == "done"
        web.quota.shell(breaks)
        assert web.quota("run", "t", "--quiet").returncode in (1, 78, 143)
        assert other.outcome()["outcome"] == "done"


def test_a_machine_that_stored_a_page_keeps_the_job_however_its_run_ends(web: Machine, other: Machine) -> None:
    web.upstream.fault("status", status=401, region="DE")
    assert (web.quota("run", "t").returncode, web.requests) == (78, 3)
    assert other.outcome()["outcome"] == "elsewhere"


def test_two_hosts_with_one_name_never_run_at_once(web: Machine, other: Machine, shared: str) -> None:
    for machine in (web, other):
        machine.configure(shared, fetch="holds:fetch", store='name = "cluster"')
    process = web.hold_a_page()
    output = other.quota("run", "t").stdout
    assert output.startswith(f"t: runs on {HOST} for the same store (last ")
    assert other.quota("run", "t", "--dry-run").stdout[:50] == output[:50]
    assert other.outcome()["outcome"] == "elsewhere"
    assert web.let_go(process)["outcome"] == "done"
    assert other.outcome()["outcome"] == "done", "a pod has a new store each time, and goes on under its name"


def test_each_machine_runs_the_whole_job_with_machines_each(web: Machine, other: Machine, shared: str) -> None:
    for machine in (web, other):
        machine.configure(shared, job='machines = "each"')
        assert outcomes(machine.outcome()) == {"US": "done", "DE": "done"}
        assert machine.outcome()["outcome"] == "done"
    assert web.requests == 4 * 4


def test_jobs_of_one_name_with_other_functions_are_other_jobs(web: Machine, other: Machine, shared: str) -> None:
    other.configure(shared, fetch="holds:fetch")
    assert [machine.outcome()["outcome"] for machine in (web, other)] == ["done", "done"]


def test_an_embedded_ledger_keeps_no_claims(tmp_path: Path, upstream: Emulator) -> None:
    machines = [Machine(tmp_path / name, upstream) for name in ("one", "two")]
    for machine in machines:
        machine.configure(f"sqlite:///{tmp_path}/ledger.db")
        assert machine.outcome()["outcome"] == "done"


def test_without_the_ledger_a_run_goes_on_within_the_allowance(
    tmp_path: Path, upstream: Emulator, web: Machine, other: Machine
) -> None:
    server = RedisServer()
    for machine in (web, other):
        machine.configure(server.url, unavailable="{ max_cost = 1, allowance = 3, machines = 2 }")
    web.outcome()
    assert other.outcome()["outcome"] == "elsewhere"
    server.kill()
    answer = other.quota("run", "t", "--json")
    assert answer.returncode == 69
    assert json.loads(answer.stdout)["units"] == 3, "and no more: the allowance bounds what is fetched twice"
    assert re.search(r"\bt +unknown ", other.quota("status").stdout), "whose it is, not whether anybody's"
    server.close()


def test_a_status_shows_which_machine_runs_a_job(web: Machine, other: Machine, shared: str) -> None:
    def shown() -> tuple[str | None, bool]:
        (job,) = other.quota.json("status")["credentials"][0]["jobs"]
        return job["runs_on"], job["running"]

    other.configure(shared, fetch="holds:fetch")
    assert shown() == (None, False)
    web.configure(shared, fetch="holds:fetch")
    run = web.hold_a_page()
    assert shown() == (HOST, True)
    with quota.open(other.config) as session:
        status = read_status(session, jobs=True)
    for ms, words in ((-1, f"{HOST}, running"), (MINUTE_MS, f"{HOST}, silent since 20")):
        (job,) = status.credentials[0].jobs
        later_ms = (job.seen_ms or 0) + ms + 1
        assert words in text_of(status_parts(status._replace(at_ms=later_ms)))
        two = job._replace(runs_on=f"other, {HOST}", until_ms=None)
        assert words.replace(", ", f"; {HOST} ") in text_of(jobs_alone([two], later_ms)), "which of them"
        full = job._replace(why="full", refusal=quota.Decision(admitted=False, retry_at_ms=later_ms))
        assert " there from 20" in text_of(jobs_alone([full], later_ms)), "here a run would still do nothing"
    web.let_go(run)
    assert shown() == (HOST, False)
    (run := web.hold_a_page()).kill()
    run.communicate()
    assert [job["running"] for job in web.quota.json("status")["credentials"][0]["jobs"]] == [False]
    for store, is_elsewhere in ((web, False), (other, True)):
        with quota.open(store.config) as session:
            (row,) = standing(session)
        assert (row.until_ms is not None) is is_elsewhere
    other.configure(shared, fetch="holds:fetch", regions=["US", "DE", "FR"])
    with quota.open(other.config) as session:
        (row,) = standing(session)
    assert row.until_ms is None, "nobody has FR"


@pytest.mark.parametrize(
    ("schedule", "gap_ms", "hours"),
    [
        (None, None, 48),
        (None, 400 * HOUR_MS, 49),
        ("every 45m", None, 1.5),
        ("*/30 * * * *", 400 * HOUR_MS, 1),
        ("0,30 16 * * *", None, 47),
    ],
)
def test_a_region_stays_with_its_store_for_twice_the_interval(
    web: Machine, shared: str, schedule: str | None, gap_ms: int | None, hours: float
) -> None:
    web.configure(shared, job="" if schedule is None else f'schedule = "{schedule}"')
    job = load_settings(web.config).jobs["t"]
    assert hold_ms(job, START_MS - 4 * HOUR_MS, gap_ms) == hours * HOUR_MS
