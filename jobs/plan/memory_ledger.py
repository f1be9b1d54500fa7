"""One project's ledger for a simulation: charges in memory, with a running total for each view. It is a
`quota.ledger.contract.Ledger` without any part beside.

Its clock never goes back, and nobody else writes to it. So a total needs no more than its charges in the order of
their times: what comes is added at one end, and what has left the window is taken off at the other (L5, L8, L9).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from quota.ledger.contract import ChargeRequest, ChargeResult, Exhaustion
from quota.ledger.entry import Charge, Entry, Id, counted
from quota.ledger.grants import Grant, grants_text
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.limits import Sliding, View

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


class MemoryLedger:
    """Charges of one project. `longest_ms` is the longest window of its limits.

    `exhaustions`, `grants` and `unlogged` usage are those with which the simulation begins.
    """

    label = "in memory"
    shared = False

    def __init__(
        self,
        clock: Callable[[], int],
        longest_ms: int,
        exhaustions: Iterable[Exhaustion] = (),
        grants: Sequence[Grant] = (),
        unlogged: Iterable[UnloggedUsage] = (),
    ) -> None:
        self._clock = clock
        self._longest_ms = longest_ms
        self._last: Id = (0, 0)
        self._log: list[Entry] = []
        self._trim_at = KEEP_AT_LEAST
        self._views: dict[View, _Total] = {}
        self._granted = grants_text(grants)
        self._exhaustions = tuple(exhaustions)
        self._unlogged = {(usage.view, usage.epoch): usage for usage in unlogged}
        self._trimmed_ms = 0

    def now_ms(self) -> int:
        return self._clock()

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, request: ChargeRequest, *, commit: bool) -> ChargeResult:
        now_ms = self._clock()
        if request.granted is not None and request.granted != self._granted:  # L28
            return ChargeResult("granted", None, now_ms, self._last, (), granted=self._granted)
        totals = [self._total(check.view) for check in request.checks]
        used = [total.at(now_ms) for total in totals]
        unlogged = tuple(total.usages for total in totals)
        answer = ChargeResult("admitted", None, now_ms, self._last, tuple(used), unlogged=unlogged)
        closed = [x for bucket in request.closed_by for x in self._exhaustions if x.bucket == bucket]
        closed = [x for x in closed if x.until_ms + request.jitter_ms > now_ms]
        if closed:
            return answer._replace(outcome="exhausted", exhaustion=max(closed, key=lambda x: x.until_ms))
        for check, units in zip(request.checks, used, strict=True):  # L9
            if check.cost_units and units + check.cost_units > check.cap_units:
                return answer._replace(outcome="refused")
        if not commit:
            return answer
        first, *also = [self.append(charge) for charge in (request.charge, *request.also)]
        for view, units in {check.view: check.cost_units for check in request.checks}.items():
            self._views[view].add(first.ms, units)
        after = tuple(units + check.cost_units for check, units in zip(request.checks, used, strict=True))
        return answer._replace(id=first.id, last=self._last, used_units=after, also=tuple([entry.id for entry in also]))

    def append(self, charge: Charge) -> Entry:
        """Log a charge, dated now: ids never go back (L10). The caller adds it to the totals that count it: credentials
        of a project have the same limits, so a request names them all."""
        now_ms, (ms, seq) = self._clock(), self._last
        self._last = ms, seq = (now_ms, 0) if now_ms > ms else (ms, seq + 1)
        entry = Entry(ms, seq, charge.units, *charge)
        self._log.append(entry)
        if len(self._log) >= self._trim_at:
            self._trimmed_ms = now_ms - self._longest_ms
            del self._log[: bisect_right(self._log, self._trimmed_ms, key=lambda entry: entry.ms)]
            self._trim_at = max(KEEP_AT_LEAST, 2 * len(self._log))
        return entry

    def _total(self, view: View) -> _Total:
        total = self._views.get(view)
        if total is None:
            usages = (usage for (name, _), usage in self._unlogged.items() if name == view.name)
            total = self._views[view] = _Total(view, usages)
            for entry in self._log:
                total.add(entry.ms, counted(view.selector, entry))
        return total

    def read(self, project: str, after: Id, until_ms: int, count: int, within_s: float | None = None) -> list[Entry]:
        first = bisect_right(self._log, after, key=lambda entry: (entry.ms, entry.seq))
        return [entry for entry in self._log[first : first + count] if entry.ms <= until_ms]

    def whole_after_ms(self, project: str) -> int:
        return self._trimmed_ms

    def close(self) -> None:
        pass
