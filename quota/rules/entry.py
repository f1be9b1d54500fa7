"""What the log of a project holds: entries in order, each known by its key.

    Entry     one entry: a charge, a correction, units that others used, or a marker
    packed    an entry as one line of text, as every log and journal stores it; `unpacked` reads it

The fields of a line stand between tabs, which no name may hold:

    100 KEY search search.list backfill DE                            a charge
    c40 KEY search search.list backfill DE  OF MS-SEQ 100             a correction: that charge counts 40, before 100
    o900 KEY units - - -                    NAME SINCE-UNTIL          upstream has counted 900 units that others used
    m0 KEY                                                            a marker: a fact of the state has changed
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Id = tuple[int, int]
"""Where an entry stands in the log: its time in ms since 1970, then its number within that millisecond. Where two
histories are united, an entry may get another place. Its key stays."""

START: Id = (0, 0)
"""Before all entries."""

END: Id = (2**53, 2**53)
"""Behind all entries."""

CALLS = "calls"

Kind = Literal["charge", "correction", "others", "marker", "unreadable"]

_MAX_DIGITS = 15
"""A number with more digits may be beyond 2^53."""

_KINDS: dict[str, Kind] = {"c": "correction", "o": "others", "m": "marker"}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


class Entry(NamedTuple):
    """One entry of the log.

    `key` is unique to the attempt that made the entry. `units` is what it counts: of a correction, what its charge
    counts from now on; of `others`, what they used.

    A correction has all fields of its charge, `of` is the key of that charge, `at` its id, and `before_units` what it
    counted until now.

    Of `others`, `of` names what was heard, and `at` is the period of it: since when, until when, in ms. Of one name the
    largest counts, until its period ends. `method` is how long upstream's window is, in ms, or empty: only limits with
    such a window count it, and with `region` CALLS those that count calls, too.

    An entry that nobody can read (`unreadable`) counts nothing.
    """

    id: Id
    units: int
    bucket: str
    method: str
    job: str
    region: str
    key: str
    kind: Kind = "charge"
    of: str = ""
    at: Id = START
    before_units: int = 0


_new = tuple.__new__


def packed(entry: Entry) -> str:
    """The line that stores an entry, without its id."""
    _, units, bucket, method, job, region, key, kind, of, at, before_units = entry
    if kind == "charge":
        return f"{units}\t{key}\t{bucket}\t{method}\t{job}\t{region}"
    line = f"{_LETTERS[kind]}{units}\t{key}\t{bucket}\t{method}\t{job}\t{region}"
    return line if kind == "marker" else f"{line}\t{of}\t{at[0]}-{at[1]}\t{before_units}"


def unpacked(entry_id: Id, line: str) -> Entry:
    """The entry that a line stores. Never raises: one that cannot be read is `unreadable`."""
    fields = line.split("\t")
    try:
        if len(fields) == 6 and line[:1].isdigit():
            units, key, bucket, method, job, region = fields
            count = _digits(units)
            return _new(Entry, (entry_id, count, bucket, method, job, region, key, "charge", "", START, 0))
        kind = _KINDS[line[0]]
        units, key, bucket, method, job, region, *more = fields
        of, at, before_units = more if kind != "marker" else ("", "0-0", "0")
        numbers = _digits(units[1:]), _digits(before_units)
        return Entry(entry_id, numbers[0], bucket, method, job, region, key, kind, of, read_id(at), numbers[1])
    except (ValueError, KeyError, IndexError):
        return Entry(entry_id, 0, "", "", "", "", "", "unreadable")


def _digits(text: str) -> int:
    """Units are never below 0 nor beyond 2^53, whoever wrote the line. Raises ValueError."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise ValueError(text)
    return int(text)


def id_text(entry_id: Id) -> str:
    """`(1795233255077, 4)` -> `1795233255077-4`."""
    return f"{entry_id[0]}-{entry_id[1]}"


def read_id(text: str) -> Id:
    """The id that a text says. Raises ValueError."""
    ms, _, seq = text.partition("-")
    return int(ms), int(seq)


def just_before(ms: int) -> Id:
    """Before all that an entry of this millisecond can be."""
    return (ms - 1, 2**53) if ms > 0 else START
