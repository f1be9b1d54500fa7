"""A closed session stays closed: whoever still holds a part of it is refused, and nothing is opened or charged."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

import quota
import quota.session
from quota.errors import LedgerError, SessionClosedError
from quota.jobs.emulator import Emulator
from quota.ledger.factory import open_ledger
from quota.ledger.log import Log
from support.setup import budget_of, limit

CONFIG = """
[ledger]
url = "{url}"
unavailable = {{ max_cost = 1, allowance = 50 }}
[credentials.main]
api = "youtube-v3"
"""
PLAIN = {
    *("settings", "keys", "run", "credential", "book", "limits", "limits_of", "project"),
    *("note_refusal", "hand_over_refusals", "repay"),
}
"""What opens nothing: the configuration, and what hands over what is kept, if there is anything."""

OF_A_SESSION: dict[str, Callable[[Any], Any]] = {
    "ledger": lambda session: session.ledger,
    "budget": lambda session: session.budget(),
    "project": lambda session: session.project(),
    "google": lambda session: session.google(),
    "requests": lambda session: session.requests(),
    "httpx": lambda session: session.httpx(),
    "check_key": lambda session: session.check_key(),
    "__enter__": lambda session: session.__enter__(),
}
OF_A_BUDGET: dict[str, Callable[[Any], Any]] = {
    "charge": lambda budget: budget.charge("videos.list"),
    "charge_many": lambda budget: budget.charge_many(["videos.list"]),
    "peek": lambda budget: budget.peek("videos.list"),
    "refund": lambda budget: budget.refund("1795233255077-key"),
    "settle": lambda budget: budget.settle("1795233255077-key", 5),
    "usage": lambda budget: budget.usage(),
    "outlook": lambda budget: budget.outlook(),
    "outlook_without_ledger": lambda budget: budget.outlook_without_ledger(LedgerError("away")),
    "owed_units": lambda budget: budget.owed_units(),
    "allowance": lambda budget: budget.allowance(),
    "spend": lambda budget: budget.spend("videos.list").__enter__(),
    "exhaust": lambda budget: budget.exhaust("units", 1, 2, "no more"),
    "reopen": lambda budget: budget.reopen("units", "it answers"),
    "grant": lambda budget: budget.grant([]),
    "add_others": lambda budget: budget.add_others("units", 5, 1, 2, "console"),
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
    with pytest.raises(SessionClosedError):
        OF_A_SESSION[name](session)
    session.close()


@pytest.mark.parametrize("name", OF_A_BUDGET)
def test_a_budget_of_a_closed_session_charges_and_changes_nothing(config: Path, name: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with quota.open(config) as session:
        budget = session.budget()
        budget.charge("videos.list")
    with pytest.raises(SessionClosedError, match=r"is closed; open another one with quota\.open\(\).*may be charged$"):
        OF_A_BUDGET[name](budget)
    assert set(os.listdir("/proc/self/fd")) <= before, "nothing was opened again"
    with quota.open(config) as session:
        assert {state.used_units for state in session.budget().usage()} == {1}
        assert session.budget().peek("videos.list").reason == "ok"


def test_the_closed_session_tests_cover_every_public_method(config: Path) -> None:
    with quota.open(config) as session:
        for part, tried in ((session, OF_A_SESSION), (session.budget(), OF_A_BUDGET)):
            names = {name for name, _ in inspect.getmembers(type(part)) if not name.startswith("_")}
            assert names - {"close", "start_over_in_child"} - PLAIN - set(tried) == set()


def test_a_budget_in_the_middle_of_its_questions_stays_closed_too(config: Path) -> None:
    """The part of the log that it has read decides nothing more, not even a refusal."""
    with quota.open(config) as session:
        budget = session.budget()
        assert budget.charge("videos.list", units=9_000).admitted
        assert not budget.charge("videos.list", units=9_000).admitted
    for units in (1, 9_000):
        with pytest.raises(SessionClosedError):
            budget.charge("videos.list", units=units)


def test_a_client_that_is_made_while_the_session_closes_is_closed(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, closed = quota.open(config), []

    class Late(requests.Session):
        def __init__(self) -> None:
            super().__init__()
            session.close()  # by another thread

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr("quota.clients.requests.MeteredSession", Late)
    with pytest.raises(SessionClosedError):
        session.requests()
    assert len(closed) == 1


def test_threads_that_ask_first_at_once_share_one_ledger(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_slowly(url: str, **options: Any) -> Log:
        opened.append(url)
        time.sleep(0.05)
        return open_ledger(url, **options)

    monkeypatch.setattr(quota.session, "open_ledger", open_slowly)
    with quota.open(config) as session, ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(lambda _: session.ledger, range(3)))) == 1
    assert len(opened) == 1


def test_a_service_of_a_closed_session_sends_nothing(config: Path) -> None:
    with Emulator() as upstream:
        with quota.open(config) as session:
            youtube = session.google(endpoint=upstream.address)
        with pytest.raises(SessionClosedError):
            youtube.videos().list(part="id", chart="mostPopular").execute()
        youtube.close()
        assert upstream.usage()["requests"] == 0


@pytest.mark.topology
def test_a_closed_ledger_leaves_nothing_open_and_may_be_used_again(ledger_url: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with closing(open_ledger(ledger_url)) as ledger:
        budget = budget_of(ledger, limit(500))
        assert budget.charge("videos.list").admitted
        ledger.close()
        assert set(os.listdir("/proc/self/fd")) <= before
        assert budget.charge("videos.list").limits[0].used_units == 2
