"""Ctrl-C and SIGTERM: a block that may end its page in flight, and one that ends at once.

interruptible   the first signal asks the block to stop, and abandons it if it does not
exits           a signal ends the program at once, through the usual clean-up
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quota.cli.output import fail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@contextmanager
def interruptible(statuses: Mapping[int, int] | None = None) -> Iterator[Callable[[], int]]:
    """Inside the block the first SIGINT or SIGTERM only sets what the yielded function returns, and begins a countdown:
    a block that has not ended after END_WITHIN_S is abandoned, whatever it waits for. That is safe: what is stored is
    stored in transactions. Later signals change nothing, so that one sent twice (by a terminal and by a wrapper) costs
    no page. `statuses` are the exit statuses of an abandoned block, by signal, where they are not 128 and its number.
    """
    from quota.jobs.runner import END_WITHIN_S

    seen: list[int] = []
    over: list[bool] = []
    # Python's handlers wait for the call in hand, which may be a name being looked up for a minute: the countdown is
    # begun by the byte that the system's handler writes.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in _STOPPING}
    woken_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not ours
    _thread.start_new_thread(_count_down, (reading, over, END_WITHIN_S, statuses or {}))
    try:
        yield lambda: seen[0] if seen else 0
    finally:
        over.append(True)
        signal.set_wakeup_fd(woken_before)
        os.close(writing)
        for number, handler in before.items():
            signal.signal(number, handler)


_STOPPING = (signal.SIGINT, signal.SIGTERM)


def _count_down(reading: int, over: list[bool], within_s: float, statuses: Mapping[int, int]) -> None:
    """End the process `within_s` after the first of our signals, unless the block is over before."""
    number = 0
    while not number and (came := os.read(reading, 64)):
        number = next((one for one in came if one in _STOPPING), 0)
    until_s = time.monotonic() + within_s
    while not over and time.monotonic() < until_s:
        time.sleep(0.05)
    if over:
        os.close(reading)  # not before: a later signal is written, too
        return
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # show the cursor that a progress line may have hidden
    # In a thread of its own, because what the block waits for may be stderr.
    line = f"interrupted; what was under way took over {within_s:g} s and was abandoned; what is stored stays"
    _thread.start_new_thread(fail, (line,))
    time.sleep(0.1)
    os._exit(statuses.get(number, 128 + number))


@contextmanager
def exits(statuses: dict[signal.Signals, int]) -> Iterator[None]:
    """Inside the block these signals end the program with these statuses, through the usual clean-up."""

    def handle(number: int, _frame: object) -> None:
        raise SystemExit(statuses[signal.Signals(number)])

    before = {number: signal.signal(number, handle) for number in statuses}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
