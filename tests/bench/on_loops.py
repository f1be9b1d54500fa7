"""Decisions of many tasks on an event loop, beside bare script calls through redis-py's own client for event loops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import patch

import redis.asyncio

import quota
from bench.budgets import NOTHING
from bench.kinds import CHEAP, LABELS
from bench.race import Contestant, pinned, race
from bench.report import Bar, Report
from support.servers import RedisServer

TASKS = 64
BARE = 5
"""So many bare calls may take as long as a decision."""

CONFIGURATION = """
[ledger]
url = "{url}?socket_timeout=20"
[credentials.main]
api = "youtube-v3"
project = "bench-loops"
limits = [{{ name = "day", units = 1_000_000_000, window = "24h" }}]
"""
"""A busy machine is slow, and measured all the same."""


def measure(report: Report, server: RedisServer, folder: Path, rounds: int, decisions: int) -> None:
    report.begin(f"asyncio, time of {decisions:,} decisions")
    path = folder / "loops.toml"
    path.write_text(CONFIGURATION.format(url=server.url))
    client = redis.asyncio.Redis.from_url(server.url)
    state = patch.dict(os.environ, {"QUOTA_STATE_DIR": str(folder / "loops-state")})
    with state, asyncio.Runner() as runner, pinned(_others):
        session = quota.open_async(path)
        budget = session.budget()
        sha = runner.run(client.script_load(NOTHING))

        async def ask() -> None:
            await client.evalsha(sha, 0)

        async def decide() -> None:
            decision = await budget.charge(CHEAP, **LABELS)
            while decision.reason == "ledger-unavailable":  # a busy machine
                decision = await budget.charge(CHEAP, **LABELS)
            assert decision.admitted, decision

        def together(each: Callable[[], Coroutine[Any, Any, None]], calls: int) -> Callable[[], None]:
            async def work(calls: int) -> None:
                for _ in range(calls):
                    await each()

            async def gather() -> None:
                shares = (calls // TASKS + (task < calls % TASKS) for task in range(TASKS))
                await asyncio.gather(*map(work, shares))

            return lambda: runner.run(gather())

        bare, ours = f"{BARE * decisions:,} bare script calls", f"{decisions:,} decisions"
        contestants = [Contestant(bare, together(ask, BARE * decisions)), Contestant(ours, together(decide, decisions))]
        rows = race(contestants, rounds, 1)
        runner.run(session.aclose())
        runner.run(client.aclose())
    report.race(
        f"asyncio: {TASKS} tasks over Redis",
        rows,
        "ratio to bare `EVALSHA return 1` through redis.asyncio; the server has a CPU of\nits own, where there are two",
    )
    report.bars.append(Bar(f"asyncio, {ours} beside {BARE * decisions:,} calls", rows[1].ratio, 1))


def _others(shared: set[int]) -> set[int]:
    """Elsewhere this process and the server share a CPU. Here the one works while the other does."""
    return {*range(os.cpu_count() or 1)} - shared or shared
