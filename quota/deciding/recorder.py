"""What a process tells the ledger beside its decisions: calls that were refused, and that an hour is over (L29, L30).

Neither may delay a decision, and neither is worth a round trip of its own. So refusals are kept here, and handed over
with the first answer that is 10 s younger, and at the end of the process. Hours that are over are rolled up at the same
moments, 100 charges at a time. The first process that charges in an hour, as far as its machine knows, does that for
all.

There is no thread: a library that starts one makes every later fork of its user dangerous. A process that asks nothing
for long hands over what it has with its next question.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from weakref import WeakSet

from quota.common.clock import host_clock, rfc3339
from quota.common.fork import start_over_in_child
from quota.common.text import one_line
from quota.decision import SHADOW, Decision
from quota.errors import LedgerError
from quota.ledger.parts import KeepsHistory
from quota.terms.limits import HOUR_MS

ATTEND_EVERY_MS = 10_000
"""How often a process hands over what it kept, and rolls up a piece of an hour."""

END_WITHIN_S = 0.05
"""How long a process takes for both at its end."""

ALL_END_WITHIN_S = 1.0
"""How long it takes for all its projects together."""

KEPT = 1_000
"""How many refusals are kept whole until they are counted; of older ones only the counts are."""

Refused = tuple["Decision", str, str, str, int]
"""A refusal with its job, region and run, and of how many calls together."""


class Recorder:
    """What one process has to tell about one project. Safe to share between threads and after a fork."""

    def __init__(self, ledger: KeepsHistory, project: str, clock: Callable[[], int] | None = None) -> None:
        self.ledger = ledger
        self.project = project
        self._clock = clock or host_clock
        self._has_begun = False
        self.start_over_in_child()

    def _begin(self) -> None:
        """From now on a fork and the end of the process concern it. A process that only looks has many recorders that
        never begin."""
        self._has_begun = True
        start_over_in_child(self)
        _recorders.add(self)

    def start_over_in_child(self) -> None:
        """What its parent was refused, the parent tells."""
        # The times between which no answer is shown to `answered`. Before them it is where a clock was set back.
        self._seen_ms, self._due_ms = 0, 0
        self._lock = threading.Lock()  # never waited for: the thread that has it does the work of the others
        self._pending: list[Refused] = []
        self._shadows: list[tuple[int, str, str, int]] = []
        self._counts: dict[tuple[int, str, str, str], int] = {}
        self._newest: list[Refused] = []
        self._hour_ends_ms = 0
        self._roll_up_due = False
        self._answers = False

    def refused(self, decision: Decision, job: str, region: str, run: str, calls: int = 1) -> None:
        """A call was refused, or several together. Nothing is sent yet."""
        if not self._has_begun:
            self._begin()
        self._pending.append((decision, job, region, run, calls))
        if decision.reason == "ledger-unavailable":
            # The next answer says that there is somebody to tell.
            self._answers, self._seen_ms, self._due_ms = False, 0, 0
        self._count_many(self._pending)

    def shadowed(self, limit: str, job: str, at_ms: int, calls: int) -> None:
        """A shadow limit would have refused calls that left. Nothing is sent yet."""
        if not self._has_begun:
            self._begin()
        self._shadows.append((at_ms // HOUR_MS * HOUR_MS, limit, job, calls))
        self._count_many(self._shadows)

    def _count_many(self, waiting: Sequence[object]) -> None:
        """Count what waits if that is much, and nobody else does so now."""
        if len(waiting) >= KEPT and self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def is_due(self, now_ms: int) -> bool:
        """Whether an answer of the ledger is to be shown to `answered`."""
        return not self._seen_ms <= now_ms < self._due_ms

    def answered(self, now_ms: int, newest_before_ms: int) -> None:
        """The ledger has answered. `newest_before_ms` is the newest charge that this machine knew of before."""
        if not self._has_begun:
            self._begin()
        attends = self._answers
        self._answers, self._seen_ms, self._due_ms = True, now_ms, now_ms + ATTEND_EVERY_MS
        if not self._hour_ends_ms - HOUR_MS <= now_ms < self._hour_ends_ms:
            hour_ms = now_ms // HOUR_MS * HOUR_MS
            self._hour_ends_ms = hour_ms + HOUR_MS
            self._roll_up_due = self._roll_up_due or newest_before_ms < hour_ms
        if attends:
            self._attend(END_WITHIN_S, pieces=1)

    def close(self, within_s: float | None = None) -> None:
        """Hand over what is left, within END_WITHIN_S, if the ledger answers. It may be called twice."""
        within_s = END_WITHIN_S if within_s is None else within_s
        if self._answers and within_s > 0:
            self._attend(within_s, pieces=1_000)
        self._answers, self._roll_up_due, self._hour_ends_ms = False, False, 0
        self._seen_ms, self._due_ms = 0, 0

    def _attend(self, within_s: float, pieces: int) -> None:
        if not self._lock.acquire(blocking=False):
            return
        ends_s = time.monotonic() + within_s
        try:
            self._hand_over(ends_s)
            while self._roll_up_due and pieces and (left_s := ends_s - time.monotonic()) > 0:
                pieces -= 1
                self._roll_up_due = self.ledger.roll_up(self.project, self._clock(), left_s)
        except LedgerError as error:
            import logging  # late: few processes come here

            self._answers = False
            with suppress(Exception):
                logging.getLogger("quota").debug("history_not_written project=%s: %s", self.project, error)
        finally:
            self._lock.release()

    def _hand_over(self, ends_s: float) -> None:
        """Send counts and refusals. They are forgotten first: what may have arrived is not sent again."""
        self._count()
        if not self._counts:
            return
        from quota.ledger.history import MAX_COUNTS, RefusalCount

        counts, newest = self._counts, self._newest
        self._counts, self._newest = {}, []
        rows = [RefusalCount(*key, calls) for key, calls in counts.items()]
        texts = [refusal_text(*one) for one in newest]
        for first in range(0, len(rows), MAX_COUNTS):
            if (left_s := ends_s - time.monotonic()) <= 0:
                return
            self.ledger.add_refusals(self.project, rows[first : first + MAX_COUNTS], texts, left_s)
            texts = []

    def _count(self) -> None:
        """Count what is pending; keep the newest as a whole."""
        from quota.ledger.history import MAX_REFUSALS

        taken, shadows = self._pending[:], self._shadows[:]
        del self._pending[: len(taken)], self._shadows[: len(shadows)]  # a thread may have appended meanwhile
        self._newest = (self._newest + taken)[-MAX_REFUSALS:]
        counted: list[tuple[tuple[int, str, str, str], int]] = [
            ((decision.decided_at_ms // HOUR_MS * HOUR_MS, decision.refused_by or "", job, decision.reason), calls)
            for decision, job, _, _, calls in taken
        ]
        counted += [((hour_ms, limit, job, SHADOW), calls) for hour_ms, limit, job, calls in shadows]
        for key, calls in counted:
            if key in self._counts or len(self._counts) < KEPT:
                self._counts[key] = self._counts.get(key, 0) + calls


def refusal_text(decision: Decision, job: str, region: str, run: str, calls: int = 1) -> str:
    """A refusal as it is kept: the JSON of the decision, with who asked, when, where, and why it was refused. Where it
    is that of several calls together, `calls` says of how many.

    At most 4,000 bytes: if need be without the limits that did not refuse.
    """
    from quota.ledger.history import MAX_REFUSAL_BYTES
    from quota.terms.attribution import machine_name

    unlogged_units = {one.name: one.unlogged_units for one in decision.limits if one.unlogged_units}
    data: dict[str, object] = {
        "at": rfc3339(decision.decided_at_ms),
        "job": job,
        "region": region,
        "run": run,
        "machine": one_line(machine_name())[:64],
        **decision.as_json(),
        "why": one_line(decision.why()),
        **({"calls": calls} if calls > 1 else {}),
        **({"unlogged_units": unlogged_units} if unlogged_units else {}),
    }
    text = json.dumps(data, ensure_ascii=False)
    if len(text.encode("utf-8", "replace")) > MAX_REFUSAL_BYTES:
        limits = [one for one in decision.as_json()["limits"] if one["name"] == decision.refused_by]  # type: ignore[attr-defined]
        text = json.dumps({**data, "limits": limits, "limits_left_out": len(decision.limits) - len(limits)})
    return text


_recorders: WeakSet[Recorder] = WeakSet()


def close_all(recorders: Iterable[Recorder]) -> None:
    """Close them, each within END_WITHIN_S and all within ALL_END_WITHIN_S. What is not handed over by then is lost, as
    where the ledger does not answer: counts for people, which no decision reads."""
    ends_s = time.monotonic() + ALL_END_WITHIN_S
    for recorder in recorders:
        recorder.close(min(END_WITHIN_S, ends_s - time.monotonic()))


@atexit.register
def _at_exit() -> None:
    with suppress(Exception):  # the process ends
        close_all(list(_recorders))
