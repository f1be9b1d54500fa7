"""What happens around a fork, for everything in this package that a child must not share with its parent.

A forked child has a copy of its parent's memory, and shares its open files and sockets: it would read its parent's
answers, and write under its parent's name. Threads do not survive a fork, but the locks that they held do. So:

    before the fork, in the parent   each object of `hold_over_fork` is held: it waits for its work in hand, lets go of
                                     what must not be copied, and starts nothing new. The newest one first
    after it, in both processes      all of them are released, in the opposite order
    then, in the child               each object of `start_over_in_child` starts over, in the order in which they were
                                     made

Objects are held weakly, and do not depend on each other here. A fork cannot be stopped by an exception, and a signal
handler may raise one anywhere: the other objects have their turn nevertheless.

Who does this: SQLite files are held (`quota.common.sqlite_file`). Attempt keys get a run of their own
(`quota.attribution`), Redis ledgers and their connections connect anew (`quota.ledger.redis_ledger`), high-water marks
claim a slot of their own (`quota.recovery.high_water_mark`), an allowance forgets its parent's outage, and the Google
client lets go of its parent's sockets (`quota.clients.google`).
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Generator


class Held(Protocol):
    """What must not be in the middle of its work when the process forks."""

    def held_over_fork(self) -> Generator[None, None, None]:
        """Get ready for a fork, yield once, and go on after it; the part behind the yield runs in both processes."""
        ...


class StartsOver(Protocol):
    """What a forked child must not share with its parent."""

    def start_over_in_child(self) -> None:
        """Forget what is the parent's. Other threads do not exist here, and locks may be held for ever: make new ones.

        Must not wait for anything.
        """
        ...


_numbers = count()
_held: WeakValueDictionary[int, Held] = WeakValueDictionary()
_starting_over: WeakValueDictionary[int, StartsOver] = WeakValueDictionary()


def hold_over_fork(one: Held) -> None:
    """From now on `one` is held over each fork of this process."""
    _held[next(_numbers)] = one


def start_over_in_child(one: StartsOver) -> None:
    """From now on `one` starts over in each forked child of this process."""
    _starting_over[next(_numbers)] = one


_holding: list[Generator[None, None, None]] = []


def _before() -> None:
    _hold([one for ref in _held.valuerefs() if (one := ref()) is not None])


def _hold(ones: list[Held]) -> None:
    """Hold them all, the last one first; an exception is raised when all are held."""
    try:
        while ones:
            _holding.append(ones[-1].held_over_fork())
            next(_holding[-1])
            ones.pop()
    finally:
        if ones:
            _hold(ones)


def _release() -> None:
    try:
        while _holding:
            _holding.pop().close()
    finally:
        if _holding:
            _release()


def _after_in_child() -> None:
    try:
        _release()
    finally:
        _start_over([one for ref in _starting_over.valuerefs() if (one := ref()) is not None])


def _start_over(ones: list[StartsOver]) -> None:
    try:
        while ones:
            ones[0].start_over_in_child()
            del ones[0]
    finally:
        if ones:
            _start_over(ones)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_after_in_child)
