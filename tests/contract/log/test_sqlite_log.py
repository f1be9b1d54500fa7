"""What is SQLite's own: the file, who may open it, and the transaction of one author."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from contract.log.logs import P, add, added, ask, charge, entries_of
from quota.errors import LedgerError, UnusableLedger
from quota.ledger.sqlite_log import APPLICATION_ID, SCHEMA_VERSION, SqliteLog
from quota.rules.entry import END, START


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def log(path: Path) -> Iterator[SqliteLog]:
    with closing(SqliteLog(f"sqlite:///{path}")) as log:
        yield log


def run(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def test_the_file_is_a_ledger_of_this_version(log: SqliteLog, path: Path) -> None:
    add(log, charge())
    log.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(
    ("version", "says"), [(13, "older quota-ledger"), (SCHEMA_VERSION - 1, "older"), (SCHEMA_VERSION + 1, "newer")]
)
def test_a_ledger_of_another_version_is_refused_in_one_line(path: Path, version: int, says: str) -> None:
    run(path, f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {version}", "CREATE TABLE t (c)")
    path.chmod(0o600)
    with closing(SqliteLog(f"sqlite:///{path}")) as log, pytest.raises(UnusableLedger, match=says) as refused:
        log.begin(P)
    assert ("\n" in str(refused.value), "; " in str(refused.value)) == (False, True), "it says what to do"


@pytest.mark.parametrize("says", ["another program", "not an SQLite database"])
def test_a_file_that_is_no_ledger_is_refused(path: Path, says: str) -> None:
    if says == "another program":
        run(path, "CREATE TABLE log (project, ms, seq, line)")
    else:
        path.write_text("x" * 5_000)
    path.chmod(0o600)
    with closing(SqliteLog(f"sqlite:///{path}")) as log, pytest.raises(UnusableLedger, match=says):
        add(log, charge())


def test_a_table_that_somebody_has_removed_is_damage(log: SqliteLog, path: Path) -> None:
    add(log, charge())
    run(path, "DROP TABLE state")
    with pytest.raises(UnusableLedger, match="is damaged"):
        log.begin(P)


def test_doctor_finds_rows_in_the_wrong_order(log: SqliteLog, path: Path) -> None:
    add(log, charge(), charge())
    schema = "UPDATE sqlite_master SET sql = replace(sql, 'ms, seq)', 'ms DESC, seq DESC)')"
    log.close()
    run(path, "PRAGMA writable_schema = ON", schema)
    assert [(each.level, each.message[-10:]) for each in log.examine(P)][1:] == [("error", "is damaged")]


def test_a_file_with_a_second_name_is_refused(log: SqliteLog, path: Path) -> None:
    add(log, charge())
    path.with_name("second").hardlink_to(path)
    second = SqliteLog(f"sqlite:///{path}".replace("ledger.db", "second"))
    with closing(second), pytest.raises(UnusableLedger, match="a second file for SQLite"):
        second.begin(P)


@pytest.mark.parametrize("line", ["'x'", "''", "x'ff00'", "CAST(x'ff00' AS TEXT)", "5", "'1' || char(0)"])
def test_an_unreadable_row_raises_nothing(log: SqliteLog, path: Path, line: str) -> None:
    spoilt, last = added(log, charge(), charge())
    run(path, f"UPDATE log SET line = {line} WHERE seq = {spoilt.id[1]}")  # noqa: S608  # of this test
    assert [entry.kind for entry in entries_of(log)] == ["unreadable", "charge"]
    assert ask(log, charge(), epoch="first", seen=spoilt.id, room=1).word == "APPENDED"
    assert ask(log, charge(), epoch="first", room=10**6).word == "AGAIN"
    assert log.trim(P, 2**53) == 3
    assert log.past(P, START, END, 10)[0] == last


def test_a_file_that_is_locked_raises_in_the_end_and_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteLog, "_deadline_s", 0.05)
    with closing(SqliteLog(f"sqlite:///{path}")) as log, closing(sqlite3.connect(path, isolation_level=None)) as other:
        add(log, charge())
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="is locked by another process"):
            ask(log, charge(), room=9)
        assert (ask(log).word, len(entries_of(log)), log.begin(P).tip) == ("READ", 1, entries_of(log)[0].id)
        assert log.change(P, {"facts": None}, {}).state == {}
        other.execute("ROLLBACK")
        assert ask(log, charge(), room=9).word == "APPENDED"
