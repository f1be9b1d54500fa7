"""Every topology with every server at hand, and a table of what was measured: `python -m topologies` in `tests`.

    contract    every contract test with a ledger, over each (QUOTA_TEST_MARKED=1: only those of `make test`)
    cost        a decision beside one on a plain server
    failover    a primary dies under load: see failover.py
    reshard     a slot moves under load
    partition   the primary is cut off with one machine, in network namespaces (root)

Names of parts, and of topologies as `cluster@redis`, as arguments run these alone. The table is written to
build/topologies.md; the status is 1 if anything was not as it has to be. Other load on the machine is in these figures,
and may break the bounds on time.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from quota.budget import Budget
from quota.ledger.factory import open_ledger
from support.servers import RedisServer, executables, version
from support.setup import budget_of, limit
from support.topologies import PLACES, Topology, missing
from topologies import failover, partition
from topologies.charging import Outcome
from topologies.network import why_not

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("contract", "cost", "failover", "reshard", "partition")
COLUMNS = ("topology", "server", "contract passed", "cost", "back after", "lost", "put back", "overspent")
ALL = ("plain@redis", *PLACES)
CALLS, FIRST = 600, 50
"""Decisions whose cost is measured, and those that do not count."""


class Table:
    """One row a topology and server; what was not measured stays empty."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[str, str]] = {}
        self.wrong: list[str] = []

    def fill(self, name: str, server: str, **cells: str) -> None:
        row = self._rows.setdefault((name, server), {})
        row.update({column.replace("_", " "): text for column, text in cells.items()})

    def attempt(self, what: str, part: Callable[[], None]) -> None:
        """A part that breaks is a finding, and the others go on."""
        print(f"{what} ...", flush=True)
        try:
            part()
        except Exception:
            self.wrong.append(f"{what}: {traceback.format_exc()}")

    def take(self, what: str, name: str, server: str, outcome: Outcome, overspent: str = "") -> None:
        self.wrong += [f"{what}: {wrong}" for wrong in outcome.wrong]
        back_after = {"back_after": f"{outcome.back_s:.1f} s"} if outcome.back_s else {}
        cells = {"lost": f"{outcome.lost}", "put_back": f"{outcome.put_back}"}
        self.fill(name, server, **back_after, **cells, overspent=overspent or f"{outcome.overspent}")

    def lines(self) -> list[str]:
        """Without the columns that nothing was found for."""
        shown = [column for column in COLUMNS[2:] if any(column in row for row in self._rows.values())]
        rows = [
            (name, version(executables()[server]), *(row.get(column, "") for column in shown))
            for (name, server), row in self._rows.items()
        ]
        return [f"| {' | '.join(cells)} |" for cells in ((*COLUMNS[:2], *shown), ["---"] * (2 + len(shown)), *rows)]


def run(parts: set[str], places: set[str]) -> Table:
    table = Table()
    for place in ALL:
        if place not in places:
            continue
        if reason := missing(place):
            print(f"left out: {place}: {reason}")
            continue
        if "contract" in parts:
            table.attempt(f"contract {place}", partial(_contract, table, place))
        if "cost" in parts:
            table.attempt(f"cost {place}", partial(_cost, table, place))
        name, _, server = place.partition("@")
        if "failover" in parts and name.endswith(("sentinel", "cluster")):
            table.attempt(f"failover {place}", partial(_failover, table, place))
        if "reshard" in parts and name == "cluster":
            table.attempt(f"reshard {place}", partial(_reshard, table, server))
    if "partition" in parts and (reason := why_not()):
        print(f"left out: partition: {reason}")
    elif "partition" in parts:
        for replicas in (0, 1):
            table.attempt(f"partition {replicas}", partial(_partition, table, replicas))
    return table


def _contract(table: Table, place: str) -> None:
    """Every test of `tests/contract` that has a ledger, with the ledger there."""
    environment = {"QUOTA_TEST_TOPOLOGY": place, "QUOTA_TEST_REDIS": executables()[place.partition("@")[2]]}
    command = [sys.executable, "-m", "pytest", "-n", "auto", "-q", "tests/contract"]
    if os.environ.get("QUOTA_TEST_MARKED") == "1":
        command += ["-m", "topology"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    counts = re.findall(r"(\d+) (passed|failed|errors?)\b", done.stdout[-2_000:])
    passed = sum(int(number) for number, word in counts if word == "passed")
    wrong = sum(int(number) for number, word in counts if word != "passed")
    table.fill(*place.split("@"), contract_passed=f"{passed:,} of {passed + wrong:,}")
    if wrong or not passed:
        table.wrong.append(f"contract {place}: {done.stdout[-3_000:]}")


def _cost(table: Table, place: str) -> None:
    """The median of a decision there and on a plain server of the same build: the two take turns, call by call."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        there = stack.enter_context(Topology(place, folder / "servers"))
        plain = stack.enter_context(RedisServer(executable=there.executable))
        ledgers = [open_ledger(url) for url in (there.url, plain.url)]
        budgets = [budget_of(ledger, limit(10**9), folder=folder / str(n)) for n, ledger in enumerate(ledgers)]
        took_ms: tuple[list[float], ...] = ([], [])
        for _ in range(CALLS):
            for budget, times_ms in zip(budgets, took_ms, strict=True):
                times_ms.append(_charge_ms(budget))
        for ledger in ledgers:
            ledger.close()
        here_ms, plain_ms = (statistics.median(times_ms[FIRST:]) for times_ms in took_ms)
    table.fill(*place.split("@"), cost=f"{here_ms / plain_ms:.2f} x ({here_ms:.2f} ms)")


def _charge_ms(budget: Budget) -> float:
    began_s = time.perf_counter()
    assert budget.charge("videos.list", units=1).admitted
    return (time.perf_counter() - began_s) * 1_000


def _failover(table: Table, place: str) -> None:
    name, _, server = place.partition("@")
    outcome = failover.run(name, server)
    overspent = f"{outcome.overspent}; {outcome.cold_overspent} if a machine that saw nothing asks first"
    table.take(f"failover {place}", name, server, outcome, overspent)


def _reshard(table: Table, server: str) -> None:
    outcome = failover.run_reshard(server)
    table.take(f"reshard {server}", "cluster, a slot moves", server, outcome)


def _partition(table: Table, replicas: int) -> None:
    outcome = partition.run("redis", min_replicas=replicas)
    name = f"sentinel, a parted network, `min-replicas-to-write {replicas}`"
    table.take(f"partition, min-replicas-to-write {replicas}", name, "redis", outcome)


def main() -> int:
    asked = set(sys.argv[1:])
    if unknown := asked - {*PARTS, *ALL}:
        print(f"neither a part nor a topology: {', '.join(sorted(unknown))}")
        return 2
    table = run(asked & set(PARTS) or set(PARTS), asked & set(ALL) or set(ALL))
    text = "\n".join(table.lines())
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "topologies.md").write_text(text + "\n")
    print(text)
    for each in table.wrong:
        print(f"WRONG: {each}")
    return 1 if table.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
