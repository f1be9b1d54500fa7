"""What a ledger needs of a Redis server and of its user.

rights, acl_line    the rights of a user, in the words of an ACL
findings            findings about a server and a project's keys, from the reply of `lua/examine.lua`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from quota.common.clock import host_clock, stamp
from quota.common.findings import Finding, finding_of, warning
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
    facts = dict(re.findall(r"^(\w+):([^\r\n]*)\r?$", info, re.MULTILINE))
    yield _rights(missing)
    if refused:
        yield finding_of("error", "server writes", refused, "until it can be written to, calls have only the allowance")
    if not facts:
        yield warning("server", "its version and persistence cannot be read", "let this user run INFO")
    else:
        yield _version(facts)
        yield _persistence(facts)
        yield from _emptied(facts)
        yield _eviction(facts.get("maxmemory_policy", "?"))
    yield from _lifetimes(lifetimes, keys)


def _rights(missing: Sequence[str]) -> Finding:
    if missing:
        message = f"this user may not run {', '.join(missing)}: calls are refused"
        return Finding("error", "server rights", message, "give it the rights that `quota doctor --acl` prints")
    return Finding("ok", "server rights", "this user may run every command of the scripts")


def _version(facts: dict[str, str]) -> Finding:
    version = facts.get("redis_version", "")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    name = f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {version}"
    if numbers < OLDEST:
        return Finding("error", "server version", f"{name} is older than Redis 6.2", "upgrade it")
    return Finding("ok", "server version", name)


def _persistence(facts: dict[str, str]) -> Finding:
    where = "server persistence"
    if facts.get("aof_enabled") == "1":
        if facts.get("aof_last_write_status", "ok") != "ok":
            return Finding("error", where, "the server cannot write its append-only file", "see the server's log")
        return Finding("ok", where, "an append-only file")
    if facts.get("rdb_last_bgsave_status", "ok") != "ok":
        return Finding("error", where, "the server cannot save its data", "see the server's log")
    return warning(
        where,
        "no append-only file: a restart loses all charges since the last snapshot, or everything",
        "set appendonly yes",
    )


def _emptied(facts: dict[str, str]) -> Iterator[Finding]:
    """How often somebody has emptied the server, or a database of it, since it started."""
    calls = [re.match(r"calls=(\d+)", facts.get(f"cmdstat_{name}", "")) for name in ("flushall", "flushdb")]
    times = sum(int(match[1]) for match in calls if match is not None)
    if times:
        since = stamp(host_clock() - int(facts.get("uptime_in_seconds", 0)) * 1_000)
        yield Finding("ok", "server emptied", f"{many(times, 'time')} since {since}, by FLUSHALL or FLUSHDB")


def _eviction(policy: str) -> Finding:
    where = "server eviction"
    if policy == "noeviction":
        return Finding("ok", where, policy)
    if policy == "?":
        message = "its maxmemory-policy cannot be read"
        return Finding("warning", where, message, "let this user run INFO, or make sure that it is noeviction")
    message = f"its maxmemory-policy is {policy}: when its memory is full it drops charges and grants them again"
    return Finding("error" if policy.startswith("allkeys") else "warning", where, message, "set it to noeviction")


def _lifetimes(lifetimes: Sequence[int], keys: Sequence[str]) -> Iterator[Finding]:
    for key, lifetime_ms in zip(keys, lifetimes, strict=True):
        if lifetime_ms == NO_LIFETIME:
            yield warning(
                "server keys",
                f"{key} has no lifetime: another program removed it",
                "charge once: that sets it again",
            )
