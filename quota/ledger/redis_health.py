"""What `lua/examine.lua` says of a server and of a project's keys, as findings."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from quota.common.findings import Finding
from quota.ledger.redis_scripts import script

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRIPTS = (
    *("charge", "settle", "read", "exhaust", "reopen", "add_unlogged", "repay", "claim", "grant", "roll_up"),
    "add_refusals",
)

TIDYING = frozenset(("DEL", "HDEL", "HSCAN", "INFO", "XTRIM"))
"""Without these a charge is still made, but the keys grow, or nothing is said about the server (L23)."""

OLDEST = (6, 2)
"""The oldest Redis whose commands the scripts know."""

NO_LIFETIME = -1


@cache
def commands_needed() -> tuple[str, ...]:
    """Every command that the scripts call, in capitals."""
    found = {name for one in SCRIPTS for name in re.findall(r"redis\.p?call\('(\w+)'", script(one)[0])}
    return tuple(sorted(found))


def findings(info: str, lifetimes: Sequence[int], forbidden: Sequence[str], keys: Sequence[str]) -> Iterator[Finding]:
    """The findings about a server that answered, from the reply of `lua/examine.lua`."""
    facts = dict(re.findall(r"^(\w+):([^\r\n]*)\r?$", info, re.MULTILINE))
    yield from _rights(forbidden)
    if not facts:
        yield Finding(
            "warning", "server", "what it is and how it keeps its data could not be seen", "let this user run INFO"
        )
    else:
        yield _version(facts)
        yield _persistence(facts)
        yield _eviction(facts.get("maxmemory_policy", "?"))
    yield from _lifetimes(lifetimes, keys)


def _rights(forbidden: Sequence[str]) -> Iterator[Finding]:
    remedy = "see `Rights` in lua/README.md for what to grant"
    needed, tidying = [c for c in forbidden if c not in TIDYING], [c for c in forbidden if c in TIDYING]
    if needed:
        yield Finding("error", "server rights", f"this user may not run {', '.join(needed)}: calls are refused", remedy)
    if tidying:
        message = f"this user may not run {', '.join(tidying)}: calls are charged, but nothing is tidied up"
        yield Finding("warning", "server rights", message, remedy)
    if not forbidden:
        yield Finding("ok", "server rights", "this user may run every command of the scripts")


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
    return Finding(
        "warning",
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
            yield Finding(
                "warning",
                "server keys",
                f"{key} has no lifetime: another program took it away",
                "charge once; the first charge of a minute gives it one again",
            )
