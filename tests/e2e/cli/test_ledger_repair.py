"""`quota ledger repair` as a user types it, after the clocks stood a year ahead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import quota
from quota.terms.limits import DAY_MS
from support.commands import Quota

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import RedisServer

YEAR_MS = 365 * DAY_MS
CONFIGURATION = """
[ledger]
url = "{url}"
unavailable = {{ max_cost = 1, allowance = 3, machines = 1 }}
[credentials.main]
api = "youtube-v3"
project = "p"
[[credentials.main.limits]]
name = "day"
quota = 10_000
headroom = 500
window = "24h"
"""


@pytest.fixture(params=["sqlite", "redis"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> Quota:
    command = Quota(tmp_path)
    url = f"sqlite:///{tmp_path}/ledger.db"
    if request.param == "redis":
        import redis

        server: RedisServer = request.getfixturevalue("redis_server")
        with redis.Redis(port=server.port) as client:
            client.flushall()
        url = server.url
    command.configure(CONFIGURATION.format(url=url))
    return command


def ahead(command: Quota, monkeypatch: pytest.MonkeyPatch, by_ms: int = YEAR_MS) -> None:
    """One search while all clocks of this machine and the server's stand ahead."""
    for name in ("QUOTA_STATE_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, command.env[name])
    with quota.open(command.folder / "quota.toml", clock=lambda: time.time_ns() // 1_000_000 + by_ms) as session:
        assert session.budget().charge("search.list").admitted


def searches(command: Quota) -> int:
    """How many more searches are admitted now, by a program that stays open."""
    with quota.open(command.folder / "quota.toml") as session:
        budget = session.budget()
        return sum(budget.charge("search.list").admitted for _ in range(100))


def test_a_repair_corrects_a_charge_a_year_ahead(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert command("charge", "search.list").returncode == 0
    ahead(command, monkeypatch)
    peeked = command("peek", "search.list")
    assert peeked.returncode == 0
    assert peeked.stderr.startswith("quota: ledger_ahead project=p"), "as every line that is not the log's"
    assert peeked.stderr.count("ledger_ahead project=p") == 1
    assert "quota ledger repair" in peeked.stderr
    said = " ".join(command("status").stdout.split())
    assert "a clock was wrong, a charge is of 20" in said
    assert "`quota ledger repair`" in said
    assert command.json("status")["credentials"][0]["newest_charge_at"] > time.strftime("%Y-%m-%dT", time.gmtime())

    shown = command("ledger", "repair")
    assert shown.returncode == 0
    assert "project p: 1 charge of 100 units dated ahead, the newest 20" in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("Nothing was changed.")
    rows = command.json("ledger", "repair")
    assert (rows["repaired"], rows["projects"][0]["charges"], rows["projects"][0]["units"]) == (False, 1, 100)

    done = command.json("ledger", "repair", "--yes")
    assert (done["repaired"], done["projects"][0]["charges"]) == (True, 1)
    again = command("ledger", "repair", "--yes")
    assert (again.returncode, again.stderr) == (0, "")
    assert "nothing is dated ahead" in again.stdout
    shown = command("ledger", "repair")
    assert "If that time is right" not in shown.stdout, "there is nothing to repair"
    assert shown.stdout.splitlines()[-1] == "Nothing was changed."
    peeked = command("peek", "search.list")
    assert (peeked.returncode, peeked.stderr) == (0, "")
    assert searches(command) == 91
    refused = command.json("peek", "search.list", status=75)
    assert refused["retry_after_ms"] <= DAY_MS


def test_lost_charges_of_the_future_come_back_with_the_present_time(
    command: Quota, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead(command, monkeypatch)
    ledger = command.folder / "ledger.db"
    if ledger.exists():
        for path in command.folder.glob("ledger.db*"):
            path.unlink()
    else:
        import redis

        with redis.Redis.from_url(quota.open(command.folder / "quota.toml").settings.ledger.url) as client:
            client.flushall()
    assert command("status").returncode == 0
    assert "nothing is dated ahead" in command("ledger", "repair").stdout
    assert searches(command) == 94


def test_a_clock_that_disagrees_repairs_nothing(command: Quota, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead(command, monkeypatch)
    from quota.cli import ledger as module
    from quota.cli.entry import main

    monkeypatch.chdir(command.folder)
    monkeypatch.setattr(module, "host_clock", lambda: time.time_ns() // 1_000_000 + 6_000)
    monkeypatch.setattr("sys.argv", ["quota", "ledger", "repair", "--yes"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert command.json("ledger", "repair")["projects"][0]["charges"] == 1
