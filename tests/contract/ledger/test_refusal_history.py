"""What was refused in 35 days, against a list of all refusals (L30): processes that end, are killed and are cut off."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pytest
import redis

from quota.common.text import one_line
from quota.deciding.recorder import ATTEND_EVERY_MS, Recorder
from quota.ledger.contract import Exhaustion
from quota.ledger.history import HISTORY_MS, MAX_REFUSAL_BYTES, MAX_REFUSALS
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from support.processes import Children
from support.proxy import Proxy
from support.setup import Setup, limit

if TYPE_CHECKING:
    from quota.decision import Decision
    from support.servers import RedisServer

JOBS = ("trending", "", "back|fill 50%", "日本")
METHODS = ("videos.list", "videos.list", "search.list")


class Refusal(NamedTuple):
    decision: Decision
    job: str
    region: str


@dataclass
class Weeks:
    """Some weeks of a process and those that follow it; `told` is what the ledger must have, oldest first."""

    setup: Setup
    dice: random.Random
    proxy: Proxy | None = None
    waiting: list[Refusal] = field(default_factory=list)
    told: list[Refusal] = field(default_factory=list)
    lost: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.latest_ms = self.setup.now_ms
        self.start()

    def start(self) -> None:
        limits = [limit(300), limit(3, HOUR_MS, name="searches", methods=("search.list",), count="calls")]
        self.recorder = Recorder(self.setup.ledger, self.setup.project, lambda: self.setup.now_ms)
        self.budget = self.setup.budget(*limits, recorder=self.recorder, leave={"trending": {"day": 150}})
        self.waiting, self.answered_ms = [], -1

    def run(self) -> None:
        end_ms = self.setup.now_ms + 37 * DAY_MS
        acts = [self.decide, self.turn_clock, self.close, self.kill, self.exhaust, self.cut_off]
        weights = [60, 55, 2, 2, 0.5, 2 if self.proxy else 0]
        while self.setup.now_ms < end_ms:
            self.dice.choices(acts, weights)[0]()
        self.close()
        self.check()

    def turn_clock(self) -> None:
        steps = [1, SECOND_MS, MINUTE_MS, 30 * MINUTE_MS, 5 * HOUR_MS, 40 * HOUR_MS, -MINUTE_MS, -3 * HOUR_MS]
        self.setup.now_ms += self.dice.choices(steps, [20, 20, 30, 30, 12, 0.5, 1, 0.5])[0]
        self.latest_ms = max(self.latest_ms, self.setup.now_ms)

    def decide(self) -> None:
        self.number += 1
        method, job, region = self.dice.choice(METHODS), self.dice.choice(JOBS), f"R{self.number}"
        commits = self.dice.random() < 0.9
        ask = self.budget.charge if commits else self.budget.peek
        decision = ask(method, units=self.dice.choice((1, 20, 60)), job=job, region=region)
        now_ms = self.setup.now_ms
        if not self.answered_ms <= now_ms < self.answered_ms + ATTEND_EVERY_MS:
            if self.answered_ms >= 0:
                self.tell()
            self.answered_ms = now_ms
        if commits and not decision.admitted:
            self.waiting.append(Refusal(decision, job, region))

    def tell(self) -> None:
        self.told += self.waiting
        self.waiting = []

    def close(self) -> None:
        """A process ends, and another one begins."""
        self.recorder.close()
        if self.answered_ms >= 0:
            self.tell()
        self.lost += len(self.waiting)
        self.start()

    def kill(self) -> None:
        """One is killed: what it had not handed over is lost, and nothing else."""
        self.recorder.start_over_in_child()  # nothing is left to be handed over at the end of this test
        self.lost += len(self.waiting)
        self.start()

    def exhaust(self) -> None:
        now_ms = self.setup.now_ms
        record = Exhaustion("units", now_ms, now_ms + 2 * HOUR_MS, "no more! " * 300, "host:1 job")
        self.setup.ledger.exhaust(self.setup.project, record)

    def cut_off(self) -> None:
        """The connection fails as a process ends: its counts arrived or not, and are not sent again."""
        assert self.proxy is not None
        if not self.waiting or self.answered_ms < 0:
            return
        arrives = self.dice.random() < 0.5
        self.proxy.fail("drop-reply" if arrives else "drop-request", times=1)
        self.recorder.close()
        self.proxy.heal()
        if arrives:
            self.tell()
        self.waiting, self.answered_ms = [], -1

    def check(self) -> None:
        since_ms = (self.latest_ms - HISTORY_MS) // HOUR_MS * HOUR_MS + HOUR_MS
        history = self.setup.ledger.history(self.setup.project, 0, self.latest_ms)
        found = {row[:4]: row.calls for row in history.refused}
        expected: Counter[tuple[int, str, str, str]] = Counter()
        for one in self.told:
            hour_ms = one.decision.decided_at_ms // HOUR_MS * HOUR_MS
            expected[hour_ms, one.decision.refused_by or "", one.job, one.decision.reason] += 1
        assert {k: v for k, v in found.items() if k[0] >= since_ms} == {
            k: v for k, v in expected.items() if k[0] >= since_ms
        }
        texts = self.setup.ledger.refusals(self.setup.project)
        assert max(len(text.encode()) for text in texts) <= MAX_REFUSAL_BYTES
        kept = [json.loads(text) for text in texts]
        assert [one["region"] for one in kept] == [one.region for one in self.told[-MAX_REFUSALS:]]
        for data, one in zip(kept, self.told[-MAX_REFUSALS:], strict=True):
            assert (data["job"], data["why"]) == (one.job, one_line(one.decision.why()))
            assert {**data, **one.decision.as_json()} == data


@pytest.mark.parametrize("seed", [1, 2])
def test_refusals_of_five_weeks_are_those_that_were_told(setup: Setup, seed: int) -> None:
    """L30. Limits, leaves, exhaustions, clocks that step, processes that end and that are killed."""
    weeks = Weeks(setup, random.Random(seed))
    weeks.run()
    assert len(weeks.told) > 150
    assert {one.decision.reason for one in weeks.told} == {"limit", "leave", "exhausted"}


def test_so_too_where_the_connection_fails(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client, Proxy(redis_server.port) as proxy:
        client.flushall()
        setup = Setup.open(proxy.url)
        Weeks(setup, random.Random(3), proxy).run()
        setup.ledger.close()
        client.flushall()


def test_what_killed_processes_handed_over_is_whole_and_there_once(ledger_url: str) -> None:
    """Kill -9 anywhere: counts and refusals of a flush are there together, or neither."""
    dice = random.Random(7)
    setup = Setup.open(ledger_url)
    setup.budget(limit(1)).charge("videos.list")
    regions: list[str] = []
    for child_number in range(12):
        out, into = os.pipe()
        child = Children(refuse_for_ever, (ledger_url, setup.project, f"c{child_number}", into))
        os.close(into)
        with open(out, encoding="ascii") as pipe:
            lines = [pipe.readline() for _ in range(2 * dice.randint(3, 12))]
            time.sleep(dice.uniform(0, 0.01))  # whatever it is doing then
            child.kill()
            begun = [line.split() for line in "".join([*lines, pipe.read()]).split("\n")[:-1]]
        kept = [json.loads(text)["region"] for text in setup.ledger.refusals(setup.project)]
        flushes = [flush[1:] for flush in begun if flush[0] == "begin"]
        ended = sum(flush[0] == "end" for flush in begun)
        calls = sum(row.calls for row in setup.ledger.history(setup.project, 0, setup.now_ms).refused)
        certain = regions + [region for flush in flushes[:ended] for region in flush]
        perhaps = regions + [region for flush in flushes[: ended + 1] for region in flush]
        assert calls in (len(certain), len(perhaps))
        regions = certain if calls == len(certain) else perhaps
        assert kept == regions[-MAX_REFUSALS:]
    assert len(regions) > MAX_REFUSALS
    setup.ledger.close()


def refuse_for_ever(url: str, project: str, name: str, into: int) -> None:
    setup = Setup.open(url)
    setup.project = project
    recorder = Recorder(setup.ledger, project, lambda: setup.now_ms)
    budget = setup.budget(limit(1), recorder=recorder)
    number = 0
    while True:
        mine = [f"{name}-{number + n}" for n in range(1 + number % 4)]
        number += len(mine)
        for region in mine:
            assert not budget.charge("videos.list", region=region).admitted
        os.write(into, f"begin {' '.join(mine)}\n".encode())
        recorder.close()
        os.write(into, b"end\n")
