"""The entries of a project's log, in order. A key identifies each entry: `quota.deciding.keys` makes keys. Pure.

    Entry     one entry: a charge, a correction, units that others used, or a marker
    Others    units that only upstream has counted, which `others_units` adds up
    packed    an entry as one line of text, which every log and journal stores; `unpacked` reads it

Tabs separate the fields of a line, so no name may have a tab:

    100 KEY search search.list backfill DE                            a charge
    c40 KEY search search.list backfill DE  OF MS-SEQ 100             a correction: that charge counts 40, before 100
    o900 KEY units - - -                    NAME SINCE-UNTIL          upstream has counted 900 units that others used
    m0 KEY                                                            a marker: a fact of the state has changed

A key is a text:

    RUN MACHINE RANDOM    8, 4 and 11 characters, then `~` for a reservation, then `+1` to `+9` for further charges

RUN names the run, and begins every key of a process. MACHINE is the same for all processes that share a journal. RANDOM
has 64 bits, drawn for each attempt, so a copy of a running process repeats no key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from quota.common.text import number_in
from quota.terms.arguments import MAX_NUMBER

Id = tuple[int, int]
"""The id of an entry: its time in ms since 1970, then its number within that millisecond. A union of two histories may
change an id. The key stays."""

START: Id = (0, 0)
"""Before all entries."""

END: Id = (2**53, 2**53)
"""After all entries."""

CALLS = "calls"

Kind = Literal["charge", "correction", "others", "marker", "unreadable"]

_MAX_DIGITS = 15
"""A number with more digits may be beyond 2^53."""

_KINDS: dict[str, Kind] = {"c": "correction", "o": "others", "m": "marker"}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


class Entry(NamedTuple):
    """One entry of the log.

    `key` is unique to the attempt that made the entry. `units` are its units; in a correction, the new units of its
    charge; in `others`, the units that others used.

    A correction has all fields of its charge. `of` is the key of that charge, `at` its id, and `before_units` its units
    until now.

    In `others`, `of` names the source. Of one name, the largest entry counts, until its `period` ends (in `at`). Only
    limits with a window of upstream's length count it (`window_ms`, in `method`; None: any length), and limits that
    count calls only if it is `of_calls` (in `region`). `of_others` makes such an entry.

    An `unreadable` entry counts nothing.
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

    @classmethod
    def of_others(
        cls, key: str, bucket: str, units: int, name: str, period: Id, *, window_ms: int = 0, noun: str = ""
    ) -> Entry:
        """Units of a bucket that only upstream has counted. `period`: its beginning and its end, in ms."""
        return cls(START, units, bucket, str(window_ms or ""), "", noun, key, "others", name, period)

    @property
    def period(self) -> tuple[int, int]:
        return self.at

    @property
    def window_ms(self) -> int | None:
        """The length of upstream's window in an entry of others."""
        return number_in(self.method, 0, MAX_NUMBER)

    @property
    def of_calls(self) -> bool:
        return self.region == CALLS


class Others(NamedTuple):
    """Units that only upstream has counted: the name of their source, and the time until which they count."""

    name: str
    units: int
    until_ms: int


def others_units(others: Iterable[Others], name: str = "") -> int:
    """The sum of the units of others, or of those with a name: of one name only the largest."""
    largest: dict[str, int] = {}
    for heard in others:
        if name in ("", heard.name):
            largest[heard.name] = max(heard.units, largest.get(heard.name, 0))
    return sum(largest.values())


_new = tuple.__new__  # as `Entry(...)`, in half the time: a log has many charges


def packed(entry: Entry) -> str:
    """The line that stores an entry, without its id."""
    _, units, bucket, method, job, region, key, kind, of, at, before_units = entry
    if kind == "charge":
        return f"{units}\t{key}\t{bucket}\t{method}\t{job}\t{region}"
    line = f"{_LETTERS[kind]}{units}\t{key}\t{bucket}\t{method}\t{job}\t{region}"
    return line if kind == "marker" else f"{line}\t{of}\t{at[0]}-{at[1]}\t{before_units}"


def unpacked(entry_id: Id, line: str) -> Entry:
    """The entry of a line. Never raises: if it cannot be read, the entry is `unreadable`."""
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
    """The units in a text: from 0 to below 2^53, whoever wrote the line. Raises ValueError."""
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise ValueError(text)
    return int(text)


def id_text(entry_id: Id) -> str:
    """`(1795233255077, 4)` -> `1795233255077-4`."""
    return f"{entry_id[0]}-{entry_id[1]}"


def read_id(text: str) -> Id:
    """The id in a text. Raises ValueError."""
    ms, _, seq = text.partition("-")
    return int(ms), int(seq)


def just_before(at_ms: int) -> Id:
    """An id before every entry of this millisecond."""
    return (at_ms - 1, END[1]) if at_ms > 0 else START


# -- keys --------------------------------------------------------------------------------------------------------------

RESERVED = "~"
"""Ends the key of a charge that is an upper bound, until the true cost is known. Reports use it; no decision does."""

FURTHER = "+"
"""Comes before the number of each further charge of a call that charges several buckets."""


def call_keys(key: str, further: int) -> list[str]:
    """The keys of a call's charges: that of the first, then those of the further charges."""
    return [key, *(f"{key}{FURTHER}{n}" for n in range(1, further + 1))]


def id_of_call(charged_ms: int, key: str, further: int) -> str:
    """The id of a call's charge: `MS-KEY`, with `+N` if the call has N further charges."""
    return f"{charged_ms}-{key}" + (f"{FURTHER}{further}" if further else "")


def ids_of_calls(charges: Sequence[tuple[int, str]]) -> list[str]:
    """For each of these charges, given by time and key, the id of its call."""
    calls = [(charged_ms, key.partition(FURTHER)[0]) for charged_ms, key in charges]
    parts = Counter(key for _, key in calls)
    return [id_of_call(charged_ms, key, parts[key] - 1) for charged_ms, key in calls]


def parts_of_id(name: str) -> tuple[int, str, int]:
    """The time, the key and the number of further charges in an id. The key is empty if the text is no id."""
    parts = re.fullmatch(rf"([0-9]{{1,15}})-([^{FURTHER}]*)([{FURTHER}]([1-9]))?", name)
    return (0, "", 0) if parts is None else (int(parts[1]), parts[2], int(parts[4] or 0))


RUN_CHARS = 8
MACHINE_CHARS = 4


def is_reservation(key: str) -> bool:
    """Whether a key is of a reservation. If the call has several charges, only the first key is."""
    return key.endswith(RESERVED)


def is_first(key: str) -> bool:
    """Whether a key is of the first, or only, charge of its call."""
    return not (key[-2:-1] == FURTHER and key[-1] in "123456789")
