"""A call is charged the most that it may cost, and settled by its true cost: once, and never lost."""

from __future__ import annotations

import asyncio
import io
import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import quota
from quota.cli.output import render_parts
from quota.dashboard.app import Dashboard
from quota.reports.metrics import of_status
from quota.reports.refusal import explain_refusal
from quota.reports.spending import ChargeExplained, explain_charge
from quota.reports.status import RESERVED_MS, read_status
from quota.rules.spent import Spent as Entry
from quota.session import Session
from quota.settings.load import load_settings
from quota.wording import Line, charge_parts, refusal_parts, status_parts
from support.processes import Run
from support.setup import charges_at

NOW_MS = 1_795_255_200_000

MODEL = """
api = "model"
source = "https://model.example/limits"
read_on = 2026-11-21
[buckets.tokens]
quota = 1_000_000
resets = "24h"
[buckets.requests]
quota = 1_000
resets = "24h"
[default]
get = 1
other = 5
[methods]
chat = 4_096
talk = [{{ reserve = {{ default = 900 }} }}, {{ units = 1, bucket = "requests" }}]
models = {{ units = 1, bucket = "requests" }}
ping = 0
"""

CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "model.toml"
project = "{project}"
limits = [
    {{ name = "day", units = {units}, window = "24h" }},
    {{ name = "calls", units = 1_000, window = "24h", count = "calls" }},
]
"""

projects = count()


def lines(explained: ChargeExplained) -> list[Line]:
    return [part for part in charge_parts(explained) if isinstance(part, Line)]


class World:
    """Sessions of a configuration, under a clock that the test moves."""

    def __init__(self, url: str, folder: Path) -> None:
        self.now_ms = NOW_MS
        self.config = folder / "quota.toml"
        (folder / "model.toml").write_text(MODEL.format())
        self.project = f"p{next(projects)}"  # what this process has told of others is not of this one
        self.config.write_text(CONFIG.format(url=url, units=10_000, project=self.project))
        self.session = Session(load_settings(self.config), clock=lambda: self.now_ms)

    @property
    def budget(self) -> quota.Budget:
        return self.session.budget()

    def log(self) -> list[Entry]:
        return charges_at(self.session.ledger, self.project)

    def used(self) -> int:
        return self.budget.usage()[0].used_units

    def reserved(self) -> tuple[int, ...]:
        """Of each limit, by the status."""
        return tuple(row.reserved_units for row in read_status(self.session).credentials[0].limits)


@pytest.fixture
def world(ledger_url: str, state_dir: Path, tmp_path: Path) -> Any:
    made = World(ledger_url, tmp_path)
    yield made
    made.session.close()


@pytest.mark.parametrize("used", [0, 8_000, 60_000])
def test_a_settled_call_counts_what_it_used(world: World, used: int) -> None:
    with world.budget.spend("chat", units=8_000, job="nightly") as call:
        assert (call.admitted, call.cost_units, call.remaining_units) == (True, 8_000, 2_000)
        assert (world.used(), world.reserved()) == (8_000, (8_000, 0))
        call.settle(used)
        assert (world.used(), world.reserved()) == (used, (0, 0))
    assert [(f"{e.id[0]}-{e.key}", e.units, e.charged_units, e.settled, e.job) for e in world.log()] == [
        (call.id, used, 8_000, True, "nightly")
    ]


def test_an_unsettled_reservation_stays(world: World) -> None:
    with pytest.raises(ZeroDivisionError), world.budget.spend("chat", units=3_000):
        raise ZeroDivisionError
    assert (world.used(), world.reserved()) == (3_000, (3_000, 0))
    with world.budget.spend("chat", units=1_000) as late:
        pass
    late.settle(10)
    assert (world.used(), world.reserved()) == (3_010, (3_000, 0))
    world.now_ms += RESERVED_MS
    assert (world.used(), world.reserved()) == (3_010, (0, 0)), "an hour later it is spent"


def test_a_call_is_settled_once(world: World) -> None:
    with world.budget.spend("chat", units=3_000) as call:
        call.settle(500)
        call.settle(500)
        with pytest.raises(quota.UsageError) as refused:
            call.settle(501)
    assert str(refused.value) == (
        "this call of chat was settled with 500 units already; `budget.settle(call.id, units)` corrects that"
    )
    assert world.used() == 500
    world.budget.settle(call.id or "", 501)
    assert world.used() == 501
    with world.budget.spend("ping") as free:
        free.settle(0)
        with pytest.raises(quota.UsageError, match="this call of ping is free: there is no charge to settle"):
            free.settle(1)


def test_more_than_was_reserved_counts_in_full_and_is_logged_once_a_day(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def over(method: str, units: int) -> None:
        with world.budget.spend(method, units=units) as call:
            if method == "models":
                world.budget.refund(call.id or "")
            call.settle(units + 1)

    with caplog.at_level(logging.WARNING, "quota"):
        for method in ("chat", "chat", "models", "models"):
            over(method, 100)
        warnings = [record.getMessage() for record in caplog.records]
        assert warnings == [
            f"reserved_too_little project={world.project} method={method} reserved=100 used=101: it counts in full, "
            "and a limit may be exceeded; reserve more"
            for method in ("chat", "models")
        ]
        world.now_ms += 24 * 3_600_000
        over("chat", 100)
    assert len(caplog.records) == 3


def test_a_price_is_no_reservation(world: World) -> None:
    """A block at the book's price, a decorated function and `charge` reserve nothing."""

    @world.budget.spend("chat", units=10)
    def decorated() -> None: ...

    decorated()
    with world.budget.spend("chat") as call:
        pass
    world.budget.charge("chat", units=100)
    assert (world.used(), world.reserved()) == (4_206, (0, 0))
    call.settle(1)
    assert world.used() == 111


