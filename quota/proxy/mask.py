"""Replaces a secret in an answer by stars while the answer passes, because callers must not learn the key.

Lengths stay the same. It does not search packed bodies, and does not recognize other encodings of a secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

from quota.common.redact import MIN_SECRET_LENGTH


class Mask:
    """Masks one answer. `feed` returns the bytes that may pass. It holds back a possible beginning of a secret until
    the next piece or the `end`."""

    def __init__(self, secret: str | None) -> None:
        self._secrets = _spellings(secret) if secret else ()
        self._longest = max(map(len, self._secrets), default=0)
        self._kept = b""

    def whole(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, b"*" * len(secret))
        return data

    def feed(self, piece: bytes) -> bytes:
        if not self._secrets:
            return piece
        data = self.whole(self._kept + piece)
        at = max(0, len(data) - self._longest + 1)
        keep_from = min(self._begins(data, at))
        self._kept = data[keep_from:]
        return data[:keep_from]

    def end(self) -> bytes:
        kept, self._kept = self._kept, b""
        return kept

    def _begins(self, data: bytes, since: int) -> Iterable[int]:
        """For each secret, where its beginning may stand at the end of the data."""
        for secret in self._secrets:
            at = data.find(secret[:1], since)
            while at >= 0 and not secret.startswith(data[at:]):
                at = data.find(secret[:1], at + 1)
            yield at if at >= 0 else len(data)


@lru_cache(100)
def _spellings(secret: str) -> tuple[bytes, ...]:
    """The spellings of a secret in an answer, the longest first."""
    spelled = {secret, quote(secret), quote(secret, safe=""), secret.replace("/", "\\/")}
    return tuple(sorted((text.encode() for text in spelled if len(text) >= MIN_SECRET_LENGTH), key=len, reverse=True))
