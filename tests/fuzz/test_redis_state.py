"""What other programs wrote into a project's keys in Redis: a decision from what is sound, or one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from time import process_time

import pytest
import redis

from fuzz.house import damage_key, furnish
from fuzz.inputs import MAX_S, PARTS, Input, every
from fuzz.readings import CREDENTIAL, NOW_MS, check_all, opened
from quota.deciding import outlook
from quota.settings.load import load_settings
from quota.settings.model import Settings
from quota.terms.limits import DAY_MS
from support.servers import RedisServer


def settings_of(server: RedisServer) -> Settings:
    Path("quota.toml").write_text(f'[ledger]\nurl = "{server.url}"\n{CREDENTIAL}')
    return load_settings("quota.toml")


@pytest.mark.usefixtures("state_dir")
def test_a_charge_that_is_dated_3000_years_ahead_is_waited_for_at_once(redis_server: RedisServer) -> None:
    """Not day by day: that takes a minute."""
    settings = settings_of(redis_server)
    with redis.Redis(port=redis_server.port) as client, opened(settings) as session:
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
    part: int, redis_server: RedisServer, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlook, "LOOK_WITHIN_S", 0.5)  # an epoch that is no text is another one each time
    settings = settings_of(redis_server)
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
        with opened(settings) as session:
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
            check_all(r, settings, charge_id)
            client.ping()  # no script goes on for ever

        every("redis", part, attempt)
