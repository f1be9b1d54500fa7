"""The shared storage: Redis 6.2 or newer, or Valkey, through `lua/inbound_*.lua`. The contract is
`quota.inbound.contract.Storage`.

A decision is one script call. Its keys name the windows (I5). The process computes them from its own clock and what it
knows of the server's clock. If the server's clock is in another window, the script counts nothing and the process
asks again (I7). This happens when a window ends while the call is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nlargest
from typing import Any

from quota.common.clock import elapsed_s, host_clock
from quota.errors import StorageAway
from quota.inbound import names
from quota.inbound.contract import (
    MAX_TOTALS,
    MET_KEPT_MS,
    MET_LAG_MS,
    WALL_S,
    Consumer,
    Decision,
    Limit,
    LimitState,
    Policy,
    gcra_used,
)
from quota.ledger.redis_connection import client_of
from quota.ledger.redis_errors import Failed, explained
from quota.ledger.redis_log import script
from quota.ledger.redis_url import checked_target, label_of, user_of
from quota.terms.arguments import MAX_NUMBER, whole, whole_clock

Words = Sequence[str | bytes]

TIMEOUT_S = 0.08
"""The most time for a connect, and for each answer while connecting: three of them fit into WALL_S."""

MAX_ASKED = 5
"""The most tries of one decision, if the server's clock is in another window each time."""

PREFIX = "quota:inbound:"
"""The prefix of every key. A new storage format needs a new prefix."""

KEYS = PREFIX + "*"
COMMANDS = (
    *("eval", "evalsha", "time", "mget", "set", "exists", "del", "pexpire", "type"),
    *("hget", "hset", "hsetnx", "hincrby", "hmget", "hgetall", "hdel", "hscan"),
    *("lindex", "lrange", "ltrim", "rpush", "scan"),
)
"""The commands that a Redis user must be allowed to run on these keys."""

SALTS = PREFIX + "{salts}:"
FIXED = SALTS + "fixed"
TOTALS = PREFIX + "{totals}"
MET = TOTALS + ":met:"

PROLONG_MS = 3_600_000
"""How often a process renews the lifetime of the permanent salts."""


