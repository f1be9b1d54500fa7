"""Days of one job on several machines in seconds: the real runner, stores and Redis, and a clock that the test moves.

Each machine has the same cron line and a store of its own. Machines die, some in the middle of a run; some come back;
some have clocks that are wrong; runs begin at the same second. By default some runs of ten days; QUOTA_TEST_RUNS=300
takes more (`make soak`: 50).
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quota.errors import LedgerError
from quota.jobs.runner import run_job
from quota.ledger.log import Moment
from quota.ledger.redis_log import RedisLog
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.local import LocalSession

RUNS = int(os.environ.get("QUOTA_TEST_RUNS", "4"))
FIRST = 9
"""From this seed on, a few runs of few ticks have wrong clocks, and machines that die with a region in hand, for
good or for a while."""

DAYS = 10
START_MS = 1_793_000_000_000
REGIONS, PAGES = ("US", "DE", "FR"), 2

CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "{project}"
[jobs.t]
fetch = "trending"
regions = ["US", "DE", "FR"]
pages = {pages}
[store]
url = "sqlite:///{folder}/videos.db"
"""


class KilledError(BaseException):
    """The machine is off: nothing of the run goes on, and nobody hears that it ended."""


class MachinesLog(RedisLog):
    """The ledger as one machine sees it: a machine that is off says nothing."""

    is_off = False

    def change(self, *args: Any, **options: Any) -> Moment:
        if self.is_off:
            raise LedgerError("the machine is off")
        return super().change(*args, **options)


class Machine:
    """One machine's session; `on_page` is called before each page, with the region and the page's number."""

    def __init__(self, world: World, number: int, error_ms: int) -> None:
        self.world, self.number, self.error_ms = world, number, error_ms
        folder = world.folder / f"{world.project}-{number}"
        folder.mkdir()
        path = folder / "quota.toml"
        text = CONFIG.format(url=world.url, project=world.project, pages=PAGES, folder=folder)
        path.write_text(text)
        self.ledger = MachinesLog(world.url, clock=lambda: world.now_ms)
        self.session = LocalSession(load_settings(path), clock=lambda: world.now_ms)
        self.session._ledger = self.ledger
        self.session.budget()
        self.session.clock = lambda: world.now_ms + error_ms  # of the store: the budget would refuse all calls
        self.session.before_page = self.page
        self.off_from_ms, self.off_until_ms = 0, 0
        self.running = False

    def is_off(self) -> bool:
        return self.off_from_ms <= self.world.now_ms < self.off_until_ms

    def tick(self) -> None:
        if self.is_off() or self.running:
            return
        self.running, self.ledger.is_off = True, False
        try:
            report = run_job(self.session, "t")
            assert report.outcome in ("done", "elsewhere"), report.why
        except KilledError:
            pass
        finally:
            self.running = False

    def page(self, region: str, page: int) -> None:
        world = self.world
        world.pages.append((world.now_ms, self.number, region, page))
        world.now_ms += 700
        for other in world.at_once.pop(world.period(), ()):
            other.tick()  # in the middle of our run
        if self.off_from_ms and self.off_from_ms <= world.now_ms < self.off_until_ms:
            self.ledger.is_off = True
            raise KilledError


