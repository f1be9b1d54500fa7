"""Handles Ctrl-C, SIGTERM and SIGHUP (a terminal that closes) during a run: the first signal asks a block to stop, and
ends the process if the block does not. A page in flight may still arrive. The earlier handlers return afterwards."""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quota.common.clock import elapsed_s
from quota.common.fork import start_over_in_child

STOP_WITHIN_S = 8.0
"""How long the page in flight may take after a signal to stop."""

END_WITHIN_S = 9.0
"""How long a process may live after a signal to stop, whatever it waits for. Supervisors kill after 10 s."""


@contextmanager
def interruptible(statuses: Mapping[int, int] | None = None, *, says: bool) -> Iterator[Callable[[], int]]:
    """Let the block end by itself after SIGINT, SIGTERM or SIGHUP, but within END_WITHIN_S. A signal that the caller
    ignores, as with `nohup`, stays ignored.

    The yielded function returns the number of the first signal, or 0. If the block has not ended END_WITHIN_S after
    it, the process ends, even if the block waits or has left threads behind. That is safe, because the store writes
    in transactions.
    Later signals change nothing, so that a signal sent twice (by a terminal and by a wrapper) costs no page. The exit
    status of an abandoned block is 128 and the signal's number, unless `statuses` has another for the signal. With
    `says`, a line on stderr says what the block still waits for.
    """
    seen: list[int] = []
    over: list[bool] = []
    # Python runs a handler only after the current call, which may look up a host name for a minute. The byte that the
    # system's own handler writes starts the countdown at once.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    heard = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in heard}
    woken_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    wakeups = _Wakeups(before.get(signal.SIGTERM))
    start_over_in_child(wakeups)
    _blocks.append(wakeups)
    waits = f"interrupted; the page in flight is stored if it arrives within {STOP_WITHIN_S:g} s" if says else ""
    _thread.start_new_thread(_count_down, (reading, over, statuses or {}, waits))
    try:
        yield lambda: seen[0] if seen else 0
    finally:
        over.append(True)
        _blocks.remove(wakeups)
        signal.set_wakeup_fd(woken_before)
        os.close(writing)
        for number, handler in before.items():
            signal.signal(number, handler)


def handles_signals() -> bool:
    """Whether this process is in such a block."""
    return bool(_blocks)


@dataclass(eq=False)
class _Wakeups:
    """The bytes that begin the countdown. The signals of a forked child are not ours: they must not begin it, and
    SIGTERM ends a child as `before`. Else a fetch function that ends its child would wait for ever."""

    before: Any

    def start_over_in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)


_blocks: list[_Wakeups] = []

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAY_AFTER_S = 0.2
"""How long a block may take to stop before a line says what it waits for."""


def _count_down(reading: int, over: list[bool], statuses: Mapping[int, int], waits: str) -> None:
    """End the process END_WITHIN_S after the first signal, unless the block and all threads end before. `waits` is the
    line that says what the block waits for."""
    number = 0
    while not number and (came := os.read(reading, 64)):
        number = next((number for number in came if number in _STOPPING), 0)
    if not number:  # the block has ended
        os.close(reading)
        return
    signalled_s, main = elapsed_s(), threading.main_thread()
    while elapsed_s() < signalled_s + END_WITHIN_S:
        # Python waits for other threads at its end.
        if over and all(thread is main or thread.daemon for thread in threading.enumerate()):
            os.close(reading)  # only now: a later signal writes a byte too
            return
        if waits and not over and elapsed_s() >= signalled_s + SAY_AFTER_S:
            _say(f"quota: {waits}\n".encode())
            waits = ""
        time.sleep(0.05)
    if os.isatty(2):
        _say(b"\x1b[?25h\n")  # show the cursor that a progress line may have hidden
    what = "a thread that a fetch function left behind" if over else "the work in progress"
    why = f"interrupted; {what} took over {END_WITHIN_S:g} s and was abandoned; stored pages are kept"
    _say(f"quota: {why}\n".encode())
    os._exit(statuses.get(number, 128 + number))


def _say(line: bytes) -> None:
    """Print a line on stderr if it can be written at once. A thread that waited here could not end the process, and the
    block itself may be waiting for stderr. A thread could wait instead, but Python 3.12 starts none after the main one
    ends."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, line)
