"""Scrapy: a downloader middleware. A spider ends when the budget is spent; a JOBDIR lets the next crawl resume there.

    scrapy crawl videos -s JOBDIR=crawls/videos

`settings.py`:

    DOWNLOADER_MIDDLEWARES = {"scrapy_middleware.Budget": 950}  # after retries and redirects: it charges each attempt
    QUOTA_CREDENTIAL = "main"                                    # optional; default: the first credential

The reason in `spider_closed` and `finish_reason` is "quota", or "no_ledger" if the ledger does not answer.

A request names its API method: `Request(url, meta={"quota": "videos.list"})`. Other requests are not charged.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from scrapy import Request, signals
from scrapy.crawler import Crawler

import quota


class Budget:
    def __init__(self, crawler: Crawler) -> None:
        self.crawler = crawler
        self.closing: asyncio.Task[None] | None = None
        self.session = quota.open_async()
        self.budget = self.session.budget(crawler.settings.get("QUOTA_CREDENTIAL"))

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        budget = cls(crawler)
        crawler.signals.connect(budget.session.aclose, signals.spider_closed)
        return budget

    async def process_request(self, request: Request) -> Request | None:
        method = request.meta.get("quota")
        if method is None:
            return None
        spider = self.crawler.spider
        decision = await self.budget.charge(method, job=spider.name)
        if decision.admitted:
            return None
        if self.closing is None:
            outage = decision.reason == "ledger-unavailable"
            spider.logger.log(logging.ERROR if outage else logging.WARNING, "%s", decision)
            reason = "no_ledger" if outage else "quota"
            self.closing = asyncio.create_task(self.crawler.engine.close_spider_async(reason=reason))
        return request.replace(dont_filter=True)  # back into the queue, which JOBDIR keeps
