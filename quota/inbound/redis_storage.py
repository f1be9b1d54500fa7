"""The shared storage: Redis 6.2 or newer, or Valkey, through `lua/inbound_*.lua`. The contract is
`quota.inbound.contract.Storage`.

One decision is one script call. The keys name the windows (I5), so a process says which windows it means, by its own
clock and what it knows of the server's; where the server's clock is in another window, nothing is counted, and the
process asks again (I7). That happens where a window ends while the call is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nlargest
from typing import Any

from quota.common.clock import elapsed_s, host_clock
from quota.common.fork import start_over_in_child
from quota.errors import StorageAway
from quota.inbound import names
from quota.inbound.algorithms import gcra_used
from quota.inbound.contract import (
    MET_KEPT_MS,
    MET_LAG_MS,
    WALL_S,
    Consumer,
    Decision,
    Limit,
    LimitState,
    Policy,
    checked_totals,
)
from quota.inbound.counting import Met
from quota.ledger.redis_connection import client_of
from quota.ledger.redis_errors import Failed, explained
from quota.ledger.redis_log import script
from quota.ledger.redis_url import checked_target, label_of, user_of
from quota.terms.arguments import MAX_NUMBER, whole, whole_clock

Words = Sequence[str | bytes]


TIMEOUT_S = 0.08
"""How long a connect, and each answer while connecting, may take: three of them fit into WALL_S."""

MAX_ASKED = 5
"""How often a decision is asked for, at most: again each time that the server's clock was in another window."""

PREFIX = "quota:inbound:"
"""Of every key. If the format of what is stored changes, so must the prefix."""

KEYS = PREFIX + "*"
COMMANDS = (
    *("eval", "evalsha", "time", "mget", "set", "exists", "del", "pexpire", "type"),
    *("hget", "hset", "hsetnx", "hincrby", "hmget", "hgetall", "hdel", "hscan"),
    *("lindex", "lrange", "ltrim", "rpush", "scan"),
)
"""What a user of the server must be allowed to run, on these keys."""

SALTS = PREFIX + "{salts}:"
FIXED = SALTS + "fixed"
TOTALS = PREFIX + "{totals}"
MET = TOTALS + ":met:"

PROLONG_MS = 3_600_000
"""How often a process sets the lifetime of the permanent salts anew."""


