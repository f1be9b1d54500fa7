"""The Redis ledger: time of a decision beside a bare script call and other libraries, and the memory of a day."""

from __future__ import annotations

from typing import TYPE_CHECKING

import redis

from bench.budgets import (
    CHEAP,
    DEAR,
    DEAR_UNITS,
    LABELS,
    NOTHING,
    SteppingClock,
    budget,
    charging,
    day,
    guarded,
    one,
    refusing,
    refusing_when_full,
    spread_over_a_day,
    three,
    two,
)
from bench.peers import REDIS_PEERS, limits_when_full
from bench.race import Contestant, race
from bench.report import Bar, Report
from quota.ledger.factory import open_ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.before import Before
    from quota.decision import Decision
    from quota.ledger.contract import Ledger
    from quota.terms.limits import Limit
    from support.servers import RedisServer

DAY_UNITS = 9_500
LIMITS = "limits, moving window"
BESIDE_LIMITS = (
    ("1 limit, guarded", f"{LIMITS}, 1 unit", 1.2),
    ("1 limit, 100 units, guarded", f"{LIMITS}, 100 units", 0.75),
    ("1 limit, refused, guarded", f"{LIMITS}, refused", 1.4),
)
"""Each of our decisions, the same one of the library `limits`, and how much of its time ours may take."""

SQLITE = "SQLite, 1 limit, guarded"
SQLITE_MOST = 1.6
"""Beside the floor of Redis."""


def measure(
    report: Report,
    server: RedisServer,
    folder: Path,
    rounds: int,
    calls: int,
    before: Before | None,
    full: int = DAY_UNITS,
) -> None:
    """How long a decision takes; and took, `before`. `full`: so many charges fill the windows that refuse."""
    report.progress.begin("Redis, time of a decision")
    ledger, in_file = open_ledger(server.url), open_ledger(f"sqlite:///{folder / 'beside.db'}")
    client = redis.Redis.from_url(server.url)
    sha = client.script_load(NOTHING)
    earlier = before.contestants("Redis", lambda _: server.url) if before else []
    contestants = [
        Contestant("floor: EVALSHA return 1", lambda: client.evalsha(sha, 0)),
        *_ours(ledger, folder, earlier, full),
        Contestant(SQLITE, charging(guarded(in_file, "beside", one(), folder), CHEAP, 1)),
        *_peers(client, server),
    ]
    refused = limits_when_full(server.url, full)
    if refused is not None:
        contestants.append(Contestant(f"{LIMITS}, refused", refused))
    rows = race(contestants, rounds, calls, report.progress)
    report.race(
        "redis",
        "Redis: time of a decision",
        rows,
        "ratio to a bare `EVALSHA return 1` through redis.Redis, of the same round;\n"
        "the peers begin each round with an empty budget; `guarded`: it remembers\nlosses and has an allowance",
    )
    left_out = sorted({peer.module for peer in REDIS_PEERS if not peer.installed})
    if left_out:
        print(f"left out, not installed: {', '.join(left_out)}")
    ratio = {row.name: row.ratio for row in rows}
    report.bars += [
        Bar(f"Redis, {ours}, beside limits", ratio[f"quota, {ours}"] / ratio[theirs], most)
        for ours, theirs, most in BESIDE_LIMITS
        if theirs in ratio
    ]
    report.bars.append(Bar(f"{SQLITE}, beside Redis's floor", ratio[SQLITE], SQLITE_MOST))
    if before:
        before.hold(report, "Redis", ratio)
    for opened in (ledger, in_file, client):
        opened.close()


def measure_memory(report: Report, server: RedisServer, share: int) -> None:
    """What a day's charges take. `share`: only one in so many is made, to save time."""
    report.progress.begin("Redis, memory of a day")
    rows = []
    for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
        clock = SteppingClock()
        ledger = open_ledger(server.url, clock=clock)
        project = f"memory-{units}."
        spread_over_a_day(ledger, clock, project, charges, units)
        ledger.close()
        rows.append((f"quota, {charges:,} charges of {units}", _held(server, f"*{project}*"), charges))
    for peer in REDIS_PEERS:
        if peer.installed:
            for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
                report.progress.step(len(rows), 2 * len(REDIS_PEERS) + 2)
                key = f"held-{REDIS_PEERS.index(peer)}-{units}."
                with redis.Redis.from_url(server.url) as client:
                    hit = peer.make(client, server.url, key)
                    for _ in range(charges):
                        hit(units)
                rows.append((f"{peer.name}, {charges:,} x {units}", _held(server, f"*{key}*"), charges))
    report.sizes("redis-memory", "Redis: memory of a day, all keys together", rows)


def _ours(ledger: Ledger, folder: Path, earlier: Sequence[Contestant], full: int) -> list[Contestant]:
    def of(project: str, method: str, units: int, limits: Sequence[Limit]) -> Callable[[], Decision]:
        return charging(guarded(ledger, project, limits, folder), method, units)

    refusing_one = guarded(ledger, "full", [day(full)], folder)
    peeks = budget(ledger, "peek", three())
    return [
        Contestant("quota, 1 limit, guarded", of("guarded", CHEAP, 1, one())),
        Contestant("quota, 1 limit, 100 units, guarded", of("guarded-dear", DEAR, DEAR_UNITS, one())),
        Contestant("quota, 1 limit, refused, guarded", refusing_when_full(refusing_one, ledger, full, 1)),
        *earlier,
        Contestant("quota, 2 limits, guarded", of("guarded-2", DEAR, 1, two())),
        Contestant("quota, 3 limits, guarded", of("guarded-3", DEAR, 1, three())),
        Contestant("quota, 1 limit, 1 unit", charging(budget(ledger, "one", one()), CHEAP, 1)),
        Contestant("quota, refused, time after 100 entries", refusing(ledger, "refused-100", walked=100)),
        Contestant("quota, peek, 3 limits", lambda: peeks.peek(DEAR, **LABELS)),
    ]


def _peers(client: redis.Redis, server: RedisServer) -> list[Contestant]:
    contestants = []
    for number, peer in enumerate(REDIS_PEERS):
        if peer.installed:
            for units in (1, DEAR_UNITS):
                key = f"peer-{number}-{units}."
                hit = peer.make(client, server.url, key)
                name = f"{peer.name}, {units} unit{'s' if units > 1 else ''}"
                contestants.append(
                    Contestant(name, lambda hit=hit, units=units: hit(units), lambda key=key: _forget(client, key))
                )
    return contestants


def _forget(client: redis.Redis, key: str) -> None:
    """Begin the day anew: a peer that keeps one entry for each unit would soon hold more than any day has."""
    for kept in client.keys(f"*{key}*"):
        client.delete(kept)


def _held(server: RedisServer, pattern: str) -> int:
    """The bytes of all keys together."""
    with redis.Redis(port=server.port) as client:
        return sum(int(client.memory_usage(key, samples=0)) for key in client.keys(pattern))
