"""What is paid once, or seldom: a machine's first decision, a new limit, long logs, far servers. No bar holds it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING
from unittest.mock import patch

import redis

from bench.budgets import (
    PLENTY,
    budget,
    fill,
    fill_up,
    three,
)
from bench.kinds import CHEAP, DEAR, DEAR_UNITS, LABELS
from bench.plan import measure as measure_plan
from bench.report import Figure, Report
from bench.sessions import budget_at
from quota.deciding.project import Project
from quota.jobs.store.store import Store
from quota.ledger.factory import open_ledger
from quota.reports.spending import read_spending
from quota.terms.limits import DAY_MS, HOUR_MS, Limit, Selector, Sliding, View
from support.inbound import Clock
from support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from quota.budget import Budget
    from support.servers import RedisServer

FAR_S = 0.002
"""A server in another house."""


def measure(report: Report, server: RedisServer, folder: Path, full: int, share: int) -> None:
    """All of it. `full` charges fill a window; other logs and plans are `share` times smaller than they are for
    users."""
    figures: list[Figure] = []
    for what, work in (
        ("a far server", lambda: _far(server, full)),
        ("a fresh state folder", lambda: _fresh(server, folder, (full, 100_000 // share))),
        ("a new limit and a long log", lambda: _long_log(server, 1_000_000 // share)),
        ("plans", lambda: _plans((100 // share or 1, 1_000 // share or 1))),
        ("a search", lambda: _search(folder, 645_000 // share)),
    ):
        report.progress.begin(what)
        figures += work()
    report.figures("moments", "Seldom, but felt", figures)


def _timed(call: Callable[[], object]) -> float:
    """Its ms."""
    started_ns = perf_counter_ns()
    call()
    return (perf_counter_ns() - started_ns) / 1e6


def _refused(spent: Budget, units: int) -> None:
    decision = spent.charge(DEAR, units=units, **LABELS)
    assert not decision.admitted, decision


def _far(server: RedisServer, full: int) -> Iterator[Figure]:
    """Trips, counted on the way to a server that is 2 ms away."""
    with Proxy(server.port) as proxy:
        proxy.fail("delay-request", times=10_000, match=b"", delay_s=FAR_S)
        filling, ledger = open_ledger(server.url), open_ledger(proxy.url)
        fill_up(budget(filling, "far", three(full)), full)
        filling.close()
        spent = budget(ledger, "far-admitted", three())
        spent.charge(DEAR, **LABELS)
        full_up = budget(ledger, "far", three(full))
        for name, call in (
            ("admitted", lambda: spent.charge(DEAR, **LABELS)),
            ("the first refusal", lambda: _refused(full_up, DEAR_UNITS)),
            ("refused again", lambda: _refused(full_up, DEAR_UNITS)),
        ):
            before = proxy.trips
            call()
            yield Figure(f"Redis 2 ms away, {name}", proxy.trips - before, "trips")
        ledger.close()


def _fresh(server: RedisServer, folder: Path, sizes: tuple[int, int]) -> Iterator[Figure]:
    """The first decision of a machine that has seen nothing of this log."""
    for charges in sizes:
        project = f"fresh-{charges}"
        fresh = patch.dict(os.environ, {"QUOTA_STATE_DIR": str(folder / project)})
        before = budget_at(server.url, folder, project, limits=2)
        fill(before.ledger, project, charges)
        while before.charge(CHEAP).reason == "counting":  # until the totals are known
            pass
        with fresh:
            budget = budget_at(server.url, folder, project, limits=2)
            budget.ledger.now_ms()
            took_ms = _timed(lambda budget=budget: budget.charge(CHEAP))
        yield Figure(f"Redis, fresh state folder, {charges:,} charges", took_ms, "ms")


def _long_log(server: RedisServer, charges: int) -> Iterator[Figure]:
    """A limit that is new, and who spent it all."""
    clock = Clock()
    ledger = open_ledger(server.url, clock=clock)
    an_hour = charges // 20
    for hour in range(20):
        fill(ledger, "long", an_hour, after=hour * an_hour, clock=clock)
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
    yield Figure(f"Redis, new limit, {charges:,}: longest command", longest_us / 1000, "ms")
    said = f"{len(answers):,} decision{'s'[: len(answers) > 1]}, first: {answers[0]}"
    yield Figure(f"  all of it: {said}", all_ms / 1000, "s")
    spending = Project(ledger, "long", clock=clock)
    took_ms = _timed(lambda: read_spending([spending], "method", clock.ms - DAY_MS))
    yield Figure(f"spend, {charges:,} charges", took_ms / 1000, "s")
    ledger.close()


def _plans(sizes: tuple[int, int]) -> Iterator[Figure]:
    for jobs in sizes:
        row = measure_plan("fits", jobs, 500 * jobs, find_changes=True)
        yield Figure(f"plan of 7 days, {jobs:,} jobs that fit", row.seconds, "s")


def _search(folder: Path, videos: int) -> Iterator[Figure]:
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
    yield Figure(f"search, a word in all of {videos:,} videos", took_ms / 1000, "s")
