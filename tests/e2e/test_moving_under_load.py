"""`quota ledger move` of thousands of charges while four machines charge, with moves killed at some moment.

Every charge that was admitted is in the new ledger, once, whole, under the id that its caller got; what was drawn on
the allowances meanwhile was handed over once; the limit counts all of it, and holds over both ledgers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

import quota
from quota.budget import charge_id
from quota.deciding import project
from quota.deciding.history import charges
from quota.ledger.factory import open_ledger
from quota.rules.entry import START, Entry
from support.commands import Quota, program
from support.installation import until
from support.servers import RedisServer
from support.setup import charges_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.forked import Forked

SEED = int(os.environ.get("QUOTA_TEST_SEED", "1"))
KILLS = int(os.environ.get("QUOTA_TEST_KILLS", "1"))
"""Moves that are killed, each way. With more than one, as in `make soak`, the ledger also moves back."""
MACHINES = ("a", "b", "c", "d")
PROJECT = "p"
HELD = 20_000 if KILLS > 1 else 8_000
"""Charges in the ledger before anything happens, so that the copy takes a while."""

SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

ALLOWANCE = 40
ROOM = 400

CONFIG = f"""
[ledger]
url = "{{url}}"
unavailable = {{{{ max_cost = 1, allowance = {ALLOWANCE}, machines = {len(MACHINES)} }}}}
[credentials.main]
api = "youtube-v3"
project = "{PROJECT}"
[[credentials.main.limits]]
name = "day"
quota = {HELD + ROOM + len(MACHINES) * ALLOWANCE}
headroom = {len(MACHINES) * ALLOWANCE}
window = "24h"
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


