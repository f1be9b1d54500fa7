"""What a run says while it is under way: a line for each region, one a minute, and each decision if asked for."""

from __future__ import annotations

from typing import Any

import pytest

from quota.decision import Decision, LimitState
from quota.jobs.progress import Live, Watcher
from quota.jobs.store.checkpoints import Checkpoint
from quota.reports.runs import RegionOfRun


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def at(region: str, pages: int, items: int) -> Checkpoint:
    return Checkpoint("trending", region, pages=pages, items=items)


def decision(units: int, left: int, *, admitted: bool = True) -> Decision:
    limits = (LimitState("day", units, 0, 9_500, left),)
    reason: Any = "ok" if admitted else "limit"
    return Decision(
        admitted, "1-0", "ledger", "main", "p", "videos.list", units, reason, None, left, 0, None, limits, "full"
    )


def test_progress_reports_a_long_region_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Watcher("trending", clock=clock)
    lines.began([at("DE", 0, 0)], 1_000)
    for page in range(1, 26):
        clock.now_s += 6.0
        lines.decided(decision(100, 9_500 - page, admitted=False))  # a refusal spends nothing
        lines.decided(decision(1, 9_500 - page))
        lines.page(at("DE", page, page * 50))
    lines.ended(RegionOfRun("DE", "partial", pages=25, items=1_250))
    assert capsys.readouterr().err.splitlines() == [
        "trending DE: page 10 of 1,000, 500 items; 10 units, 9,490 left",
        "trending DE: page 20 of 1,000, 1,000 items; 20 units, 9,480 left",
        "trending DE: partial, 25 pages, 1,250 items",
    ]


def test_the_pages_to_go_of_a_resumed_region_are_those_that_it_lacked() -> None:
    live = Live("trending")
    live.began([at("DE", 2, 100), at("FR", 0, 0)], 4)
    for pages in (2, 3):  # the first step only finds ids
        live.page(at("DE", pages, 150))
    live.ended(RegionOfRun("DE", "done", pages=1))
    assert (live.progress.tasks[0].completed, live.progress.tasks[0].total) == (1, 5)
