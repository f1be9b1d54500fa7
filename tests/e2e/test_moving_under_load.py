"""`quota ledger move` while three machines charge, there and back, with the move killed at random moments.

Every charge that was admitted is in the new ledger, once, whole, under the id that its caller was told; what was drawn
on the allowances meanwhile was repaid once; the new ledger's limit counts all of it, and holds over both ledgers.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

import quota
from quota.common.clock import NEVER
from quota.ledger.contract import read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from support.commands import QUOTA
from support.installation import until
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = int(os.environ.get("QUOTA_TEST_SEED", "1"))
KILLS = int(os.environ.get("QUOTA_TEST_KILLS", "1"))
TESTS = Path(__file__).resolve().parents[1]
MACHINES = ("a", "b", "c")
PROJECT = "p"
HELD = 2_000
"""Charges in the ledger before anything happens, so that the copy takes a while."""

ALLOWANCE = 40
ROOM = 600

OTHER_MOVE = "another `quota ledger move`"

CONFIG = f"""
[ledger]
url = "{{url}}"
unavailable = {{{{ max_cost = 1, allowance = {ALLOWANCE}, machines = 3 }}}}
[credentials.main]
api = "youtube-v3"
project = "{PROJECT}"
[[credentials.main.limits]]
name = "day"
quota = {HELD + ROOM + 3 * ALLOWANCE}
headroom = {3 * ALLOWANCE}
window = "24h"
"""


@pytest.fixture
def servers() -> Iterator[list[RedisServer]]:
    started = [RedisServer(), RedisServer()]
    yield started
    for server in started:
        server.close()


class Moving:
    def __init__(self, folder: Path, old: str, seed: str) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.stop = folder / "stop"
        self.chargers: list[subprocess.Popen[bytes]] = []
        for name in MACHINES:
            (folder / name).mkdir()
        self.point_to(old)
        ledger = open_ledger(old)
        charges = [Charge(1, "units", "videos.list", "", "", f"held{n:05}") for n in range(HELD)]
        for first in range(0, HELD, 100):
            ledger.repay(PROJECT, "before", list(enumerate(charges[first : first + 100], first + 1)), 200_000_000)
        ledger.close()

    def point_to(self, url: str) -> None:
        """The owner edits every machine's configuration; no reader sees half of it."""
        for name in MACHINES:
            new = self.folder / name / "new"
            new.write_text(CONFIG.format(url=url))
            new.replace(self.folder / name / "quota.toml")

    def environment(self, name: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("QUOTA_")}
        return {**kept, "QUOTA_STATE_DIR": str(self.folder / name / "state"), "COLUMNS": "80"}

    def start_chargers(self) -> None:
        for name in MACHINES:
            command = [sys.executable, "-m", "support.charger"]
            command += [str(self.folder / name / part) for part in ("quota.toml", "journal")]
            self.chargers.append(subprocess.Popen([*command, str(self.stop)], cwd=TESTS, env=self.environment(name)))
        until(lambda: all(len(self.told(name)) > 2 for name in MACHINES))

    def told(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "journal"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def mover(self, old: str, new: str) -> subprocess.Popen[str]:
        command = [*QUOTA, "ledger", "move", old, new, "--config", str(self.folder / "a" / "quota.toml")]
        return subprocess.Popen(
            command, env=self.environment("a"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def killed(self, old: str, new: str) -> bool:
        """A move that is killed at some moment, half of the time after it reached the new ledger. Whether it was in
        time."""
        mover = self.mover(old, new)
        if self.dice.random() < 0.5:
            before = written(new)
            until(lambda: written(new) != before or mover.poll() is not None)
            time.sleep(self.dice.uniform(0, 0.3))
        else:
            time.sleep(self.dice.uniform(0.2, 1.2))
        mover.kill()
        mover.communicate()
        return mover.returncode == -9

    def move(self, old: str, new: str) -> str:
        """A move that may end. Now and then two run beside each other before; one of them may be told of the other."""
        if self.dice.random() < 0.3:
            for mover in [self.mover(old, new), self.mover(old, new)]:
                out, err = mover.communicate(timeout=300)
                assert mover.returncode == 0 or (mover.returncode == 69 and OTHER_MOVE in err), (out, err)
        mover = self.mover(old, new)
        out, err = mover.communicate(timeout=300)
        assert mover.returncode == 0, (mover.returncode, out, err)
        assert err == "" or "copied" in err, err
        return out

    def moved(self, old: str, new: str) -> int:
        """From one to the other, over some kills, and the owner edits the url. How many were killed."""
        killed = 0
        for _ in range(KILLS):
            killed += self.killed(old, new)
            if self.dice.random() < 0.25:
                self.mover(new, old).communicate(timeout=300)  # taken back, or there was nothing to take back
        self.move(old, new)
        assert "already" in self.move(old, new)
        self.point_to(new)
        self.until_charged_again()
        return killed

    def until_charged_again(self) -> None:
        before = {name: len(self.told(name)) for name in MACHINES}
        until(lambda: all(len(self.told(name)) > before[name] + 5 for name in MACHINES))

    def end_chargers(self) -> None:
        self.stop.touch()
        for charger in self.chargers:
            assert charger.wait(300) == 0

    def kill_chargers(self) -> None:
        for charger in self.chargers:
            charger.kill()
            charger.wait()

    def draws(self) -> list[tuple[str, bool]]:
        """The idempotency keys of what was drawn on the allowances, and whether it was repaid."""
        found = []
        for name in MACHINES:
            path = self.folder / name / "state" / "allowance.db"
            if path.exists():
                with closing(sqlite3.connect(path)) as db:
                    found += db.execute("SELECT idempotency_key, repaid FROM draws").fetchall()
        return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", ["sqlite redis", "redis redis"])
def test_a_move_that_is_killed_again_and_again_loses_no_charge_and_repeats_none(
    kinds: str, servers: list[RedisServer], tmp_path: Path
) -> None:
    redis_urls = iter([servers[0].url, servers[1].url])
    old, new = (
        next(redis_urls) if kind == "redis" else f"sqlite:///{tmp_path}/{kind}{n}.db"
        for n, kind in enumerate(kinds.split())
    )
    moving = Moving(tmp_path, old, f"{SEED} {kinds}")
    try:
        moving.start_chargers()
        killed = moving.moved(old, new)
        killed += moving.moved(new, old)
        old, new = new, old
        moving.end_chargers()
    finally:
        moving.kill_chargers()
    told = [one for name in MACHINES for one in moving.told(name)]
    errors = [one for one in told if "error" in one]
    assert errors == []
    admitted = [one["id"] for one in told if one.get("source") == "ledger"]
    away = [one for one in told if one.get("reason") == "ledger-unavailable" or one.get("source") == "allowance"]
    assert {one["reason"] for one in told if "reason" in one} <= {"ok", "limit", "ledger-unavailable"}
    with quota.open(tmp_path / "a" / "quota.toml") as session:
        entries = list(read_entries(session.ledger, PROJECT, 0, NEVER))
        (limit,) = session.budget().peek("videos.list").limits
    ids = [f"{entry.ms}-{entry.seq}" for entry in entries]
    keys = [entry.idempotency_key for entry in entries]
    draws = moving.draws()
    said = f"{killed} moves were killed; {len(admitted)} admitted, {len(draws)} drawn, {len(away)} refused or drawn"
    assert len(set(keys)) == len(keys), said
    assert set(admitted) <= set(ids), f"{sorted(set(admitted) - set(ids))[:5]} are not in the new ledger; {said}"
    assert all(repaid for _, repaid in draws), said
    assert {key for key, _ in draws} <= set(keys), said
    assert len(entries) == HELD + len(admitted) + len(draws), f"{len(entries)} entries; {said}"
    assert len(entries) - len(draws) <= HELD + ROOM, said
    assert {(entry.units, entry.charged_units) for entry in entries} == {(1, 1)}
    assert (limit.used_units, limit.unlogged_units) == (len(entries), 0), said
    if away:
        assert any(new.partition("://")[2].split("?")[0] in one["detail"] for one in away if "detail" in one), away[:2]
    done = subprocess.run(
        [*QUOTA, "charge", "videos.list", "--config", "old.toml"],
        cwd=_configured(tmp_path / "late", old),
        env=moving.environment("late"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 69, done
    assert new.partition("://")[2] in done.stderr, done.stderr
    print(said)


def written(url: str) -> object:
    """Changes when the ledger there is written to."""
    if url.startswith("sqlite:///"):
        path = Path(url.removeprefix("sqlite:///"))
        return [p.stat().st_mtime_ns for p in (path, path.with_name(path.name + "-wal")) if p.exists()]
    with redis.Redis.from_url(url) as client:
        return client.info("persistence")["rdb_changes_since_last_save"]


def _configured(folder: Path, url: str) -> Path:
    """A machine that nobody told."""
    folder.mkdir()
    text = CONFIG.format(url=url)
    (folder / "old.toml").write_text("\n".join(line for line in text.splitlines() if "unavailable" not in line))
    return folder
