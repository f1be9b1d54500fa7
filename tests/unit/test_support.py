"""What the tests stand on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import Quota
from support.forked import Forked, for_a_shell
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


def test_a_forked_program_is_written_to_read_and_killed_as_any_other(tmp_path: Path) -> None:
    env = Quota(tmp_path).env
    script = "import os, sys; print(os.getcwd(), sys.argv[1:], sys.stdin.read()); sys.exit('why')"
    with Forked(["a", "b"], tmp_path, env, script=script, stdin=subprocess.PIPE) as program:
        program.stdin.write("c")
        assert program.communicate(timeout=100) == (f"{tmp_path} ['a', 'b'] c\n", "why\n")
    assert program.returncode == 1
    with Forked([], tmp_path, env, script="print(1, flush=True); import time; time.sleep(1000)") as program:
        assert program.stdout.readline() == "1\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        program.kill()
    assert program.returncode == -signal.SIGKILL


def test_a_command_for_a_shell_is_stopped_as_any_other(tmp_path: Path) -> None:
    quota = Quota(tmp_path)
    command, fds = for_a_shell(quota.env)
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        options = {"cwd": tmp_path, "env": quota.env, "pass_fds": fds, "stdout": subprocess.PIPE}
        with subprocess.Popen([*command, "emulate", "--port", "0"], **options) as emulator:
            assert b"http://" in emulator.stdout.readline()
            emulator.send_signal(number)
            assert emulator.wait(100) == status


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


def test_a_skipped_test_fails_where_everything_should_be_there(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "test_module.py").write_text(MODULE)
    shutil.copy(TESTS / "conftest.py", tmp_path / "conftest.py")
    done = subprocess.run(
        [*PYTEST, "-n", "1", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "QUOTA_TEST_NO_SKIPS": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    reasons = ("no such thing here", "nothing to run on", "no such module")
    assert [reason in done.stdout for reason in reasons] == [True] * 3, done.stdout
    assert done.returncode != 0
    assert "skipped" not in done.stdout.splitlines()[-1]
    assert "with QUOTA_TEST_NO_SKIPS=1 no test may be skipped" in done.stdout