class RedisStorage:
    """Limits that all machines share that reach the server."""

    shared = True

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        self.label = label_of(url)
        self._clock = None if clock is None else whole_clock(clock)
        self._url = url
        target = checked_target(url, TIMEOUT_S, "inbound storage")
        # On an open connection, a reply may take all of WALL_S; in a cluster it leaves time for another node.
        self._client = client_of(target if target.kind == "cluster" else target._replace(timeout_s=WALL_S))
        self._behind_ms = 0  # the server's clock minus this host's
        self._plans: dict[Policy, names.Plan] = {}
        # The salts that were read last, to restore salts that a full server evicts. Salts of days have their end.
        self._fixed: Mapping[str, str] = {}
        self._days: dict[str, tuple[str, int]] = {}
        self._prolonged_ms = 0  # when the lifetime of the permanent salts was last set
        self._met = names.Counts[names.MetWindow](MAX_TOTALS)

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, policy: Policy, identity: str, cost: int = 1) -> Decision:
        cost = whole(cost, "units: the cost of a request", 1, policy.most)
        ends_s = elapsed_s() + WALL_S
        given_ms = 0 if self._clock is None else self._clock()
        for _ in range(MAX_ASKED):
            now_ms = given_ms or host_clock() + self._behind_ms
            plan = self._plans.get(policy)
            if plan is None or not plan.holds_at(now_ms):
                plan = self._new_plan(policy, now_ms, ends_s)
            words = _words(policy, plan, identity, cost, given_ms)
            reply = self._script(f"inbound_{policy.algorithm}", words, ends_s)
            if reply[0] >= 0:
                admitted, decided_ms, *numbers = reply
                rows = [numbers[n : n + 4] for n in range(0, len(numbers), 4)]
                longest = policy.limits.index(policy.longest)
                met = rows[longest][3]  # 0: the identity is new; 1: the window before had it; 2: this window had it
                if met < 2 and (admitted or policy.count_rejected):
                    number = plan.windows[longest].number
                    self._met.add({(policy.rule, policy.longest.window_ms, number, met == 1): 1})
                return Decision(admitted == 1, decided_ms, tuple([LimitState(*state) for *state, _ in rows]))
            if self._clock is None:
                self._behind_ms = reply[1] - host_clock()
        raise StorageAway(f"inbound storage {self.label}: its clock and this machine's never agree on a window")

    def _new_plan(self, policy: Policy, now_ms: int, ends_s: float) -> names.Plan:
        """Read the salts, and create missing ones: the first process creates them for all (I4). This usually takes two
        requests, so that they and the decision fit into WALL_S on a slow connection too."""
        needed = names.salt_names(policy, now_ms)
        fixed = _pairs(self._ask("HGETALL", FIXED, ends_s=ends_s))
        if names.SHARD not in fixed or len(fixed) < 2:
            self._fixed = self._fixed or {names.SHARD: names.new_salt(), "0": names.new_salt()}
            for field, salt in self._fixed.items():  # the salts that this process read: new ones would reset limits
                self._ask("HSETNX", FIXED, field, salt, ends_s=ends_s)
            fixed = _pairs(self._ask("HGETALL", FIXED, ends_s=ends_s))
            self._prolonged_ms = 0
        if not 0 <= now_ms - self._prolonged_ms < PROLONG_MS:
            self._ask("PEXPIRE", FIXED, str(names.SALTS_KEPT_MS), ends_s=ends_s)
            self._prolonged_ms = now_ms
        of_days: dict[str, str] = {}
        if needed:
            read = ("MGET", *(SALTS + name for name in needed))
            salts = self._ask(*read, ends_s=ends_s)
            if None in salts:
                for (name, until_ms), salt in zip(needed.items(), salts, strict=True):
                    if salt is None:
                        made, _ = self._days.setdefault(name, (names.new_salt(), until_ms))
                        self._ask("SET", SALTS + name, made, "NX", "PX", str(until_ms - now_ms), ends_s=ends_s)
                salts = self._ask(*read, ends_s=ends_s)
            of_days = dict(zip(needed, salts, strict=True))
        with self._reading(SALTS + "*"):
            self._plans[policy] = of_windows = names.plan(policy, now_ms, fixed, of_days)
        self._fixed = fixed
        days = self._days | {name: (salt, needed[name]) for name, salt in of_days.items()}
        self._days = {name: day for name, day in days.items() if day[1] > now_ms}
        return of_windows

    # -- totals of all workers -----------------------------------------------------------------------------------------

    def add_totals(self, totals: Mapping[str, int]) -> None:
        keys, words = [TOTALS], [str(len(totals))]
        for name, number in totals.items():
            words += (name, str(number))
        with self._met.handed_over() as met:
            for (rule, window_ms, number, was_before), count in met.items():
                keys.append(f"{MET}{rule}:{window_ms}:{number}")
                new, again = (0, count) if was_before else (count, 0)
                words += (str(new), str(again), str(2 * window_ms + MET_KEPT_MS))
            self._script("inbound_totals", [str(len(keys)), *keys, *words])

    def totals(self) -> Mapping[str, int]:
        with self._reading(TOTALS):
            return {name: _count(number) for name, number in _pairs(self._ask("HGETALL", TOTALS)).items()}

    def alive(self, policy: Policy) -> int:
        window_ms = policy.longest.window_ms
        number = (self._now_ms() - MET_LAG_MS) // window_ms
        keys = [f"{MET}{policy.rule}:{window_ms}:{n}" for n in (number - 1, number)]
        with self._reading(MET + "*"):
            counts = [[_count(count or "0") for count in self._ask("HMGET", key, "new", "again")] for key in keys]
        return sum(counts[0]) + counts[1][0]

    def top(self, policy: Policy, count: int = 10) -> Sequence[Consumer]:
        limit = policy.longest
        now_ms = self._now_ms()
        number = now_ms // limit.window_ms
        used = self._used(policy, limit, number)
        if policy.algorithm == "gcra":
            at_ms = now_ms - number * limit.window_ms
            used = ((name, gcra_used(limit, free_at, at_ms)) for name, free_at in used)
        consumers = (Consumer(name, units) for name, units in used)
        return nlargest(count, consumers, key=lambda consumer: consumer.used)

    def _used(self, policy: Policy, limit: Limit, number: int) -> Iterator[tuple[str, int]]:
        """The name of each identity in a window, and its stored number. A list has its name in its key."""
        wanted = f"{PREFIX}{{*}}{_suffix(policy, limit, number)}" + (":*" if policy.algorithm == "log" else "")
        packed = "1" if policy.algorithm == "gcra" else "0"
        try:
            for key in self._client.scan(wanted):
                cursor = ""
                while cursor != "0":
                    cursor, *states = self._script("inbound_top", ["1", key, cursor or "0", packed])
                    with self._reading(key):
                        for name, stored in zip(states[::2], states[1::2], strict=True):
                            yield name or key.rpartition(":")[2], _count(stored)
        except Failed as error:
            raise self._away(error) from error

    def rotate(self) -> int:
        fixed = _pairs(self._ask("HGETALL", FIXED))
        now_ms = self._now_ms()
        if not fixed:  # no request was ever counted, so there is no salt
            return now_ms
        since_ms = now_ms + names.ROTATION_LEAD_MS
        self._ask("HSET", FIXED, str(since_ms), names.new_salt())
        self._ask("PEXPIRE", FIXED, str(names.SALTS_KEPT_MS))
        with self._reading(FIXED):
            gone = names.outdated(fixed, now_ms)
        if gone:
            self._ask("HDEL", FIXED, *gone)
        return since_ms

    # -- the connection ----------------------------------------------------------------------------------------------

    # Each word of a command is text or bytes: see `quota.ledger.redis_connection`.

    def _now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        # In a cluster: the clock of the node that has the totals.
        seconds, micros = self._ask("EVAL", "return redis.call('TIME')", "1", TOTALS)
        return int(seconds) * 1000 + int(micros) // 1000

    def _script(self, name: str, words: Words, ends_s: float | None = None) -> Any:
        """The reply of a script. `words` has the number of keys, the keys and the arguments."""
        text, sha = script(name)
        try:
            return self._ask("EVALSHA", sha, *words, ends_s=ends_s)
        except StorageAway as error:
            if getattr(error.__cause__, "code", "") != "NOSCRIPT":
                raise
            return self._ask("EVAL", text, *words, ends_s=ends_s)

    def _ask(self, *words: str | bytes, ends_s: float | None = None) -> Any:
        try:
            return self._client.execute_command(*words, ends_s=ends_s or elapsed_s() + WALL_S)
        except Failed as error:
            raise self._away(error) from error

    def _away(self, error: Failed) -> StorageAway:
        return StorageAway(explained(error, f"inbound storage {self.label}", WALL_S, user_of(self._url)))

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Raises StorageAway if the data at a key is unreadable."""
        try:
            yield
        except (ValueError, IndexError, names.UnreadableError) as error:
            why = f"key {key} is damaged, or another program's; delete it, or give inbound limits another database"
            raise StorageAway(f"inbound storage {self.label}: {why}") from error

    def close(self) -> None:
        self._client.close()


def _suffix(policy: Policy, limit: Limit, number: int) -> str:
    """The part of a key behind the shard: rule, kind and window (I5)."""
    return f":{policy.rule}:{names.kind_of(policy, limit)}{limit.window_ms}:{number}"


def _words(policy: Policy, plan: names.Plan, identity: str, cost: int, given_ms: int) -> list[str | bytes]:
    """The words for the script of a policy: the number of keys, the keys and the arguments."""
    shard = int.from_bytes(names.name_of(plan.shard_salt, identity), "big") % names.SHARDS
    keys: list[str | bytes] = []
    words: list[str | bytes] = [str(given_ms), str(cost), str(int(policy.count_rejected))]
    for limit, window in zip(policy.limits, plan.windows, strict=True):
        identities = window.names_of(identity)
        for name, number in zip(identities, (window.number, window.number - 1), strict=True):
            of_log = f":{name.hex()}" if policy.algorithm == "log" else ""
            keys.append(f"{PREFIX}{{{shard}}}{_suffix(policy, limit, number)}{of_log}")
        words += (*map(str, limit), str(window.number), *identities)
    return [str(len(keys)), *keys, *words]


def _count(text: str) -> int:
    """Parse a count. Raises ValueError for a number that none of our programs writes."""
    number = int(text)
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError("out of range")
    return number


def _pairs(reply: Any) -> dict[str, str]:
    """The reply to HGETALL as a dict."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
