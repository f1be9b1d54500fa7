"""What a ledger must answer (L2, L5, L9 to L11 in docs/ledger-rules.md), computed the slow and obvious way.

That is by summing the whole log at every decision.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from quota.common.clock import NEVER
from quota.ledger.contract import CLOCK_BEHIND_MS, CLOCK_SLACK_MS
from quota.terms.limits import Calendar, Limit, Sliding, View

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass
class Spent:
    ms: int
    seq: int
    units: int
    bucket: str
    method: str
    job: str
    known: dict[str, int] = field(default_factory=dict, repr=False)
    """What each view counts of it, once it was asked."""

    @property
    def id(self) -> str:
        return f"{self.ms}-{self.seq}"


@dataclass
class Answer:
    outcome: str
    ids: list[str] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    retry_at_ms: int | None = None


@dataclass
class Draw:
    """One call that the allowance let through. What is corrected after it was repaid stays drawn."""

    number: int
    ms: int
    units: int
    spent: Spent
    repaid: bool = False


class Journal:
    """One machine's allowance: at most so many units in any longest window, whoever draws. What is repaid and older
    than two of the longest is forgotten.
    """

    def __init__(self, most_units: int, allowance_units: int) -> None:
        self.most_units = most_units
        self.allowance_units = allowance_units
        self.draws: list[Draw] = []
        self.numbers = 0
        self.retention_of = 0

    def draw(self, spend: Spent, now_ms: int, longest_ms: int, *, commit: bool) -> tuple[bool, int]:
        """Whether it is admitted, and what is left then."""
        now_ms = max([now_ms, *(draw.ms for draw in self.draws)])
        left_units = self.allowance_units - sum(d.units for d in self.draws if d.ms > now_ms - longest_ms)
        if spend.units > min(left_units, self.most_units):
            return False, 0
        if commit:
            self.numbers = max(self.numbers + 1, now_ms)
            self.draws.append(Draw(self.numbers, now_ms, spend.units, spend))
            self.retention_of = max(self.retention_of, 2 * longest_ms)
            self.draws = [draw for draw in self.draws if draw.ms > now_ms - self.retention_of or not draw.repaid]
            left_units -= spend.units
        return True, left_units

    @property
    def owed(self) -> list[Draw]:
        return [draw for draw in self.draws if not draw.repaid]


class Oracle:
    """One project's log. `answer` is given both clocks, as the ledger and its caller read them."""

    def __init__(self) -> None:
        self.log: list[Spent] = []
        self.newest = (0, 0)
        self.closed: dict[str, int] = {}

    def used(self, view: View, now_ms: int) -> int:
        first = bisect_right(self.log, cutoff(view, now_ms), key=lambda spent: spent.ms)
        return sum(counted(view, spent) for spent in self.log[first:])

    def answer(
        self,
        limits: Sequence[tuple[Limit, int]],
        spends: Sequence[Spent],
        closed_by: Sequence[str],
        ledger_ms: int,
        caller_ms: int,
        *,
        commit: bool,
    ) -> Answer:
        """The right answer for limits given with their caps, unpaced; admitted charges, all or none, are added to the
        log."""
        now_ms = min(ledger_ms, caller_ms + CLOCK_SLACK_MS)
        if not -CLOCK_BEHIND_MS <= caller_ms - ledger_ms <= CLOCK_SLACK_MS:
            return Answer("clock")
        for limit, _ in limits:
            if isinstance(limit.view.window, Calendar):
                edges = limit.view.window.edges(caller_ms)
                if not edges[0] <= now_ms < edges[2]:
                    return Answer("clock")
        limits = [(x, cap) for x, cap in limits if any(counts(x, spend) for spend in spends)]
        used = [self.used(limit.view, now_ms) for limit, _ in limits]
        closed = [self.closed[name] for name in closed_by if self.closed.get(name, 0) > now_ms]
        if closed:
            latest = max(closed)
            ahead_ms = now_ms - caller_ms
            again_ms = None if latest == NEVER else self._retry_at(limits, spends, now_ms, ahead_ms, latest)
            return Answer("exhausted", [], used, again_ms)
        if not self._fits(limits, spends, now_ms, caller_ms):
            return Answer("refused", [], used, self._retry_at(limits, spends, now_ms, now_ms - caller_ms, now_ms))
        if commit:
            for spend in spends:
                self.append(spend, ledger_ms)
            used = [u + cost(limit, spends) for u, (limit, _) in zip(used, limits, strict=True)]
        return Answer("admitted", [spend.id for spend in spends] if commit else [], used)

    def append(self, spend: Spent, ledger_ms: int) -> None:
        """Dated now; ids never go back, whatever the clock does, nor when the log was emptied."""
        newest = self.newest
        spend.ms, spend.seq = (ledger_ms, 0) if ledger_ms > newest[0] else (newest[0], newest[1] + 1)
        self.newest = (spend.ms, spend.seq)
        self.log.append(spend)

    def trim(self, ids: Collection[str], until_ms: int) -> list[Spent]:
        """Drop what a ledger has let go of: all up to `until_ms` but `ids`."""
        gone = [spent for spent in self.log if spent.ms <= until_ms and spent.id not in ids]
        self.log = self.log[len(gone) :]
        return gone

    def _fits(self, limits: Sequence[tuple[Limit, int]], spends: Sequence[Spent], now_ms: int, caller_ms: int) -> bool:
        """A pace goes by the caller's clock: it is the caller who lowers the limit."""
        return all(
            self.used(limit.view, now_ms) + units <= (paced(limit, cap, units, caller_ms) if limit.paced else cap)
            for limit, cap in limits
            for units in (cost(limit, spends),)
        )

    def _retry_at(
        self, limits: Sequence[tuple[Limit, int]], spends: Sequence[Spent], now_ms: int, ahead_ms: int, from_ms: int
    ) -> int:
        """The first moment from `from_ms` on at which everything fits, both clocks going on as they are."""
        latest = from_ms
        for limit, cap in limits:
            if limit.paced:
                continue

            def fits(at_ms: int, one: tuple[Limit, int] = (limit, cap)) -> bool:
                return self._fits([one], spends, at_ms, at_ms)

            if fits(now_ms):
                continue
            window = limit.view.window
            moments: list[int] = []
            if isinstance(window, Sliding):
                moments = sorted({s.ms + window.window_ms for s in self.log if s.ms + window.window_ms > now_ms})
            else:
                edge = now_ms
                while not moments or not fits(moments[-1]):
                    edge = window.edges(edge)[1]
                    moments.append(edge)
            # Usage never rises without a charge, so the first moment that fits can be found by halving.
            low, high = 0, len(moments) - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(moments[middle]) else (middle + 1, high)
            assert fits(moments[low])
            latest = max(latest, moments[low])
        return self._paced_from([x for x in limits if x[0].paced], spends, latest, ahead_ms)

    def _paced_from(
        self, limits: Sequence[tuple[Limit, int]], spends: Sequence[Spent], at_ms: int, ahead_ms: int
    ) -> int:
        """The first moment from `at_ms` on at which all paced limits fit. Between two edges of any of them, by either
        clock, room only grows: if there is any at the end, its beginning is found by halving."""
        while limits:
            end_ms = min(
                edge
                for limit, _ in limits
                if isinstance(limit.view.window, Calendar)
                for edge in (limit.view.window.edges(at_ms)[1], limit.view.window.edges(at_ms - ahead_ms)[1] + ahead_ms)
            )
            if self._fits(limits, spends, end_ms - 1, end_ms - 1 - ahead_ms):
                low, high = at_ms, end_ms - 1
                while low < high:
                    middle = (low + high) // 2
                    if self._fits(limits, spends, middle, middle - ahead_ms):
                        high = middle
                    else:
                        low = middle + 1
                return low
            at_ms = end_ms
        return at_ms


