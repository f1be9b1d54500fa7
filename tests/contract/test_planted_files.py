"""Where others may write, they may put a link, a pipe or a file of theirs at a path that is about to be used."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import quota
from quota.cli.program import cli
from quota.common.files import NotAloneError, first_within, open_alone
from quota.errors import ConfigError
from quota.inbound.contract import Limit, Policy
from quota.inbound.rules import open_storage
from quota.jobs.lock import _take, lock_file
from quota.jobs.store.file import StoreError
from quota.jobs.store.reader import Reader
from quota.jobs.store.store import Store
from quota.journal.draws import Draws
from quota.journal.journal import Journal
from quota.ledger.factory import Identity, open_ledger
from quota.reports.metrics import write_file
from quota.reports.status import read_status
from quota.rules.entry import START, Entry
from quota.rules.facts import Facts
from quota.terms.limits import DAY_MS
from support.patience import be_impatient
from support.processes import in_child
from support.setup import claim_of, state_at
from support.users import NOBODY, as_user, needs_root, not_root

IDENTITY = Identity("ledger", "p")
NOW_MS = 1_795_867_200_000
CALL = Entry(START, 1, "units", "videos.list", "", "", "key")


def a_ledger(path: Path) -> None:
    with closing(open_ledger(f"sqlite:///{path}")) as ledger:
        state_at(ledger).claim(claim_of("a"))


def journal(state: Path) -> Journal:
    return Journal(state, IDENTITY, keep_ms=DAY_MS, clock=lambda: NOW_MS)


def a_draw(path: Path) -> None:
    draws = Draws(str(path.parent), IDENTITY, keep_ms=DAY_MS)
    draws.draw([CALL], "", START, now_ms=NOW_MS, window_ms=DAY_MS, allowance_units=50)


def an_inbound_storage(path: Path) -> None:
    with closing(open_storage(f"sqlite:///{path}")) as storage:
        storage.decide(Policy("r", (Limit(5, 60_000),), "counter", False), "identity")


def a_store(path: Path) -> None:
    Store(f"sqlite:///{path}", retention_ms=DAY_MS).close()


def a_stores_reader(path: Path) -> None:
    with closing(Reader(f"sqlite:///{path}")) as reader:
        reader.chart("DE", ["trending"], 0, 1)


def a_note(path: Path) -> None:
    first_within(path, 1)


def metrics(path: Path) -> None:
    write_file(str(path.parent), path.name.removeprefix(".").removesuffix(f".{_writer()}"), "x 1\n")


def a_configuration(path: Path) -> None:
    cli.main(["init", str(path), "--force"], standalone_mode=False)


def a_demo(path: Path) -> None:
    cli.main(["demo", "--units", "1", "--keep", str(path.parent)], standalone_mode=False)


class Place(NamedTuple):
    """A path that `use` uses. With `beside`, that file is made first; `makes` False: it is only read."""

    name: str
    use: Callable[[Path], None]
    beside: str = ""
    makes: bool = True


PLACES = (
    Place("ledger.db", a_ledger),
    Place("ledger.db-wal", a_ledger, "ledger.db"),
    Place("ledger.db-shm", a_ledger, "ledger.db"),
    Place("ledger.db-journal", a_ledger, "ledger.db"),
    Place("draws", a_draw),
    Place("inbound.db", an_inbound_storage),
    Place("inbound.db-wal", an_inbound_storage, "inbound.db"),
    Place("videos.db", a_store),
    Place("videos.db-wal", a_store, "videos.db"),
    Place("videos.db", a_stores_reader, makes=False),
    Place("told", a_note),
    Place(".quota-p.prom.WRITER", metrics),
    Place("quota.toml", a_configuration),
    Place("demo.key", a_demo),
)

MADE = [place for place in PLACES if place.makes and not place.beside]
DATABASES = [place for place in MADE if place.name.endswith(".db")]
each_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.name}-{place.use.__name__}")
each_made = pytest.mark.parametrize("place", MADE, ids=lambda place: place.use.__name__)
each_database = pytest.mark.parametrize("place", DATABASES, ids=lambda place: place.use.__name__)


def _writer() -> str:
    return f"{os.getpid()}.{threading.get_native_id()}"


def path_of(place: Place, folder: Path) -> Path:
    if place.beside:
        place.use(folder / place.beside)
    return folder / place.name.replace("WRITER", _writer())


def refused(place: Place, path: Path) -> None:
    """The command ends in one line, and waits for nobody."""
    with pytest.raises((quota.QuotaError, OSError)) as caught:
        place.use(path.parent / place.beside if place.beside else path)
    assert len(str(caught.value).splitlines()) == 1


@needs_root
@each_place
def test_a_file_of_another_user_is_refused(tmp_path: Path, place: Place) -> None:
    path = path_of(place, tmp_path)
    path.write_bytes(b"")
    os.chown(path, NOBODY, NOBODY)
    refused(place, path)
    assert path.read_bytes() == b""
    assert path.stat().st_uid == NOBODY


@needs_root
@each_place
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, place: Place) -> None:
    path = path_of(place, tmp_path)
    for victim in (tmp_path / "victim", tmp_path / "made"):
        if victim.name == "victim":
            victim.write_text("mine")
        path.symlink_to(victim)
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        refused(place, path)
        path.unlink()
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "made").exists()


@each_made
def test_a_dangling_link_creates_no_file(tmp_path: Path, place: Place) -> None:
    path = path_of(place, tmp_path)
    path.symlink_to(tmp_path / "made")
    refused(place, path)
    assert not (tmp_path / "made").exists()


@each_place
def test_a_pipe_is_not_waited_for(tmp_path: Path, place: Place) -> None:
    path = path_of(place, tmp_path)
    os.mkfifo(path)
    refused(place, path)


@each_place
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, place: Place) -> None:
    path = path_of(place, tmp_path)
    path.mkdir()
    with pytest.raises((quota.QuotaError, OSError), match="is a folder"):
        place.use(path.parent / place.beside if place.beside else path)


@each_made
def test_a_file_that_every_user_may_write_is_refused(tmp_path: Path, place: Place) -> None:
    path = path_of(place, tmp_path)
    place.use(path)
    if path.exists():
        path.chmod(path.stat().st_mode | 0o002)
        refused(place, path)


@needs_root
@each_database
def test_no_database_is_used_in_a_folder_that_others_may_write_to(tmp_path: Path, place: Place) -> None:
    """They could put a journal beside it, which SQLite would play into it."""
    folder = tmp_path / "folder"
    for owner, mode in ((0, 0o777), (0, 0o1777), (NOBODY, 0o755)):
        folder.mkdir()
        os.chown(folder, owner, owner)
        folder.chmod(mode)
        refused(place, folder / place.name)
        assert list(folder.iterdir()) == []
        folder.rmdir()


@needs_root
@each_database
def test_a_volume_of_root_with_the_groups_rights_is_used(place: Place) -> None:
    """As Kubernetes makes it (`fsGroup`), which also gives files in it to the group."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = Path(base) / "volume"
        folder.mkdir()
        Path(base).chmod(0o711)
        os.chown(folder, 0, 20001)
        folder.chmod(0o2775)
        as_user(10001, 10001, [20001], lambda: place.use(folder / place.name))
        path = folder / place.name
        assert (path.stat().st_uid, path.stat().st_gid) == (10001, 20001)
        for file in folder.iterdir():
            file.chmod(file.stat().st_mode | 0o660)
        as_user(10001, 10001, [20001], lambda: place.use(path))


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "why"),
    [
        (NOBODY, 0o700, "belongs to nobody, and this is root; run this as that user, or"),
        (0, 0o777, "can be written by every user;"),
    ],
)
def test_a_state_folder_of_others_stops_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owner: int, mode: int, why: str
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, owner, owner)
    state.chmod(mode)
    monkeypatch.setenv("QUOTA_STATE_DIR", str(state))
    says = f"state folder {state} {why} set QUOTA_STATE_DIR to a folder of your own"
    for command in (["charge", "videos.list"], ["status"], ["doctor"]):
        with pytest.raises(quota.ConfigError) as caught:
            cli.main(command, standalone_mode=False)
        assert str(caught.value) == says
    assert cli.main(["check"], standalone_mode=False) == quota.ConfigError.exit_status
    assert capsys.readouterr().err == f"quota: {says}\n"
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "link"))
    with pytest.raises(quota.ConfigError, match="is a link that belongs to nobody"):
        quota.open()
    assert list(state.iterdir()) == []


