"""Who could change a file: this user and root alone, or others. On real files of real users and groups."""

from __future__ import annotations

import ctypes
import grp
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import quota
from quota.common.files import doubt_of_path, make_folder
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.reports.notify import Notice, notify
from quota.rules.entry import START, Entry
from quota.terms.limits import DAY_MS
from support.commands import Quota
from support.setup import claim_of, state_at
from support.users import NOBODY, as_user, needs_root

ME, MINE, VOLUMES, FOREIGN = 10001, 10001, 20001, 30001
"""A user, its primary group, the group of its volumes (a supplementary one), and a group that it is not in."""


def doubt(path: Path) -> str:
    return as_user(ME, MINE, [MINE, VOLUMES], lambda: doubt_of_path(path))


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that everybody may enter. Those of pytest are root's alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def a_file(base: Path, folder: tuple[int, int, int], file: tuple[int, int, int]) -> Path:
    """base/folder/quota.toml, each with (owner, group, mode)."""
    path = base / "folder" / "quota.toml"
    path.parent.mkdir()
    path.write_text("")
    for each, (owner, group, mode) in ((path.parent, folder), (path, file)):
        os.chown(each, owner, group)
        each.chmod(mode)
    return path


SOUND = {
    "of the user": ((ME, MINE, 0o755), (ME, MINE, 0o644)),
    "private": ((ME, MINE, 0o700), (ME, MINE, 0o600)),
    "of the user with umask 002": ((ME, MINE, 0o775), (ME, MINE, 0o664)),
    "of root": ((0, 0, 0o755), (0, 0, 0o644)),
    "a root-owned volume with its group": ((0, VOLUMES, 0o2775), (0, VOLUMES, 0o664)),
    "the user's file in such a volume": ((0, VOLUMES, 0o2775), (ME, VOLUMES, 0o660)),
    "of a foreign group that only reads": ((ME, FOREIGN, 0o755), (ME, FOREIGN, 0o644)),
}

WRITABLE = {
    "the file is another's": ((ME, MINE, 0o755), (NOBODY, MINE, 0o644), "quota.toml belongs to nobody, and this is"),
    "the folder is another's": ((NOBODY, MINE, 0o755), (ME, MINE, 0o644), "folder belongs to nobody, and this is"),
    "every user may write the file": ((ME, MINE, 0o755), (ME, MINE, 0o646), "quota.toml can be written by every user"),
    "every user may write to the folder": ((ME, MINE, 0o757), (ME, MINE, 0o644), "folder can be written by every user"),
    "every user may add to the folder": ((0, 0, 0o1777), (ME, MINE, 0o600), "folder can be written by every user"),
    "a foreign group may write the file": ((ME, MINE, 0o755), (ME, FOREIGN, 0o664), "written by the group 30001"),
    "a foreign group may write to the folder": ((ME, FOREIGN, 0o2775), (ME, MINE, 0o644), "by the group 30001"),
    "root's group may write the file, and the user is not in it": ((0, 0, 0o755), (0, 0, 0o664), "by the group root"),
}


@needs_root
@pytest.mark.parametrize(("folder", "file"), SOUND.values(), ids=SOUND)
def test_a_file_that_only_the_user_and_root_could_write_is_sound(
    base: Path, folder: tuple[int, int, int], file: tuple[int, int, int]
) -> None:
    assert doubt(a_file(base, folder, file)) == ""


@needs_root
@pytest.mark.parametrize(("folder", "file", "why"), WRITABLE.values(), ids=WRITABLE)
def test_a_file_that_others_could_write_is_named(
    base: Path, folder: tuple[int, int, int], file: tuple[int, int, int], why: str
) -> None:
    assert why in doubt(a_file(base, folder, file))


@needs_root
def test_a_group_with_another_member_is_not_the_users_own(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a web server was added to a user's group, or the user to one of developers."""
    named = {MINE: ["alice"], VOLUMES: []}
    groups = {gid: grp.struct_group((f"g{gid}", "x", gid, members)) for gid, members in named.items()}
    monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)
    sound = (ME, MINE, 0o755)
    assert "by the group g10001" in doubt(a_file(base / "", sound, (ME, MINE, 0o664)))
    path = base / "folder" / "quota.toml"
    os.chown(path, ME, VOLUMES)
    assert doubt(path) == ""
    named[VOLUMES].append("alice")
    assert "by the group g20001" in doubt(path)


@needs_root
def test_a_supplementary_group_that_is_anothers_primary_group_is_not_the_users_own(base: Path) -> None:
    path = a_file(base, (ME, MINE, 0o755), (ME, NOBODY, 0o664))
    assert "can be written by the group nogroup" in as_user(ME, MINE, [MINE, NOBODY], lambda: doubt_of_path(path))
    assert as_user(ME, NOBODY, [], lambda: doubt_of_path(path)) == ""


@needs_root
def test_every_folder_on_the_way_counts(base: Path) -> None:
    path = a_file(base, (ME, MINE, 0o755), (ME, MINE, 0o644))
    base.chmod(0o1777)
    assert doubt(path) == "", "in /tmp nobody renames another's folder"
    base.chmod(0o777)
    assert f"{base} can be written by every user" in doubt(path)
    base.chmod(0o755)
    os.chown(base, NOBODY, NOBODY)
    assert f"{base} belongs to nobody" in doubt(path)


