"""The changes of the configuration that would have admitted a refused call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from quota.budget import Budget, project_of
from quota.common.text import one_line
from quota.reports.spending import KeptRefusal
from quota.rules.calls import cap
from quota.session import Session
from quota.terms.arguments import machine_name
from quota.terms.costs import CostBook
from quota.terms.limits import MAX_UNITS, Limit


class Setting(NamedTuple):
    """One setting of a change: the number of a `limit`, what the job leaves of it (`leave`), its `pace` (0: none), the
    `price` of the method, a reopened bucket (`reopen`), or the allowance's `max_cost` and `allowance`.

    `upstream_units` is upstream's grant in such a window or a longer one; 0: not known.
    """

    kind: Literal["limit", "leave", "pace", "price", "reopen", "max_cost", "allowance"]
    name: str
    units: int
    was_units: int
    upstream_units: int = 0


Change = tuple[Setting, ...]
"""Settings that together would have admitted the call."""


def closed_by_upstream(kept: KeptRefusal) -> bool:
    """Whether upstream closed a bucket. The reason is "closed" also for a limit, if upstream grants less than the call
    needs."""
    too_little = any(state.name == kept.refused_by and state.cost_units > state.limit_units for state in kept.limits)
    return kept.reason == "exhausted" or (kept.reason == "closed" and not too_little)


class _Met(NamedTuple):
    """A limit at the refusal: the call's cost, the use at `at_ms`, and what the job left to others."""

    limit: Limit
    cost_units: int
    leave_units: int
    used_units: int
    granted: Mapping[str, int]
    at_ms: int

    @property
    def fits(self) -> bool:
        """Whether the call fits, as a decision compares it."""
        cap_units = cap(self.limit, self.leave_units, self.cost_units, self.at_ms, self.granted)
        return self.limit.shadow or self.used_units + self.cost_units <= cap_units

    def costing(self, units: int) -> _Met:
        """The same for a call of this many units."""
        return self._replace(cost_units=self.limit.view.selector.cost(units))

    def changed(self, **terms: object) -> _Met:
        """The same with other terms of the limit."""
        return self._replace(limit=replace(self.limit, **terms))  # type: ignore[arg-type]  # the fields of a Limit


def changes_that_admit(session: Session, budget: Budget, kept: KeptRefusal) -> tuple[tuple[Change, ...], bool]:
    """The changes that would each have admitted the call alone; and whether today's configuration would have.

    Each change is the smallest of its kind. A search tries values with the comparison of a decision, the numbers of the
    refusal, and upstream's grants of today.
    """
    if kept.reason == "ledger-unavailable":
        return _allowances(session, budget, kept), False
    if kept.reason in ("clock", "counting") or kept.limits_left_out:
        return (), False
    limits = {limit.name: limit for limit in budget.limits_of(kept.job)}
    if not closed_by_upstream(kept) and kept.refused_by not in limits:
        return (), True
    leaves, granted = budget.checklists.leaves_of(kept.job), budget.answers.believed_now().units
    each = [
        _Met(limits[state.name], state.cost_units, leaves.get(state.name, 0), state.used_units, granted, kept.at_ms)
        for state in kept.limits
        if state.name in limits
    ]
    price = budget.book.at(kept.at_ms).methods.get(kept.method)
    of_one_bucket = kept.calls == 1 and (price is None or len(price[0].parts) == 1)
    if of_one_bucket:
        each = [met.costing(kept.cost_units) for met in each]
    full = [met for met in each if not met.fits]
    reopen: Change = ()
    if closed_by_upstream(kept):
        reopen = (Setting("reopen", kept.refused_by or "", 0, 0),)
        if not full:
            return (reopen,), False
    elif not full:
        return (), True
    changes = [
        _each(_number(budget.book, met) for met in full),
        _each(map(_less_left, full)),
        _each(map(_unpaced, full)),
    ]
    if of_one_bucket:  # of several calls the prices are not known
        changes.append(_each([_cheaper(each, kept.method, kept.cost_units)]))
    return tuple((*reopen, *change) for change in changes if change), False


def _each(settings: Iterable[Setting | None]) -> Change:
    """All settings together; none if one of them is impossible."""
    each = list(settings)
    change = tuple([setting for setting in each if setting is not None])
    return change if len(change) == len(each) else ()


def _number(book: CostBook, met: _Met) -> Setting | None:
    """The least number of a full limit."""
    low = met.limit.limit_units
    high = min(MAX_UNITS, 16 * (met.used_units + met.cost_units + met.leave_units + low))
    needed = _least(lambda units: met.changed(limit_units=units).fits, low, high)
    return None if needed is None else Setting("limit", met.limit.name, needed, low, _granted(book, met.limit))


def _granted(book: CostBook, limit: Limit) -> int:
    """Upstream's grant for the buckets of a limit; 0 unless both count units and upstream's window is as long."""
    names = limit.view.selector.buckets or tuple(book.buckets)
    buckets = [book.buckets[name] for name in names if name in book.buckets]
    longest_ms = limit.view.window.longest_ms
    granted = [[quota.units for quota in bucket.quotas if quota.window.longest_ms >= longest_ms] for bucket in buckets]
    if not all(granted) or limit.view.selector.count == "calls":
        return 0
    return sum(map(min, granted))


def _less_left(met: _Met) -> Setting | None:
    """The most that the job may leave of a full limit to others."""
    leave = met.leave_units
    less = _least(lambda less: met._replace(leave_units=leave - less).fits, 0, leave)
    return None if less is None else Setting("leave", met.limit.name, leave - less, leave)


def _unpaced(met: _Met) -> Setting | None:
    """A full limit without its pace, if that is enough."""
    return Setting("pace", met.limit.name, 0, 1) if met.limit.paced and met.changed(paced=False).fits else None


def _cheaper(each: Sequence[_Met], method: str, cost: int) -> Setting | None:
    """The highest price that every limit has room for."""
    less = _least(lambda less: all(met.costing(cost - less).fits for met in each), 0, cost - 1)
    return None if less is None else Setting("price", method, cost - less, cost)


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number above `low`, and at most `high`, that is enough; None if `high` is not. `low` is not enough."""
    if high <= low or not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _allowances(session: Session, budget: Budget, kept: KeptRefusal) -> tuple[Change, ...]:
    """The allowance that would have admitted the call without the ledger. Only the machine that was refused knows what
    it had drawn."""
    project = project_of(budget)
    if kept.machine != one_line(machine_name())[:64] or project.journal is None:
        return ()
    allowed = session.settings.ledger.unavailable
    most, allowance = (0, 0) if allowed is None else (allowed.max_cost_units, allowed.allowance_units)
    drawn = [draw.entry for draw in project.journal.draws.drawn(kept.at_ms, project.longest_ms)]
    needed = sum(entry.units for entry in drawn if entry.id[0] <= kept.at_ms) + kept.cost_units
    settings = []
    if most < kept.cost_units:
        if kept.calls > 1:
            return ()  # the cost of the dearest call is not known
        settings.append(Setting("max_cost", "", kept.cost_units, most))
    if allowance < needed:
        settings.append(Setting("allowance", "", needed, allowance))
    return (tuple(settings),) if settings else ()
