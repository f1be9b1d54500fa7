"""The folder of watermark files, with as many of them as there are projects."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from quota.recovery.watermark_folder import make_room, siblings_of

if TYPE_CHECKING:
    from pathlib import Path

PROJECTS = 300
HOUR_NS = 3_600_000_000_000


def name(project: int, identity: int = 0) -> str:
    return f"p{project}-{project:016x}-{identity:032x}"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were read, as often as they were."""
    found: list[str] = []
    scandir = os.scandir

    def scan(path: str) -> object:
        found.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    return found


def settle(folder: Path, hours: int) -> None:
    """As if it had changed so long ago last."""
    at_ns = folder.stat().st_mtime_ns - hours * HOUR_NS
    os.utime(folder, ns=(at_ns, at_ns))


def test_a_folder_is_read_once_for_the_siblings_of_many_projects(tmp_path: Path, reads: list[str]) -> None:
    for project in range(PROJECTS):
        for identity in range(2):
            (tmp_path / name(project, identity)).touch()
    settle(tmp_path, 2)
    for project in range(PROJECTS):
        assert siblings_of(str(tmp_path / name(project))) == [str(tmp_path / name(project, 1))]
    assert reads == [str(tmp_path)]


def test_a_sibling_that_comes_or_goes_is_seen_at_once(tmp_path: Path) -> None:
    (tmp_path / name(1)).touch()
    settle(tmp_path, 2)
    assert siblings_of(str(tmp_path / name(1))) == []
    for identity in range(1, 4):
        (tmp_path / name(1, identity)).touch()
        assert len(siblings_of(str(tmp_path / name(1)))) == identity
    settle(tmp_path, 1)
    assert len(siblings_of(str(tmp_path / name(1)))) == 3
    (tmp_path / name(1, 1)).unlink()
    assert len(siblings_of(str(tmp_path / name(1)))) == 2


def test_what_has_no_siblings(tmp_path: Path) -> None:
    (tmp_path / f"{name(1)}-told").touch()
    for hours in (0, 2):
        settle(tmp_path, hours)
        for one in ("", "x", name(1), name(2), f"{name(1)}x"):
            assert siblings_of(str(tmp_path / one)) == []
    assert siblings_of(str(tmp_path / "none" / name(1))) == []


def test_a_folder_is_swept_once_for_many_new_files(tmp_path: Path, reads: list[str]) -> None:
    for project in range(PROJECTS):
        path = tmp_path / name(project)
        make_room(str(path))
        path.touch()
    assert reads == [str(tmp_path)]
