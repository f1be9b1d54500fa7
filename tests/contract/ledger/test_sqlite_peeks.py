"""Where an SQLite ledger would take no charge, a peek says so, too."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

import quota
from quota.errors import LedgerError
from quota.ledger.sqlite_ledger import SqliteLedger
from quota.reports.status import read_status
from support.users import not_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("one", "two")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two credentials with a charge each. A transaction waits 50 ms for others."""
    monkeypatch.setattr(SqliteLedger, "_deadline_s", 0.05)
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    path = tmp_path / "quota.toml"
    credentials = "".join(f'[credentials.{name}]\napi = "youtube-v3"\n' for name in NAMES)
    path.write_text(f'[ledger]\nurl = "sqlite:///ledger.db"\n{credentials}')
    with quota.open(path) as session:
        for name in NAMES:
            assert session.budget(name).charge("search.list").admitted
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.rollback()


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    path.chmod(0o400)
    with not_root():
        yield


@pytest.mark.parametrize("unwritable", [locked, read_only])
def test_a_peek_promises_nothing_that_a_charge_is_refused(config: Path, unwritable: object) -> None:
    with unwritable(config.parent / "ledger.db"), quota.open(config) as session:  # type: ignore[operator]
        budget = session.budget("one")
        peeked, charged = budget.peek("search.list"), budget.charge("search.list")
        assert (peeked.reason, peeked.detail) == (charged.reason, charged.detail)
        assert charged.reason == "ledger-unavailable"
        with pytest.raises(LedgerError):
            budget.usage()
        with pytest.raises(LedgerError):  # several are asked in one transaction
            read_status(session)


def test_a_process_that_knows_the_file_by_heart_finds_out_too(config: Path) -> None:
    with quota.open(config) as session:
        budget = session.budget("one")
        for _ in range(10):
            assert budget.peek("search.list").admitted
        with locked(config.parent / "ledger.db"):
            assert budget.peek("search.list").reason == "ledger-unavailable"
        assert budget.charge("search.list").admitted
        assert len(read_status(session).credentials) == len(NAMES)
