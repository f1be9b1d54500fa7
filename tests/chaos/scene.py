"""The numbers of a chaos run, and the folder where everything lies."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROJECT = "chaos"
KEY = "a-key-for-chaos"
MACHINES = ("m1", "m2", "m3")
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

JOB = "pages"
REGIONS = ("US", "DE", "FR", "IN")
PAGES = 5
PAGE_ITEMS = 10

CHEAP, CHEAP_UNITS = "videos.list", 1
DEAR, DEAR_UNITS = "captions.list", 50
SHORT_UNITS, SHORT_MS = 800, 20_000


class Limit(NamedTuple):
    """A sliding limit; `method` where it counts that one only."""

    units: int
    window_ms: int
    method: str = ""


@dataclass(frozen=True)
class Scene:
    """One run: its seed, how long faults strike, and its folder."""

    seed: int
    seconds: float
    folder: Path

    @property
    def allowance_units(self) -> int:
        """For each machine and day: so little that a machine may draw all of it in the outages of a run."""
        return 20 + math.ceil(self.seconds)

    @property
    def headroom_units(self) -> int:
        return len(MACHINES) * self.allowance_units

    @property
    def limits(self) -> dict[str, Limit]:
        """Together they keep charges flowing: the first two are full most of the time, and the third has less than both
        admit. The last has what the third can admit until two minutes after the faults, and not much more."""
        windows = math.ceil((self.seconds + 120) * 1_000 / SHORT_MS)
        return {
            "burst": Limit(90, 3_000, CHEAP),
            "dear": Limit(6 * DEAR_UNITS, SHORT_MS, DEAR),
            "short": Limit(SHORT_UNITS, SHORT_MS),
            "day": Limit(SHORT_UNITS * (windows + 1), 86_400_000),
        }

    @property
    def quota_units(self) -> int:
        """What the upstream grants: beyond it, it answers 403."""
        return self.limits["day"].units + self.headroom_units

    def configure(self, ledger_url: str, endpoint: str) -> None:
        """A folder for each machine: configuration, key, state folder and store."""
        (self.folder / "notes").mkdir()
        limits = "".join(
            f'[[credentials.main.limits]]\nname = "{name}"\nquota = {limit.units + self.headroom_units}\n'
            f'headroom = {self.headroom_units}\nwindow = "{limit.window_ms}ms"\n'
            + (f'methods = ["{limit.method}"]\n' if limit.method else "")
            for name, limit in self.limits.items()
        )
        text = f"""
[ledger]
url = "{ledger_url}"
unavailable = {{ max_cost = {CHEAP_UNITS}, allowance = {self.allowance_units}, machines = {len(MACHINES)} }}
[credentials.main]
api = "youtube-v3"
project = "{PROJECT}"
key = "file:key"
endpoint = "{endpoint}"
{limits}
[jobs.{JOB}]
machines = "each"
fetch = "chaos.worker:fetch"
regions = {json.dumps(REGIONS)}
pages = {PAGES}
[store]
url = "sqlite:///videos.db"
"""
        for machine in MACHINES:
            folder = self.folder / machine
            folder.mkdir()
            (folder / "key").write_text(KEY)
            (folder / "quota.toml").write_text(text)
            (folder / "ahead_ms").write_text("0")
