"""What a rule adds to a trivial answer of FastAPI, over real HTTP: paired, in the same process, on SQLite.

    python -m bench.middleware        (in the folder `tests`; on Linux)

One worker and one client at a time: the storage is never busy, and what counts is the processor's time that the worker
took, because a busy machine changes that less than the time on the wall. Four workers and four clients at once: the
storage often is busy, and what counts is the time until all are answered.
"""

from __future__ import annotations

import socket
import sqlite3
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.race import Contestant, pinned, race
from bench.report import Bar, Report
from quota.inbound.sqlite_storage import PAGE_BYTES
from support.web import Served, begin, helped_by, ready_processes, served_by, shared_socket

THIS = [sys.executable, "-m", "bench.middleware"]
PATHS = ("/bare/", "/limited/")
INSERTING = "/inserting/"
ROUNDS, CALLS = 100, 20
CROWD_ROUNDS, CROWD_REQUESTS = 15, 200
CLIENTS = 4
BODY = b'{"hello":"world"}'


def make_app(folder: str) -> Any:
    """The same application with and without a rule, and with the least that a shared count in SQLite can cost."""
    from fastapi import FastAPI
    from starlette.routing import Mount, Router

    from quota.inbound import Limit, Rule, Rules, asgi

    def trivial() -> FastAPI:
        app = FastAPI()

        @app.get("/")
        def hello() -> dict[str, str]:
            return {"hello": "world"}

        return app

    rules = Rules([Rule("default", Limit(10**9, 60_000), fail="closed")], url=f"sqlite:///{folder}/inbound.db")
    return Router(
        [
            Mount("/bare", trivial()),
            Mount("/limited", asgi(trivial(), rules)),
            Mount("/inserting", Inserting(trivial(), f"{folder}/bare.db")),
        ]
    )


class Inserting:
    """An application that first counts each request in one row, and knows of no rules, windows or identities."""

    def __init__(self, app: Any, path: str) -> None:
        self._app = app
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
        for statement in (
            f"PRAGMA page_size = {PAGE_BYTES}",
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = NORMAL",
            "CREATE TABLE IF NOT EXISTS counts (name INTEGER PRIMARY KEY, count INTEGER NOT NULL)",
        ):
            self._db.execute(statement)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self._db.execute("INSERT INTO counts VALUES (1, 1) ON CONFLICT DO UPDATE SET count = count + 1")
        await self._app(scope, receive, send)


class Client:
    """A connection that reads answers no closer than it must: a client's own work is not what is measured."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self, path: str) -> bytes:
        self._socket.sendall(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode())
        got = b""
        while not got.endswith(BODY):
            got += self._socket.recv(65_536)
        return got

    def close(self) -> None:
        self._socket.close()


def served(folder: str, workers: int) -> Served:
    return served_by([*THIS, "serve", folder, str(workers)])


def alone(report: Report, folder: str) -> None:
    """One request after the other, with and without a rule, over one connection."""
    with pinned(), served(folder, 1) as server:
        client = Client(server.port)
        contestants = [
            Contestant(name, partial(client, path), time_calls=partial(cpu_ns, server.process.pid, client, path))
            for name, path in (
                ("FastAPI", PATHS[0]),
                ("FastAPI and a bare INSERT", INSERTING),
                ("FastAPI behind a rule", PATHS[1]),
            )
        ]
        rows = race(contestants, ROUNDS, CALLS, report.progress)
        client.close()
    report.progress.clear()
    report.race("The worker's processor time for a request over HTTP, SQLite", rows)
    report.bars.append(Bar("a rule on SQLite, one worker", rows[-1].ratio, 1.8))


def cpu_ns(pid: int, client: Client, path: str, calls: int) -> list[int]:
    """The processor's time that a process takes for so many requests, as if each took the same."""
    before_ns = spent_ns(pid)
    for _ in range(calls):
        client(path)
    return [(spent_ns(pid) - before_ns) // calls] * calls


def spent_ns(pid: int) -> int:
    """What all threads of a process have had of a processor."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def together(report: Report, folder: str) -> None:
    """The same from several processes at once, over several workers."""
    ratios = []
    with served(folder, 4) as server:
        crowd(server.port, PATHS[1])
        for number in range(CROWD_ROUNDS):
            report.progress.step(number, CROWD_ROUNDS)
            paths = PATHS if number % 2 else PATHS[::-1]
            took = {path: crowd(server.port, path) for path in paths}
            ratios.append(took[PATHS[1]] / took[PATHS[0]])
    report.progress.clear()
    print(f"\n{CLIENTS} clients at once, 4 workers, SQLite: {median(ratios):.2f} x as long with a rule")
    report.bars.append(Bar("a rule on SQLite, four workers", median(ratios), 1.30))


def crowd(port: int, path: str) -> float:
    """The seconds that CLIENTS processes take for CROWD_REQUESTS requests each, from their common start."""
    clients = ready_processes([*THIS, "ask", str(port), path], CLIENTS)
    started_s = time.perf_counter()
    begin(clients)
    statuses = [each.wait() for each in clients]
    took_s = time.perf_counter() - started_s
    for each in clients:
        each.communicate()
    assert statuses == [0] * CLIENTS
    return took_s


def ask(port: int, path: str) -> None:
    client = Client(port)
    client(path)
    print("ready", flush=True)
    sys.stdin.read()
    for _ in range(CROWD_REQUESTS):
        client(path)
    client.close()


def serve_them(folder: str, workers: int) -> None:
    from quota.web.serving import address_of, listen, serve

    listener = listen("127.0.0.1", 0)
    address = address_of(listener)
    _helpers = helped_by([*THIS, "worker", folder], listener, workers - 1)
    serve(lambda: make_app(folder), listener, ready=lambda: print(address, flush=True))


def serve_with_them(folder: str, number: str) -> None:
    from quota.web.serving import serve

    serve(lambda: make_app(folder), shared_socket(number), ready=lambda: print("ready", flush=True))


def main() -> None:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="quota-bench-") as folder:
        report.progress.begin("a rule, alone")
        alone(report, folder)
        report.progress.begin("a rule, four workers")
        together(report, folder)
    report.show_bars()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", folder, workers]:
            serve_them(folder, int(workers))
        case ["worker", folder, number]:
            serve_with_them(folder, number)
        case ["ask", port, path]:
            ask(int(port), path)
        case _:
            main()
