"""One project's ledger for a simulation: charges in memory, with a running total for each view.

    MemoryLedger    as much of `quota.ledger.contract.Ledger` as a budget needs to charge
    Room            some calls that were admitted once, ready to be charged again many times at once

Its clock never goes back, and nobody else writes to it. So a total needs no more than its charges in the order of
their times: what comes is added at one end, and what has left the window is taken off at the other (L5, L8, L9).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from quota.common.clock import NEVER
from quota.ledger.contract import ChargeResult
from quota.ledger.entry import Entry
from quota.ledger.grants import grants_text
from quota.terms.limits import Sliding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from quota.ledger.contract import ChargeRequest, Exhaustion
    from quota.ledger.entry import Charge, Id
    from quota.ledger.grants import Grant
    from quota.ledger.unlogged import UnloggedUsage
    from quota.terms.limits import View

KEEP_AT_LEAST = 10_000
"""The log is trimmed when it has twice the charges that it had after the last time, but at least these."""


class _Total:
    """What a view counts. `parts` are what it counts of each ms, oldest first."""

    __slots__ = ("cutoff_ms", "edge_ms", "parts", "units", "usages", "window")

    def __init__(self, view: View, usages: Iterable[UnloggedUsage]) -> None:
        self.window = view.window
        self.usages = tuple(usages)
        self.parts: deque[list[int]] = deque()
        self.units = 0
        self.cutoff_ms = self.edge_ms = 0

    def at(self, now_ms: int) -> int:
        """What it counts now. Charges at or before the cutoff are out of the window (L5)."""
        window = self.window
        if type(window) is Sliding:
            self.cutoff_ms = now_ms - window.window_ms
        elif now_ms >= self.edge_ms:
            since_ms, self.edge_ms, _ = window.edges(now_ms)  # type: ignore[union-attr]
            self.cutoff_ms = since_ms - 1
        parts = self.parts
        while parts and parts[0][0] <= self.cutoff_ms:
            self.units -= parts.popleft()[1]
        return self.units + sum(usage.units_at(now_ms) for usage in self.usages) if self.usages else self.units

    def add(self, ms: int, units: int) -> None:
        self.units += units
        if self.parts and self.parts[-1][0] == ms:
            self.parts[-1][1] += units
        else:
            self.parts.append([ms, units])


class _Logged(NamedTuple):
    """A number of equal charges of one ms, numbered from `seq`."""

    ms: int
    seq: int
    times: int
    charge: Charge

    @property
    def last(self) -> Id:
        return self.ms, self.seq + self.times - 1


class Room(NamedTuple):
    """Calls that belong together, each with how often it is made. Until `until_ms` no limit of theirs holds less than
    `needs` says: the total of each, what these calls add to it, and what it holds."""

    until_ms: int
    calls: tuple[tuple[Charge, int], ...]
    needs: tuple[tuple[_Total, int, int], ...]


class MemoryLedger:
    """Charges of one project. `longest_ms` is the longest window of its limits."""

    label = "in memory"

    def __init__(self, clock: Callable[[], int], longest_ms: int) -> None:
        self._clock = clock
        self._longest_ms = longest_ms
        self._last: Id = (0, 0)
        self._log: list[_Logged] = []
        self.admitted: ChargeRequest | None = None
        """The last request that was admitted and charged."""
        self._trim_at = KEEP_AT_LEAST
        self._views: dict[View, _Total] = {}
        self._granted = ""
        self._grants: Sequence[Grant] = ()
        self._exhaustions: dict[str, Exhaustion] = {}
        self._unlogged: dict[tuple[str, str], UnloggedUsage] = {}

    # -- where a simulation begins -----------------------------------------------------------------------------------

    def exhaust(self, exhaustions: Iterable[Exhaustion]) -> None:
        self._exhaustions = {x.bucket: x for x in sorted(exhaustions)}

    def grant(self, grants: Sequence[Grant]) -> None:
        self._granted, self._grants = grants_text(grants), grants

    def add_unlogged(self, usages: Iterable[UnloggedUsage]) -> None:
        self._unlogged = {(usage.view, usage.epoch): usage for usage in usages}

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        now_ms = self._clock()
        if request.granted is not None and request.granted != self._granted:  # L28
            return ChargeResult("granted", None, now_ms, self._last, (), granted=self._granted)
        totals = [self._total(check.view) for check in request.checks]
        used = [total.at(now_ms) for total in totals]
        unlogged = tuple(total.usages for total in totals)
        closed = [x for x in self._exhaustions.values() if x.bucket in request.closed_by]
        closed = [x for x in closed if x.until_ms + request.jitter_ms > now_ms]
        if closed:
            longest = max(closed, key=lambda x: x.until_ms)
            return ChargeResult("exhausted", None, now_ms, self._last, tuple(used), longest, unlogged=unlogged)
        for check, units in zip(request.checks, used, strict=True):  # L9
            if check.cost_units and units + check.cost_units > check.cap_units:
                return ChargeResult("refused", None, now_ms, self._last, tuple(used), unlogged=unlogged)
        if not commit:
            return ChargeResult("admitted", None, now_ms, self._last, tuple(used), unlogged=unlogged)
        self.append(request.charge, 1)
        ms, seq = self._last
        for view, units in {check.view: check.cost_units for check in request.checks}.items():
            self._views[view].add(ms, units)
        self.admitted = request
        after = tuple(units + check.cost_units for check, units in zip(request.checks, used, strict=True))
        return ChargeResult("admitted", f"{ms}-{seq}", now_ms, self._last, after, unlogged=unlogged)

    def room(self, requests: Iterable[tuple[ChargeRequest, int]]) -> Room:
        """Calls that were all admitted now or before, each with how often it is made, to be charged together.

        What closed a bucket when the simulation began has ended by then. A pace gives out more with time, until its
        window ends, so what a limit held then it holds until that edge at least.
        """
        requests, now_ms = tuple(requests), self._clock()
        until_ms = min((grant.until_ms for grant in self._grants if grant.until_ms > now_ms), default=NEVER)
        needs: dict[View, int] = {}
        caps: dict[View, int] = {}
        for request, times in requests:
            for view, units in {check.view: check.cost_units for check in request.checks}.items():
                needs[view] = needs.get(view, 0) + units * times
            for check in request.checks:
                caps[check.view] = min(caps.get(check.view, check.cap_units), check.cap_units)
                until_ms = until_ms if check.edges is None else min(until_ms, check.edges[1])
        calls = tuple((request.charge, times) for request, times in requests)
        return Room(until_ms, calls, tuple((self._total(view), units, caps[view]) for view, units in needs.items()))

    def charge_all(self, room: Room, times: int) -> bool:
        """Charge all these calls `times` over, if that is sure to be admitted call by call, in any order. If it is
        not sure, nothing is charged."""
        now_ms = self._clock()
        if now_ms >= room.until_ms:
            return False
        for total, units, cap_units in room.needs:
            if total.at(now_ms) + units * times > cap_units:
                return False
        for charge, of_each in room.calls:
            self.append(charge, of_each * times)
        for total, units, _ in room.needs:
            total.add(self._last[0], units * times)
        return True

    def append(self, charge: Charge, times: int) -> None:
        """Log a charge `times` over, dated now: ids never go back (L10). The caller adds it to the totals that count
        it: credentials of a project have the same limits, so a request names them all."""
        now_ms, (ms, seq) = self._clock(), self._last
        ms, seq = (now_ms, 0) if now_ms > ms else (ms, seq + 1)
        self._last = (ms, seq + times - 1)
        self._log.append(_Logged(ms, seq, times, charge))
        if len(self._log) >= self._trim_at:
            del self._log[: bisect_right(self._log, now_ms - self._longest_ms, key=lambda logged: logged.ms)]
            self._trim_at = max(KEEP_AT_LEAST, 2 * len(self._log))

    def _total(self, view: View) -> _Total:
        total = self._views.get(view)
        if total is None:
            usages = (usage for (name, _), usage in self._unlogged.items() if name == view.name)
            total = self._views[view] = _Total(view, usages)
            for logged in self._log:
                total.add(logged.ms, _counted(view, logged.charge) * logged.times)
        return total

    def read(self, project: str, after: Id, until_ms: int, count: int) -> list[Entry]:
        """The entries after an id, as `Ledger.read` gives them."""
        entries: list[Entry] = []
        for index in range(bisect_right(self._log, after, key=lambda logged: logged.last), len(self._log)):
            ms, first, times, charge = self._log[index]
            if ms > until_ms:
                break
            missing = range(max(first, after[1] + 1 if ms == after[0] else 0), first + times)
            entries += [Entry(ms, seq, charge.units, *charge) for seq in missing[: count - len(entries)]]
            if len(entries) == count:
                break
        return entries


def _counted(view: View, charge: Charge) -> int:
    """What a view counts of one charge (L2)."""
    selector = view.selector
    return selector.cost(charge.units) if selector.counts(charge.bucket, charge.method, charge.job) else 0
