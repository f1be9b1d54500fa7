"""What the log holds: one entry for each admitted charge (L1 in docs/ledger-rules.md)."""

from __future__ import annotations

from typing import NamedTuple

from quota.terms.attribution import is_reservation
from quota.terms.limits import Selector

DEFAULT_BUCKET = "units"
"""The bucket that a stored charge means when it names none."""


class Charge(NamedTuple):
    """What is to be charged. `idempotency_key` is unique to this attempt: by it, a retry finds the charge of its first
    try (L16)."""

    units: int
    bucket: str
    method: str
    job: str
    region: str
    idempotency_key: str


FURTHER = "+"
"""Stands in the idempotency key of a call's further charges, where one call is charged to several buckets: the first
one's key, this, and a digit from 1 to 9."""


def is_first(idempotency_key: str) -> bool:
    """Whether a charge is the first of its call, or the only one: by these, calls are counted (L29)."""
    return not (idempotency_key[-2:-1] == FURTHER and idempotency_key[-1] in "123456789")


Id = tuple[int, int]
"""An entry's id in the log: its time in ms, then its number within that millisecond."""


class Entry(NamedTuple):
    """One charge in the log. `units` is what it counts now, `charged_units` what it counted when it was made. If it is
    `settled`, somebody has said what it counts, whether that was another number or the same (L15)."""

    ms: int
    seq: int
    units: int
    charged_units: int
    bucket: str
    method: str
    job: str
    region: str
    idempotency_key: str
    settled: bool = False

    @property
    def id(self) -> str:
        return f"{self.ms}-{self.seq}"

    @property
    def reserved_units(self) -> int:
        """What it counts as the upper bound of a cost that nobody has told yet; 0 for any other charge."""
        return self.units if is_reservation(self.idempotency_key) and not self.settled else 0


def counted(selector: Selector, entry: Entry) -> int:
    """What a limit with this selector counts of one entry (L2)."""
    return selector.cost(entry.units) if selector.counts(entry.bucket, entry.method, entry.job) else 0
