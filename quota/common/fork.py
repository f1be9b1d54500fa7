"""Keeps a forked child from using resources that belong to its parent.

A forked child has a copy of its parent's memory, and shares its open files and sockets. It would read its parent's
answers, and write under its parent's name. Threads do not survive a fork, but the locks that they held do. So:

    before the fork, in the parent   each object of `hold_over_fork` finishes its current work, closes the resources
                                     that must not be copied, and starts no new work. The newest object goes first
    after it, in both processes      all of these objects resume, in the opposite order
    then, in the child               each object of `start_over_in_child` starts over, in the order of registration

This module keeps only weak references. An exception cannot stop a fork, and a signal handler may raise one anywhere.
If one object fails, the others still have their turn. If a hook fails before its first line, it is called again.

SQLite files are held, and whatever has a lock, a thread, a socket or a name of its process starts over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from itertools import count
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Held(Protocol):
    """An object that must not be in the middle of its work when the process forks."""

    def held_over_fork(self) -> Generator[None, None, None]:
        """Prepare for a fork, yield once, and resume after it. The code after the yield runs in both processes."""


class StartsOver(Protocol):
    """An object whose state a forked child must not share with its parent."""

    def start_over_in_child(self) -> None:
        """Drop the parent's state, and make new locks.

        The parent's other threads do not exist in the child, so a lock that one of them held stays locked for ever.
        This method must not wait for anything.
        """


class OfOneProcess:
    """Has connections, locks or files of its process, so it is neither pickled nor copied."""

    __slots__ = ()

    def __reduce__(self) -> str:
        what = f"{type(self).__name__} belongs to one process and cannot be pickled or copied"
        raise TypeError(f"{what}; open one in each process, for example with quota.open()")


_numbers = count()
_held: WeakValueDictionary[int, Held] = WeakValueDictionary()
_starting_over: WeakValueDictionary[int, StartsOver] = WeakValueDictionary()


def hold_over_fork(held: Held) -> None:
    """Hold an object over each fork of this process from now on."""
    _held[next(_numbers)] = held


def start_over_in_child(copied: StartsOver) -> None:
    """Let an object start over in each forked child of this process from now on."""
    _starting_over[next(_numbers)] = copied


def start_here_and_in_child(started: StartsOver) -> None:
    """Start an object in this process, and let it start over in each forked child."""
    started.start_over_in_child()
    start_over_in_child(started)


class _Forking(threading.local):
    """The progress of each thread with its fork. Other threads may fork meanwhile: they wait for the objects that it
    holds."""

    def __init__(self) -> None:
        self.holding: list[Generator[None, None, None]] = []
        self.child_starts_over = True


_forking = _Forking()


def _before() -> None:
    _forking.child_starts_over = True
    if not _forking.holding:
        _finish([held for ref in _held.valuerefs() if (held := ref()) is not None], _hold)


def _hold(held: Held) -> None:
    _forking.holding.append(held.held_over_fork())
    next(_forking.holding[-1])


def _release() -> None:
    _finish(_forking.holding, Generator.close)


def _after_in_child() -> None:
    try:
        _release()
    finally:
        if _forking.child_starts_over:
            copies = [copied for ref in _starting_over.valuerefs() if (copied := ref()) is not None]
            _finish(copies[::-1], lambda copied: copied.start_over_in_child())
            _forking.child_starts_over = False


def _finish(objects: list[T], work: Callable[[T], None]) -> None:
    """Do the work with all objects, the last one first. Raises an exception only after all had their turn."""
    try:
        while objects:
            work(objects[-1])
            objects.pop()
    finally:
        if objects:
            _finish(objects, work)


# If a signal handler raises as a hook begins, that hook has done nothing. The second registration does the work.
for _ in range(2):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_after_in_child)
