"""docs/examples/scrapy_middleware.py, with Scrapy itself."""

from __future__ import annotations

import json

from e2e.examples.conftest import Taken
from support.servers import free_port

CRAWLS = """
import asyncio, pathlib
import scrapy
from scrapy.crawler import AsyncCrawlerRunner
from scrapy.utils.reactor import install_reactor

class Regions(scrapy.Spider):
    name = "regions"

    async def start(self):
        for region in ["US", "GB", "DE", "FR", "IN", "BR", "AU", "CA"]:
            url = f"ADDRESS/youtube/v3/videos?part=id&chart=mostPopular&regionCode={region}&key=a-key-for-the-examples"
            yield scrapy.Request(url, meta={"quota": "videos.list"}, cb_kwargs={"region": region})

    def parse(self, response, region):
        yield {"region": region, "videos": len(response.json()["items"])}

SETTINGS = {
    "DOWNLOADER_MIDDLEWARES": {"scrapy_middleware.Budget": 950},
    "JOBDIR": "crawl",
    "FEEDS": {"items.jsonl": {"format": "jsonlines"}},
    "CONCURRENT_REQUESTS": 4,
    "TELNETCONSOLE_ENABLED": False,
}

async def crawl():
    runner = AsyncCrawlerRunner(SETTINGS)
    crawler = runner.create_crawler(Regions)
    await runner.crawl(crawler)
    print(crawler.stats.get_value("finish_reason"), crawler.stats.get_value("response_received_count"))

async def crawls():
    config = pathlib.Path("quota.toml")
    text = config.read_text()
    config.write_text(text.replace("sqlite:///ledger.db", "redis://127.0.0.1:PORT/0"))
    await crawl()
    config.write_text(text)
    await crawl()
    await crawl()
    config.write_text(text.replace("units = 3", "units = 20"))
    await crawl()

install_reactor("twisted.internet.asyncioreactor.AsyncioSelectorReactor")
from twisted.internet import defer, task

task.react(lambda reactor: defer.Deferred.fromFuture(asyncio.ensure_future(crawls())))
"""


def test_a_crawl_that_is_refused_ends_and_a_later_one_fetches_the_rest(taken: Taken) -> None:
    taken.take("scrapy_middleware", units=3)
    output = taken.python(CRAWLS.replace("ADDRESS", taken.upstream.address).replace("PORT", str(free_port())))
    assert output.splitlines() == ["no_ledger None", "quota 3", "quota None", "finished 5"]
    assert taken.sent() == 8
    items = [json.loads(line) for line in (taken.folder / "items.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(item["region"] for item in items) == ["AU", "BR", "CA", "DE", "FR", "GB", "IN", "US"]
