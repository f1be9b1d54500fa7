"""What a decision costs on each topology beside a plain server of the same build: the two take turns, call by call."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from support.servers import RedisServer
from support.topologies import Topology
from topologies.charging import budget_of

if TYPE_CHECKING:
    from quota.budget import Budget

CALLS, FIRST = 600, 50


def run(place: str) -> tuple[float, float]:
    """The median of a decision there and on a plain server, in ms."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(Topology(place, folder / "servers"))
        plain = stack.enter_context(RedisServer(executable=there.executable))
        budgets = [budget_of(url, folder / str(n), "cost", 10**9) for n, url in enumerate((there.url, plain.url))]
        took_ms: tuple[list[float], ...] = ([], [])
        for _ in range(CALLS):
            for budget, times_ms in zip(budgets, took_ms, strict=True):
                times_ms.append(_charge_ms(budget))
        for budget in budgets:
            budget.ledger.close()
        here, beside = (statistics.median(times_ms[FIRST:]) for times_ms in took_ms)
        return here, beside


def _charge_ms(budget: Budget) -> float:
    began_s = time.perf_counter()
    assert budget.charge("videos.list", units=1).admitted
    return (time.perf_counter() - began_s) * 1_000
