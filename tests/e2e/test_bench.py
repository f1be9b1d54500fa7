"""The benchmark runs and says what it measured. How fast anything is stays out of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.kinds import DECISIONS

TESTS = Path(__file__).resolve().parents[1]


def bench(module: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300, check=False, **options)


def measured(module: str) -> tuple[str, int]:
    """What a benchmark printed, and how many bars it holds: all of them were measured, and its tables are narrow."""
    done = bench(module, "--quick")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    tables, _, bars = done.stdout.partition("\nThe bars\n")
    figures = re.findall(r"([\d.,]+) \S+ +[\d.]+ \S+ +(?:ok|above)$", bars, flags=re.MULTILINE)
    assert len(figures) == len(bars.splitlines()) - 1, bars
    assert all(float(figure.replace(",", "")) > 0 for figure in figures), bars
    return tables, len(figures)


@pytest.mark.timeout(300)
def test_the_benchmark_prints_narrow_tables_and_holds_every_bar_against_a_figure() -> None:
    _, bars = measured("bench")
    assert bars == 12 + (6 if find_spec("limits") else 0), "six are beside the library `limits`"


def test_the_benchmark_of_inbound_limits_prints_narrow_tables_and_holds_every_bar_against_a_figure() -> None:
    tables, bars = measured("bench.inbound")
    assert bars >= 3, "and one for each library that is installed"
    errors = tables.partition("Inbound limits: error against the exact log")[2]
    most = [int(units) for units in re.findall(r" log +100\.0% +0\.0% +(\d+)$", errors, flags=re.MULTILINE)]
    assert (len(most), max(most)) == (7, 100), "the exact log is exact"


def test_a_process_of_its_own_makes_each_kind_of_decision_that_is_held_against_an_earlier_revision(
    tmp_path: Path,
) -> None:
    lines = "".join(f"2 {name}\n" for name in DECISIONS)
    env = {**os.environ, "QUOTA_STATE_DIR": str(tmp_path / "state")}
    url = f"sqlite:///{tmp_path}/ledger.db"
    done = bench("bench.sessions", url, str(tmp_path), "200", env=env, input=lines)
    assert done.stderr == ""
    place, *times = done.stdout.splitlines()
    assert Path(place.split(os.pathsep)[0]).name == "__init__.py"
    assert [len(line.split()) for line in times] == [2] * len(DECISIONS)
