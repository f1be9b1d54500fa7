"""Calls that were admitted without an answer of the ledger: in the end the ledger counts each of them once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from quota.budget import project_of
from quota.clients.metering import Meter
from quota.common.clock import moment, rfc3339
from quota.deciding import outlook
from quota.deciding.allowance import Allowance, draw, hand_over, say_used
from quota.errors import LedgerError
from quota.journal.journal import Journal
from quota.ledger.factory import Identity
from quota.ledger.log import ANY
from quota.rules.entry import START, Entry
from quota.terms.limits import DAY_MS, SLACK_MS
from support.losses import Fault, FaultyLog, Machine, Site
from support.proxy import Proxy
from support.setup import charges_at, limit

ALLOWANCE = Allowance(max_cost_units=5, allowance_units=20)


@contextmanager
def cut(line: Proxy) -> Iterator[None]:
    """Cut the line: nothing that is sent arrives."""
    line.fail("drop-request", times=1_000, match=b"")
    yield
    line.heal()


def units_of(machine: Machine) -> list[int]:
    return [charge.units for charge in charges_at(machine.ledger)]


@pytest.mark.usefixtures("real_walls")
def test_the_allowance_admits_nothing_while_a_log_is_rebuilt(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a look ends, though the rebuilding does not."""
    machine = site.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    budget.charge("videos.list")
    machine.ledger.fence("p", machine.ledger.begin("p").epoch, "of somebody else")
    decision = budget.charge("videos.list")
    assert (decision.admitted, decision.reason, decision.source, budget.owed_units()) == (False, "counting", None, 0)
    monkeypatch.setattr(outlook, "LOOK_WITHIN_S", 0.05)
    with pytest.raises(LedgerError, match="run again to continue"):
        budget.usage()


@pytest.mark.parametrize("lost", [False, True], ids=["the log stays", "the log is lost"])
def test_a_draw_whose_first_try_did_reach_the_ledger_counts_once(far: Site, line: Proxy, lost: bool) -> None:
    """Its process had no answer and has ended. The process that hands it over finds it by its key, and notes it.
    Another machine has settled it meanwhile."""
    machine = far.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    budget.peek("videos.list")
    line.fail("drop-reply", times=1_000)
    drawn = budget.charge("videos.list", units=3)
    assert drawn.source == "allowance"
    line.heal()
    assert units_of(machine) == [3]
    far.machine("theirs").budget(limit(100)).settle(drawn.id or "", 2)
    assert machine.budget(limit(100)).usage()[0].used_units == 2
    if lost:
        far.empty()
    assert machine.budget(limit(100)).usage()[0].used_units == 2
    assert units_of(machine) == [2]


def test_a_refusal_shows_what_was_drawn_and_when_it_frees(far: Site, line: Proxy) -> None:
    budget = far.machine().budget(limit(100), allowance=ALLOWANCE)
    with cut(line):
        first = budget.charge("videos.list", units=5)
        far.now_ms += 1_000
        assert all(budget.charge("videos.list", units=5).admitted for _ in range(3))
        refused = budget.charge("videos.list", units=5)
        assert "more from" not in budget.charge("videos.list", units=6).sentence(), "it costs more than max_cost"
    frees_ms = first.decided_at_ms + DAY_MS
    drawn = {"max_cost_units": 5, "allowance_units": 20, "drawn_units": 20, "remaining_units": 0}
    assert refused.as_json()["allowance"] == {**drawn, "frees_at": rfc3339(frees_ms)}
    assert f"20 of 20 units drawn, 0 left, more from {moment(frees_ms)}" in refused.sentence()


def test_a_draw_that_was_handed_over_has_the_units_that_it_was_settled_to_last(far: Site, line: Proxy) -> None:
    here, elsewhere = far.machine().budget(limit(100), allowance=ALLOWANCE), far.machine().budget(limit(100))
    with cut(line):
        drawn = here.charge("videos.list", units=5).id
    here.usage()  # hands it over
    here.refund(drawn)
    elsewhere.settle(drawn, 4)
    far.machine("theirs").budget(limit(100)).refund(drawn)
    elsewhere.settle(drawn, 4)
    assert [budget.usage()[0].used_units for budget in (here, elsewhere)] == [4, 4]


def test_no_call_of_a_bucket_that_upstream_has_closed_is_drawn(far: Site, line: Proxy) -> None:
    """One process of the machine heard it in the outage, by clocks behind or ahead. The ledger learns it afterwards."""
    machine, said = far.machine(), b'{"error": {"errors": [{"reason": "quotaExceeded"}]}}'
    machine.skew_ms = -60_000
    meter = Meter(machine.budget(limit(100), allowance=ALLOWANCE))
    charged = meter.attempt("videos.list", "GET")
    with cut(line):
        far.now_ms += DAY_MS
        meter.attempt("videos.list", "GET").answered(403, said)
        far.now_ms -= DAY_MS - 1
        charged.answered(403, said)
        with suppress(LedgerError):
            meter.budget.exhaust("units", far.now_ms, far.now_ms + 1, "a repeat")
        refused = machine.budget(limit(100), allowance=ALLOWANCE).charge("videos.list")
        assert (refused.reason, refused.refused_by, refused.detail == "a repeat") == ("exhausted", "units", False)
    machine.budget(limit(100)).usage()
    assert far.machine("theirs").budget(limit(100)).charge("videos.list").retry_at_ms == refused.retry_at_ms
    far.now_ms = refused.retry_at_ms or 0
    with cut(line):
        assert machine.budget(limit(100), allowance=ALLOWANCE).charge("videos.list").source == "allowance"


