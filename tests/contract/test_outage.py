"""A ledger that cannot answer: a bounded local allowance, repaid once. The ledgers really stop answering."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from contract.conftest import limit
from quota.budget import Budget, read_entries
from quota.errors import UnknownCharge
from quota.ledger import NEVER, Charge, open_ledger
from quota.limits import DAY_MS
from quota.outage import Allowance
from support.books import BOOK
from support.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from quota.ledger import Ledger

    Outage = AbstractContextManager[None]


class Machine:
    """One machine: a ledger that can be cut off, a clock that the test moves, and a journal of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.now_ms = 1_793_000_000_000
        self.journal = str(folder / "state" / "allowance.db")
        self.ledger: Ledger = open_ledger(url, clock=lambda: self.now_ms)
        self.opened: list[Allowance] = []

    def budget(self, *, units: int = 500, max_cost: int = 10, allowance: int = 25) -> Budget:
        """A budget as a new process of this machine would make it."""
        self.opened.append(Allowance(self.journal, max_cost, allowance, lambda: self.now_ms))
        return Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=(limit(units),),
            ledger=self.ledger,
            clock=lambda: self.now_ms,
            allowance=self.opened[-1],
        )

    def cut_off(self) -> Outage:
        raise NotImplementedError

    def close(self) -> None:
        self.ledger.close()
        for allowance in self.opened:
            allowance.close()


class SqliteMachine(Machine):
    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Another process holds the file."""
        holder = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            holder.execute("ROLLBACK")
            holder.close()


class RedisMachine(Machine):
    def __init__(self, folder: Path, server: RedisServer) -> None:
        super().__init__(folder, server.url)
        self.server = server

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """The server dies, and comes back with what its append-only file holds."""
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()


@pytest.fixture(params=["sqlite", "redis"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    made: Machine
    server = None
    if request.param == "sqlite":
        made = SqliteMachine(tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}")
    else:
        server = RedisServer("--appendonly", "yes", "--appendfsync", "always")
        made = RedisMachine(tmp_path, server)
    yield made
    made.close()
    if server is not None:
        server.close()


def test_cheap_calls_go_on_and_dear_ones_are_refused(machine: Machine) -> None:
    budget = machine.budget()
    assert budget.charge("search.list").source == "ledger"
    with machine.cut_off():
        cheap = budget.charge("videos.list")
        assert (cheap.admitted, cheap.source, cheap.reason, cheap.remaining_units) == (True, "allowance", "ok", 24)
        dear = budget.charge("search.list")
        assert (dear.admitted, dear.source, dear.reason) == (False, None, "ledger-unavailable")
        peeked = budget.peek("videos.list")
        assert (peeked.admitted, peeked.id, peeked.remaining_units) == (True, None, 24)


def test_the_allowance_is_the_machines_not_the_processes(machine: Machine) -> None:
    first, second = machine.budget(), machine.budget()
    with machine.cut_off():
        assert [first.charge("videos.list", units=10).admitted, second.charge("videos.list", units=10).admitted] == [
            True,
            True,
        ]
        refused = machine.budget().charge("videos.list", units=10)
        assert (refused.admitted, refused.reason) == (False, "ledger-unavailable")
        assert second.charge("videos.list", units=5).remaining_units == 0


def test_the_debt_is_repaid_before_the_next_decision_and_once(machine: Machine) -> None:
    budget, other = machine.budget(units=30), machine.budget(units=30)
    with machine.cut_off():
        for _ in range(2):
            budget.charge("videos.list", units=10, job="trending", region="DE")
    assert machine.opened[0].owed_units("p") == 20
    refused = other.charge("videos.list", units=11)
    assert (refused.admitted, refused.reason) == (False, "limit"), "another process of the machine repays it"
    assert budget.charge("videos.list", units=10).remaining_units == 0
    entries = list(read_entries(machine.ledger, "p", 0, NEVER))
    assert [(e.units, e.job, e.region) for e in entries] == [(10, "trending", "DE")] * 2 + [(10, "", "")]
    assert machine.opened[0].owed_units("p") == 0


def test_a_repayment_whose_end_was_lost_is_not_made_twice(machine: Machine) -> None:
    """The process dies between the ledger's yes and its own note: the ledger remembers the number."""
    charges = [(number, Charge(5, "units", "videos.list", "", "", f"t{number}")) for number in (1, 2, 3)]
    machine.ledger.repay("p", "journal", charges[:2])
    machine.ledger.repay("p", "journal", charges)
    machine.ledger.repay("p", "journal", charges[:1])
    machine.ledger.repay("p", "another journal", charges[:1])
    assert [e.token for e in read_entries(machine.ledger, "p", 0, NEVER)] == ["t1", "t2", "t3", "t1"]


def test_repaying_does_not_renew_the_allowance(machine: Machine) -> None:
    budget = machine.budget()
    with machine.cut_off():
        assert budget.charge("videos.list", units=10).admitted
        assert budget.charge("videos.list", units=10).admitted
    assert budget.charge("videos.list").source == "ledger"
    with machine.cut_off():
        assert not budget.charge("videos.list", units=10).admitted, "20 of 25 still count against it"
        machine.now_ms -= DAY_MS
        assert not budget.charge("videos.list", units=10).admitted, "nor does a clock that goes back renew it"
        machine.now_ms += 2 * DAY_MS
        assert budget.charge("videos.list", units=10).admitted, "a window later they do not"


def test_a_draw_can_be_given_back_until_it_is_repaid(machine: Machine) -> None:
    budget = machine.budget()
    with machine.cut_off():
        given_back, kept = budget.charge("videos.list", units=10).id, budget.charge("videos.list", units=10).id
        assert given_back is not None
        assert kept is not None
        assert budget.refund(given_back).units == 10
        assert budget.charge("videos.list", units=10).admitted
    assert budget.charge("videos.list").limits[0].used_units == 21
    for charge_id in (kept, "allowance-999", "allowance-x", "allowance-" + "9" * 40):
        with pytest.raises(UnknownCharge):
            budget.refund(charge_id)


def test_without_an_allowance_every_call_is_refused(machine: Machine) -> None:
    budget = Budget(credential="main", project="p", book=BOOK, limits=(limit(500),), ledger=machine.ledger)
    with machine.cut_off():
        assert budget.charge("videos.list").reason == "ledger-unavailable"


def test_nothing_is_written_where_nothing_fails(machine: Machine, tmp_path: Path) -> None:
    assert machine.budget().charge("videos.list").admitted
    assert not (tmp_path / "state").exists()


def _draw(journal: str, results: multiprocessing.Queue[int]) -> None:
    allowance = Allowance(journal, 3, 100, lambda: 1_793_000_000_000)
    drawn = 0
    while allowance.draw("p", Charge(1, "units", "videos.list", "", "", "t"), DAY_MS, commit=True) is not None:
        drawn += 1
    results.put(drawn)
    allowance.close()


def test_eight_processes_draw_exactly_the_allowance(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_draw, args=(str(tmp_path / "a.db"), results)) for _ in range(8)]
    for worker in workers:
        worker.start()
    assert sum(results.get(timeout=60) for _ in workers) == 100
    for worker in workers:
        worker.join()
