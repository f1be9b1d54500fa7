"""Many processes reserve and settle at once. Reserved and used units never exceed the limit, except by the cost of a
call beyond its bound. In the end the ledger has what upstream said."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from quota.session import Session
from quota.settings.load import load_settings
from support.http_clients import Httpx, Requests
from support.model import Model
from support.processes import Children
from support.reserving import awaiting, blocking
from support.setup import charges_at

BOOK = """
api = "model"
source = "https://model.example/limits"
read_on = 2026-11-21
hosts = ["{host}"]
routes = {{ "POST /v1/chat" = "chat" }}
answers = {{ units = {{ json = "/usage/total_tokens" }} }}
[buckets.tokens]
quota = 1_000_000
resets = "24h"
[default]
get = 1
other = 5
[methods]
chat = {{ reserve = {{ json = "/max_tokens", default = 4_096, bytes_per_unit = 3 }} }}
"""

CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "model.toml"
project = "at-once"
limits = [{{ name = "day", units = {units}, window = "24h" }}]
"""

SAYS = ("json", "gzip", "events", "no-done")
ROWS: Any = [
    *((blocking, Requests, n) for n in range(3)),
    *((blocking, Httpx, n) for n in range(3, 6)),
    (awaiting, "httpx", 6),
    (awaiting, "aiohttp", 7),
]
CALLS = int(os.environ.get("QUOTA_TEST_CALLS", "12"))
UNITS = 3_000 * CALLS
"""Less than all calls cost: some are refused."""


def work(target: Any, *row: Any) -> Any:
    return target(*row)


def test_reserved_and_used_units_never_exceed_the_limit(state_dir: Path, tmp_path: Path, ledger_url: str) -> None:
    config = tmp_path / "quota.toml"
    with Model() as model:
        (tmp_path / "model.toml").write_text(BOOK.format(host=model.host))
        config.write_text(CONFIG.format(url=ledger_url, units=UNITS))
        session = Session(load_settings(config))
        rows = [(target, config, model.url, client, seed, CALLS) for target, client, seed in ROWS]
        with Children(work, *rows, start="anew") as children:
            while any(process.is_alive() for process in children.processes):
                used = session.budget().usage()[0].used_units
                # What arrived before the next line may cost more than it reserved, and was settled or will be.
                beyond = sum(
                    max(0, each["use"] - each["max_tokens"]) for each in list(model.asked) if each["how"] in SAYS
                )
                assert used <= UNITS + beyond
            refused = sum(children.answers())
        log = charges_at(session.ledger, "at-once")
        session.close()

    admitted = CALLS * len(ROWS) - refused
    assert (len(model.asked), len(log)) == (admitted, admitted), sorted(
        (each.units, each.charged_units) for each in log
    )
    assert 0 < refused < CALLS * len(ROWS) // 2
    # Each call has a bound that tells it from most others; what it counts is what upstream said, or else that bound.
    uses = Counter((each["use"] if each["how"] in SAYS else None) for each in model.asked)
    held = Counter(entry.units if entry.settled else None for entry in log)
    assert held == uses
    bounds = sorted(each["max_tokens"] for each in model.asked if each["how"] not in SAYS)
    kept = sorted(entry.units for entry in log if not entry.settled)
    assert all(bound < units <= bound + 40 for bound, units in zip(bounds, kept, strict=True))
    assert all(entry.units == entry.charged_units == entry.reserved_units for entry in log if not entry.settled)
