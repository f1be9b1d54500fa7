"""A decision for one request, within a time that a visitor does not notice, whatever the storage does.

    Verdict     the decision of one rule
    Decider     asks the storage, on an event loop or in a thread; if it does not answer, `fail` decides
    Breaker     stops asking a storage that does not answer

A decision takes at most `contract.WALL_S`. After three failures in a row, one request per second tries the storage and
the others do not wait. A process logs one line when an outage begins and one when it ends.
"""

from __future__ import annotations

import atexit
import threading
from asyncio import AbstractEventLoop, wait
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter
from typing import Literal, NamedTuple
from weakref import ref

from quota.common.clock import elapsed_s
from quota.common.fork import start_here_and_in_child
from quota.common.log import warn
from quota.errors import StorageAway
from quota.inbound.contract import MAX_TOTALS, WALL_S, Decision, Storage
from quota.inbound.names import Counts
from quota.inbound.rules import MAX_RULES, Rule

FAILURES = 3
OPEN_S = 1.0
SAY_AGAIN_S = 60.0
"""The least time between two log lines about a storage that fails again and again."""

HAND_OVER_S = 10.0
THREADS = 8

Outcome = Literal["admitted", "refused", "shadowed", "failed_open", "failed_closed"]
"""What became of a request. `shadowed`: a shadow rule would have refused it."""

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.025, 0.1, 0.25)
"""Upper bounds of the histogram of decision times. The last bucket has no bound."""

REQUESTS = "requests"
TOOK = [f"took|{n}" for n in range(len(BUCKETS_S) + 1)]
TOOK_US = "took_us"
"""The totals in the storage: `requests|RULE|OUTCOME`, the decisions in each bucket, and the time of all decisions."""

MAX_COUNTS = 5 * MAX_RULES + 100
"""More than a process counts: every outcome of every rule, and the times."""


class Verdict(NamedTuple):
    """The decision of one rule on a request. `decision` is None if the storage did not answer."""

    rule: Rule
    outcome: Outcome
    decision: Decision | None

    @property
    def passes(self) -> bool:
        return self.outcome not in ("refused", "failed_closed")


class Breaker:
    """Decides whether to ask the storage: after three failures in a row, once per second."""

    def __init__(self, label: str, clock: Callable[[], float] = elapsed_s) -> None:
        self._label = label
        self._clock = clock
        self._lock = threading.RLock()
        self._failures = 0
        self._open_until = 0.0
        self._warned_at: float | None = None
        self._has_warned = False

    def lets_through(self) -> bool:
        """Whether to ask now. During an outage, one request per second gets True."""
        if self._failures < FAILURES:
            return True
        with self._lock:
            now = self._clock()
            if now < self._open_until:
                return False
            self._open_until = now + OPEN_S
            return True

    def failed(self, error: Exception) -> None:
        """The storage did not answer."""
        with self._lock:
            now = self._clock()
            self._failures += 1
            if self._failures >= FAILURES:
                self._open_until = now + OPEN_S
            if self._has_warned or (self._warned_at is not None and now - self._warned_at < SAY_AGAIN_S):
                return
            self._has_warned, self._warned_at = True, now
        warn("inbound_storage_away", storage=self._label, error=error)

    def answered(self) -> None:
        """The storage answered."""
        if not self._failures:
            return
        with self._lock:
            self._failures = 0
            has_warned, self._has_warned = self._has_warned, False
        if has_warned:
            warn("inbound_storage_back", storage=self._label)

    def start_over_in_child(self) -> None:
        self._lock = threading.RLock()


class Decider:
    """Decides the requests of one process. Safe in several threads and after a fork."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.counts = Counts[str](MAX_COUNTS)
        self._breaker = Breaker(storage.label)
        start_here_and_in_child(self)
        atexit.register(_hand_over_rest, ref(self))

    def start_over_in_child(self) -> None:
        """The parent's threads do not exist in the child."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quota-inbound")
        self._hand_over_at = 0.0
        self._breaker.start_over_in_child()

    def decide(self, rule: Rule, identity: str) -> Verdict:
        """Decide in this thread, which may wait up to WALL_S."""
        started = perf_counter()
        if not self._breaker.lets_through():
            return self._verdict(rule, started)
        try:
            return self._verdict(rule, started, self.storage.decide(rule.policy, identity, rule.cost))
        except StorageAway as error:
            return self._verdict(rule, started, error=error)

    async def decide_soon(self, loop: AbstractEventLoop, rule: Rule, identity: str) -> Verdict:
        """The same in a thread, while the event loop goes on. If all threads are busy or none can start, the storage
        counts as away."""
        started = perf_counter()
        if not self._breaker.lets_through():
            return self._verdict(rule, started)
        try:
            future = loop.run_in_executor(self._threads, self.storage.decide, rule.policy, identity, rule.cost)
        except RuntimeError as error:  # no thread can start, or the process is about to end
            return self._verdict(rule, started, error=error)
        # After WALL_S nobody may await the future, and asyncio logs an exception that nobody reads. It is not
        # cancelled: its connection has an answer to read.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await wait((future,), timeout=WALL_S)
        try:
            if not done:
                raise StorageAway(f"{self.storage.label}: no answer within {WALL_S} s")
            return self._verdict(rule, started, future.result())
        except StorageAway as error:
            return self._verdict(rule, started, error=error)

    def _verdict(
        self, rule: Rule, started: float, decision: Decision | None = None, *, error: Exception | None = None
    ) -> Verdict:
        """What becomes of a request. Without a decision, the rule's `fail` decides. `error` is the storage's failure,
        and None if it was not asked."""
        outcome: Outcome
        if decision is not None:
            self._breaker.answered()
            outcome = "admitted" if decision.admitted else "shadowed" if rule.shadow else "refused"
        else:
            if error is not None:
                self._breaker.failed(error)
            outcome = "failed_closed" if rule.fail == "closed" and not rule.shadow else "failed_open"
        took_s = perf_counter() - started
        took = TOOK[bisect_left(BUCKETS_S, took_s)]
        self.counts.add({f"{REQUESTS}|{rule.name}|{outcome}": 1, took: 1, TOOK_US: int(took_s * 1e6)})
        return Verdict(rule, outcome, decision)

    # -- totals --------------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Add the counts of this process to the storage's totals. After a failure they stay here for the next time.
        This also tries a storage that does not answer: no request waits, and the process may be about to end."""
        try:
            for _ in range(0, len(self.counts), MAX_TOTALS):
                with self.counts.handed_over() as totals:
                    self.storage.add_totals(totals)
        except StorageAway as error:
            self._breaker.failed(error)

    def hand_over_soon(self) -> None:
        """The same in a thread after HAND_OVER_S, unless one is already waiting. No request waits for it, and it needs
        no further request."""
        now = elapsed_s()
        if now >= self._hand_over_at:
            self._hand_over_at = now + HAND_OVER_S
            timer = threading.Timer(HAND_OVER_S, self.hand_over)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can start; the process also hands over at its end
                timer.start()


def _hand_over_rest(decider: ref[Decider]) -> None:
    """Hand over the rest when the process ends."""
    if (living := decider()) is not None:
        living.hand_over()
