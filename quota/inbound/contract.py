"""What a storage of inbound limits is asked and what it answers. One protocol, two storages.

    Policy      an algorithm and the limits of one rule
    Limit       a number of units within a window
    Decision    admitted or not, and for each limit what remains, and when more will fit
    Storage     what Redis and SQLite do alike

A request has an *identity*: any text that tells one client from another. A storage keeps a *name* instead, 8 bytes
made from the identity and a salt, and never the identity itself. The rules (I1, I2, ...) are in
docs/inbound-algorithms.md.

    storage = open_storage("sqlite:///inbound.db")
    search = Policy("search", (Limit(100, 60_000),))
    decision = storage.decide(search, "203.0.113.7")

Any error except `StorageAway` is a mistake of the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

from quota.common.text import nearest, show
from quota.errors import ConfigError, UsageError
from quota.terms.arguments import MAX_NUMBER, text, whole

Algorithm = Literal["counter", "gcra", "log"]
"""How a limit is held:

    counter     two fixed windows, the older one weighted by how much of it still lies within the last window
    gcra        requests are spaced evenly; up to `burst` of them may come at once
    log         every request of the last window is kept: exact
"""

WALL_S = 0.25
"""A decision takes no longer, waiting included. Then the storage counts as away."""

MET_LAG_MS = 10_000
"""How late a worker may say which identities it met."""

MET_KEPT_MS = 60_000
"""How much longer than two windows the identities that were met are kept."""

MIN_WINDOW_MS = 1_000
MAX_WINDOW_MS = 31 * 86_400_000

MAX_SCALE = 2**52
"""Number times window may not exceed this: Lua and JSON have 53 exact bits (I2)."""

MAX_LOG = 1_000
"""The algorithm `log` keeps an entry for each request, and no command may touch more than a thousand (I6)."""

MAX_LIMITS = 8
"""The most limits of one rule."""

MAX_TOTALS = 1_000
"""The most names in one report of totals."""

_RULE = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Limit(NamedTuple):
    """At most `number` units within `window_ms`.

    `burst` is for `gcra` alone, which needs it: how many units may come at once, up to `number`. They come back evenly,
    `number` in a window.
    """

    number: int
    window_ms: int
    burst: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """How the requests of one rule are limited. All limits admit a request, or none of them counts it.

    With `count_rejected` a rejected request counts, too: a client that does not stop is not let in. Raises ConfigError.
    """

    rule: str
    limits: tuple[Limit, ...]
    algorithm: Algorithm = "counter"
    count_rejected: bool = False
    most: int = field(init=False, repr=False, compare=False)
    """The largest cost that every limit can ever admit."""

    def __post_init__(self) -> None:
        rule = self.rule
        if not all(isinstance(limit, Limit) for limit in self.limits):
            raise ConfigError("limits: each is a Limit(number, window_ms)")
        if self.algorithm not in get_args(Algorithm):
            raise ConfigError(f"algorithm: {show(self.algorithm)}: {nearest(self.algorithm, get_args(Algorithm))}")
        if not isinstance(rule, str) or not _RULE.fullmatch(rule):
            raise ConfigError(f"rule {show(rule)}: a name is 1 to 64 of A-Z a-z 0-9 . _ -")
        if not 1 <= len(self.limits) <= MAX_LIMITS:
            raise ConfigError(f"rule {rule}: give it 1 to {MAX_LIMITS} limits, not {len(self.limits)}")
        for limit in self.limits:
            self._check(limit)
        if len({limit.window_ms for limit in self.limits}) < len(self.limits):
            raise ConfigError(f"rule {rule}: two limits have the same window; the smaller one is enough")
        object.__setattr__(self, "most", min(limit.burst or limit.number for limit in self.limits))

    @property
    def longest(self) -> Limit:
        """The limit with the longest window: it tells which identities are alive."""
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
            raise ConfigError(f"{rule}: {number} in {window_ms} ms is too much to count; take a shorter window")
        if self.algorithm == "log" and number > MAX_LOG:
            raise ConfigError(
                f"{rule}: the algorithm log keeps every request, up to {MAX_LOG}; take counter for {number}"
            )
        if self.algorithm == "gcra" and not 1 <= burst <= number:
            raise ConfigError(f"{rule}: the algorithm gcra needs a burst, from 1 up to its limit of {number}")
        if self.algorithm != "gcra" and burst:
            raise ConfigError(f"{rule}: only the algorithm gcra has a burst")


class LimitState(NamedTuple):
    """One limit after a decision.

    remaining           units that would be admitted now
    reset_ms            from now until all of it is free again, if nothing else comes
    retry_after_ms      from now until the same request fits this limit, if nothing else comes; 0 where it fits.
                        Never too early; exact for `gcra` and `log`, and for `counter` by its own estimate
    """

    remaining: int
    reset_ms: int
    retry_after_ms: int


class Decision(NamedTuple):
    """The answer, dated by the storage's clock. `limits` has the policy's order."""

    admitted: bool
    now_ms: int
    limits: tuple[LimitState, ...]

    @property
    def retry_after_ms(self) -> int:
        """When the request would be admitted, from now; 0 if it was."""
        return max(limit.retry_after_ms for limit in self.limits)


class Consumer(NamedTuple):
    """One identity of a rule, by its name in hexadecimal digits, and the units that were counted in the current window
    of the rule's longest limit; with `gcra` the units of its burst that have not come back yet."""

    name: str
    used: int
    limit: Limit


def checked_totals(totals: Mapping[str, int]) -> dict[str, int]:
    """Raises UsageError for what cannot be added."""
    if len(totals) > MAX_TOTALS:
        raise UsageError(f"{len(totals)} is too many totals at once; give up to {MAX_TOTALS}")
    return {text(name, "total"): whole(number, f"of {name}: a total", 0, MAX_NUMBER) for name, number in totals.items()}


class Storage(Protocol):
    """Safe to use from several threads, and after a fork. Its own clock decides."""

    label: str
    """Its url, without secrets."""

    shared: bool
    """Whether several machines may use it."""

    def decide(self, policy: Policy, identity: str, cost: int = 1) -> Decision:
        """Admit one request of `cost` units and count it, or not. Takes up to WALL_S.

        Raises StorageAway, and UsageError for a cost that is not 1 to `policy.most`.
        """

    def add_totals(self, totals: Mapping[str, int]) -> None:
        """Add whole numbers to totals that all workers share, by name (up to MAX_TOTALS). It also hands over how many
        identities this worker met. Every 10 s is often enough. A failure loses nothing: give the same numbers again.

        Raises StorageAway.
        """

    def totals(self) -> Mapping[str, int]:
        """What all workers have added so far. Kept for 35 days after the last addition. Raises StorageAway."""

    def alive(self, policy: Policy) -> int:
        """How many identities were counted in the current or the previous window of the policy's longest limit, as
        the workers handed it over. Raises StorageAway."""

    def top(self, policy: Policy, count: int = 10) -> Sequence[Consumer]:
        """The identities that have used most, the largest first. Reads all of the rule: for people, not for
        every scrape. Raises StorageAway."""

    def rotate(self) -> int:
        """Change the salt of `gcra` and `log`, from windows on that begin at or after the time it returns, in ms since
        1970: a minute from now. Nobody is freed by it (I4). Raises StorageAway."""

    def close(self) -> None:
        """Let connections or the file go. The next call opens them again."""
