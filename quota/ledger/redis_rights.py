"""The rights that a user of a Redis server needs."""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS = (
    *("eval", "evalsha", "time", "exists", "del", "rename", "pttl", "pexpire"),
    *("hget", "hmget", "hset", "hdel", "hgetall", "hlen"),
    *("xadd", "xlen", "xrange", "xrevrange", "xtrim"),
    "info",
)
"""Those of the ledger's scripts, which try them all, and of `quota` itself. Without `info` nothing is refused: it
shows whether the server may drop our keys."""

OF_A_CLUSTER = ("cluster|slots", "asking")
"""What a client asks to find out which node has a key, and says to one that gets the key just now."""

OF_A_SENTINEL = ("sentinel|masters",)
"""What a client asks sentinels, as a user of theirs."""

PASSWORD = "PASSWORD"  # noqa: S105  # the operator puts their own there
"""Stands for the password in a line."""


def pattern_of(project: str) -> str:
    """The pattern of a project's keys; of all projects with `*`."""
    return f"quota:{{{project}}}:*"


def rights(keys: Sequence[str], commands: Sequence[str]) -> list[str]:
    """These and no others, in the words of an ACL."""
    return [*(f"~{key}" for key in keys), "-@all", *(f"+{command}" for command in commands)]


def acl_line(user: str, keys: Sequence[str], commands: Sequence[str]) -> str:
    """The command of the server that gives a user these rights."""
    return f"ACL SETUSER {user} reset on >{PASSWORD} {' '.join(rights(keys, commands))}"
