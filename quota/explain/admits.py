"""Which changes of the configuration would have admitted a call that was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from quota.budget import Budget, account_of
from quota.common.text import one_line
from quota.deciding.checklist import cap
from quota.deciding.corrections import drawn_units
from quota.reports.spending import KeptRefusal
from quota.session import Session
from quota.terms.attribution import machine_name
from quota.terms.costs import CostBook
from quota.terms.limits import MAX_UNITS, Limit


class Setting(NamedTuple):
    """One setting that is another in a change: the number of a `limit`, what the job leaves of it (`leave`), its `pace`
    (0: none), the `price` of the method, a bucket reopened (`reopen`), or the allowance's `max_cost` and `allowance`.

    `upstream_units` is what upstream grants of it in such a window or a longer one; 0: nothing that is known.
    """

    kind: Literal["limit", "leave", "pace", "price", "reopen", "max_cost", "allowance"]
    name: str
    units: int
    was_units: int
    upstream_units: int = 0


Change = tuple[Setting, ...]
"""Settings that together would have admitted the call."""


def closed_by_upstream(kept: KeptRefusal) -> bool:
    """Whether a bucket was closed. A limit too is "closed" to a call for which upstream grants too little."""
    too_little = any(one.name == kept.refused_by and one.cost_units > one.limit_units for one in kept.limits)
    return kept.reason == "exhausted" or (kept.reason == "closed" and not too_little)


class _Counted(NamedTuple):
    """A limit that counted a refused call: what the call cost there, what was used, and what its job left to others."""

    limit: Limit
    cost_units: int
    leave_units: int
    used_units: int
    granted: Mapping[str, int]

    def fits(self, at_ms: int) -> bool:
        """Whether the call fits, as a decision compares it (L9)."""
        cost = self.cost_units
        return self.limit.shadow or self.used_units + cost <= cap(
            self.limit, self.leave_units, cost, at_ms, self.granted
        )

    def costing(self, units: int) -> _Counted:
        """The same for a call of this many units."""
        return self._replace(cost_units=self.limit.view.selector.cost(units))


def changes_that_admit(
    session: Session, budget: Budget, kept: KeptRefusal, granted: Mapping[str, int]
) -> tuple[tuple[Change, ...], bool]:
    """The changes of which each alone would have admitted the call; and whether today's configuration would have.

    Each is the smallest of its kind, found by trying: the comparison is that of a decision, with the numbers that the
    refusal found, and what upstream grants today.
    """
    if kept.reason == "ledger-unavailable":
        return _allowances(session, budget, kept), False
    if kept.reason in ("clock", "counting") or kept.limits_left_out:
        return (), False
    leaves, then_ms = account_of(budget).checklists.leaves_of(kept.job), kept.at_ms
    known = {limit.name: limit for limit in budget.limits_of(kept.job)}
    if not closed_by_upstream(kept) and kept.refused_by not in known:
        return (), True
    each = [
        _Counted(known[one.name], one.cost_units, leaves.get(one.name, 0), one.used_units, granted)
        for one in kept.limits
        if one.name in known
    ]
    price = budget.book.at(then_ms).methods.get(kept.method)
    of_one_bucket = kept.calls == 1 and (price is None or len(price[0].parts) == 1)
    if of_one_bucket:
        each = [one.costing(kept.cost_units) for one in each]
    full = [one for one in each if not one.fits(then_ms)]
    reopen: Change = ()
    if closed_by_upstream(kept):
        reopen = (Setting("reopen", kept.refused_by or "", 0, 0),)
        if not full:
            return (reopen,), False
    elif not full:
        return (), True
    numbers = _each(_number(budget.book, one, then_ms) for one in full)
    found = [numbers, _each(_less_left(one, then_ms) for one in full), _unpaced(full, then_ms)]
    if of_one_bucket:  # of several calls the prices are not known
        found.append(_cheaper(each, kept.method, kept.cost_units, then_ms))
    return tuple((*reopen, *change) for change in found if change), False


def _each(settings: Iterable[Setting | None]) -> Change:
    """All of them together; none where one of them cannot be."""
    found = tuple(settings)
    return () if None in found else cast("Change", found)


def _number(book: CostBook, one: _Counted, at_ms: int) -> Setting | None:
    """The least number of a full limit."""
    limit = one.limit
    low = limit.limit_units
    high = min(MAX_UNITS, 16 * (one.used_units + one.cost_units + one.leave_units + low))
    needed = _least(lambda units: one._replace(limit=replace(limit, limit_units=units)).fits(at_ms), low, high)
    return None if needed is None else Setting("limit", limit.name, needed, low, _granted(book, limit))


def _granted(book: CostBook, limit: Limit) -> int:
    """What upstream grants of what a limit counts, where both count units, and upstream no shorter window."""
    names = limit.view.selector.buckets or tuple(book.buckets)
    buckets = [book.buckets[name] for name in names if name in book.buckets]
    longest_ms = limit.view.window.longest_ms
    granted = [[one.units for one in bucket.quotas if one.window.longest_ms >= longest_ms] for bucket in buckets]
    if not all(granted) or limit.view.selector.count == "calls":
        return 0
    return sum(map(min, granted))


def _less_left(one: _Counted, at_ms: int) -> Setting | None:
    """The most that the job may leave of a full limit to others."""
    leave = one.leave_units
    less = _least(lambda less: one._replace(leave_units=leave - less).fits(at_ms), 0, leave)
    return None if less is None else Setting("leave", one.limit.name, leave - less, leave)


def _unpaced(full: Sequence[_Counted], at_ms: int) -> Change:
    """Without their pace, if that is enough."""
    if all(one.limit.paced and one._replace(limit=replace(one.limit, paced=False)).fits(at_ms) for one in full):
        return tuple(Setting("pace", one.limit.name, 0, 1) for one in full)
    return ()


def _cheaper(each: Sequence[_Counted], method: str, cost: int, at_ms: int) -> Change:
    """The highest price that every limit has room for."""
    less = _least(lambda n: all(one.costing(cost - n).fits(at_ms) for one in each), 0, cost - 1)
    return () if less is None else (Setting("price", method, cost - less, cost),)


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least number above `low`, which is not enough, and up to `high` that is; None if `high` is not."""
    if high <= low or not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _allowances(session: Session, budget: Budget, kept: KeptRefusal) -> tuple[Change, ...]:
    """The allowance that would have let the call through without the ledger. Only its own machine knows what it had
    drawn."""
    if kept.machine != one_line(machine_name())[:64]:
        return ()
    allowed = session.settings.ledger.unavailable
    most, allowance = (0, 0) if allowed is None else (allowed.max_cost_units, allowed.allowance_units)
    needed = drawn_units(account_of(budget), kept.at_ms) + kept.cost_units
    settings = []
    if most < kept.cost_units:
        if kept.calls > 1:
            return ()  # what the dearest of them cost is not known
        settings.append(Setting("max_cost", "", kept.cost_units, most))
    if allowance < needed:
        settings.append(Setting("allowance", "", needed, allowance))
    return (tuple(settings),) if settings else ()
