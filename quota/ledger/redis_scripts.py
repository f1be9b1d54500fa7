"""The Lua scripts of the Redis ledger, loaded once each, and the keys of a project that they take.

The head of `lua/charge.lua` describes the keys.
"""

from __future__ import annotations

from functools import cache, lru_cache
from hashlib import sha1
from typing import NamedTuple

from quota.common.resources import list_names, read_text
from quota.errors import ConfigError

FORMAT = "5"
"""The format of everything stored in Redis; the same number stands in each script (L24)."""

_INCLUDE = "-- @include "
"""Begins a line of a script in whose place stands a file of `lua/parts/`."""

_OF_A_PROJECT = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")


@cache
def script(name: str) -> tuple[str, str]:
    """The whole text of `lua/NAME.lua` and the SHA-1 that Redis knows it by."""
    lines = read_text("quota.lua", f"{name}.lua").splitlines(keepends=True)
    text = "".join(
        read_text("quota.lua", line.removeprefix(_INCLUDE).rstrip()) if line.startswith(_INCLUDE) else line
        for line in lines
    )
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


def script_names() -> list[str]:
    """The names of all scripts, sorted."""
    return sorted(name.removesuffix(".lua") for name in list_names("quota.lua", ".") if name.endswith(".lua"))


class Keys(NamedTuple):
    """The keys of a project that every script takes, in one slot of a cluster. `history_key` is a fourth."""

    log: str
    state: str
    corrections: str


@lru_cache(maxsize=256)
def keys_of(project: str) -> Keys:
    if not (0 < len(project) <= 64 and _OF_A_PROJECT.issuperset(project)):
        raise ConfigError(f"project {project!r}: a name in Redis is 1 to 64 of A-Z a-z 0-9 . _ : -")
    return Keys(*(f"quota:{{{project}}}:{key}" for key in Keys._fields))


def history_key(project: str) -> str:
    """The fourth key of a project: no decision touches it."""
    return f"{keys_of(project).log.removesuffix(':log')}:history"
