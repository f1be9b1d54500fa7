"""The names that a storage keeps instead of identities, and the counts that it does not have yet (I8).

A name is 8 bytes of the BLAKE2b hash of a salt followed by the identity. Only the storage has the salts (I3, I4). This
is as safe as BLAKE2b's keyed mode, which Node lacks, because nobody can extend a BLAKE2b hash. A program in any
language that reads the salts finds the same names.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice, pairwise
from typing import Generic, NamedTuple, TypeVar

from quota.common.fork import start_here_and_in_child
from quota.inbound.contract import MAX_TOTALS, MAX_WINDOW_MS, Limit, Policy
from quota.terms.limits import DAY_MS

NAME_BYTES = 8

SHARDS = 16_384
"""The number of hashes that hold the identities of one window. With a million identities a hash has 61. Redis packs a
hash of up to 512, so up to eight million identities are packed."""

SALT_BYTES = 32

_SALT = re.compile("([0-9a-f]{2})+")

SALTS_KEPT_MS = 70 * DAY_MS
"""How long the permanent salts are kept after the last read: two of the longest windows, and eight days."""

REFRESH_MS = 60_000
"""How long a process uses the salts that it has read."""

ROTATION_LEAD_MS = 60_000
"""A new permanent salt applies to windows that begin at least this much later. A process reads the salts when it
enters a window, so no window is counted under two salts, however much the clocks differ (I4)."""

SHARD = "shard"
"""The name of the salt that chooses shards. It never changes."""


def kind_of(policy: Policy, limit: Limit) -> str:
    """The part of a key that separates states with the same rule and window: gcra's times depend on the limit's number,
    and so does a list with rejected requests, which push out others."""
    if policy.algorithm == "log":
        return f"r{limit.number}." if policy.count_rejected else "l"
    return f"g{limit.number}." if policy.algorithm == "gcra" else "c"


def new_salt() -> str:
    """A salt in hexadecimal digits, as it is stored."""
    return secrets.token_hex(SALT_BYTES)


def name_of(salt: bytes, identity: str) -> bytes:
    """The name of an identity, valid Unicode or not: a header may hold anything."""
    return blake2b(salt + identity.encode("utf-8", "surrogatepass")).digest()[:NAME_BYTES]


class UnreadableError(Exception):
    """A storage holds data that this package never writes. The storage turns this into StorageAway."""


class Window(NamedTuple):
    """A limit's current window: its number, its salt, and the salt of the window before."""

    number: int
    salt: bytes
    previous_salt: bytes

    def names_of(self, identity: str) -> tuple[bytes, bytes]:
        """The identity's names in this window and in the window before."""
        return name_of(self.salt, identity), name_of(self.previous_salt, identity)


class Plan(NamedTuple):
    """The windows and salts of a policy, from `since_ms` until before `until_ms`."""

    since_ms: int
    until_ms: int
    shard_salt: bytes
    windows: tuple[Window, ...]

    def holds_at(self, now_ms: int) -> bool:
        return self.since_ms <= now_ms < self.until_ms


def salt_names(policy: Policy, now_ms: int) -> dict[str, int]:
    """The salts of days that a policy needs now: the name of each in the storage, and until when it is needed.

    A window uses the salt of the UTC day on which it began, so both windows that `counter` reads keep their names over
    midnight. Each length of window has its own salts, so that no salt lives longer than its windows.
    """
    until_ms = {}
    if policy.algorithm == "counter":
        for _, window_ms, _ in policy.limits:
            begun_ms = now_ms - now_ms % window_ms
            for started_ms in (begun_ms, begun_ms - window_ms):
                day = started_ms // DAY_MS
                until_ms[f"{window_ms}:{day}"] = (day + 1) * DAY_MS + 2 * window_ms
    return until_ms


def plan(policy: Policy, now_ms: int, fixed: Mapping[str, str], of_days: Mapping[str, str]) -> Plan:
    """Make a plan from the salts in the storage. `fixed` has SHARD, and each permanent salt under the ms since which it
    applies; `of_days` has the salts of days. Raises UnreadableError."""
    permanent = sorted((_since(since), _salt(salt)) for since, salt in fixed.items() if since != SHARD)

    def salt_of(window_ms: int, started_ms: int) -> bytes:
        if policy.algorithm == "counter":
            return _salt(of_days.get(f"{window_ms}:{started_ms // DAY_MS}"))
        if not permanent:
            raise UnreadableError
        return [salt for since_ms, salt in permanent if since_ms <= max(started_ms, permanent[0][0])][-1]

    windows, until_ms = [], now_ms + REFRESH_MS
    for _, window_ms, _ in policy.limits:
        begun_ms = now_ms - now_ms % window_ms
        until_ms = min(until_ms, begun_ms + window_ms)
        windows.append(
            Window(now_ms // window_ms, salt_of(window_ms, begun_ms), salt_of(window_ms, begun_ms - window_ms))
        )
    return Plan(now_ms, until_ms, _salt(fixed.get(SHARD)), tuple(windows))


def outdated(fixed: Mapping[str, str], now_ms: int) -> list[str]:
    """The names of permanent salts that no window uses any more. Raises UnreadableError."""
    permanent = sorted(_since(since) for since in fixed if since != SHARD)
    return [str(since_ms) for since_ms, next_ms in pairwise(permanent) if next_ms + 2 * MAX_WINDOW_MS < now_ms]


def _since(text: object) -> int:
    if isinstance(text, str) and text.isdecimal() and text.isascii():
        return int(text)
    raise UnreadableError


def _salt(text: object) -> bytes:
    if isinstance(text, str) and _SALT.fullmatch(text):
        return bytes.fromhex(text)
    raise UnreadableError


# -- what a process counts ---------------------------------------------------------------------------------------------

MetWindow = tuple[str, int, int, bool]
"""A window that counted identities for the first time: the rule's name, the window's length in ms, its number, and
whether the window before had counted these identities too."""

K = TypeVar("K")


class Counts(Generic[K]):
    """What a process has counted, until its storage has it: less than `most` counts. Safe in several threads. A forked
    child begins at zero: the parent hands over its own counts."""

    def __init__(self, most: int) -> None:
        self._most = most
        start_here_and_in_child(self)

    def start_over_in_child(self) -> None:
        self._lock = threading.RLock()  # a signal handler may count while its thread does
        self._counts: Counter[K] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, counts: Mapping[K, int]) -> None:
        with self._lock:
            self._counts.update(counts)
            while len(self._counts) >= self._most:  # this process hands nothing over
                del self._counts[next(iter(self._counts))]

    @contextmanager
    def handed_over(self) -> Iterator[Mapping[K, int]]:
        """The oldest counts, at most MAX_TOTALS. They are removed here, unless the block fails."""
        with self._lock:
            part = {key: self._counts.pop(key) for key in [*islice(self._counts, MAX_TOTALS)]}
        try:
            yield part
        except BaseException:
            self.add(part)
            raise
