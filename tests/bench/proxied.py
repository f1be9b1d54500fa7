"""What a request through `quota proxy` costs beside one through a plain proxy on the same libraries, and beside one
that awaits a decision first: paired, in the same process, over real HTTP, the ledger in SQLite.

    python -m bench.proxied        (in the folder `tests`; on Linux)

One request at a time. The bar is on what a caller waits. The processor's time is that of the process, all its threads
together: a busy machine changes that less.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.middleware import Client, cpu_ns
from bench.race import Contestant, pinned, race
from bench.report import Bar, Report
from support.plain_http import Upstream, answer
from support.proxying import House
from support.web import served_by

TESTS = Path(__file__).resolve().parents[1]
ROUNDS, CALLS = 40, 20
BODY = b'{"hello":"world"}'


class Plain:
    """A proxy in twenty lines: it streams both ways, and knows neither budgets nor keys."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._http is None:
            self._http = aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        fields = [(name.decode(), value.decode()) for name, value in scope["headers"] if name != b"host"]
        url = self._root + scope["path"]
        async with self._http.request(scope["method"], url, headers=fields, allow_redirects=False) as got:
            await send({"type": "http.response.start", "status": got.status, "headers": got.raw_headers})
            async for piece in got.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class Deciding:
    """A plain proxy that awaits a decision before each request, and knows no more of the budget."""

    def __init__(self, plain: Plain, budget: Any) -> None:
        self._plain, self._budget = plain, budget

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._budget.charge("read")
        await self._plain(scope, receive, send)


def serve_all(config: str, root: str) -> None:
    import quota
    from quota.proxy.app import make_app
    from quota.web.serving import address_of, listen, names_of, protected, serve

    def all_of_them() -> Any:
        session = quota.open_async(config)
        ours = make_app(session, names_of("127.0.0.1"))
        plain = Plain(root)
        others = {
            name: protected(app, hosts=names_of("127.0.0.1"), policy=None)
            for name, app in (("plain", plain), ("deciding", Deciding(plain, session.budget())))
        }

        async def app(scope: Any, receive: Any, send: Any) -> None:
            chosen = ours if scope["type"] != "http" else others.get(scope["path"].split("/")[1], ours)
            await chosen(scope, receive, send)

        return app

    listener = listen("127.0.0.1", 0)
    serve(all_of_them, listener, ready=lambda: print(address_of(listener), flush=True), passes_on=True)


def measure(report: Report, folder: Path) -> None:
    with Upstream(answer=lambda _: [answer(BODY)]) as upstream:
        House(folder, upstream).write(limit=10**9)
        command = [sys.executable, "-m", "bench.proxied", str(folder / "quota.toml"), upstream.address]
        env = {**os.environ, "PYTHONPATH": str(TESTS), "QUOTA_STATE_DIR": str(folder / "state")}
        with pinned(), served_by(command, cwd=folder, env=env) as server:
            client = Client(server.port)
            paths = (
                ("a plain proxy", "/plain/things"),
                ("that awaits a decision", "/deciding/things"),
                ("quota proxy", "/main/things"),
            )
            waited = race(
                [Contestant(name, partial(client, path)) for name, path in paths], ROUNDS, CALLS, report.progress
            )
            spent = [
                Contestant(name, partial(client, path), time_calls=partial(cpu_ns, server.process.pid, client, path))
                for name, path in paths
            ]
            rows = race(spent, ROUNDS, CALLS, report.progress)
            client.close()
    report.progress.clear()
    report.race("What a caller waits for a request through a proxy, SQLite", waited)
    report.race("The processor time of such a request", rows)
    report.bars.append(Bar("a request through quota proxy", waited[-1].ratio, 1.4))


def main() -> None:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="quota-bench-") as folder:
        report.progress.begin("a request through a proxy")
        measure(report, Path(folder))
    report.show_bars()


if __name__ == "__main__":
    serve_all(*sys.argv[1:]) if sys.argv[1:] else main()