@needs_root
def test_check_names_who_could_replace_our_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder that every user may write to, each may rename ours away: the budget would begin anew."""
    (tmp_path / "shared" / "ours").mkdir(parents=True)
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "shared" / "ours" / "state"))
    (tmp_path / "shared" / "ours" / "state").mkdir(mode=0o700)
    config = tmp_path / "quota.toml"
    config.write_text(
        f'[store]\nurl = "sqlite:///{tmp_path}/shared/ours/v.db"\n[credentials.main]\napi = "youtube-v3"\n'
    )
    for mode, warned in ((0o755, 0), (0o1777, 0), (0o777, 2)):
        (tmp_path / "shared").chmod(mode)
        cli.main(["check", "--config", str(config)], standalone_mode=False)
        lines = [line for line in capsys.readouterr().out.splitlines() if "in the place of" in line]
        assert len(lines) == warned, lines
        assert all(f"{tmp_path}/shared can be written by every user" in line for line in lines)


def test_a_state_folder_that_others_may_read_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is reached through a link of the user's own."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o755)
    (tmp_path / "state").symlink_to("disk")
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    with quota.open() as session:
        assert session.budget().charge("videos.list").admitted


def test_a_ledger_through_the_users_own_link_is_used(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    a_ledger(tmp_path / "disk" / "ledger.db")
    (tmp_path / "ledger.db").symlink_to("disk/ledger.db")
    a_ledger(tmp_path / "ledger.db")
    (tmp_path / "disk").chmod(0o777)
    refused(Place("ledger.db", a_ledger), tmp_path / "ledger.db")


@needs_root
def test_a_foreign_ledger_is_a_configuration_error_and_no_allowance_replaces_it(tmp_path: Path) -> None:
    config = tmp_path / "quota.toml"
    config.write_text(
        '[ledger]\nurl = "sqlite:///ledger.db"\nunavailable = { max_cost = 1, allowance = 50 }\n'
        '[credentials.main]\napi = "youtube-v3"\n'
    )
    a_ledger(tmp_path / "ledger.db")
    os.chown(tmp_path / "ledger.db", NOBODY, NOBODY)
    for command in ("charge", "peek"):
        with pytest.raises(quota.ConfigError) as caught:
            cli.main([command, "videos.list", "--config", str(config)], standalone_mode=False)
        assert str(caught.value) == (
            f"ledger {tmp_path}/ledger.db: ledger.db belongs to nobody, and this is root; let only this user own and "
            "write the file and its folder (chown, chmod)"
        )


@needs_root
def test_a_ledger_that_gets_another_owner_is_used_no_longer(tmp_path: Path) -> None:
    with closing(open_ledger(f"sqlite:///{tmp_path}/ledger.db")) as ledger:
        state_at(ledger).claim(claim_of("a"))
        os.unlink(tmp_path / "ledger.db")
        (tmp_path / "ledger.db").write_bytes(b"")
        os.chown(tmp_path / "ledger.db", NOBODY, NOBODY)
        with pytest.raises(quota.LedgerError, match=r"ledger\.db belongs to nobody"):
            state_at(ledger).claim(claim_of("a"))


def test_a_ledger_that_only_another_user_can_reach_is_a_wrong_configuration(tmp_path: Path) -> None:
    """Not an outage, in which the allowance would be spent for ever."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0)
    says = r"ledger .*ledger\.db: Permission denied; run this as the user that may open it, or name another file"
    with not_root(), pytest.raises(ConfigError, match=says):
        open_ledger(f"sqlite:///{folder}/ledger.db")


