"""A ledger that cannot answer: a bounded local allowance, repaid once. The ledgers really stop answering."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

import quota
from quota.budget import Budget
from quota.common.clock import NEVER
from quota.deciding import corrections
from quota.errors import LedgerError, UnknownCharge
from quota.ledger.contract import read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.identity import Identity
from quota.ledger.redis_scripts import script
from quota.ledger.sqlite_ledger import SqliteLedger
from quota.recovery import allowance as journal
from quota.recovery.allowance import LOOK_AGAIN_MS, REPAID_AT_ONCE, Allowance
from quota.terms.limits import DAY_MS
from support.books import BOOK
from support.interrupts import at_every_place
from support.processes import Children
from support.proxy import Proxy
from support.servers import RedisServer
from support.setup import limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from quota.ledger.contract import Ledger

    Outage = AbstractContextManager[None]


STEP = 1 if os.environ.get("QUOTA_TEST_KILLS") else 3
"""Every so manyth place at which a repayment can be interrupted is tried."""

HELD_S = 0.1
"""So long these ledgers and journals wait for a file that is held until the wait is over. Users' wait for a second."""


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
        self.opened[-1]._file.deadline_s = HELD_S
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
    def __init__(self, folder: Path, server: RedisServer, url: str = "") -> None:
        super().__init__(folder, url or server.url)
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
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(SqliteLedger, "_deadline_s", HELD_S)
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
        assert not budget.charge("videos.list", units=11).admitted, "too dear, though there is room"
        assert [budget.charge("videos.list", units=units).admitted for units in (10, 10, 5, 4, 1)] == [
            *(True, True, False, True, False)  # 25 in all
        ]
    assert budget.charge("videos.list").source == "ledger"


