"""`quota schedule` as a supervisor runs it: real processes, signals, a real Redis, the emulated upstream."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.common.clock import rfc3339
from quota.jobs.emulator import Emulator
from quota.jobs.scheduler import run_schedule
from quota.jobs.ticks import ticks
from quota.settings.load import load_settings
from support.commands import one_line
from support.configurations import configuration
from support.installation import Installation
from support.plain_http import Answer, PlainServer
from support.servers import RedisServer, free_port, until

KEY = "a-secret-key-for-the-scheduler"

# A page that takes PAGE_S seconds, and a line in `trace` when it begins and ends.
FETCH = """
import os, time
from quota.jobs.job import Page, first_attempt
from quota.jobs.fetches import trending

def note(text):
    with open(os.environ["QUOTA_STATE_DIR"] + "-trace", "a") as file:
        file.write(f"{time.time_ns()} {text}\\n")

@first_attempt("videos.list")
def fetch(client, region, cursor, *, seconds=0, held=0):
    note(f"begin {region}")
    page = trending(client, region, cursor)
    time.sleep(seconds)
    with open(os.environ["QUOTA_STATE_DIR"] + "-trace") as file:
        holds = file.read().count("begin") == held
    while holds and not os.path.exists("go-on"):
        time.sleep(0.005)
    note(f"end {region}")
    return page
"""


class Machine(Installation):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, key=KEY)

    def configure(self, address: str, jobs: str, *, ledger: str = "sqlite:///ledger.db", units: int = 9_500) -> None:
        (self.folder / "mine.py").write_text(FETCH)
        self.quota.configure(configuration(address, jobs, ledger=ledger, units=units))

    def trace(self) -> list[tuple[int, str, str]]:
        lines = (self.folder / "state-trace").read_text().splitlines()
        return [(int(at), what, region) for at, what, region in (line.split(" ") for line in lines)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one")


class Scheduler:
    def __init__(self, machine: Machine, script: str = "", **env: str) -> None:
        self.log = machine.folder / f"log-{time.time_ns()}"
        with self.log.open("w") as log:
            streams = {"stdout": log.fileno(), "stderr": log.fileno()}
            self.process = machine.quota.start("schedule", script=script, env=env, **streams)

    def lines(self, event: str = "") -> list[dict[str, str]]:
        """The log's lines of one event, as fields; each line of the log must be one of ours."""
        rows = []
        for line in self.log.read_text().splitlines():
            match = re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ([a-z_]+)((?: [a-z_]+=.*)?)", line)
            assert match, line
            if event in ("", match[1]):
                pairs = re.findall(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ ]*)', match[2])
                rows.append({k: json.loads(v) if v.startswith('"') else v for k, v in pairs} | {"event": match[1]})
        return rows

    def until(self, event: str, count: int = 1, **fields: str) -> list[dict[str, str]]:
        """Wait for so many lines of an event with these fields."""
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            rows = [line for line in self.lines(event) if fields.items() <= line.items()]
            if len(rows) >= count:
                return rows
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"no {event} {fields}:\n{self.log.read_text()}")

    def stop_in_a_page(self, machine: Machine, number: int) -> int:
        """The exit status. The page of a job with `held` ends once the scheduler knows that it must stop."""
        self.process.send_signal(number)
        self.until("schedule_stopping")
        (machine.folder / "go-on").touch()
        return self.process.wait(300)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(300)


@pytest.fixture
def start() -> Iterator[Any]:
    running: list[Scheduler] = []

    def begin(machine: Machine, script: str = "", **env: str) -> Scheduler:
        running.append(Scheduler(machine, script, **env))
        return running[-1]

    yield begin
    for scheduler in running:
        if scheduler.process.poll() is None:
            scheduler.process.kill()
            scheduler.process.wait()