class Moving:
    """Four machines with state folders of their own, and an owner who moves their ledger."""

    def __init__(self, folder: Path, old: str) -> None:
        self.folder = folder
        self.dice = random.Random(SEED)
        self.stop = folder / "stop"
        self.chargers: list[subprocess.Popen[str] | Forked] = []
        for name in MACHINES:
            (folder / name).mkdir()
        self.point_to(old)
        with closing(open_ledger(old)) as ledger:
            since_ms = ledger.now_ms() - 3_600_000
            done, fence = ledger.fence(PROJECT, "", "before")
            held = [Entry((since_ms + n, 0), 1, "units", "videos.list", "", "", f"held{n:05}") for n in range(HELD)]
            assert done
            assert ledger.replace(PROJECT, fence, START, held, "first")

    def point_to(self, url: str) -> None:
        """The owner edits every machine's configuration; no reader sees half of it."""
        for name in MACHINES:
            new = self.folder / name / "new"
            new.write_text(CONFIG.format(url=url))
            new.replace(self.folder / name / "quota.toml")

    def start_chargers(self) -> None:
        for name in MACHINES:
            words = [
                str(path) for path in (self.folder / name / "quota.toml", self.folder / name / "answers", self.stop)
            ]
            charger = Quota(self.folder / name).start(*words, script=program("support.charger"), **SILENT)
            self.chargers.append(charger)
        until(lambda: all(len(self.answers(name)) > 2 for name in MACHINES))

    def answers(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "answers"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def mover(self, old: str, new: str) -> subprocess.Popen[str] | Forked:
        return Quota(self.folder / "a").start("ledger", "move", old, new)

    def kill_a_move(self, old: str, new: str) -> None:
        """At some moment after it has reached the new ledger."""
        before = written(new)
        mover = self.mover(old, new)
        until(lambda: written(new) != before or mover.poll() is not None)
        time.sleep(self.dice.uniform(0, 0.25))
        mover.kill()
        mover.communicate()

    def move(self, old: str, new: str) -> str:
        mover = self.mover(old, new)
        output, complaint = mover.communicate(timeout=300)
        assert mover.returncode == 0, (mover.returncode, output, complaint)
        return output

    def moved(self, old: str, new: str) -> None:
        """From one to the other, over some kills, and the owner edits the url."""
        for _ in range(KILLS):
            self.kill_a_move(old, new)
        self.move(old, new)
        assert keys_at(new) == keys_at(old), "before any machine puts back what it has seen"
        assert "already" in self.move(old, new)
        self.point_to(new)
        before = {name: len(self.answers(name)) for name in MACHINES}
        until(lambda: all(len(self.answers(name)) > before[name] + 3 for name in MACHINES))

    def end_chargers(self) -> None:
        self.stop.touch()
        for charger in self.chargers:
            assert charger.wait(300) == 0

    def kill_chargers(self) -> None:
        for charger in self.chargers:
            charger.kill()
            charger.wait()


@pytest.mark.timeout(600)
def test_a_move_under_load_loses_no_charge_and_grants_nothing_twice(server: RedisServer, tmp_path: Path) -> None:
    there, back = f"sqlite:///{tmp_path}/ledger.db", server.url
    moving = Moving(tmp_path, there)
    try:
        moving.start_chargers()
        for old, new in pairwise((there, back, there) if KILLS > 1 else (there, back)):
            moving.moved(old, new)
        moving.end_chargers()
    finally:
        moving.kill_chargers()
    answers = [answer for name in MACHINES for answer in moving.answers(name)]
    assert [answer for answer in answers if "error" in answer] == []
    decisions = [answer for answer in answers if "reason" in answer]
    assert {decision["reason"] for decision in decisions} <= {"ok", "limit", "counting", "ledger-unavailable"}
    admitted = {decision["id"] for decision in decisions if decision["source"] == "ledger"}
    drawn = {key_of(decision["id"]) for decision in decisions if decision["source"] == "allowance"}
    with quota.open(tmp_path / "a" / "quota.toml") as session:
        entries = charges(session.project())
        (limit,) = session.budget().peek("videos.list").limits
    ids = {charge_id(entry.id[0], entry.key, 0) for entry in entries}
    keys = {entry.key for entry in entries}
    assert len(keys) == len(entries) == limit.used_units
    assert admitted <= ids
    assert drawn <= keys
    assert len(entries) == HELD + len(admitted) + len(drawn)
    assert HELD + len(admitted) <= HELD + ROOM
    assert {(entry.units, entry.charged_units) for entry in entries} == {(1, 1)}


def test_a_process_started_after_a_move_reads_only_newer_entries(server: RedisServer, tmp_path: Path) -> None:
    """What was counted before is kept, also of a log that is younger than its windows."""
    there, back = f"sqlite:///{tmp_path}/ledger.db", server.url
    moving = Moving(tmp_path, there)
    moving.move(there, back)
    moving.point_to(back)
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("QUOTA_STATE_DIR", str(tmp_path / "a" / "state"))
        patched.setattr(project, "COUNT_WITHIN_S", 100.0)
        for _ in range(2):
            with quota.open(tmp_path / "a" / "quota.toml") as session:
                budget, log = session.budget(), session.ledger
                patched.setattr(log, "read", partial(read_and_note, log.read, read))
                del read[:]
                assert budget.charge("videos.list").admitted
                amount = sum(read)
    assert amount < 1_000


def read_and_note(read: Callable[..., Sequence[Entry]], amounts: list[int], *args: Any) -> Sequence[Entry]:
    entries = read(*args)
    amounts.append(len(entries))
    return entries


def key_of(name: str) -> str:
    """Of a draw only the key stays: it counts from the time at which it is handed over."""
    return name.partition("-")[2]


def keys_at(url: str) -> set[str]:
    """Of all charges there. Also a ledger that is closed can be read."""
    with closing(open_ledger(url)) as ledger:
        return {charge.key for charge in charges_at(ledger, PROJECT)}


def written(url: str) -> object:
    """Changes when the ledger there is written to."""
    if url.startswith("sqlite:///"):
        path = Path(url.removeprefix("sqlite:///"))
        return [p.stat().st_mtime_ns for p in (path, path.with_name(path.name + "-wal")) if p.exists()]
    with redis.Redis.from_url(url) as client:
        return client.info("persistence")["rdb_changes_since_last_save"]
