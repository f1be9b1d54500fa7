"""Keys: each attempt has its own, and machines, reservations and further charges are told by them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from quota.rules.keys import FURTHER, MACHINE_CHARS, RESERVED, RUN_CHARS, Keys, is_first, is_reservation, machine_mark

if TYPE_CHECKING:
    from pathlib import Path


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
def test_the_end_of_a_key_says_whether_it_is_a_reservation_and_the_first_of_its_call(
    end: str, reservation: bool, first: bool
) -> None:
    key = Keys().next()[:-1] + "A" + end
    assert (is_reservation(key), is_first(key)) == (reservation, first)
