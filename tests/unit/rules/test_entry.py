"""The line that stores an entry, the text of an id, and keys: each attempt has its own, and machines, reservations and
further charges are told by them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from quota.rules.entry import (
    END,
    FURTHER,
    MACHINE_CHARS,
    RESERVED,
    RUN_CHARS,
    START,
    Entry,
    Keys,
    id_text,
    is_first,
    is_reservation,
    machine_mark,
    packed,
    read_id,
    unpacked,
)

ID = (1_795_233_255_077, 4)


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (
            Entry(ID, 100, "search", "search.list", "backfill", "DE", "KEY"),
            "100\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        ),
        (
            Entry(ID, 40, "search", "search.list", "", "", "KEY", "correction", "OF", (7, 2), 100),
            "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        ),
        (Entry(ID, 900, "units", "", "", "", "KEY", "others", "NAME", (7, 9)), "o900\tKEY\tunits\t\t\t\tNAME\t7-9\t0"),
        (Entry(ID, 0, "", "", "", "", "KEY", "marker"), "m0\tKEY\t\t\t\t"),
    ],
)
def test_an_entry_is_one_line_of_fields_between_tabs(entry: Entry, line: str) -> None:
    assert packed(entry) == line
    assert unpacked(ID, line) == entry


@pytest.mark.parametrize(
    "line",
    [
        "",
        "100\tKEY\tsearch\tsearch.list\tbackfill",
        "²1\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "1x\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "1000000000000000\tKEY\tsearch\tsearch.list\tbackfill\tDE",  # beyond 2^53 another program reads another number
        "-1\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7\t100",
        "c-40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t-100",
    ],
)
def test_an_unreadable_line_counts_nothing(line: str) -> None:
    assert unpacked(ID, line) == Entry(ID, 0, "", "", "", "", "", "unreadable")


def test_an_id_reads_back_from_its_text() -> None:
    for entry_id in (START, ID, END):
        assert read_id(id_text(entry_id)) == entry_id
    assert id_text(ID) == "1795233255077-4"


def test_each_attempt_has_a_key_of_its_own_that_begins_with_the_run_and_the_machine() -> None:
    keys = Keys()
    made = [keys.next() for _ in range(2_000)]
    assert len(set(made)) == len(made)
    assert {key[:RUN_CHARS] for key in made} == {keys.run}
    assert {key[RUN_CHARS : RUN_CHARS + MACHINE_CHARS] for key in made} == {keys.machine}
    assert {len(key) for key in made} == {RUN_CHARS + MACHINE_CHARS + 11}


def test_two_processes_of_a_machine_have_its_mark_and_runs_of_their_own(tmp_path: Path) -> None:
    keys, others = Keys(folder=tmp_path), Keys(folder=tmp_path)
    assert keys.run != others.run
    assert keys.is_of_this_machine(others.next())


def test_a_forked_child_is_a_run_of_its_own_on_the_same_machine(tmp_path: Path) -> None:
    keys = Keys(folder=tmp_path)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, keys.next().encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    key = os.read(readable, 100).decode()
    os.close(readable)
    assert not key.startswith(keys.run)
    assert keys.is_of_this_machine(key)


def test_a_copy_of_the_state_folder_has_another_mark(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    mark = machine_mark(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert machine_mark(tmp_path / "copy") != mark
    folder.rename(tmp_path / "put-aside")
    shutil.copytree(tmp_path / "put-aside", folder)
    assert machine_mark(folder) != mark, "at the same path, too"
    assert not Keys(folder=folder).is_of_this_machine(Keys(folder=tmp_path / "copy").next())


@pytest.mark.parametrize(
    ("end", "reservation", "first"),
    [
        ("", False, True),
        (RESERVED, True, True),
        (f"{FURTHER}1", False, False),
        (f"{RESERVED}{FURTHER}9", False, False),
        (f"{FURTHER}0", False, True),
        (FURTHER, False, True),
        ("9", False, True),
    ],
)
def test_the_end_of_a_key_marks_reservations_and_first_charges(end: str, reservation: bool, first: bool) -> None:
    key = Keys().next()[:-1] + "A" + end
    assert (is_reservation(key), is_first(key)) == (reservation, first)
