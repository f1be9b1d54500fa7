"""Damaged ledgers and journals: a decision of the right shape, or one line that says what is wrong with the file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import quota
from fuzz.generate import text
from fuzz.inputs import PARTS, Input, check_line, every
from fuzz.readings import check_readings, keep_history
from quota.errors import LedgerError, UnknownCharge
from quota.ledger.contract import Exhaustion
from quota.terms.limits import DAY_MS
from support.claims import claim_of

LIMIT = 500
NOW_MS = 1_795_204_800_000
CONFIG = f"""
[ledger]
url = "sqlite:///ledger.db"
unavailable = {{ max_cost = 1, allowance = 50, machines = 1 }}
[credentials.main]
api = "youtube-v3"
[[credentials.main.limits]]
name = "day"
units = {LIMIT}
window = "24h"
[[credentials.main.limits]]
name = "pacific-day"
units = {LIMIT}
window = {{ calendar = "day", zone = "America/Los_Angeles" }}
"""


class Files:
    """The files of a ledger and a journal in good order, and how they are put back."""

    def __init__(self) -> None:
        Path("quota.toml").write_text(CONFIG)
        # While somebody has the file open, nothing is moved out of its -wal.
        with quota.open("quota.toml", clock=lambda: NOW_MS) as session:
            budget = session.budget()
            for job in ("trending", "search", ""):
                charge = budget.charge("search.list", job=job, region="US")
                budget.charge("videos.list", job=job)
            budget.settle(str(charge.id), 7)
            session.ledger.exhaust("main", Exhaustion("uploads", NOW_MS, NOW_MS + DAY_MS, "said so", "host:1"))
            session.ledger.exhaust("main", Exhaustion("old", NOW_MS - DAY_MS, NOW_MS - 5, "said so", "host:1"))
            session.ledger.claim("main", claim_of("b"))
            keep_history(session, NOW_MS)
            self.charge_id = str(charge.id)
            self.with_wal = _read("ledger.db")
        self.clean = _read("ledger.db")
        with quota.open("quota.toml", clock=lambda: NOW_MS) as session:
            session.settings  # noqa: B018
            Path("ledger.db").write_bytes(b"no database" * 100)
            for suffix in ("-wal", "-shm"):
                Path(f"ledger.db{suffix}").unlink(missing_ok=True)
            assert session.budget().charge("videos.list").source == "allowance"
            self.journal = _read("state/allowance.db")
        self.owing = {**self.journal, **self.clean}

    def put(self, files: dict[str, bytes]) -> None:
        for name in ("ledger.db", "state/allowance.db"):
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name + suffix)
        for name, data in files.items():
            Path(name).write_bytes(data)


def _read(name: str) -> dict[str, bytes]:
    return {name + suffix: Path(name + suffix).read_bytes() for suffix in ("", "-wal") if Path(name + suffix).exists()}


@pytest.fixture
def files(tmp_path: Path, state_dir: Path) -> Files:
    state_dir.mkdir()
    return Files()


@pytest.mark.parametrize("part", range(PARTS))
def test_a_damaged_ledger_decides_or_says_so(part: int, files: Files) -> None:
    def attempt(r: Input) -> None:
        good = r.choice((files.with_wal, files.clean))
        files.put(good)
        r.data = _rows_damaged(r, "ledger.db", LEDGER_COLUMNS) if r.random() < 0.4 else _bytes_damaged(r, good)
        _use(files.charge_id)

    every("ledger-file", part, attempt)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_damaged_journal_decides_or_says_so(part: int, files: Files) -> None:
    """Both while it is owed to the ledger and while the ledger cannot answer."""

    def attempt(r: Input) -> None:
        files.put(files.owing)
        if r.random() < 0.4:
            r.data = _rows_damaged(r, "state/allowance.db", JOURNAL_COLUMNS)
        else:
            r.data = _bytes_damaged(r, files.journal)
        if r.random() < 0.5:
            Path("ledger.db").write_bytes(b"no database" * 100)
        _use(files.charge_id)

    every("journal", part, attempt)


LEDGER_COLUMNS = {
    "charges": (
        "project",
        "ms",
        "seq",
        "units",
        "charged_units",
        "bucket",
        "method",
        "job",
        "region",
        "idempotency_key",
        "settled",
    ),
    "state": ("name", "value"),
}
JOURNAL_COLUMNS = {
    "draws": ("drawn_ms", "units", "bucket", "method", "job", "region", "idempotency_key", "repaid", "number"),
    "machine": ("id",),
    "longest_windows": ("window_ms",),
}


def _rows_damaged(r: Input, name: str, columns: dict[str, tuple[str, ...]]) -> list[object]:
    """Some fields of some rows overwritten with values of other kinds."""
    changes: list[object] = []
    with closing(sqlite3.connect(name, isolation_level=None)) as db:
        for _ in range(r.choice((1, 1, 2, 5))):
            table = r.choice(list(columns))
            column = r.choice(columns[table])
            put = r.choice(
                (
                    -5,
                    0,
                    10**6,
                    10**14,
                    2**53 - 1,
                    2**53,
                    2**63 - 1,
                    -(2**63),
                    1.5,
                    1e300,
                    "x",
                    "",
                    "\x1b[31m",
                    b"\xff",
                    b"5",
                    text(r),
                )
            )
            put = put.encode("utf-8", "surrogatepass") if isinstance(put, str) else put
            one = f"(SELECT name FROM state ORDER BY name LIMIT 1 OFFSET {r.randrange(30)})"  # noqa: S608
            where = f" WHERE name = {one}" if table == "state" and r.random() < 0.9 else ""
            as_text = "CAST(? AS TEXT)" if isinstance(put, bytes) and r.random() < 0.7 else "?"
            with contextlib.suppress(sqlite3.IntegrityError):  # not even SQLite would take it
                db.execute(f"UPDATE OR IGNORE {table} SET {column} = {as_text}{where}", (put,))  # noqa: S608  # our own
            changes.append((table, column, put))
    return changes


def _bytes_damaged(r: Input, files: dict[str, bytes]) -> list[object]:
    """Some bytes of one of the files overwritten, or the file cut off."""
    name = r.choice(list(files))
    data, changes = bytearray(files[name]), list[object]()
    for _ in range(r.choice((1, 1, 3, 30, 300))):
        at, size = r.randrange(len(data)), r.choice((1, 1, 1, 4, 64))
        if r.random() < 0.5:
            at = r.randrange(min(len(data), 200)) if r.random() < 0.3 else at // 4096 * 4096 + r.randrange(100)
        put = r.choice((r.randbytes(size), b"\0" * size, b"\xff" * size))
        data[at : at + size] = put
        changes.append((at, put))
    if r.random() < 0.1:
        del data[r.randrange(len(data)) :]
        changes.append(len(data))
    Path(name).write_bytes(data)
    return [name, *changes]


def _use(charge_id: str) -> None:
    """Whatever one may ask of a ledger: an answer of the right shape, or one line."""
    with quota.open("quota.toml", clock=lambda: NOW_MS) as session:
        budget = session.budget()
        for commit in (False, True):
            decision = (budget.charge if commit else budget.peek)("videos.list", job="trending", region="US")
            check_line(decision.sentence())
            decision.as_json()
            assert decision.reason in (
                "ok",
                "limit",
                "leave",
                "exhausted",
                "closed",
                "clock",
                "counting",
                "ledger-unavailable",
            )
            assert decision.admitted == (decision.reason == "ok")
            for state in decision.limits:
                assert type(state.used_units) is int
                if decision.admitted:
                    assert 0 <= state.used_units <= LIMIT, state
                    assert 0 <= state.remaining_units <= LIMIT, state
            if decision.admitted and commit:
                with contextlib.suppress(LedgerError, UnknownCharge):
                    assert budget.refund(str(decision.id)).units == 1
        check_readings(session, charge_id)
        for change in (
            lambda: session.ledger.claim("main", claim_of("a")),
            lambda: session.ledger.end_claim("main", claim_of("a"), "done"),
            lambda: session.ledger.reopen("main", "old"),
            lambda: session.ledger.roll_up("main", NOW_MS, present_hour=True),
            lambda: session.ledger.repair("main", "again", NOW_MS),
        ):
            try:
                change()
            except LedgerError as error:
                check_line(str(error))
