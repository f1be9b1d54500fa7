"""The values of a decision. Pure.

Question    the limits, the costs of the calls in each, and the charges
Outcome     the answer, with the numbers that were compared
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quota.ledger.log import ANY, Room
from quota.rules.entry import START, Entry, Id
from quota.rules.facts import Exhaustion, Facts
from quota.rules.reading import Mark
from quota.terms.limits import View


class Question(NamedTuple):
    """The question of a decision.

    `views` are the views of the limits that count the calls; `costs` has what the calls add to each, and `caps` returns
    the most that each may hold, by the facts and the time. `closed_by` has the buckets whose exhaustion closes the
    calls. `charges` have no ids yet; their keys are unique to this attempt. A peek has no charges.
    """

    views: Sequence[View]
    costs: Sequence[int]
    caps: Callable[[Facts, int], tuple[int, ...]]
    closed_by: Sequence[str] = ()
    charges: Sequence[Entry] = ()

    def room(self, caps: Sequence[int], used_units: Sequence[int]) -> int:
        """How many units others may take meanwhile without changing the decision; below 0: the calls do not fit."""
        each = zip(caps, used_units, self.costs, strict=True)
        return min([cap - used - cost for cap, used, cost in each if cost], default=ANY - 1)

    def rooms(self, caps: Sequence[int], used_units: Sequence[int]) -> list[Room]:
        """The room of each limit."""
        each = zip(self.views, caps, used_units, self.costs, strict=True)
        return [Room(view.selector, cap - used - cost) for view, cap, used, cost in each]


class Outcome(NamedTuple):
    """The outcome of a decision. Its windows end at `now_ms`.

    `reason` is "ok", "limit" (a limit has no room), "exhausted" (upstream has closed a bucket: `closing`), "clock" (the
    ledger's clock, `clock_ms`, and this machine's disagree) or "counting" (a total has many entries to read; nothing
    was compared). `used_units` has the units of each view, with the new charges, and `caps` the most that each may
    hold. `first` is the id of the first charge; the other ids follow it. The log was read up to `mark`, and others may
    take `room` units meanwhile.
    """

    reason: str
    now_ms: int
    used_units: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    closing: Exhaustion | None = None
    facts: Facts = Facts()
    first: Id | None = None
    clock_ms: int = 0
    mark: Mark = Mark("", START)
    room: int = 0
