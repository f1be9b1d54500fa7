"""What a user's strict type checker sees of the package. `make lint` checks it; nothing here is run.

Each `type: ignore` is a mistake that must be found: where it is not, the checker says that the comment is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import httpx

import quota
from quota.clients.aiohttp import aiohttp_middleware
from quota.clients.httpx import httpx_async_transport, httpx_transport
from quota.clients.requests import requests_adapter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def blocking() -> None:
    with quota.open() as q:
        budget: quota.Budget = q.budget("main")
        decision: quota.Decision = budget.charge("search.list", job="nightly", region="DE")
        if not decision.admitted:
            print(decision.reason, decision.retry_at, decision.why())
            when = decision.when()
            print(when.at)  # type: ignore[union-attr]
            print(when and (when.at.isoformat(), when.seconds / 60))
        for each in budget.charge_many(["videos.list", ("search.list", 100)]):
            print(each.id, [limit.remaining_units for limit in each.limits])
        with budget.spend("videos.list") as decision:
            budget.settle(decision.id or "", 3)
        with budget.spend("search.list", units=200) as call:
            call.settle(100)
            call.settle("100")  # type: ignore[arg-type]

        @budget.spend("videos.list")
        def title(video: str) -> int:
            return len(video)

        @budget.spend("videos.list")
        def pages(of: str) -> Iterator[str]:
            yield of

        length: int = title("video")
        print(length, [page.upper() for page in pages("of")])
        title(3)  # type: ignore[arg-type]
        budget.charge(3)  # type: ignore[arg-type]
        budget.charge("videos.list", "job")  # type: ignore[arg-type, call-arg]
        number: int = budget.charge("videos.list")  # type: ignore[assignment]
        httpx_transport(budget, "videos.list", hosts=["api.example"]).close()
        print(q.requests().got)  # type: ignore[attr-defined]
        print(q.httpx(timeout=3).got)  # type: ignore[attr-defined]
        requests_adapter(budget, lambda verb, url: "videos.list", hosts="api.example").close()
        print(number)


async def awaited() -> None:
    async with quota.open_async("quota.toml") as q:
        budget: quota.AsyncBudget = q.budget()
        decision: quota.Decision = await budget.charge("search.list", job="nightly", region="DE")
        for each in await budget.charge_many(["videos.list", ("search.list", 100)], job="nightly"):
            print(each.id, each.cost_units)
        try:
            async with budget.spend("videos.list") as decision:
                await budget.refund(decision.id or "")
            async with budget.spend("search.list", units=200) as call:
                await call.settle(100)
        except quota.Refused as refused:
            print(refused.decision.why())
        except (quota.CostExceedsLimit, quota.LedgerError) as error:
            print(error)

        @budget.spend("videos.list")
        async def title(video: str) -> int:
            return len(video)

        @budget.spend("videos.list")
        async def pages(of: str) -> AsyncIterator[str]:
            yield of

        length: int = await title("video")
        print(length, [page.upper() async for page in pages("of")], await budget.usage(), await budget.owed_units())
        transport = httpx_async_transport(budget, "videos.list", hosts=["api.example"])
        metered = aiohttp_middleware(budget, "videos.list", hosts=["api.example"])
        async with httpx.AsyncClient(transport=transport), aiohttp.ClientSession(middlewares=[metered]):
            pass
        httpx_transport(budget, "videos.list", hosts=["api.example"])  # type: ignore[arg-type]
        budget.charge("videos.list")  # type: ignore[unused-coroutine]
        with budget.spend("videos.list"):  # type: ignore[attr-defined]
            pass

        @budget.spend("videos.list")  # type: ignore[type-var]
        def blocks(video: str) -> int:
            return len(video)
