"""The other libraries, each behind `hit(units)`, with a day's limit that is never reached.

They come with the extra `bench`. One that is not installed is left out, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from typing import Any

import redis

from quota.terms.limits import DAY_MS

Hit = Callable[[int], object]

PLENTY = 10**8
LIMITS = "limits, moving window"

SET_RECIPE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[1]) * 1000)
if redis.call('ZCARD', KEYS[1]) + tonumber(ARGV[3]) > tonumber(ARGV[2]) then return 0 end
for i = 1, tonumber(ARGV[3]) do redis.call('ZADD', KEYS[1], now, ARGV[4] .. ':' .. i) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
"""The sorted set of the blog posts: one member for each unit."""


@dataclass(frozen=True)
class Peer:
    """A library: how to make a fresh budget called `key`, and the module it needs."""

    name: str
    module: str
    make: Callable[[redis.Redis, str, str], Hit]

    @property
    def installed(self) -> bool:
        return find_spec(self.module) is not None


def _set_recipe(client: redis.Redis, url: str, key: str) -> Hit:
    sha, members = client.script_load(SET_RECIPE), count()
    return lambda units: client.evalsha(sha, 1, key, DAY_MS, PLENTY, units, f"{key}:{next(members)}")


def moving_window(url: str) -> Any:
    from limits.storage import RedisStorage
    from limits.strategies import MovingWindowRateLimiter

    return MovingWindowRateLimiter(RedisStorage(url))


def _limits(client: redis.Redis, url: str, key: str) -> Hit:
    from limits import RateLimitItemPerDay

    limiter, item = moving_window(url), RateLimitItemPerDay(PLENTY)
    return lambda units: limiter.hit(item, key, cost=units)


def limits_decisions(url: str, full: int) -> dict[str, Callable[[], object]]:
    """The decisions of `bench.kinds` with one limit, by the library `limits`; empty if it is not installed. Those that
    are refused meet `full` entries."""
    if find_spec("limits") is None:
        return {}
    from limits import RateLimitItemPerDay

    limiter = moving_window(url)
    item, small = RateLimitItemPerDay(PLENTY), RateLimitItemPerDay(full)
    limiter.hit(small, "full", cost=full)

    def hit(units: int, key: str) -> Callable[[], object]:
        def call() -> None:
            assert limiter.hit(item, key, cost=units)

        return call

    def refused(units: int) -> Callable[[], object]:
        def call() -> None:
            assert not limiter.hit(small, "full", cost=units)

        return call

    return {
        "1 unit": hit(1, "beside-1"),
        "100 units": hit(100, "beside-100"),
        "refused, 1 unit": refused(1),
        "refused, 100 units": refused(100),
    }


def _pyrate(client: redis.Redis, url: str, key: str) -> Hit:
    from pyrate_limiter import Duration, Limiter, Rate, RedisBucket
    from pyrate_limiter.limiter import SingleBucketFactory

    bucket = RedisBucket.init([Rate(PLENTY, Duration.DAY)], client, key)
    # Its background thread would take time from whoever is being measured.
    limiter = Limiter(SingleBucketFactory(bucket, schedule_leak=False))
    return lambda units: limiter.try_acquire("trending", weight=units, blocking=False)


def _throttled(using: str) -> Callable[[redis.Redis, str, str], Hit]:
    def make(client: redis.Redis, url: str, key: str) -> Hit:
        from throttled import Throttled, per_day
        from throttled.store import RedisStore

        limiter = Throttled(key=key, using=using, quota=per_day(PLENTY, burst=PLENTY), store=RedisStore(server=url))
        return lambda units: limiter.limit(cost=units)

    return make


REDIS_PEERS = (
    Peer("a set with one member per unit", "redis", _set_recipe),
    Peer(LIMITS, "limits", _limits),
    Peer("pyrate-limiter, Redis bucket", "pyrate_limiter", _pyrate),
    Peer("throttled-py, sliding window", "throttled", _throttled("sliding_window")),
    Peer("throttled-py, GCRA", "throttled", _throttled("gcra")),
)
