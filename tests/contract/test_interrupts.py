"""Exceptions out of signal handlers, and questions out of them: a ledger stays whole and locks nobody out.

Every place where Python lets a handler in is visited once; and then real signals fall anywhere, in processes of their
own, thousands of times.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import pytest

import quota
from quota.common import sqlite_file
from quota.common.clock import NEVER, host_clock
from quota.errors import LedgerError
from quota.ledger.contract import read_entries
from quota.ledger.entry import Charge
from quota.ledger.factory import open_ledger
from quota.ledger.identity import Identity
from quota.ledger.sqlite_ledger import SqliteLedger
from quota.recovery.allowance import Allowance
from quota.terms.limits import DAY_MS
from support.interrupts import Interrupted, at_every_place, interrupt
from support.setup import Setup, limit

if TYPE_CHECKING:
    from pathlib import Path

    from quota.ledger.contract import Ledger


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
        if isinstance(setup.ledger, SqliteLedger):
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
    admitted, handled = 1, 0

    def charge() -> None:
        nonlocal admitted
        decision = budget.charge("videos.list")
        assert (decision.admitted, decision.source) == (True, "ledger"), decision.detail
        admitted += 1

    def handle() -> None:
        nonlocal handled
        handled += 1
        charge()

    places = list(at_every_place(handle, charge))
    assert [error for error in places if error is not None] == []
    assert handled == len(places) > 50
    assert budget.usage()[0].used_units == budget.usage()[1].used_units == admitted
    assert counted(setup.ledger, setup.project) == admitted


def test_a_handler_may_charge_in_the_middle_of_a_ledger_in_memory() -> None:
    ledger = open_ledger("sqlite://")
    setup = _setup(ledger)
    test_a_handler_may_charge_anywhere_in_a_charge(setup)


STEP = 1 if os.environ.get("QUOTA_TEST_INTERRUPTED") else 4
"""Of the hundreds of places where a file is made, every so manyth is tried; `make soak` tries them all."""


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
    step = 1 if made else STEP
    for error in at_every_place(handle, open_and_charge, within=(sqlite_file.__file__,), step=step):
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
            drawn.append(allowance.draw(Identity("", "p"), [charge], DAY_MS, commit=True))
            allowance.repay(Identity("", "p"), ledger, DAY_MS)

        for error in at_every_place(interrupt, draw_and_repay):
            interrupted += error is not None
            assert error is None or isinstance(error, Interrupted)
            assert others_can_write(path) or not path.exists()
            assert others_can_write(tmp_path / "ledger.db")
            allowance._checked_ms.clear()
            allowance.repay(Identity("", "p"), ledger, DAY_MS)
        assert interrupted > 50
        assert allowance.owed_units(Identity("", "p")) == 0
        assert len(drawn) <= counted(ledger, "p") <= len(drawn) + interrupted
        allowance.close()


def _setup(ledger: Ledger) -> Setup:
    setup = Setup(ledger, project="p")
    setup.now_ms = host_clock()
    return setup


# -- real signals ------------------------------------------------------------------------------------------------------

INTERRUPTED = int(os.environ.get("QUOTA_TEST_INTERRUPTED", "400"))
"""How many charges are interrupted on each ledger; `make soak` takes 20,000."""

CHARGE = """
import json, random, signal, sys, threading, time
import quota, quota.ledger.redis_ledger, quota.ledger.sqlite_ledger

# Each waits for the other for as long as it takes.
quota.ledger.sqlite_ledger.SqliteLedger._deadline_s = quota.ledger.redis_ledger.RedisLedger._timeout_s = 60.0
quota.ledger.redis_ledger.RETRY_WITHIN_S = 60.0

config, how, seed, enough = sys.argv[1:]
r = random.Random(int(seed))
sys.unraisablehook = lambda _: None
confirmed = interrupted = fired = 0
armed = False

class Interrupted(Exception): ...

