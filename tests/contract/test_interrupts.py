"""Exceptions out of signal handlers, and questions out of them: a log stays whole and locks nobody
out. The places where Python lets a handler in are visited one by one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

from quota.budget import Budget, project_of
from quota.clients import gate, google
from quota.common import sqlite_file
from quota.deciding import losses
from quota.deciding.allowance import Allowance, hand_over
from quota.decision import Decision
from quota.errors import LedgerError, UsageError
from quota.journal import files
from quota.ledger.factory import open_ledger
from quota.ledger.log import LEASE_MS, Log
from quota.terms.limits import DAY_MS
from support.http_clients import BROKEN, Httpx, Requests
from support.interrupts import (
    OURS,
    STEP,
    Interrupted,
    at_every_place,
    at_place,
    count_places,
    interrupt,
    others_can_write,
)
from support.losses import LedgerStorage, Machine
from support.setup import NOW_MS, budget_of, charges_at, limit

LIMITS = (limit(10**6), limit(10**6, DAY_MS // 2, name="half"))

CLIENTS = (f"{Path(gate.__file__).parent}{os.sep}", contextlib.__file__)

MOST = 10**6 if os.environ.get("QUOTA_TEST_INTERRUPTED") else 10
"""Of the thousands of places where something is put back or handed over, so many are tried, evenly spread. `make soak`
tries every place."""


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere is also in what Python ignores: while something is collected, and while pytest notes that."""
    monkeypatch.setattr(sys, "unraisablehook", id)


def counted_units(ledger: Log) -> int:
    return sum(charge.units for charge in charges_at(ledger))


def test_an_interrupted_charge_is_made_once_or_not_at_all(ledger_url: str, tmp_path: Path) -> None:
    is_file, ledger_file = ledger_url.startswith("sqlite"), Path(ledger_url.removeprefix("sqlite:///"))
    with closing(open_ledger(ledger_url)) as ledger:
        budget = budget_of(ledger, *LIMITS, folder=tmp_path / "state")
        budget.charge("videos.list")
        confirmed, interrupted, charges = 1, 0, list[object]()
        kept: list[Exception] = []  # as a notebook keeps the last one, with all its frames
        for error in at_every_place(interrupt, lambda: charges.append(budget.charge("videos.list")), step=STEP):
            if error is not None:
                assert isinstance(error, Interrupted)
                kept = [error]
                interrupted += 1
            assert not is_file or others_can_write(ledger_file)
            decision = budget.charge("videos.list")
            assert (decision.admitted, decision.source) == (True, "ledger"), decision.detail
            confirmed += 1
        assert len(kept) == 1
        confirmed += len(charges)
        assert interrupted > 40
        used_units = [state.used_units for state in budget.usage()]
        assert used_units == [counted_units(ledger)] * 2
        assert confirmed <= used_units[0] <= confirmed + interrupted


def charges_in_handlers(budget: Budget, ledger: Log) -> None:
    """A handler charges in the middle of a charge, at one place after the other."""
    budget.charge("videos.list")
    admitted, handled, charged, refused = 1, 0, 0, 0

    def charge() -> None:
        nonlocal admitted
        decision = budget.charge("videos.list")
        assert (decision.admitted, decision.source) == (True, "ledger"), decision.detail
        admitted += 1

    def handle() -> None:
        nonlocal handled, charged, refused
        handled += 1
        try:
            charge()
        except UsageError as error:
            refused += "a signal handler cannot ask in the middle of a decision" in str(error)
        else:
            charged += 1

    places = list(at_every_place(handle, charge, step=STEP))
    assert [error for error in places if error is not None] == []
    assert handled == len(places) == charged + refused > 50
    assert refused > 0 < charged
    assert [state.used_units for state in budget.usage()] == [admitted] * 2
    assert counted_units(ledger) == admitted


def test_a_handler_charges_or_learns_that_it_cannot_and_the_charge_goes_on(ledger_url: str, tmp_path: Path) -> None:
    with closing(open_ledger(ledger_url)) as ledger:
        charges_in_handlers(budget_of(ledger, *LIMITS, folder=tmp_path / "state"), ledger)


