"""Processes that die, fork, run in threads and start all at once. Every one is real, and so is every signal.

A process that is to die at an exact step watches its own calls and sends itself SIGKILL there: nothing of ours is
changed, nothing is cleaned up, and no code runs afterwards. What must hold whatever the step was:

    the next tick goes on and ends complete
    no page is lost, none is stored twice
    upstream never received more than the ledger counts, and the ledger counts at most one attempt more for each kill
    no lock is left behind
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pytest

import quota
from quota.jobs.job import RunReport
from quota.reports.status import read_status
from support.configurations import both_windows
from support.emulator import Emulator
from support.installation import Installation
from support.processes import KILLED, killed_anywhere

KILLS = int(os.environ.get("QUOTA_TEST_KILLS", "8"))
REGIONS = ["US", "DE"]
PAGES = 2
ITEMS = 50
"""The emulator's pages are full."""

CALLS_IN_A_TICK = 7_000
"""Of functions of ours, without the store's."""


class Machine(Installation):
    """An installation with an upstream, and a ledger that may be elsewhere."""

    upstream: Emulator

    def __init__(self, folder: Path, ledger: str, upstream: Emulator) -> None:
        super().__init__(folder, upstream)
        self.ledger = ledger

    def configure(self, *, units: int = 9_500, unavailable: str = "") -> None:
        credential = f'key = "file:key"\nendpoint = "{self.upstream.address}"'
        (self.folder / "quota.toml").write_text(
            f"""
[ledger]
url = "{self.ledger}"
{f"unavailable = {unavailable}" if unavailable else ""}
{both_windows(units, credential=credential)}
[store]
url = "sqlite:///videos.db"
[jobs.t]
fetch = "trending"
pages = {PAGES}
regions = {json.dumps(REGIONS)}
"""
        )

    def tick(self) -> RunReport:
        return self.run("t")

    def pages_stored(self) -> int:
        """Whole pages of rankings in the store. Asserts that there are no others, and that the checkpoints agree."""
        if not (self.folder / "videos.db").exists() or not self.rows("SELECT 1 FROM sqlite_schema"):
            return 0
        (items,) = self.rows("SELECT count(*) FROM rankings")[0]
        assert items % ITEMS == 0, "half a page is stored"
        stored = "SELECT count(*) FROM rankings r WHERE r.region = p.region AND r.taken_at_ms = p.started_at_ms"
        checkpoints = self.rows(f"SELECT pages * ?, ({stored}) FROM checkpoints p", ITEMS)  # noqa: S608  # a constant
        assert all(noted == kept for noted, kept in checkpoints), "a page and its checkpoint disagree"
        return int(items // ITEMS)

    def check_nothing_is_lost_or_doubled(self, kills: int) -> None:
        """Whole rounds are stored, each page once, and paid for."""
        whole = list(range(1, PAGES * ITEMS + 1))
        taken = self.rows("SELECT region, taken_at_ms FROM rankings GROUP BY 1, 2")
        assert len(set(Counter(region for region, _ in taken).values())) == 1, "a round without a region"
        for region, at_ms in taken:
            ranks = self.rows(
                "SELECT rank FROM rankings WHERE region = ? AND taken_at_ms = ? ORDER BY 1", region, at_ms
            )
            assert [rank for (rank,) in ranks] == whole
        assert self.rows("SELECT region FROM checkpoints WHERE pending OR cursor IS NOT NULL") == []
        pages, units = self.pages_stored(), self.units()
        assert pages <= self.requests <= units <= self.requests + kills
        assert self.requests <= pages + kills
        with quota.open(self.config) as session:
            for limit in read_status(session).credentials[0].limits:
                assert limit.state.used_units == units
        for path in (self.folder / "videos.db", self.folder / "ledger.db"):
            if path.exists():
                with closing(sqlite3.connect(path)) as db:
                    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture
def machine(ledger_url: str, upstream: Emulator, tmp_path: Path, state_dir: Path) -> Machine:
    machine = Machine(tmp_path, ledger_url, upstream)
    machine.configure()
    return machine


class Step(NamedTuple):
    """A moment in a tick of four pages, and what ledger and store hold when the process died there.

    It is the `nth` time that a function is entered ("call") or left ("return"), or with `then` the next time after
    that that another one is entered.
    """

    when: str
    event: str
    where: str
    nth: int
    units: int
    pages: int
    then: str = ":"


# In the order in which a tick takes them. The third page is the first of the second region.
STEPS = [
    Step("with a new store half made", "return", "quota.common.sqlite_file:statements", 1, 0, 0),
    Step("before the first decision", "call", "quota.budget:Budget._decide", 1, 0, 0),
    Step("with the first charge made, and not all of it noted", "call", "quota.journal.journal:Journal.write", 1, 1, 0),
    Step("after the ledger's commit, before the request", "return", "quota.clients.metering:Meter.attempt", 3, 3, 2),
    Step("with the request sent", "return", "urllib3.connection:HTTPConnection.request", 3, 3, 2),
    Step("after the answer, before the store", "call", "quota.jobs.store.store:Store.save_page", 3, 3, 2),
    Step("in the store's transaction", "call", "quota.jobs.store.rows:video_row", 2 * ITEMS + 20, 3, 2),
    Step(
        "with the page stored, its checkpoint not",
        "return",
        "quota.jobs.store.rows:video_row",
        3 * ITEMS,
        3,
        2,
        "json:dumps",
    ),
    Step("after the store's commit", "return", "quota.jobs.store.store:Store.save_page", 3, 3, 3),
    Step("before the report is printed", "call", "quota.jobs.tick:print_report", 1, 4, 4),
]


# In one kind of ledger, and how many attempts the kill may cost.
IN_LEDGERS = [
    ("sqlite", Step("with a new ledger half made", "return", "quota.common.sqlite_file:statements", 2, 0, 0), 0),
    ("sqlite", Step("in the ledger's transaction", "return", "quota.ledger.sqlite_log:_add", 3, 2, 2), 0),
    # The decisions are one peek and then the charges. The server does not know the script: the first is asked twice.
    (
        "redis",
        Step(
            "with the charge sent, its answer unread",
            *("call", "quota.ledger.redis_log:RedisLog.append", 4, 3, 2),
            then="redis.connection:AbstractConnection.read_response",
        ),
        1,
    ),
]


def killed_at(machine: Machine, step: Step) -> None:
    with machine.start(step.event, step.where, str(step.nth), step.then, "run", "t", script=KILLED) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, (process.returncode, out, err)


@pytest.mark.parametrize("step", STEPS, ids=[step.when.replace(" ", "-") for step in STEPS])
def test_a_tick_killed_at_any_step_loses_nothing_and_the_next_one_goes_on(machine: Machine, step: Step) -> None:
    killed_at(machine, step)
    assert (machine.units(), machine.pages_stored()) == (step.units, step.pages)
    if step.pages == PAGES * len(REGIONS):  # the round was complete: the next tick would begin another
        machine.check_nothing_is_lost_or_doubled(kills=0)
        assert len(machine.tick().regions) == len(REGIONS)
        return
    report = machine.tick()
    assert (report.outcome, report.exit_status) == ("done", 0)
    assert machine.pages_stored() == PAGES * len(REGIONS)
    machine.check_nothing_is_lost_or_doubled(kills=1)


@pytest.mark.parametrize(("ledger_url", "step", "kills"), IN_LEDGERS, indirect=["ledger_url"])
def test_a_tick_killed_inside_its_ledger_goes_on(machine: Machine, step: Step, kills: int) -> None:
    killed_at(machine, step)
    assert (machine.units(), machine.pages_stored()) == (step.units, step.pages)
    assert machine.tick().outcome == "done"
    machine.check_nothing_is_lost_or_doubled(kills)


def test_ticks_killed_one_after_another_anywhere_add_up_to_whole_rounds(machine: Machine) -> None:
    """Each dies at some call of any function of ours, or ends before that; QUOTA_TEST_KILLS says how many die."""
    dice = random.Random(1)
    kills = 0
    while kills < KILLS:
        kills += killed_anywhere(machine, dice, CALLS_IN_A_TICK, "run", "t")
        machine.pages_stored()
        assert machine.requests <= machine.units() <= machine.requests + kills
    assert machine.tick().outcome == "done"
    machine.check_nothing_is_lost_or_doubled(kills)


def test_a_repayment_killed_before_its_note_is_not_made_twice(machine: Machine) -> None:
    machine.configure(unavailable="{ max_cost = 1, allowance = 5 }")
    ledger, machine.ledger = machine.ledger, "redis://127.0.0.1:9/0"
    machine.configure(unavailable="{ max_cost = 1, allowance = 5 }")
    with quota.open(machine.config) as session:
        assert [session.budget().charge("videos.list").source for _ in range(3)] == ["allowance"] * 3
    machine.ledger = ledger
    machine.configure(unavailable="{ max_cost = 1, allowance = 5 }")
    killed_at(machine, Step("", "call", "quota.journal.draws:Draws.handed_over", 1, 1, 0))
    assert machine.units() == 3
    assert machine.tick().outcome == "done"
    assert machine.units() == 3 + PAGES * len(REGIONS)
    with quota.open(machine.config) as session:
        assert session.budget().owed_units() == 0


# Everything is imported before the starting shot, so that the processes meet where they open their files.
WAITING = """
import sys
import quota, quota.cli.program, quota.cli.deciding, quota.budget, quota.terms.limits, quota.journal.journal
import quota.session
import quota.settings.load, quota.common.sqlite_file, quota.ledger.sqlite_log, quota.ledger.redis_log
import quota.clients.upstream_errors
print("ready", flush=True)
sys.stdin.readline()
import quota.journal.journal
quota.journal.journal.WAIT_S = 60.0
"""
# Where the last of a crowd gets its turn only after seconds, it waits for it.
PATIENT = """
quota.ledger.sqlite_log.SqliteLog._deadline_s = quota.ledger.redis_log.RedisLog._timeout_s = 60.0
quota.ledger.redis_log.RETRY_WITHIN_S = 60.0
"""
BY_COMMAND = WAITING + PATIENT + "quota.cli.program.main()"
CROWD = int(os.environ.get("QUOTA_TEST_CROWD", "6"))
"""Sixteen in `make soak`."""

SOME = CROWD - 2
"""Not enough for each of them."""


def all_at_once(machine: Machine, script: str, *args: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of CROWD processes that leave the starting line together."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(machine.start(*args, script=script, stdin=subprocess.PIPE)) for _ in range(CROWD)]
        for process in crowd:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [(process.wait(), *process.communicate()) for process in crowd]


def test_many_commands_at_once_on_nothing_admit_exactly_the_limit(machine: Machine) -> None:
    machine.configure(units=SOME)
    ended = all_at_once(machine, BY_COMMAND, "charge", "videos.list", "--json")
    assert sorted(status for status, _, _ in ended) == [0] * SOME + [75] * (CROWD - SOME), ended
    decisions = [json.loads(out) for _, out, _ in ended]
    assert {decision["reason"] for decision in decisions} == {"ok", "limit"}
    used = sorted(decision["limits"][0]["used_units"] for decision in decisions if decision["admitted"])
    assert used == list(range(1, SOME + 1)), "each saw those before it"
    assert len(machine.entries()) == SOME


# A session is used, then forked with all it holds: ledger, journal, Google client and its open connection.
FORKED = """
import os, sys
import quota
from quota.jobs.emulator.catalogue import _channel_id
with quota.open() as session:
    youtube = session.google()
    def ask(job, number):
        with quota.labels(job=job):
            for _ in range(20):
                (item,) = youtube.channels().list(part="id", id=_channel_id(number)).execute()["items"]
                assert item["id"] == _channel_id(number)
    ask("before", 1)
    children = []
    for job, number in (("one", 10), ("two", 20)):
        child = os.fork()
        if not child:
            ask(job, number)
            sys.exit(0)
        children.append(child)
    ask("parent", 15)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    ask("after", 17)
"""


def test_a_session_forked_in_use_serves_parent_and_children(machine: Machine) -> None:
    machine.configure(unavailable="{ max_cost = 1, allowance = 5 }")
    with machine.start(script=FORKED) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), (out, err)
    entries = machine.entries()
    spent = Counter(entry.job for entry in entries)
    assert spent == dict.fromkeys(("before", "one", "two", "parent", "after"), 20)
    assert len({entry.key for entry in entries}) == machine.requests == 100
    # A child is a run of its own; its parent goes on with the one it had.
    runs = {job: {entry.run for entry in entries if entry.job == job} for job in spent}
    assert runs["before"] == runs["parent"] == runs["after"]
    assert len(runs["one"] | runs["two"] | runs["parent"]) == 3


# The parent ends first. Whoever closes an SQLite file last tidies it up, and must know of those who still have it.
OUTLIVED = """
import os, sys
import quota
with quota.open() as session:
    budget = session.budget()
    assert budget.charge("videos.list").admitted
    seen, tell = os.pipe()
    if not os.fork():
        assert budget.charge("videos.list").admitted
        os.close(tell)
        os.read(seen, 1)  # ends when the parent has closed its session
        for number in (3, 4, 5):
            assert budget.charge("videos.list").limits[0].used_units == number
            with quota.open() as another:
                assert another.budget().usage()[0].used_units == number
        os.kill(os.getpid(), 9)
    os.close(seen)
    while budget.usage()[0].used_units < 2:
        pass
os.close(tell)
assert os.wait()[1] == 9
"""


def test_a_child_that_outlives_its_parents_session_loses_no_charge(machine: Machine) -> None:
    with machine.start(script=OUTLIVED) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, ""), (out, err)
    assert machine.units() == 5


# A thread may be in the middle of a decision when another one forks; the child has only the thread that forked.
FORKED_IN_THREADS = """
import os, signal, threading
import quota
with quota.open() as session:
    budget = session.budget()
    # The first call imports; Python itself cannot fork well while another thread does.
    assert budget.charge("videos.list").admitted
    stop = threading.Event()
    def spend():
        while not stop.is_set():
            assert budget.charge("videos.list").admitted
    threads = [threading.Thread(target=spend) for _ in range(2)]
    for thread in threads:
        thread.start()
    stuck = 0
    for _ in range(20):
        child = os.fork()
        if not child:
            signal.alarm(20)
            assert budget.charge("videos.list", job="child").admitted
            os._exit(0)
        stuck += os.waitpid(child, 0)[1] != 0
        if stuck:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert not stuck, "a child waited for a thread that it does not have"
"""


def test_a_fork_while_other_threads_charge_leaves_no_child_waiting(machine: Machine) -> None:
    machine.configure(units=1_000_000)
    with machine.start(script=FORKED_IN_THREADS) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, (out, err)
    assert sum(entry.job == "child" for entry in machine.entries()) == 20
