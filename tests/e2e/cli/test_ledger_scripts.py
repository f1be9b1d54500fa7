"""`quota ledger scripts DIR`: the scripts for other languages, each whole."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from quota.ledger.redis_log import script, script_names

if TYPE_CHECKING:
    from pathlib import Path


def scripts(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quota", "ledger", "scripts", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_it_writes_what_the_ledger_itself_sends_and_again_after_an_upgrade(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "charge.lua").write_text("of an older version")
    for _ in range(2):
        done = scripts(tmp_path, "a/b")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"wrote {len(script_names())} scripts into a/b\n"
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "a" / "b").iterdir()}
    assert written == {f"{name}.lua": script(name)[0] for name in script_names()}


def test_it_makes_the_folder(tmp_path: Path) -> None:
    assert scripts(tmp_path, "new/folder").returncode == 0
    assert len([*(tmp_path / "new" / "folder").iterdir()]) == len(script_names())


def test_a_path_that_is_not_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "charge.lua").mkdir(parents=True)
    for words in (("file",), ("file/below",), ("taken",), ()):
        done = scripts(tmp_path, *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