def test_signal_handlers_charge_a_ledger_in_memory() -> None:
    with closing(open_ledger("memory://")) as ledger:
        charges_in_handlers(budget_of(ledger, *LIMITS), ledger)


def test_no_time_is_too_early_when_another_thread_begins_to_read_the_log(ledger_url: str) -> None:
    with closing(open_ledger(ledger_url)) as ledger:
        project = project_of(budget := budget_of(ledger, *LIMITS))
        views, _ = [each.view for each in budget.limits], budget.charge("videos.list")
        times = [project.frees_at_ms(view, 1) for view in views]
        project.begin(views[:1])
        assert [project.frees_at_ms(view, 1) for view in views] == times != [None, None]
        project.reading.totals.clear()
        with pytest.raises(LedgerError, match="still counts"):
            project.frees_at_ms(views[0], 1)


def test_a_correction_interrupted_anywhere_holds_or_is_made_again(ledger_url: str, tmp_path: Path) -> None:
    with closing(open_ledger(ledger_url)) as ledger:
        budget = budget_of(ledger, *LIMITS, folder=tmp_path / "state")
        charge_id = budget.charge("videos.list", units=10).id or ""
        interrupted = 0

        def settle() -> None:
            budget.settle(charge_id, interrupted)

        for units, error in enumerate(at_every_place(interrupt, settle, step=STEP)):
            assert error is None or isinstance(error, Interrupted)
            budget.settle(charge_id, units)
            assert [state.used_units for state in budget.usage()] == [counted_units(ledger)] * 2 == [units] * 2
            interrupted += 1
        assert interrupted > 50


