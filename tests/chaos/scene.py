"""The numbers of a chaos run, and where everything lies."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

PROJECT = "chaos"
KEY = "a-key-for-chaos"
MACHINES = ("m1", "m2", "m3")
JOB = "pages"
REGIONS = ("US", "DE", "FR", "IN", "BR", "JP")
SHARED = "shared"
SHARED_REGIONS = ("KR", "MX", "ES")
"""A job whose regions belong to one machine at a time; those of the other belong to each."""

FETCH = "chaos.pages:fetch"
PAGES = 5
PAGE_ITEMS = 10
WORKERS = (
    ("m1", "ticks"),
    ("m1", "ticks"),
    ("m1", "calls"),
    ("m2", "ticks"),
    ("m2", "calls"),
    ("m2", "charges"),
    ("m3", "ticks"),
    ("m3", "charges"),
)
"""One process each. Two of the first machine run the same job, so that their ticks overlap."""

CHEAP, CHEAP_UNITS = "videos.list", 1
DEAR, DEAR_UNITS = "captions.list", 50
SHORT_UNITS, SHORT_MS = 800, 20_000
AHEAD_MS = "CHAOS_AHEAD_MS"
"""Tells a worker how far ahead its clock has been set."""

ACTS_S = 120
"""So long, together, workers may take to start again after ledgers moved and clocks were set; no faults strike then."""

HEAL_S = 60
"""What the workers have, once everything is healed, for their last tick and to repay."""


@dataclass(frozen=True)
class Limit:
    """A sliding limit; `method` where it counts that one only."""

    units: int
    window_ms: int
    method: str | None = None


@dataclass(frozen=True)
class Scene:
    """One run: its seed, how long faults strike, and its folder."""

    machines: ClassVar[tuple[str, ...]] = MACHINES
    workers: ClassVar[tuple[tuple[str, str], ...]] = WORKERS
    seed: int
    seconds: float
    folder: Path
    losses: bool

    @property
    def allowance_units(self) -> int:
        """For each machine and day: enough for all outages of a run, as no part of it comes back within one."""
        return max(40, math.ceil(self.seconds * 4))

    @property
    def day_units(self) -> int:
        """The 24 h limit: what the short one can admit in the whole run, and not much more."""
        return SHORT_UNITS * (math.ceil((self.seconds + ACTS_S) * 1_000 / SHORT_MS) + 1)

    @property
    def headroom_units(self) -> int:
        return len(self.machines) * self.allowance_units

    @property
    def quota_units(self) -> int:
        """What the upstream grants: beyond it, it answers 403."""
        return self.day_units + self.headroom_units

    @property
    def limits(self) -> dict[str, Limit]:
        """Together they keep charges flowing: the short one is full most of the time, and what the others hold back
        leaves room in it for dear calls."""
        return {
            "burst": Limit(90, 3_000, CHEAP),
            "dear": Limit(6 * DEAR_UNITS, SHORT_MS, DEAR),
            "short": Limit(SHORT_UNITS, SHORT_MS),
            "day": Limit(self.day_units, 86_400_000),
        }

    def machine(self, name: str) -> Path:
        return self.folder / name

    @property
    def journals(self) -> Path:
        return self.folder / "journals"

    @property
    def wire(self) -> Path:
        return self.folder / "wire.jsonl"

    @property
    def stop(self) -> Path:
        """A file that tells the workers to finish."""
        return self.folder / "finish"

    def here(self, machine: str) -> Path:
        """A file that tells a machine to take the shared job over, as its operator would with `--here`."""
        return self.machine(machine) / "here"

    def name_ledger(self, url: str) -> None:
        """Edit the url of the ledger in each machine's configuration."""
        for machine in self.machines:
            path = self.machine(machine) / "quota.toml"
            path.write_text(re.sub(r'(\[ledger\]\nurl = )"[^"]*"', rf'\g<1>"{url}"', path.read_text()))

    def configure(self, ledger_url: str, endpoint: str = "http://127.0.0.1:9") -> None:
        """A folder for each machine: configuration, key, state folder and store."""
        self.journals.mkdir()
        allowance = (
            f"{{ max_cost = {CHEAP_UNITS}, allowance = {self.allowance_units}, machines = {len(self.machines)} }}"
        )
        for machine in self.machines:
            folder = self.machine(machine)
            folder.mkdir()
            (folder / "key").write_text(KEY)
            limits = "".join(
                f'[[credentials.main.limits]]\nname = "{name}"\nquota = {limit.units + self.headroom_units}\n'
                f'headroom = {self.headroom_units}\nwindow = "{limit.window_ms}ms"\n'
                + (f'methods = ["{limit.method}"]\n' if limit.method else "")
                for name, limit in self.limits.items()
            )
            (folder / "quota.toml").write_text(
                f"""
[ledger]
url = "{ledger_url}"
{f"unavailable = {allowance}" if self.allowance_units else ""}
[credentials.main]
api = "youtube-v3"
project = "{PROJECT}"
key = "file:key"
endpoint = "{endpoint}"
{limits}
[jobs.{JOB}]
machines = "each"
fetch = "{FETCH}"
regions = {json.dumps(REGIONS)}
pages = {PAGES}
[jobs.{SHARED}]
fetch = "{FETCH}"
regions = {json.dumps(SHARED_REGIONS)}
pages = {PAGES}
[store]
url = "sqlite:///videos.db"
"""
            )
