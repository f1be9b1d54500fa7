"""A configuration four times as long costs four times as much to read and to judge: counted, not timed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quota.session import Session
from quota.settings.lint import lint
from quota.settings.load import load_settings
from quota.settings.model import Settings

SMALL, TIMES = int(os.environ.get("QUOTA_TEST_LENGTH", "16")), 4
"""`make soak` takes 90: what is quadratic by little shows there."""

MAIN = '[credentials.main]\napi = "youtube-v3"\nkey = "file:/nowhere"\n'


def lines(form: str, n: int) -> str:
    return "".join(form.format(i=i, j=i + 1) for i in range(n))


def names(n: int) -> str:
    return ", ".join(f'"name-{i}"' for i in range(n))


LIMITS = '[[credentials.main.limits]]\nname = "l{i}"\nunits = 500\nwindow = "{j}h"\n'
NARROW = '[[credentials.main.limits]]\nname = "l{i}"\nunits = 500\nwindow = "24h"\njobs = ["unknown-{i}"]\n'
JOBS = '[jobs.j{i}]\nfetch = "trending"\n'
OWN_JOBS = '[jobs.j{i}]\nfetch = "nowhere:fetch"\n'
"""Of a built-in job, the first call is compared with each limit: a thousand of both take half a second."""

CONFIGURATIONS: dict[str, Callable[[int], str]] = {
    "credentials of one project": lambda n: lines(
        '[credentials.c{i}]\napi = "youtube-v3"\nproject = "p"\nkey = "file:/nowhere-{i}"\n', n
    ),
    "credentials with a job each": lambda n: lines(
        '[credentials.c{i}]\napi = "youtube-v3"\n[jobs.j{i}]\ncredential = "c{i}"\nfetch = "trending"\n', n
    ),
    "jobs that leave the same": lambda n: MAIN + lines(LIMITS, n) + lines(JOBS + "leave = 5\n", 8),
    "limits for unknown jobs, among many jobs": lambda n: MAIN + lines(NARROW, 2 * n) + lines(OWN_JOBS, 2 * n),
    "a job that leaves of each limit": lambda n: (
        MAIN + lines(LIMITS, n) + JOBS.format(i=0) + "[jobs.j0.leave]\n" + lines("l{i} = 1\n", n)
    ),
    "a limit for many jobs": lambda n: (
        MAIN
        + LIMITS.format(i=0, j=1)
        + f"jobs = [{names(2 * n)}]\n"
        + lines("[jobs.name-{i}]\nfetch='trending'\n", 2 * n)
    ),
}


def steps(work: Callable[[], object]) -> int:
    """How many lines the interpreter runs, each turn of a loop again, without those of reading TOML, which would hide
    ours."""
    count = 0

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return step

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return None if "tomllib" in frame.f_code.co_filename else step

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def growth(work: Callable[[int], Callable[[], object]]) -> float:
    """How many times as many lines four times as much takes: 4 where the growth is linear, 16 where it is quadratic."""
    work(SMALL)()  # what is done once for a process
    small, large = (steps(work(n)) for n in (SMALL, SMALL * TIMES))
    return large / small


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Settings]:
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    made = 0

    def load(kind: str, n: int) -> Settings:
        nonlocal made
        path = tmp_path / f"{made}.toml"
        made += 1
        path.write_text(CONFIGURATIONS[kind](n))
        return load_settings(path)

    return load


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_reading_and_judging_grow_with_the_length(load: Callable[[str, int], Settings], kind: str) -> None:
    assert growth(lambda n: lambda: load(kind, n)) < TIMES * 1.2

    def judging(n: int) -> Callable[[], object]:
        settings = load(kind, n)
        return lambda: lint(settings)

    assert growth(judging) < TIMES * 1.2


def test_all_budgets_of_a_session_grow_with_the_length(load: Callable[[str, int], Settings]) -> None:
    def opening(n: int) -> Callable[[], object]:
        settings = load("credentials with a job each", n)

        def work() -> None:
            with Session(settings) as session:
                for name in settings.credentials:
                    session.budget(name)

        return work

    assert growth(opening) < TIMES * 1.2


def test_messages_name_twenty_of_many(load: Callable[[str, int], Settings]) -> None:
    settings = load("credentials of one project", 500)
    with pytest.raises(Exception, match=r"c18, c19, \.\.\.; name one \(--credential\)"), Session(settings) as session:
        session.budget()