# -- losses and draws --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("within", "most"),
    [((losses.__file__,), 2 * MOST), ((files.__file__,), 2 * MOST), (OURS, MOST // 2)],
    ids=["between its steps", "at its files", "anywhere"],
)
def test_an_interrupted_recovery_loses_no_charge(
    ledger_place: LedgerStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: tuple[str, ...], most: int
) -> None:
    """An interrupted process holds others up for as long as a killed process does: until its fence is over."""
    monkeypatch.setattr(losses, "WAIT_S", 0.0)
    now_ms, interrupted, held_up = NOW_MS, 0, 0
    kept: list[Exception] = []  # as a notebook keeps the last one, with all its frames

    def lossy(name: str) -> Machine:
        """A machine whose ledger has lost a charge."""
        ledger_place.empty()
        machine = Machine(name, tmp_path, ledger_place.url, lambda: now_ms)
        assert machine.budget(*LIMITS).charge("videos.list", units=3).admitted
        machine.stop()
        ledger_place.empty()
        return machine

    def charge(machine: Machine) -> Decision:
        return machine.budget(*LIMITS).charge("videos.list")

    first = lossy("first")
    passed = count_places(lambda: charge(first), within)
    first.stop()
    for place in range(0, passed, -(-passed // most)):
        machine = lossy(str(place))
        try:
            at_place(place, interrupt, partial(charge, machine), within)
        except Interrupted as error:
            kept[:] = [error]
            interrupted += 1
        decision = charge(machine)
        if decision.reason == "counting":
            held_up += 1
            now_ms += LEASE_MS
            decision = charge(machine)
        assert (decision.admitted, decision.source) == (True, "ledger"), decision
        used_units = [state.used_units for state in machine.budget(*LIMITS).usage()]
        assert used_units == [counted_units(machine.ledger)] * 2
        assert used_units[0] in (4, 5)
        machine.stop()
    assert interrupted > min(most, passed) // 2
    assert held_up < interrupted
    assert held_up or within != (losses.__file__,)


def test_a_draw_and_its_return_interrupted_anywhere_are_counted_once(ledger_url: str, tmp_path: Path) -> None:
    interrupted = 0
    kept: list[Exception] = []
    with closing(open_ledger(ledger_url)) as ledger, closing(open_ledger("redis://127.0.0.1:1/0")) as away:

        def budget(log: Log, project: str) -> Budget:
            return budget_of(log, *LIMITS, project=project, folder=tmp_path, allowance=Allowance(1, 100))

        def draw_and_hand_over(project: str, drawn: list[Decision]) -> None:
            drawn.append(budget(away, project).charge("videos.list"))
            hand_over(project_of(budget(ledger, project)))

        passed = count_places(lambda: draw_and_hand_over("first", []))
        for place in range(0, passed, -(-passed // MOST)):
            project = f"p{place}"
            drawn: list[Decision] = []
            try:
                at_place(place, interrupt, partial(draw_and_hand_over, project, drawn))
            except Interrupted as error:
                kept[:] = [error]
                interrupted += 1
            assert all(decision.source == "allowance" for decision in drawn)
            later = budget(ledger, project)
            hand_over(project_of(later))
            assert later.owed_units() == 0
            counted = sum(charge.units for charge in charges_at(ledger, project))
            assert len(drawn) <= counted == later.usage()[0].used_units <= 1
    assert interrupted > 6


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_ledger_file_whose_making_was_interrupted_is_made_again(tmp_path: Path) -> None:
    def charge(name: str) -> int:
        with closing(open_ledger(f"sqlite:///{tmp_path / name}/ledger.db")) as ledger:
            assert budget_of(ledger, *LIMITS).charge("videos.list").admitted
            return counted_units(ledger)

    within = (sqlite_file.__file__,)
    passed = count_places(lambda: charge("first"), within)
    for place in range(0, passed, STEP * 3):
        interrupted = False
        try:
            at_place(place, interrupt, partial(charge, str(place)), within)
        except Interrupted:
            interrupted = True
        assert 2 - interrupted <= charge(str(place)) <= 2
    assert passed > 50


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_an_exception_of_a_signal_handler_passes_unchanged(tmp_path: Path, raised: type[BaseException]) -> None:
    """A TimeoutError is an OSError, and yet no trouble with the file, the journal or the allowance."""
    path = tmp_path / "ledger.db"
    came: set[type[BaseException] | None] = set()

    def handle() -> None:
        raise raised

    with closing(open_ledger(f"sqlite:///{path}")) as ledger:
        budget = budget_of(ledger, *LIMITS, folder=tmp_path, allowance=Allowance(1, 100))
        charge = partial(budget.charge, "videos.list")
        for within, step in ((OURS, STEP * 4), ((sqlite_file.__file__,), 1)):
            for place in range(0, count_places(charge, within), step):
                try:
                    came |= {None} if at_place(place, handle, charge, within) else set()
                except BaseException as error:
                    came.add(type(error))
                assert others_can_write(path)
        assert budget.owed_units() == 0
    assert came == {raised}


def test_a_request_interrupted_anywhere_is_not_taken_for_the_next_one() -> None:
    """A call in flight sets its method: if that stayed set, the next batch would be charged as one such call. It also
    sets a mark that it is charged: if that stayed, the next request through a patched layer would pass uncharged."""
    budget, url = budget_of(open_ledger("memory://"), *LIMITS), "http://127.0.0.1:9"
    kept: list[Exception | None] = []
    with (
        closing(google.service(budget, key="k", endpoint=url)) as youtube,
        closing(Requests(budget, "videos.list", hosts=["127.0.0.1:9"])) as adapted,
        closing(Httpx(budget, "videos.list", hosts=["127.0.0.1:9"])) as transported,
    ):
        list_videos = youtube.videos().list(part="id", id="a").execute
        for send in (list_videos, partial(adapted.ask, url), partial(transported.ask, url)):

            def ask(send: Callable[[], object] = send) -> None:
                with suppress(OSError, *BROKEN):  # nobody listens there
                    send()

            interrupted = 0
            for error in at_every_place(interrupt, ask, CLIENTS):
                kept[:] = [error]
                interrupted += isinstance(error, Interrupted)
                assert google._sending.get() is None
                assert not gate.take_paid(url)
            assert interrupted > 20