class RedisStorage:
    """Limits shared by every machine that reaches the server."""

    shared = True

    def __init__(self, url: str, *, clock: Callable[[], int] | None = None) -> None:
        self.label = label_of(url)
        self._clock = None if clock is None else whole_clock(clock)
        self._url = url
        target = checked_target(url, self.label, TIMEOUT_S, "inbound storage")
        # On a connection that stands, a reply may take all of the time; in a cluster it leaves some for another node.
        self._client = client_of(target if target.kind == "cluster" else target._replace(timeout_s=WALL_S))
        self._behind_ms = 0  # the server's clock, less this host's
        self._plans: dict[Policy, names.Plan] = {}
        # Salts as they were last read, to put back those that a full server drops: of days, with when each has ended.
        self._fixed: Mapping[str, str] = {}
        self._days: dict[str, tuple[str, int]] = {}
        self._prolonged_ms = 0  # when the lifetime of the permanent salts was last set
        self._met = Met()
        start_over_in_child(self)

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, policy: Policy, identity: str, cost: int = 1) -> Decision:
        cost = whole(cost, "units: the cost of a request", 1, policy.most)
        identity_bytes = names.encoded(identity)
        ends_s = elapsed_s() + WALL_S
        given_ms = 0 if self._clock is None else self._clock()
        for _ in range(MAX_ASKED):
            now_ms = given_ms or host_clock() + self._behind_ms
            plan = self._plans.get(policy)
            if plan is None or not plan.holds_at(now_ms):
                plan = self._new_plan(policy, now_ms, ends_s)
            words = _words(policy, plan, identity_bytes, cost, given_ms)
            reply = self._script(f"inbound_{policy.algorithm}", words, ends_s)
            if reply[0] >= 0:
                return self._answer(policy, plan, reply)
            if self._clock is None:
                self._behind_ms = reply[1] - host_clock()
        raise StorageAway(f"inbound storage {self.label}: its clock and this machine's never agree on a window")

    def _new_plan(self, policy: Policy, now_ms: int, ends_s: float) -> names.Plan:
        """The salts, made where there are none yet: the first process makes them for all (I4). As a rule two questions:
        with the decision they fit into WALL_S on a slow line too."""
        needed = names.salt_names(policy, now_ms)
        fixed = _pairs(self._ask("HGETALL", FIXED, ends_s=ends_s))
        if names.SHARD not in fixed or len(fixed) < 2:
            self._fixed = self._fixed or {names.SHARD: names.new_salt(), "0": names.new_salt()}
            for field, salt in self._fixed.items():  # whatever this process knew before, or somebody would begin afresh
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

    def _answer(self, policy: Policy, plan: names.Plan, reply: list[int]) -> Decision:
        longest = policy.limits.index(policy.longest)
        met = reply[5 + 4 * longest]  # 0: the identity is new, 1: the window before knew it, 2: this one did
        if met < 2 and (reply[0] or policy.count_rejected):
            window = policy.rule, policy.longest.window_ms, plan.windows[longest].number
            self._met.note(window, was_before=met == 1)
        limits = tuple(LimitState(*reply[n : n + 3]) for n in range(2, len(reply), 4))
        return Decision(reply[0] == 1, reply[1], limits)

    # -- what all workers count ---------------------------------------------------------------------------------------

    def add_totals(self, totals: Mapping[str, int]) -> None:
        totals = checked_totals(totals)
        keys, words = [TOTALS], [str(len(totals))]
        for name, number in totals.items():
            words += (name, str(number))
        with self._met.handed_over() as met:
            for (rule, window_ms, number), (new, again) in met.items():
                keys.append(f"{MET}{rule}:{window_ms}:{number}")
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
        used = self._logs(policy, limit, number) if policy.algorithm == "log" else self._states(policy, limit, number)
        if policy.algorithm == "gcra":
            at_ms = now_ms - number * limit.window_ms
            used = ((name, gcra_used(limit, free_at, at_ms)) for name, free_at in used)
        return nlargest(
            count, (Consumer(name, units, limit) for name, units in used), key=lambda consumer: consumer.used
        )

    def _states(self, policy: Policy, limit: Limit, number: int) -> Iterator[tuple[str, int]]:
        packed = "1" if policy.algorithm == "gcra" else "0"
        for key in self._keys(f"{PREFIX}{{*}}{_suffix(policy, limit, number)}"):
            cursor = "0"
            while True:
                cursor, *states = self._script("inbound_top", ["1", key, cursor, packed])
                with self._reading(key):
                    yield from zip(states[::2], map(_count, states[1::2]), strict=True)
                if cursor == "0":
                    break

    def _logs(self, policy: Policy, limit: Limit, number: int) -> Iterator[tuple[str, int]]:
        wanted = f"{PREFIX}{{*}}{_suffix(policy, limit, number)}:*"
        for key in self._keys(wanted):
            _, *units = self._script("inbound_top", ["1", key, "0", "0"])
            with self._reading(key):
                if units:
                    yield key.rpartition(":")[2], _count(units[1])

    def _keys(self, wanted: str) -> Iterator[str]:
        try:
            yield from self._client.scan(wanted)
        except Failed as error:
            raise self._away(error) from error

    def rotate(self) -> int:
        fixed = _pairs(self._ask("HGETALL", FIXED))
        now_ms = self._now_ms()
        if not fixed:  # nobody was ever limited, so nobody knows a salt
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

    # Every word of a command must be text or bytes: see `quota.ledger.redis_connection`.

    def _now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        # Of a cluster, the node that has the totals.
        seconds, micros = self._ask("EVAL", "return redis.call('TIME')", "1", TOTALS)
        return int(seconds) * 1000 + int(micros) // 1000

    def _script(self, name: str, words: Words, ends_s: float | None = None) -> Any:
        """What a script says to the number of its keys, its keys and its arguments."""
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
        """Raises StorageAway where what stands at a key cannot be read."""
        try:
            yield
        except (ValueError, IndexError, names.UnreadableError) as error:
            raise StorageAway(
                f"inbound storage {self.label} has a key {key} that is not ours, or damaged; delete it, or give "
                "inbound limits a database of their own"
            ) from error

    def close(self) -> None:
        self._client.close()

    def start_over_in_child(self) -> None:
        """What the parent met, the parent hands over."""
        self._met = Met()


def _suffix(policy: Policy, limit: Limit, number: int) -> str:
    """Where a limit keeps a window of a shard (I5), behind the shard."""
    return f":{policy.rule}:{names.kind_of(policy, limit)}{limit.window_ms}:{number}"


def _words(policy: Policy, plan: names.Plan, identity: bytes, cost: int, given_ms: int) -> list[str | bytes]:
    """What the script of a policy is told: the number of its keys, the keys and the arguments."""
    shard = f"{PREFIX}{{{names.shard_of(plan.shard_salt, identity)}}}"
    keys: list[str | bytes] = []
    words: list[str | bytes] = [str(given_ms), str(cost), str(int(policy.count_rejected))]
    for limit, window in zip(policy.limits, plan.windows, strict=True):
        identities = window.names_of(identity)
        for name, number in zip(identities, (window.number, window.number - 1), strict=True):
            of_log = f":{name.hex()}" if policy.algorithm == "log" else ""
            keys.append(f"{shard}{_suffix(policy, limit, number)}{of_log}")
        words += (*map(str, limit), str(window.number), *identities)
    return [str(len(keys)), *keys, *words]


def _count(text: str) -> int:
    """A number that was counted. Raises ValueError for what none of our programs counts to."""
    number = int(text)
    if not 0 <= number <= MAX_NUMBER:
        raise ValueError("less than nothing, or more than can be counted")
    return number


def _pairs(reply: Any) -> dict[str, str]:
    """A hash."""
    return dict(zip(reply[::2], reply[1::2], strict=True))
