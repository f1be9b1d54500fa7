"""With QUOTA_TEST_NO_SKIPS=1 no test is skipped unnoticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PYTEST = [sys.executable, "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "--continue-on-collection-errors"]

SKIPS = """
import pytest

def test_that_runs(): ...

@pytest.mark.skipif(True, reason="no such thing here")
def test_with_a_mark(): ...

def test_with_a_call():
    pytest.skip("nothing to run on")

@pytest.mark.xfail(strict=True)
def test_that_should_fail():
    raise ValueError
"""

MODULE = """
import pytest
pytest.importorskip("no_such_module", reason="no such module")
def test_a(): ...
"""


@pytest.mark.parametrize(("workers", "value"), [("0", "1"), ("1", "1"), ("0", "")])
def test_a_skipped_test_fails_where_everything_should_be_there(tmp_path: Path, workers: str, value: str) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    shutil.copy(TESTS / "conftest.py", tmp_path / "conftest.py")
    done = subprocess.run(
        [*PYTEST, "-n", workers, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "QUOTA_TEST_NO_SKIPS": value, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    reasons = ("no such thing here", "nothing to run on", "no such module")
    assert [reason in done.stdout for reason in reasons] == [True] * 3, done.stdout
    if value:
        assert done.returncode != 0
        assert "skipped" not in done.stdout.splitlines()[-1]
        assert "with QUOTA_TEST_NO_SKIPS=1 no test may be skipped" in done.stdout
    else:
        assert done.returncode == 0, done.stdout
        assert done.stdout.splitlines()[-1].startswith("1 passed, 3 skipped, 1 xfailed")
