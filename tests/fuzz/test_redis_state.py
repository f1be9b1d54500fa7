"""What other programs wrote into a project's keys in Redis: a decision from what is sound, or one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

import pytest
import redis

from fuzz.house import damage_key, furnish
from fuzz.inputs import MAX_S, PARTS, Input, every
from fuzz.readings import check_changes, check_decisions, check_readings
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS

if TYPE_CHECKING:
    from support.servers import RedisServer

NOW_MS = 1_795_204_800_000
CONFIG = """
[ledger]
url = "{}"
[credentials.main]
api = "youtube-v3"
limits = [
  {{ name = "day", units = 500, window = "24h" }},
  {{ name = "pacific-day", units = 500, window = {{ calendar = "day", zone = "America/Los_Angeles" }} }},
]
"""


def test_a_charge_that_is_dated_3000_years_ahead_is_waited_for_at_once(
    redis_server: RedisServer, tmp_path: Path, state_dir: Path
) -> None:
    """Not day by day: that takes a minute."""
    (tmp_path / "quota.toml").write_text(CONFIG.format(redis_server.url))
    with (
        redis.Redis(port=redis_server.port) as client,
        Session(load_settings("quota.toml"), clock=lambda: NOW_MS) as session,
    ):
        client.flushall()
        assert session.budget().charge("videos.list").admitted
        for ms in (10**14 - 10 * DAY_MS, 2**53):
            client.xadd("quota:{main}:ledger:log", {"e": "500\tk\tunits\tvideos.list\tj\tUS"}, id=f"{ms}-0")
            began_s = process_time()
            refused = session.budget().charge("videos.list")
            assert (refused.admitted, refused.reason, refused.retry_at is not None) == (False, "limit", True)
            assert process_time() - began_s < MAX_S


@pytest.mark.parametrize("part", range(PARTS))
def test_foreign_data_is_answered_or_named(
    part: int, redis_server: RedisServer, tmp_path: Path, state_dir: Path
) -> None:
    (tmp_path / "quota.toml").write_text(CONFIG.format(redis_server.url))
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        settings = load_settings("quota.toml")
        with Session(settings, clock=lambda: NOW_MS) as session:
            charge_id = furnish(session, NOW_MS)
        kept = {key: client.dump(key) for key in client.keys("*")}
        state_dir.rename("kept")

        def attempt(r: Input) -> None:
            client.flushall()
            for key, dump in kept.items():
                client.restore(key, 10**9, dump)
            shutil.rmtree(state_dir, ignore_errors=True)
            if r.random() < 0.5:  # else this machine has seen nothing of it yet
                shutil.copytree("kept", state_dir)
            r.data = [damage_key(r, client, NOW_MS) for _ in range(r.choice((1, 1, 2, 4)))]
            with Session(settings, clock=lambda: NOW_MS + 10) as session:
                check_decisions(session)
                check_readings(r, session, charge_id)
                check_changes(r, session, charge_id)
            with Session(settings, clock=lambda: NOW_MS + 20) as session:
                check_decisions(session)
            client.ping()  # no script goes on for ever

        every("redis", part, attempt)
