"""What a charge did to the limits, as `quota explain ID` says it."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from quota.budget import charge_id, project_of
from quota.errors import UnknownCharge
from quota.reports.charge import explain_charge
from quota.terms.limits import DAY_MS, HOUR_MS
from quota.wording import charge_parts
from support.explaining import NOON_MS, World, text_of, units_in
from support.setup import ids_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quota.decision import Decision


@pytest.fixture
def world(any_ledger_url: str, tmp_path: Path, state_dir: Path) -> Iterator[World]:
    world = World(any_ledger_url, tmp_path)
    yield world
    world.session.close()


def test_explain_shows_each_limit_as_its_decision_saw_it(world: World) -> None:
    """Each limit around each charge is as its decision saw it, whatever was corrected later."""
    dice = random.Random("before and after")
    admitted: list[Decision] = []
    for _ in range(80):
        world.now_ms += dice.choice([0, 1, 60_000, HOUR_MS])
        method = dice.choice(["search.list", "videos.list"])
        decision = world.charge(method, job=dice.choice(["backfill", "trending"]), region="DE")
        if decision.admitted:
            admitted.append(decision)
            if dice.random() < 0.3:
                world.budget.settle(str(dice.choice(admitted).id), dice.choice([0, 3]))
    entries, views = world.log(), {limit.name: limit.view for limit in world.budget.limits}
    assert len(admitted) == len(entries) > 40
    for decision, entry in zip(admitted, entries, strict=True):
        x = explain_charge(world.session, str(decision.id))
        assert (x.charge, x.at_ms, x.charged_units) == (entry, decision.decided_at_ms, decision.cost_units)
        states = {state.name: state for state in decision.limits}
        assert {row.name for row in x.limits} == states.keys()
        assert {*states, *x.not_counted_by} == {"day", "pacific", "searches"}
        for row in x.limits:
            state, view = states[row.name], views[row.name]
            assert (row.before_units, row.after_units) == (state.used_units - state.cost_units, state.used_units)
            alone = [entry._replace(units=1)]
            assert units_in(view, alone, row.leaves_ms - 1), "it counts until then"
            assert not units_in(view, alone, row.leaves_ms)
            assert row.whole


@pytest.mark.usefixtures("ledger_place")
def test_a_charge_that_has_left_the_log_is_explained_from_the_past(world: World) -> None:
    assert world.charge("videos.list", units=300, job="first").admitted
    world.now_ms += HOUR_MS
    settled = str(world.charge("videos.list", units=500, job="second").id)
    world.budget.settle(settled, 40)
    world.pass_days(20)
    x = explain_charge(world.session, settled)
    assert (x.charged_units, x.charge.units, x.charge.settled) == (500, 40, True)
    assert {row.name: row.before_units for row in x.limits} == {"day": 300, "pacific": 300}


def test_explain_rejects_an_id_without_a_charge(world: World) -> None:
    assert world.charge("videos.list").admitted
    world.pass_days(40)
    with pytest.raises(UnknownCharge, match="any more: the ledger has single charges since"):
        explain_charge(world.session, f"{NOON_MS - DAY_MS}-0123456789abcdefghijklm")
    for wrong in ("", "x", "-", "1-", f"{world.now_ms + DAY_MS}-0", f"{world.now_ms}-00", "allowance-0000-1"):
        with pytest.raises(UnknownCharge, match="`quota log` lists the charges"):
            explain_charge(world.session, wrong)
    (oldest,) = ids_of(world.log()[:1])
    assert not all(row.whole for row in explain_charge(world.session, oldest).limits), "more was before it"


@pytest.mark.usefixtures("real_walls")
def test_explain_shows_a_draw_before_and_after_hand_over(ledger_url: str, tmp_path: Path, state_dir: Path) -> None:
    world = World(ledger_url, tmp_path, unavailable="unavailable = { max_cost = 5, allowance = 20 }")
    with world.away():
        drawn = str(world.budget.charge("videos.list", units=4, job="trending", region="DE").id)
    journal = project_of(world.budget).journal
    assert journal is not None
    with ExitStack() as another, ThreadPoolExecutor(1) as thread:  # which keeps this one from handing over
        thread.submit(lambda: another.enter_context(journal.locked())).result()
        x = explain_charge(world.session, drawn)
    assert (x.in_log, x.charged_units, x.charge.units, x.charge.region) == (False, None, 4, "DE")
    assert "It is owed" in text_of(charge_parts(x))
    drawn_ms = world.now_ms
    world.now_ms += HOUR_MS
    until_handed_over(world)
    x = explain_charge(world.session, drawn)
    assert (x.in_log, x.at_ms, x.charge.id[0], x.charge.units) == (True, drawn_ms, world.now_ms, 4)
    assert [row.before_units for row in x.limits] == [0, 0]
    handed = charge_id(world.now_ms, x.charge.key, 0)
    assert f"as charge {handed}" in text_of(charge_parts(x))
    assert explain_charge(world.session, handed).charge == x.charge
    world.session.close()


def until_handed_over(world: World) -> None:
    """A decision hands over what is owed, once a second."""
    ends_s = time.monotonic() + 30
    while world.budget.owed_units() and time.monotonic() < ends_s:
        assert world.budget.peek("videos.list").admitted
        time.sleep(0.05)
    assert not world.budget.owed_units()
