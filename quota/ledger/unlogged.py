"""Usage that counts though the log lacks it: how it is merged and how it expires. Pure. L17 in docs/ledger-rules.md."""

from __future__ import annotations

from typing import NamedTuple

from quota.common.clock import LATEST_MS, NEVER
from quota.ledger.entry import Id

Expiries = tuple[tuple[int, int], ...]
"""Units, each with the time in ms until which they count, soonest first."""


CARRIED = "/*"
"""Ends the epoch of a carry, as in `ROOT/*`."""


def carry_epoch(epoch: str) -> str:
    """The epoch under which a ledger counts what was seen of another log while that was in this epoch."""
    return f"{epoch}{CARRIED}"


def is_carry(epoch: str) -> bool:
    """Whether usage of this epoch was seen in another log, and not lost by this one."""
    return epoch.endswith(CARRIED)


UPSTREAM = "@upstream/"
"""Begins the epoch of what only upstream counted: a carry from no log of ours. No log's root begins so, because an
idempotency key holds no `@`."""


def upstream_epoch(bucket: str, since_ms: int) -> str:
    """The epoch under which a ledger counts what upstream alone counted of a bucket in its period from `since_ms` on.
    Reports of one period merge; those of several periods and buckets add up."""
    return carry_epoch(f"{UPSTREAM}{bucket}/{since_ms}")


class UnloggedUsage(NamedTuple):
    """One report of a loss: what a view counted of charges that the ledger no longer has. At least one pair in
    `expiries`.

    `epoch` names the ledger as it was before that loss. Several machines report the same loss, each what it saw after
    `since_ms`, up to the entry `last`: of two reports, the one that goes further holds all of the other. `logged_units`
    of what it saw are not in the report, because the log still had them.

    Of what came after `kept_since_ms` and until `kept_last_ms`, the ledger still had `kept_units` in the window at the
    time of the report. A later loss is reported with these; so another report of this loss need not hold them.

    With an epoch `ROOT/*` it is a *carry*: what a view counted of another log, before the ledger was moved or emptied.
    Of two carries the larger counts, at every moment.
    """

    view: str
    epoch: str
    expiries: Expiries
    last: Id
    kept_units: int = 0
    kept_since_ms: int = 0
    kept_last_ms: int = 0
    logged_units: int = 0
    since_ms: int = NEVER

    @property
    def until_ms(self) -> int:
        """When nothing of it counts any more."""
        return self.expiries[-1][1]

    @property
    def kept(self) -> tuple[int, int, int, int, int]:
        """What a ledger stores of the report beside its expiries and its last entry."""
        return self[4:]

    def units_at(self, now_ms: int) -> int:
        return units_at(self.expiries, now_ms)

    def until(self, latest_ms: int) -> UnloggedUsage:
        """The same, with nothing that counts for longer than until `latest_ms`."""
        if self.until_ms <= latest_ms:
            return self
        return self._replace(expiries=tuple((units, min(until_ms, latest_ms)) for units, until_ms in self.expiries))

    def fields(self) -> tuple[str, str, str, str]:
        """As Redis and a machine's watermark file store it, beside the view's name; `from_fields` reads this."""
        kept = ":".join(map(str, self.kept))
        return self.epoch, expiries_text(self.expiries), kept, f"{self.last[0]}-{self.last[1]}"

    @classmethod
    def from_fields(cls, view: str, epoch: str, expiries: str, kept: str, last: str) -> UnloggedUsage:
        """Raises ValueError for fields that `fields` never makes."""
        ms, seq = last.split("-")
        units, since_ms, last_ms, logged_units, seen_since_ms = map(int, kept.split(":"))
        numbers = (units, since_ms, last_ms, logged_units, seen_since_ms)
        at = int(ms), int(seq)
        if not 0 <= min(*numbers, *at) <= max(*numbers, *at) <= NEVER:
            raise ValueError("less than nothing, or more than can be counted")
        return cls(view, epoch, read_expiries(expiries), at, *numbers)

    def with_report(self, other: UnloggedUsage, now_ms: int) -> UnloggedUsage:
        """Merged with another report of the same loss: if that goes further or holds more, at every moment the larger
        of both counts.

        If one report says that the ledger still had units, or had them again, and the other does not, these fell to a
        later loss and are counted in the report of that one.
        """
        kept = max(self.kept[:3], other.kept[:3])
        ours, theirs = self._less_kept(*kept), other._less_kept(*kept)
        no_more = (
            ours.expiries == self.expiries
            and other.last <= self.last
            and theirs.units_at(now_ms) <= ours.units_at(now_ms)
        )
        if no_more and not is_carry(self.epoch):
            return self
        last, since_ms = max(self.last, other.last), max(self.since_ms, other.since_ms)
        expiries = larger(ours.expiries, theirs.expiries) or ((0, self.until_ms),)
        logged_units = max(ours.logged_units, theirs.logged_units)
        return UnloggedUsage(self.view, self.epoch, expiries, last, *kept, logged_units, since_ms)

    def _less_kept(self, units: int, since_ms: int, last_ms: int) -> UnloggedUsage:
        """Without what the ledger still had of it by another report, if this report surely holds that."""
        more = units - self.logged_units
        if more <= 0 or self.since_ms > since_ms or self.last[0] < last_ms:
            return self
        expiries = newest_expiries(self.expiries, sum(units for units, _ in self.expiries) - more)
        return self._replace(expiries=expiries, logged_units=units)


def units_at(expiries: Expiries, now_ms: int) -> int:
    return sum(units for units, until_ms in expiries if until_ms > now_ms)


def larger(a: Expiries, b: Expiries) -> Expiries:
    """At every moment the larger of both."""
    expiries: list[tuple[int, int]] = []
    counted = 0
    for until_ms in sorted({until_ms for _, until_ms in a + b}, reverse=True):
        units = max(units_at(a, until_ms - 1), units_at(b, until_ms - 1))
        if units > counted:
            expiries.append((units - counted, until_ms))
            counted = units
    return tuple(reversed(expiries))


def covers(ours: Expiries, theirs: Expiries, now_ms: int) -> bool:
    """Whether `ours` counts as much as `theirs`, now and at every later moment."""
    return all(
        units_at(ours, until_ms - 1) >= units_at(theirs, until_ms - 1) for _, until_ms in theirs if until_ms > now_ms
    )


def newest_expiries(expiries: Expiries, units: int) -> Expiries:
    """Of these, as many units as given: those that count longest."""
    found: list[tuple[int, int]] = []
    for there, until_ms in reversed(expiries):
        if units <= 0:
            break
        found.append((min(there, units), until_ms))
        units -= there
    return tuple(reversed(found))


def expiries_text(expiries: Expiries) -> str:
    """As both ledgers store them: `UNITS:UNTIL_MS,UNITS:UNTIL_MS`."""
    return ",".join([f"{units}:{until_ms}" for units, until_ms in expiries])


def read_expiries(text: str) -> Expiries:
    """The expiries in a text. Raises ValueError for a text that `expiries_text` never makes."""
    pairs = [part.split(":") for part in text.split(",")]
    expiries = tuple((int(units), int(until_ms)) for units, until_ms in pairs)
    untils_ms = [until_ms for _, until_ms in expiries]
    units = [units for units, _ in expiries]
    if min(units) < 0 or sum(units) > NEVER or untils_ms != sorted(untils_ms) or not 0 <= untils_ms[-1] < LATEST_MS:
        raise ValueError(f"{text!r:.100} is no unlogged usage")
    return expiries
