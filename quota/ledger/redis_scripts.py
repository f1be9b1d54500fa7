"""The Lua scripts of the Redis ledger, loaded once each."""

from __future__ import annotations

from functools import cache

try:
    from _sha1 import sha1  # type: ignore[import-not-found]  # hashlib would load all of OpenSSL for it
except ImportError:
    from hashlib import sha1


@cache
def script(name: str) -> tuple[str, str]:
    """The text of `lua/NAME.lua` and the SHA-1 that Redis knows it by."""
    from quota.common.resources import read_text

    text = read_text("quota.lua", f"{name}.lua")
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()
