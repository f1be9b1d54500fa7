"""What `lua/examine.lua` says of a server and of a project's keys, as findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from quota.common.findings import Finding, finding_of, warning

OLDEST = (6, 2)
"""The oldest Redis whose commands the scripts know."""

NO_LIFETIME = -1


def findings(
    info: str, lifetimes: Sequence[int], missing: Sequence[str], keys: Sequence[str], refused: str
) -> Iterator[Finding]:
    """The findings about a server that answered, from the reply of `lua/examine.lua`. `refused` is in our words."""
    facts = dict(re.findall(r"^(\w+):([^\r\n]*)\r?$", info, re.MULTILINE))
    yield _rights(missing)
    if refused:
        yield finding_of("error", "server writes", refused, "no call is admitted until it can be written to")
    if not facts:
        yield warning("server", "what it is and how it keeps its data could not be seen", "let this user run INFO")
    else:
        yield _version(facts)
        yield _persistence(facts)
        yield _eviction(facts.get("maxmemory_policy", "?"))
    yield from _lifetimes(lifetimes, keys)


def _rights(missing: Sequence[str]) -> Finding:
    if missing:
        message = f"this user may not run {', '.join(missing)}: calls are refused"
        return Finding("error", "server rights", message, "give it the rights that `quota doctor --acl` prints")
    return Finding("ok", "server rights", "this user may run every command of the scripts")


def _version(facts: dict[str, str]) -> Finding:
    said = facts.get("redis_version", "")
    numbers = tuple(map(int, re.findall(r"\d+", said)[:2]))
    name = f"Valkey {facts['valkey_version']}" if "valkey_version" in facts else f"Redis {said}"
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
        "no append-only file: a restart loses what was charged since the last snapshot, or everything",
        "set appendonly yes",
    )


def _eviction(policy: str) -> Finding:
    if policy == "noeviction":
        return Finding("ok", "server eviction", "noeviction")
    return Finding("error" if policy.startswith("allkeys") else "warning", "server eviction", *evicts(policy))


def evicts(policy: str) -> tuple[str, str]:
    """Why a server with this maxmemory-policy is a danger, and what to do."""
    if policy == "?":
        return "its maxmemory-policy could not be seen", "let this user run INFO, or make sure that it is noeviction"
    return (
        f"its maxmemory-policy is {policy}: when its memory is full it drops charges and grants them again",
        "set it to noeviction",
    )


def _lifetimes(lifetimes: Sequence[int], keys: Sequence[str]) -> Iterator[Finding]:
    for key, lifetime_ms in zip(keys, lifetimes, strict=True):
        if lifetime_ms == NO_LIFETIME:
            yield warning(
                "server keys",
                f"{key} has no lifetime: another program took it away",
                "charge once: that gives it one again",
            )
