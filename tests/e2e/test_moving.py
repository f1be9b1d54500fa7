"""What a process reads of a ledger that has moved."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.deciding import project
from quota.ledger.factory import open_ledger
from quota.rules.entry import START, Entry
from support.commands import Quota
from support.configurations import limited

HELD = 8_000
"""Charges in the ledger before it moves."""


def test_a_process_started_after_a_move_reads_only_newer_entries(
    shared: str, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was counted before is kept, also of a log that is younger than its windows."""
    old = f"sqlite:///{tmp_path}/ledger.db"
    with closing(open_ledger(old)) as ledger:
        since_ms = ledger.now_ms() - 3_600_000
        done, fence = ledger.fence("p", "", "before")
        held = [Entry((since_ms + n, 0), 1, "units", "videos.list", "", "", f"held{n:05}") for n in range(HELD)]
        assert done
        assert ledger.replace("p", fence, START, held, "first")
    command = Quota(tmp_path)
    config = command.configure(limited(HELD + 100, ledger=shared))
    assert command("ledger", "move", old, shared).returncode == 0
    monkeypatch.setattr(project, "COUNT_WITHIN_S", 100.0)
    amounts = []
    for _ in range(2):
        with quota.open(config) as session:
            budget, read, numbers = session.budget(), session.ledger.read, []

            def noted(*args: Any, read: Any = read, numbers: list[int] = numbers) -> Any:
                entries = read(*args)
                numbers.append(len(entries))
                return entries

            monkeypatch.setattr(session.ledger, "read", noted)
            assert budget.charge("videos.list").admitted
            amounts.append(sum(numbers))
    assert amounts[0] >= HELD > 1_000 > amounts[1]
