"""The line that stores an entry, the text of an id, and keys: each attempt has its own, and machines, reservations and
further charges are told by them."""

from __future__ import annotations

import os
import random
import shutil
import string
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
    Kind,
    id_text,
    is_first,
    is_reservation,
    just_before,
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
        (
            Entry(ID, 900, "units", "", "", "", "KEY", "others", "NAME", (7, 9)),
            "o900\tKEY\tunits\t\t\t\tNAME\t7-9\t0",
        ),
        (Entry(ID, 0, "", "", "", "", "KEY", "marker"), "m0\tKEY\t\t\t\t"),
    ],
)
def test_an_entry_is_one_line_of_fields_between_tabs(entry: Entry, line: str) -> None:
    assert packed(entry) == line
    assert unpacked(ID, line) == entry


@pytest.mark.parametrize("seed", range(2))
def test_any_entry_reads_back_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        entry = _any_entry(rng)
        assert unpacked(entry.id, packed(entry)) == entry


def _any_entry(rng: random.Random) -> Entry:
    kinds: tuple[Kind, ...] = ("charge", "correction", "others", "marker")
    kind = rng.choice(kinds)
    fields = ["".join(rng.choices(string.printable[:95] + "äß漢😀", k=rng.randint(0, 12))) for _ in range(6)]
    bucket, method, job, region, key, of = fields
    entry = Entry(
        (rng.randint(1, END[0]), rng.randint(0, END[1])), rng.randint(0, 10**15 - 1), bucket, method, job, region, key
    )
    if kind in ("charge", "marker"):
        return entry._replace(kind=kind)
    return entry._replace(
        kind=kind, of=of, at=(rng.randint(0, END[0]), rng.randint(0, END[1])), before_units=rng.randint(0, 10**9)
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "100",
        "100\tKEY\tsearch\tsearch.list\tbackfill",
        "100\tKEY\tsearch\tsearch.list\tbackfill\tDE\tmore",
        "1x\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "1000000000000000\tKEY\tsearch\tsearch.list\tbackfill\tDE",  # beyond 2^53 another program reads another number
        "-1\tKEY\tsearch\tsearch.list\tbackfill\tDE",
        "x40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7\t100",
        "cx\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\tx",
        "c-40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t100",
        "c40\tKEY\tsearch\tsearch.list\t\t\tOF\t7-2\t-100",
        "o-900\tKEY\tunits\t\t\t\tNAME\t7-9\t0",
    ],
)
def test_an_unreadable_line_counts_nothing(line: str) -> None:
    assert unpacked(ID, line) == Entry(ID, 0, "", "", "", "", "", "unreadable")


@pytest.mark.parametrize("seed", range(2))
def test_no_damage_makes_reading_fail(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        line = list(packed(_any_entry(rng)))
        for _ in range(rng.randint(1, 4)):
            line[rng.randrange(len(line))] = rng.choice(["", "\t", "-", "c", "9", "\0", "²"])
        entry = unpacked(ID, "".join(line))
        assert entry.id == ID
        assert entry.units >= 0


def test_an_id_reads_back_from_its_text() -> None:
    for entry_id in (START, ID, END):
        assert read_id(id_text(entry_id)) == entry_id
    assert id_text(ID) == "1795233255077-4"


@pytest.mark.parametrize("text", ["", "7", "7-", "-7", "7-x", "7-1-2"])
def test_a_text_that_is_no_id_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        read_id(text)


def test_just_before_a_millisecond_follows_every_id_of_the_millisecond_before() -> None:
    assert (6, 2**53) == just_before(7) < (7, 0)
    assert just_before(0) == START


def test_each_attempt_has_a_key_of_its_own_that_begins_with_the_run_and_the_machine() -> None:
    keys = Keys()
    made = [keys.next() for _ in range(2_000)]
    assert len(set(made)) == len(made)
    assert {key[:RUN_CHARS] for key in made} == {keys.run}
    assert {key[RUN_CHARS : RUN_CHARS + MACHINE_CHARS] for key in made} == {keys.machine}
    assert {len(key) for key in made} == {RUN_CHARS + MACHINE_CHARS + 11}


def test_a_run_may_be_named() -> None:
    assert Keys("scripted").next().startswith("scripted")


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


def test_a_folder_that_is_not_there_yet_has_a_mark_too(tmp_path: Path) -> None:
    assert len(machine_mark(tmp_path / "none")) == len(machine_mark(None)) == MACHINE_CHARS
    assert machine_mark(tmp_path / "none") != machine_mark(None)


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
