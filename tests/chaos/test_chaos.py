"""Seconds of chaos: eight worker processes, three machines, one Redis that dies, hangs, forgets and comes back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.__main__ import PAGE, conclude, table
from chaos.course import Chaos
from chaos.judge import Event, Evidence, gather, judge
from chaos.scene import Scene

SEED = 20_261_747
SECONDS = float(os.environ.get("QUOTA_TEST_SECONDS", "4"))
"""`make chaos` takes five minutes."""


# -- the same evidence with one thing wrong in it ----------------------------------------------------------------------


def _admitted(evidence: Evidence, source: str = "ledger") -> Event:
    """The first decision that admitted a call."""
    return next(event for event in evidence.noted("decision") if event["source"] == source)


def _never_sent(evidence: Evidence) -> None:
    del evidence.wire[::2]


def _page_missing(evidence: Evidence) -> None:
    del next(iter(evidence.passes.values()))[10:20]


def _page_not_stored(evidence: Evidence) -> None:
    evidence.events.remove(next(e for e in evidence.noted("stored") if e["life"] not in evidence.course.killed))


TAMPERED: tuple[tuple[Callable[[Evidence], object], str], ...] = (
    (lambda e: e.wire[0].update(call="nobody's"), "without a charge"),
    (lambda e: e.wire[0].update(ms=e.wire[0]["ms"] - 1_000), "after they arrived"),
    (lambda e: e.wire[0].update(units=e.wire[0]["units"] + 1), "cost more than the log counts"),
    (lambda e: e.wire[-1].update(refused=True), "upstream refused 1"),
    (_never_sent, "charged and never sent"),
    (lambda e: e.log.pop(0), "not in the log at the end"),
    (lambda e: e.log[0].update(ms=e.log[-1]["ms"]), "have another time"),
    (lambda e: e.log.extend(e.log[-3:]), "in the log more than once"),
    (lambda e: _admitted(e).update(cost_units=10_000), "units were granted in one window"),
    (lambda e: _admitted(e, "allowance").update(cost_units=10_000), "are excused"),
    (lambda e: _admitted(e, "allowance").update(cost_units=10_000), "a machine drew more"),
    (lambda e: _admitted(e).update(ahead_ms=-7_200_000), "whose clock is hours behind"),
    (lambda e: _admitted(e).update(reason="clock"), "none was behind"),
    (_page_missing, "not in the store as they were fetched"),
    (_page_missing, "not whole"),
    (_page_not_stored, "and not stored"),
    (lambda e: e.events.append(e.noted("stored")[0]), "went back to a page"),
    (lambda e: e.pending.append(("m2", "US")), "not all regions are complete"),
    (lambda e: e.course.failed.append("w0-0 in process 0: KeyError"), "KeyError"),
)


@pytest.mark.timeout(SECONDS + 240)
def test_every_request_was_charged_and_every_page_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing reaches the wire uncharged, no window is overspent, what a ledger lost is put back, no page is lost.

    Each check also fails once its evidence is changed, and then the run keeps its folder.
    """
    scene = Scene(int(os.environ.get("QUOTA_TEST_SEED") or SEED), SECONDS, tmp_path / "run")
    scene.folder.mkdir()
    chaos = Chaos(scene)
    chaos.run()
    verdict, page = judge(gather(scene)), Path(shutil.copy(PAGE, tmp_path))
    assert not verdict.wrong, table(verdict)
    assert {*chaos.strikes, "worker killed"} <= chaos.course.faults.keys()
    assert "clock" in {event["reason"] for event in gather(scene).noted("decision")}
    for tamper, complaint in TAMPERED:
        tampered = gather(scene)
        tamper(tampered)
        failed = judge(tampered)
        assert any(complaint in what for what in failed.wrong), (complaint, failed.wrong, table(verdict))
        assert conclude(failed, page) == 1
        assert f"WRONG: {failed.wrong[0]}" in capsys.readouterr().out
    assert scene.folder.exists()
    assert conclude(verdict, page) == 0
    assert not scene.folder.exists()
