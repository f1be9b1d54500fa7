"""Damaged ledgers and journals: a decision of the right shape, or one line that says what is wrong with the file."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fuzz.house import damage_file, damage_rows, furnish, unlink
from fuzz.inputs import PARTS, Input, every
from fuzz.readings import CREDENTIAL, NOW_MS, check_all, check_decisions, opened
from quota.deciding import losses, outlook
from quota.journal.journal import FOLDER
from quota.ledger import state
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS

CONFIG = f"""
[ledger]
url = "sqlite:///ledger.db"
unavailable = {{ max_cost = 1, allowance = 50, machines = 1 }}
{CREDENTIAL}
"""
NO_DATABASE = b"no database" * 100


class Files:
    """The files of a ledger and a journal in good order, and how they are put back."""

    def __init__(self) -> None:
        Path("quota.toml").write_text(CONFIG)
        self.settings = load_settings("quota.toml")
        # While somebody has the file open, nothing is moved out of its -wal.
        with opened(self.settings) as session:
            self.charge_id = furnish(session, NOW_MS)
            self.with_wal = read("ledger.db")
        self.clean = read("ledger.db")
        unlink("ledger.db")
        Path("ledger.db").write_bytes(NO_DATABASE)
        with opened(self.settings) as session:
            drawn = session.budget().charge("videos.list")
            assert drawn.source == "allowance"
            session.budget().charge("videos.list")
            session.budget().refund(str(drawn.id))
        Path("state").rename("kept")

    def put(self, files: dict[str, bytes], *, journal: bool) -> None:
        unlink("ledger.db")
        for name, data in files.items():
            Path(name).write_bytes(data)
        shutil.rmtree("state", ignore_errors=True)
        if journal:
            shutil.copytree("kept", "state")


def read(name: str) -> dict[str, bytes]:
    return {name + suffix: Path(name + suffix).read_bytes() for suffix in ("", "-wal") if Path(name + suffix).exists()}


@pytest.fixture
def files(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(losses, "WAIT_S", 0.02)  # a damaged epoch may read as a fence
    monkeypatch.setattr(state, "FENCED_WITHIN_S", 0.02)
    monkeypatch.setattr(outlook, "LOOK_WITHIN_S", 1.0)  # a damaged index may lack the newest entry each time
    return Files()


@pytest.mark.parametrize("part", range(PARTS))
def test_a_damaged_ledger_decides_or_is_one_line(part: int, files: Files) -> None:
    def attempt(r: Input) -> None:
        good = r.choice((files.with_wal, files.clean))
        files.put(good, journal=r.random() < 0.5)
        if r.random() < 0.6:
            r.data = [damage_rows(r, "ledger.db") for _ in range(r.choice((1, 1, 2, 5)))]
        else:
            r.data = damage_bytes(r, good)
        check_all(r, files.settings, files.charge_id)

    every("ledger-file", part, attempt)


def test_a_note_of_a_correction_that_the_log_does_not_have_is_not_read_for_ever(files: Files) -> None:
    files.put(files.clean, journal=False)
    with closing(sqlite3.connect("ledger.db")) as db, db:
        assert db.execute("UPDATE corrected SET ms = ?", (NOW_MS + DAY_MS,)).rowcount == 1
    with opened(files.settings, NOW_MS + 10) as session:
        budget = session.budget()
        assert budget.charge("videos.list").admitted
        assert session.project().frees_at_ms(budget.limits[0].view, 1) == NOW_MS + DAY_MS


def test_ids_that_no_journal_knows_are_not_asked_for_without_end(files: Files) -> None:
    """The log has all that this machine has seen, under other ids: then those hold."""
    files.put(files.clean, journal=True)
    with closing(sqlite3.connect("ledger.db")) as db, db:
        db.execute("UPDATE log SET ms = ms - 1000")
    with opened(files.settings, NOW_MS + 10) as session:
        check_decisions(session)
        assert session.budget("main").charge("videos.list").admitted


@pytest.mark.parametrize("part", range(PARTS))
def test_a_damaged_journal_decides_or_is_one_line(part: int, files: Files) -> None:
    """While the ledger has all of it, has lost some of it, or cannot answer; and while a draw is owed."""

    def attempt(r: Input) -> None:
        files.put(files.clean, journal=True)
        others = sorted(path for path in Path("state", FOLDER).rglob("*") if path.is_file() and path.stat().st_size)
        r.data = [damage_file(r, r.choice(others)) for _ in range(r.choice((1, 1, 2, 5)))]
        kind = r.random()
        if kind < 0.2:
            Path("ledger.db").write_bytes(NO_DATABASE)
        elif kind < 0.6:
            with closing(sqlite3.connect("ledger.db")) as db, db:
                db.execute(r.choice(("DELETE FROM log", "DELETE FROM state", "DELETE FROM log WHERE seq % 2")))
        check_all(r, files.settings, files.charge_id)

    every("journal", part, attempt)


def damage_bytes(r: Input, files: dict[str, bytes]) -> list[object]:
    """Some bytes of one of the files overwritten, or the file cut off."""
    name = r.choice(list(files))
    data, changes = bytearray(files[name]), list[object]()
    for _ in range(r.choice((1, 1, 3, 30, 300))):
        at, size = r.randrange(len(data)), r.choice((1, 1, 1, 4, 64))
        if r.random() < 0.5:
            at = r.randrange(min(len(data), 200)) if r.random() < 0.3 else at // 2048 * 2048 + r.randrange(100)
        put = r.choice((r.randbytes(size), b"\0" * size, b"\xff" * size))
        data[at : at + size] = put
        changes.append((at, put))
    if r.random() < 0.1:
        del data[r.randrange(len(data)) :]
        changes.append(len(data))
    Path(name).write_bytes(data)
    return [name, *changes]
