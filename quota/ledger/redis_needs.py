"""What a ledger needs of a Redis server and of its user.

rights, acl_line    the rights of a user, in the words of an ACL
findings            findings about a server and a project's keys, from the reply of `lua/examine.lua`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from quota.common.clock import host_clock, stamp
from quota.common.findings import Finding, Level, finding_of, problem, warning
from quota.common.text import many

# -- rights ------------------------------------------------------------------------------------------------------------

COMMANDS = (
    *("eval", "evalsha", "time", "exists", "del", "rename", "pttl", "pexpire"),
    *("hget", "hmget", "hset", "hdel", "hkeys", "hlen"),
    *("xadd", "xlen", "xrange", "xrevrange", "xtrim"),
    "info",
)
"""The commands of the ledger's scripts, which try them all, and of `quota` itself. Only `info` is optional: it shows
whether the server may drop our keys."""

OF_A_CLUSTER = ("cluster|slots", "asking")
"""A client uses them to find the node that has a key, and to ask a node that is just getting the key."""

OF_A_SENTINEL = ("sentinel|masters",)
"""The commands that a client sends to sentinels, as their user."""

PASSWORD = "PASSWORD"  # noqa: S105  # the operator puts their own there
"""The placeholder of the password in an ACL line."""


def pattern_of(project: str) -> str:
    """The pattern of a project's keys; of all projects with `*`."""
    return f"quota:{{{project}}}:*"


def rights(keys: Sequence[str], commands: Sequence[str]) -> list[str]:
    """The rights to these keys and commands alone, in the words of an ACL."""
    return [*(f"~{key}" for key in keys), "-@all", *(f"+{command}" for command in commands)]


def acl_line(user: str, keys: Sequence[str], commands: Sequence[str]) -> str:
    """The command of the server that gives a user these rights."""
    return f"ACL SETUSER {user} reset on >{PASSWORD} {' '.join(rights(keys, commands))}"


# -- the server --------------------------------------------------------------------------------------------------------

OLDEST = (6, 2)
"""The oldest Redis that has the commands of the scripts."""

NO_LIFETIME = -1


def findings(
    info: str, lifetimes: Sequence[int], missing: Sequence[str], keys: Sequence[str], refused: str
) -> Iterator[Finding]:
    """The findings about a server, from the reply of `lua/examine.lua`. `refused` is its refusal of a write,
    explained."""
    if missing:
        message = f"this user may not run {', '.join(missing)}: calls are refused"
        yield problem("server rights", message, "give it the rights that `quota doctor --acl` prints")
    else:
        yield Finding("ok", "server rights", "this user may run every command of the scripts")
    if refused:
        yield finding_of("error", "server writes", refused, "until it can be written to, calls have only the allowance")
    facts = dict(re.findall(r"^(\w+):([^\r\n]*)\r?$", info, re.MULTILINE))
    if facts:
        yield from _of_facts(facts)
    else:
        yield warning("server", "its version and persistence cannot be read", "let this user run INFO")
    for key, lifetime_ms in zip(keys, lifetimes, strict=True):
        if lifetime_ms == NO_LIFETIME:
            message = f"{key} has no lifetime: another program removed it"
            yield warning("server keys", message, "charge once: that sets it again")


def _of_facts(facts: dict[str, str]) -> Iterator[Finding]:
    """The findings about what a server says in INFO: its version, its persistence, how often somebody has emptied it,
    or a database of it, since it started, and whether it may drop our keys."""
    version = facts.get("redis_version", "")
    name = f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {version}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        yield problem("server version", f"{name} is older than Redis 6.2", "upgrade it")
    else:
        yield Finding("ok", "server version", name)
    has_log = facts.get("aof_enabled") == "1"
    if has_log and facts.get("aof_last_write_status", "ok") != "ok":
        yield problem("server persistence", "the server cannot write its append-only file", "see the server's log")
    elif has_log:
        yield Finding("ok", "server persistence", "an append-only file")
    elif facts.get("rdb_last_bgsave_status", "ok") != "ok":
        yield problem("server persistence", "the server cannot save its data", "see the server's log")
    else:
        message = "no append-only file: a restart loses all charges since the last snapshot, or everything"
        yield warning("server persistence", message, "set appendonly yes")
    calls = [re.match(r"calls=(\d+)", facts.get(f"cmdstat_{command}", "")) for command in ("flushall", "flushdb")]
    times = sum(int(match[1]) for match in calls if match is not None)
    if times:
        since = stamp(host_clock() - int(facts.get("uptime_in_seconds", 0)) * 1_000)
        yield Finding("ok", "server emptied", f"{many(times, 'time')} since {since}, by FLUSHALL or FLUSHDB")
    policy = facts.get("maxmemory_policy", "?")
    if policy == "noeviction":
        yield Finding("ok", "server eviction", policy)
    elif policy == "?":
        remedy = "let this user run INFO, or make sure that it is noeviction"
        yield warning("server eviction", "its maxmemory-policy cannot be read", remedy)
    else:
        message = f"its maxmemory-policy is {policy}: a full server drops charges, and grants their units again"
        level: Level = "error" if policy.startswith("allkeys") else "warning"
        yield Finding(level, "server eviction", message, "set it to noeviction")
