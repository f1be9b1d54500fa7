"""A price that is known only after the call: until then the most that the request may cost is charged. Pure.

Reserve        how that bound follows from a request
RequestBody    what is known of a request's body
"""

from __future__ import annotations

import json
import re
from math import ceil, inf
from typing import NamedTuple

from quota.terms.api import Pointer, value_at

MAX_PARSED_BYTES = 16_000_000
"""A longer body is not parsed: it counts by its length, and `default` stands for the number in it."""


class RequestBody(NamedTuple):
    """A request's body: all of it as `content`, b"" if there is none. None where the body is read only as it is sent;
    `length` is its bytes then, 0 where nobody knows them."""

    content: bytes | None = b""
    length: int = 0

    @classmethod
    def of(cls, body: object, content_length: object = None) -> RequestBody:
        """Of what a client is about to send: bytes, a text, nothing, or what it reads as it sends it. `content_length`
        is what the request's header says, if it does."""
        if isinstance(body, str):
            body = body.encode("utf-8", "replace")
        if body is None or isinstance(body, bytes | bytearray):
            return cls(bytes(body or b""))
        digits = str(content_length or "")
        return cls(None, int(digits) if re.fullmatch("[0-9]{1,15}", digits, re.ASCII) else 0)

    @property
    def makes_no_requests(self) -> bool:
        """Whether all of it is here. Else what makes it may send requests of its own while it is read, and an error
        that says that nothing left may be about one of them."""
        return self.content is not None


NO_BODY = RequestBody()


class Reserve(NamedTuple):
    """The bound of one call, in units: the number at `pointer` in the request's JSON, or `default` where that is no
    number from 0 on; and a unit for each `bytes_per_unit` of the body, rounded up, if that is given."""

    default: int
    pointer: Pointer | None = None
    bytes_per_unit: int | None = None

    def bound(self, body: RequestBody) -> int:
        """The units of a request, 1 or more. Never raises. A fraction is rounded up."""
        length = body.length if body.content is None else len(body.content)
        of_bytes = 0 if self.bytes_per_unit is None else -(-length // self.bytes_per_unit)
        number = None if self.pointer is None else _number(body.content, self.pointer)
        return max(1, (self.default if number is None else number) + of_bytes)


def _number(content: bytes | None, pointer: Pointer) -> int | None:
    if not content or len(content) > MAX_PARSED_BYTES:
        return None
    try:  # as the most lenient server does: a text that is no UTF-8 hides no number
        said = json.loads(content.decode(json.detect_encoding(content), "replace"), strict=False)
        value = value_at(said, pointer)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        return None
    return ceil(value)
