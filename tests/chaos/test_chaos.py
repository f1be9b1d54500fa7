"""Seconds of chaos: eight worker processes, three machines, one Redis that dies, hangs, forgets and comes back."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chaos.__main__ import run, table
from chaos.evidence import Event, Evidence, Life, gather
from chaos.plan import CLOCK_WRONG, LOSSES, LOSSY, MOVES, OWNER_LOST, STEADY, UPSTREAM, make_plan
from chaos.scene import FETCH, SHARED, SHARED_REGIONS, Scene
from chaos.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEED = 20_261_747
SECONDS = float(os.environ.get("QUOTA_TEST_SECONDS", "6"))
"""`make chaos` takes five minutes."""


def test_a_plan_is_its_seeds_alone_and_strikes_in_every_way() -> None:
    for seed in range(20):
        plan = make_plan(seed, SECONDS, losses=True)
        assert plan == make_plan(seed, SECONDS, losses=True)
        assert plan != make_plan(seed + 1, SECONDS, losses=True)
        assert all(step.at_s <= SECONDS for step in plan)
    long = {step.fault for step in make_plan(1, 120, losses=True)} - {""}
    assert long == {*STEADY, *LOSSY, *MOVES, *UPSTREAM, OWNER_LOST, CLOCK_WRONG, "worker-killed", "worker-stopped"}


# -- the same evidence with one thing wrong in it ----------------------------------------------------------------------


def _uncharged(evidence: Evidence) -> None:
    evidence.wire.append(replace(evidence.wire[0], call="nobody's"))


def _charged_late(evidence: Evidence) -> None:
    evidence.wire[0] = replace(evidence.wire[0], ms=evidence.wire[0].ms - 1_000)


def _not_put_back(evidence: Evidence) -> None:
    del evidence.course.log[0]


def _put_back_late(evidence: Evidence) -> None:
    evidence.course.log[0] = replace(evidence.course.log[0], ms=evidence.course.log[-1].ms)


def _charged_twice(evidence: Evidence) -> None:
    evidence.course.log += [replace(entry, seq=entry.seq + 1_000) for entry in evidence.course.log[-3:]]


def _crowded(evidence: Evidence) -> None:
    log = evidence.course.losses[0].log
    log[0] = replace(log[0], units=10_000)


def _overspent(evidence: Evidence) -> None:
    """As if a call that the ledger admitted had cost more than its limits have."""
    sent = next(a.arrival for a in evidence.attempts.values() if a.arrival is not None and a.draw is None)
    evidence.wire[evidence.wire.index(sent)] = replace(sent, units=2_000)


def _refused(evidence: Evidence) -> None:
    evidence.wire[-1] = replace(evidence.wire[-1], refused=True)


def _owed(evidence: Evidence) -> None:
    evidence.draws[-1] = replace(evidence.draws[-1], repaid=False)


def _handed_over_to_nobody(evidence: Evidence) -> None:
    tokens = {draw.token for draw in evidence.draws}
    evidence.course.log[:] = [entry for entry in evidence.course.log if entry.token not in tokens]


def _drawn_too_much(evidence: Evidence) -> None:
    evidence.draws[-1] = replace(evidence.draws[-1], units=1_000)


def _page_missing(evidence: Evidence) -> None:
    ranks = next(iter(evidence.stores["m1"].passes.values()))
    del ranks[10:20]


def _checkpoint_open(evidence: Evidence) -> None:
    evidence.stores["m2"].checkpoints[0] = ("US", 1, '{"token": "CAUQAA"}')


def _claims(evidence: Evidence) -> list[tuple[Life, Event]]:
    """Those that got the shared job's regions."""
    job = f"{FETCH}|{SHARED}"
    return [
        (life, event)
        for life, event in evidence.events("claim")
        if event["job"] == job and event["answered"] and not event["away"]
    ]


def _given_to_two(evidence: Evidence) -> None:
    life, event = _claims(evidence)[-1]
    other = next(other for other in evidence.lives if other.machine not in ("", life.machine))
    other.events.append({**event, "at_ms": event["at_ms"] + 1})


def _fetched_elsewhere(evidence: Evidence) -> None:
    owners = {id(life) for life, event in evidence.events("fetched") if event["region"] in SHARED_REGIONS}
    for life, event in _claims(evidence):
        if id(life) in owners:
            event["away"] = list(SHARED_REGIONS)


def _wrong_clock_believed(evidence: Evidence) -> None:
    """As if a worker that charged and sent had had a clock that is behind."""
    next(a for a in evidence.attempts.values() if a.arrival is not None).life.ahead_ms = -1


TAMPERED: tuple[tuple[Callable[[Evidence], None], str], ...] = (
    (_uncharged, "without a charge"),
    (_charged_late, "after they arrived"),
    (_not_put_back, "not in the log at the end"),
    (_put_back_late, "other times or units"),
    (_charged_twice, "charged more than once"),
    (_crowded, "no room for them"),
    (_overspent, "units were admitted in one window"),
    (_refused, "upstream refused 1"),
    (_owed, "not repaid"),
    (_handed_over_to_nobody, "draws are not in the log"),
    (_drawn_too_much, "drew too much"),
    (_page_missing, "not in the store as it was fetched"),
    (_given_to_two, "while they belonged to another"),
    (_fetched_elsewhere, "knew them to be another's"),
    (_wrong_clock_believed, "whose clock is behind were told"),
    (_checkpoint_open, "not all regions are complete"),
)


@pytest.mark.timeout(SECONDS + 240)
def test_every_request_was_charged_and_every_page_is_stored(tmp_path: Path) -> None:
    """Nothing reaches the wire uncharged, no window is overspent, what a ledger lost is put back, no page is lost.

    And none of the checks that say so passes whatever happened: each finds what was changed in the evidence for it.
    """
    seed = int(os.environ.get("QUOTA_TEST_SEED") or SEED)
    evidence, verdict = run(Scene(seed, SECONDS, tmp_path, LOSSES))
    assert not verdict.wrong, table(evidence.scene, verdict)
    for tamper, complaint in TAMPERED:
        tampered = gather(evidence.scene, copy.deepcopy(evidence.course))
        tamper(tampered)
        wrong = judge(tampered.again()).wrong
        assert any(complaint in what for what in wrong), (tamper.__name__, wrong, table(evidence.scene, verdict))
