"""The page over a house with everything in it: several jobs, hostile names, refusals, runs, an upstream that closed."""

from __future__ import annotations

from pathlib import Path

import quota
from quota.common.clock import host_clock, utc
from quota.dashboard.app import Dashboard
from quota.jobs.emulator import Emulator
from quota.jobs.runner import run_job
from quota.terms.limits import DAY_MS, HOUR_MS, MINUTE_MS
from support.commands import Quota
from support.web import Served

SCRIPT = "<script>alert(1)</script>"
LONG = "nightly-" + "x" * 56
RIGHT_TO_LEFT = "שלום"

HOUSE = f"""
[ledger]
url = "sqlite:///ledger.db"
[store]
url = "sqlite:///videos.db"

[credentials.main]
api = "youtube-v3"
project = "video-research"
key = "env:KEY"
endpoint = "ENDPOINT"
[[credentials.main.limits]]
name = "day"
units = 2000
window = "24h"
[[credentials.main.limits]]
name = "pacific-day"
units = 2500
window = {{ calendar = "day", zone = "America/Los_Angeles" }}
[[credentials.main.limits]]
name = "searches"
units = 40
methods = ["search.list"]
count = "calls"
window = {{ calendar = "month", day = {utc(host_clock() - 15 * DAY_MS).day}, zone = "UTC" }}
[[credentials.main.limits]]
name = "trial"
units = 700
window = "24h"
jobs = ["{LONG}"]
shadow = true

[credentials.partner]
api = "youtube-v3"
project = "partner-data"
key = "env:KEY"
limits = [{{ name = "hour", units = 300, window = "1h" }}]

[jobs."{SCRIPT}"]
credential = "main"
fetch = "trending"
regions = ["US", "DE"]
pages = 2
schedule = "0 */6 * * *"
[jobs."{LONG}"]
credential = "main"
fetch = "charts:fetch"
regions = ["{RIGHT_TO_LEFT}"]
pages = 1
[jobs.charts]
credential = "partner"
fetch = "charts:fetch"
regions = ["<b>", "{RIGHT_TO_LEFT}"]
pages = 1
"""

CHARTS = "def fetch(client, region, cursor): ..."
"""The fetch function of two jobs, for `charts.py`: their regions may have any names."""


def furnish(folder: Path, upstream: Emulator) -> Quota:
    """A house in which all states are seen: `main` is nearly full, `partner` closed by upstream."""
    quota_command = Quota(folder)
    quota_command.env["KEY"] = "a-key-for-tests"
    path = quota_command.configure(HOUSE.replace("ENDPOINT", upstream.address))
    (folder / "charts.py").write_text(CHARTS)
    now_ms = host_clock()
    clock_ms = now_ms - 20 * DAY_MS

    with quota.open(path, clock=lambda: clock_ms) as session:
        main = session.budget("main")
        for hours in (20 * 24, 60, 30, 20, 11, 3, 1):
            clock_ms = now_ms - hours * HOUR_MS
            for region in ("US", "DE", "<b>"):
                main.charge("videos.list", units=90, job=SCRIPT, region=region)
            main.charge("search.list", job=LONG, region=RIGHT_TO_LEFT)
            if hours == 60:
                main.charge("videos.list", units=1_990, job=LONG, region=RIGHT_TO_LEFT)  # refused, days ago
        for _ in range(12):
            clock_ms += MINUTE_MS
            main.charge("search.list", job=LONG, region=RIGHT_TO_LEFT)
        clock_ms = now_ms - MINUTE_MS
        session.budget("partner").charge("videos.list", job="charts")
    with quota.open(path) as session:
        run_job(session, SCRIPT)
        run_job(session, LONG)
        partner = session.budget("partner")
        partner.exhaust("units", now_ms, now_ms + 3 * HOUR_MS, "quotaExceeded: <i>used up</i>", "a-machine")
        partner.charge("videos.list", job="charts")
    return quota_command


def overview(dashboard: Dashboard) -> str:
    """The first page, from parts that were all read."""
    for kept in dashboard.parts:
        kept.get(60)
    return dashboard.site.overview(dashboard.state())


def serve(house: Quota, *options: str) -> Served:
    """`quota dashboard` in a process of its own, on a free port."""
    return Served(house.start("dashboard", "--listen", "127.0.0.1:0", *options))