def test_reservations_work_on_an_event_loop(world: World, run: Run) -> None:
    async def main() -> None:
        async with quota.open_async(world.config) as q:
            budget = q.budget()

            async def reservation(used: int | None) -> None:
                async with budget.spend("chat", units=1_000) as call:
                    assert call.cost_units == 1_000
                    if used is not None:
                        await call.settle(used)

            await asyncio.gather(*map(reservation, (None, 10, 2_000, 1_000)))
            with pytest.raises(ZeroDivisionError):
                async with budget.spend("chat", units=500) as call:
                    raise ZeroDivisionError
            with pytest.raises(quota.UsageError):
                await call.settle(-1)
            await call.settle(5)
            await call.settle(5)
            with pytest.raises(quota.UsageError, match="settled with 5 units already"):
                await call.settle(6)

            @budget.spend("chat", units=7)
            async def decorated() -> None: ...

            await decorated()
            assert (await budget.usage())[0].used_units == 1_000 + 10 + 2_000 + 1_000 + 5 + 7

    run(main())
    with quota.open(world.config) as q:
        rows = read_status(q).credentials[0].limits
        assert [row.reserved_units for row in rows] == [1_000, 0]


def test_a_price_that_is_a_bound_is_reserved_whoever_charges_it(world: World) -> None:
    first = world.budget.charge("talk")
    several = world.budget.charge_many(["talk", ("talk", 300), "chat"])
    assert (world.used(), world.reserved()) == (900 + 900 + 300 + 4_096, (2_100, 0))
    assert [entry.reserved_units for entry in world.log()] == [900, 0, 900, 0, 300, 0, 0]
    with world.budget.spend("talk") as call:
        call.settle(20)
    world.budget.settle(first.id or "", 30)
    world.budget.refund(several[1].id or "")
    assert (world.used(), world.reserved()) == (20 + 30 + 900 + 4_096, (900, 0))
    assert world.budget.usage()[1].used_units == 4, "a call counts as one, whatever it cost"
    assert world.budget.peek("talk").admitted
    assert len(world.log()) == 9


def test_the_status_and_the_page_show_reserved_units(world: World) -> None:
    with world.budget.spend("chat", units=3_000):
        pass
    with world.budget.spend("chat", units=2_000) as call:
        call.settle(100)
    status = read_status(world.session)
    day = status.as_json()["credentials"][0]["limits"][0]  # type: ignore[index]
    assert (day["used_units"], day["reserved_units"]) == (3_100, 3_000)
    exported = {
        sample.labels.get("limit"): sample.value
        for sample in of_status(status, world.project)
        if "reserved" in sample.family
    }
    assert exported == {"day": 3_000, "calls": 0}
    shown = io.StringIO()
    Console(file=shown, width=200).print(render_parts(status_parts(status)))
    assert "day: includes 3,000 units reserved; no answer has shown the cost of these calls" in shown.getvalue()
    reserved, settled = (explain_charge(world.session, f"{entry.id[0]}-{entry.key}") for entry in world.log())
    assert "It is reserved: the cost of the call is not known yet" in [line.text for line in lines(reserved)]
    assert "It was settled: it counts 100 units now, 2,000 before" in [line.text for line in lines(settled)]
    dashboard = Dashboard(world.session)
    dashboard.now.get(60)
    html = dashboard.site.overview(dashboard.state())
    assert "of 10,000 used, 3,000 of them reserved" in html
    assert not world.budget.charge("chat", units=9_000).admitted
    world.budget.hand_over_refusals()
    notes = [part.text for part in refusal_parts(explain_refusal(world.session)) if isinstance(part, Line)]
    assert "now 3,000 units only reserved; if an answer shows less, the call fits sooner" in notes
