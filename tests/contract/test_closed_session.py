"""A closed session stays closed: whoever still holds a part of it is told so, and nothing is opened or charged."""

from __future__ import annotations

import gc
import inspect
import os
import socket
import sqlite3
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import redis

import quota
from quota.deciding import recorder
from quota.jobs.emulator import Emulator
from quota.recovery import high_water_mark
from quota.session import Session
from quota.settings.load import load_settings
from quota.terms.limits import HOUR_MS
from support.proxy import Proxy
from support.setup import Setup, limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import RedisServer

NOW_MS = 1_795_255_200_000

CONFIG = """
[ledger]
url = "{url}"
unavailable = {{ max_cost = 1, allowance = 50 }}
[credentials.main]
api = "youtube-v3"
"""
PLAIN = {"settings", "run", "credential", "attempt_number", "book", "limits", "limits_of", "project"}
"""What the configuration says; reading it opens nothing."""

OF_A_SESSION: dict[str, Callable[[Any], Any]] = {
    "ledger": lambda session: session.ledger,
    "budget": lambda session: session.budget(),
    "google": lambda session: session.google(),
    "requests": lambda session: session.requests(),
    "httpx": lambda session: session.httpx(),
    "check_allowance": lambda session: session.check_allowance(),
    "check_key": lambda session: session.check_key(),
    "repair": lambda session: session.repair("p"),
    "__enter__": lambda session: session.__enter__(),
}
OF_A_BUDGET: dict[str, Callable[[Any], Any]] = {
    "charge": lambda budget: budget.charge("videos.list"),
    "charge_many": lambda budget: budget.charge_many(["videos.list"]),
    "peek": lambda budget: budget.peek("videos.list"),
    "refund": lambda budget: budget.refund("1795233255077-0"),
    "settle": lambda budget: budget.settle("allowance-1", 5),
    "usage": lambda budget: budget.usage(),
    "outlook": lambda budget: budget.outlook(),
    "owed_units": lambda budget: budget.owed_units(),
    "spend": lambda budget: budget.spend("videos.list").__enter__(),
    "ledger": lambda budget: budget.ledger.now_ms(),
}


@pytest.fixture
def config(ledger_url: str, state_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "quota.toml"
    path.write_text(CONFIG.format(url=ledger_url))
    return path


@pytest.mark.parametrize("name", OF_A_SESSION)
def test_a_closed_session_opens_nothing(config: Path, name: str) -> None:
    with quota.open(config) as session:
        session.budget().charge("videos.list")
    with pytest.raises(quota.UsageError, match="this session is closed"):
        OF_A_SESSION[name](session)
    session.close()


def test_who_closes_a_session_that_another_thread_closes_waits_for_its_end(config: Path) -> None:
    class Service:
        def close(self) -> None:
            other.start()
            other.join(0.1)
            waits.append(other.is_alive())

    def close() -> None:
        session.close()
        closed.append(not session._budgets)

    waits: list[bool] = []
    closed: list[bool] = []
    session = quota.open(config)
    session.budget().charge("videos.list")
    session._services.append(Service())
    other = threading.Thread(target=close)
    close()
    other.join()
    assert (waits, closed) == ([True], [True, True])


@pytest.mark.parametrize("name", OF_A_BUDGET)
def test_a_budget_of_a_closed_session_charges_nothing(config: Path, name: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with quota.open(config) as session:
        budget = session.budget()
        budget.charge("videos.list")
    with pytest.raises(quota.UsageError, match=r"this session is closed; open another one with quota\.open\(\)"):
        OF_A_BUDGET[name](budget)
    assert set(os.listdir("/proc/self/fd")) <= before, "nothing was opened again"
    with quota.open(config) as session:
        assert {state.used_units for state in session.budget().usage()} == {1}


def test_a_service_of_a_closed_session_sends_nothing(config: Path) -> None:
    with Emulator() as upstream:
        with quota.open(config) as session:
            youtube = session.google(endpoint=upstream.address)
        with pytest.raises(quota.UsageError, match="this session is closed"):
            youtube.videos().list(part="id", chart="mostPopular").execute()
        youtube.close()
        assert upstream.usage()["requests"] == 0


def test_these_are_all_that_a_session_and_a_budget_can_do(config: Path) -> None:
    with quota.open(config) as session:
        can = {name for thing in (session, session.budget()) for name, _ in inspect.getmembers(type(thing))}
    assert {name for name in can if not name.startswith("_")} - {"close"} <= PLAIN | set(OF_A_SESSION) | set(
        OF_A_BUDGET
    )


def configured(url: str) -> str:
    projects = (f'[credentials.p{n}]\napi = "youtube-v3"\nproject = "p{n}"\n' for n in range(10))
    return f'[ledger]\nurl = "{url}"\nname = "tests"\n{"".join(projects)}'


@pytest.mark.usefixtures("real_walls")
@pytest.mark.parametrize("what", ["read", "add_refusals"])
def test_a_silent_ledger_holds_up_the_end_of_many_projects_no_longer_than_of_one(
    redis_server: RedisServer, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What it was not asked then, a later process reads: all that each had seen is in its slot."""
    monkeypatch.setattr(high_water_mark, "PIECE", 1)
    monkeypatch.setattr(high_water_mark, "FRESH_S", 1_000.0)
    monkeypatch.setattr(recorder, "ALL_END_WITHIN_S", 0.0 if what == "read" else recorder.END_WITHIN_S)
    now_ms = NOW_MS
    with redis.Redis(port=redis_server.port) as client:
        client.flushall()
    with Proxy(redis_server.port) as proxy:
        path = tmp_path / "quota.toml"
        path.write_text(configured(proxy.url), encoding="utf-8")
        session = Session(load_settings(path), clock=lambda: now_ms)
        budgets = [session.budget(name) for name in session.settings.credentials]
        for budget in budgets:
            for _ in range(3):
                assert budget.charge("search.list").admitted
        now_ms += 3 * HOUR_MS
        for budget in budgets:
            assert budget.charge("search.list").admitted
            assert not budget.charge("search.list", units=9_500).admitted
        ledger, asked = session.ledger, []
        ask = getattr(ledger, what)
        monkeypatch.setattr(ledger, what, lambda *args, **options: asked.append(args[0]) or ask(*args, **options))
        proxy.pause()
        session.close()
    assert len(asked) == 1
    path.write_text(configured(redis_server.url), encoding="utf-8")
    with Session(load_settings(path), clock=lambda: now_ms) as session:
        later, read = [], session.ledger.read
        monkeypatch.setattr(session.ledger, "read", lambda *args, **options: later.append(args[0]) or read(*args))
        for name in session.settings.credentials:
            session.budget(name).peek("search.list")
    assert [project for project in session.settings.credentials if project in later] == [*session.settings.credentials]


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize("first", [True, False], ids=["it first", "its connection first"])
def test_what_was_forgotten_in_a_circle_is_closed_before_python_ends_its_connection(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Python ends all of a circle in the order in which the collector came to know them, whatever belongs to what."""

    def circle() -> list[Any]:
        others = {id(one) for one in gc.get_objects()}
        setup = Setup.open(ledger_url)
        setup.budget(limit(500)).charge("videos.list")
        found = [one for one in gc.get_objects() if isinstance(one, (socket.socket, sqlite3.Connection))]
        parts = [setup.ledger, *(one for one in found if id(one) not in others)]
        assert len(parts) > 1
        parts.append(parts)
        return parts if first else parts[::-1]

    said: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: said.append(str(raised.exc_value)))
    forgotten = circle()
    gc.collect()  # from now on it knows them in this order, or from the end
    del forgotten
    gc.collect()
    assert said == []
