"""The fast path of charge.lua changes no answer, and nothing stored: it is only faster."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

import redis

from contract.ledger.test_charge_script import ALL, CALLS, KEYS, LOG, NOW, STATE, Scripts, scripts
from quota.ledger.redis_scripts import script
from quota.terms.limits import DAY_MS, HOUR_MS, SECOND_MS
from support.fast_path import Pair, as_list

if TYPE_CHECKING:
    from support.servers import RedisServer

__all__ = ["scripts"]  # a fixture


def test_without_the_fast_path_every_answer_is_the_same(redis_server: RedisServer) -> None:
    found: Counter[str] = Counter()
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        for seed in range(1, 1 + int(os.environ.get("QUOTA_TEST_SEEDS", "3"))):
            found += Pair(client, seed).run(300)
        client.flushall()
    for what in ("charge ADMITTED", "peek ADMITTED"):
        assert found[f"fast {what}"] > 10, found
    for what in ("slow ADMITTED", "slow REFUSED", "slow BEHIND", "slow EXHAUSTED", "slow CLOCK", "settle", "deleted"):
        assert found[what] > 3, found


def test_in_production_all_decisions_take_it(scripts: Scripts) -> None:
    """One comes, none or one or several leave; the first of each minute keeps house."""
    edges = f"{NOW} {NOW + DAY_MS} {NOW + 2 * DAY_MS}"
    hour, calls = (ALL, 10**6, 1, HOUR_MS), (CALLS, 10**6, 1, HOUR_MS)
    fast = 0
    for number in range(1_000):
        scripts.now_ms += (9, 3, 15)[number % 3] * SECOND_MS
        reply = scripts.charge(hour, ("units|*|*|day@UTC", 10**6, 1, edges), calls, commit="1t")
        if number == 500:  # it leaves in the course of this
            scripts.run("settle", as_list(reply, commit=True)[1], 0)
        fast += number >= 600 and isinstance(reply, str)
    assert fast == 400
    reply = scripts.charge(hour, calls)
    there = scripts.client.xrange(LOG, scripts.now_ms - HOUR_MS + 1)
    assert reply[7:] == [str(len(there))] * 2


def test_a_longer_window_lengthens_all_lives_at_once(scripts: Scripts) -> None:
    limit, retention_ms = (ALL, 10**6, 1, HOUR_MS), 40 * DAY_MS
    for _ in range(2):
        scripts.charge(limit)
    settled = as_list(scripts.charge(limit, commit="1t"), commit=True)[1]
    scripts.run("settle", settled, 0)
    for _ in range(2):
        assert isinstance(scripts.charge(limit, commit="1t", retention_ms=retention_ms), str)
        assert scripts.client.hget(STATE, "retention_ms") == str(retention_ms)
        assert all(scripts.client.pttl(key) > retention_ms - HOUR_MS for key in KEYS)


def test_the_servers_own_clock_is_read_to_the_millisecond(scripts: Scripts) -> None:
    """It tells microseconds without leading zeros."""
    scripts.now_ms = 0
    scripts.charge((ALL, 10, 1, DAY_MS))
    sha = scripts.client.script_load(script("charge")[0])
    words = scripts.arguments((ALL, 10, 0, DAY_MS), commit="0t", u=0)
    digits: set[int] = set()
    deadline = time.monotonic() + 20
    while not digits >= {5, 6} and time.monotonic() < deadline:
        with scripts.client.pipeline(transaction=False) as pipe:
            pipe.time()
            pipe.evalsha(sha, 3, *KEYS, *map(str, words))
            pipe.time()
            before, reply, after = pipe.execute()
        now_ms = int(as_list(reply, commit=False)[2])
        assert before[0] * 1_000 + before[1] // 1_000 <= now_ms <= after[0] * 1_000 + after[1] // 1_000
        assert isinstance(reply, str)
        digits.add(len(str(before[1])))
    assert digits >= {5, 6}
