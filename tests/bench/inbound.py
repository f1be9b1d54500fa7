"""Inbound limits: time of a decision beside other libraries, memory of a million identities, and how far each algorithm
is from the exact log.

    python -m bench.inbound [--quick]       (in the folder `tests`)
"""

from __future__ import annotations

import argparse
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import redis

from bench.budgets import NOTHING
from bench.peers import PLENTY
from bench.race import Contestant, race
from bench.report import Bar, Report, measuring
from quota.errors import StorageAway
from quota.inbound.contract import Algorithm, Decision, Limit, Policy, States, Storage, decide
from quota.inbound.rules import open_storage
from support.servers import RedisServer

MINUTE_MS = 60_000
IDENTITIES = 1_000
MILLION = 1_000_000

POLICIES = {
    "counter": Policy("bench", (Limit(1_000_000, MINUTE_MS),)),
    "gcra": Policy("bench", (Limit(1_000_000, MINUTE_MS, 1_000_000),), "gcra"),
    "log": Policy("bench", (Limit(1_000, MINUTE_MS),), "log"),
}

# -- time of a decision ------------------------------------------------------------------------------------------------


def measure_time(report: Report, server: RedisServer, folder: Path, rounds: int, calls: int) -> None:
    client = redis.Redis.from_url(server.url)
    sha = client.script_load(NOTHING)
    shared, local = open_storage(server.url), open_storage(f"sqlite:///{folder / 'inbound.db'}")
    report.begin("inbound, time of a decision")
    contestants = [
        Contestant("floor: EVALSHA return 1", lambda: client.evalsha(sha, 0)),
        *(Contestant(f"quota, {name}", asking(shared, policy)) for name, policy in POLICIES.items()),
        *(Contestant(name, call) for name, call in peers(server.url)),
        *(Contestant(f"quota, {name}, SQLite", asking(local, policy)) for name, policy in POLICIES.items()),
    ]
    rows = race(contestants, rounds, calls)
    report.race("Inbound limits: time of a decision", rows, f"{IDENTITIES:,} visitors in turn, all admitted")
    ratio = {row.name: row.ratio for row in rows}
    for name in POLICIES:
        report.bars.append(Bar(f"inbound, {name}, beside a bare call", ratio[f"quota, {name}"], 1.25))
    for ours, theirs in EQUIVALENTS.items():
        if theirs in ratio:
            report.bars.append(Bar(f"{ours}: {theirs}", ratio[f"quota, {ours}"] / ratio[theirs], 1.0))
    client.close()
    shared.close()
    local.close()


EQUIVALENTS = {
    "counter": "limits, sliding window counter",
    "gcra": "throttled-py, GCRA",
    "log": "limits, moving window",
}
"""Each of our algorithms, and the library's that promises the same; throttled-py's sliding window is a counter too."""


def asking(storage: Storage, policy: Policy) -> Callable[[], object]:
    visitors = visitors_of(policy.algorithm)

    def call() -> Decision:
        decision = storage.decide(policy, next(visitors))
        assert decision.admitted
        return decision

    return call


