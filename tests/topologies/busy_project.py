"""A project of a million charges a day: `python -m topologies.busy_project [CHARGES]`.

Decisions are made and commands run as its operator would; the server says for how long each of our commands held it.
Other load on the machine is in these figures: it wants an idle one.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

import quota
from bench.budgets import fill
from bench.kinds import CHEAP
from quota.ledger.factory import open_ledger
from quota.terms.limits import DAY_MS, MINUTE_MS
from support.commands import Quota
from support.inbound import Clock
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHARGES = 1_000_000
PIECES = 240
"""The day is filled in so many pieces, each of one moment."""

PROJECT = "busy"
HELD_MS = 20
"""No command of ours holds the server for longer."""

DECISION_MS = 1_000
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status", "--json"),
    ("spend",),
    ("spend", "--by", "run"),
    ("log", "--since", "1m"),
    ("check",),
    ("doctor",),
    ("charge", CHEAP),
    ("peek", CHEAP),
    ("ledger", "repair"),
)
NEW_LIMITS = """
[[credentials.main.limits]]
name = "half-day"
units = 2_000_000
window = "12h"
[[credentials.main.limits]]
name = "searches"
units = 1_000_000
window = "24h"
methods = ["search.list"]
"""


@dataclass(frozen=True)
class Row:
    """What was done, how long it took, how many commands it asked of the server, and for how long the longest of them
    held it."""

    what: str
    took_ms: float
    commands: int
    held_ms: float
    is_decision: bool = False

    @property
    def kept(self) -> bool:
        return self.held_ms <= HELD_MS and (not self.is_decision or self.took_ms <= DECISION_MS)

    def __str__(self) -> str:
        figures = f"{self.took_ms:9,.0f} ms {self.commands:6,} commands {self.held_ms:6.1f} ms the longest"
        return f"  {self.what:44} {figures}{'' if self.kept else '  MISSED'}"


class Scene:
    def __init__(self, folder: Path, server: RedisServer, charges: int) -> None:
        self._server, self._charges = server, charges
        self._quota = Quota(folder)
        (folder / "key").write_text("a-key")
        self._config = self._configure(2 * charges)

    def _configure(self, units: int, more: str = "") -> Path:
        return self._quota.configure(
            f"""
[ledger]
url = "{self._server.url}"
[credentials.main]
api = "youtube-v3"
project = "{PROJECT}"
key = "file:key"
[[credentials.main.limits]]
name = "day"
units = {units}
window = "24h"
{more}
"""
        )

    def fill(self) -> None:
        """A day of charges, up to a minute ago."""
        clock = Clock()
        clock.ms = time.time_ns() // 1_000_000 - DAY_MS + MINUTE_MS
        size = self._charges // PIECES
        with closing(open_ledger(self._server.url, clock=clock)) as ledger:
            for piece in range(PIECES):
                fill(ledger, PROJECT, size, after=piece * size)
                clock.ms += (DAY_MS - 2 * MINUTE_MS) // PIECES

    def rows(self) -> Iterator[Row]:
        yield from self._decisions("a limit that is new", 200)
        self._configure(2 * self._charges, NEW_LIMITS)
        yield from self._decisions("two more", 200)
        for arguments in COMMANDS:
            yield self._watched(f"quota {' '.join(arguments)}", lambda arguments=arguments: self._quota(*arguments))
        self._configure(self._charges + 1_000)
        yield from self._decisions("refused: half must leave", 20, units=self._charges // 2)
        yield self._watched("quota explain", lambda: self._quota("explain"))
        with redis.Redis(port=self._server.port) as client:
            client.flushall()
        yield from self._decisions("after FLUSHALL", 50)

    def _decisions(self, what: str, count: int, units: int | None = None) -> Iterator[Row]:
        """The first, as long as it counts, and the slowest of `count` after that."""
        with quota.open(self._config) as session:
            budget = session.budget()
            answers: list[str] = []
            rows = []
            while not answers or answers[-1] == "counting":
                rows.append(self._watched("", lambda: answers.append(budget.charge(CHEAP, units=units).reason)))
            description = f"{what}: {len(rows)} decision{'s'[: len(rows) > 1]}, to begin"
            yield replace(_slowest(rows), what=description, is_decision=True)
            rows = [self._watched("", lambda: budget.charge(CHEAP, units=units)) for _ in range(count)]
            yield replace(_slowest(rows), what=f"{what}: {count} later", is_decision=True)

    def _watched(self, what: str, work: Callable[[], Any]) -> Row:
        with redis.Redis(port=self._server.port, decode_responses=True) as client:
            client.config_set("slowlog-log-slower-than", 0)
            client.config_set("slowlog-max-len", 100_000)
            client.slowlog_reset()
            began = time.perf_counter()
            work()
            took_ms = (time.perf_counter() - began) * 1_000
            commands = [each["duration"] for each in client.slowlog_get(100_000)]
        return Row(what, took_ms, len(commands), max(commands) / 1_000)


def _slowest(rows: list[Row]) -> Row:
    most = max(rows, key=lambda row: row.took_ms)
    return replace(most, held_ms=max(row.held_ms for row in rows))


def run(charges: int = CHARGES) -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="quota-busy-"))
    with RedisServer() as server:
        scene = Scene(folder, server, charges)
        scene.fill()
        yield from scene.rows()
    shutil.rmtree(folder)


def main() -> int:
    missed = False
    for row in run(*map(int, sys.argv[1:])):
        print(row, flush=True)
        missed |= not row.kept
    return missed


if __name__ == "__main__":
    sys.exit(main())
