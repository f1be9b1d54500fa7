"""The benchmark runs and says what it measured. How fast anything is stays out of the tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.cold import lay_out
from bench.kinds import DECISIONS

TESTS = Path(__file__).resolve().parents[1]


def bench(module: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300, check=False, **options)


def measured(module: str, folder: Path, *args: str) -> Any:
    """The figures of a benchmark: all of its bars were measured, and its tables are narrow."""
    done = bench(module, "--quick", *args, "--json", str(folder / "figures.json"))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    figures = json.loads((folder / "figures.json").read_text())
    assert [bar["name"] for bar in figures["bars"] if bar["measured"] <= 0] == []
    return figures


@pytest.mark.timeout(300)
def test_the_benchmark_prints_narrow_tables_and_holds_every_bar_against_a_figure(tmp_path: Path) -> None:
    figures = measured("bench", tmp_path, "--rounds", "1")
    assert set(figures["tables"]) == {
        *("redis", "redis-memory", "redis-growth", "sqlite", "sqlite-size", "sqlite-growth"),
        *("redis-together", "sqlite-together", "loops", "moments", "many", "cold"),
        *(["beside-limits"] if find_spec("limits") else ()),
    }
    assert len(figures["bars"]) == 11 + (6 if find_spec("limits") else 0), "six are beside the library `limits`"


def test_the_copy_that_is_measured_as_installed_has_every_package_of_a_wheel(tmp_path: Path) -> None:
    lay_out(tmp_path)

    imports = "import quota.config, quota.jobs; print(quota.__file__, quota.jobs.__file__)"
    done = subprocess.run([sys.executable, "-c", imports], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout.split() == [str(tmp_path / "quota" / name) for name in ("__init__.py", "jobs/__init__.py")]
    assert (tmp_path / "quota" / "lua" / "charge.lua").is_file()
    assert (tmp_path / "quota" / "lua" / "parts" / "clock.lua").is_file()


def test_an_unknown_revision_to_measure_beside_is_one_line() -> None:
    done = bench("bench", "--before", "no-such-revision")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("bench: git knows no commit no-such-revision here")
    assert done.stderr.count("\n") == 1


def test_the_load_on_the_api_is_a_narrow_table() -> None:
    done = bench("bench.api", "--videos", "1600", "--seconds", "0.1")
    lines = done.stdout.splitlines()
    assert (len(lines), max(map(len, lines))) <= (10, 80), done.stderr
    assert re.fullmatch(r"p99 [\d.]+ ms \(at most 150\); memory \d+ MB \(at most 200\): (held|above)", lines[-1])
    assert done.returncode == 0, "what is above its bar does not keep `make bench` from measuring the rest"


def test_a_crowd_on_one_redis_is_a_narrow_table() -> None:
    done = bench("bench.crowd", "--processes", "1", "--seconds", "0.05")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    measured, computed = done.stdout.split("\ncomputed:")
    for kind in ("counter", "gcra", "log", "charge"):
        assert re.search(rf"^{kind} +[\d,]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+$", measured, re.M), measured
        assert re.search(rf"^{kind} +[\d.]+ of a server, [\d.]+ of the processes; [\d,]+ a second$", computed, re.M)


def test_the_benchmark_of_inbound_limits_prints_narrow_tables_and_holds_every_bar_against_a_figure(
    tmp_path: Path,
) -> None:
    figures = measured("bench.inbound", tmp_path)
    assert set(figures["tables"]) == {"inbound", "inbound-memory", "inbound-error"}
    assert len(figures["bars"]) >= 3, "and one for each library that is installed"
    logs = [row for row in figures["tables"]["inbound-error"] if row["algorithm"] == "log"]
    assert max(row["most_in_a_window"] for row in logs) == 100, "the exact log is exact"


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