def test_a_status_needs_no_store(tmp_path: Path, state_dir: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    Store(f"sqlite:///{folder}/videos.db", retention_ms=DAY_MS).close()
    folder.chmod(0o777)
    config = tmp_path / "quota.toml"
    config.write_text(
        '[credentials.main]\napi = "youtube-v3"\nkey = "env:KEY"\n'
        f'[store]\nurl = "sqlite:///{folder}/videos.db"\n'
        '[jobs.charts]\ncredential = "main"\nfetch = "trending"\nregions = ["US"]\n'
    )
    with quota.open(config) as session:
        (row,) = read_status(session, jobs=True).credentials
    assert [(job.job, job.why) for job in row.jobs] == [("charts", "")]


@pytest.mark.parametrize(
    ("folder_mode", "says"),
    [
        (0o000, "Permission denied; run this as the user that may open it"),
        (0o500, "this user may not write to .*; correct the path"),
        (0o700, r"its lock run-trending-.*\.lock: Permission"),
    ],
)
def test_a_lock_that_cannot_be_made_names_its_file_and_the_remedy(tmp_path: Path, folder_mode: int, says: str) -> None:
    os.close(lock_file(f"sqlite:///{tmp_path}/videos.db", "trending"))
    next(tmp_path.glob("*.lock")).chmod(0o400)
    tmp_path.chmod(folder_mode)
    with not_root(), pytest.raises(quota.QuotaError, match=rf"^store {tmp_path}/videos\.db: {says}"):
        lock_file(f"sqlite:///{tmp_path}/videos.db", "trending")


def refusals_without_locks(store: str) -> list[str]:
    """What a run and a charge say if a filter answers flock, and fcntl's locks, with ENOLCK; nothing without it."""
    be_impatient()
    checks = [(0x15, 5, 0, 73), (0x15, 0, 3, 72), (0x20, 0, 0, 24), (0x15, 2, 0, 6), (0x15, 1, 0, 7)]
    rows = [(0x20, 0, 0, 0), *checks, (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50000 | errno.ENOLCK)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    prctl, program = ctypes.CDLL(None).prctl, struct.pack("HP", len(rows), ctypes.addressof(code))
    if os.uname().machine != "x86_64" or prctl(38, 1, 0, 0, 0) or prctl(22, 2, program):
        return []
    with pytest.raises(StoreError) as caught:
        _take(lock_file(store, "trending"), 0)
    return [str(caught.value), quota.open().budget().charge("videos.list").sentence()]


def test_on_a_file_system_without_locks_a_refusal_ends_with_the_remedy(tmp_path: Path, state_dir: Path) -> None:
    refusals = in_child(partial(refusals_without_locks, f"sqlite:///{tmp_path}/videos.db"))
    if not refusals:
        pytest.skip("no seccomp, or other numbers of its calls")
    assert [refusal.rpartition(" a ")[2] for refusal in refusals] == ["file system that has locks"] * 2


@needs_root
def test_only_the_user_can_open_the_lock_of_a_run(tmp_path: Path) -> None:
    os.close(lock_file(f"sqlite:///{tmp_path}/videos.db", "trending"))
    (lock,) = tmp_path.glob("*.lock")
    os.chown(lock, NOBODY, NOBODY)
    with pytest.raises(quota.ConfigError, match="belongs to nobody"):
        lock_file(f"sqlite:///{tmp_path}/videos.db", "trending")


@needs_root
def test_a_journal_of_another_user_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of its lines is sound, and would put a charge into the ledger that was never made."""
    planted = journal(tmp_path)
    planted.write("e", [CALL._replace(id=(NOW_MS, 1))])
    planted.note_facts(Facts().text(), NOW_MS)
    planted.compared("e", planted.position())
    assert planted.draws.draw([CALL], "", START, now_ms=NOW_MS, window_ms=DAY_MS, allowance_units=50)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.chown(path, NOBODY, NOBODY)
    ours = journal(tmp_path)
    assert (ours.newest("e"), list(ours.records()), ours.notes().facts, ours.draws.owed()) == (START, [], "", [])
    name, why = ours.trouble.removeprefix("journal ").split(": ", 1)
    assert (os.path.isfile(name), why) == (True, "belongs to nobody, and this is root")
    assert all(event in caplog.text for event in ("journal_unusable", "allowance_unreadable"))


@needs_root
@pytest.mark.parametrize("moment", ["before it is made", "after it was found", "after it was gone"])
@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_a_file_planted_during_creation_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    """The user's own file comes and goes, and somebody is quicker at each step between."""
    path, opened = tmp_path / "file", os.open
    planted: list[str] = []

    def plant() -> None:
        planted.append(kind)
        path.unlink(missing_ok=True)
        if kind == "a file":
            path.write_bytes(b"theirs")
        else:
            path.symlink_to(tmp_path / "elsewhere")
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def open_and_plant(*args: Any, **options: Any) -> int:
        if moment == "before it is made" and not planted:
            plant()
        try:
            return opened(*args, **options)
        except FileExistsError:
            if moment == "after it was found" and not planted:
                plant()
            elif moment == "after it was gone" and not planted:
                path.unlink()
            raise
        except FileNotFoundError:
            plant()
            raise

    if moment != "before it is made":
        path.write_bytes(b"one's own")
    monkeypatch.setattr(os, "open", open_and_plant)
    with pytest.raises(NotAloneError):
        open_alone(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    assert planted
    assert not (tmp_path / "elsewhere").exists()
    if kind == "a file":
        assert path.read_bytes() == b"theirs"


@pytest.mark.usefixtures("no_umask")
@each_made
def test_an_open_umask_widens_no_file_mode(tmp_path: Path, place: Place) -> None:
    place.use(path_of(place, tmp_path))
    public = {"videos.db", "videos.db-wal", "videos.db-shm", "quota-p.prom", "quota.toml"}
    for path in tmp_path.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o644 if path.name in public else 0o600), path
