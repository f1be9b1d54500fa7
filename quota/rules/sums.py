"""What was ever charged, by method and job: sums that never fall, whatever leaves the log. Pure.

ChargedSum   the charges of a job for a method
Sums         all of them, and up to which entry they are summed: a field of the state
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from quota.errors import UsageError
from quota.rules.entry import START, Entry, Id, id_text, read_id
from quota.rules.keys import is_first
from quota.rules.refusals import MAX_ROWS, OTHER
from quota.terms.arguments import MAX_NUMBER, text, whole

SUMS = "charged_sums"
"""The field of the state that holds them."""


class ChargedSum(NamedTuple):
    """All that a job ever charged for a method: charges, one for each call, their units as they were charged, and the
    units by which corrections changed them, up or down. None of the three ever falls."""

    method: str
    job: str
    charges: int
    units: int
    corrected_units: int


class Sums:
    """The sums of all entries up to `head`. Of more than MAX_ROWS methods and jobs the later ones are summed under
    OTHER."""

    def __init__(self, head: Id = START, sums: Iterable[ChargedSum] = ()) -> None:
        self.head = head
        self._sums = {(charged.method, charged.job): charged for charged in sums}

    @classmethod
    def read(cls, stored: str) -> Sums:
        """The sums in a text. Never raises: what nobody can read is begun anew."""
        try:
            head, rows = json.loads(stored)
            return cls(read_id(head), [_checked(*row) for row in rows])
        except (ValueError, TypeError, AttributeError, RecursionError, UsageError):
            return cls()

    def text(self) -> str:
        return json.dumps([id_text(self.head), self.rows()], separators=(",", ":"))

    def rows(self) -> list[ChargedSum]:
        return [*self._sums.values()]

    def take(self, entry: Entry) -> None:
        """Add the entry that stands behind the head."""
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


def _checked(method: object, job: object, charges: object, units: object, corrected_units: object) -> ChargedSum:
    return ChargedSum(
        method=text(method, "method"),
        job=text(job, "job"),
        charges=whole(charges, "charges", 0, MAX_NUMBER),
        units=whole(units, "units", 0, MAX_NUMBER),
        corrected_units=whole(corrected_units, "units", 0, MAX_NUMBER),
    )
