"""Disks that are full, folders that cannot be written, what others have put there: entries are kept in memory."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from contract.journal.journals import NOW_MS, day_files, entry, ids, journal
from quota.errors import LedgerError
from quota.journal import journal as journal_module
from quota.journal.journal import Journal
from quota.rules.entry import START
from quota.rules.facts import Facts
from quota.terms.limits import DAY_MS
from support.disks import fill, small_disk
from support.users import NOBODY, needs_root, not_root


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again with each entry."""
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)


def goes_on_in_memory(noted: Journal, seqs: range, why: str) -> None:
    for seq in seqs:
        noted.write("f", [entry(seq=seq)])
        assert noted.newest("f") == (NOW_MS, seq)
    assert ids(noted, "f")[-len(seqs) :] == [(NOW_MS, seq) for seq in seqs]
    assert noted.uncompared("e")
    assert why in noted.trouble
    with noted.locked():
        noted.compared("e", noted.position())
    with pytest.raises(LedgerError, match=f"allowance .*{why}, so nothing is drawn; .* or set QUOTA_STATE_DIR"):
        noted.draws.draw([entry()], "e", START, now_ms=NOW_MS, window_ms=DAY_MS, allowance_units=50)


def test_a_full_disk_keeps_entries_in_memory_and_takes_them_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", 256):
        noted = journal(tmp_path / "disk")
        noted.write("e", [entry()])
        ballast = fill(tmp_path / "disk")
        noted.write("e", [entry(seq=seq) for seq in range(1, 200)])  # a part of it fits into the last page
        goes_on_in_memory(noted, range(200, 300), os.strerror(errno.ENOSPC))
        assert len([each for each in caplog.records if "journal_unusable" in each.message]) == 1
        ballast.unlink()
        noted.write("f", [entry(seq=300)])
        assert noted.trouble == ""
        fresh = journal(tmp_path / "disk")
        assert set(ids(fresh, "e")) == {(NOW_MS, seq) for seq in range(200)}
        assert set(ids(fresh, "f")) == {(NOW_MS, seq) for seq in range(200, 301)}
        assert fresh.newest("f") == (NOW_MS, 300)


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    journal(tmp_path).write("e", [entry()])
    for path in tmp_path.rglob("*"):
        path.chmod(0o500 if path.is_dir() else 0o400)
    with not_root():
        noted = journal(tmp_path)
        assert noted.newest("e") == (NOW_MS, 0)
        assert ids(noted) == [(NOW_MS, 0)]
        assert noted.trouble == ""
        noted.check_writable()
        assert noted.trouble.endswith("Permission denied")
        noted = journal(tmp_path)
        goes_on_in_memory(noted, range(1, 20), "Permission denied")
        noted.note_facts(Facts().text(), NOW_MS)
        noted.note_whole("f", (NOW_MS, 19))
        assert (noted.notes().facts, noted.whole("f")) == (Facts().text(), (NOW_MS, 19))
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)


def test_a_state_folder_that_cannot_be_made_keeps_entries_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    goes_on_in_memory(journal(tmp_path / "file"), range(1, 20), "Not a directory")


def test_memory_keeps_a_bounded_number_of_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_IN_MEMORY", 100)
    (tmp_path / "file").write_text("")
    noted = journal(tmp_path / "file")
    position = noted.position()
    for seq in range(250):
        noted.write("e", [entry(seq=seq)])
        if seq == 200:
            position = noted.position()
    assert ids(noted) == [(NOW_MS, seq) for seq in range(150, 250)]
    assert [each.id[1] for _, each in noted.records(position)] == [*range(201, 250)]


@pytest.mark.parametrize("name", ["2026-11-28", "notes", "notes.new", "lock", "draws", "draws.lock"])
@pytest.mark.parametrize("planted", ["link", "link of another user", "pipe", "file of another user"])
@needs_root
def test_a_planted_link_or_pipe_is_neither_followed_nor_waited_for(tmp_path: Path, name: str, planted: str) -> None:
    first = journal(tmp_path / "state")
    first.write("e", [entry()])
    folder = day_files(tmp_path / "state")[0].parent
    path = (folder.parent if name.startswith("draws") else folder) / name
    path.unlink(missing_ok=True)
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    if planted.startswith("link"):
        path.symlink_to(victim)
    elif planted == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes(b"theirs")
    if planted.endswith("user"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    before = path.lstat()
    noted = journal(tmp_path / "state")
    noted.write("e", [entry(seq=7)])
    assert noted.newest("e") == (NOW_MS, 7)
    assert (NOW_MS, 7) in ids(noted)
    with noted.locked():
        noted.compared("f", noted.position())
    noted.note_facts(Facts().text(), NOW_MS)
    assert noted.notes().facts == Facts().text()
    assert noted.draws.owed() == []
    if name.startswith("draws"):
        with pytest.raises(LedgerError):
            noted.draws.draw([entry()], "e", START, now_ms=NOW_MS, window_ms=DAY_MS, allowance_units=50)
    else:
        assert noted.trouble
    assert victim.read_text() == "theirs"
    if name == "notes":  # it is replaced as it stands
        assert stat.S_ISREG(path.lstat().st_mode)
        return
    stood, stands = ((stat.S_IFMT(each.st_mode), each.st_uid, each.st_size) for each in (before, path.lstat()))
    assert stands == stood
