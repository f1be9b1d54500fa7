"""The contract of the storages of inbound limits: one protocol, two storages, three algorithms.

    Policy      an algorithm and the limits of one rule
    Limit       a number of units within a window
    Decision    admitted or not, and for each limit what remains and when more fits
    Storage     the protocol of the Redis and the SQLite storage
    decide      a decision by the states of an identity: pure

A request has an *identity*: a text that tells one client from another. A storage keeps a *name* instead: 8 bytes, made
from the identity and a salt. docs/inbound-algorithms.md has the rules (I1, I2, ...).

    storage = open_storage("sqlite:///inbound.db")
    search = Policy("search", (Limit(100, 60_000),))
    decision = storage.decide(search, "203.0.113.7")

Every error except `StorageAway` is a mistake of the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

from quota.common.text import nearest, show
from quota.errors import ConfigError, UsageError
from quota.terms.arguments import whole

Algorithm = Literal["counter", "gcra", "log"]
"""How a limit counts:

    counter     two fixed windows; weights the older window by its part within the last window_ms
    gcra        spaces requests evenly; up to `burst` of them may come at once
    log         keeps every request of the last window, so it is exact
"""

WALL_S = 0.25
"""The most that a decision takes, with all waiting. After that the storage counts as away."""

MET_LAG_MS = 10_000
"""How late a worker may report the identities that it met."""

MET_KEPT_MS = 60_000
"""How long the counts of met identities are kept beyond two windows."""

MIN_WINDOW_MS = 1_000
MAX_WINDOW_MS = 31 * 86_400_000

MAX_SCALE = 2**52
"""The maximum of number times window_ms: Lua and JSON have 53 exact bits (I2)."""

MAX_LOG = 1_000
"""The highest number of a `log` limit: it keeps an entry per request, and no command may touch more entries (I6)."""

MAX_LIMITS = 8
"""The most limits in one rule."""

MAX_TOTALS = 1_000
"""The most totals in one call of `add_totals`."""

_RULE = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Limit(NamedTuple):
    """At most `number` units within `window_ms`.

    Only `gcra` has a `burst`, from 1 to `number`: the units that may come at once. They come back evenly, `number` in a
    window.
    """

    number: int
    window_ms: int
    burst: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of one rule and their algorithm. All limits admit a request, or none of them counts it.

    With `count_rejected`, a rejected request counts too, so a client that keeps asking stays out. Raises ConfigError.
    """

    rule: str
    limits: tuple[Limit, ...]
    algorithm: Algorithm = "counter"
    count_rejected: bool = False
    most: int = field(init=False, repr=False, compare=False)
    """The highest cost that all limits can admit."""

    def __post_init__(self) -> None:
        rule = self.rule
        if not all(isinstance(limit, Limit) for limit in self.limits):
            raise ConfigError("limits: write each as Limit(number, window_ms)")
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(f"algorithm: {show(self.algorithm)}: {nearest(self.algorithm, get_args(Algorithm))}")
        if not isinstance(rule, str) or not _RULE.fullmatch(rule):
            raise ConfigError(f"rule {show(rule)}: a name is 1 to 64 of A-Z a-z 0-9 . _ -")
        if not 1 <= len(self.limits) <= MAX_LIMITS:
            raise ConfigError(f"rule {rule}: give it 1 to {MAX_LIMITS} limits, not {len(self.limits)}")
        for limit in self.limits:
            self._check(limit)
        if len({limit.window_ms for limit in self.limits}) < len(self.limits):
            raise ConfigError(f"rule {rule}: two limits have the same window; keep the smaller limit")
        object.__setattr__(self, "most", min(limit.burst or limit.number for limit in self.limits))

    @property
    def longest(self) -> Limit:
        """The limit with the longest window. It decides which identities are alive."""
        return max(self.limits, key=lambda limit: limit.window_ms)

    def _check(self, limit: Limit) -> None:
        number, window_ms, burst = limit
        rule = f"rule {self.rule}"
        try:
            whole(number, "requests: a limit", 1, MAX_SCALE)
            whole(window_ms, "ms: a window", MIN_WINDOW_MS, MAX_WINDOW_MS)
            whole(burst, "requests: a burst", 0, MAX_SCALE)
        except UsageError as error:
            raise ConfigError(f"{rule}: {error}") from None
        if number * window_ms > MAX_SCALE:
            raise ConfigError(f"{rule}: {number} in {window_ms} ms is too much to count; write a shorter window")
        if self.algorithm == "log" and number > MAX_LOG:
            raise ConfigError(f"{rule}: the algorithm log keeps at most {MAX_LOG} requests; use counter")
        if self.algorithm == "gcra" and not 1 <= burst <= number:
            raise ConfigError(f"{rule}: the algorithm gcra needs a burst, from 1 up to its limit of {number}")
        if self.algorithm != "gcra" and burst:
            raise ConfigError(f"{rule}: only the algorithm gcra has a burst")


class LimitState(NamedTuple):
    """One limit after a decision.

    remaining           units that the limit would admit now
    reset_ms            ms until the whole limit is free again, if no other request comes
    retry_after_ms      ms until the same request fits this limit again, if no other request comes; 0 if it fits now.
                        Never too early: exact for `gcra` and `log`, an estimate for `counter`
    """

    remaining: int
    reset_ms: int
    retry_after_ms: int


