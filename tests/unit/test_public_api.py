"""The names that other people's code may rely on."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quota

HERE = {**os.environ, "PYTHONPATH": str(Path(quota.__file__).parent.parent)}


def test_quota_has_a_fixed_list_of_public_names() -> None:
    assert quota.__all__ == [
        *("AsyncBudget", "AsyncSession", "BadAnswer", "Budget", "ConfigError", "CostBook"),
        *("CostExceedsLimit", "Decision", "Entry", "LedgerError", "Limit", "LimitState", "Log"),
        *("QuotaError", "Refused", "Session", "UnknownCharge", "UnknownMethod", "UsageError"),
        *("When", "instrument", "labels", "open", "open_async", "uninstrument"),
    ]


def test_dir_shows_the_public_names_before_any_of_them_is_used() -> None:
    script = "import quota; assert dir(quota) == quota.__all__; quota.Budget; assert dir(quota) == quota.__all__"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_session_and_a_budget_have_no_other_public_names(state_dir: Path) -> None:
    with quota.open() as session:
        assert {"budget", "check_key", "close", "credential", "google", "httpx", "ledger", "requests", "run"} <= {
            *_public(session)
        }
        assert [name for name in _public(session) if "secret" in name or name == "key"] == []
        assert {*FOR_USERS} <= {*_public(session.budget())}


FOR_USERS = [
    *("book", "charge", "charge_many", "credential", "limits", "limits_of", "outlook"),
    *("owed_units", "peek", "project", "refund", "settle", "spend", "usage"),
]
"""The rest of a budget is for clients and jobs."""


def test_an_async_budget_has_the_same_methods(state_dir: Path) -> None:
    blocking = quota.open()
    awaited = quota.open_async()
    assert _public(awaited) == ["aclose", "budget", "run", "settings"]
    assert _public(awaited.budget()) == FOR_USERS
    for name, method in inspect.getmembers(quota.Budget, inspect.isfunction):
        if name in FOR_USERS:
            ours = inspect.signature(getattr(quota.AsyncBudget, name))
            assert ours.parameters == inspect.signature(method).parameters
            assert inspect.iscoroutinefunction(getattr(quota.AsyncBudget, name)) == (name not in ("spend", "limits_of"))
    blocking.close()


def _public(thing: object) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


@pytest.mark.parametrize("name", quota.__all__)
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(quota, name))


@pytest.mark.parametrize("name", [n for n in quota.__all__ if n.endswith(("Error", "Refused"))])
def test_clients_retry_none_of_our_errors(name: str) -> None:
    """The Google client retries an OSError, with sleeps; a refusal has to end the work."""
    error = getattr(quota, name)
    assert issubclass(error, quota.QuotaError)
    assert not issubclass(error, OSError)


def test_importing_quota_loads_nothing_else() -> None:
    """The command's entry point is a module of this package: what this package imports comes before its first line."""
    script = "import sys; before = set(sys.modules); import quota; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True, env=HERE)
    assert done.stdout == "['quota']\n"


@pytest.mark.parametrize("given", [5, 1.5, True, b"quota.toml", ["main"], {"main": 1}, object()])
def test_an_invalid_credential_name_or_path_is_one_line(given: Any, state_dir: Path) -> None:
    doors: list[Callable[[], object]] = [lambda: quota.open(given), lambda: quota.open_async(given)]
    awaited = quota.open_async()
    with quota.open() as session:
        doors += [lambda: session.budget(given), lambda: session.google(given), lambda: session.check_key(given)]
        doors += [lambda: session.budget().spend(given), lambda: awaited.budget().spend(given)]
        doors += [lambda: session.google(endpoint=given), lambda: session.budget().outlook(given)]
        for door in doors[: 7 if isinstance(given, (list, dict)) else None]:
            with pytest.raises(quota.UsageError) as error:
                door()
            assert (str(error.value).isprintable(), len(str(error.value)) < 200) == (True, True)


@pytest.mark.parametrize("clock", [5, "now", 1.5])
def test_an_invalid_clock_is_one_line(clock: Any, state_dir: Path) -> None:
    with quota.open(clock=clock) as session, pytest.raises(quota.UsageError, match="is not a function"):
        session.budget()


def test_messages_shorten_a_very_long_name(state_dir: Path) -> None:
    with quota.open() as session:
        for door in (session.budget().refund, session.budget, session.google, lambda name: session.google(api=name)):
            with pytest.raises(quota.QuotaError) as error:
                door("x" * 100_000)
            assert len(str(error.value)) < 400
        for name in ("\0", "\ud800"):
            with pytest.raises(quota.ConfigError, match="no description of"):
                session.google(api=name)
