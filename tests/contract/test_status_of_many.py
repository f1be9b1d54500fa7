"""The status of many projects: as if each had been asked for by itself."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import redis

from quota.errors import LedgerError
from quota.ledger.redis_connection import Cluster, Connections
from quota.reports.status import read_status
from quota.rules.facts import Grant
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import DAY_MS, HOUR_MS
from support.losses import LedgerStorage, SqliteStorage
from support.proxy import Proxy
from support.setup import charges_at, ids_of

if TYPE_CHECKING:
    from support.servers import RedisServer

NOW_MS = 1_795_255_200_000
SEARCH_UNITS = 100


class Scene:
    """A configuration of so many projects, `p0` and on."""

    def __init__(self, url: str, folder: Path, projects: int) -> None:
        self.folder, self.now_ms = folder, NOW_MS
        self.names = [f"p{n}" for n in range(projects)]
        self.place(url)

    def place(self, url: str) -> None:
        parts = [f'[ledger]\nurl = "{url}"\nname = "tests"\n']
        parts += [f'[credentials.{name}]\napi = "youtube-v3"\nproject = "{name}"\n' for name in self.names]
        (self.folder / "quota.toml").write_text("".join(parts), encoding="utf-8")

    def session(self) -> Session:
        return Session(load_settings(self.folder / "quota.toml"), clock=lambda: self.now_ms)

    def charge(self, every: int = 1, calls: int = 1) -> None:
        with self.session() as session:
            for name in self.names[::every]:
                for _ in range(calls):
                    assert session.budget(name).charge("search.list").admitted

    def read(self) -> Any:
        """The status, or what was said instead of it."""
        with self.session() as session:
            try:
                return read_status(session).as_json()["credentials"]
            except LedgerError as error:
                return f"{type(error).__name__}: {error}"


@pytest.fixture
def proxied(redis_server: RedisServer) -> Any:
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    with Proxy(redis_server.port) as proxy:
        yield proxy


def test_a_status_without_the_next_capacity_has_every_other_field(ledger_url: str, tmp_path: Path) -> None:
    scene = Scene(ledger_url, tmp_path, 4)
    scene.charge(every=2)
    with scene.session() as session:
        asked, not_asked = (read_status(session, next_capacity=wanted).credentials for wanted in (True, False))
    times = {row.next_capacity_ms for credential in not_asked for row in credential.limits}
    assert times == {None} < {row.next_capacity_ms for credential in asked for row in credential.limits}
    assert not_asked == tuple(
        credential._replace(limits=tuple(row._replace(next_capacity_ms=None) for row in credential.limits))
        for credential in asked
    )


@pytest.mark.parametrize("first", [True, False], ids=["first look", "later"])
def test_the_work_for_each_project_is_bounded(ledger_url: str, state_dir: Path, tmp_path: Path, first: bool) -> None:
    """Counted in calls of functions, from the files of what was seen to what is shown; rich draws it. Left out is what
    connecting takes, and learning of a cluster's nodes: how often that is done depends on how many threads meet."""
    once = (Connections._connected.__code__, Cluster._discovered_nodes.__code__)
    counted, thread = list[None](), threading.local()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):  # the others are of functions written in C
            return
        if frame.f_code in once:
            thread.is_left_out = event == "call"
        elif event == "call" and not getattr(thread, "is_left_out", False):
            counted.append(None)

    scene, calls = Scene(ledger_url, tmp_path, 50), []
    scene.charge()
    for projects in (10, 50):
        scene.names = [f"p{n}" for n in range(projects)]
        scene.place(ledger_url)
        if first:
            shutil.rmtree(state_dir)
        else:
            scene.read()
        counted.clear()
        with scene.session() as session:
            threading.setprofile(count)
            sys.setprofile(count)
            try:
                read_status(session)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
        calls.append(len(counted))
    scheme = ledger_url.partition(":")[0]
    on_the_way = 40 * (scheme.startswith("rediss") + scheme.endswith("cluster"))  # of `ssl`; to find the slot's node
    assert (calls[1] - calls[0]) / 40 < (960 if first else 820) + on_the_way


