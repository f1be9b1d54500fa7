"""`quota charge --file CALLS`: several calls from a file, charged together."""

from __future__ import annotations

import codecs
import os
from typing import NamedTuple

from quota.budget import MAX_CHARGES, Budget, check_call
from quota.common.named import read_named
from quota.common.text import show
from quota.errors import UsageError
from quota.rules.calls import MAX_CHARGE_UNITS
from quota.terms.attribution import check_name

MAX_FILE_BYTES = 65_536
"""100 calls with comments need less. `/dev/zero` has more."""


class Line(NamedTuple):
    """A call as `Budget.charge_many` takes it, and the file and line that it stands in, for messages."""

    call: str | tuple[str, int]
    place: str


def read_calls(path: str) -> list[Line]:
    """The calls in a file, `-` for stdin: `METHOD [UNITS]` on a line, `#` begins a comment. Raises UsageError."""
    name = "calls from stdin" if path == "-" else f"calls {show(path)}"
    try:
        data = _read(path)
    except OSError as error:
        raise UsageError(
            f"{name}: cannot be read: {error.strerror}; name a file with METHOD [UNITS] on each line, or - for stdin"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{name}: larger than {MAX_FILE_BYTES >> 10} KiB, so this is no list of calls")
    if path == "-" and not data:
        raise UsageError(f"{name}: stdin is closed or empty; pipe METHOD [UNITS] into it, a call on a line")
    lines: list[Line] = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        place = f"{name}, line {number}"
        call = _call(line, place)
        if call is not None and len(lines) == MAX_CHARGES:
            raise UsageError(f"{place}: one call more than the {MAX_CHARGES} that are charged together; make two files")
        if call is not None:
            lines.append(Line(call, place))
    if not lines:
        raise UsageError(f"{name}: no call in it; write METHOD [UNITS] on a line")
    return lines


def check_calls(budget: Budget, lines: list[Line], job: str) -> None:
    """Raises UsageError, with its line, for a call that can never succeed."""
    check_name("job", job)
    for call, place in lines:
        try:
            check_call(budget, call, job)
        except UsageError as error:
            raise type(error)(f"{place}: {error}") from None


def _read(path: str) -> bytes:
    """What a file holds, up to one byte more than it may. Raises OSError, also where a read would block: the rest of
    the calls is yet to come."""
    if path != "-":
        return read_named(path, MAX_FILE_BYTES + 1)
    data = b""
    while more := os.read(0, MAX_FILE_BYTES + 1 - len(data)):
        data += more
    return data


def _call(line: bytes, place: str) -> str | tuple[str, int] | None:
    """The call on a line; None where there is none."""
    try:
        method, *units = line.decode().partition("#")[0].split() or [""]
    except UnicodeDecodeError:
        raise UsageError(f"{place}: not UTF-8 text; save the file as UTF-8") from None
    if not units:
        return method or None
    if len(units) > 1:
        raise UsageError(f"{place}: {show(' '.join([method, *units]))} is not METHOD [UNITS]")
    digits = units[0].lstrip("0")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and int(digits) <= MAX_CHARGE_UNITS):
        raise UsageError(f"{place}: UNITS {show(units[0])} is not a whole number from 1 to {MAX_CHARGE_UNITS:,}")
    return method, int(digits)
