"""A year of use in simulated time: every file and every key of ours has a bound, and keeps to it month after month.

Sizes are taken at the end of each month. Beside the bound, no month of the second half may be above all of the first:
what grows slowly shows so. `make soak` makes the days busier (QUOTA_TEST_CALLS), and the bounds with them.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from quota.budget import Budget
from quota.common.sqlite_file import PAGE_BYTES
from quota.jobs.job import Page
from quota.jobs.store.store import Store
from quota.ledger.contract import MIN_RETENTION_MS, Exhaustion
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.history import RefusalCount
from quota.ledger.identity import Identity
from quota.recovery.allowance import Allowance
from quota.terms.limits import DAY_MS, HOUR_MS, Calendar, Limit, Selector, View
from support.books import BOOK
from support.claims import claim_of
from support.setup import limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import RedisServer

CALLS_A_DAY = int(os.environ.get("QUOTA_TEST_CALLS", "14"))
MONTHS = 12
DAYS_IN_MONTH = 30
START_MS = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)

KB = 1_000
WAL_BYTES = 1_000 * PAGE_BYTES + 200 * KB
STORE_WAL_BYTES = 4_200 * KB
"""SQLite moves its write-ahead log into the file after 1,000 pages, and then goes on at the log's beginning."""

SLACK = {"file": 32 * KB, "wal": 32 * KB, "memory": KB, "history_memory": 16 * KB, "sums": 201}
"""Between two months: files grow by whole pages, and the running sums by the jobs there ever were, up to 200.
Everything else is counted in rows."""

CHARGE_BYTES_SQLITE, CHARGE_BYTES_REDIS = 200, 100
"""A charge in the log, with its corrections and its share of what lies around it."""

LOG_DAYS = 3
"""Charges are kept for 49 h and forgotten by the day's next charges."""

HISTORY_ROWS = 36 * CALLS_A_DAY
ROW_BYTES_SQLITE, ROW_BYTES_REDIS = 170, 60
"""A row of an hour: with so few calls, most hours have a row for each of them."""

REFUSAL = "{}" + 500 * " "
REFUSALS_BYTES = 100 * 700

MACHINES = 3
"""Each keeps its journal, and the ledger keeps a number for each."""

ITEMS = 10
NEW_VIDEOS_A_DAY = 4
RETENTION_DAYS = 30
VIDEO_BYTES = 4_000
"""A video of some 600 characters with its row, its index entries and its rankings of 30 days."""
READING_BYTES = 250
"""Of what a video's history keeps of one chart."""


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


class Year:
    """What happens to one ledger: charges and refusals, corrections, exhaustions, claims, repayments, and once a month
    somebody changes the configuration."""

    def __init__(self, url: str) -> None:
        self.clock = Clock()
        self.ledger = open_ledger(url, clock=self.clock)
        self.dice = random.Random(7)
        self.claimed = 0
        self.admitted = self.refused = self.corrected = self.drawn = 0

    def budget(self, month: int) -> Budget:
        pacific = View(Selector(buckets=("units",)), Calendar("day", "America/Los_Angeles"))
        units = max(10 * CALLS_A_DAY, 200)  # half of it holds a search
        renamed = limit(units // 2, name=f"job-{month}", jobs=(f"job-{month}",))
        return Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=(
                limit(400),
                Limit("pacific-day", 400, pacific, 400, 0),
                limit(300, name="search", methods=("search.list",)),
                renamed,
            ),
            ledger=self.ledger,
            clock=self.clock,
        )

    def day(self, month: int) -> None:
        budget, dice = self.budget(month), self.dice
        midnight_ms = self.clock.now_ms
        for offset_ms in sorted(dice.randrange(DAY_MS) for _ in range(CALLS_A_DAY)):
            self.clock.now_ms = midnight_ms + offset_ms
            claim = claim_of(f"{dice.randrange(MACHINES)}", f"{self.clock.now_ms}", tick=f"tick:{self.clock.now_ms}")
            if not self.ledger.claim("p", claim).elsewhere:
                self.claimed += 1
                self.ledger.keep_places("p", claim, f"work of {month}", {"US": "here", "DE": "there"})
                self.ledger.end_claim("p", claim, "done")
            method = dice.choice(["videos.list"] * 8 + ["search.list", "captions.list", "suggest.list"])
            decision = budget.charge(
                method, job=dice.choice(["a", "b", f"job-{month}"]), region=dice.choice("ABCDEFGH")
            )
            if decision.id is None:
                self.refused += 1
                continue
            self.admitted += 1
            if dice.random() < 0.3:
                budget.settle(decision.id, dice.choice([0, 1, 5]))
                self.corrected += 1
        if dice.random() < 0.2:
            bucket = dice.choice(["units", "search"])
            now_ms = self.clock.now_ms
            self.ledger.exhaust("p", Exhaustion(bucket, now_ms, now_ms + HOUR_MS, "no more " * 20, "host:1 job"))
        if dice.random() < 0.2:
            charge = Charge(1, "units", "videos.list", "a", "A", "t")
            self.drawn += 3
            self.ledger.repay("p", f"machine-{dice.randrange(MACHINES)}", [(self.drawn + n, charge) for n in range(3)])
        self.clock.now_ms = midnight_ms + DAY_MS
        hour_ms = self.clock.now_ms - HOUR_MS
        counts = [RefusalCount(hour_ms, "day", job, "limit", 3) for job in ("a", "b", f"job-{month}")]
        self.ledger.add_refusals("p", counts, [REFUSAL] * 20)
        while self.ledger.roll_up("p", self.clock.now_ms):
            pass

    def check_it_was_one(self) -> None:
        """All of it happened, and often."""
        assert self.clock.now_ms == START_MS + MONTHS * DAYS_IN_MONTH * DAY_MS
        assert min(self.admitted, self.refused, self.corrected, self.drawn, self.claimed) >= 100


