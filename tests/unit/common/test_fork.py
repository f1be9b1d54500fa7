"""Who has a turn around a fork, and in which order."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Generator
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

import quota
from quota.common import fork
from quota.common.fork import hold_over_fork, start_over_in_child
from support.interrupts import Interrupted, at_place

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Noted:
    """Notes its turns."""

    def __init__(self, name: str, turns: list[str]) -> None:
        self.name, self.turns = name, turns

    def held_over_fork(self) -> Generator[None, None, None]:
        self.turns.append(f"hold {self.name}")
        try:
            yield
        finally:
            self.turns.append(f"release {self.name}")

    def start_over_in_child(self) -> None:
        self.turns.append(f"start over {self.name}")


def forked(turns: list[str]) -> list[str]:
    """The turns that a child has seen when it begins."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, "\n".join(turns).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        seen = file.read().split("\n")
    os.waitpid(pid, 0)
    return seen


def test_the_newest_is_held_first_and_the_oldest_starts_over_first() -> None:
    turns: list[str] = []
    ones = [Noted(name, turns) for name in "abc"]
    for holder in ones:
        hold_over_fork(holder)
        start_over_in_child(holder)
    in_child = forked(turns)
    around = ["hold c", "hold b", "hold a", "release a", "release b", "release c"]
    assert turns == around
    assert in_child == [*around, "start over a", "start over b", "start over c"]


def test_an_exception_at_any_place_leaves_nothing_held_and_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception as a hook began ended the whole hook, and no other thread ever got what this thread held."""
    monkeypatch.setattr(sys, "unraisablehook", id)
    for registry in ("_held", "_starting_over"):
        monkeypatch.setattr(fork, registry, WeakValueDictionary())
    for place in count():
        turns, in_child = list[str](), list[str]()
        ones = [Noted(name, turns) for name in "ab"]
        for holder in ones:
            hold_over_fork(holder)
            start_over_in_child(holder)

        def handler(turns: list[str] = turns) -> None:
            turns.append("interrupted")
            raise Interrupted

        def work(turns: list[str] = turns, in_child: list[str] = in_child) -> None:
            in_child += forked(turns)

        at_place(place, handler, work, within=(fork.__file__,))
        if "interrupted" not in turns + in_child:
            break
        for name in "ab":
            for seen in (turns, in_child):
                assert seen.count(f"hold {name}") == seen.count(f"release {name}") > 0, (place, seen)
            assert f"start over {name}" in in_child, (place, in_child)
    assert place > 20


def test_a_thread_that_forks_leaves_alone_what_another_one_holds() -> None:
    """It took the other's holds for its own, and released them too soon, or never: both threads stood still.

    The other thread does around its fork what is ours alone: `concurrent.futures` has a lock of its own over forks, and
    where that hook is the first, no two threads fork at the same time.
    """

    class Held:
        def held_over_fork(self) -> Generator[None, None, None]:
            name = threading.current_thread().name
            if name == "other":
                reached.set()
                assert goes_on.wait(100)
            turns.append(f"hold {name}")
            try:
                yield
            finally:
                turns.append(f"release {name}")

    holder, turns = Held(), list[str]()
    hold_over_fork(holder)
    reached, goes_on = threading.Event(), threading.Event()

    def around_a_fork() -> None:
        fork._before()
        fork._release()

    other = threading.Thread(target=around_a_fork, name="other")
    other.start()
    assert reached.wait(100)
    forked([])
    assert turns == ["hold MainThread", "release MainThread"]
    goes_on.set()
    other.join()
    assert turns[2:] == ["hold other", "release other"]


def test_a_collected_object_has_no_turn() -> None:
    turns: list[str] = []
    holder = Noted("a", turns)
    hold_over_fork(holder)
    start_over_in_child(holder)
    del holder
    gc.collect()
    assert forked(turns) == [""]


def test_no_other_module_of_the_package_has_a_fork_hook() -> None:
    """One registry, so that the order is known."""
    root = Path(quota.__file__).parent.parent
    hooks = [
        str(path.relative_to(root))
        for folder in ("quota", "jobs")
        for path in (root / folder).rglob("*.py")
        if re.search(r"register_at_fork|\bgetpid\(\) *[!=]=|[!=]= *os\.getpid\(\)", path.read_text())
    ]
    assert hooks == ["quota/common/fork.py"]
