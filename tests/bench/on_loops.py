"""Decisions of many tasks on an event loop, beside the same bytes on the same connection without decisions."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from statistics import quantiles
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bench.budgets import CHEAP, LABELS, guarded, one
from bench.race import Contestant, race
from bench.report import Bar, Report
from quota.async_budget import AsyncBudget, Awaiter
from quota.common.clock import elapsed_s, host_clock
from quota.ledger.redis_async import AsyncConnections
from quota.ledger.redis_ledger import RedisLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from support.servers import RedisServer

DECISIONS = 2_048
"""So many are made in a call, whatever the number of tasks: each makes several, and beginning a task counts for
little."""

MOST = 1.25
"""Four fifths of the rate of the floor."""


def measure(report: Report, server: RedisServer, folder: Path, rounds: int) -> None:
    report.progress.begin(f"asyncio, time of {DECISIONS:,} decisions")
    ledger = RedisLedger(f"{server.url}?socket_timeout=20")  # a busy machine is slow, and measured all the same
    awaiter = Awaiter(ledger)
    budget = AsyncBudget(guarded(ledger, "loops", one(), folder), awaiter)
    lines = AsyncConnections(ledger.connections)
    times_ns: dict[int, list[int]] = {64: [], 512: []}

    async def ask(_: int) -> None:
        await lines.ask(asyncio.get_running_loop(), words, elapsed_s())

    async def decide(tasks: int) -> None:
        started_ns = perf_counter_ns()
        decision = await budget.charge(CHEAP, **LABELS)
        times_ns[tasks].append(perf_counter_ns() - started_ns)
        assert decision.admitted, decision

    with asyncio.Runner() as runner, _beside_the_server():
        runner.run(decide(64))
        words = _words(budget)

        def spread(one: Callable[[int], Coroutine[Any, Any, None]], tasks: int) -> Callable[[], None]:
            async def work() -> None:
                for _ in range(DECISIONS // tasks):
                    await one(tasks)

            async def gather() -> None:
                await asyncio.gather(*(work() for _ in range(tasks)))

            return lambda: runner.run(gather())

        rows = race(
            [
                Contestant("the same bytes, 64 tasks", spread(ask, 64)),
                Contestant("the same bytes, 512 tasks", spread(ask, 512)),
                Contestant("quota, 64 tasks, guarded", spread(decide, 64)),
                Contestant("quota, 512 tasks, guarded", spread(decide, 512)),
            ],
            rounds,
            1,
            report.progress,
        )
    awaiter.close()
    lines.close()
    ledger.close()
    report.race(
        "loops",
        f"asyncio: time of {DECISIONS:,} decisions on one connection to Redis",
        rows,
        "ratio to the same bytes without decisions; the server has a CPU of its own,\nwhere there are two",
    )
    report.figures(
        "loops-p99",
        "asyncio: the slowest of a hundred decisions",
        [Bar(f"{tasks} tasks", quantiles(times, n=100)[98] / 1e6, None, "ms") for tasks, times in times_ns.items()],
    )
    report.bars += [
        Bar("asyncio, 64 tasks beside the same bytes", rows[2].ratio, MOST),
        Bar("asyncio, 512 tasks beside 64", rows[3].ratio / rows[2].ratio, 1.1),
    ]


def _words(budget: AsyncBudget) -> bytes:
    """What a decision sends."""
    blocking: Any = budget._budget
    [prepared] = blocking._prepared.values()
    words: bytes = prepared.repeated().words((host_clock(), "again", blocking._high_water_mark.expected()))
    return words


@contextmanager
def _beside_the_server() -> Iterator[None]:
    """Elsewhere this process and the server share a CPU. Here the one works while the other does."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    shared = os.sched_getaffinity(0)
    others = {*range(os.cpu_count() or 1)} - shared
    os.sched_setaffinity(0, others or shared)
    try:
        yield
    finally:
        os.sched_setaffinity(0, shared)
