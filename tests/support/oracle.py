"""What a ledger must answer, computed the slow and obvious way: sum the whole log at every question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quota.ledger import CLOCK_SLACK_MS, NEVER
from quota.limits import Calendar, Limit, Sliding, View

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Spent:
    ms: int
    seq: int
    units: int
    bucket: str
    method: str
    job: str

    @property
    def id(self) -> str:
        return f"{self.ms}-{self.seq}"


@dataclass
class Answer:
    outcome: str
    id: str | None = None
    used: list[int] = field(default_factory=list)
    retry_at_ms: int | None = None


class Oracle:
    """One project's log. `answer` is given both clocks, as the ledger and its caller read them."""

    def __init__(self) -> None:
        self.log: list[Spent] = []
        self.closed: dict[str, int] = {}

    def used(self, view: View, now_ms: int) -> int:
        cutoff_ms = cutoff(view, now_ms)
        return sum(counted(view, spent) for spent in self.log if spent.ms > cutoff_ms)

    def answer(
        self,
        limits: Sequence[tuple[Limit, int]],
        spend: Spent,
        closed_by: Sequence[str],
        ledger_ms: int,
        caller_ms: int,
        *,
        commit: bool,
    ) -> Answer:
        """The right answer for limits given with their caps; an admitted charge is added to the log."""
        now_ms = min(ledger_ms, caller_ms + CLOCK_SLACK_MS)
        if caller_ms > ledger_ms + CLOCK_SLACK_MS:
            return Answer("clock")
        for limit, _ in limits:
            if isinstance(limit.view.window, Calendar):
                edges = limit.view.window.edges(caller_ms)
                if not edges[0] <= now_ms < edges[2]:
                    return Answer("clock")
        limits = [(x, cap) for x, cap in limits if x.view.selector.counts(spend.bucket, spend.method, spend.job)]
        used = [self.used(limit.view, now_ms) for limit, _ in limits]
        closed = [self.closed[name] for name in closed_by if self.closed.get(name, 0) > now_ms]
        if closed:
            latest = max(closed)
            return Answer("exhausted", None, used, None if latest == NEVER else latest)
        if not self._fits(limits, spend, now_ms):
            return Answer("refused", None, used, self._retry_at(limits, spend, now_ms))
        if commit:
            newest = max(((s.ms, s.seq) for s in self.log[-1:]), default=(0, 0))
            spend.ms, spend.seq = (ledger_ms, 0) if ledger_ms > newest[0] else (newest[0], newest[1] + 1)
            self.log.append(spend)
            used = [u + counted(limit.view, spend) for u, (limit, _) in zip(used, limits, strict=True)]
        return Answer("admitted", spend.id if commit else None, used)

    def settle(self, charge_id: str, units: int) -> bool:
        for spent in self.log:
            if spent.id == charge_id:
                spent.units = units
                return True
        return False

    def forget(self, before_ms: int) -> None:
        """Drop what no window of the test reaches, only to keep the oracle's sums short."""
        self.log = [spent for spent in self.log if spent.ms >= before_ms]

    def _fits(self, limits: Sequence[tuple[Limit, int]], spend: Spent, now_ms: int) -> bool:
        return all(
            self.used(limit.view, now_ms) + limit.view.selector.cost(spend.units) <= cap for limit, cap in limits
        )

    def _retry_at(self, limits: Sequence[tuple[Limit, int]], spend: Spent, now_ms: int) -> int:
        """The first moment from now on at which everything fits: usage only falls where a charge leaves a window."""
        latest = now_ms
        for limit, cap in limits:

            def fits(at_ms: int, one: tuple[Limit, int] = (limit, cap)) -> bool:
                return self._fits([one], spend, at_ms)

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
        return latest


def cutoff(view: View, now_ms: int) -> int:
    """The newest millisecond that no longer counts."""
    if isinstance(view.window, Sliding):
        return now_ms - view.window.window_ms
    return view.window.edges(now_ms)[0] - 1


def counted(view: View, spent: Spent) -> int:
    selector = view.selector
    return selector.cost(spent.units) if selector.counts(spent.bucket, spent.method, spent.job) else 0
