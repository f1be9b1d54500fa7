"""The benchmark runs and says what it measured. How fast anything is stays out of the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_the_benchmark_prints_narrow_tables_and_holds_every_bar_against_a_figure(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench", "--quick", "--rounds", "1", "--json", str(figures)]

    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = json.loads(figures.read_text())
    assert set(found["tables"]) == {
        "redis",
        "redis-memory",
        "redis-growth",
        "sqlite",
        "sqlite-size",
        "sqlite-growth",
        "cold",
    }
    assert [bar["name"] for bar in found["bars"] if bar["measured"] <= 0] == []
    assert len(found["bars"]) == 8, "all but the memory, which a quick run cannot judge"


def test_an_unknown_revision_to_measure_beside_is_one_line() -> None:
    command = [sys.executable, "-m", "bench", "--before", "no-such-revision"]

    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("bench: git knows no commit no-such-revision here")
    assert done.stderr.count("\n") == 1
