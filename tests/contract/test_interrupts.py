"""Exceptions out of signal handlers, and questions out of them: a ledger stays whole and locks nobody out.

Every place where Python lets a handler in is visited once; and then real signals fall anywhere, in processes of their
own, thousands of times.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from contract.conftest import Setup, limit
from quota import sqlite_file
from quota.budget import read_entries
from quota.clock import host_clock
from quota.errors import LedgerError
from quota.ledger import NEVER, Charge, open_ledger
from quota.limits import DAY_MS
from quota.outage import Allowance
from support.interrupts import Interrupted, at_every_place, interrupt

if TYPE_CHECKING:
    from pathlib import Path

    from quota.ledger import Ledger


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anywhere is also in what Python ignores: while something is collected, and while pytest notes that."""
    monkeypatch.setattr(sys, "unraisablehook", id)


def others_can_write(path: Path) -> bool:
    """Whether another process could, at once. What is still being handled has its traceback, and that its frames."""
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as db:
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
    return True


def counted(ledger: Ledger, project: str) -> int:
    return sum(entry.units for entry in read_entries(ledger, project, 0, NEVER))


def test_a_charge_interrupted_anywhere_is_charged_once_or_not_at_all(setup: Setup, tmp_path: Path) -> None:
    budget = setup.budget(limit(10**6), limit(10**6, DAY_MS // 2, name="half"))
    budget.charge("videos.list")
    confirmed, interrupted, charges = 1, 0, list[object]()
    kept: list[Exception] = []  # as a notebook keeps the last one, with all its frames
    for error in at_every_place(interrupt, lambda: charges.append(budget.charge("videos.list"))):
        if error is not None:
            assert isinstance(error, Interrupted)
            kept = [error]
            interrupted += 1
        if setup.ledger.shared is False:
            assert others_can_write(tmp_path / "ledger.db")
        decision = budget.charge("videos.list")
        assert (decision.admitted, decision.source) == (True, "ledger"), decision.detail
        confirmed += 1
    assert len(kept) == 1
    confirmed += len(charges)
    assert interrupted > 50
    assert confirmed <= budget.usage()[0].used_units <= confirmed + interrupted
    assert budget.usage()[0].used_units == budget.usage()[1].used_units == counted(setup.ledger, setup.project)


def test_a_handler_may_charge_anywhere_in_a_charge(setup: Setup) -> None:
    budget = setup.budget(limit(10**6), limit(10**6, DAY_MS // 2, name="half"))
    budget.charge("videos.list")
    admitted = 1

    def charge() -> None:
        nonlocal admitted
        decision = budget.charge("videos.list")
        assert (decision.admitted, decision.source) == (True, "ledger"), decision.detail
        admitted += 1

    places = list(at_every_place(charge, charge))
    assert [error for error in places if error is not None] == []
    assert len(places) > 50
    assert admitted == 2 * len(places) + 2  # the last one found no such place
    assert budget.usage()[0].used_units == budget.usage()[1].used_units == admitted
    assert counted(setup.ledger, setup.project) == admitted


def test_a_handler_may_charge_in_the_middle_of_a_ledger_in_memory() -> None:
    ledger = open_ledger("sqlite://")
    setup = _setup(ledger)
    test_a_handler_may_charge_anywhere_in_a_charge(setup)


@pytest.mark.parametrize(
    ("handler", "made"), [("raises", False), ("raises", True), ("closes", False), ("charges", True)]
)
def test_a_ledger_file_is_made_and_opened_whole(tmp_path: Path, handler: str, made: bool) -> None:
    """Interrupted while it opens its file, or makes it, a ledger opens it again."""
    opened: list[Ledger] = []
    admitted: list[bool] = []
    places = 0

    def charge(ledger: Ledger) -> None:
        decision = _setup(ledger).budget().charge("videos.list")
        assert decision.admitted, decision.detail
        admitted.append(True)

    def open_and_charge() -> None:
        with closing(open_ledger(f"sqlite:///{tmp_path / str(places)}/ledger.db")) as ledger:
            opened[:] = [ledger]
            charge(ledger)

    def handle() -> None:
        if handler == "raises" or not opened:
            raise Interrupted
        if handler == "closes":
            opened[0].close()
        else:
            charge(opened[0])

    if made:
        open_and_charge()
    for error in at_every_place(handle, open_and_charge, within=(sqlite_file.__file__,)):
        assert error is None or isinstance(error, Interrupted)
        with closing(open_ledger(f"sqlite:///{tmp_path / str(places)}/ledger.db")) as ledger:
            charge(ledger)
            assert counted(ledger, "p") - len(admitted) in ((0, 1) if error else (0,))
        admitted.clear()
        opened.clear()
        places += 1
        if made:
            open_and_charge()
    assert places > 40


def test_a_transaction_that_is_left_over_is_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(open_ledger(f"sqlite:///{path}")) as ledger:
        budget = _setup(ledger).budget()
        budget.charge("videos.list")
        ledger._file._db.execute("BEGIN IMMEDIATE")  # type: ignore[attr-defined]
        ledger._file._db.execute("DELETE FROM charges")  # type: ignore[attr-defined]
        assert not others_can_write(path)
        assert budget.charge("videos.list").limits[0].used_units == 2
        assert others_can_write(path)


@pytest.mark.parametrize("raised", [Interrupted, KeyboardInterrupt, TimeoutError, MemoryError])
def test_what_a_handler_raises_goes_on_as_it_came(tmp_path: Path, raised: type[BaseException]) -> None:
    """A TimeoutError is an OSError, and yet no trouble with the file."""
    with closing(open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger:
        file = ledger._file  # type: ignore[attr-defined]

        def work(_: sqlite3.Connection) -> None:
            raise raised

        with pytest.raises(raised if raised is not MemoryError else LedgerError):
            file.transact(work, write=True)
        assert others_can_write(tmp_path / "ledger.db")


def test_a_draw_and_its_repayment_interrupted_anywhere_are_counted_once(tmp_path: Path) -> None:
    """What is owed is what was drawn, and the ledger gets that once."""
    path = tmp_path / "allowance.db"
    charge = Charge(1, "units", "videos.list", "", "", "token")
    drawn = list[object]()
    interrupted = 0
    with closing(open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger:
        allowance = Allowance(str(path), 1, 10**6, host_clock)

        def draw_and_repay() -> None:
            drawn.append(allowance.draw("p", charge, DAY_MS, commit=True))
            allowance.repay("p", ledger, DAY_MS)

        for error in at_every_place(interrupt, draw_and_repay):
            interrupted += error is not None
            assert error is None or isinstance(error, Interrupted)
            assert others_can_write(path) or not path.exists()
            assert others_can_write(tmp_path / "ledger.db")
            allowance._looked_ms.clear()
            allowance.repay("p", ledger, DAY_MS)
        assert interrupted > 50
        assert allowance.owed_units("p") == 0
        assert len(drawn) <= counted(ledger, "p") <= len(drawn) + interrupted
        allowance.close()


def _setup(ledger: Ledger) -> Setup:
    setup = Setup(ledger, project="p")
    setup.now_ms = host_clock()
    return setup
