"""The bounds of what a machine remembers of its ledger, each at its number and at one more."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

import pytest

import quota.recovery.watermark_file
from quota.budget import Budget
from quota.ledger.factory import open_ledger
from quota.recovery.high_water_mark import HighWaterMark
from quota.recovery.knowledge import TIDY_EVERY_MS
from quota.recovery.watermark_file import WatermarkFile
from quota.terms.limits import DAY_MS, HOUR_MS
from support.books import BOOK
from support.processes import in_child
from support.setup import limit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quota.terms.limits import Limit

NOW = 1_793_000_000_000


class Scene:
    """A ledger that is emptied, and processes of one machine, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = str(folder / "high-water-marks" / "p" / "1")
        self.now_ms = NOW
        self.opened: list[HighWaterMark] = []

    def budget(self, *limits: Limit) -> Budget:
        """As a new process has it."""
        self.opened.append(HighWaterMark(self.path, "p"))
        return Budget(
            credential="main",
            project="p",
            book=BOOK,
            limits=limits,
            ledger=open_ledger(f"sqlite:///{self.folder}/ledger.db", clock=lambda: self.now_ms),
            clock=lambda: self.now_ms,
            high_water_mark=self.opened[-1],
        )

    def another_process(self) -> None:
        for high_water_mark in self.opened:
            high_water_mark.close()

    def empty(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / f"ledger.db{suffix}")
        self.now_ms += 1


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.another_process()


def _limits(count: int) -> list[Limit]:
    """So many limits of 10 units that all count the same calls, each in a window of its own."""
    return [limit(10, DAY_MS - n * 60_000, name=f"limit-{n}") for n in range(count)]