@dataclass
class World:
    url: str
    project: str
    folder: Path
    dice: random.Random
    gap_ms: int
    now_ms: int = START_MS
    pages: list[tuple[int, int, str, int]] = field(default_factory=list)
    at_once: dict[int, list[Machine]] = field(default_factory=dict)

    def period(self) -> int:
        return (self.now_ms - START_MS) // self.gap_ms

    def live(self, machines: list[Machine]) -> None:
        events: list[tuple[int, Machine]] = []
        for period in range(DAYS * DAY_MS // self.gap_ms):
            at_ms = START_MS + period * self.gap_ms
            first, *others = self.dice.sample(machines, len(machines))
            events.append((at_ms + self.gap_ms // 10 + first.error_ms % (self.gap_ms // 2), first))
            for other in others:  # cron starts them at the same second: one asks while the other runs
                if self.dice.random() < 0.5:
                    self.at_once.setdefault(period, []).append(other)
                else:
                    events.append((at_ms + self.gap_ms // 10 + other.error_ms % (self.gap_ms // 2), other))
        for at_ms, machine in sorted(events, key=lambda event: event[0]):
            self.now_ms = max(self.now_ms, at_ms)
            period = self.period()
            machine.tick()
            for other in self.at_once.pop(period, ()):  # the first fetched nothing
                other.tick()


@dataclass
class Counts:
    runs: int = 0
    periods: int = 0
    covered: int = 0
    rounds: int = 0
    duplicates: int = 0
    changes: int = 0
    longest_silence: float = 0.0

    def add(self, world: World) -> None:
        self.runs += 1
        self.periods += DAYS * DAY_MS // world.gap_ms
        self.covered += len({(at_ms - START_MS) // world.gap_ms for at_ms, *_ in world.pages})
        last_pages = [page for page in world.pages if page[2:] == (REGIONS[-1], PAGES - 1)]
        self.rounds += len(world.pages) // (len(REGIONS) * PAGES)
        self.changes += sum(a[1] != b[1] for a, b in pairwise(last_pages))
        seen: dict[tuple[str, int], tuple[int, int]] = {}
        for at_ms, machine, region, page in world.pages:
            before = seen.get((region, page))
            if before is not None and before[1] != machine and at_ms - before[0] < 0.9 * world.gap_ms:
                self.duplicates += 1
            seen[region, page] = (at_ms, machine)
        for a, b in pairwise(world.pages):
            self.longest_silence = max(self.longest_silence, (b[0] - a[0]) / world.gap_ms)


def simulated(seed: int, url: str, folder: Path, counts: Counts) -> None:
    dice = random.Random(seed)
    gap_ms = dice.choice((HOUR_MS, HOUR_MS, 3 * HOUR_MS, 6 * HOUR_MS, DAY_MS))
    world = World(url, f"p{seed}", folder, dice, gap_ms)
    machines = []
    for number in range(dice.choice((2, 3))):
        wrong = dice.random() < 0.3
        machines.append(Machine(world, number, dice.choice((-7 * HOUR_MS, 9 * MINUTE_MS, 40 * DAY_MS)) if wrong else 0))
    lost_ms = 0
    if dice.random() < 0.7:
        lost = dice.choice(machines)
        period = dice.randrange(3, DAYS * DAY_MS // gap_ms)
        lost.off_from_ms = START_MS + period * gap_ms
        if dice.random() < 0.5:  # dies with a region in hand, if it is its turn
            lost.off_from_ms += gap_ms // 10 + lost.error_ms % (gap_ms // 2)
            lost.off_from_ms += dice.randrange(1, len(REGIONS) * PAGES) * 700
        back = dice.random() < 0.4
        lost.off_until_ms = lost.off_from_ms + dice.randrange(1, 4) * DAY_MS if back else START_MS + 99 * DAY_MS
        lost_ms = lost.off_until_ms - lost.off_from_ms
    world.live(machines)
    counts.add(world)
    for machine in machines:
        machine.session.close()
        machine.ledger.close()
    assert not lost_ms or world.pages


@pytest.mark.timeout(120 + 20 * RUNS)
def test_a_job_has_one_machine_at_a_time_and_goes_on_when_that_dies(
    shared: str, state_dir: Path, tmp_path: Path
) -> None:
    counts = Counts()
    for seed in range(FIRST, FIRST + RUNS):
        simulated(seed, shared, tmp_path, counts)
    assert counts.duplicates == 0
    assert counts.rounds <= counts.covered, "a round was fetched twice"
    assert counts.covered >= 0.95 * counts.periods
    assert counts.changes <= 0.5 * counts.runs
    assert counts.longest_silence <= 4.0