def test_a_ledger_that_is_slow_to_fail_is_asked_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another process holds, or sentinels that are silent: the decision must end within a second."""
    monkeypatch.setattr("quota.deciding.project.ASK_AGAIN_WITHIN_S", 0)
    project = project_of(budget := site.machine().budget(limit(100)))
    budget.peek("videos.list")
    project.log = log = FaultyLog(project.log, {1: Fault(is_lost=True)}, "append")
    assert (budget.charge("videos.list").reason, log.calls) == ("ledger-unavailable", ["append"])


def test_a_copy_of_a_log_gets_no_draws_of_the_log(site: Site) -> None:
    """Both have one epoch, but the copy lacks what was charged since."""
    machine = site.machine()
    project = project_of(budget := machine.budget(limit(100)))
    budget.charge("videos.list")
    copy = site.place.copy()
    budget.charge("videos.list")
    call = Entry(START, 3, "units", "videos.list", "", "", project.keys.next())
    assert draw(project, ALLOWANCE, [call], "no answer", read=project.mark(), commit=True) == 17
    site.restore(copy)
    copied = project_of(budget := machine.budget(limit(100)))
    copied.journal = Journal(machine.folder, Identity("copy", "p"), keep_ms=DAY_MS)
    budget.charge("videos.list", units=2)
    hand_over(copied)
    assert units_of(machine) == [1, 2]


def test_a_draw_whose_hand_over_was_not_noted_counts_once_though_it_has_left_the_log(site: Site) -> None:
    machine = site.machine()
    project = project_of(machine.budget(limit(100)))
    call = Entry(START, 3, "units", "videos.list", "", "", project.keys.next())
    assert draw(project, ALLOWANCE, [call], "no answer", read=project.mark(), commit=True) == 17
    (file,) = machine.folder.rglob("draws")
    drawn = file.read_bytes()
    hand_over(project)
    file.write_bytes(drawn)  # as if its process was killed before
    site.now_ms += 2 * DAY_MS + SLACK_MS
    machine.ledger.trim("p", site.now_ms)
    assert machine.budget(limit(100)).usage()[0].used_units == 0


def test_a_hand_over_that_arrives_late_hides_no_later_draw(site: Site) -> None:
    """It arrives right before the next hand-over, which has one draw more."""
    machine = site.machine()
    project = project_of(machine.budget(limit(100)))
    read = project.mark()
    calls = [Entry(START, units, "units", "videos.list", "", "", project.keys.next()) for units in (3, 4)]
    assert draw(project, ALLOWANCE, calls, "no answer", read=read, commit=True) == 13
    late = Fault(lambda: machine.ledger.append("p", project.request(read, 0, calls[:1], ANY)))
    project.log = FaultyLog(machine.ledger, {4: late}, "append")
    for _ in range(2):
        hand_over(project)
    assert units_of(machine) == [3, 4]


@pytest.mark.parametrize("folder", ["ours", "file"], ids=["on the disk", "in memory"])
def test_a_correction_that_the_ledger_does_not_take_counts_once_it_answers(far: Site, line: Proxy, folder: str) -> None:
    """The next process of the machine hands it over, or this process at its end if it can write nothing."""
    machine = far.machine()
    budget = machine.budget(limit(100), allowance=ALLOWANCE)
    if folder == "file":
        shutil.rmtree(machine.folder)
        machine.folder.write_text("")
    attempt = budget.charge("videos.list", units=3).id or ""
    with cut(line), pytest.raises(LedgerError):
        budget.settle(attempt, 50)
    with cut(line):
        budget.peek("videos.list")  # tries to hand it over
    say_used(project_of(budget))
    assert folder == "ours" or units_of(machine) == [50]
    if folder == "ours":
        budget = machine.budget(limit(100), allowance=ALLOWANCE)
    assert (budget.usage()[0].used_units, units_of(machine)) == (50, [50])
    with cut(line), suppress(LedgerError):
        assert budget.charge("videos.list").source == ("allowance" if folder == "ours" else None), "it is no draw"
        budget.settle(attempt, 45)
    assert budget.settle(attempt, 40).units == 50
    far.machine("theirs").budget(limit(100)).settle(attempt, 30)
    assert budget.usage()[0].used_units == (31 if folder == "ours" else 30), "40 is not sent again after 30"
    with cut(line), suppress(LedgerError):
        budget.settle(attempt, 25)
    far.now_ms += 1
    far.machine("theirs").budget(limit(100)).settle(attempt, 20)
    assert budget.usage()[0].used_units == (21 if folder == "ours" else 20), "nor an earlier 25"
