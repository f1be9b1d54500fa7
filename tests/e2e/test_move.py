"""`quota ledger move`: a project goes to another ledger with all that counts, and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

import quota
from support.commands import Quota, one_line

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import RedisServer

CONFIGURATION = """
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "p"
[[credentials.main.limits]]
name = "day"
units = 500
window = "24h"
"""


@pytest.fixture
def there(redis_server: RedisServer) -> str:
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def command(tmp_path: Path) -> Quota:
    command = Quota(tmp_path)
    command.configure(CONFIGURATION.format(url=f"sqlite:///{tmp_path}/ledger.db"))
    return command


def test_all_that_counts_moves_there_and_back(command: Quota, there: str) -> None:
    here = f"sqlite:///{command.folder}/ledger.db"
    ids = [command.json("charge", "search.list")["id"] for _ in range(3)]
    assert command("settle", ids[0], "40").returncode == 0
    assert command("charge", "videos.list", "--units", "400").returncode == 75
    moved = command("ledger", "move", here, there)
    assert moved.returncode == 0, moved.stderr
    assert moved.stdout.startswith("project p: 3 charges moved to ")
    refused = command("charge", "videos.list")
    assert refused.returncode == 69
    assert "has moved to" in refused.stderr
    again = command("ledger", "move", here, there)
    assert (again.returncode, again.stdout.splitlines()[0][:24]) == (0, "project p: moved already")

    command.configure(CONFIGURATION.format(url=there))
    (limit,) = command.json("status")["credentials"][0]["limits"]
    assert limit["used_units"] == 240
    assert command("charge", "videos.list", "--units", "100").returncode == 0
    assert command("refund", ids[1]).returncode == 0
    assert command("ledger", "move", there, here).returncode == 0
    assert command("charge", "videos.list").returncode == 69

    command.configure(CONFIGURATION.format(url=here))
    (limit,) = command.json("status")["credentials"][0]["limits"]
    assert limit["used_units"] == 240
    refused = command.json("charge", "videos.list", "--units", "261", status=75)
    assert refused["refused_by"] == "day"


def test_what_upstream_closed_moves_too(command: Quota, there: str) -> None:
    here = f"sqlite:///{command.folder}/ledger.db"
    with quota.open(command.folder / "quota.toml") as session:
        now_ms = session.ledger.now_ms()
        session.budget().exhaust("units", now_ms, now_ms + 3_600_000, "no more")
    assert command("ledger", "move", here, there).returncode == 0
    command.configure(CONFIGURATION.format(url=there))
    assert command.json("charge", "videos.list", status=75)["reason"] == "exhausted"


def test_what_cannot_be_moved_is_one_line_and_changes_nothing(command: Quota, there: str) -> None:
    here = f"sqlite:///{command.folder}/ledger.db"
    assert "holds nothing of project p" in one_line(command("ledger", "move", here, there), 1)
    assert "is both the old ledger and the new one" in one_line(command("ledger", "move", here, here), 1)
    assert command("charge", "videos.list").returncode == 0
    assert command("ledger", "move", here, "redis://127.0.0.1:9/0").returncode == 69
    assert command("charge", "videos.list").returncode == 0, "its fence is given back, or over"


def test_a_project_does_not_move_to_that_of_another_api(command: Quota, there: str) -> None:
    here = f"sqlite:///{command.folder}/ledger.db"
    assert command("charge", "videos.list").returncode == 0
    command.configure(f'[ledger]\nurl = "{there}"\n[credentials.p]\napi = "asana"\n')
    assert command("charge", "read").returncode == 0
    line = one_line(command("ledger", "move", here, there), 69)
    assert line.endswith(
        "project 'p' has the charges of api 'asana', and upstream counts 'youtube' separately; give this credential "
        "another project"
    )
