"""Both ledgers: time of a decision beside a bare call and other libraries, and how much a day takes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import redis

from bench.before import Before
from bench.budgets import NOTHING, budget, charging, day, spread_over_a_day
from bench.kinds import CHEAP, DEAR_UNITS
from bench.peers import LIMITS, REDIS_PEERS, limits_decisions
from bench.race import Contestant, race
from bench.report import Bar, Report
from bench.sessions import decisions
from quota.ledger.factory import open_ledger
from support.inbound import Clock
from support.proxy import Proxy
from support.servers import RedisServer

DAY_UNITS = 9_500
BESIDE_LIMITS = {
    "1 unit": ("1 unit", 1.15),
    "100 units": ("100 units", 0.7),
    "3 limits, 1 unit": ("1 unit", 1.3),
    "refused, 1 unit": ("refused, 1 unit", 1.1),
    "refused, 100 units": ("refused, 100 units", 1.25),
    "3 limits, refused, 100 units": ("refused, 100 units", 1.5),
}
"""Of each guarded decision: the one of the library `limits`, with its one limit, and how much of its time ours may take
on Redis."""

SQLITE_MOST = {"1 unit": 1.2, "3 limits, 1 unit": 1.35, "refused, 1 unit": 0.9, "refused, 100 units": 1.2}
"""Of the guarded decisions on SQLite, beside the floor of Redis."""


def measure_decisions(
    report: Report,
    server: RedisServer,
    folder: Path,
    rounds: int,
    calls: int,
    before: Before | None,
    full: int = DAY_UNITS,
) -> None:
    """How long a decision takes; and took, `before`. `full`: so many charges fill the windows that refuse."""
    report.begin("time of a decision")
    in_file = f"sqlite:///{folder / 'beside.db'}"
    client = redis.Redis.from_url(server.url)
    sha = client.script_load(NOTHING)
    theirs = limits_decisions(server.url, full)
    contestants = [
        Contestant("floor: EVALSHA return 1", lambda: client.evalsha(sha, 0)),
        *(Contestant(f"quota, {name}", call) for name, call in decisions(server.url, folder / "redis", full).items()),
        *(Contestant(f"SQLite, {name}", call) for name, call in decisions(in_file, folder / "sqlite", full).items()),
        *(before.contestants("Redis", lambda _: server.url, full) if before else ()),
        *(before.contestants("SQLite", lambda name: f"sqlite:///{folder / name}.db", full) if before else ()),
        *_peers(client, server, theirs),
    ]
    rows = race(contestants, rounds, calls)
    report.race(
        "Redis, and SQLite beside it: time of a decision",
        rows,
        "guarded: with a journal and an allowance; 1 limit, if not 3;\n"
        "ratio to a bare `EVALSHA return 1` through redis.Redis, of the same round;\n"
        "the peers begin each round with an empty budget, if they are not full",
    )
    ratio = {row.name: row.ratio for row in rows}
    if theirs:
        beside = {
            name: tuple(ratio[f"{ours}, {name}"] / ratio[f"{LIMITS}, {other}"] for ours in ("quota", "SQLite"))
            for name, (other, _) in BESIDE_LIMITS.items()
        }
        title = f"Beside the same decision of {LIMITS}, with one limit"
        report.ratios(title, ("Redis", "SQLite"), beside)
        report.bars += [Bar(f"{name}, beside limits", beside[name][0], BESIDE_LIMITS[name][1]) for name in beside]
    left_out = sorted({peer.module for peer in REDIS_PEERS if not peer.installed})
    if left_out:
        print(f"left out, not installed: {', '.join(left_out)}")
    report.bars += [
        Bar(f"SQLite, {name}, beside Redis's floor", ratio[f"SQLite, {name}"], most)
        for name, most in SQLITE_MOST.items()
    ]
    if before:
        for kind in ("Redis", "SQLite"):
            before.show(report, kind, ratio)
    client.close()
    report.bars.append(Bar("Redis, an admitted decision", _trips(server), 1, "trips"))


def measure_memory(report: Report, server: RedisServer, share: int) -> None:
    """What a day's charges take. `share`: only one in so many is made, to save time."""
    report.begin("Redis, memory of a day")
    rows = []
    for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
        clock = Clock()
        ledger = open_ledger(server.url, clock=clock)
        project = f"memory-{units}."
        spread_over_a_day(ledger, clock, project, charges, units)
        ledger.close()
        rows.append((f"quota, {charges:,} charges of {units}", _held(server, f"*{project}*"), charges))
    for peer in REDIS_PEERS:
        if peer.installed:
            for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
                key = f"held-{REDIS_PEERS.index(peer)}-{units}."
                with redis.Redis.from_url(server.url) as client:
                    hit = peer.make(client, server.url, key)
                    for _ in range(charges):
                        hit(units)
                rows.append((f"{peer.name}, {charges:,} x {units}", _held(server, f"*{key}*"), charges))
    report.sizes("Redis: memory of a day, all keys together", rows)


def _peers(
    client: redis.Redis, server: RedisServer, decided: Mapping[str, Callable[[], object]]
) -> Iterator[Contestant]:
    """The other libraries; of `limits` all that is `decided` here."""
    for name, call in decided.items():
        prepare = None if name.startswith("refused") else partial(_forget, client, "*beside-*")
        yield Contestant(f"{LIMITS}, {name}", call, prepare)
    for number, peer in enumerate(REDIS_PEERS):
        if peer.installed and peer.name != LIMITS:
            for units in (1, DEAR_UNITS):
                key = f"peer-{number}-{units}."
                hit = peer.make(client, server.url, key)
                name = f"{peer.name}, {units} unit{'s' if units > 1 else ''}"
                yield Contestant(name, partial(hit, units), partial(_forget, client, f"*{key}*"))


def _trips(server: RedisServer) -> int:
    """How often a decision that is admitted asks the server, counted on the way."""
    with Proxy(server.port) as proxy, closing(open_ledger(proxy.url)) as ledger:
        charge = charging(budget(ledger, "trips", [day()]), CHEAP, 1)
        charge()
        before = proxy.trips
        charge()
        return proxy.trips - before


def _forget(client: redis.Redis, pattern: str) -> None:
    """Begin the day anew: a peer that keeps one entry for each unit would soon hold more than any day has."""
    for kept in client.keys(pattern):
        client.delete(kept)


def _held(server: RedisServer, pattern: str) -> int:
    """The bytes of all keys together."""
    with redis.Redis(port=server.port) as client:
        return sum(int(client.memory_usage(key, samples=0)) for key in client.keys(pattern))


def measure_size(report: Report, folder: Path, share: int) -> None:
    """What a day's charges take on disk. `share`: only one in so many is made, to save time."""
    report.begin("SQLite, size of a day")
    rows = []
    for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
        path, clock = folder / f"size-{units}.db", Clock()
        ledger = open_ledger(f"sqlite:///{path}", clock=clock)
        budget(ledger, "main", [day()], clock=clock).peek(CHEAP)
        empty = _size(path)
        spread_over_a_day(ledger, clock, "main", charges, units)
        ledger.close()
        rows.append((f"quota, {charges:,} charges of {units}", _size(path) - empty, charges))
    report.sizes("SQLite: a day on disk, beyond an empty ledger", rows)


def _size(path: Path) -> int:
    """The file and its log, after what is in the log was moved into the file."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    files = [path, path.with_name(f"{path.name}-wal")]
    return sum(file.stat().st_size for file in files if file.exists())