def test_a_ledger_that_refused_is_not_overruled_when_it_stops_before_it_says_until_when(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the log lacks corrections, the budget reads it for `retry_at` after the refusal. An outage in between hands
    no call to the allowance."""
    server = RedisServer()
    with closing(server), Proxy(server.port) as proxy, closing(RedisMachine(tmp_path, server, proxy.url)) as machine:
        budget = machine.budget(units=3)
        charged = budget.charge("videos.list", units=2)
        assert charged.id is not None
        budget.settle(charged.id, 3)
        assert budget.peek("videos.list").reason == "limit"
        with redis.Redis(port=server.port) as client:
            client.delete("quota:{p}:corrections")
        proxy.fail("drop-request", times=2, match=script("read")[1].encode())
        refused = budget.charge("videos.list")
        assert (refused.admitted, refused.reason, refused.refused_by) == (False, "limit", "day")
        assert (refused.retry_at_ms, refused.source) == (None, None)
        assert budget.owed_units() == 0
        assert [line.split(":")[0] for line in caplog.messages] == ["retry_at_unknown project=p limit=day"]
        assert budget.charge("videos.list").retry_at_ms == machine.now_ms + DAY_MS


def test_an_outage_is_a_line_when_it_begins_and_one_when_it_ends(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    budget = machine.budget()
    budget.charge("videos.list")
    with machine.cut_off():
        for _ in range(5):
            assert budget.charge("videos.list", units=2).source == "allowance"
        (begun,) = caplog.messages
        assert begun.startswith("allowance_drawn project=p method=videos.list units=2 left=23: ledger ")
        caplog.clear()
    budget.charge("videos.list")
    assert caplog.messages == ["debt_repaid project=p charges=5 units=10"]
    caplog.clear()
    with machine.cut_off():
        for _ in range(3):
            budget.charge("videos.list")
        machine.close()
    assert caplog.messages[0].startswith("allowance_drawn project=p method=videos.list units=1 left=14: ledger ")
    assert caplog.messages[1:] == ["allowance_used project=p charges=3 units=3 left=12"]


def test_one_draw_is_one_line(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    budget = machine.budget()
    with machine.cut_off():
        budget.charge("videos.list")
        budget.peek("videos.list")
        machine.close()
    assert [line.split()[0] for line in caplog.messages] == ["allowance_drawn"]


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
    assert machine.opened[0].owed_units(Identity("", "p")) == 20
    refused = other.charge("videos.list", units=11)
    assert (refused.admitted, refused.reason) == (False, "limit"), "another process of the machine repays it"
    assert budget.charge("videos.list", units=10).remaining_units == 0
    entries = list(read_entries(machine.ledger, "p", 0, NEVER))
    assert [(e.units, e.job, e.region) for e in entries] == [(10, "trending", "DE")] * 2 + [(10, "", "")]
    assert machine.opened[0].owed_units(Identity("", "p")) == 0


def test_a_repayment_whose_end_was_lost_is_not_made_twice(machine: Machine) -> None:
    """The process dies between the ledger's yes and its own note: the ledger remembers the number."""
    charges = [(number, Charge(5, "units", "videos.list", "", "", f"t{number}")) for number in (1, 2, 3)]
    machine.ledger.repay("p", "journal", charges[:2])
    machine.ledger.repay("p", "journal", charges)
    machine.ledger.repay("p", "journal", charges[:1])
    machine.ledger.repay("p", "another journal", charges[:1])
    assert [e.idempotency_key for e in read_entries(machine.ledger, "p", 0, NEVER)] == ["t1", "t2", "t3", "t1"]


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


def test_a_draw_can_be_given_back_before_and_after_it_is_repaid(machine: Machine) -> None:
    budget = machine.budget()
    with machine.cut_off():
        given_back, kept = budget.charge("videos.list", units=10).id, budget.charge("videos.list", units=10).id
        assert given_back is not None
        assert kept is not None
        assert budget.refund(given_back).units == 10
        assert budget.charge("videos.list", units=10).admitted
    assert used_units(budget, charge=True) == 21
    assert [budget.settle(kept, units).units for units in (4, 4, 0, 7)] == [10, 4, 4, 0]
    assert used_units(budget) == 18
    assert [entry.units for entry in read_entries(machine.ledger, "p", 0, NEVER)] == [0, 7, 10, 1]
    assert budget.refund(given_back).units == 0
    tag = kept.rpartition("-")[0]
    for odd in (
        f"{tag}-999",
        f"{tag}-x",
        f"{tag}-" + "9" * 40,
        f"{tag}-",
        f"{tag}--1",
        "allowance-1",
        "allowance-",
        tag,
    ):
        with pytest.raises(UnknownCharge):
            budget.refund(odd)


def test_the_id_of_a_draw_is_its_machines_own(machine: Machine, tmp_path: Path) -> None:
    """Two machines both draw their first call. A correction on the wrong one changes neither."""
    other = Machine(tmp_path / "other", machine.url)
    budget, others = machine.budget(), other.budget()
    try:
        with machine.cut_off():
            mine, theirs = str(budget.charge("videos.list").id), str(others.charge("videos.list").id)
        assert mine != theirs
        assert mine.rpartition("-")[2] == theirs.rpartition("-")[2], "both are drawn in one millisecond"
        for wrong, charge_id in ((budget, theirs), (others, mine)):
            with pytest.raises(UnknownCharge, match="drawn on another machine"):
                wrong.refund(charge_id)
        assert used_units(budget, charge=True) + used_units(others, charge=True) == 2 + 4
        with pytest.raises(UnknownCharge, match="drawn on another machine"):
            others.refund(mine)
        assert budget.refund(mine).units == others.refund(theirs).units == 1
        assert used_units(budget) == 2
    finally:
        other.close()


def test_what_is_given_back_renews_the_allowance_and_what_is_repaid_does_not(machine: Machine) -> None:
    budget = machine.budget(allowance=20)
    with machine.cut_off():
        drawn = [str(budget.charge("videos.list", units=10).id) for _ in range(2)]
    budget.charge("videos.list")
    budget.refund(drawn[0])
    with machine.cut_off():
        assert [budget.charge("videos.list", units=10).admitted for _ in range(2)] == [True, False]


def test_another_process_gives_a_repaid_draw_back(machine: Machine) -> None:
    with machine.cut_off():
        drawn = str(machine.budget().charge("videos.list", units=10).id)
    machine.budget().charge("videos.list")
    assert machine.budget().refund(drawn).units == 10
    assert used_units(machine.budget()) == 1


def test_a_draw_that_was_repaid_long_ago_is_known_as_long_as_the_log_has_it(machine: Machine) -> None:
    budget = machine.budget()
    with machine.cut_off():
        drawn = str(budget.charge("videos.list", units=10).id)
    budget.charge("videos.list")
    machine.now_ms += DAY_MS + DAY_MS // 2
    for _ in range(3):
        machine.now_ms += 60_000
        budget.charge("videos.list")
    assert budget.refund(drawn).units == 10
    for _ in range(9):
        machine.now_ms += DAY_MS // 2
        budget.charge("videos.list")
    with pytest.raises(UnknownCharge):
        budget.refund(drawn)


def test_a_draw_repaid_twice_is_given_back_once(machine: Machine) -> None:
    """The note that it is repaid is lost, and it is given back before it is sent again."""
    budget = machine.budget()
    with machine.cut_off():
        drawn = str(budget.charge("videos.list", units=10).id)
    budget.charge("videos.list")
    with closing(sqlite3.connect(machine.journal)) as db:
        db.execute("UPDATE draws SET repaid = 0")
        db.commit()
    assert budget.refund(drawn).units == 10
    machine.now_ms += LOOK_AGAIN_MS
    assert used_units(machine.budget(), charge=True) == 2
    assert budget.refund(drawn).units == 0


def twin(ledger: Ledger) -> Any:
    """A second object of the same ledger, one method of which a test can replace."""
    second = object.__new__(type(ledger))
    vars(second).update(vars(ledger))
    return second


def slow(ledger: Ledger, meanwhile: Callable[[], object]) -> Any:
    """The same ledger. While it is handed a debt, something else happens."""
    second = twin(ledger)

    def repay(*args: Any) -> bool:
        repaid: bool = type(ledger).repay(second, *args)  # type: ignore[attr-defined]
        meanwhile()
        return repaid

    second.repay = repay
    return second


@pytest.mark.parametrize("repaid_first", [False, True])
def test_a_draw_given_back_while_it_is_repaid_counts_nothing(machine: Machine, repaid_first: bool) -> None:
    """At whatever place of one process's repayment: another one gives it back, and a third one repays, too."""
    budget, away, other, third = (machine.budget(allowance=10_000) for _ in range(4))
    away._account.ledger = open_ledger("redis://127.0.0.1:9/0")
    drawn, given_back = "", False

    def begin() -> None:
        nonlocal drawn, given_back
        machine.now_ms += 3 * DAY_MS
        drawn, given_back = "", False
        name = str(away.charge("videos.list", units=10).id)
        other.settle(name, 7)
        drawn = name
        budget.charge("videos.list")

    def meanwhile() -> None:
        nonlocal given_back
        if not drawn:
            return
        if repaid_first:
            third.charge("videos.list")
        with suppress(LedgerError):  # the journal is held here
            other.refund(drawn)
            given_back = True
        third.charge("videos.list")

    for error in at_every_place(meanwhile, begin, (journal.__file__, corrections.__file__), STEP):
        assert error is None
        machine.now_ms += LOOK_AGAIN_MS
        budget.charge("videos.list")
        entries = read_entries(machine.ledger, "p", machine.now_ms - DAY_MS, NEVER)
        assert sum(one.units for one in entries if one.charged_units == 7) == (0 if given_back else 7)


def test_a_correction_that_meets_an_outage_is_made_later(machine: Machine) -> None:
    """The ledger has the draw as it was, because the answer to the first repayment was lost."""

    def fails(*_: Any) -> Any:
        raise LedgerError("no answer")

    budget = machine.budget()
    with machine.cut_off():
        drawn = str(budget.charge("videos.list", units=10).id)
    for name, meanwhile in (("repay", fails), ("settle", lambda: None)):
        budget._account.ledger = failing = slow(machine.ledger, meanwhile)
        setattr(failing, name, fails if name == "settle" else failing.repay)
        machine.now_ms += LOOK_AGAIN_MS
        assert budget.charge("videos.list").source == "allowance"
        if name == "repay":
            assert budget.settle(drawn, 7).units == 10
    budget._account.ledger = machine.ledger
    for _ in "12":
        machine.now_ms += LOOK_AGAIN_MS
        assert used_units(budget, charge=True) in (10, 11)
    assert [entry.units for entry in read_entries(machine.ledger, "p", 0, NEVER)] == [7, 1, 1, 1, 1]


def test_the_charge_whose_answer_was_lost_is_given_back_with_its_draw(machine: Machine) -> None:
    """It is the same call. Until somebody says that it never left, both count."""
    budget = machine.budget()

    def decide(*args: Any, **more: Any) -> Any:
        machine.ledger.decide(*args, **more)
        raise LedgerError("the answer is lost")

    budget._account.ledger = losing = twin(machine.ledger)
    losing.decide = decide
    drawn = str(budget.charge("videos.list", units=10).id)
    budget._account.ledger = machine.ledger
    assert used_units(budget, charge=True) == 21
    assert budget.settle(drawn, 3).units == 10
    assert used_units(budget) == 4


def used_units(budget: Budget, *, charge: bool = False) -> int:
    return budget.charge("videos.list").limits[0].used_units if charge else budget.usage()[0].used_units


def test_without_an_allowance_every_call_is_refused(machine: Machine) -> None:
    budget = Budget(credential="main", project="p", book=BOOK, limits=(limit(500),), ledger=machine.ledger)
    with machine.cut_off():
        assert budget.charge("videos.list").reason == "ledger-unavailable"


def test_nothing_is_written_where_nothing_fails(machine: Machine, tmp_path: Path) -> None:
    assert machine.budget().charge("videos.list").admitted
    assert not (tmp_path / "state").exists()


# -- the journal itself fails ------------------------------------------------------------------------------------------


@contextmanager
def _replaced(journal: Path, content: bytes) -> Iterator[None]:
    """Something else stands where the journal was, until it is put back."""
    kept = journal.with_name("kept")
    journal.rename(kept)
    journal.write_bytes(content)
    try:
        yield
    finally:
        kept.replace(journal)


def no_database(journal: Path) -> Outage:
    return _replaced(journal, b"this is no database, however long one looks at it\n" * 100)


def damaged(journal: Path) -> Outage:
    content = journal.read_bytes()
    return _replaced(journal, content[:100] + b"\xff" * (len(content) - 100))


@contextmanager
def held(journal: Path) -> Iterator[None]:
    """Another process keeps even readers out."""
    with closing(sqlite3.connect(journal, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def a_folder(journal: Path) -> Iterator[None]:
    kept = journal.with_name("kept")
    journal.rename(kept)
    journal.mkdir()
    try:
        yield
    finally:
        journal.rmdir()
        kept.replace(journal)


@pytest.mark.parametrize("failure", [no_database, damaged, held, a_folder])
def test_a_journal_that_cannot_be_read_stops_no_call_and_admits_none(
    machine: Machine, failure: Callable[[Path], Outage], caplog: pytest.LogCaptureFixture
) -> None:
    """The ledger decides; the debt stays noted, and is repaid when it can be read again."""
    budget = machine.budget(units=30)
    with machine.cut_off():
        assert budget.charge("videos.list", units=10).source == "allowance"
    machine.opened[0].close()  # the process ends; what it wrote is in the file
    budget = machine.budget(units=30)
    with failure(Path(machine.journal)):
        assert budget.charge("videos.list", units=10).source == "ledger"
        assert budget.charge("videos.list", units=10).remaining_units == 10
        assert budget.owed_units() == 0
        assert [r.message.partition(":")[0] for r in caplog.records if "unreadable" in r.message] == [
            f"allowance_unreadable path={machine.journal}"
        ]
        with machine.cut_off():
            refused = budget.charge("videos.list")
            assert (refused.admitted, refused.reason) == (False, "ledger-unavailable")
            assert "allowance" in refused.detail
        machine.opened[-1].close()
    assert budget.owed_units() == 10
    machine.now_ms += LOOK_AGAIN_MS
    refused = budget.charge("videos.list")
    assert (refused.reason, refused.limits[0].used_units) == ("limit", 30)
    assert [r.message.split()[0] for r in caplog.records].count("debt_repaid") == 1


def test_a_debt_whose_note_cannot_be_written_is_not_repaid_twice(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers get in, writers do not, as on a full disk: all of the debt is sent, some of it several times."""
    budget = machine.budget(allowance=REPAID_AT_ONCE + 20)
    for _ in range(REPAID_AT_ONCE + 20):
        charge = Charge(1, "units", "videos.list", "", "", "t")
        assert machine.opened[0].draw(Identity("", "p"), [charge], DAY_MS, commit=True) is not None
    with closing(sqlite3.connect(machine.journal, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        for number in range(3):
            budget = machine.budget()
            assert budget.charge("videos.list").limits[0].used_units == REPAID_AT_ONCE + 20 + number + 1
        assert budget.owed_units() == REPAID_AT_ONCE + 20
        holder.execute("ROLLBACK")
    assert "debt_repaid" not in caplog.text
    machine.now_ms += LOOK_AGAIN_MS
    assert budget.charge("videos.list").limits[0].used_units == REPAID_AT_ONCE + 20 + 4
    assert budget.owed_units() == 0


def test_a_process_repays_what_another_drew_while_it_was_running(machine: Machine) -> None:
    running, other = machine.budget(), machine.budget()
    assert running.charge("videos.list").source == "ledger"
    with machine.cut_off():
        assert other.charge("videos.list", units=10).source == "allowance"
    machine.now_ms += LOOK_AGAIN_MS - 1
    assert running.charge("videos.list").limits[0].used_units == 2
    machine.now_ms += 1
    assert running.charge("videos.list").limits[0].used_units == 13


def test_a_journal_that_is_deleted_forgets_at_most_its_allowance(machine: Machine) -> None:
    budget = machine.budget(allowance=10)
    with machine.cut_off():
        assert budget.charge("videos.list", units=5).admitted
    assert budget.charge("videos.list").limits[0].used_units == 6
    with machine.cut_off():
        assert [budget.charge("videos.list", units=n).admitted for n in (5, 1)] == [True, False]
    machine.opened[-1].close()
    for path in Path(machine.journal).parent.iterdir():
        path.unlink()
    budget = machine.budget(allowance=10)
    assert budget.charge("videos.list").limits[0].used_units == 7, "5 of 10 were owed"
    with machine.cut_off():
        assert [budget.charge("videos.list", units=n).admitted for n in (10, 1)] == [True, False]
    # A new journal has a new name, so its numbers are not taken for those that the old one repaid.
    assert budget.charge("videos.list").limits[0].used_units == 18


def test_what_is_drawn_on_an_old_copy_of_the_journal_is_repaid(machine: Machine) -> None:
    """Its numbers are not those that the ledger has had since the copy was made."""
    budget = machine.budget()
    with machine.cut_off():
        assert budget.charge("videos.list", units=5).admitted
    assert budget.charge("videos.list").limits[0].used_units == 6
    machine.opened[-1].close()
    copy = Path(machine.journal).read_bytes()
    for used_units in (11, 16):
        machine.now_ms += LOOK_AGAIN_MS
        budget = machine.budget()
        with machine.cut_off():
            assert budget.charge("videos.list", units=4).admitted
        assert budget.charge("videos.list").limits[0].used_units == used_units
        machine.opened[-1].close()
    machine.now_ms += 1
    Path(machine.journal).write_bytes(copy)
    budget = machine.budget()
    with machine.cut_off():
        assert budget.charge("videos.list", units=4).admitted
    assert budget.charge("videos.list").limits[0].used_units == 21


def test_a_draw_is_on_the_disk_before_its_call_leaves(machine: Machine) -> None:
    """Nobody can pull the plug here, so what is looked at is what SQLite was told: to wait for the disk, always."""
    budget = machine.budget()
    with machine.cut_off():
        assert budget.charge("videos.list").source == "allowance"
    file = machine.opened[0]._file
    assert file.transact(lambda db: db.execute("PRAGMA synchronous").fetchone()[0], write=False) == 2
    assert file.transact(lambda db: db.execute("PRAGMA journal_mode").fetchone()[0], write=False) == "wal"


def test_what_no_window_reaches_any_more_leaves_the_journal_once_it_is_repaid(machine: Machine) -> None:
    """An outage of ten days, or a clock that says so: until the ledger agrees, nobody knows."""
    budget = machine.budget()
    for _ in range(10):
        charge = Charge(10, "units", "videos.list", "", "", "t")
        assert machine.opened[0].draw(Identity("", "p"), [charge], DAY_MS, commit=True) is not None
        machine.now_ms += DAY_MS
    assert budget.owed_units() == 100
    assert used_units(budget, charge=True) == 101
    assert budget.owed_units() == 0
    machine.now_ms += DAY_MS
    machine.opened[0].draw(Identity("", "p"), [charge], DAY_MS, commit=True)
    with closing(sqlite3.connect(machine.journal)) as db:
        assert db.execute("SELECT count(*) FROM draws").fetchone() == (1,)


def test_a_session_closes_its_journal_and_the_next_one_opens_it_again(state_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "quota.toml").write_text(
        """
[ledger]
url = "redis://127.0.0.1:9/0"
unavailable = { max_cost = 1, allowance = 5 }
[credentials.main]
api = "youtube-v3"
"""
    )
    for left_units in (4, 3):
        with quota.open(tmp_path / "quota.toml") as session:
            decision = session.budget().charge("videos.list")
            assert (decision.source, decision.remaining_units) == ("allowance", left_units)
            assert _open_files(state_dir / "allowance.db")
        assert _open_files(state_dir / "allowance.db") == []
    left = sorted(path.name for path in state_dir.iterdir())
    assert left == ["allowance.db"], "no side files of the journal are left behind"


def _open_files(path: Path) -> list[str]:
    """What this process has open of an SQLite file: the file and its side files."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            opened.append(os.readlink(descriptor))
    return [name for name in opened if name.startswith(str(path))]


# -- many processes ----------------------------------------------------------------------------------------------------


def _draw(journal: str) -> int:
    allowance = Allowance(journal, 3, 100, lambda: 1_793_000_000_000)
    drawn, charge = 0, Charge(1, "units", "videos.list", "", "", "t")
    while allowance.draw(Identity("", "p"), [charge], DAY_MS, commit=True) is not None:
        drawn += 1
    allowance.close()
    return drawn


def test_eight_processes_draw_exactly_the_allowance(tmp_path: Path) -> None:
    assert sum(Children(_draw, *[(str(tmp_path / "a.db"),)] * 8, start="anew").answers()) == 100
