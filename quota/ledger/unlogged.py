"""Usage that counts though the log lacks it: how it is merged and how it expires. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import LATEST_MS, NEVER

if TYPE_CHECKING:
    from quota.ledger.entry import Id


Parts = tuple[tuple[int, int], ...]
"""Units, each with the time in ms until which they count, soonest first."""


class Carry(NamedTuple):
    """What a view counted of charges that the ledger has lost: that much more, part by part, and at least one.

    `epoch` names the ledger as it was before that loss. Several machines report the same loss, each what it had seen
    after `since_ms`, up to the entry `last`: of two reports, the one that goes further holds all of the other. Of what
    came after `kept_since_ms` the ledger still had `kept_units` when it was asked.
    """

    view: str
    epoch: str
    parts: Parts
    last: Id
    kept_units: int = 0
    kept_since_ms: int = 0
    since_ms: int = NEVER

    @property
    def until_ms(self) -> int:
        """When nothing of it counts any more."""
        return self.parts[-1][1]

    def units_at(self, now_ms: int) -> int:
        return units_at(self.parts, now_ms)

    def words(self) -> tuple[str, str, str, str]:
        """How Redis and the slots of a machine's file have it, beside its view; `from_words` reads that."""
        kept = f"{self.kept_units}:{self.kept_since_ms}:{self.since_ms}"
        return self.epoch, parts_text(self.parts), kept, f"{self.last[0]}-{self.last[1]}"

    @classmethod
    def from_words(cls, view: str, epoch: str, parts: str, kept: str, last: str) -> Carry:
        """Raises ValueError for what `words` never made."""
        ms, seq = last.split("-")
        kept_units, kept_since_ms, since_ms = map(int, kept.split(":"))
        return cls(view, epoch, read_parts(parts), (int(ms), int(seq)), kept_units, kept_since_ms, since_ms)

    def with_report(self, other: Carry, now_ms: int) -> Carry:
        """With another report of the same loss: if that goes further or holds more, at every moment the larger of both.

        What the ledger still had, or had again, by one of them and not by the other, fell to a later loss, and is
        carried for that one.
        """
        kept = max((self.kept_units, self.kept_since_ms), (other.kept_units, other.kept_since_ms))
        ours, theirs = self._less_kept(*kept), other._less_kept(*kept)
        if ours == self.parts and other.last <= self.last and units_at(theirs, now_ms) <= units_at(ours, now_ms):
            return self
        parts: list[tuple[int, int]] = []
        counted = 0
        for until_ms in sorted({until_ms for _, until_ms in ours + theirs}, reverse=True):
            units = max(units_at(ours, until_ms - 1), units_at(theirs, until_ms - 1))
            if units > counted:
                parts.append((units - counted, until_ms))
                counted = units
        last, since_ms = max(self.last, other.last), max(self.since_ms, other.since_ms)
        return Carry(self.view, self.epoch, tuple(reversed(parts)) or ((0, self.until_ms),), last, *kept, since_ms)

    def _less_kept(self, units: int, since_ms: int) -> Parts:
        """Without what the ledger had kept of it by another's report, if it surely holds that."""
        more = units - self.kept_units
        if more <= 0 or self.since_ms > since_ms:
            return self.parts
        return newest_parts(self.parts, sum(units for units, _ in self.parts) - more)


def units_at(parts: Parts, now_ms: int) -> int:
    return sum(units for units, until_ms in parts if until_ms > now_ms)


def newest_parts(parts: Parts, units: int) -> Parts:
    """So many of the units: those that count longest."""
    found: list[tuple[int, int]] = []
    for there, until_ms in reversed(parts):
        if units <= 0:
            break
        found.append((min(there, units), until_ms))
        units -= there
    return tuple(reversed(found))


def parts_text(parts: Parts) -> str:
    """As both ledgers store them: `UNITS:UNTIL_MS,UNITS:UNTIL_MS`."""
    return ",".join([f"{units}:{until_ms}" for units, until_ms in parts])


def read_parts(text: str) -> Parts:
    """Parts from their text. Raises ValueError for what `parts_text` never made."""
    pairs = [part.split(":") for part in text.split(",")]
    parts = tuple((int(units), int(until_ms)) for units, until_ms in pairs)
    untils_ms = [until_ms for _, until_ms in parts]
    if min(units for units, _ in parts) < 0 or untils_ms != sorted(untils_ms) or not 0 <= untils_ms[-1] < LATEST_MS:
        raise ValueError(f"{text!r:.100} is not what is carried")
    return parts