class Decision(NamedTuple):
    """The answer, with the time of the storage's clock. `limits` are in the policy's order."""

    admitted: bool
    now_ms: int
    limits: tuple[LimitState, ...]

    @property
    def retry_after_ms(self) -> int:
        """The ms until the same request would be admitted again; 0 if it would be now."""
        return max(limit.retry_after_ms for limit in self.limits)


class Consumer(NamedTuple):
    """An identity of a rule, by its name in hexadecimal digits. `used` are its units in the current window of the
    rule's longest limit; with `gcra`, the units of the burst that have not come back."""

    name: str
    used: int


class Storage(Protocol):
    """Safe in several threads and after a fork. The storage's own clock decides."""

    label: str
    """The url without secrets."""

    shared: bool
    """Whether several machines may use it."""

    def decide(self, policy: Policy, identity: str, cost: int = 1) -> Decision:
        """Admit a request of `cost` units and count it, or refuse it, within WALL_S.

        Raises StorageAway, and UsageError for a cost outside 1 to `policy.most`.
        """

    def add_totals(self, totals: Mapping[str, int]) -> None:
        """Add whole numbers, by name (at most MAX_TOTALS), to the totals that all workers share. Also report how many
        identities this worker met. Call it every 10 s. After a failure, pass the same numbers again.

        Raises StorageAway.
        """

    def totals(self) -> Mapping[str, int]:
        """The totals of all workers. The storage keeps them for 35 days after the last addition. Raises StorageAway."""

    def alive(self, policy: Policy) -> int:
        """The number of identities that the current or previous window of the policy's longest limit has counted, as
        the workers reported it. Raises StorageAway."""

    def top(self, policy: Policy, count: int = 10) -> Sequence[Consumer]:
        """The identities that have used most, largest first. Reads all states of the rule, so do not call it for every
        scrape. Raises StorageAway."""

    def rotate(self) -> int:
        """Change the salt of `gcra` and `log`. The new salt applies to windows that begin at or after the returned
        time: a minute from now, in ms since 1970. No limit is reset (I4). Raises StorageAway."""

    def close(self) -> None:
        """Close the connections or the file. The next call opens them again."""


# -- the algorithms ----------------------------------------------------------------------------------------------------

# They are in whole numbers and without a storage (I1, I2). SQLite uses them directly. The scripts `lua/inbound_*.lua`
# do the same in Lua, and tests compare the two.
#
# Time is divided into fixed windows, numbered from 1970. A limit keeps one state for each identity in the *current*
# window and reads the state of the *previous* window. No decision reads an older state, so all states of a window
# expire together. `at_ms` is the time since the current window began: 0 to window_ms - 1.
#
#     counter     the state is the units counted in the window
#     gcra        the state is the time at which all units are free again, in 1/number ms since the window began
#     log         the state is an entry for each request: its time, in ms since the window began, and its units
#
# An algorithm answers three questions about one limit, `at_ms` into the current window:
#
#     wait_ms     the ms until `cost` fits, if no other request comes; 0 if it fits now
#     counted     the current state after counting `cost`, whether or not it fits
#     left        the units that fit now, and the ms until the whole limit is free

Entries = tuple[tuple[int, int], ...]
"""The state of a log: (ms since the window began, units), oldest first."""


class States(NamedTuple):
    """The states of one identity in a limit. None: the window counted nothing."""

    previous: Any
    current: Any


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
        windows = 2 if current else 1
        reset_ms = windows * window_ms - at_ms if current or previous else 0
        return max(number - current - weighted, 0), reset_ms


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
        reset_ms = live[-1][0] - at_ms if live else 0
        return max(limit.number - used, 0), reset_ms

    def _live(self, limit: Limit, states: States, at_ms: int) -> list[tuple[int, int]]:
        """The requests that still count: (end in ms since the current window began, units)."""
        live = [entry for entry in states.previous or () if entry[0] > at_ms]
        return live + [(came_ms + limit.window_ms, units) for came_ms, units in states.current or ()]


ALGORITHMS: Mapping[str, Counter | Gcra | Log] = {"counter": Counter(), "gcra": Gcra(), "log": Log()}


def gcra_used(limit: Limit, free_at: int, at_ms: int) -> int:
    """The units in a state of `gcra` that have not come back, rounded up."""
    return -(-max(free_at - at_ms * limit.number, 0) // limit.window_ms)


def decide(policy: Policy, held: Sequence[States], now_ms: int, cost: int) -> tuple[Decision, Sequence[States]]:
    """One decision over all limits of a policy: all of them count the request, or none. `held` has the states of each
    limit, for the windows at `now_ms`. Returns the decision and the states to store in their place.
    """
    algorithm = ALGORITHMS[policy.algorithm]
    rows = [(limit, states, now_ms % limit.window_ms) for limit, states in zip(policy.limits, held, strict=True)]
    waits_ms = [algorithm.wait_ms(*row, cost) for row in rows]
    admitted = not any(waits_ms)
    if admitted or policy.count_rejected:
        held = [States(states.previous, algorithm.counted(limit, states, at_ms, cost)) for limit, states, at_ms in rows]
        rows = [(limit, states, at_ms) for (limit, _, at_ms), states in zip(rows, held, strict=True)]
        waits_ms = [algorithm.wait_ms(*row, cost) for row in rows]  # counting it may make the wait longer
    answers = [LimitState(*algorithm.left(*row), wait_ms) for row, wait_ms in zip(rows, waits_ms, strict=True)]
    return Decision(admitted, now_ms, tuple(answers)), held