@pytest.mark.parametrize("count", [1, 8, 9, 11, 20, 57, 300])
@pytest.mark.parametrize("restart", [False, True], ids=["the same process", "another process"])
def test_every_limit_is_remembered_however_many_there_are(scene: Scene, count: int, restart: bool) -> None:
    limits = _limits(count)
    budget = scene.budget(*limits)
    for _ in range(10):
        assert budget.charge("videos.list").admitted
    if restart:
        scene.another_process()
        budget = scene.budget(*limits)
    scene.empty()
    assert [state.used_units for state in budget.usage()] == [10] * count
    for one in (*limits[:: 1 + count // 50], limits[-1]):
        assert not scene.budget(one).charge("videos.list").admitted, one.name


@pytest.mark.parametrize("count", [8, 9, 11, 20])
def test_a_look_at_many_limits_erases_none(scene: Scene, count: int) -> None:
    """Each kind of call has a limit of its own; then somebody looks at all of them, as `quota status` does."""
    jobs = [f"job-{n}" for n in range(count)]
    limits = [limit(10, name=job, jobs=(job,)) for job in jobs]
    budget = scene.budget(*limits)
    for job in jobs:
        for _ in range(10):
            assert budget.charge("videos.list", job=job).admitted
    assert [state.used_units for state in budget.usage()] == [10] * count
    scene.another_process()
    assert [state.used_units for state in scene.budget(*limits).usage()] == [10] * count
    scene.another_process()
    scene.empty()
    budget = scene.budget(*limits)
    assert [job for job in jobs if budget.charge("videos.list", job=job).admitted] == []


@pytest.mark.parametrize("room", [True, False], ids=["all fits", "one line too many"])
def test_what_does_not_fit_into_a_slot_is_said(
    scene: Scene, room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers of the head come first, then what was seen, then slices: without them units only count longer."""
    limits = [*_limits(11), limit(100, HOUR_MS, name="other", methods=("search.list",))]
    budget = scene.budget(*limits)
    assert budget.charge("search.list", units=10).admitted
    (high_water_mark,) = scene.opened
    known = high_water_mark._known
    assert known is not None
    text, _ = known.text("")
    head = quota.recovery.watermark_file._NO_NUMBERS.size + 8 * len(known.units) + 4
    slices = sum(len(line) + 1 for line in text.splitlines() if line.startswith("slices\t"))
    assert slices
    monkeypatch.setattr(quota.recovery.watermark_file, "SLOT_BYTES", head + len(text) - slices - (not room))
    scene.now_ms += 60_000
    assert not budget.charge("search.list", units=1).admitted
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [line.partition(" ")[0] for line in said] == [] if room else ["memory_full"]
    scene.empty()
    assert [state.used_units for state in budget.usage()[:-1]] == [10] * 11, "the process itself knows all of it"
    scene.another_process()


def test_of_what_does_not_fit_into_a_slot_the_rest_is_remembered(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next process too: what is left out is the end of it, whole lines at a time."""
    limits = _limits(12)
    budget = scene.budget(*limits)
    assert budget.charge("videos.list", units=10).admitted
    head = quota.recovery.watermark_file._NO_NUMBERS.size + 8 * len(limits) + 4
    known = scene.opened[0]._known
    assert known is not None
    lines = known.text("")[0].splitlines(keepends=True)
    room = head + len("".join(lines[: 1 + len(limits)])) - 1
    monkeypatch.setattr(quota.recovery.watermark_file, "SLOT_BYTES", room)
    scene.now_ms += TIDY_EVERY_MS  # the next decision writes all of it
    assert not budget.charge("videos.list").admitted
    scene.another_process()
    scene.empty()
    assert [state.used_units for state in scene.budget(*limits).usage()] == [*[10] * 11, 0]


def test_a_process_that_finds_no_slot_reads_those_of_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot write what it sees; what the others saw it holds against the ledger like everybody."""
    monkeypatch.setattr(quota.recovery.watermark_file, "SLOTS", 1)
    first = scene.budget(*_limits(9))
    for _ in range(10):
        assert first.charge("videos.list").admitted
    slots = scene.opened[0]._file
    assert slots is not None
    noted = slots.read_all()

    def charge() -> tuple[bool, bool]:
        scene.empty()
        budget = scene.budget(*_limits(9))
        return budget.charge("videos.list").admitted, any("more than" in r.getMessage() for r in caplog.records)

    # A lock is its process's: only another one finds the slot taken.
    assert in_child(charge) == (False, True)
    assert slots.read_all() == noted


def test_a_file_of_another_version_is_said_and_left_alone(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    os.makedirs(os.path.dirname(scene.path))
    with open(scene.path, "wb") as file:
        file.write(b"\x01" * 200)
    assert scene.budget(limit(10)).charge("videos.list").admitted
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(f"memory_unusable path={scene.path}: another version of quota-ledger wrote it; delete it;")
    with open(scene.path, "rb") as file:
        assert file.read() == b"\x01" * 200


@pytest.mark.parametrize("count", [0, 1, 56, 57, 58, 1_000])
def test_a_head_holds_as_many_numbers_as_there_are(tmp_path: Path, count: int) -> None:
    """Up to 56 of them are read at once with their head, more take another read."""
    slots = WatermarkFile(str(tmp_path / "slots"), make=True)
    numbers = tuple(range(2**53 - count, 2**53))
    written = slots.write((5, 6), 7, 8, numbers, "one\ntwo\n")
    assert written.lines == 2
    assert slots.read_all()[0] == (((5, 6), 7, 8, numbers), "one\ntwo\n")
    slots.write_head(written, (9, 0), 10, numbers[::-1])
    assert slots.read_all() == {0: (((9, 0), 7, 10, numbers[::-1]), "one\ntwo\n")}
    slots.close()


def test_a_file_that_got_the_number_of_ours_is_left_alone(tmp_path: Path) -> None:
    slots = WatermarkFile(str(tmp_path / "slots"), make=True)
    written = slots.write((5, 6), 7, 8, (9,), "")
    number = slots._fd
    with (tmp_path / "of-the-program").open("x+b") as other:
        os.dup2(other.fileno(), number)
    try:
        with pytest.raises(OSError, match="the program has closed it"):
            slots.write_head(written, (9, 0), 10, (9,))
        slots.close()
        assert os.fstat(number).st_size == 0
    finally:
        os.close(number)
