"""What a project spent and was refused, hour by hour, for 35 days: the values, and their text.

The rules are L29 and L30 in docs/ledger-rules.md.

The log is kept as long as limits need it, at least 49 h. When an hour is over, the first to notice adds its charges
up, in one row for each method, job, region and bucket: `KeepsHistory.roll_up`. Together with the log's end, which
nobody has rolled up yet, these rows say what was spent. Refusals are counted in the same way, and the last 100 are kept
as a whole.

No decision reads any of this. `lua/roll_up.lua` and `lua/add_refusals.lua` write the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from quota.ledger.entry import Entry, Id, is_first
from quota.terms.limits import DAY_MS

HISTORY_MS = 35 * DAY_MS
"""How long hours are kept."""

ROLL_UP_AT_ONCE = 100
"""The most charges that `KeepsHistory.roll_up` adds at once, of one hour."""

MAX_CELLS = 200
"""The most rows of an hour, and the most sums of a project. What comes later counts under OTHER."""

OTHER = "(other)"
"""Stands for each name of the row or sum that holds what came after MAX_CELLS."""

MAX_NAME_BYTES = 256
"""Longer names, which no program of ours charges, are cut."""

RUN_CHARS = 8
"""How many characters of an idempotency key name the run that charged."""

MAX_REFUSALS = 100
MAX_REFUSAL_BYTES = 4_000
"""The most refusals of a project that are kept as a whole, and the most bytes of each."""

MAX_COUNTS = 200
"""The most counts that `KeepsHistory.add_refusals` takes at once."""


class HourOfSpending(NamedTuple):
    """What one job charged for one method in one region, in the hour that begins at `hour_ms`; `units` after
    corrections."""

    hour_ms: int
    method: str
    job: str
    region: str
    bucket: str
    charges: int
    units: int


class RunningSum(NamedTuple):
    """All that a job ever charged for a method, since the history began: charges, one for each call, their units as
    they were charged, and the units by which corrections changed them, up or down. None of the three ever falls."""

    method: str
    job: str
    charges: int
    units: int
    corrected_units: int


class RefusalCount(NamedTuple):
    """How many calls of a job were refused for this reason, in the hour that begins at `hour_ms`. `limit` is the limit,
    or the bucket that upstream closed; empty where neither refused."""

    hour_ms: int
    limit: str
    job: str
    reason: str
    calls: int


class RefusedSum(NamedTuple):
    """All calls of a job that were ever refused for this reason, since the history began. It never falls. `limit` as
    in RefusalCount."""

    limit: str
    job: str
    reason: str
    calls: int


class History(NamedTuple):
    """What the ledger has of a project beside its log.

    `rolled_up` is the id of the newest charge that `hours` and `sums` have. They have every charge that is newer than
    `whole_after_ms`, except for the `gap`: after its first time and up to its second, charges may be missing that the
    ledger lost before they were rolled up. `summed_after` is the id up to which the sums were lost with an earlier
    history.
    """

    rolled_up: Id = (0, 0)
    whole_after_ms: int = 0
    gap: tuple[int, int] | None = None
    summed_after: Id = (0, 0)
    hours: tuple[HourOfSpending, ...] = ()
    sums: tuple[RunningSum, ...] = ()
    refused: tuple[RefusalCount, ...] = ()
    refused_sums: tuple[RefusedSum, ...] = ()

    def sums_with(self, end_of_log: Iterable[Entry]) -> tuple[RunningSum, ...]:
        """The sums with the charges that were not rolled up yet: the entries after `rolled_up`, in order."""
        sums = {(one.method, one.job): one for one in self.sums}
        for entry in end_of_log:
            if (entry.ms, entry.seq) <= self.summed_after:
                continue
            key = cut(entry.method), cut(entry.job)
            if key not in sums and len(sums) >= MAX_CELLS:
                key = OTHER, OTHER
            _, _, charges, units, corrected_units = sums.get(key, (*key, 0, 0, 0))
            calls = charges + is_first(entry.idempotency_key)
            sums[key] = RunningSum(*key, calls, units + entry.charged_units, corrected_units)
        return tuple(sums.values())


def cut(name: str) -> str:
    """A name as the history keeps it."""
    return name.encode()[:MAX_NAME_BYTES].decode("utf-8", "replace") if len(name) > MAX_NAME_BYTES // 4 else name


def read_cells(text: str, names: int, numbers: int) -> Iterator[tuple[list[str], list[int]]]:
    """The lines "NAME|NAME NUMBER NUMBER" of an hour, or of the sums. Raises ValueError for what no script writes."""
    for line in text.split("\n") if text else ():
        name, *values = line.split(" ")
        parts = [OTHER] * names if name == "*" else [_unescaped(part) for part in name.split("|")]
        if len(parts) != names or len(values) != numbers:
            raise ValueError(f"{line:.100}")
        counts = [int(value) for value in values]
        if not 0 <= min(counts) <= max(counts) < 2**53:
            raise ValueError(f"{line:.100}: not such a number")
        yield parts, counts


def cells_text(rows: Iterable[tuple[Sequence[str], Sequence[int]]]) -> str:
    """The lines that `read_cells` reads, from names and numbers."""
    lines = []
    for names, numbers in rows:
        name = "*" if all(one == OTHER for one in names) else "|".join(map(_escaped, names))
        lines.append(" ".join([name, *map(str, numbers)]))
    return "\n".join(lines)


def _escaped(part: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in "%| " or c < " " or c == "\x7f" else c for c in part)


def _unescaped(part: str) -> str:
    first, *rest = part.split("%")
    return first + "".join(chr(int(piece[:2], 16)) + piece[2:] for piece in rest)
