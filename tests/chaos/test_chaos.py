"""Seconds of chaos: eight worker processes, three machines, one Redis that dies, hangs, forgets and comes back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaos.__main__ import PAGE, conclude, table
from chaos.course import Chaos
from chaos.judge import Event, Evidence, gather, judge
from chaos.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 20_261_747
SECONDS = float(os.environ.get("QUOTA_TEST_SECONDS", "4"))
"""`make chaos` takes five minutes."""


# -- the same evidence with one thing wrong in it ----------------------------------------------------------------------


def _admitted(evidence: Evidence, source: str = "ledger") -> Event:
    """The first decision that admitted a call."""
    return next(event for event in evidence.noted("decision") if event["source"] == source)


def _uncharged(evidence: Evidence) -> None:
    evidence.wire[0]["call"] = "nobody's"


def _charged_late(evidence: Evidence) -> None:
    evidence.wire[0]["ms"] -= 1_000


def _dearer(evidence: Evidence) -> None:
    evidence.wire[0]["units"] += 1


def _refused(evidence: Evidence) -> None:
    evidence.wire[-1]["refused"] = True


def _never_sent(evidence: Evidence) -> None:
    del evidence.wire[::2]


def _not_put_back(evidence: Evidence) -> None:
    del evidence.log[0]


def _put_back_late(evidence: Evidence) -> None:
    evidence.log[0]["ms"] = evidence.log[-1]["ms"]


def _charged_twice(evidence: Evidence) -> None:
    evidence.log += evidence.log[-3:]


def _overspent(evidence: Evidence) -> None:
    _admitted(evidence)["cost_units"] = 10_000


def _overdrawn(evidence: Evidence) -> None:
    _admitted(evidence, "allowance")["cost_units"] = 10_000


def _behind_and_granted(evidence: Evidence) -> None:
    _admitted(evidence)["ahead_ms"] = -7_200_000


def _right_and_refused(evidence: Evidence) -> None:
    _admitted(evidence)["reason"] = "clock"


def _page_missing(evidence: Evidence) -> None:
    del next(iter(evidence.passes.values()))[10:20]


def _page_not_stored(evidence: Evidence) -> None:
    evidence.events.remove(next(e for e in evidence.noted("stored") if e["life"] not in evidence.course.killed))


def _went_back(evidence: Evidence) -> None:
    evidence.events.append(evidence.noted("stored")[0])


def _not_finished(evidence: Evidence) -> None:
    evidence.pending.append(("m2", "US"))


def _ended_badly(evidence: Evidence) -> None:
    evidence.course.failed.append("w0-0 in process 0: KeyError")


TAMPERED: tuple[tuple[Callable[[Evidence], None], str], ...] = (
    (_uncharged, "without a charge"),
    (_charged_late, "after they arrived"),
    (_dearer, "cost more than the log counts"),
    (_refused, "upstream refused 1"),
    (_never_sent, "charged and never sent"),
    (_not_put_back, "not in the log at the end"),
    (_put_back_late, "have another time"),
    (_charged_twice, "in the log more than once"),
    (_overspent, "units were granted in one window"),
    (_overdrawn, "are excused"),
    (_overdrawn, "a machine drew more"),
    (_behind_and_granted, "whose clock is hours behind"),
    (_right_and_refused, "none was behind"),
    (_page_missing, "not in the store as they were fetched"),
    (_page_missing, "not whole"),
    (_page_not_stored, "and not stored"),
    (_went_back, "went back to a page"),
    (_not_finished, "not all regions are complete"),
    (_ended_badly, "KeyError"),
)


@pytest.mark.timeout(SECONDS + 240)
def test_every_request_was_charged_and_every_page_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing reaches the wire uncharged, no window is overspent, what a ledger lost is put back, no page is lost.

    And none of the checks that say so passes whatever happened: each finds what was changed in the evidence for it, and
    then the run keeps its folder.
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
        assert any(complaint in what for what in failed.wrong), (tamper.__name__, failed.wrong, table(verdict))
        assert conclude(failed, page) == 1
        assert f"WRONG: {failed.wrong[0]}" in capsys.readouterr().out
    assert scene.folder.exists()
    assert conclude(verdict, page) == 0
    assert not scene.folder.exists()