@needs_root
def test_every_link_on_the_way_counts(base: Path) -> None:
    path = a_file(base, (ME, MINE, 0o755), (ME, MINE, 0o644))
    (base / "link").symlink_to("folder")
    assert doubt(base / "link" / "quota.toml") == ""
    os.chown(base / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert f"{base}/link belongs to nobody" in doubt(base / "link" / "quota.toml")
    (base / "other").mkdir(mode=0o755)
    os.chown(base / "other", NOBODY, NOBODY)
    (base / "other" / "quota.toml").symlink_to(path)
    assert f"{base}/other belongs to nobody" in doubt(base / "other" / "quota.toml"), "a module could lie beside it"
    (base / "up").symlink_to("folder/../other/..")
    assert f"{base}/other belongs to nobody" in doubt(base / "up" / "folder" / "quota.toml")


@needs_root
def test_an_access_control_list_may_let_others_write(base: Path) -> None:
    """With a list, the bits of the group are its mask: the group's own bits stand in the list."""
    path = a_file(base, (ME, MINE, 0o755), (ME, MINE, 0o664))
    entries = ((1, 6, 2**32 - 1), (2, 6, NOBODY), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1), (32, 4, 2**32 - 1))
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_access", acl)
    assert "can be written by others: see getfacl" in doubt(path)
    path.chmod(0o644)  # now the mask lets nobody write
    assert doubt(path) == ""


@needs_root
def test_a_read_only_mount_is_sound(base: Path) -> None:
    """A ConfigMap: a folder of root with mode 777, mounted read-only."""
    path = a_file(base, (0, 0, 0o777), (0, 0, 0o644))
    libc = ctypes.CDLL(None, use_errno=True)

    def mounted() -> str:
        folder = os.fsencode(path.parent)
        new_namespace, private, bind, read_only_again = 0x20000, 0x44000, 0x1000, 0x1000 | 0x20 | 0x1
        assert libc.unshare(new_namespace) == 0
        assert libc.mount(b"none", b"/", None, private, None) == 0
        assert libc.mount(folder, folder, None, bind, None) == 0
        assert libc.mount(b"none", folder, None, read_only_again, None) == 0
        os.setgroups([])
        os.setegid(MINE)
        os.seteuid(ME)
        return doubt_of_path(path)

    assert "folder can be written by every user" in doubt(path)
    assert as_user(0, 0, [], mounted) == ""


@needs_root
def test_in_a_user_namespace_folders_of_an_unknown_owner_may_be_on_the_way(base: Path) -> None:
    """Root's outside is unknown inside, and so is nobody's own file."""
    path = a_file(base, (ME, MINE, 0o755), (ME, MINE, 0o644))
    theirs = base / "theirs.toml"
    theirs.write_text("")
    libc = ctypes.CDLL(None, use_errno=True)

    def inside() -> tuple[str, str]:
        os.setresgid(MINE, MINE, MINE)
        os.setresuid(ME, ME, ME)
        dumpable, new_user_namespace = 4, 0x10000000
        assert libc.prctl(dumpable, 1) == 0  # else its files in /proc are root's
        assert libc.unshare(new_user_namespace) == 0
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {ME} 1"), ("gid_map", f"0 {MINE} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return doubt_of_path(path), doubt_of_path(theirs)

    mine, of_root = as_user(0, 0, [], inside)
    assert mine == ""
    assert "belongs to nobody, and this is root" in of_root


def modes(base: Path) -> dict[str, int]:
    return {str(p.relative_to(base)): stat.S_IMODE(p.stat().st_mode) for p in base.rglob("*") if p.is_dir()}


def of_a_ledger(folder: Path) -> None:
    with closing(open_ledger(f"sqlite:///{folder}/ledger.db")) as ledger:
        state_at(ledger).claim(claim_of("a"))


def of_a_draw(folder: Path) -> None:
    draws = Journal(folder, Identity("", "p"), keep_ms=DAY_MS).draws
    call = Entry(START, 1, "units", "videos.list", "", "", "key")
    assert draws.draw([call], "", START, now_ms=5, window_ms=DAY_MS, allowance_units=50)


def of_a_session(folder: Path) -> None:
    os.environ["QUOTA_STATE_DIR"] = str(folder)
    os.umask(0o277)  # it takes no right from this user
    with quota.open() as session:
        assert session.budget().charge("videos.list").admitted
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}


def of_a_notice(folder: Path) -> None:
    os.environ["QUOTA_STATE_DIR"] = str(folder)
    configuration = folder.parents[1] / "notify.toml"
    configuration.write_text('[notify]\ncommand = ["true"]\n[credentials.main]\napi = "youtube-v3"\nproject = "p"\n')
    with quota.open(configuration) as session:
        notify(session, [Notice("refused", "p", "day", "it is full", DAY_MS, here=True)])


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


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("make", [make_folder, of_a_ledger, of_a_draw, of_a_session, of_a_notice, of_the_demo])
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


@pytest.mark.usefixtures("no_umask")
def test_a_configuration_can_be_written_by_its_owner_alone(tmp_path: Path) -> None:
    assert Quota(tmp_path)("init").returncode == 0
    assert stat.S_IMODE((tmp_path / "quota.toml").stat().st_mode) & 0o022 == 0
