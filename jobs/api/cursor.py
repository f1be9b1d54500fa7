"""Where a list goes on: opaque text that only the same question accepts, and only while its answer is the same one.

encode, decode    18 bytes as 24 characters: 6 of the question's digest, 8 of the version's, 4 of the position
"""

from __future__ import annotations

import base64
import re
from hashlib import blake2b
from struct import pack, unpack

_WRITTEN = re.compile(r"[A-Za-z0-9_-]{24}")
MAX_POSITION = 2**32 - 1


class ForeignCursorError(ValueError):
    """This cursor does not belong to the question."""


def encode(question: str, version: str, position: int) -> str:
    return base64.urlsafe_b64encode(
        _digest(question, 6) + _digest(version, 8) + pack(">I", min(position, MAX_POSITION))
    ).decode()


def decode(question: str, written: str) -> tuple[bytes, int]:
    """The digest of the version, for `is_of`, and the position. Raises ForeignCursorError."""
    if not _WRITTEN.fullmatch(written):
        raise ForeignCursorError
    data = base64.urlsafe_b64decode(written)
    if data[:6] != _digest(question, 6):
        raise ForeignCursorError
    (position,) = unpack(">I", data[14:])
    return data[6:14], position


def is_of(version_digest: bytes, version: str) -> bool:
    """Whether a cursor with this digest is one of this version."""
    return version_digest == _digest(version, 8)


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()
