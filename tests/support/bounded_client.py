"""A program: one of the clients asks for each target on its stdin, with little memory to spare. A line of JSON for each
says how that ended and how much memory it took."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import requests

import quota
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter
from quota.reconcile.monitoring import read_figures
from quota.reports.notify import _send

SPARE_BYTES = 200_000_000
Ask = Callable[[str], object]


def memory_bytes(what: str) -> int:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{what}:")]
    return int(line.split()[1]) * 1024


def client(kind: str, session: quota.Session, address: str) -> Ask:
    """What asks `address` for a target. The body of an answer that is no error is read, as far as the client goes."""
    budget, hosts = session.budget(), [address.removeprefix("http://")]
    if kind == "google":
        youtube = session.google(max_body_mb=1, max_answer_s=2, max_items=100, timeout_s=2)

        def with_google(target: str) -> object:
            return youtube.videos().list(part="snippet", id=target).execute()

        return with_google
    if kind == "monitoring":
        credential = session.credential()
        assert credential.book.monitoring is not None

        def with_monitoring(target: str) -> object:
            Path("target").write_text(target)
            return read_figures(credential, credential.book.monitoring, 1, int(time.time() * 1000))  # type: ignore[arg-type]

        return with_monitoring
    if kind == "notify":
        return lambda target: _send(f"{address}/{target}", b"{}", 2)
    if kind == "requests":
        plain = requests.Session()
        plain.trust_env = False
        plain.mount("http://", requests_adapter(budget, "videos.list", hosts=hosts))

        def with_requests(target: str) -> object:
            with plain.get(f"{address}/{target}", timeout=2, stream=True, allow_redirects=False) as response:
                return response.status_code

        return with_requests
    if kind == "httpx":
        blocking = httpx.Client(transport=httpx_transport(budget, "videos.list", hosts=hosts), timeout=2)

        def with_httpx(target: str) -> object:
            with blocking.stream("GET", f"{address}/{target}") as response:
                return response.status_code

        return with_httpx
    runner = asyncio.Runner()
    if kind == "async httpx":
        waiting = httpx.AsyncClient(transport=httpx_async_transport(budget, "videos.list", hosts=hosts), timeout=2)

        async def with_async_httpx(target: str) -> object:
            async with waiting.stream("GET", f"{address}/{target}") as response:
                return response.status_code

        return lambda target: runner.run(with_async_httpx(target))

    async def with_aiohttp(target: str) -> object:
        middleware = aiohttp_middleware(budget, "videos.list", hosts=hosts)
        patience = aiohttp.ClientTimeout(sock_read=2, total=3)
        async with (
            aiohttp.ClientSession(middlewares=[middleware], timeout=patience) as several,
            several.get(f"{address}/{target}", allow_redirects=False) as response,
        ):
            return response.status

    return lambda target: runner.run(with_aiohttp(target))


def main(kind: str, address: str) -> None:
    with quota.open("quota.toml") as session:
        ask = client(kind, session, address)
        for line in sys.stdin:
            if line == "spare\n":  # what was imported and opened by the first request is none of the others' matter
                most = memory_bytes("VmSize") + SPARE_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                continue
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
            before, began_s = memory_bytes("VmRSS"), time.monotonic()
            ended: Any
            try:
                answer = ask(line.strip())
                ended = {"answered": answer if isinstance(answer, int) else "object"}
            except Exception as error:
                ended = {"raised": type(error).__name__, "said": str(error)[:3_000]}
            took = {"memory": memory_bytes("VmHWM") - before, "seconds": time.monotonic() - began_s}
            closed = [one.bucket for one in session.project("main").state.facts().exhaustions if not one.reopened_ms]
            for bucket in closed:
                session.project("main").state.reopen(bucket, "a test")
            took["closed"] = len(closed)
            print(json.dumps({**ended, **took}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
