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
from asyncio import AbstractEventLoop, Future, wait
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, perf_counter
from typing import NamedTuple
from weakref import ref

from quota.common.fork import start_over_in_child
from quota.common.log import warn
from quota.errors import StorageAway
from quota.inbound.contract import WALL_S, Decision, Storage
from quota.inbound.counting import Counts, Outcome
from quota.inbound.rules import Rule

FAILURES = 3
OPEN_S = 1.0
SAY_AGAIN_S = 60.0
"""The least time between two log lines about a storage that fails again and again."""

HAND_OVER_S = 10.0
THREADS = 8


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

    def __init__(self, label: str, clock: Callable[[], float] = monotonic) -> None:
        self._label = label
        self._clock = clock
        self._lock = threading.Lock()
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
            self._failures, has_warned, self._has_warned = 0, self._has_warned, False
        if has_warned:
            warn("inbound_storage_back", storage=self._label)

    def start_over_in_child(self) -> None:
        self._lock = threading.Lock()


class Decider:
    """Decides the requests of one process. Safe in several threads and after a fork."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._breaker = Breaker(storage.label)
        self.counts = Counts()
        self._threads = _threads()
        self._hand_over_at = 0.0
        start_over_in_child(self)
        _at_exit(self)

    def decide(self, rule: Rule, identity: str) -> Verdict:
        """Decide in this thread, which may wait up to WALL_S."""
        started = perf_counter()
        if not self._breaker.lets_through():
            return self._without(rule, started)
        try:
            decision = self.storage.decide(rule.policy, identity, rule.cost)
        except StorageAway as error:
            return self._without(rule, started, error)
        return self._with(rule, decision, started)

    async def decide_soon(self, loop: AbstractEventLoop, rule: Rule, identity: str) -> Verdict:
        """The same in a thread, while the event loop goes on. If all threads are busy or none can start, the storage
        counts as away."""
        started = perf_counter()
        if not self._breaker.lets_through():
            return self._without(rule, started)
        try:
            future = loop.run_in_executor(self._threads, self.storage.decide, rule.policy, identity, rule.cost)
        except RuntimeError as error:  # no thread can start, or the process is about to end
            return self._without(rule, started, error)
        # After WALL_S the future is not cancelled: its connection has an answer to read.
        future.add_done_callback(_look)
        done, _ = await wait((future,), timeout=WALL_S)
        if not done:
            return self._without(rule, started, StorageAway(f"{self.storage.label}: no answer within {WALL_S} s"))
        try:
            return self._with(rule, future.result(), started)
        except StorageAway as error:
            return self._without(rule, started, error)

    def _with(self, rule: Rule, decision: Decision, started: float) -> Verdict:
        self._breaker.answered()
        outcome: Outcome = "admitted" if decision.admitted else "shadowed" if rule.shadow else "refused"
        self.counts.add(rule.name, outcome, perf_counter() - started)
        return Verdict(rule, outcome, decision)

    def _without(self, rule: Rule, started: float, error: Exception | None = None) -> Verdict:
        if error is not None:
            self._breaker.failed(error)
        outcome: Outcome = "failed_closed" if rule.fail == "closed" and not rule.shadow else "failed_open"
        self.counts.add(rule.name, outcome, perf_counter() - started)
        return Verdict(rule, outcome, None)

    # -- totals --------------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Add the counts of this process to the storage's totals. After a failure they stay here for the next time."""
        if self.counts and self._breaker.lets_through():
            try:
                self.counts.hand_over(self.storage)
            except StorageAway as error:
                self._breaker.failed(error)

    def hand_over_soon(self) -> None:
        """The same in a thread after HAND_OVER_S, unless one is already waiting. No request waits for it, and it needs
        no further request."""
        now = monotonic()
        if now >= self._hand_over_at:
            self._hand_over_at = now + HAND_OVER_S
            timer = threading.Timer(HAND_OVER_S, self.hand_over)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can start; the process also hands over at its end
                timer.start()

    def start_over_in_child(self) -> None:
        """The parent hands over its own counts. Its threads do not exist in the child."""
        self.counts = Counts()
        self._threads = _threads()
        self._hand_over_at = 0.0
        self._breaker.start_over_in_child()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="quota-inbound")


def _look(future: Future[Decision]) -> None:
    """Read the exception of a future that nobody may await any more. Otherwise asyncio logs it."""
    if not future.cancelled():
        future.exception()


def _at_exit(decider: Decider) -> None:
    """Hand over the rest when the process ends."""
    weak = ref(decider)

    def rest() -> None:
        if (living := weak()) is not None:
            living.hand_over()

    atexit.register(rest)
