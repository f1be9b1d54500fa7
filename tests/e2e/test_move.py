"""`quota ledger move` as an owner uses it: programs that charge on, a mover that is killed, a url that is edited."""

from __future__ import annotations

import contextlib
import random
import time
import tomllib
from typing import TYPE_CHECKING

import pytest
import redis

import quota
from quota.common.clock import NEVER
from quota.ledger.contract import read_entries
from quota.ledger.factory import open_movable
from quota.ledger.fence import Wanted
from support.commands import Quota, one_line
from support.installation import Installation, until
from support.servers import RedisServer, free_port

if TYPE_CHECKING:
    from pathlib import Path


CONFIG = """
[ledger]
url = "{url}"
{more}
[credentials.main]
api = "youtube-v3"
project = "{project}"
{limits}
"""

LIMITS = """
[[credentials.main.limits]]
name = "short"
units = {units}
window = "2s"
"""

CHARGER = """
import sys, time, pathlib, quota
stop = pathlib.Path("stop")
while not stop.exists():
    with quota.open() as session:
        budget = session.budget()
        while not stop.exists():
            decision = budget.charge("videos.list", region=sys.argv[1])
            if decision.admitted:
                print(decision.id, flush=True)
                continue
            time.sleep(0.01)
            if decision.reason == "ledger-unavailable":
                break
"""


def configure(quota: Quota, url: str, project: str, limits: str = "", more: str = "") -> None:
    path = quota.configure(CONFIG.format(url=url, project=project, limits=limits, more=more))
    assert path.name == "quota.toml"


