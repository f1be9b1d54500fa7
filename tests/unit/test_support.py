"""What the tests stand on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import Children, in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def fail_or_rest(fails: bool) -> None:
    if fails:
        raise ValueError("of one of them")
    signal.pause()


@pytest.mark.parametrize("start", ["fork", "anew"])
def test_a_failing_process_ends_the_wait_with_its_message(start: str) -> None:
    children = Children(fail_or_rest, (False,), (True,), (False,), start=start)
    with pytest.raises(AssertionError, match=r"in process 1:\n(?s:.*)ValueError: of one of them"):
        children.answers()
    assert all(process.exitcode is not None for process in children.processes)


def test_a_dead_process_ends_the_wait() -> None:
    with pytest.raises(AssertionError, match="process 0 ended with -9 and told nothing"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_failed_before_its_kill_fails_the_test() -> None:
    children = Children(fail_or_rest, (True,))
    children.processes[0].join()
    with pytest.raises(AssertionError, match="of one of them"):
        children.kill()


TESTS = Path(__file__).resolve().parents[1]

PYTEST = [sys.executable, "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "--continue-on-collection-errors"]

SKIPS = """
import pytest

def test_that_runs(): ...

def test_with_a_call():
    pytest.skip("nothing to run on")
"""


def test_a_skipped_test_fails_where_everything_should_be_there(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(
        'import pytest\npytest.importorskip("no_such_module", reason="no module")\n'
    )
    shutil.copy(TESTS / "conftest.py", tmp_path / "conftest.py")
    done = subprocess.run(
        [*PYTEST, "-n", "0", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "QUOTA_TEST_NO_SKIPS": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "1 failed, 1 passed, 1 error" in done.stdout.splitlines()[-1]) == (1, True), done.stdout
    for reason in ("nothing to run on", "no module"):
        assert f"{reason}; with QUOTA_TEST_NO_SKIPS=1 no test may be skipped" in done.stdout
