"""The names that other people's code may rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import quota


def test_the_public_names_are_these() -> None:
    assert quota.__all__ == [
        "BadAnswer",
        "Budget",
        "ConfigError",
        "CostExceedsLimit",
        "Decision",
        "LedgerError",
        "LimitState",
        "QuotaError",
        "Refused",
        "Session",
        "UnknownCharge",
        "UnknownMethod",
        "UsageError",
        "labels",
        "open",
    ]


@pytest.mark.parametrize("name", quota.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert inspect.getdoc(getattr(quota, name))


@pytest.mark.parametrize("name", [n for n in quota.__all__ if inspect.isclass(getattr(quota, n))])
def test_every_public_method_says_what_it_does(name: str) -> None:
    undocumented = [
        attribute
        for attribute, value in vars(getattr(quota, name)).items()
        if not attribute.startswith("_") and callable(value) and not inspect.getdoc(value)
    ]
    assert undocumented == []


@pytest.mark.parametrize("name", [n for n in quota.__all__ if n.endswith(("Error", "Refused"))])
def test_no_error_is_one_that_clients_retry(name: str) -> None:
    """The Google client retries an OSError, with sleeps; a refusal has to end the work."""
    error = getattr(quota, name)
    assert issubclass(error, quota.QuotaError)
    assert not issubclass(error, OSError)


def test_importing_it_imports_no_driver_and_no_client() -> None:
    """A cron tick that is refused never pays for them."""
    heavy = "{'redis', 'sqlite3', 'googleapiclient', 'httplib2', 'apscheduler', 'click', 'rich', 'platformdirs'}"
    script = f"import quota, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
