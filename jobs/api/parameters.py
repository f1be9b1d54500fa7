"""The parameters of a request and the cursors of lists. Unknown parameters are errors, so that nobody misspells one
without noticing.

    read_parameters    the parameters of a query string; `limit_of` and `words_of` read two of them
    encode, decode     a cursor: opaque text that is valid for one question, while its answer stays the same
    ProblemError       ends a request with a problem; `ParameterError` names the wrong parameter
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping
from hashlib import blake2b
from struct import pack, unpack
from urllib.parse import unquote_to_bytes

from quota.common.text import nearest, shorten, show
from quota.jobs.store.fulltext import length_of_last
from quota.web.documents import Problem

DEFAULT_LIMIT = 50
MAX_LIMIT = 100

MAX_CHARACTERS = 100
MAX_BEGINNINGS = 3
MIN_BEGINNING = 2
"""Bounds that keep a search by strangers within 100 ms. `quota search` has wider bounds: over 100,000 videos, a* to z*
in one search took 3 s, a phrase of 500 characters 1 s."""


class ProblemError(Exception):
    """Ends a request with this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class ParameterError(ProblemError):
    """A wrong parameter, with its name and the mistake."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(Problem(400, detail, members={"parameter": name} if name else {}))


def read_parameters(query: bytes, names: Collection[str]) -> dict[str, str]:
    """The parameters of a query string; `names` are allowed. Raises ParameterError."""
    parameters: dict[str, str] = {}
    for pair in query.split(b"&") if query else []:
        try:
            name, value = (unquote_to_bytes(part.replace(b"+", b" ")).decode() for part in pair.partition(b"=")[::2])
        except UnicodeDecodeError:
            raise ParameterError(
                "", f"the query string is not UTF-8: {show(pair.decode('ascii', 'backslashreplace'))}"
            ) from None
        if name not in names:
            raise ParameterError(shorten(name, 100), f"there is no parameter {show(name)}; {nearest(name, names)}")
        if name in parameters:
            raise ParameterError(name, f"{name} is given twice")
        parameters[name] = value
    return parameters


def required(parameters: Mapping[str, str], name: str) -> str:
    if name not in parameters:
        raise ParameterError(name, f"{name} is missing")
    return parameters[name]


def limit_of(parameters: Mapping[str, str]) -> int:
    """The most items on a page."""
    written = parameters.get("limit", str(DEFAULT_LIMIT))
    if not (written.isascii() and written.isdigit() and len(written) < 10 and 1 <= int(written) <= MAX_LIMIT):
        raise ParameterError("limit", f"limit={show(written)}: write a number from 1 to {MAX_LIMIT}")
    return int(written)


def words_of(parameters: Mapping[str, str]) -> str:
    """The words of a search."""
    words = required(parameters, "q")
    if len(words) > MAX_CHARACTERS:
        raise ParameterError("q", f"search for at most {MAX_CHARACTERS} characters, not {len(words)}")
    beginnings = [word.rstrip("*") for word in words.split() if word.endswith("*")]
    if len(beginnings) > MAX_BEGINNINGS:
        raise ParameterError("q", f"at most {MAX_BEGINNINGS} words may end with *, not {len(beginnings)}")
    if short := [beginning for beginning in beginnings if length_of_last(beginning) < MIN_BEGINNING]:
        raise ParameterError("q", f"write at least {MIN_BEGINNING} letters or digits before *, not {show(short[0])}")
    return words


# -- cursors -----------------------------------------------------------------------------------------------------------

_WRITTEN = re.compile(r"[A-Za-z0-9_-]{24}")
MAX_POSITION = 2**32 - 1


class ForeignCursorError(ValueError):
    """The cursor is of another question."""


def encode(question: str, version: str, position: int) -> str:
    """A cursor: 24 characters for 18 bytes, which are 6 of the question's digest, 8 of the version's, 4 of position."""
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
    """Whether a cursor with this digest is of this version."""
    return version_digest == _digest(version, 8)


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()
