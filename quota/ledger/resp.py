"""Redis' protocol, apart from any connection: what is sent, and what came back.

pack           the words of a command as they are sent
bulk           one word of them
new_replies    takes in what was received, and gives the replies in it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hiredis

from quota.ledger.redis_errors import NotRedis

if TYPE_CHECKING:
    from collections.abc import Callable

INCOMPLETE = object()
"""There is no whole reply yet."""

MAX_REPLY_BYTES = 2**28
"""No reply of ours is nearly as long: whoever sends more is not the server that was asked."""

pack: Callable[[tuple[str | bytes, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub is wrong
"""Packs a command as the server reads it. Every word must be text or bytes, never a number.

hiredis (3.5 and before) turns a number into text itself, and does not check whether that failed. If a signal handler
raises just there, the interpreter crashes.
"""


class RawError(Exception):
    """The text of an error reply, as hiredis makes it: no code of ours runs in the middle of its work.
    `quota.ledger.redis_errors.error_of` says what it means."""


def new_replies() -> hiredis.Reader:
    """Is fed what was received, and gives the replies in it, or INCOMPLETE. Raises NotRedis for what is none.
    An error reply is a RawError."""
    return hiredis.Reader(
        protocolError=NotRedis, replyError=RawError, encoding="utf-8", errors="replace", notEnoughData=INCOMPLETE
    )
