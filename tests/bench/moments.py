"""What is paid once, or seldom: the first decision of a process, of a limit, of a machine; long logs; far servers."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from functools import partial
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING
from unittest.mock import patch

import redis

from bench.budgets import (
    CHEAP,
    DEAR,
    DEAR_UNITS,
    LABELS,
    PLENTY,
    SteppingClock,
    budget,
    fill,
    refusing_when_full,
    spread_over_a_day,
    three,
    two,
)
from bench.plan import measure as measure_plan
from bench.race import uncollected
from bench.report import Bar, Report
from quota.errors import LedgerError
from quota.jobs.store.store import Store
from quota.ledger.contract import MIN_RETENTION_MS
from quota.ledger.factory import open_ledger
from quota.limits import DAY_MS, HOUR_MS, Limit, Selector, Sliding, View
from quota.session import Session
from quota.settings.load import load_settings
from quota.spending import read_spending
from quota.status import read_status
from support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from quota.budget import Budget
    from support.servers import RedisServer

FAR_S = 0.002
"""A server in another house."""

NARROW = """
[[credentials.main.limits]]
name = "search"
methods = ["search.list"]
units = 4_000
window = "24h"
"""


def measure(report: Report, server: RedisServer, folder: Path, full: int, share: int, repeats: int) -> None:
    """All of it. `full` charges fill a window; other logs and plans are `share` times smaller than their bars are
    for."""
    bars: list[Bar] = []
    for what, work in (
        ("first refusals", lambda: _first_refusals(server, full, repeats)),
        ("a charge in production", lambda: _in_production(server, full)),
        ("a far server", lambda: _far(server, full)),
        ("a fresh state folder", lambda: _fresh(server, folder, (full, 100_000 // share))),
        ("an idle limit", lambda: _idle(server, folder, 100_000 // share)),
        ("a new limit and a long log", lambda: _long_log(server, 1_000_000 // share)),
        ("half a log must leave", lambda: _half(server, 500_000 // share)),
        ("plans", lambda: _plans((100 // share or 1, 1_000 // share or 1))),
        ("a search", lambda: _search(folder, 645_000 // share)),
    ):
        report.progress.begin(what)
        bars += work()
    report.figures("moments", "Seldom, but felt", bars)
    report.bars += [bar for bar in bars if bar.most is not None]


def _timed(call: Callable[[], object]) -> float:
    """Its ms."""
    started_ns = perf_counter_ns()
    call()
    return (perf_counter_ns() - started_ns) / 1e6


def _first_refusals(server: RedisServer, full: int, repeats: int) -> Iterator[Bar]:
    """Of a ledger that is connected and was asked of another project; no garbage is collected, as in a race."""
    with redis.Redis(port=server.port) as client, uncollected():
        sha = client.script_load("return 1")
        for units, most in ((1, 2.5), (DEAR_UNITS, 4.0), (min(1_600, full), 10.0)):
            filling = open_ledger(server.url)
            refusing_when_full(filling, f"first-{units}", 3, full, units)
            filling.close()
            ratios = []
            for _ in range(repeats):
                ledger = open_ledger(server.url)
                budget(ledger, "first-other", three()).charge(DEAR, **LABELS)
                spent = budget(ledger, f"first-{units}", three(full))
                floor_ms = median(_timed(lambda: client.execute_command("EVALSHA", sha, 0)) for _ in range(9))
                ratios.append(_timed(partial(_refused, spent, units)) / floor_ms)
                ledger.close()
            yield Bar(f"Redis, first refusal of a process, {units:,}", median(ratios), most)


def _refused(spent: Budget, units: int) -> None:
    decision = spent.charge(DEAR, units=units, **LABELS)
    assert not decision.admitted, decision


def _in_production(server: RedisServer, full: int) -> Iterator[Bar]:
    """One charge leaves, one comes, and once a minute the oldest of the log are trimmed: what the server works for
    it."""
    clock = SteppingClock()
    ledger = open_ledger(server.url, clock=clock)
    charge = spread_over_a_day(ledger, clock, "production", full, 1, two())
    first_ms = clock.ms - DAY_MS
    while clock.ms < first_ms + MIN_RETENTION_MS + HOUR_MS:
        charge()
    with redis.Redis(port=server.port) as client:
        client.config_resetstat()
        for _ in range(500):
            charge()
        used = client.info("commandstats")["cmdstat_evalsha"]
    ledger.close()
    yield Bar("Redis, server time of a charge, 2 limits", used["usec"] / 500, 50, "us")


def _far(server: RedisServer, full: int) -> Iterator[Bar]:
    """Trips, counted on the way to a server that is 2 ms away."""
    with Proxy(server.port) as proxy:
        proxy.fail("delay-request", times=10_000, match=b"", delay_s=FAR_S)
        filling, ledger = open_ledger(server.url), open_ledger(proxy.url)
        refusing_when_full(filling, "far", 3, full, DEAR_UNITS)
        filling.close()
        spent = budget(ledger, "far-admitted", three())
        spent.charge(DEAR, **LABELS)
        for name, call, most in (
            ("admitted", lambda: spent.charge(DEAR, **LABELS), 1),
            ("the first refusal", lambda: _refused(budget(ledger, "far", three(full)), DEAR_UNITS), 2),
            ("refused again", lambda: _refused(budget(ledger, "far", three(full)), DEAR_UNITS), 1),
        ):
            before = proxy.trips
            call()
            yield Bar(f"Redis 2 ms away, {name}", proxy.trips - before, most, "trips")
        ledger.close()


@contextmanager
def _session(server: RedisServer, folder: Path, project: str, more: str = "") -> Iterator[Session]:
    """As a user opens it, with the default limits and a state folder of its own."""
    folder.mkdir()
    path = folder / "quota.toml"
    limits = "".join(
        f'[[credentials.main.limits]]\nname = "{name}"\nunits = 1_000_000_000\nwindow = {window}\n'
        for name, window in (("day", '"24h"'), ("pacific", '{ calendar = "day", zone = "America/Los_Angeles" }'))
    )
    ledger = f'[ledger]\nurl = "{server.url}"\n'
    path.write_text(f'{ledger}[credentials.main]\napi = "youtube-v3"\nproject = "{project}"\n{limits}{more}')
    with patch.dict(os.environ, {"QUOTA_STATE_DIR": str(folder / "state")}):
        session = Session(load_settings(path))
        session.ledger.now_ms()
        yield session
        session.close()


def _fresh(server: RedisServer, folder: Path, sizes: tuple[int, int]) -> Iterator[Bar]:
    """The first decision of a machine that has seen nothing of this log."""
    for charges, most in zip(sizes, (10, 50), strict=True):
        project = f"fresh-{charges}"
        with _session(server, folder / f"{project}-before", project) as session:
            fill(session.ledger, project, charges)
            while session.budget().charge(CHEAP).reason == "counting":  # until the totals are known
                pass
        with _session(server, folder / project, project) as session:
            took_ms = _timed(lambda session=session: session.budget().charge(CHEAP))
        yield Bar(f"Redis, fresh state folder, {charges:,} charges", took_ms, most, "ms")


def _idle(server: RedisServer, folder: Path, charges: int) -> Iterator[Bar]:
    """What a limit that nobody uses adds to the status."""
    with _session(server, folder / "used", "idle") as session:
        fill(session.ledger, "idle", charges)
        session.budget().charge(CHEAP)
        read_status(session)
        without_ms = median(_timed(lambda: read_status(session)) for _ in range(5))
    with _session(server, folder / "idle", "idle", NARROW) as session:
        for said, method in (("an idle limit", CHEAP), ("that counts one new call", "search.list")):
            while session.budget().charge(method).reason == "counting":
                pass
            read_status(session)
            with_ms = median(_timed(lambda: read_status(session)) for _ in range(5))
            yield Bar(f"status, {said}, {charges:,} charges", max(0.001, with_ms - without_ms), 5, "ms")


def _long_log(server: RedisServer, charges: int) -> Iterator[Bar]:
    """A limit that is new, and who spent it all."""
    clock = SteppingClock()
    ledger = open_ledger(server.url, clock=clock)
    an_hour = charges // 20
    for hour in range(20):
        fill(ledger, "long", an_hour, after=hour * an_hour)
        clock.ms += HOUR_MS
    selector = Selector(buckets=("units",), methods=(CHEAP,))
    spent = budget(ledger, "long", [Limit("new", PLENTY, View(selector, Sliding(DAY_MS)), PLENTY, 0)], clock=clock)
    answers: list[str] = []

    def decide() -> None:
        while not answers or answers[-1] == "counting":
            clock.ms += 1_000
            answers.append(spent.charge(CHEAP, **LABELS).reason)

    with redis.Redis(port=server.port) as client:
        client.config_set("slowlog-log-slower-than", 0)
        client.config_set("slowlog-max-len", 100_000)
        client.slowlog_reset()
        all_ms = _timed(decide)
        longest_us = max(one["duration"] for one in client.slowlog_get(100_000))
        client.config_set("slowlog-log-slower-than", 10_000)
    yield Bar(f"Redis, new limit, {charges:,}: longest command", longest_us / 1000, 20, "ms")
    said = f"{len(answers):,} decision{'s'[: len(answers) > 1]}, first: {answers[0]}"
    yield Bar(f"  all of it: {said}", all_ms / 1000, None, "s")
    more = True
    while more:
        with suppress(LedgerError):  # a busy machine did not answer in time
            more = ledger.roll_up("long", clock.ms)
    for name, by, most_s in (("hourly history", "method", 1), ("log", "run", 3)):
        took_ms = _timed(lambda by=by: read_spending(ledger, "long", by, clock.ms - DAY_MS))
        yield Bar(f"spend, {charges:,} charges, from the {name}", took_ms / 1000, most_s, "s")
    ledger.close()


def _half(server: RedisServer, charges: int) -> Iterator[Bar]:
    ledger = open_ledger(server.url)
    fill(ledger, "half", charges)
    spent = budget(ledger, "half", three(charges)[:1])
    spent.peek(CHEAP, **LABELS)
    took_ms = _timed(lambda: spent.charge(CHEAP, units=charges // 2, **LABELS))
    ledger.close()
    yield Bar(f"Redis, refused, half of {charges:,} must leave", took_ms, 50, "ms")


def _plans(sizes: tuple[int, int]) -> Iterator[Bar]:
    for jobs, most_s in zip(sizes, (2, 10), strict=True):
        row = measure_plan("fits", jobs, 500 * jobs, find_changes=True)
        yield Bar(f"plan of 7 days, {jobs:,} jobs that fit", row.seconds, most_s, "s")


def _search(folder: Path, videos: int) -> Iterator[Bar]:
    """A word that every video has."""
    with Store(f"sqlite:///{folder}/videos.db", retention_ms=DAY_MS) as store:
        store.search("video")
        with closing(sqlite3.connect(store.path)) as db, db:
            db.executemany(
                "INSERT INTO videos (video_id, title, view_count, first_seen_ms, refreshed_ms) VALUES (?, ?, ?, 1, 1)",
                (
                    (f"v{n}", f"video {n} of {n % 997} words{' more' * (n % 5)}", n * 7919 % 10_007)
                    for n in range(videos)
                ),
            )
        took_ms = median(_timed(lambda: store.search("video")) for _ in range(5))
    yield Bar(f"search, a word in all of {videos:,} videos", took_ms / 1000, 0.3, "s")
