"""`quota charge --file CALLS`: several calls from a file, charged together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.common.text import show
from quota.errors import UsageError
from quota.ledger.contract import MAX_CHARGES

if TYPE_CHECKING:
    from collections.abc import Iterable


def read_calls(path: str) -> list[str | tuple[str, int]]:
    """The calls in a file, `-` for stdin, as `Budget.charge_many` takes them: `METHOD [UNITS]` on a line, `#` begins a
    comment. Raises UsageError; reads no further than one call too many."""
    try:
        with open(0 if path == "-" else path, encoding="utf-8-sig", closefd=path != "-") as file:
            calls = _calls(path, file)
    except OSError as error:
        raise UsageError(f"calls {show(path)}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"calls {show(path)}: not text in UTF-8") from None
    if not calls:
        raise UsageError(f"calls {show(path)}: no call in it; write METHOD [UNITS] on a line")
    return calls


def _calls(path: str, lines: Iterable[str]) -> list[str | tuple[str, int]]:
    calls: list[str | tuple[str, int]] = []
    for number, line in enumerate(lines, 1):
        method, *units = line.partition("#")[0].split() or [""]
        if not method:
            continue
        if len(units) > 1 or not all(word.isascii() and word.isdigit() and len(word) <= 15 for word in units):
            raise UsageError(f"calls {show(path)}, line {number}: {show(line.strip())} is not METHOD [UNITS]")
        calls.append((method, int(units[0])) if units else method)
        if len(calls) > MAX_CHARGES:
            break
    return calls
