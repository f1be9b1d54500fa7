"""What the tests stand on."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from support.processes import Children, in_child

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def fail_or_rest(fails: bool) -> None:
    if fails:
        raise ValueError("of one of them")
    signal.pause()


@pytest.mark.parametrize("start", ["fork", "anew"])
def test_who_fails_ends_the_wait_for_all_at_once_with_what_it_said(start: str) -> None:
    children = Children(fail_or_rest, (False,), (True,), (False,), start=start)
    with pytest.raises(AssertionError, match=r"in process 1:\n(?s:.*)ValueError: of one of them"):
        children.answers()
    assert all(process.exitcode is not None for process in children.processes)


def test_who_dies_ends_the_wait_too() -> None:
    with pytest.raises(AssertionError, match="process 0 ended with -9 and told nothing"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_who_failed_before_it_was_killed_fails_the_test() -> None:
    children = Children(fail_or_rest, (True,))
    children.processes[0].join()
    with pytest.raises(AssertionError, match="of one of them"):
        children.kill()


def test_who_tells_goes_on_until_killed() -> None:
    def tell_and_rest(n: int) -> Iterator[int]:
        yield n
        threading.Event().wait()

    children = Children(tell_and_rest, (1,), (2,))
    assert children.first_answers() == [1, 2]
    children.kill()
    assert [process.exitcode for process in children.processes] == [-9, -9]
