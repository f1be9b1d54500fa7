"""Files of our own, and those that somebody names."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import quota
from quota.cli.deciding import read_calls
from quota.common import files
from quota.common.files import first_within, read_named
from quota.common.findings import obstacle
from quota.settings.references import read_key
from support.processes import in_threads

ROOT = Path(__file__).resolve().parents[3]

HOUR_S = 3_600


@pytest.mark.parametrize(("age_s", "first"), [(0, False), (HOUR_S - 5, False), (HOUR_S + 5, True), (-HOUR_S, True)])
def test_a_file_notes_the_last_time_of_a_message(tmp_path: Path, age_s: int, first: bool) -> None:
    path = tmp_path / "told"
    assert first_within(path, HOUR_S * 1_000), "nobody has said it yet"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.utime(path, (time.time() - age_s,) * 2)
    assert first_within(path, HOUR_S * 1_000) == first, "a time of the future, by a wrong clock, silences nobody"
    assert not first_within(path, HOUR_S * 1_000)


@pytest.mark.parametrize("age_s", [None, 2 * HOUR_S])
def test_only_one_of_several_processes_prints_the_message(tmp_path: Path, age_s: int | None) -> None:
    """With a new file, and with one whose time is over."""
    for number in range(15):
        path = tmp_path / str(number)
        if age_s is not None:
            path.touch(0o600)
            os.utime(path, (time.time() - age_s,) * 2)
        firsts = in_threads(first_within, *[(path, HOUR_S * 1_000)] * 8)
        assert sorted(firsts) == [False] * 7 + [True], number


def test_the_message_is_printed_if_nothing_can_be_noted(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        first_within(tmp_path / "not there" / "told", 1)


# One that is written to is read, and nobody hangs at any other.

DOORS: dict[str, Callable[[Path], object]] = {
    "configuration": lambda folder: quota.open(folder / "pipe"),
    "cost book": lambda folder: quota.open(_written(folder, '[credentials.main]\napi = "pipe.toml"\n')),
    "key": lambda folder: read_key(f"file:{folder}/pipe"),
    "calls": lambda folder: read_calls(f"{folder}/pipe"),
}


def _written(folder: Path, text: str) -> Path:
    path = folder / "quota.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(tmp_path / name, 0o600)
    monkeypatch.setattr(files, "WRITER_WITHIN_MS", 20)
    return tmp_path


@pytest.mark.timeout(30)
@pytest.mark.parametrize("door", DOORS)
def test_a_pipe_that_nobody_writes_to_is_one_line(folder: Path, door: str) -> None:
    with pytest.raises(quota.QuotaError, match="it is a pipe that nobody writes to") as refused:
        DOORS[door](folder)
    assert str(refused.value).isprintable()


@pytest.mark.timeout(30)
def test_a_reader_waits_for_data_in_a_pipe(folder: Path) -> None:
    """As of `<(...)`: its writer is there from the beginning, and may take longer than a pipe without one is given."""
    reader, writer = os.pipe()
    late = threading.Timer(0.1, lambda: (os.write(writer, b"a-key"), os.close(writer)))
    late.start()
    assert read_key(f"file:/dev/fd/{reader}") == "a-key"
    late.join()
    os.close(reader)


def test_no_statement_numbers_its_parameters() -> None:
    """With values in their order, Python 3.12 warns of `?1`, and 3.14 refuses it."""
    texts = [path.read_text(encoding="utf-8") for wing in ("quota", "jobs") for path in (ROOT / wing).rglob("*.py")]
    assert any("VALUES (?, ?" in text for text in texts)
    assert [match for text in texts for match in re.findall(r"[(, =<>]\?[0-9]", text)] == []


def test_an_unreadable_file_is_closed(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for name in ("", "pipe", "none"):
        with pytest.raises(OSError, match=r"directory|pipe|No such"):
            read_named(folder / name, 10)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_file_that_another_process_has_just_deleted_is_no_obstacle(tmp_path: Path) -> None:
    """So SQLite deletes what it keeps beside a ledger, when its last user ends."""
    makes = "import itertools, os, sys; names = [sys.argv[1] + str(n) for n in range(200)]; [*map(os.mknod, names)]"
    deletes = "for name in itertools.cycle(names): os.link(name, sys.argv[1]); os.unlink(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", f"{makes}\n{deletes}", tmp_path / "ledger.db-wal"]) as other:
        try:
            assert {obstacle(str(tmp_path / "ledger.db")) for _ in range(8_000)} == {None}
        finally:
            other.kill()