def test_a_status_puts_back_charges_that_its_machine_read(
    ledger_place: LedgerStorage, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(ledger_place.url, tmp_path, 4)
    scene.charge()
    copy = ledger_place.copy()
    scene.now_ms += 1_000
    with monkeypatch.context() as other_machine:
        other_machine.setenv("QUOTA_STATE_DIR", str(tmp_path / "elsewhere"))
        with scene.session() as session:
            session.budget("p0").charge("search.list")
            (charge,) = charges_at(session.ledger, "p2")
            session.budget("p2").settle(*ids_of([charge]), 3 * SEARCH_UNITS)
    for _ in range(2):
        assert [row["limits"][0]["used_units"] for row in scene.read()] == [200, 100, 300, 100]
        ledger_place.restore(copy)  # type: ignore[arg-type]


def closed(scene: Scene, _: LedgerStorage) -> None:
    with scene.session() as session:
        for name in scene.names[::2]:
            session.budget(name).exhaust("units", NOW_MS, NOW_MS + DAY_MS, "so it said", "host:1")
            session.budget(name).grant([Grant("units", 5_000, NOW_MS, NOW_MS + DAY_MS)])
        for name in scene.names[::4]:
            session.budget(name).reopen("units", "asked")


def full(scene: Scene, _: LedgerStorage) -> None:
    scene.charge(every=5, calls=91)


def lost(scene: Scene, place: LedgerStorage) -> None:
    """The server is restored from a copy of before: this machine saw more, of every other project."""
    copy = place.copy()
    scene.now_ms += HOUR_MS
    scene.charge(every=2, calls=3)
    place.restore(copy)  # type: ignore[arg-type]


def emptied(_: Scene, place: LedgerStorage) -> None:
    place.empty()


def moved(scene: Scene, _: LedgerStorage) -> None:
    """Of two the first in the configuration is told of, whichever is asked first."""
    with scene.session() as session:
        for name in ("p10", "p12"):
            done, fence = session.ledger.fence(name, session.ledger.begin(name).epoch, "token")
            assert done
            assert session.ledger.seal(name, fence, f"redis://elsewhere/{name}")


def missing(_: Scene, place: LedgerStorage) -> None:
    if isinstance(place, SqliteStorage):
        with closing(sqlite3.connect(place.path)) as db, db:
            for table in ("log", "state"):
                db.execute(f"DELETE FROM {table} WHERE project = 'p10'")  # noqa: S608
        return
    with place.open() as client:
        for key in ("log", "state", "corrected"):
            client.delete(f"quota:{{p10}}:ledger:{key}")


Check = Callable[[Callable[[Scene, LedgerStorage], None]], None]


@pytest.fixture
def check_both_ways(
    ledger_place: LedgerStorage, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Check:
    def check(what: Callable[[Scene, LedgerStorage], None]) -> None:
        scene = Scene(ledger_place.url, tmp_path, 16)
        scene.charge(every=5)
        scene.charge(every=2, calls=2)
        what(scene, ledger_place)
        scene.now_ms += HOUR_MS
        copy, answers = ledger_place.copy(), []
        for way in ("side by side", "one by one"):
            ledger_place.restore(copy)  # type: ignore[arg-type]
            monkeypatch.setenv("QUOTA_STATE_DIR", str(shutil.copytree(state_dir, tmp_path / way)))
            answers.append(scene.read())
            monkeypatch.setattr("quota.reports.status._read_several", map)
        assert answers[0] == answers[1]
        assert (type(answers[0]) is str) == (what is moved)
        assert ("put_back" in str(answers[0])) == (what in (lost, emptied, missing))

    return check


@pytest.mark.topology
def test_a_parallel_status_equals_a_sequential_status(check_both_ways: Check) -> None:
    check_both_ways(closed)


@pytest.mark.parametrize("what", [lost, moved, full, emptied, missing])
def test_a_parallel_status_shows_a_full_gone_or_moved_ledger(check_both_ways: Check, what: Any) -> None:
    check_both_ways(what)


@pytest.mark.parametrize("kind", ["drop-request", "drop-reply"])
def test_a_server_that_vanishes_midway_is_one_line(
    proxied: Proxy, tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """And after a connection that ended once, the answer is that of a server that stayed."""
    scene = Scene(proxied.url, tmp_path, 30)
    scene.charge(every=2)
    expected = scene.read()
    proxied.fail(kind, match=b"{p17}")
    assert scene.read() == expected
    proxied.fail(kind, times=1_000, match=b"{p17}")
    before = proxied.connections
    answer = scene.read()
    assert answer.startswith("LedgerError: ledger redis://127.0.0.1:")
    assert proxied.connections - before < 16, "no others are asked any more"
