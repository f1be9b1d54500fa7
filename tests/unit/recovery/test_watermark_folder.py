"""The folder of watermark files, with as many of them as there are projects."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from quota.ledger.identity import Identity
from quota.recovery.watermark_folder import FORGET_AFTER_DAYS, make_room, siblings_of, watermark_path

PROJECTS = 300


def path_of(folder: Path, project: int, identity: int = 0) -> Path:
    return Path(watermark_path(folder, Identity(f"ledger {identity}", f"p{project}")))


def make(path: Path) -> Path:
    make_room(str(path))
    path.touch()
    return path


def age(path: Path, days: int) -> None:
    """As if it had changed so long ago last."""
    at_s = time.time() - days * 86_400
    os.utime(path, (at_s, at_s))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was found in all folders that were read for siblings."""
    found: list[str] = []
    listdir = os.listdir

    def read(folder: str) -> list[str]:
        names = listdir(folder)
        found.extend(names)
        return names

    monkeypatch.setattr(os, "listdir", read)
    return found


def test_the_siblings_of_one_project_are_found_among_its_own_files(tmp_path: Path, entries: list[str]) -> None:
    """Also while the files of all of them are made, as by the first look at many projects."""
    for project in range(PROJECTS):
        first = make(path_of(tmp_path, project))
        assert siblings_of(str(first)) == []
        assert siblings_of(str(make(path_of(tmp_path, project, 1)))) == [str(first)]
    assert len(entries) == 3 * PROJECTS


def test_a_sibling_that_comes_or_goes_is_seen_at_once(tmp_path: Path) -> None:
    own = str(make(path_of(tmp_path, 1)))
    for identity in range(1, 4):
        make(path_of(tmp_path, 1, identity))
        assert len(siblings_of(own)) == identity
    path_of(tmp_path, 1, 1).unlink()
    assert len(siblings_of(own)) == 2


def test_what_has_no_siblings(tmp_path: Path) -> None:
    own = make(path_of(tmp_path, 1))
    make(path_of(tmp_path, 2))
    (own.parent / "told").touch()
    assert siblings_of(str(own)) == []


def test_where_there_is_no_folder_there_are_no_siblings(tmp_path: Path) -> None:
    assert siblings_of(str(path_of(tmp_path / "none", 1))) == []
    assert siblings_of("") == []


def test_a_folder_is_swept_once_for_many_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: swept.append(path) or scandir(path))
    for project in range(PROJECTS):
        make(path_of(tmp_path, project))
    assert swept.count(str(path_of(tmp_path, 1).parent.parent)) == 1


def test_what_nobody_used_for_a_year_is_removed_with_its_folder(tmp_path: Path) -> None:
    old, recent, empty = (path_of(tmp_path, project) for project in range(3))
    for path in (old, recent, empty):
        path.parent.mkdir(parents=True)
    for path, days in ((old, 1), (recent, -1)):
        path.touch()
        age(path, FORGET_AFTER_DAYS + days)
    for path in (recent, empty):
        age(path.parent, FORGET_AFTER_DAYS + 1)
    new = make(path_of(tmp_path, 3))
    left = sorted(path for path in new.parent.parent.rglob("*"))
    assert left == sorted([old.parent, recent.parent, recent, new.parent, new])
