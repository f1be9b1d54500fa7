"""The three algorithms, in whole numbers and without a storage (I1, I2). SQLite uses them directly; the scripts
`lua/inbound_*.lua` do the same in Lua, and tests compare the two.

Time is divided into fixed windows, numbered from 1970. A limit keeps one state for each identity in the *current*
window and reads the state of the *previous* window. No decision reads an older state, so all states of a window expire
together. `at_ms` is the time since the current window began: 0 to window_ms - 1.

    counter     the state is the units counted in the window
    gcra        the state is the time at which all units are free again, in 1/number ms since the window began
    log         the state is an entry for each request: its time, in ms since the window began, and its units

An algorithm answers three questions about one limit: how long a request must wait, what the current window holds after
the request, and how much is left then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from quota.inbound.contract import MAX_SCALE, Decision, Limit, LimitState, Policy

Entries = tuple[tuple[int, int], ...]
"""The state of a log: (ms since the window began, units), oldest first."""


class States(NamedTuple):
    """The states of one identity in a limit. None: the window counted nothing."""

    previous: Any
    current: Any


class Algorithm(Protocol):
    """The questions about one limit and one identity, `at_ms` into the current window."""

    def wait_ms(self, limit: Limit, states: States, at_ms: int, cost: int) -> int:
        """The ms until `cost` fits, if no other request comes; 0 if it fits now."""

    def counted(self, limit: Limit, states: States, at_ms: int, cost: int) -> Any:
        """The current state after counting `cost`, whether or not it fits."""

    def left(self, limit: Limit, states: States, at_ms: int) -> tuple[int, int]:
        """The units that fit now, and the ms until the whole limit is free."""


class Counter:
    """Weights the units of the previous window by the part of it within the last `window_ms`, as if its requests had
    come evenly: previous * (window_ms - at_ms) / window_ms. Comparisons multiply by window_ms, so nothing is rounded.
    """

    def wait_ms(self, limit: Limit, states: States, at_ms: int, cost: int) -> int:
        number, window_ms, _ = limit
        previous, current = states.previous or 0, states.current or 0
        free = number - current - cost
        if free >= 0:
            if previous * (window_ms - at_ms) <= free * window_ms:
                return 0
            return window_ms - at_ms - free * window_ms // previous
        # The current window alone is too full. It fits at the earliest in the next window, when this is the previous.
        return window_ms - at_ms + window_ms - (number - cost) * window_ms // current

    def counted(self, limit: Limit, states: States, at_ms: int, cost: int) -> int:
        # Rejected requests count only as far as Lua computes exactly.
        return min((states.current or 0) + cost, MAX_SCALE // limit.window_ms)

    def left(self, limit: Limit, states: States, at_ms: int) -> tuple[int, int]:
        number, window_ms, _ = limit
        previous, current = states.previous or 0, states.current or 0
        weighted = -(-previous * (window_ms - at_ms) // window_ms)  # rounded up
        windows = 2 if current else 1 if previous else 0
        return max(number - current - weighted, 0), windows * window_ms - at_ms if windows else 0


class Gcra:
    """The generic cell rate algorithm. A unit comes back after window_ms / number ms. Measured in 1/number ms this is
    window_ms, a whole number for every limit.
    """

    def wait_ms(self, limit: Limit, states: States, at_ms: int, cost: int) -> int:
        too_much = self._free_at(limit, states, at_ms) + (cost - limit.burst) * limit.window_ms - at_ms * limit.number
        return -(-too_much // limit.number) if too_much > 0 else 0

    def counted(self, limit: Limit, states: States, at_ms: int, cost: int) -> int:
        free_at = self._free_at(limit, states, at_ms) + cost * limit.window_ms
        # A rejected request takes at most what is left.
        return min(free_at, at_ms * limit.number + limit.burst * limit.window_ms)

    def left(self, limit: Limit, states: States, at_ms: int) -> tuple[int, int]:
        used = self._free_at(limit, states, at_ms) - at_ms * limit.number
        return (limit.burst * limit.window_ms - used) // limit.window_ms, -(-used // limit.number)

    def _free_at(self, limit: Limit, states: States, at_ms: int) -> int:
        """The time at which all units are free again, at least now and at most one burst ahead. After the clock went
        back, a stored time may be further ahead; nobody may wait that long."""
        number, window_ms, burst = limit
        now = at_ms * number
        free_at: int = 0
        if states.current is not None:
            free_at = states.current
        elif states.previous is not None:
            free_at = states.previous - window_ms * number
        return max(now, min(free_at, now + burst * window_ms))


class Log:
    """Counts every request in full, for exactly `window_ms`."""

    def wait_ms(self, limit: Limit, states: States, at_ms: int, cost: int) -> int:
        live = self._live(limit, states, at_ms)
        too_much, wait_ms = sum(units for _, units in live) + cost - limit.number, 0
        for ends_ms, units in live:
            if too_much <= 0:
                break
            too_much, wait_ms = too_much - units, ends_ms - at_ms
        return wait_ms

    def counted(self, limit: Limit, states: States, at_ms: int, cost: int) -> Entries:
        current: Entries = states.current or ()
        came_ms = max(at_ms, current[-1][0]) if current else at_ms  # the clock may have gone back
        current = (*current, (came_ms, cost))
        # Entries before the newest `number` units cannot change a decision.
        total = sum(units for _, units in current)
        while total - current[0][1] >= limit.number:
            total -= current[0][1]
            current = current[1:]
        return current

    def left(self, limit: Limit, states: States, at_ms: int) -> tuple[int, int]:
        live = self._live(limit, states, at_ms)
        used = sum(units for _, units in live)
        return max(limit.number - used, 0), live[-1][0] - at_ms if live else 0

    def _live(self, limit: Limit, states: States, at_ms: int) -> list[tuple[int, int]]:
        """The requests that still count: (end in ms since the current window began, units)."""
        live = [entry for entry in states.previous or () if entry[0] > at_ms]
        return live + [(came_ms + limit.window_ms, units) for came_ms, units in states.current or ()]


ALGORITHMS: Mapping[str, Algorithm] = {"counter": Counter(), "gcra": Gcra(), "log": Log()}


def gcra_used(limit: Limit, free_at: int, at_ms: int) -> int:
    """The units in a state of `gcra` that have not come back, rounded up."""
    return -(-max(free_at - at_ms * limit.number, 0) // limit.window_ms)


def decide(policy: Policy, held: Sequence[States], now_ms: int, cost: int) -> tuple[Decision, Sequence[States]]:
    """One decision over all limits of a policy: all of them count the request, or none. `held` has the states of each
    limit, for the windows at `now_ms`. Returns the decision and the states to store in their place.
    """
    algorithm = ALGORITHMS[policy.algorithm]
    rows = [(limit, states, now_ms % limit.window_ms) for limit, states in zip(policy.limits, held, strict=True)]
    waits_ms = [algorithm.wait_ms(limit, states, at_ms, cost) for limit, states, at_ms in rows]
    admitted = not any(waits_ms)
    if admitted or policy.count_rejected:
        held = [States(states.previous, algorithm.counted(limit, states, at_ms, cost)) for limit, states, at_ms in rows]
        if not admitted:  # counting it may make the wait longer
            waits_ms = [
                algorithm.wait_ms(limit, states, at_ms, cost)
                for (limit, _, at_ms), states in zip(rows, held, strict=True)
            ]
    answers = tuple(
        LimitState(*algorithm.left(limit, states, at_ms), wait_ms)
        for (limit, _, at_ms), states, wait_ms in zip(rows, held, waits_ms, strict=True)
    )
    return Decision(admitted, now_ms, answers), held