def check_a_year(act: Callable[[int], None], measure: Callable[[], dict[str, int]], **most: int) -> None:
    """Live through a year with `act`, one day of the month given; whatever `measure` finds is bounded by `most`."""
    found: dict[str, list[int]] = {}
    for month in range(MONTHS):
        for _ in range(DAYS_IN_MONTH):
            act(month)
        for name, size in measure().items():
            found.setdefault(name, []).append(size)
    for name, sizes in found.items():
        assert max(sizes) <= most[name], (name, sizes)
        before, after = max(sizes[: MONTHS // 2]), max(sizes[MONTHS // 2 :])
        assert after <= before * 1.15 + SLACK.get(name, 5), (name, sizes)


def file_bytes(path: Path) -> int:
    """What a file takes on the disk, without its write-ahead log."""
    return sum(one.stat().st_size for one in (path, path.with_name(f"{path.name}-shm")) if one.exists())


def wal_bytes(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size


def rows(path: Path, *tables: str) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as db:
        count = "SELECT count(*) FROM {}"
        return {name: db.execute(count.format(name)).fetchone()[0] for name in tables}


def counted(path: Path) -> dict[str, int]:
    """How many charges there are, how many fields of each kind, and how many refusals as a whole."""
    with closing(sqlite3.connect(path)) as db:
        kinds = Counter(
            name.rpartition(":")[0] for (name,) in db.execute("SELECT name FROM state WHERE name LIKE '%:%'")
        )
        kinds["view"] = sum(n for kind, n in kinds.items() if kind.startswith("view"))
        (charges,) = db.execute("SELECT COUNT(*) FROM charges").fetchone()
        (refusals,) = db.execute("SELECT value FROM state WHERE name = 'history:refusals'").fetchone() or ("[]",)
    shown = ("view", "closed", "repaid", "repaid_at", "claim", "place", "history:hour", "history:refused")
    return {"charges": charges, "refusals": len(json.loads(refusals)), **{name: kinds[name] for name in shown}}


def test_the_embedded_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    year = Year(f"sqlite:///{path}")

    def measure() -> dict[str, int]:
        return {"file": file_bytes(path), "wal": wal_bytes(path), **counted(path)}

    log = LOG_DAYS * CALLS_A_DAY
    check_a_year(
        year.day,
        measure,
        file=200 * KB + log * CHARGE_BYTES_SQLITE + HISTORY_ROWS * ROW_BYTES_SQLITE + REFUSALS_BYTES,
        wal=WAL_BYTES,
        charges=log,
        refusals=100,
        **{
            "view": 5,
            "closed": 2,
            "repaid": MACHINES,
            "repaid_at": MACHINES,
            "claim": 1,
            "place": 2 * 3,
            "history:hour": 36 * 24,
            "history:refused": 36 * 24,
        },
    )
    year.check_it_was_one()
    year.ledger.close()
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.db"]


def test_the_shared_ledger(redis_server: RedisServer) -> None:
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        year = Year(redis_server.url)

        def measure() -> dict[str, int]:
            names = ("log", "state", "corrections", "history")
            log, state, corrections, history = (f"quota:{{p}}:{name}" for name in names)
            assert set(client.keys("*")) == {log, state, corrections, history}
            assert all(0 < client.pttl(key) <= 35 * DAY_MS for key in (log, state, corrections, history))
            sizes: Any = [client.memory_usage(key, samples=0) for key in (log, state, corrections)]
            return {
                "memory": sum(sizes),
                "log": client.xlen(log),
                "state": client.hlen(state),
                "corrections": client.hlen(corrections),
                "history": client.hlen(history),
                "history_memory": client.memory_usage(history, samples=0) or 0,
            }

        log = LOG_DAYS * CALLS_A_DAY
        check_a_year(
            year.day,
            measure,
            memory=11 * KB + log * CHARGE_BYTES_REDIS,
            log=log,
            state=26 + MACHINES,  # what has expired goes once a minute
            corrections=log,
            history=36 * 24 * 2 + 110,
            history_memory=20 * KB + HISTORY_ROWS * ROW_BYTES_REDIS + REFUSALS_BYTES,
        )
        year.check_it_was_one()
        year.ledger.close()
        client.flushall()


def test_the_journal_of_the_allowance(tmp_path: Path) -> None:
    """Every other day the ledger is away; some debts are repaid at once, some days later."""
    path, clock, dice = tmp_path / "allowance.db", Clock(), random.Random(7)
    allowance = Allowance(str(path), 10, 50, clock)
    ledger = open_ledger("sqlite://", clock=clock)

    def day(_: int) -> None:
        clock.now_ms += DAY_MS
        if dice.random() < 0.5:
            return
        drawn = 0
        charge = Charge(10, "units", "videos.list", "a job of some length", "A", "12345678123")
        while allowance.draw(Identity("", "p"), [charge], DAY_MS, commit=True) is not None:
            drawn += 1
        assert drawn in (0, 5)
        if dice.random() < 0.5:
            allowance.repay(Identity("", "p"), ledger, MIN_RETENTION_MS)

    check_a_year(
        day,
        lambda: {"file": file_bytes(path), "wal": wal_bytes(path), **rows(path, "draws", "machine")},
        file=60 * KB,
        wal=WAL_BYTES,
        draws=60,
        machine=1,
    )
    allowance.close()
    ledger.close()


def test_the_store(tmp_path: Path) -> None:
    """Two rankings a day, in which videos come, stay for two weeks and go; now and then a job or a region is new."""
    path, clock, dice = tmp_path / "videos.db", Clock(), random.Random(7)
    words = [f"{stem}{ending}" for stem in ("rain", "sun", "wind", "snow", "fog") for ending in range(400)]
    newest = 0

    @cache
    def text(of: object, count: int) -> str:
        return " ".join(random.Random(f"{of}").choices(words, k=count))

    def video(number: int) -> dict[str, Any]:
        changed = dice.randrange(10) if dice.random() < 0.1 else 0  # some change their titles
        about = {
            "title": text((number, changed), 6),
            "description": text(number, 60),
            "channelId": f"c{number % 40}",
            "tags": text(-number, 10).split(),
        }
        return {"id": f"v{number}", "snippet": about, "statistics": {"viewCount": str(dice.randrange(10**9))}}

    def day(month: int) -> None:
        nonlocal newest
        newest += NEW_VIDEOS_A_DAY
        with Store(str(path), retention_ms=RETENTION_DAYS * DAY_MS, clock=clock) as store:
            for _ in range(2):
                clock.now_ms += DAY_MS // 2
                store.delete_expired()
                charted = dice.sample(range(newest, newest + 14 * NEW_VIDEOS_A_DAY), ITEMS)
                page = Page(
                    videos=[video(-number) for number in charted],
                    channels=[{"id": f"c{dice.randrange(10**6)}", "snippet": {"description": text(newest, 20)}}],
                    ranked=True,
                )
                (checkpoint,) = store.start_round(f"job-{month}", [f"R{month}"])
                store.save_page(checkpoint, page, started_at_ms=clock.now_ms, finished=True)

    def measure() -> dict[str, int]:
        tables = ("videos", "rankings", "channels", "history", "checkpoints", "charts")
        with Store(str(path), retention_ms=1, clock=clock):
            return {"file": file_bytes(path), "wal": wal_bytes(path), **rows(path, *tables)}

    videos = (RETENTION_DAYS + 14) * NEW_VIDEOS_A_DAY
    rankings = (RETENTION_DAYS + 1) * 2 * ITEMS
    check_a_year(
        day,
        measure,
        file=110 * KB + videos * VIDEO_BYTES + rankings * READING_BYTES,
        wal=STORE_WAL_BYTES,
        videos=videos,
        rankings=rankings,
        channels=2 * RETENTION_DAYS + 2,
        history=rankings,
        checkpoints=3,
        charts=3,
    )
