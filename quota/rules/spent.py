"""What was charged, folded out of entries: each charge with what it counts now. Pure.

Spent    a charge as people and reports see it
spent    makes them of the log and of the past beside it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quota.rules.entry import Entry, Id
from quota.rules.keys import RUN_CHARS, is_first, is_reservation


class Spent(NamedTuple):
    """One charge. `units` is what it counts now, `charged_units` what it counted when it was made. If it is `settled`,
    somebody has said what it counts, whether that was another number or the same."""

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
        """The run that made it."""
        return self.key[:RUN_CHARS]

    @property
    def is_first(self) -> bool:
        """Whether it is the first charge of its call, or the only one: by these, calls are counted."""
        return is_first(self.key)

    @property
    def reserved_units(self) -> int:
        """What it counts as the upper bound of a cost that nobody has told yet; 0 for any other charge."""
        return self.units if is_reservation(self.key) and not self.settled else 0


def spent(entries: Iterable[Entry]) -> list[Spent]:
    """The charges among entries that stand in order, each with all corrections among them."""
    charges: dict[str, Spent] = {}
    for entry in entries:
        if entry.kind == "charge":
            charges[entry.key] = Spent(
                entry.id, entry.units, entry.units, entry.bucket, entry.method, entry.job, entry.region, entry.key
            )
        elif entry.kind == "correction" and (charge := charges.get(entry.of)) is not None:
            # A charge of the past has the units that it counted last, but its first correction is there, too.
            charged_units = charge.charged_units if charge.settled else entry.before_units
            charges[entry.of] = charge._replace(units=entry.units, charged_units=charged_units, settled=True)
    return [*charges.values()]


def others(entries: Iterable[Entry], now_ms: int) -> Iterator[Entry]:
    """What only upstream has counted, of each name the largest, whose period is not over."""
    largest: dict[str, Entry] = {}
    for entry in entries:
        if entry.kind == "others" and entry.at[1] > now_ms:
            standing = largest.get(entry.of)
            if standing is None or entry.units > standing.units:
                largest[entry.of] = entry
    yield from largest.values()
