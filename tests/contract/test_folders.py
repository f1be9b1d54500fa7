"""Every folder that is made belongs to this user alone, at every level, whatever the umask says."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

import quota
from quota.common.files import make_folder
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.reports.notify import Notice, notify
from quota.rules.entry import START, Entry
from quota.settings.folders import make_state_folder
from quota.terms.limits import DAY_MS
from support.claims import claim_of
from support.commands import Quota
from support.setup import state_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[0o000, 0o022, 0o077], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(base: Path) -> dict[str, int]:
    """Of all folders below."""
    return {str(p.relative_to(base)): stat.S_IMODE(p.stat().st_mode) for p in base.rglob("*") if p.is_dir()}


def of_a_ledger(folder: Path) -> None:
    with closing(open_ledger(f"sqlite:///{folder}/ledger.db")) as ledger:
        state_at(ledger).claim(claim_of("a"))


def of_a_journal(folder: Path) -> None:
    journal = Journal(folder, Identity("", "p"), keep_ms=DAY_MS)
    journal.write("e", [Entry((5, 5), 1, "units", "videos.list", "", "", "key")])
    journal.note_whole("e", START, (5, 5))
    journal.close()


def of_a_draw(folder: Path) -> None:
    draws = Journal(folder, Identity("", "p"), keep_ms=DAY_MS).draws
    call = Entry(START, 1, "units", "videos.list", "", "", "key")
    assert draws.draw([call], "", START, now_ms=5, window_ms=DAY_MS, allowance_units=50)


def of_the_state(folder: Path) -> None:
    os.environ["QUOTA_STATE_DIR"] = str(folder)
    assert make_state_folder() == folder


def of_a_session(folder: Path) -> None:
    os.environ["QUOTA_STATE_DIR"] = str(folder)
    with quota.open() as session:
        assert session.budget().charge("videos.list").admitted


def of_a_notice(folder: Path) -> None:
    os.environ["QUOTA_STATE_DIR"] = str(folder)
    configuration = folder.parents[1] / "notify.toml"
    configuration.write_text('[notify]\ncommand = ["true"]\n[credentials.main]\napi = "youtube-v3"\nproject = "p"\n')
    with quota.open(configuration) as session:
        notify(session, [Notice("refused", "p", "day", "it is full", DAY_MS, here=True)])


def of_a_command(folder: Path) -> None:
    done = Quota(folder.parents[1])("charge", "videos.list", QUOTA_STATE_DIR=str(folder))
    assert done.returncode == 0, done.stderr


def of_the_demo(folder: Path) -> None:
    """No file of it can be written by others, and only the store be read: it holds what upstream shows to everybody.
    What others wrote there would be fetched by."""
    done = Quota(folder.parents[1])("demo", "--keep", str(folder))
    assert done.returncode == 0, done.stderr
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
    umask = os.umask(0)
    os.umask(umask)
    assert files.pop("videos.db") == 0o644 & ~umask
    assert files.pop("quota.toml") == 0o644 & ~umask
    assert {"demo.key", "ledger.db"} <= files.keys()
    assert set(files.values()) == {0o600}, files


MADE_BY = (
    *(make_folder, of_a_ledger, of_a_journal, of_a_draw, of_the_state, of_a_session, of_a_notice),
    *(of_a_command, of_the_demo),
)


@pytest.mark.parametrize("make", MADE_BY)
def test_every_folder_is_private_and_one_that_is_there_is_left_alone(
    state_dir: Path, tmp_path: Path, make: object
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o755)
    make(tmp_path / "there" / "above" / "folder")  # type: ignore[operator]
    made = modes(tmp_path)
    assert made.pop("there") == 0o755
    assert "there/above/folder" in made
    assert set(made.values()) == {0o700}
    (tmp_path / "there" / "above" / "folder").chmod(0o750)
    make(tmp_path / "there" / "above" / "folder")  # type: ignore[operator]
    assert modes(tmp_path)["there/above/folder"] == 0o750


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(OSError, match="file"):
            make_folder(path)


def test_a_path_may_be_relative_and_end_with_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder("a/b/")
    make_folder("a/c/../d")
    assert set(modes(tmp_path)) == {"a", "a/b", "a/c", "a/d"}


def test_a_configuration_can_be_written_by_its_owner_alone(tmp_path: Path) -> None:
    assert Quota(tmp_path)("init").returncode == 0
    assert stat.S_IMODE((tmp_path / "quota.toml").stat().st_mode) & 0o022 == 0
