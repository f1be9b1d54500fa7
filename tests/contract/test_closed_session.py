"""A closed session stays closed: whoever still holds a part of it is told so, and nothing is opened or charged."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest

import quota
from quota.jobs.emulator import Emulator

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIG = """
[ledger]
url = "{url}"
unavailable = {{ max_cost = 1, allowance = 50 }}
[credentials.main]
api = "youtube-v3"
"""
PLAIN = {"settings", "run", "credential", "attempt_number", "book", "limits", "project"}
"""What the configuration says; reading it opens nothing."""

OF_A_SESSION: dict[str, Callable[[Any], Any]] = {
    "ledger": lambda session: session.ledger,
    "budget": lambda session: session.budget(),
    "google": lambda session: session.google(),
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
