"""20 processes on one Redis, each as fast as it can: how many decisions, how long they took, what 10,000 a second need.

    python -m bench.crowd         (in the folder `tests`; --processes and --seconds for a quick look)

The number per second holds for this machine alone: it has the server and all processes. The CPU time of a decision
holds elsewhere, too: the server makes one decision after the other, on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import redis

from bench.budgets import charging
from bench.inbound import POLICIES, asking
from bench.kinds import CHEAP
from bench.race import time_calls
from bench.sessions import budget_at
from quota.inbound.rules import open_storage
from support.patience import be_patient
from support.servers import RedisServer
from support.web import begin, ready_processes

PROCESSES, SECONDS = 20, 5.0
WANTED = 10_000
"""Decisions a second that are asked about."""

KINDS = (*POLICIES, "charge")
"""A limit on visitors by each algorithm, and a charge to the budget of one project."""


def worker(kind: str, url: str, seconds: float) -> None:
    """Decide until the time is over, once stdin ends; print the ns of each decision, and CPU ns."""
    be_patient()  # on a busy machine a slow answer is a figure too
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"QUOTA_STATE_DIR": folder}):
        call: Callable[[], object]
        if kind == "charge":
            call = charging(budget_at(url, Path(folder), "crowd", limits=1), CHEAP, 1)
        else:
            call = asking(open_storage(url), POLICIES[kind])
        call()
        print("ready", flush=True)
        sys.stdin.read()
        taken_ns: list[int] = []
        began_ns, until_s = time.process_time_ns(), time.monotonic() + seconds
        while time.monotonic() < until_s:
            taken_ns += time_calls(call, 10)
        print(json.dumps({"taken_ns": taken_ns, "cpu_ns": time.process_time_ns() - began_ns}), flush=True)


def crowd(kind: str, url: str, processes: int, seconds: float) -> tuple[list[int], float, float]:
    """The ns of each decision, sorted; the CPU time in us that one took in the server, and in its process."""
    command = [sys.executable, "-m", "bench.crowd", "--worker", kind, url, "--seconds", str(seconds)]
    running = ready_processes(command, processes)
    with closing(redis.Redis.from_url(url)) as server:
        before_s = _cpu_s(server)
        begin(running)
        reports = [json.loads(each.communicate()[0]) for each in running]
        server_s = _cpu_s(server) - before_s
    taken_ns = sorted(ns for report in reports for ns in report["taken_ns"])
    own_ns = sum(report["cpu_ns"] for report in reports)
    return taken_ns, server_s * 1e6 / len(taken_ns), own_ns / 1000 / len(taken_ns)


def _cpu_s(server: redis.Redis) -> float:
    used: Any = server.info("cpu")
    return float(used["used_cpu_sys"] + used["used_cpu_user"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crowd")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.seconds)
        return
    print(f"{options.processes} processes on one Redis, {options.seconds:g} s each\n")
    print(f"{'':<10} {'a second':>9} {'p50 ms':>8} {'p99 ms':>8} {'CPU us: server':>15} {'process':>8}")
    need = []
    server = RedisServer()
    try:
        for kind in KINDS:
            taken_ns, server_us, own_us = crowd(kind, server.url, options.processes, options.seconds)
            p50, p99 = (taken_ns[int(len(taken_ns) * part)] / 1e6 for part in (0.5, 0.99))
            rate = len(taken_ns) / options.seconds
            print(f"{kind:<10} {rate:>9,.0f} {p50:>8.2f} {p99:>8.2f} {server_us:>15.1f} {own_us:>8.1f}", flush=True)
            need.append((kind, server_us, own_us))
    finally:
        server.close()
    print(f"\ncomputed: {WANTED:,} a second are so many cores, and a server gives at most")
    for kind, server_us, own_us in need:
        cores = f"{WANTED * server_us / 1e6:.2f} of a server, {WANTED * own_us / 1e6:.2f} of the processes"
        print(f"{kind:<10} {cores}; {1e6 / server_us:,.0f} a second")


if __name__ == "__main__":
    main()
