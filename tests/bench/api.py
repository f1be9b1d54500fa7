"""How long `quota serve` takes to answer 50 clients at once over a store of 100,000 videos, and its memory.

    python -m bench.api         (in the folder `tests`; --videos and --seconds for a quick look)

The clients are in this process, the server in one of its own. Each client asks again as soon as it has its answer, so
50 requests are always under way. No question repeats often, and no answer is kept: no client sends an ETag. In every
video's title is the same word, `music`; searching for it is the dearest question there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.middleware import spent_ns
from quota.jobs.job import Page
from quota.jobs.store.store import Store
from support.commands import QUOTA, Quota
from support.web import served_by

if TYPE_CHECKING:
    from collections.abc import Callable

VIDEOS = 100_000
CHANNELS = 1_000
CLIENTS = 50
SECONDS = 5.0
REGIONS = ("US", "GB", "DE", "FR", "IN", "BR", "AU", "CA")
PAGES, PAGE_VIDEOS = 4, 50
P99_MS, MEMORY_MB = 150, 200

CONFIG = f"""
[credentials.main]
api = "youtube-v3"

[jobs.trending]
fetch = "trending"
regions = {json.dumps(REGIONS)}
pages = {PAGES}

[store]
url = "sqlite:///videos.db"
"""


class Words:
    """Invented words, a few of them frequent, as in any language."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.known = ["".join(self._random.choices(letters, k=self._random.randint(3, 9))) for _ in range(20_000)]

    def text(self, least: int, most: int) -> str:
        count = self._random.randint(least, most)
        return " ".join(self.known[int(20_000 * self._random.random() ** 3)] for _ in range(count))


def fill(path: Path, videos: int) -> None:
    """A store of so many videos, in complete passes over all regions."""
    words, now_ms = Words(), int(time.time() * 1000) - videos * 100
    with Store(str(path), retention_ms=10**11, clock=lambda: now_ms) as store:
        for begin in range(0, videos, PAGES * PAGE_VIDEOS):
            (checkpoint,) = store.start_round("trending", [REGIONS[begin // (PAGES * PAGE_VIDEOS) % len(REGIONS)]])
            for page in range(PAGES):
                now_ms += 1_000
                ids = range(begin + page * PAGE_VIDEOS, begin + (page + 1) * PAGE_VIDEOS)
                found = Page([video(i, words) for i in ids], ranked=True, cursor={"page": page})
                checkpoint = store.save_page(checkpoint, found, started_at_ms=now_ms, finished=page == PAGES - 1)


def video(i: int, words: Words) -> dict[str, Any]:
    return {
        "id": f"v{i:010}",
        "snippet": {
            "title": f"music {words.text(3, 11)}",
            "description": words.text(10, 110),
            "channelId": f"UC{i % CHANNELS:022}",
            "channelTitle": words.text(1, 3),
            "publishedAt": "2026-11-01T00:00:00Z",
            "categoryId": "10",
            "tags": words.text(0, 16).split(),
            "thumbnails": {"high": {"url": f"https://i.ytimg.com/vi/v{i}/hqdefault.jpg"}},
        },
        "statistics": {"viewCount": str(i * 7_919 % 10**8), "likeCount": "5", "commentCount": "7"},
        "contentDetails": {"duration": "PT4M13S", "definition": "hd", "caption": "false", "licensedContent": True},
    }


def questions() -> dict[str, Callable[[random.Random], str]]:
    known = Words().known

    def trending(chance: random.Random) -> str:
        return f"/api/v1/videos/trending?region={chance.choice(REGIONS)}&limit={chance.randint(1, 100)}"

    def search(chance: random.Random) -> str:
        return f"/api/v1/search?q={chance.choice(known)}&limit={chance.randint(1, 50)}"

    def common(chance: random.Random) -> str:
        return f"/api/v1/search?q=music&limit={chance.randint(1, 50)}"

    def channel(chance: random.Random) -> str:
        return f"/api/v1/channels/UC{chance.randrange(CHANNELS):022}"

    def mixed(chance: random.Random) -> str:
        return chance.choices((trending, search, common, channel), (60, 15, 5, 20))[0](chance)

    return {
        "rankings": trending,
        "channels": channel,
        "searches": search,
        "searches of a word in every video": common,
        "60% rankings, 20% searches": mixed,
    }


async def load(port: int, question: Callable[[random.Random], str], seconds: float) -> list[float]:
    """The seconds that each answer took."""
    taken_s: list[float] = []
    until_s = time.perf_counter() + seconds

    async def client(number: int) -> None:
        chance = random.Random(number)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until_s:
            began_s = time.perf_counter()
            writer.write(f"GET {question(chance)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            taken_s.append(time.perf_counter() - began_s)
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"answered {head.decode()}")
        writer.close()

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return sorted(taken_s)


def memory_mb(pid: int) -> float:
    """The most that the process ever held."""
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) / 1_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.api")
    parser.add_argument("--videos", type=int, default=VIDEOS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"a store of {options.videos:,} videos ...", file=sys.stderr, flush=True)
        fill(Path(folder) / "videos.db", options.videos)
        (Path(folder) / "quota.toml").write_text(CONFIG)
        quota = Quota(Path(folder))
        slowest_ms = 0.0
        print(f"{CLIENTS} requests at once over {options.videos:,} videos\n")
        print(f"{'':<33} {'a second':>9} {'p50 ms':>8} {'p99 ms':>8} {'most ms':>8} {'CPU ms':>8}")
        with served_by([*QUOTA, "serve", "--listen", "127.0.0.1:0"], cwd=quota.folder, env=quota.env) as served:
            for what, question in questions().items():
                before_ns = spent_ns(served.process.pid)
                taken_s = asyncio.run(load(served.port, question, options.seconds))
                p50, p99, worst = (round(taken_s[int(len(taken_s) * part)] * 1000, 1) for part in (0.5, 0.99, 0.9999))
                cpu_ms = round((spent_ns(served.process.pid) - before_ns) / len(taken_s) / 1e6, 2)
                slowest_ms = max(slowest_ms, p99)
                rate = int(len(taken_s) / options.seconds)
                print(f"{what:<33} {rate:>9,} {p50:>8} {p99:>8} {worst:>8} {cpu_ms:>8}")
            held_mb = memory_mb(served.process.pid)
            served.end(signal.SIGTERM)
    verdict = "held" if slowest_ms <= P99_MS and held_mb <= MEMORY_MB else "above"
    print(f"\np99 {slowest_ms} ms (at most {P99_MS}); memory {held_mb:.0f} MB (at most {MEMORY_MB}): {verdict}")


if __name__ == "__main__":
    main()