def test_an_owner_changes_the_place_of_the_ledger_and_the_day_goes_on(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """L27. Two machines share a Redis; it moves to another database, and each changes the url when it likes."""
    old, new = f"redis://127.0.0.1:{redis_server.port}/3", f"redis://127.0.0.1:{redis_server.port}/4"
    for number in (3, 4):
        with redis.Redis(port=redis_server.port, db=number) as client:
            client.flushdb()
    machines = []
    for name in ("web1", "web2"):
        (tmp_path / name).mkdir()
        machines.append(Quota(tmp_path / name))
        configure(machines[-1], old, "moving", more="unavailable = { max_cost = 1, allowance = 5, machines = 2 }")
    web1, web2 = machines
    for machine in machines:
        assert machine("charge", "search.list", "--units", "4500").returncode == 0
    assert one_line(web2("charge", "search.list", "--units", "501"), 75)

    moved = web1("ledger", "move", old, new)
    assert (moved.returncode, moved.stderr) == (0, "")
    assert moved.stdout.splitlines()[0] == f"project moving: 2 charges moved to {new}"
    assert f'\n  [ledger]\n  url = "{new}"\n' in moved.stdout
    for args in ("charge search.list", "status", "spend", "log", "log --refused", "explain"):
        assert f"has moved to {new} and takes no charge any more" in one_line(web2(*args.split()), 69)
    for args in ("status", "spend", "log", "log --refused", "explain"):
        assert f"has moved to {new} and takes no charge any more" in one_line(web2(*args.split(), "--json"), 69)
    drawn = web2("charge", "videos.list")
    assert drawn.returncode == 0, "the allowance"

    for machine in machines:
        configure(machine, new, "moving")
        told = machine("charge", "search.list", "--units", "501")
        assert "500 units left" in told.stderr or "refused" in told.stderr
        assert "ledger_moved" not in told.stderr
        assert "ledger_behind" not in told.stderr
        assert told.returncode == 75
    configure(web2, new, "moving", more="unavailable = { max_cost = 1, allowance = 5, machines = 2 }")
    assert web2("charge", "videos.list").returncode == 0
    status = web1.json("status")["credentials"][0]
    assert [limit["used_units"] for limit in status["limits"]] == [9002, 9002], "with what was drawn meanwhile"
    assert "unlogged_units" not in status
    assert web1("ledger", "move", old, new).stdout.startswith(f"project moving: moved already to {new}")

    back = web1.json("ledger", "move", new, old)
    assert back == {"old": new, "new": old, "projects": [{"project": "moving", "outcome": "moved", "charges": 4}]}


def test_all_projects_are_those_that_have_not_moved_elsewhere(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    for project in ("p1", "p2", "p3"):
        configure(quota, "sqlite:///old.db", project)
        quota("charge", "search.list")
    configure(quota, "sqlite:///old.db", "p1")
    assert "not moved, of other configurations: p2, p3; --all moves them too" in (
        quota("ledger", "move", "sqlite:///old.db", "sqlite:///first.db").stdout
    )
    configure(quota, "sqlite:///old.db", "p2")
    assert "of other configurations: p3; --all" in quota("ledger", "move", "sqlite:///old.db", "sqlite:///b.db").stdout
    moved = quota.json("ledger", "move", "sqlite:///old.db", "sqlite:///b.db", "--all")
    assert {one["project"]: one["outcome"] for one in moved["projects"]} == {"p2": "already-moved", "p3": "moved"}


@pytest.mark.parametrize("name", ["new.db", 'a "quoted" one.db', "back\\slash.db", "Zürich's.db"])
def test_what_the_owner_is_to_write_is_toml(tmp_path: Path, name: str) -> None:
    quota = Quota(tmp_path)
    configure(quota, "sqlite:///old.db", "moving")
    quota("charge", "search.list")
    moved = quota("ledger", "move", "sqlite:///old.db", f"sqlite:///{name}")
    told = "".join(line for line in moved.stdout.splitlines(keepends=True) if line.startswith("  "))
    assert tomllib.loads(told) == {"ledger": {"url": f"sqlite:///{tmp_path}/{name}"}}


def test_what_cannot_be_moved_is_one_line(tmp_path: Path, redis_server: RedisServer) -> None:
    quota = Quota(tmp_path)
    configure(quota, "sqlite:///ledger.db", "p")
    assert "holds nothing of project p" in one_line(quota("ledger", "move", "sqlite:///no.db", "sqlite:///new.db"), 1)
    assert not (tmp_path / "no.db").exists()
    assert quota("charge", "videos.list").returncode == 0
    for new, told in (
        ("foo://bar", "NEW: ledger url of kind 'foo' is not known"),
        ("new.db", "NEW: ledger url of kind 'new.db' is not known"),
        ("sqlite://", "NEW: a database in memory is lost when the command ends; a file is sqlite:///relative/path"),
        (f"sqlite:///{tmp_path}", "is a folder; name a file in it"),
        ("redis://:s3cret@127.0.0.1:x/0", "one of its parts cannot be read"),
        ("redis:/u:s3cret@127.0.0.1", "one of its parts cannot be read"),
    ):
        said = one_line(quota("ledger", "move", "sqlite:///ledger.db", new), 2)
        assert told in said
        assert "s3cret" not in said
    nowhere = quota("ledger", "move", "sqlite:///ledger.db", "redis://:s3cret@127.0.0.1:1")
    assert "cannot be reached" in one_line(nowhere, 69)
    assert quota("charge", "videos.list").returncode == 0, "nothing was changed"
    for new in ("sqlite:////proc/new.db", f"sqlite:///{tmp_path}/quota.toml"):
        said = one_line(quota("ledger", "move", "sqlite:///ledger.db", new), 69)
        assert "not finished" not in said, "the old ledger takes charges, and there is nothing to take back"
        assert quota("peek", "videos.list").returncode == 0
    said = one_line(quota("ledger", "move", "sqlite:///ledger.db", "sqlite:////proc/new.db"), 69)
    assert said.endswith(f"; nothing was moved, and sqlite:///{tmp_path}/ledger.db is as it was")
    done = quota("ledger", "move", "sqlite:///ledger.db", "sqlite:///new.db", "--all")
    assert done.stdout.splitlines()[0].endswith("2 charges moved to sqlite:///" + str(tmp_path / "new.db"))


def test_a_replica_is_told_as_one_and_not_said_to_take_charges(tmp_path: Path, redis_server: RedisServer) -> None:
    quota = Quota(tmp_path)
    configure(quota, redis_server.url, "p")
    assert quota("charge", "videos.list").returncode == 0
    with redis.Redis(port=redis_server.port) as client:
        client.replicaof("127.0.0.1", str(free_port()))
        try:
            said = one_line(quota("ledger", "move", redis_server.url, "sqlite:///new.db"), 69)
        finally:
            client.replicaof("NO", "ONE")
    assert "is a replica, which cannot be written to; name the primary; nothing was moved" in said
    assert "charges" not in said
    assert quota("charge", "videos.list").returncode == 0


def test_an_unfinished_move_to_a_ledger_that_is_gone_names_the_way_back(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    configure(quota, "sqlite:///ledger.db", "p")
    assert quota("charge", "videos.list").returncode == 0
    old, gone = f"sqlite:///{tmp_path}/ledger.db", "redis://127.0.0.1:1/0"
    with contextlib.closing(open_movable(old)) as ledger:
        ledger.change("p", ledger.standing("p"), Wanted("fenced", "m" * 16, gone, ledger.standing("p").epoch))
    told = one_line(quota("charge", "videos.list"), 69)
    assert f"is being moved to {gone}, which takes no charge either until all of it is there" in told
    assert f"if that move was interrupted, finish it: quota ledger move {old} {gone}" in told
    assert "has moved" not in told, "nothing is there yet"
    way_back = f"quota ledger move {gone} {old}"
    assert one_line(quota("ledger", "move", "sqlite:///ledger.db", gone), 69).endswith(way_back)
    back = quota(*way_back.split()[1:])
    assert (back.returncode, back.stderr) == (0, "")
    assert len(back.stdout.splitlines()) == 1, "no word of other urls"
    assert quota("charge", "videos.list").returncode == 0


def test_chargers_and_a_mover_that_is_killed_lose_and_double_nothing(tmp_path: Path, redis_server: RedisServer) -> None:
    """L27. From a file to Redis and back, killed in the middle and at random; chargers follow the configuration."""
    chance, units, kills = random.Random(7), 20, 0
    home = Installation(tmp_path / "home")
    with redis.Redis(port=redis_server.port, db=5) as client:
        client.flushdb()
    urls = [f"sqlite:///{tmp_path}/ledger.db", f"redis://127.0.0.1:{redis_server.port}/5"]
    configure(home.quota, urls[0], "p", LIMITS.format(units=units))
    chargers = [home.start(str(n), script=CHARGER) for n in range(4)]
    try:
        for old, new in (urls, urls[::-1]):
            ledgers = [open_movable(url) for url in (old, new)]
            before = ledgers[0].standing("p").charges
            until(lambda ledger=ledgers[0], charges=before: ledger.standing("p").charges > charges + 5)
            for turn in range(3):
                mover = home.start("ledger", "move", old, new)
                while not turn and mover.poll() is None and ledgers[0].standing("p").role == "open":
                    pass  # the first is killed once it has fenced the old ledger
                time.sleep(chance.uniform(0, 0.2) if turn else 0)
                kills += mover.poll() is None
                mover.kill()
                mover.communicate()
                assert [ledger.standing("p").role for ledger in ledgers].count("open") <= 1
            assert home.quota("ledger", "move", old, new).returncode == 0
            for ledger in ledgers:
                ledger.close()
            beside = tmp_path / "home" / "next.toml"
            beside.write_text(home.config.read_text().replace(old, new))
            beside.replace(home.config)
    finally:
        with quota.open(home.config) as session:
            before = len(list(read_entries(session.ledger, "p", 0, NEVER)))
            until(lambda: len(list(read_entries(session.ledger, "p", 0, NEVER))) > before)
        (tmp_path / "home" / "stop").touch()
        printed = [charger.communicate(timeout=300)[0].split() for charger in chargers]
    assert kills > 0
    with quota.open(home.config) as session:
        log = list(read_entries(session.ledger, "p", 0, NEVER))
    admitted = [charge_id for ids in printed for charge_id in ids]
    assert len(set(admitted)) == len(admitted)
    assert set(admitted) == {entry.id for entry in log}, "each that was admitted is there, and no other"
    assert len({entry.idempotency_key for entry in log}) == len(log)
    for entry in log:
        assert sum(other.units for other in log if entry.ms - 2_000 < other.ms <= entry.ms) <= units
