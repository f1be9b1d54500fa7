"""Half a minute of chaos: eight worker processes, three machines, one Redis that dies, hangs and comes back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from chaos.__main__ import SECONDS, run
from chaos.plan import LOSSES, LOSSY, STEADY, UPSTREAM, make_plan
from chaos.report import table

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20_261_121


def test_a_plan_is_its_seeds_alone_and_strikes_in_every_way() -> None:
    for seed in range(20):
        plan = make_plan(seed, SECONDS, losses=True)
        assert plan == make_plan(seed, SECONDS, losses=True)
        assert plan != make_plan(seed + 1, SECONDS, losses=True)
        assert all(step.at_s <= SECONDS for step in plan)
    long = {step.fault for step in make_plan(1, 120, losses=True)} - {""}
    assert long == {*STEADY, *LOSSY, *UPSTREAM, "worker-killed", "worker-stopped"}


@pytest.mark.timeout(3_600)
def test_what_reached_the_wire_was_charged_and_what_was_fetched_is_stored(tmp_path: Path) -> None:
    """Nothing reaches the wire uncharged, no window is overspent, no page is lost, every debt is repaid once."""
    seed = int(os.environ.get("QUOTA_TEST_SEED") or SEED)
    seconds = float(os.environ.get("QUOTA_TEST_SECONDS") or SECONDS)
    scene, verdict = run(seed, seconds, tmp_path, losses=LOSSES)
    print(table(scene, verdict))
    assert not verdict.wrong, table(scene, verdict)
