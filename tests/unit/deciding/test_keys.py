"""Keys: each attempt has its own, and runs and machines are told by them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from quota.deciding.keys import Keys, machine_mark
from quota.rules.entry import MACHINE_CHARS, RUN_CHARS


def test_each_attempt_has_a_key_of_its_own_that_begins_with_the_run_and_the_machine(tmp_path: Path) -> None:
    keys, others = Keys(folder=tmp_path), Keys(folder=tmp_path)
    made = [keys.next() for _ in range(2_000)]
    assert len(set(made)) == len(made)
    assert {key[:RUN_CHARS] for key in made} == {keys.run}
    assert {key[RUN_CHARS : RUN_CHARS + MACHINE_CHARS] for key in made} == {keys.machine}
    assert {len(key) for key in made} == {RUN_CHARS + MACHINE_CHARS + 11}
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
    marks = []
    for mounted in ("/proc", "/sys"):  # roots with one number, as each container's /state in memory
        (link := tmp_path / "link").unlink(missing_ok=True)
        link.symlink_to(mounted)
        marks += [machine_mark(link), machine_mark(link / "not" / "made")]
    assert len({*marks}) == 4
    assert not Keys(folder=folder).is_of_this_machine(Keys(folder=tmp_path / "copy").next())
