"""Reports refused calls to the ledger.

The reports must not delay a decision, and are not worth a round trip each. So a process collects them, and hands them
over after the first answer that comes 10 s later, and at its end. Reports that the ledger does not take go first the
next time.

There is no thread, because a library that starts a thread makes every later fork dangerous. A process that asks nothing
for long hands its reports over with its next question.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from weakref import WeakSet

from quota.common.clock import elapsed_s
from quota.common.fork import start_here_and_in_child
from quota.common.log import line
from quota.decision import Decision
from quota.errors import LedgerError
from quota.ledger.state import State
from quota.rules.refusals import MAX_REFUSALS, RefusalCount, refusal_text
from quota.terms.arguments import machine_name
from quota.terms.limits import HOUR_MS

ATTEND_EVERY_S = 10.0
"""How often a process hands its reports over."""

ALL_END_WITHIN_S = 1.0
"""How long all projects of a process together may take to do that at its end."""

MAX_KINDS = 1_000
"""The most kinds of refusals that a process counts, and adds at once."""


class Recorder:
    """The reports of one process about one project. Safe to share between threads and after a fork."""

    def __init__(self, state: State) -> None:
        self._state = state
        start_here_and_in_child(self)
        _recorders.add(self)

    def start_over_in_child(self) -> None:
        """The parent reports its own refusals."""
        self._lock = threading.Lock()  # no thread waits for it: its holder does the work of the others
        self._counts: dict[tuple[int, str, str, str], int] = {}
        self._newest = deque[Callable[[], str]](maxlen=MAX_REFUSALS)  # each makes the text of a refusal
        self._unsent: tuple[Sequence[RefusalCount], Sequence[str], str] | None = None  # the ledger has not taken it
        self._due_s = elapsed_s() + ATTEND_EVERY_S
        self._answers = False

    def refused(self, decision: Decision, job: str, region: str, run: str, calls: int = 1) -> None:
        """Note a refused call, or several together. Sends nothing yet."""
        self.count(decision.decided_at_ms, decision.refused_by or "", job, decision.reason, calls)
        self._newest.append(lambda: refusal_text(decision, job, region, run, machine_name(), calls))

    def count(self, at_ms: int, limit: str, job: str, reason: str, calls: int) -> None:
        """Count refused calls; with the reason SHADOW, calls that left and a shadow limit would have refused. Sends
        nothing yet."""
        counts, kind = self._counts, (at_ms // HOUR_MS * HOUR_MS, limit, job, reason)
        if kind in counts or len(counts) < MAX_KINDS:
            counts[kind] = counts.get(kind, 0) + calls

    def answered(self) -> None:
        """The ledger has answered: hand the reports over if they are due."""
        self._answers = True
        if (self._counts or self._unsent) and elapsed_s() >= self._due_s:
            self._due_s = elapsed_s() + ATTEND_EVERY_S
            self._hand_over()

    def unanswered(self) -> None:
        """The ledger has not answered: send nothing until it answers a decision."""
        self._answers = False

    def close(self) -> None:
        """Hand over the rest, if the ledger answers. May be called twice."""
        for _ in range(2):  # what the ledger has not taken, then the rest
            if self._answers and (self._counts or self._unsent):
                self._hand_over()
        self._answers = False

    def _hand_over(self) -> None:
        """Send counts and refusals. It forgets them first, so that two threads never send the same."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            unsent, self._unsent = self._unsent, None
            if unsent is None:  # take all counts and refusals, with the key of their addition
                counts, newest = self._counts, self._newest
                self._counts, self._newest = {}, deque(maxlen=MAX_REFUSALS)
                texts = [text() for text in list(newest)]  # others may add meanwhile
                rows = [RefusalCount(*kind, calls) for kind, calls in list(counts.items())]
                unsent = rows, texts, self._state.new_key()
            self._state.add_refusals(*unsent)
        except LedgerError as error:
            import logging  # imported late: few processes need it

            self._answers, self._unsent = False, unsent
            with suppress(Exception):
                event = line("refusals_not_written", project=self._state.project)
                logging.getLogger("quota").debug("%s: %s", event, error)
        finally:
            self._lock.release()


_recorders: WeakSet[Recorder] = WeakSet()


def close_all(recorders: Iterable[Recorder | None]) -> float:
    """Close all recorders within ALL_END_WITHIN_S; returns the end of that time. Reports that are left are lost, as if
    the ledger did not answer: only people read them, no decision does."""
    ends_s = elapsed_s() + ALL_END_WITHIN_S
    for recorder in recorders:
        if recorder is not None and elapsed_s() < ends_s:
            recorder.close()
    return ends_s


@atexit.register
def _at_exit() -> None:
    with suppress(Exception):  # the process ends
        close_all([*_recorders])