def assert_alone(trace: list[tuple[int, str, str]]) -> None:
    assert [what for _, what, _ in trace] == ["begin", "end"] * (len(trace) // 2)
    assert all(a[0] <= b[0] for a, b in pairwise(trace))


# -- several of them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stagger", ["", 'stagger = "1s"'])
def test_each_machine_covers_its_own_regions_of_a_tick_once(
    tmp_path: Path, upstream: Emulator, server: RedisServer, start: Any, stagger: str
) -> None:
    regions = {Machine(tmp_path / "one"): ["US", "FR"], Machine(tmp_path / "two"): ["DE"]}
    for machine, own in regions.items():
        job = f'regions = ["US", "DE", "FR"]\nschedule = "every 6d"\nmisfire_grace = "6d"\n{stagger}'
        machine.configure(upstream.address, f'[jobs.t]\nfetch = "trending"\n{job}', ledger=server.url)
        assert machine.quota.json("run", "t", *(f"--region={region}" for region in own))["outcome"] == "done"
    for scheduler, own in [(start(machine), own) for machine, own in regions.items()]:
        ended = scheduler.until("tick_ended", len(own) if stagger else 1)
        assert sorted(",".join(line["covered"] for line in ended).split(",")) == sorted(own)
        scheduler.until("tick_skipped", 3 - len(own) if stagger else 0)
        assert scheduler.stop() == 0
    assert upstream.usage()["requests"] == 3 + 3
    regions_of_two = machine.quota.json("run", "t")["regions"]
    assert [region["outcome"] for region in regions_of_two] == ["done"] * 3, "a schedule that ends keeps no region"


@pytest.mark.parametrize(
    ("ledger_url", "killed"), [("sqlite", False), ("redis", True)], indirect=["ledger_url"], ids=["stopped", "killed"]
)
def test_a_tick_that_was_stopped_goes_on_after_a_restart(
    machine: Machine, upstream: Emulator, ledger_url: str, start: Any, killed: bool
) -> None:
    job = 'schedule = "every 6d"\nmisfire_grace = "6d"\noptions = { held = 2 }'
    regions = 'regions = ["US", "DE", "FR"]'
    machine.configure(upstream.address, f'[jobs.t]\nfetch = "mine:fetch"\n{regions}\n{job}', ledger=ledger_url)
    first = start(machine)
    until(lambda: upstream.usage()["requests"] == 2)
    if killed:
        first.process.kill()
        first.process.wait()
    else:
        assert first.stop_in_a_page(machine, signal.SIGHUP) == 129
        assert [line["outcome"] for line in first.lines("tick_ended")] == ["stopped"]
        assert first.lines()[-1]["event"] == "schedule_stopped"
    paid = upstream.usage()["requests"]
    again = start(machine)
    (ended,) = again.until("tick_ended")
    again.stop()
    assert ended["outcome"] == "done"
    assert ended["covered"].endswith("FR")
    assert upstream.usage()["requests"] == paid + int(ended["pages"]) <= 4, "at most the page in flight is lost"
    third = start(machine)
    (skipped,) = third.until("tick_skipped")
    assert skipped["reason"] == "claimed"


# -- one job's ticks ---------------------------------------------------------------------------------------------------


# A process whose clock stands ahead by what the file `ahead` says, in seconds. Under libfaketime every sleep fails
# where the monotonic clock is to stay right.
SET_CLOCK = """
import time, runpy
from datetime import datetime
import apscheduler.schedulers.base, apscheduler.schedulers.background

right_ns = time.time_ns

def set_ns():
    with open("ahead") as file:
        return right_ns() + int(file.read()) * 1_000_000_000

class SetDatetime(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(time.time(), tz)

time.time_ns, time.time = set_ns, lambda: set_ns() / 1_000_000_000
apscheduler.schedulers.base.datetime = SetDatetime
runpy.run_module("quota", run_name="__main__")
"""


def test_a_clock_that_is_set_back_stops_no_schedule(machine: Machine, upstream: Emulator, start: Any) -> None:
    job = '[jobs.t]\nfetch = "trending"\nschedule = "every 1s"\nmisfire_grace = "2m"'
    machine.configure(upstream.address, job)
    ahead = machine.folder / "ahead"
    ahead.write_text(str(2 * 86_400))
    scheduler = start(machine, SET_CLOCK)
    scheduler.until("tick_ended")
    right = machine.folder / "right"
    right.write_text("0")
    before = datetime.now(UTC) - timedelta(minutes=2, seconds=1)
    right.replace(ahead)
    (set_back,) = scheduler.until("clock_set_back")
    assert abs(int(set_back["by_ms"]) - 2 * 86_400_000) < 60_000
    until(lambda: any(datetime.fromisoformat(line["at"]) < before + timedelta(days=1) for line in ended(scheduler)))
    assert scheduler.stop() == 0
    late = [datetime.fromisoformat(line["at"]) for line in ended(scheduler)][-1]
    assert before < late < before + timedelta(hours=1)
    assert [line for line in scheduler.lines("tick_skipped") if int(line.get("ticks", 1)) > 3] == []


def test_each_tick_older_than_its_grace_is_logged_as_skipped(machine: Machine, upstream: Emulator, start: Any) -> None:
    job = '[jobs.t]\nfetch = "trending"\nschedule = "every 1s"\nmisfire_grace = "2m"'
    machine.configure(upstream.address, job)
    ahead = machine.folder / "ahead"
    ahead.write_text("0")
    scheduler = start(machine, SET_CLOCK)
    scheduler.until("tick_started")
    later = machine.folder / "later"
    later.write_text("3603")
    later.replace(ahead)
    until(lambda: any(int(line.get("ticks", 1)) > 60 for line in scheduler.lines("tick_skipped")))
    scheduler.until("tick_started", len(scheduler.lines("tick_started")) + 2)
    assert scheduler.stop() == 0
    assert_each_is_told(scheduler, timedelta(seconds=1))


def assert_each_is_told(scheduler: Scheduler, apart: timedelta) -> None:
    """Each tick between the first and the last started tick was started, or logged as skipped."""
    first, *_, last = [datetime.fromisoformat(line["at"]) for line in scheduler.lines("tick_started")]
    # A machine under load may also skip ticks before the first that it starts.
    skipped = [line for line in scheduler.lines("tick_skipped") if first < datetime.fromisoformat(line["at"]) < last]
    ticks = len(scheduler.lines("tick_started")) + sum(int(line.get("ticks", 1)) for line in skipped)
    assert ticks == (last - first) / apart + 1


def ended(scheduler: Scheduler) -> list[dict[str, str]]:
    return [line for line in scheduler.lines("tick_ended") if line["outcome"] == "done"]


def test_ticks_of_one_job_queue_and_those_that_came_too_late_are_not_run(
    machine: Machine, upstream: Emulator, start: Any
) -> None:
    machine.configure(
        upstream.address,
        """
[jobs.queue]
fetch = "mine:fetch"
regions = ["US", "DE", "FR"]
schedule = "every 3s"
stagger = "10ms"
options = { seconds = 0.2 }
[jobs.slow]
fetch = "mine:fetch"
schedule = "every 1s"
misfire_grace = "1s"
options = { seconds = 2.5 }
[jobs.late]
fetch = "mine:fetch"
regions = ["US", "DE"]
schedule = "every 4s"
stagger = "10ms"
misfire_grace = "1s"
options = { seconds = 1.5 }
""",
    )
    scheduler = start(machine)
    scheduler.until("tick_skipped", reason="late", job="late", due_region="DE")
    (first, *_) = scheduler.until("tick_waits", job="slow")
    assert first["running"] < first["at"]
    scheduler.until("tick_skipped", reason="coalesced", job="slow")
    # The first round began in the middle, with what there was to be made up for; the next one is whole.
    scheduler.until("tick_ended", 3, job="queue")
    job = load_settings(machine.folder / "quota.toml").jobs["queue"]
    first_ms = (time.time_ns() // 1_000_000 // 3_000 + 1) * 3_000
    due = [(tick.regions[0], rfc3339(tick.at_ms)) for tick in ticks([job], first_ms, first_ms + 1_000)]
    assert [region for region, _ in due] == ["US", "DE", "FR"]
    scheduler.until("tick_ended", at=due[-1][1], job="queue")
    assert scheduler.stop() == 0
    queue = [line for line in scheduler.lines() if line.get("job") == "queue"]
    ran = [(line["due_region"], line["at"]) for line in queue if line["event"] == "tick_started"]
    assert [tick for tick in ran if tick in due] == due
    events = [line["event"] for line in queue if line["event"] in ("tick_started", "tick_ended")]
    assert events == ["tick_started", "tick_ended"] * (len(events) // 2), "one at a time"
    assert all(int(line["late_ms"]) <= 1_000 for line in scheduler.lines("tick_started") if line["job"] != "queue")


def test_a_tick_waits_for_a_run_that_somebody_else_started(machine: Machine, upstream: Emulator, start: Any) -> None:
    job = '[jobs.t]\nfetch = "mine:fetch"\nschedule = "every 6d"\nmisfire_grace = "6d"\noptions = { held = 1 }'
    machine.configure(upstream.address, job)
    by_hand = machine.start("run", "t", "--json")
    until((machine.folder / "state-trace").exists)
    scheduler = start(machine)
    scheduler.until("schedule_started")
    (machine.folder / "go-on").touch()
    (ended,) = scheduler.until("tick_ended")
    assert (ended["outcome"], scheduler.stop()) == ("done", 0)
    assert json.loads(by_hand.communicate(timeout=300)[0])["outcome"] == "done"
    assert_alone(machine.trace())


# -- told to stop ------------------------------------------------------------------------------------------------------


def test_a_function_that_ends_the_program_spares_next_ticks(machine: Machine, upstream: Emulator, start: Any) -> None:
    machine.configure(upstream.address, '[jobs.t]\nfetch = "exits:fetch"\nschedule = "every 1s"\nping = "env:PING"\n')
    (machine.folder / "exits.py").write_text("def fetch(client, region, cursor): raise GeneratorExit('enough')\n")
    with PlainServer(lambda arrived: Answer(200)) as health:
        scheduler = start(machine, PING=health.address)
        failed = scheduler.until("region_failed", 2)
        assert all("fetch ended with GeneratorExit: enough; " in line["why"] for line in failed)
        assert scheduler.stop() == 0
        heard = [arrived.target for arrived in health.arrived]
    assert heard[:4] == ["/start", "/1"] * 2


# -- what the ledger says ----------------------------------------------------------------------------------------------


def test_a_tick_that_cannot_be_admitted_is_not_started_until_the_budget_changes(
    machine: Machine, upstream: Emulator, start: Any
) -> None:
    machine.configure(
        upstream.address,
        """
[jobs.s]
fetch = "search"
schedule = "every 1s"
options = { words = "x" }
""",
        units=101,
    )
    charge = machine.quota.json("charge", "search.list", "--units", "101")
    scheduler = start(machine)
    refused = scheduler.until("tick_refused", 2)[0]
    assert (refused["reason"], refused["by"]) == ("limit", "day")
    assert refused["why"] == "limit 'day' has 101 of 101 units used"
    assert refused["next"][:10] > refused["at"][:10], "a day later"
    assert scheduler.lines("tick_started") == []
    assert upstream.usage()["requests"] == 0
    (refusals,) = machine.quota.json("spend")["refused"]
    assert (refusals["job"], refusals["calls"] >= 2) == ("s", True), "they count as those of `quota run` do"
    kept = machine.quota.json("explain")
    assert (kept["job"], kept["refused_by"]) == ("s", "day")
    assert machine.quota("refund", charge["id"]).returncode == 0
    scheduler.until("tick_ended")
    assert machine.quota.json("spend")["total_units"] > 0
    scheduler.stop()
    assert KEY not in scheduler.log.read_text()


def test_without_a_ledger_ticks_are_refused_and_it_goes_on(machine: Machine, upstream: Emulator, start: Any) -> None:
    """A tick says once that the ledger is silent, however many pages it fetches on the allowance."""
    jobs = '[jobs.t]\nfetch = "trending"\nschedule = "every 1s"'
    ledger, unavailable = f"redis://:a-password@127.0.0.1:{free_port()}/0", "{ max_cost = 1, allowance = 3 }"
    machine.quota.configure(configuration(upstream.address, jobs, ledger=ledger, unavailable=unavailable))
    scheduler = start(machine, QUOTA_LOG="info")
    assert scheduler.until("tick_refused", 2)[0]["reason"] == "ledger-unavailable"
    assert scheduler.stop() == 0
    claims = scheduler.lines("claim_unanswered")
    assert "cannot be reached" in claims[0]["why"]
    assert len(claims) == len(scheduler.lines("tick_started")) + len(scheduler.lines("tick_refused"))
    assert "a-password" not in scheduler.log.read_text()


# -- what cannot be right ----------------------------------------------------------------------------------------------


def test_a_job_that_can_never_run_is_one_line_at_the_start(machine: Machine, upstream: Emulator) -> None:
    machine.configure(upstream.address, '[jobs.t]\nfetch = "trending"')
    assert "no job has a schedule" in one_line(machine.quota("schedule"), 78)
    machine.configure(upstream.address, '[jobs.t]\nfetch = "nowhere:fetch"\nschedule = "every 1s"')
    assert "cannot be imported: ModuleNotFoundError" in one_line(machine.quota("schedule"), 78)
    (machine.folder / "key").unlink()
    machine.configure(upstream.address, '[jobs.t]\nfetch = "trending"\nschedule = "every 1s"')
    assert "cannot be read" in one_line(machine.quota("schedule"), 78)


def test_a_schedule_whose_threads_cannot_be_started_says_so_at_the_start(machine: Machine, upstream: Emulator) -> None:
    """Else a job whose first tick finds no thread would never run."""
    machine.configure(upstream.address, '[jobs.t]\nfetch = "trending"\nschedule = "every 1s"')
    threading.stack_size(2**47)  # more than there is
    try:
        with quota.open(machine.folder / "quota.toml") as session, pytest.raises(quota.QuotaError, match="raise the"):
            run_schedule(session, stop=lambda: signal.SIGTERM)
    finally:
        threading.stack_size(0)