def counts(limit: Limit, spend: Spent) -> bool:
    return limit.view.selector.counts(spend.bucket, spend.method, spend.job)


def cost(limit: Limit, spends: Sequence[Spent]) -> int:
    return sum(counted(limit.view, spend) for spend in spends)


def paced(limit: Limit, cap: int, units: int, caller_ms: int) -> int:
    """An even share of the window, an eighth of the window ahead of time; room for one call where that is less."""
    assert isinstance(limit.view.window, Calendar)
    start_ms, end_ms, _ = limit.view.window.edges(caller_ms)
    eighth_ms = (end_ms - start_ms) // 8
    share = Fraction(caller_ms - start_ms + eighth_ms, end_ms - start_ms)
    return min(cap, max(units, 1, int(cap * share)))


def cutoff(view: View, now_ms: int) -> int:
    """The newest millisecond that no longer counts."""
    if isinstance(view.window, Sliding):
        return now_ms - view.window.window_ms
    return view.window.edges(now_ms)[0] - 1


def counted(view: View, spent: Spent) -> int:
    units = spent.known.get(view.name)
    if units is None:
        selector = view.selector
        selected = selector.counts(spent.bucket, spent.method, spent.job)
        units = spent.known[view.name] = selector.cost(spent.units) if selected else 0
    return units