def handle(*_):
    global confirmed, fired
    if armed:
        fired += 1
        if how == "charges":
            decision = budget.charge("videos.list")
            assert (decision.admitted, decision.source) == (True, "ledger"), decision
            confirmed += 1
        else:
            raise r.choice((Interrupted, KeyboardInterrupt, TimeoutError))

def keep_interrupting():
    while interrupted < int(enough):
        time.sleep(r.uniform(0.00002, 0.001))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

signal.signal(signal.SIGALRM, handle)
with quota.open(config) as q:
    budget = q.budget()
    budget.charge("videos.list")
    confirmed += 1
    started = time.perf_counter()
    for _ in range(20):
        budget.charge("videos.list")
        confirmed += 1
    usual_s = (time.perf_counter() - started) / 20
    if how == "nobody":
        print("ready", flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), globals().update(enough=0)), daemon=True).start()
    elif how == "thread":
        threading.Thread(target=keep_interrupting, daemon=True).start()
    while interrupted < int(enough):
        before, fired = fired, 0
        try:
            armed = True
            if how in ("timer", "charges"):
                signal.setitimer(signal.ITIMER_REAL, r.uniform(0.000002, usual_s))
            decision = budget.charge("videos.list")
            armed = False
        except (Interrupted, KeyboardInterrupt, TimeoutError) as error:
            armed = False
            last = error  # as a notebook keeps it, with all its frames
            interrupted += 1
        else:
            if decision.admitted:
                assert decision.source == "ledger", decision
                confirmed += 1
                interrupted += how == "charges" and fired
            else:  # the driver makes a lost connection of what is raised in its own handlers
                assert fired and how != "charges", decision
                interrupted += 1
        if how == "nobody":
            time.sleep(0.0005)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps([confirmed, interrupted if how != "charges" else 0]))
"""

CONFIG = """
[ledger]
url = "{url}"
[credentials.main]
api = "youtube-v3"
project = "p"
[[credentials.main.limits]]
name = "day"
units = 100000000
window = "24h"
[[credentials.main.limits]]
name = "pacific-day"
units = 100000000
window = {{ calendar = "day", zone = "America/Los_Angeles" }}
"""


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals there")
@pytest.mark.parametrize("how", ["timer", "thread", "charges"])
def test_charges_interrupted_by_signals_refuse_nobody_and_are_counted(
    ledger_url: str, tmp_path: Path, state_dir: Path, how: str
) -> None:
    """In a process of its own, which must not crash; another one charges all the while, and is never refused."""
    config = tmp_path / "quota.toml"
    config.write_text(CONFIG.format(url=ledger_url))

    def spawn(how: str, enough: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHARGE, str(config), how, "5", str(enough)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    with spawn("nobody", 1) as other, spawn(how, INTERRUPTED // 2 if how != "charges" else INTERRUPTED) as process:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        said, complaint = process.communicate()
        assert process.returncode == 0, complaint[-2000:]
        theirs, complaint = other.communicate("")
        assert other.returncode == 0, complaint[-2000:]
    (confirmed, interrupted), (others, _) = json.loads(said), json.loads(theirs)
    assert others > 20
    with quota.open(config) as session:
        used = [state.used_units for state in session.budget().usage()]
        assert used == [counted(session.ledger, "p")] * 2
    assert confirmed + others <= used[0] <= confirmed + others + interrupted


def test_a_request_interrupted_anywhere_is_not_taken_for_the_next_one() -> None:
    """What is sent says which method it is: said for longer, the next batch would be charged as one call of it."""
    from quota.clients import google

    budget = _setup(open_ledger("sqlite://")).budget()
    kept: list[Exception] = []
    interrupted = 0
    with closing(google.service(budget, key="k", endpoint="http://127.0.0.1:9")) as youtube:
        request = youtube.videos().list(part="id", id="a")
        for error in islice(at_every_place(interrupt, request.execute), 60):
            assert error is not None
            kept = [error]
            interrupted += isinstance(error, Interrupted)
            assert google._sending.get() is None
    assert len(kept) == 1
    assert interrupted > 20