def peers(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The other libraries of the extra `bench`, as far as they are installed."""
    if find_spec("limits") is not None:
        from limits import RateLimitItemPerMinute, strategies
        from limits.storage import RedisStorage

        storage, item = RedisStorage(url), RateLimitItemPerMinute(PLENTY)
        for name, kind in (
            ("sliding window counter", strategies.SlidingWindowCounterRateLimiter),
            ("moving window", strategies.MovingWindowRateLimiter),
        ):
            limiter, visitors = kind(storage), visitors_of(name)
            yield f"limits, {name}", lambda limiter=limiter, visitors=visitors: limiter.hit(item, next(visitors))
    if find_spec("throttled") is not None:
        from throttled import Throttled, per_min
        from throttled.store import RedisStore

        store = RedisStore(server=url)
        for name, using in (("sliding window", "sliding_window"), ("GCRA", "gcra")):
            throttled = Throttled(using=using, quota=per_min(PLENTY, burst=PLENTY), store=store)
            visitors = visitors_of(using)
            yield (
                f"throttled-py, {name}",
                lambda throttled=throttled, visitors=visitors: throttled.limit(key=next(visitors)),
            )


def visitors_of(contestant: str) -> Iterator[str]:
    """Other ones for each: some libraries keep several algorithms under the same keys."""
    return cycle([f"{contestant} 192.0.2.{n}" for n in range(IDENTITIES)])


# -- memory ------------------------------------------------------------------------------------------------------------


def measure_memory(report: Report, server: RedisServer, identities: int) -> None:
    rows = []
    for name, policy in (
        ("counter", Policy("search", (Limit(100, 86_400_000),))),
        ("gcra", Policy("search", (Limit(100, 86_400_000, 10),), "gcra")),
    ):
        report.begin(f"inbound, memory of {identities:,} identities: {name}")
        with redis.Redis(port=server.port) as client:
            client.flushall()
            before = client.info("memory")["used_memory"]
            storage = open_storage(server.url)
            for number in range(identities):
                patiently(storage, policy, f"visitor {number}")
            used = client.info("memory")["used_memory"] - before
            storage.close()
            client.flushall()
        rows.append((f"{name}, {identities:,} identities", used, identities))
        if identities == MILLION:
            report.bars.append(Bar(f"inbound, {name}, of an identity", used / identities, 25, "bytes"))
    report.sizes("Inbound limits: memory of a window", rows, "the last column: of an identity")


def patiently(storage: Storage, policy: Policy, identity: str) -> None:
    """A machine that does something else for a quarter of a second is no finding."""
    while True:
        try:
            storage.decide(policy, identity)
        except StorageAway:
            continue
        return


# -- error -------------------------------------------------------------------------------------------------------------

NUMBER = 100
LIMITS: dict[str, tuple[Algorithm, Limit]] = {
    "log": ("log", Limit(NUMBER, MINUTE_MS)),
    "counter": ("counter", Limit(NUMBER, MINUTE_MS)),
    "gcra, burst 10": ("gcra", Limit(NUMBER, MINUTE_MS, 10)),
    "gcra, burst 100": ("gcra", Limit(NUMBER, MINUTE_MS, NUMBER)),
}
HOURS = 12


def uniform(load: float, rng: random.Random) -> Iterator[int]:
    """Requests at random, `load` times as many as fit."""
    at_ms = 0.0
    while True:
        at_ms += rng.expovariate(load * NUMBER / MINUTE_MS)
        yield int(at_ms)


def bursty(load: float, rng: random.Random) -> Iterator[int]:
    """All requests of about two minutes within ten seconds."""
    at_ms = 0.0
    while True:
        for _ in range(int(2 * load * NUMBER)):
            at_ms += rng.expovariate(2 * load * NUMBER / 10_000)
            yield int(at_ms)
        at_ms += rng.uniform(80_000, 140_000)


def hammering(_load: float, rng: random.Random) -> Iterator[int]:
    """Every 100 ms, six times the limit."""
    at_ms = rng.randrange(MINUTE_MS)
    while True:
        at_ms += 100
        yield at_ms


def adversarial(_load: float, rng: random.Random) -> Iterator[int]:
    """Who knows the algorithm: a full limit in a window's last ms, whatever is free in the next one, then a pause."""
    window = 1
    while True:
        edge_ms = window * MINUTE_MS
        yield from [edge_ms - 1] * (2 * NUMBER)
        yield from range(edge_ms, edge_ms + MINUTE_MS - 1, 100)
        window += 4


TRAFFIC: dict[str, tuple[Callable[[float, random.Random], Iterator[int]], float]] = {
    "uniform, half of the limit": (uniform, 0.5),
    "uniform, nine tenths": (uniform, 0.9),
    "uniform, twice the limit": (uniform, 2.0),
    "bursts, half of the limit": (bursty, 0.5),
    "bursts, twice the limit": (bursty, 2.0),
    "hammering": (hammering, 1.0),
    "adversarial": (adversarial, 1.0),
}


def measure_error(report: Report, hours: float) -> None:
    """For each traffic and algorithm: how much it admitted beside the exact log, how much of that was more than fits
    into a window, and the most that it admitted within any window."""
    print(f"\nInbound limits: error against the exact log, over {hours:g} h")
    print("admitted: beside what the log admits of the same traffic; above: the part that")
    print(f"was too much for its window; most: within any window, of {NUMBER} in a minute")
    print(f"{'':<28}{'':<17}{'admitted':>10}{'above':>10}{'most':>8}")
    for traffic, (arrivals, load) in TRAFFIC.items():
        report.begin(f"inbound, error: {traffic}")
        exact = 0
        for number, (name, (algorithm, limit)) in enumerate(LIMITS.items()):
            admitted, above, most = error(algorithm, limit, arrivals(load, random.Random(7)), hours)
            exact = exact or admitted
            print(
                f"{'' if number else traffic:<28}{name:<17}{100 * admitted / exact:>9.1f}%"
                f"{100 * above / admitted:>9.1f}%{most:>8}"
            )


def error(algorithm: Algorithm, limit: Limit, arrivals: Iterator[int], hours: float) -> tuple[int, int, int]:
    """How many were admitted, how many of these although as many as fit had been within the window, and the most that
    were admitted within any window."""
    policy = Policy("error", (limit,), algorithm)
    held: dict[int, object] = {}
    admitted_ms: list[int] = []
    above = most = 0
    for at_ms in arrivals:
        if at_ms > hours * 3_600_000:
            break
        window = at_ms // limit.window_ms
        decision, after = decide(policy, [States(held.get(window - 1), held.get(window))], at_ms, 1)
        if decision.admitted:
            held = {window - 1: after[0].previous, window: after[0].current}
            in_window = len(admitted_ms) - bisect_right(admitted_ms, at_ms - limit.window_ms) + 1
            admitted_ms.append(at_ms)
            most = max(most, in_window)
            above += in_window > limit.number
    return len(admitted_ms), above, most


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.inbound", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small part of the work: the order of magnitude")
    options = parser.parse_args()
    with measuring() as (report, server, folder):
        measure_time(report, server, folder, *((2, 5) if options.quick else (200, 20)))
        measure_memory(report, server, 500 if options.quick else MILLION)
        measure_error(report, 0.1 if options.quick else HOURS)


if __name__ == "__main__":
    main()
