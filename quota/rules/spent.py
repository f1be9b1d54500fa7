"""Charges, folded out of entries. Pure.

Spent        a charge with its current units, for people and reports
spent        makes these from the entries of log and past
ChargedSum   all that a job ever charged for a method. It never falls when entries leave the log
Sums         all these sums, and the last entry that they include: a field of the state
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quota.errors import UsageError
from quota.rules.entry import RUN_CHARS, START, Entry, Id, id_text, is_first, is_reservation, read_id
from quota.rules.refusals import MAX_ROWS, OTHER
from quota.terms.arguments import checked


class Spent(NamedTuple):
    """One charge. `units` are its current units, `charged_units` its first units. `settled`: somebody has set its true
    cost, which may be the same number."""

    id: Id
    units: int
    charged_units: int
    bucket: str
    method: str
    job: str
    region: str
    key: str
    settled: bool = False

    @property
    def run(self) -> str:
        """The run that made the charge."""
        return self.key[:RUN_CHARS]

    @property
    def is_first(self) -> bool:
        """Whether it is the first, or only, charge of its call. Their number is the number of calls."""
        return is_first(self.key)

    @property
    def reserved_units(self) -> int:
        """The units of a reservation that is not settled; 0 for any other charge."""
        return self.units if is_reservation(self.key) and not self.settled else 0


def spent(entries: Iterable[Entry]) -> list[Spent]:
    """The charges among ordered entries, each with all its corrections among them."""
    charges: dict[str, Spent] = {}
    for entry in entries:
        if entry.kind == "charge":
            charges[entry.key] = Spent(
                entry.id, entry.units, entry.units, entry.bucket, entry.method, entry.job, entry.region, entry.key
            )
        elif entry.kind == "correction" and (charge := charges.get(entry.of)) is not None:
            charges[entry.of] = charge._replace(units=entry.units, settled=True)
    return [*charges.values()]


def others(entries: Iterable[Entry], now_ms: int) -> Iterator[Entry]:
    """The entries of others whose period is not over: of each name the largest."""
    largest: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind == "others" and entry.period[1] > now_ms:
            standing = largest.get(entry.of)
            if standing is None or entry.units > standing.units:
                largest[entry.of] = entry
    yield from largest.values()


# -- since the beginning -----------------------------------------------------------------------------------------------

SUMS = "charged_sums"
"""The field of the state that holds the sums."""


class ChargedSum(NamedTuple):
    """All that a job ever charged for a method: `charges` (one for each call), their first `units`, and the units by
    which corrections changed them, up or down. None of the three ever falls."""

    method: str
    job: str
    charges: int
    units: int
    corrected_units: int


class Sums:
    """The sums of all entries up to `head`. After MAX_ROWS pairs of method and job, further pairs are summed under
    OTHER."""

    def __init__(self, head: Id = START, sums: Iterable[ChargedSum] = ()) -> None:
        self.head = head
        self._sums = {(charged.method, charged.job): charged for charged in sums}

    @classmethod
    def read(cls, stored: str) -> Sums:
        """The sums in a text. Never raises: a text that cannot be read counts as empty."""
        try:
            head, rows = json.loads(stored)
            return cls(read_id(head), [checked(ChargedSum(*row)) for row in rows])
        except (ValueError, TypeError, AttributeError, RecursionError, UsageError):
            return cls()

    def text(self) -> str:
        return json.dumps([id_text(self.head), self.rows()], separators=(",", ":"))

    def rows(self) -> list[ChargedSum]:
        return [*self._sums.values()]

    def take(self, entry: Entry) -> None:
        """Add the next entry after the head."""
        self.head = entry.id
        if entry.kind == "charge":
            self._add(entry, calls=int(is_first(entry.key)), units=entry.units)
        elif entry.kind == "correction":
            self._add(entry, corrected_units=abs(entry.units - entry.before_units))

    def _add(self, entry: Entry, calls: int = 0, units: int = 0, corrected_units: int = 0) -> None:
        key = entry.method, entry.job
        if key not in self._sums and len(self._sums) >= MAX_ROWS:
            key = OTHER, OTHER
        before = self._sums.get(key) or ChargedSum(*key, charges=0, units=0, corrected_units=0)
        self._sums[key] = before._replace(
            charges=before.charges + calls,
            units=before.units + units,
            corrected_units=before.corrected_units + corrected_units,
        )
