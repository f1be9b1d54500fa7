"""A process that asks the model of `support.model`: at once as an event loop does, or one call after the other.

Each call has a bound and a real cost of its own. A tenth of the answers says nothing of its cost, a tenth is cut off,
and a twentieth costs more than was reserved.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import httpx

import quota
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_async_transport
from support.http_clients import BROKEN, Httpx, Requests

AT_ONCE = 10
"""How many calls of one event loop are under way."""


def asked(dice: random.Random) -> dict[str, Any]:
    """What one call asks for."""
    most = dice.randint(50, 1_500)
    kind = dice.random()
    how = dice.choice(("json", "gzip", "events", "no-done"))
    use = dice.randint(1, most)
    if kind < 0.1:
        how = dice.choice(("silent", "quiet"))
    elif kind < 0.2:
        how = dice.choice(("cut", "hang-up"))
    elif kind < 0.25:
        use = 2 * most + 100
    return {"max_tokens": most, "use": use, "how": how}


def blocking(config: Path, url: str, kind: type[Requests | Httpx], seed: int, calls: int) -> int:
    """One call after the other. Returns how many were refused."""
    dice, refused = random.Random(seed), 0
    with quota.open(config) as q, closing(kind(q.budget())) as client:
        for _ in range(calls):
            try:
                client.stream(url, json=asked(dice))
            except quota.Refused:
                refused += 1
            except BROKEN:
                pass
    return refused


def awaiting(config: Path, url: str, client: str, seed: int, calls: int) -> int:
    """AT_ONCE calls at once, with httpx or aiohttp."""
    return asyncio.run(_awaiting(config, url, client, seed, calls))


async def _awaiting(config: Path, url: str, client: str, seed: int, calls: int) -> int:
    dice = random.Random(seed)
    left = [asked(dice) for _ in range(calls)]
    refused = 0
    async with quota.open_async(config) as q:
        session: Any
        if client == "httpx":
            session = httpx.AsyncClient(transport=httpx_async_transport(q.budget()), trust_env=False, timeout=100)
        else:
            session = aiohttp.ClientSession(
                middlewares=[aiohttp_middleware(q.budget())], timeout=aiohttp.ClientTimeout(100)
            )

        async def ask() -> None:
            nonlocal refused
            while left:
                data = left.pop()
                try:
                    if client == "httpx":
                        await session.post(url, json=data)
                    else:
                        async with session.post(url, json=data) as response:
                            await response.read()
                except quota.Refused:
                    refused += 1
                except BROKEN:
                    pass

        async with session:
            await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    return refused
