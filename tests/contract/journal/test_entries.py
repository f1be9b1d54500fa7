"""What is noted, and read again by any process of the machine: whole, in order, once, and compared with its log."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from contract.journal.journals import NOW_MS, day_files, entry, forked, ids, journal, keys
from quota.errors import LedgerError
from quota.journal.files import framed, record_line
from quota.ledger.factory import Identity
from quota.rules.entry import START, Entry, packed
from quota.rules.facts import Exhaustion, Facts
from quota.terms.limits import DAY_MS, HOUR_MS, SLACK_MS
from support.servers import until


def test_another_process_reads_entries_in_order_and_unchanged_and_once_in_an_epoch(tmp_path: Path) -> None:
    charge = entry(seq=1)
    correction = charge._replace(
        id=(NOW_MS, 2), units=40, key="c", kind="correction", of=charge.key, at=charge.id, before_units=100
    )
    others = Entry((NOW_MS, 3), 900, "units", "", "", "", "o", "others", "usage", (1, 2), 0)
    marker = Entry((NOW_MS, 4), 0, "", "", "", "", "m", "marker")
    odd = entry(seq=5)._replace(job="ä \ufffd\x00 ")
    entries = [charge, correction, others, marker, odd]
    with closing(journal(tmp_path)) as noted:
        noted.write("e", entries[:3])
        for epoch in ("e", "e", "f", "f"):
            noted.write(epoch, entries[3:])
    assert list(journal(tmp_path).records()) == [*(("e", each) for each in entries), ("f", marker), ("f", odd)]


def test_the_newest_is_that_of_all_processes_and_of_the_epoch(tmp_path: Path) -> None:
    mine, others = journal(tmp_path), journal(tmp_path)
    assert mine.newest("e") == START
    for seq in range(1, 300):
        others.write("e", [entry(seq=seq)])
        assert mine.newest("e") == (NOW_MS, seq)
    others.write("f", [entry(NOW_MS + 1)])
    assert mine.newest("e") == (NOW_MS, 299)
    assert mine.newest("f") == (NOW_MS + 1, 0)
    for seq in (200, 100):
        mine.write("e", [entry(seq=seq)])
    assert mine.newest("e") == others.newest("e") == journal(tmp_path).newest("e") == (NOW_MS, 299)
    mine.proved("e", [(NOW_MS, 100)])
    assert mine.late("e") == ((NOW_MS, 200),)
    others.write("e", [entry(seq=300)])
    mine.write("e", [entry(seq=301)])
    assert (mine.newest("e"), mine.late("e")[1:]) == ((NOW_MS, 301), ((NOW_MS, 300),)), "it may be in a lost log"


def test_the_newest_stands_at_the_end_also_behind_what_was_read_late(tmp_path: Path) -> None:
    """Old entries that are noted in pieces push the newest out of the tail that a new process reads."""
    mine, others = journal(tmp_path), journal(tmp_path)
    others.write("e", [entry(NOW_MS + 5)])
    mine.write("e", [entry(seq=seq) for seq in range(5_000)])
    reader = journal(tmp_path)
    reader._search_back = None  # type: ignore[method-assign,assignment]  # it needs no more than the tail
    assert reader.newest("e") == (NOW_MS + 5, 0)


def test_a_file_has_a_day_and_all_go_over_to_the_next_one(tmp_path: Path) -> None:
    mine, others = journal(tmp_path, NOW_MS + DAY_MS), journal(tmp_path, NOW_MS + DAY_MS)
    mine.write("e", [entry()])
    others.write("e", [entry(seq=1)])
    others.write("e", [entry(NOW_MS + 12 * HOUR_MS)])
    assert mine.newest("e") == (NOW_MS + 12 * HOUR_MS, 0), "it sees the file that another process has begun"
    mine.write("e", [entry(seq=2)])
    assert [path.name for path in day_files(tmp_path)] == ["2026-11-28", "2026-11-29"]
    assert ids(journal(tmp_path, NOW_MS + DAY_MS))[-1] == (NOW_MS, 2), "what is read late stands at the end"


def test_old_files_are_deleted_whole(tmp_path: Path) -> None:
    """Also one that a wrong clock began a year ahead: it is as old as its last line."""
    end_ms = NOW_MS + 12 * HOUR_MS
    journal(tmp_path, now_ms=NOW_MS + 365 * DAY_MS).write("e", [entry(NOW_MS + 365 * DAY_MS)])
    os.utime(day_files(tmp_path)[0], ns=(0, NOW_MS * 1_000_000))
    noted = journal(tmp_path, now_ms=NOW_MS + 30 * DAY_MS)
    noted.write("e", [entry()])
    last_ms = end_ms + DAY_MS + SLACK_MS - 1
    noted.write("e", [entry(last_ms)])
    assert len(day_files(tmp_path)) == 2
    noted.write("e", [entry(last_ms + DAY_MS)])
    assert [path.name for path in day_files(tmp_path)] == ["2026-12-01", "2026-12-02"]


YEAR_MS = 365 * DAY_MS


@pytest.mark.parametrize(("host_ms", "ledger_ms"), [(YEAR_MS, DAY_MS), (DAY_MS, YEAR_MS), (-YEAR_MS, DAY_MS)])
def test_no_clock_alone_makes_a_journal_forget(tmp_path: Path, host_ms: int, ledger_ms: int) -> None:
    journal(tmp_path).write("e", [entry()])
    noted = journal(tmp_path, now_ms=NOW_MS + host_ms)
    noted.write("e", [entry(NOW_MS + ledger_ms)])
    assert len(day_files(tmp_path)) == 2
    assert day_files(tmp_path)[1].name <= "2026-11-30"
    noted = journal(tmp_path, now_ms=NOW_MS + DAY_MS)
    noted.write("e", [entry(NOW_MS + DAY_MS, 1)])
    assert sorted(ids(noted)) == sorted([(NOW_MS, 0), (NOW_MS + ledger_ms, 0), (NOW_MS + DAY_MS, 1)])


def test_files_are_their_users_alone_and_each_identity_has_its_own(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for ledger in ("a", "b"):
            noted = journal(tmp_path, identity=Identity(ledger, "p/../q", "endpoint"))
            noted.write("e", [entry()])
            noted.note_whole("e", (2, 0))
            noted.note_facts(Facts().text(), NOW_MS)
            noted.draws.draw([entry()], "e", START, now_ms=NOW_MS, window_ms=DAY_MS, allowance_units=9)
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert len(day_files(tmp_path)) == 2
    assert len(list((tmp_path / "journals").iterdir())) == 1, "they are one upstream project"


def test_several_processes_note_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    def work(process: int) -> None:
        noted = journal(tmp_path)
        for seq in range(150):
            noted.write("e", [entry(seq=seq * 10 + process, key=f"{process}-{seq}")])
            assert noted.newest("e") >= (NOW_MS, seq * 10 + process)

    with forked(*(lambda process=process: work(process) for process in range(6))):
        pass
    assert keys(journal(tmp_path)) == {("e", f"{process}-{seq}") for process in range(6) for seq in range(150)}
    assert journal(tmp_path).newest("e") == (NOW_MS, 1495)


def test_a_killed_process_loses_nothing_that_it_had_noted_and_spoils_nothing(tmp_path: Path) -> None:
    """Each process tells what it has noted, until it is killed in the middle; others go on behind what it left."""
    dice = random.Random(7)
    noted_keys: set[tuple[str, str]] = set()
    for round_number in range(6):
        reader, writer = os.pipe()

        def work(writer: int = writer, round_number: int = round_number) -> None:
            noted = journal(tmp_path)
            for number in range(10**9):
                noted.write("e", [entry(seq=number, key=f"{round_number}-{number}")])
                os.write(writer, b"%d\n" % number)

        with forked(work) as (child,):
            os.close(writer)
            heard, lines = b"", dice.randint(2, 300)
            while heard.count(b"\n") < lines:
                heard += os.read(reader, 4_000)
            os.kill(child, signal.SIGKILL)
            while more := os.read(reader, 65_536):
                heard += more
        os.close(reader)
        noted_keys |= {
            ("e", f"{round_number}-{number}") for number in heard.split(b"\n")[0:-1] and range(int(heard.split()[-1]))
        }
        with day_files(tmp_path)[-1].open("ab") as file:  # as a write that was cut off
            file.write(b"\n" + record_line("e", (1, 1), packed(entry()))[: dice.randint(1, 60)])
    assert noted_keys
    assert noted_keys <= keys(journal(tmp_path))


def test_damaged_bytes_cost_their_own_record_alone(tmp_path: Path) -> None:
    noted = journal(tmp_path)
    for seq in range(200):
        noted.write("e", [entry(seq=seq, key=f"k{seq}")])
    (path,) = day_files(tmp_path)
    whole = path.read_bytes()
    dice = random.Random(3)
    for _ in range(30):
        damaged = bytearray(whole)
        at = dice.randrange(len(whole))
        damaged[at] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        left = list(journal(tmp_path).records())
        assert len(left) >= 198
        assert {each.units for _, each in left} == {1}
        assert {each.key for _, each in left} <= {f"k{seq}" for seq in range(200)}
    path.write_bytes(whole[:5_000] + os.urandom(600_000).replace(b"\n", b"") + whole[9_000:])
    assert 100 < len(list(journal(tmp_path).records())) < 200


def test_a_program_that_closes_all_descriptors_loses_nothing_and_is_not_written_into(tmp_path: Path) -> None:
    def work() -> None:
        noted = journal(tmp_path)
        noted.write("e", [entry(seq=1)])
        os.closerange(3, 100)
        own = [os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT | os.O_APPEND) for _ in range(20)]
        noted.write("e", [entry(seq=2)])
        assert noted.newest("e") == (NOW_MS, 2)
        noted.close()
        assert os.fstat(own[0]).st_size == 0
        for fd in own:
            os.close(fd)

    with forked(work):
        pass
    assert ids(journal(tmp_path)) == [(NOW_MS, 1), (NOW_MS, 2)]


def test_a_folder_that_was_deleted_or_put_aside_is_made_anew(tmp_path: Path) -> None:
    noted = journal(tmp_path)
    noted.write("e", [entry(seq=1)])
    (tmp_path / "journals").rename(tmp_path / "aside")
    until(lambda: noted.position() == {"": 0}, "the folder is not missed")
    noted.write("e", [entry(seq=2)])
    assert ids(journal(tmp_path)) == [(NOW_MS, 2)]
    day_files(tmp_path)[0].unlink()
    noted.newest("e")
    noted.write("e", [entry(seq=3)])
    assert ids(journal(tmp_path)) == [(NOW_MS, 3)]
    assert noted.newest("e") == (NOW_MS, 3)


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
    assert noted.uncompared("g"), "another machine may have made it without what this machine alone has read"


def test_entries_noted_during_a_comparison_are_compared_later(tmp_path: Path) -> None:
    mine, others = journal(tmp_path), journal(tmp_path)
    mine.write("e", [entry()])
    end = mine.position()
    others.write("e", [entry(key="meanwhile")])
    mine.compared("f", end)
    assert mine.uncompared("f")
    assert others.uncompared("f")
    assert [each.key for _, each in others.records(end)] == ["meanwhile"]


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


SHORT = framed(b'["f", {}, "f", [0], 5, "", ""]')
ENDLESS = framed(b'["f", {"2026-11-28": Infinity}, "f", [0, 0], "{}", "", ""]')


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"[]\t2-1", SHORT, ENDLESS])
def test_unreadable_notes_are_no_notes(tmp_path: Path, content: bytes) -> None:
    noted = journal(tmp_path)
    noted.write("e", [entry()])
    noted.note_whole("f", (NOW_MS, 0))
    noted.compared("f", noted.position())
    day_files(tmp_path)[0].with_name("notes").write_bytes(content)
    fresh = journal(tmp_path)
    assert fresh.uncompared("f")
    assert (fresh.whole("f"), fresh.notes().facts, fresh.trouble) == (None, "", "")


def test_a_log_is_complete_up_to_the_last_entry_that_any_process_read_back_to(tmp_path: Path) -> None:
    noted = journal(tmp_path)
    assert noted.whole("e") is None
    noted.note_whole("e", (60, 0))
    noted.note_whole("e", (20, 0))
    assert journal(tmp_path).whole("e") == (60, 0)
    journal(tmp_path).note_whole("e", (80, 0))
    noted.compared("f", noted.position())
    assert (noted.whole("e"), noted.whole("f")) == ((80, 0), None)
    noted.note_whole("f", (1, 0))
    assert (noted.whole("e"), noted.whole("f")) == (None, (1, 0))


def test_facts_of_any_process_are_noted_together_but_for_those_of_the_future(tmp_path: Path) -> None:
    mine, others = journal(tmp_path), journal(tmp_path)
    assert mine.notes().facts == ""
    early, late = (Exhaustion(name, NOW_MS + n, NOW_MS + DAY_MS, "", "") for n, name in enumerate(("early", "late")))
    mine.note_facts(Facts((early,)).text(), NOW_MS)
    others.note_facts(Facts((late,)).text(), NOW_MS)
    assert mine.notes().facts == others.notes().facts == Facts((early, late)).text()
    mine.note_facts(Facts().text(), NOW_MS)
    assert others.notes().facts == journal(tmp_path).notes().facts == Facts((early,)).text()


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
        others.note_whole("e", (9, 0))
        mine.note_whole("e", (2, 0))
    with others.locked():
        assert others.whole("e") == (2, 0), "who is not alone notes nothing"


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
