"""Projects that a configuration charged and names no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.ledger.identity import Identity
from quota.recovery.left_behind import left_behind
from quota.recovery.registry import close_high_water_mark, open_high_water_mark
from quota.terms.limits import DAY_MS
from support.books import BOOK
from support.setup import limit

if TYPE_CHECKING:
    from pathlib import Path

NOW_MS = 1_700_000_000_000


def charge(folder: Path, identity: Identity, now_ms: int) -> None:
    ledger, mark = open_ledger("sqlite://", clock=lambda: now_ms), open_high_water_mark(folder, identity, "here")
    budget = Budget(
        credential="c",
        project=identity.project,
        book=BOOK,
        limits=(limit(1_000),),
        ledger=ledger,
        clock=lambda: now_ms,
        identity=identity,
        high_water_mark=mark,
    )
    assert budget.charge("search.list").admitted
    close_high_water_mark(mark)
    ledger.close()


def test_a_project_is_left_behind_until_what_was_seen_of_it_has_expired(tmp_path: Path) -> None:
    was, other, now = Identity("mine", "was"), Identity("another's", "theirs"), Identity("mine", "is")
    assert left_behind(tmp_path, [now], NOW_MS) == []
    for identity in (was, other, now):
        charge(tmp_path, identity, NOW_MS)
    assert left_behind(tmp_path, [now], NOW_MS + DAY_MS - 1) == [("was", NOW_MS + DAY_MS)]
    assert left_behind(tmp_path, [now], NOW_MS + DAY_MS) == []
    assert left_behind(tmp_path, [now, was], NOW_MS) == []


def test_what_is_no_file_of_ours_is_passed_over(tmp_path: Path) -> None:
    charge(tmp_path, Identity("mine", "was"), NOW_MS)
    marks = tmp_path / "high-water-marks"
    (marks / "notes").write_text("not ours")
    (marks / f"x-{'0' * 16}").write_text("no folder")
    (marks / f"empty-{'0' * 16}").mkdir()
    (marks / f"junk-{'0' * 16}").mkdir()
    (marks / f"junk-{'0' * 16}" / ("a" * 32)).write_bytes(b"junk" * 9_999)
    assert left_behind(tmp_path, [Identity("mine", "is")], NOW_MS) == [("was", NOW_MS + DAY_MS)]
