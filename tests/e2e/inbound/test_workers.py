"""Several workers hold one limit together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import redis

from support.inbound_http import Answer, burst, serving
from support.servers import immortal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.servers import RedisServer
    from support.web import Served

LIMIT = 30
WINDOW_S = 2.0
RULES = """
[inbound]
url = "URL"

[inbound.log]
path = "/log"
algorithm = "log"
fail = "closed"
limit = 30
window = "2s"

[inbound.counter]
path = "/counter"
fail = "closed"
limit = 30
window = "2s"

[inbound.gcra]
path = "/gcra"
algorithm = "gcra"
fail = "closed"
limits = [{ limit = 30, window = "2s", burst = 10 }]

[inbound.opens]
path = "/opens"
limit = 1_000
window = "1h"

[inbound.exact]
path = "/exact"
algorithm = "log"
fail = "closed"
limit = 200
window = "1h"
"""


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Four workers over one storage. Afterwards no key may be left without a lifetime."""
    url = "sqlite:///inbound.db"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        with redis.Redis(port=server.port) as client:
            client.flushall()
        url = server.url
    folder = tmp_path_factory.mktemp("workers")
    (folder / "quota.toml").write_text(RULES.replace("URL", url), encoding="utf-8")
    with serving(folder, "4") as served:
        yield served
    if request.param == "redis":
        with redis.Redis(port=server.port) as client:
            assert immortal(client) == [], "keys without a lifetime"


def most_in_any_window(admitted: Sequence[Answer]) -> int:
    """The most requests that were certainly decided within less than a window of each other."""
    return max(
        sum(first.asked_s <= one.asked_s and one.answered_s < first.asked_s + WINDOW_S for one in admitted)
        for first in admitted
    )


def test_bursts_half_a_window_apart_stay_within_each_algorithms_bound(served: Served) -> None:
    """What a fixed window admits twice. Three algorithms meet the same bursts at the same time."""
    burst(served.port, "/opens", 32)  # the workers open their storage outside of what is measured
    paths = ("/log", "/counter", "/gcra")
    answers: dict[str, list[Answer]] = {path: [] for path in paths}
    began_s = time.monotonic()
    for start_s in (0.0, WINDOW_S / 2):
        time.sleep(max(0.0, began_s + start_s - time.monotonic()))  # real windows: the server's clock decides
        for path in paths:
            answers[path] += burst(served.port, path, LIMIT + 10)
    assert {one.status for path in paths for one in answers[path]} == {200, 429}
    admitted = {path: [one for one in answers[path] if one.admitted] for path in paths}
    # A machine that stalls for a window admits more in all, and never more within one.
    assert most_in_any_window(admitted["/log"]) <= LIMIT <= len(admitted["/log"])
    assert most_in_any_window(admitted["/counter"]) < 2 * LIMIT
    assert most_in_any_window(admitted["/gcra"]) <= LIMIT + 10
    assert len(admitted["/counter"]) >= LIMIT
    assert len(admitted["/gcra"]) >= 10
    assert len({one.body for path in paths for one in admitted[path]}) > 1, "one worker answered everything"
    # When the first of them leave the window, exactly as many fit again.
    last_s = max(one.answered_s for one in admitted["/log"])
    time.sleep(max(0.0, last_s + WINDOW_S - time.monotonic()))
    again = burst(served.port, "/log", LIMIT + 10)
    assert sum(one.admitted for one in again) >= LIMIT
    assert most_in_any_window([*admitted["/log"], *(one for one in again if one.admitted)]) <= LIMIT


def test_clients_at_once_are_admitted_exactly(served: Served) -> None:
    assert sum(answer.admitted for answer in burst(served.port, "/exact", 240)) == 200
