"""What a decision is asked, what it sees, and what it answers. Pure.

Question    what a decision goes by: the limits, what the calls add to them, the charges
Look        what a decision sees at one moment
Outcome     the answer, with the numbers of one moment
Others      units that only upstream has counted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quota.ledger.log import ANY, Room
from quota.rules.calls import NO_CAP
from quota.rules.entry import Entry, Id
from quota.rules.facts import Exhaustion, Facts
from quota.rules.reading import Mark
from quota.terms.limits import View


class Question(NamedTuple):
    """What a decision goes by.

    `views` are those of the limits that count the calls, `costs` what the calls add to each, and `caps` says what each
    may hold at a time, by the facts. `closed_by` are the buckets whose exhaustion closes the calls. `charges` have no
    ids yet; their keys are unique to this attempt. A peek has none.
    """

    views: Sequence[View]
    costs: Sequence[int]
    caps: Callable[[Facts, int], Sequence[int]]
    closed_by: Sequence[str] = ()
    charges: Sequence[Entry] = ()


class Outcome(NamedTuple):
    """What was decided at `now_ms`, by which windows end.

    `reason` is "ok", "limit" (a limit has no room), "exhausted" (`closing` says which bucket upstream has closed),
    "clock" (the ledger's clock, `clock_ms`, and this machine's disagree) or "counting" (a total has far to read;
    nothing was compared). `used_units` are those of each view, with the charges that were made, and `caps` what each
    may hold. `first` is the id of the first charge; those of the others follow it.
    """

    reason: str
    now_ms: int
    clock_ms: int
    used_units: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    closing: Exhaustion | None = None
    first: Id | None = None
    facts: Facts | None = None

    @property
    def admitted(self) -> bool:
        return self.reason == "ok"


class Others(NamedTuple):
    """Units that only upstream has counted: under which name they were heard of, and until when they count."""

    name: str
    units: int
    until_ms: int


class Look(NamedTuple):
    """What a decision sees at one moment."""

    mark: Mark
    now_ms: int
    used_units: list[int]
    caps: tuple[int, ...]
    closing: Exhaustion | None
    facts: Facts

    def room(self, costs: Sequence[int]) -> int:
        """How many units others may take meanwhile without changing what follows; below 0: the calls do not fit."""
        each = zip(self.caps, self.used_units, costs, strict=True)
        return min([cap - used - cost for cap, used, cost in each if cost], default=ANY - 1)

    def rooms(self, views: Sequence[View], costs: Sequence[int]) -> list[Room]:
        """The same of each limit by itself."""
        each = zip(views, self.caps, self.used_units, costs, strict=True)
        return [Room(view.selector, cap - used - cost) for view, cap, used, cost in each if cost and cap < NO_CAP]
