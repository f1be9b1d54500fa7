"""How far a journal was compared with its log, from where to where it is whole, and its facts; for all processes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from contract.journal.journals import NOW_MS, day_files, entry, forked, journal, keys
from quota.errors import LedgerError
from quota.journal import journal as journal_module
from quota.rules.entry import START
from quota.terms.limits import DAY_MS
from support.processes import in_threads

if TYPE_CHECKING:
    from pathlib import Path


def test_entries_of_an_epoch_need_no_comparison_with_it(tmp_path: Path) -> None:
    noted = journal(tmp_path)
    assert not noted.uncompared("e")
    noted.write("e", [entry()])
    assert not noted.uncompared("e")
    assert noted.uncompared("f")


def test_the_next_process_compares_notes_of_an_older_epoch(tmp_path: Path) -> None:
    with closing(journal(tmp_path)) as ended:
        ended.write("e", [entry(key="lost")])
    noted = journal(tmp_path)
    noted.write("f", [entry(key="new")])
    assert noted.uncompared("f")
    end = noted.position()
    assert keys(noted) == {("e", "lost"), ("f", "new")}
    noted.compared("f", end)
    assert not noted.uncompared("f")
    assert not journal(tmp_path).uncompared("f")


def test_entries_noted_during_a_comparison_are_compared_later(tmp_path: Path) -> None:
    mine, others = journal(tmp_path), journal(tmp_path)
    mine.write("e", [entry()])
    end = mine.position()
    others.write("e", [entry(key="meanwhile")])
    mine.compared("f", end)
    assert mine.uncompared("f")
    assert others.uncompared("f")
    assert [each.key for _, each in others.records(end)] == ["meanwhile"]


def test_a_slow_process_of_an_older_epoch_is_noticed_by_the_others(tmp_path: Path) -> None:
    mine, slow = journal(tmp_path), journal(tmp_path)
    slow.write("e", [entry()])
    mine.compared("f", mine.position())
    mine.write("f", [entry()])
    assert not mine.uncompared("f")
    slow.write("e", [entry()])
    assert mine.uncompared("f")


def test_entries_are_compared_with_each_new_log(tmp_path: Path) -> None:
    """Another machine may have made that one, which lacks what this machine alone has read."""
    noted = journal(tmp_path)
    noted.write("e", [entry()])
    noted.compared("f", noted.position())
    assert not noted.uncompared("f")
    assert noted.uncompared("g")


def test_marks_follow_so_that_nobody_reads_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = journal(tmp_path)
    noted.write("e", [entry(seq=seq) for seq in range(5_000)])
    assert not noted.uncompared("e")
    with closing(journal(tmp_path)) as later:
        monkeypatch.setattr(journal_module, "_has_another", lambda _, name, start, end, epoch: start != end)
        assert not later.uncompared("e")


def test_the_journal_is_not_compared_again_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = journal(tmp_path)
    noted.write("e", [entry()])
    assert not noted.uncompared("e")
    monkeypatch.setattr(journal_module, "_has_another", lambda *_: True)
    assert not noted.uncompared("e")
    noted.write("e", [entry()])
    assert noted.uncompared("e")


@pytest.mark.parametrize("harm", ["cut short", "replaced"])
def test_a_file_that_is_not_what_it_was_is_compared_from_its_beginning(tmp_path: Path, harm: str) -> None:
    noted = journal(tmp_path)
    noted.write("e", [entry(key=f"k{number}") for number in range(100)])
    noted.compared("f", noted.position())
    (path,) = day_files(tmp_path)
    whole = path.read_bytes()
    if harm == "replaced":
        path.unlink()
    path.write_bytes(whole[: len(whole) // 2])
    path.chmod(0o600)
    assert journal(tmp_path).uncompared("f")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"e\n\t0-0\t0-0\n2026-11-28\t99999\t1-1"])
def test_unreadable_marks_are_no_marks(tmp_path: Path, content: bytes) -> None:
    noted = journal(tmp_path)
    noted.write("e", [entry()])
    noted.note_whole("f", START, (NOW_MS, 0))
    noted.compared("f", noted.position())
    day_files(tmp_path)[0].with_name("marks").write_bytes(content)
    fresh = journal(tmp_path)
    assert fresh.uncompared("f")
    assert fresh.whole("f") is None
    assert fresh.trouble == ""


def test_ranges_that_touch_become_one_complete_range(tmp_path: Path) -> None:
    noted = journal(tmp_path)
    assert noted.whole("e") is None
    noted.note_whole("e", (50, 0), (60, 0))
    noted.note_whole("e", (40, 0), (50, 0))
    assert journal(tmp_path).whole("e") == ((40, 0), (60, 0))
    noted.note_whole("e", (10, 0), (20, 0))
    assert journal(tmp_path).whole("e") == ((40, 0), (60, 0)), "the later part holds"
    journal(tmp_path).note_whole("e", (70, 0), (80, 0))
    assert noted.whole("e") == ((70, 0), (80, 0))
    assert noted.whole("f") is None
    noted.compared("f", noted.position())
    assert noted.whole("e") == ((70, 0), (80, 0))
    noted.note_whole("f", START, (1, 0))
    assert (noted.whole("e"), noted.whole("f")) == (None, (START, (1, 0)))


def test_the_newest_facts_are_those_of_any_process(tmp_path: Path) -> None:
    mine, others = journal(tmp_path), journal(tmp_path)
    assert mine.facts() == ""
    mine.write_facts("e", "closed\nuntil\t9", (5, 0))
    assert others.facts() == "closed\nuntil\t9"
    others.write_facts("e", "older", (4, 0))
    assert mine.facts() == others.facts() == "closed\nuntil\t9"
    others.write_facts("f", "", (1, 0))
    assert mine.facts() == journal(tmp_path).facts() == ""


def test_one_process_of_the_machine_compares_at_a_time(tmp_path: Path) -> None:
    mine, others = journal(tmp_path), journal(tmp_path)
    with mine.locked():
        with mine.locked():
            pass
        began_s = time.monotonic()
        with pytest.raises(LedgerError, match="another process of this machine") as caught:
            others.locked()
        assert 0.25 < time.monotonic() - began_s < 5
        assert len(str(caught.value).splitlines()) == 1
        others.note_whole("e", START, (1, 0))
        mine.note_whole("e", START, (2, 0))
    with others.locked():
        assert others.whole("e") == (START, (2, 0)), "who is not alone notes nothing"


def test_one_thread_of_a_process_compares_at_a_time(tmp_path: Path) -> None:
    noted, refused = journal(tmp_path), list[Exception]()

    def work() -> None:
        try:
            noted.locked(0)
        except LedgerError as error:
            refused.append(error)

    with noted.locked():
        in_threads(work, ())
    assert len(refused) == 1


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def work() -> None:
        with journal(tmp_path).locked():
            os.write(writer, b"x")
            time.sleep(60)

    with forked(work) as (child,):
        os.read(reader, 1)
        os.kill(child, signal.SIGKILL)
    with journal(tmp_path).locked(0):
        pass
    os.close(reader)
    os.close(writer)


def test_a_forked_child_holds_no_lock_of_its_parent(tmp_path: Path) -> None:
    mine = journal(tmp_path)
    with ExitStack() as children:
        with mine.locked():
            (child,) = children.enter_context(forked(lambda: time.sleep(60)))
            children.callback(os.kill, child, signal.SIGKILL)
            with pytest.raises(LedgerError):
                journal(tmp_path).locked(0)
        with journal(tmp_path).locked(2):
            pass


def test_marks_of_two_days_hold_for_both_files(tmp_path: Path) -> None:
    noted = journal(tmp_path, NOW_MS + DAY_MS)
    noted.write("e", [entry(), entry(seq=1)])
    noted.write("e", [entry(NOW_MS + DAY_MS)])
    noted.compared("f", noted.position())
    assert not journal(tmp_path, NOW_MS + DAY_MS).uncompared("f")
    noted.write("e", [entry(NOW_MS + DAY_MS, 1)])
    assert journal(tmp_path, NOW_MS + DAY_MS).uncompared("f")
