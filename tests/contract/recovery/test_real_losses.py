"""A real server that loses what it had."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from quota.recovery import high_water_mark as high_water_mark
from support.servers import RedisServer
from support.site import charge, close, guarded, watermark_at

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize("loss", ["restarted without its data", "restored from an old copy", "flushed"])
def test_a_real_server_that_loses_its_data(tmp_path: Path, loss: str) -> None:
    server = RedisServer()
    try:
        budget, mark = guarded(server.url, watermark_at(tmp_path))
        charge(budget, 5)
        with redis.Redis(port=server.port) as client:
            client.save()
        charge(budget, 3)
        if loss == "flushed":
            with redis.Redis(port=server.port) as client:
                client.flushall()
        else:
            server.kill()
            if loss == "restarted without its data":
                (server.folder / "dump.rdb").unlink()
            server.start()
        budget.charge("videos.list")
        assert charge(budget) == 10
        close(budget, mark)
    finally:
        server.close()


def test_a_replica_that_lagged_takes_over(tmp_path: Path) -> None:
    primary, replica = RedisServer(), RedisServer()
    try:
        budget, mark = guarded(primary.url, watermark_at(tmp_path))
        charge(budget, 5)
        with redis.Redis(port=primary.port) as client, redis.Redis(port=replica.port) as other:
            other.replicaof("127.0.0.1", str(primary.port))
            while other.info("replication")["master_link_status"] != "up" or not other.exists("quota:{p}:log"):
                pass
            client.execute_command("WAIT", 1, 5_000)
            other.replicaof("NO", "ONE")
        charge(budget, 3)
        after, _ = guarded(replica.url, mark)
        assert charge(after) == 9
        after.ledger.close()
        close(budget, mark)
    finally:
        primary.close()
        replica.close()
