"""A quarter of a minute of chaos: eight worker processes, three machines, one Redis that dies, hangs and comes back."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chaos.__main__ import run
from chaos.evidence import Event, Evidence, Life, gather
from chaos.plan import CLOCK_WRONG, LOSSES, LOSSY, MOVES, OWNER_LOST, STEADY, UPSTREAM, make_plan
from chaos.report import table
from chaos.scene import FETCH, SHARED, SHARED_REGIONS, Scene
from chaos.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 20_261_747
SECONDS = float(os.environ.get("QUOTA_TEST_SECONDS", "12"))
"""With this seed, time for every kind of fault that a minute has; `make chaos` takes five minutes."""


def test_a_plan_is_its_seeds_alone_and_strikes_in_every_way() -> None:
    for seed in range(20):
        plan = make_plan(seed, SECONDS, losses=True)
        assert plan == make_plan(seed, SECONDS, losses=True)
        assert plan != make_plan(seed + 1, SECONDS, losses=True)
        assert all(step.at_s <= SECONDS for step in plan)
    long = {step.fault for step in make_plan(1, 120, losses=True)} - {""}
    assert long == {*STEADY, *LOSSY, *MOVES, *UPSTREAM, OWNER_LOST, CLOCK_WRONG, "worker-killed", "worker-stopped"}


# -- the same evidence with one thing wrong in it ----------------------------------------------------------------------


def _uncharged(found: Evidence) -> None:
    found.wire.append(replace(found.wire[0], call="nobody's"))


def _charged_late(found: Evidence) -> None:
    found.wire[0] = replace(found.wire[0], ms=found.wire[0].ms - 1_000)


def _lost(found: Evidence) -> None:
    del found.course.log[len(found.course.log) // 2 :]


def _charged_twice(found: Evidence) -> None:
    found.course.log += [replace(entry, seq=entry.seq + 1_000) for entry in found.course.log[-3:]]


def _crowded(found: Evidence) -> None:
    last = found.course.log[-1]
    found.course.log.append(replace(last, seq=last.seq + 1, units=1_000))


def _refused(found: Evidence) -> None:
    found.wire[-1] = replace(found.wire[-1], refused=True)


def _owed(found: Evidence) -> None:
    found.draws[-1] = replace(found.draws[-1], repaid=False)


def _drawn_too_much(found: Evidence) -> None:
    found.draws[-1] = replace(found.draws[-1], units=1_000)


def _page_missing(found: Evidence) -> None:
    ranks = next(iter(found.stores["m1"].passes.values()))
    del ranks[10:20]


def _checkpoint_open(found: Evidence) -> None:
    found.stores["m2"].checkpoints[0] = ("US", 1, '{"token": "CAUQAA"}')


def _claims(found: Evidence) -> list[tuple[Life, Event]]:
    """Those that got the shared job's regions."""
    job = f"{FETCH}|{SHARED}"
    return [
        (life, event)
        for life, event in found.events("claim")
        if event["job"] == job and event["answered"] and not event["away"]
    ]


def _given_to_two(found: Evidence) -> None:
    life, event = _claims(found)[-1]
    other = next(other for other in found.lives if other.machine not in ("", life.machine))
    other.events.append({**event, "at_ms": event["at_ms"] + 1})


def _fetched_elsewhere(found: Evidence) -> None:
    owners = {id(life) for life, event in found.events("fetched") if event["region"] in SHARED_REGIONS}
    for life, event in _claims(found):
        if id(life) in owners:
            event["away"] = list(SHARED_REGIONS)


def _wrong_clock_believed(found: Evidence) -> None:
    """As if a worker that charged and sent had had a wrong clock."""
    next(a for a in found.attempts.values() if a.arrival is not None).life.wrong_clock = True


def _first_try_late(found: Evidence) -> None:
    """As if a loss had taken what a retry was told, and the first try had arrived after the request."""
    sent = next(a for a in found.attempts.values() if a.arrival is not None and a.draw is None)
    first = sent.entries[0]
    found.course.losses[-1].log.append(replace(first, ms=first.ms + 60_000))


TAMPERED: tuple[tuple[Callable[[Evidence], None], str], ...] = (
    (_uncharged, "without a charge"),
    (_charged_late, "after they arrived"),
    (_lost, "in no log"),
    (_charged_twice, "charged more than once"),
    (_crowded, "no room for them"),
    (_refused, "upstream refused 1"),
    (_owed, "not repaid"),
    (_drawn_too_much, "drew too much"),
    (_page_missing, "not in the store as it was fetched"),
    (_given_to_two, "while they belonged to another"),
    (_fetched_elsewhere, "knew them to be another's"),
    (_wrong_clock_believed, "with a wrong clock were told"),
    (_checkpoint_open, "not all regions are complete"),
)


@pytest.mark.timeout(SECONDS + 240)
def test_what_reached_the_wire_was_charged_and_what_was_fetched_is_stored(tmp_path: Path) -> None:
    """Nothing reaches the wire uncharged, no window is overspent, no page is lost, every debt is repaid once.

    And none of the checks that say so passes whatever happened: each finds what was changed in the evidence for it.
    """
    seed = int(os.environ.get("QUOTA_TEST_SEED") or SEED)
    evidence = run(Scene(seed, SECONDS, tmp_path, LOSSES))
    verdict = judge(evidence)
    assert not verdict.wrong, table(evidence.scene, verdict)
    for tamper, said in TAMPERED:
        tampered = gather(evidence.scene, copy.deepcopy(evidence.course))
        tamper(tampered)
        wrong = judge(tampered.again()).wrong
        assert any(said in what for what in wrong), (tamper.__name__, wrong, table(evidence.scene, verdict))
    tampered = gather(evidence.scene, copy.deepcopy(evidence.course))
    _first_try_late(tampered)
    assert not any("after they arrived" in what for what in judge(tampered.again()).wrong), (
        "one unit too many, not too few"
    )
