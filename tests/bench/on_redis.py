"""The Redis ledger: time of a decision beside a bare script call and other libraries, and the memory of a day."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.budgets import (
    CHEAP,
    DEAR,
    DEAR_UNITS,
    LABELS,
    SteppingClock,
    budget,
    charging,
    guarded,
    one,
    refusing,
    refusing_when_full,
    spread_over_a_day,
    three,
    two,
)
from bench.peers import REDIS_PEERS
from bench.race import Contestant, race
from bench.report import Bar, Report
from quota.common.clock import host_clock
from quota.ledger.contract import NOTHING_EXPECTED, repeating
from quota.ledger.factory import open_ledger
from quota.ledger.redis_connection import Line
from quota.ledger.redis_ledger import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.before import Before
    from quota.decision import Decision
    from quota.ledger.contract import ChargeResult, Ledger
    from quota.limits import Limit
    from support.servers import RedisServer

NOTHING = "return 1"
DAY_UNITS = 9_500

BARS = {
    "1 limit, guarded": 1.15,
    "1 limit, 100 units, guarded": 1.15,
    "2 limits, guarded": 1.2,
    "3 limits, guarded": 1.25,
}
REFUSED = {1: 1.6, 2: 1.7, 3: 1.8}
"""By limits: each full of charges of 1, the call asked for before."""

IN_FILES = {"SQLite, 1 limit": 0.8, "SQLite, 3 limits": 1.0, "SQLite, refused, time after 100 entries": 1.2}
"""The other ledger, beside the same floor."""


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
    ledger = open_ledger(server.url)
    client = _client(server)
    earlier = before.contestants("Redis", lambda _: server.url) if before else []
    in_files = [open_ledger(f"sqlite:///{folder / name}.db") for name in ("beside-1", "beside-3", "beside-refused")]
    contestants = [
        *_floors(client, server, ledger),
        *_ours(ledger, folder, earlier),
        *_refused(ledger, full),
        *_in_files(in_files),
        *_peers(client, server),
    ]
    rows = race(contestants, rounds, calls, report.progress)
    report.race(
        "redis",
        "Redis: time of a decision",
        rows,
        "ratio to a bare `EVALSHA return 1` through the same client, of the same round;\n"
        "the peers begin each round with an empty budget; `guarded`: it remembers\nlosses and has an allowance",
    )
    left_out = sorted({peer.module for peer in REDIS_PEERS if not peer.installed})
    if left_out:
        print(f"left out, not installed: {', '.join(left_out)}")
    ratio = {row.name: row.ratio for row in rows}
    report.bars += [
        *(Bar(f"Redis, {name}", ratio[f"quota, {name}"], most) for name, most in BARS.items()),
        *(
            Bar(f"Redis, refused for {units:,}, {limits} limit{'s'[: limits > 1]}", ratio[_name(limits, units)], most)
            for limits, most in REFUSED.items()
            for units in _costs(full)
        ),
        *(Bar(name, ratio[name], most) for name, most in IN_FILES.items()),
        Bar("Redis, what guarding costs", ratio["quota, 1 limit, guarded"] / ratio["quota, 1 limit, 1 unit"], 1.05),
        Bar("Redis, 100 units beside 1", ratio["quota, 1 limit, 100 units"] / ratio["quota, 1 limit, 1 unit"], 1.1),
    ]
    if before:
        before.hold(report, "Redis", ratio)
    for opened in (ledger, *in_files):
        opened.close()
    client.close()


def measure_memory(report: Report, server: RedisServer, share: int) -> None:
    """What a day's charges take. `share`: only one in so many is made, to save time; then no bar is held."""
    report.progress.begin("Redis, memory of a day")
    ours, rows = [], []
    for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
        clock = SteppingClock()
        ledger = open_ledger(server.url, clock=clock)
        project = f"memory-{units}."
        spread_over_a_day(ledger, clock, project, charges, units)
        ledger.close()
        ours.append((f"quota, {charges:,} charges of {units}", _high_water_mark(server, f"*{project}*"), charges))
    rows += ours
    for peer in REDIS_PEERS:
        if peer.installed:
            for charges, units in ((DAY_UNITS // share, 1), (DAY_UNITS // DEAR_UNITS, DEAR_UNITS)):
                report.progress.step(len(rows), 2 * len(REDIS_PEERS) + 2)
                key = f"held-{REDIS_PEERS.index(peer)}-{units}."
                with _client(server) as client:
                    hit = peer.make(client, server.url, key)
                    for _ in range(charges):
                        hit(units)
                rows.append((f"{peer.name}, {charges:,} x {units}", _high_water_mark(server, f"*{key}*"), charges))
    report.sizes("redis-memory", "Redis: memory of a day, all keys together", rows)
    if share == 1:
        report.bars.append(Bar("Redis, memory of a charge", ours[0][1] / ours[0][2], 64, "B"))


def _client(server: RedisServer) -> redis.Redis:
    """A client with the options of the ledger's own."""
    return redis.Redis.from_url(
        server.url,
        decode_responses=True,
        encoding_errors="replace",
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )


def _floors(client: redis.Redis, server: RedisServer, ledger: Ledger) -> list[Contestant]:
    sha = client.script_load(NOTHING)
    first = charging(budget(ledger, "floor", one()), CHEAP, 1)
    first()
    with _recorded() as sent:
        first()
    arguments = [word.decode() for word in sent[-1][2:]]  # behind EVALSHA and the script's name
    plain = socket.create_connection(("127.0.0.1", server.port))
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ping() -> None:
        plain.sendall(b"*1\r\n$4\r\nPING\r\n")
        plain.recv(64)

    execute = client.execute_command
    return [
        Contestant("floor: EVALSHA return 1", lambda: execute("EVALSHA", sha, 0)),
        Contestant("same, with our keys and arguments", lambda: execute("EVALSHA", sha, *arguments)),
        Contestant("bare socket, PING", ping),
    ]


@contextmanager
def _recorded() -> Iterator[list[list[bytes]]]:
    """The commands that our connections send meanwhile, as they go over the wire."""
    sent: list[list[bytes]] = []
    send = Line.send

    def record(self: Line, words: bytes, within_s: float) -> None:
        reader = hiredis.Reader()
        reader.feed(words)
        sent.append(reader.gets())
        send(self, words, within_s)

    with patch.object(Line, "send", record):
        yield sent


def _ours(ledger: Ledger, folder: Path, earlier: Sequence[Contestant]) -> list[Contestant]:
    peeks = {1: budget(ledger, "peek-1", one()), 3: budget(ledger, "peek-3", three())}
    for full in peeks.values():
        for _ in range(5):
            full.charge(DEAR, **LABELS)
    return [
        Contestant("quota, 1 limit, 1 unit", charging(budget(ledger, "one", one()), CHEAP, 1)),
        Contestant("quota, 1 limit, guarded", charging(guarded(ledger, "guarded", one(), folder), CHEAP, 1)),
        Contestant("quota, 1 limit, 100 units, guarded", _guarded(ledger, folder, "guarded-dear", one(), DEAR_UNITS)),
        Contestant("quota, 2 limits, guarded", _guarded(ledger, folder, "guarded-2", two(), 1)),
        Contestant("quota, 3 limits, guarded", _guarded(ledger, folder, "guarded-3", three(), 1)),
        *earlier,
        Contestant("quota, 1 limit, 100 units", charging(budget(ledger, "one-dear", one()), DEAR, DEAR_UNITS)),
        Contestant("quota, 1 limit, 1 unit, the ledger alone", _deciding(ledger)),
        Contestant("quota, 3 limits, 1 unit", charging(budget(ledger, "three", three()), DEAR, 1)),
        Contestant("quota, 3 limits, 100 units", charging(budget(ledger, "three-dear", three()), DEAR, DEAR_UNITS)),
        Contestant("quota, refused, time after 1 entry", refusing(ledger, "refused-1", walked=1)),
        Contestant("quota, refused, time after 100 entries", refusing(ledger, "refused-100", walked=100)),
        Contestant("quota, peek, 1 limit", lambda: peeks[1].peek(DEAR, **LABELS)),
        Contestant("quota, peek, 3 limits", lambda: peeks[3].peek(DEAR, **LABELS)),
    ]


def _guarded(ledger: Ledger, folder: Path, project: str, limits: list[Limit], units: int) -> Callable[[], Decision]:
    return charging(guarded(ledger, project, limits, folder), DEAR, units)


def _refused(ledger: Ledger, full: int) -> list[Contestant]:
    return [
        Contestant(_name(limits, units), refusing_when_full(ledger, f"full-{limits}-{units}", limits, full, units))
        for limits in REFUSED
        for units in _costs(full)
    ]


def _costs(full: int) -> tuple[int, ...]:
    return (1, min(DEAR_UNITS, full))


def _name(limits: int, units: int) -> str:
    return f"quota, refused for {units:,}, {limits} limit{'s'[: limits > 1]}, full"


def _in_files(ledgers: Sequence[Ledger]) -> list[Contestant]:
    one_limit, three_limits, refusing_one = ledgers
    calls = (
        charging(budget(one_limit, "main", one()), CHEAP, 1),
        charging(budget(three_limits, "main", three()), DEAR, 1),
        refusing(refusing_one, "main", walked=100),
    )
    return [Contestant(name, call) for name, call in zip(IN_FILES, calls, strict=True)]


def _deciding(ledger: Ledger) -> Callable[[], ChargeResult]:
    """One charge put to the ledger itself: what the budget around it costs is the difference."""
    alone = budget(ledger, "alone", one())
    alone.charge(CHEAP, **LABELS)
    [prepared] = alone._prepared.values()
    decide = repeating(ledger, prepared.request, commit=True)
    return lambda: decide(host_clock(), "alone", NOTHING_EXPECTED)


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


def _high_water_mark(server: RedisServer, pattern: str) -> int:
    with redis.Redis(port=server.port) as client:
        return sum(int(client.memory_usage(key, samples=0)) for key in client.keys(pattern))
