"""What people are shown of a budget: nothing is charged, and the ledger's history is told nothing.

Outlook     the state of a budget: each limit, and whether any call may leave at all
look        makes it; `usage` the numbers alone
ask         what one call would be told now, with all that this was computed from: an `Answer`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.deciding.account import Account, Asked
from quota.deciding.answer import ahead_ms, clocks_of, occupancies_of, states_of
from quota.deciding.checklist import Checklist, Together, charge_units, charges_of
from quota.deciding.retry_at import Clocks, Occupancy, room_at
from quota.decision import COUNTING, SET_THE_CLOCK, Decision, LimitState
from quota.errors import LedgerError, UsageError
from quota.ledger.contract import Exhaustion
from quota.ledger.entry import Charge
from quota.ledger.unlogged import UnloggedUsage
from quota.terms.attribution import check_name

MAX_COUNTING = 50
"""The most times that a look asks a ledger that is still counting."""


class Outlook(NamedTuple):
    """The state of a budget at `at_ms` by the ledger's clock: each limit, and whether any call may leave at all.

    `room_ms`, in the order of the limits, is the time when the cheapest call that the limit counts fits again; None
    where it fits now. `closed` is upstream's own exhaustion of the main bucket. `full` is the refusal of that bucket's
    cheapest call by the limits that count all its calls. Both may be set: `next_ms` is the time when neither holds any
    more; None when neither is set, or when one is permanent. `dearest` is the decision for the dearest of the methods
    asked about. `ahead_ms` is as in a Decision.
    """

    at_ms: int
    states: tuple[LimitState, ...]
    room_ms: tuple[int | None, ...]
    closed: Exhaustion | None
    full: Decision | None
    next_ms: int | None
    dearest: Decision | None
    ahead_ms: int = 0

    @property
    def then_full(self) -> bool:
        """Whether the limits are full for longer than upstream has closed the bucket."""
        return self.closed is not None and self.full is not None and (self.full.retry_at_ms or 0) > self.closed.until_ms


def look(account: Account, methods: Sequence[str]) -> Outlook:
    """See `quota.Budget.outlook`."""
    checklist = account.checklists.of_a_look()
    bucket = checklist.parts[0].bucket
    asked = _counted(account, checklist, Charge(0, bucket, "", "", "", ""))
    checklist, request, result = asked
    room_ms: tuple[int | None, ...] = (None,) * len(account.limits)
    full: Decision | None = None
    if result.outcome != "admitted":  # else every limit has room
        occupancies, clocks = occupancies_of(*asked)
        rooms = (room_at(one, clocks, account.entries, clocks.now_ms) if one.full else None for one in occupancies)
        room_ms, full = tuple(rooms), _full(account, asked)
    closed, next_ms = result.exhaustion, full.retry_at_ms if full is not None else None
    if closed is not None:
        next_ms = None if closed.until_ms == NEVER else max(next_ms or 0, closed.until_ms + account.jitter_ms)
    dearest = None
    if closed is None and full is None:
        dearest = _dearest(account, methods, request.caller_ms)
    states = states_of(checklist, request, result)
    return Outlook(result.now_ms, states, room_ms, closed, full, next_ms, dearest, ahead_ms(result))


def _full(account: Account, asked: Asked) -> Decision | None:
    """The refusal of a call by the limits that count every call of its bucket; None where these admit it."""
    checklist, request, result = asked
    bucket = checklist.parts[0].bucket
    counting_all = [
        n for n, one in enumerate(checklist.limits) if not one.narrow and one.view.selector.counts_bucket(bucket)
    ]
    checks = [request.checks[n] for n in counting_all]
    used_units = tuple([result.used_units[n] for n in counting_all])
    if all(used + check.cost_units <= check.cap_units for check, used in zip(checks, used_units, strict=True)):
        return None
    limits = tuple([checklist.limits[n] for n in counting_all])
    costs = tuple([checklist.costs[n] for n in counting_all])
    of_these = account.checklists.of(checklist.method, checklist.parts, limits, costs, "")
    return account.answers.decision(
        account.checklists.with_grants(of_these, checklist.grants),
        request._replace(checks=checks),
        result._replace(
            outcome="refused",
            used_units=used_units,
            exhaustion=None,
            unlogged=tuple([result.unlogged[n] for n in counting_all]) if result.unlogged else (),
            leaving_ms=tuple([result.leaving_ms[n] for n in counting_all]) if result.leaving_ms else (),
        ),
        account.entries,
        commit=False,
    )


def _dearest(account: Account, methods: Sequence[str], at_ms: int) -> Decision | None:
    """What the dearest of these methods would be told, measured by the share of its bucket that one call takes; None
    where the book knows none of them, or where that call can never be admitted."""
    book = account.book.at(at_ms)
    shares = {
        method: max(part.units / book.buckets[part.bucket].quota_units for part in book.price(method).parts)
        for method in methods
        if book.canonical(method) in book.methods and book.price(method).parts
    }
    if not shares:
        return None
    try:
        checklist = account.checklists.make((max(shares, key=lambda method: shares[method]), None, None, ""))
        asked = account.ask(checklist, charges_of(checklist.calls, "", ""), commit=False, looks=True)
    except UsageError:
        return None
    return account.answers.decision(*asked, account.entries, commit=False)


def usage(account: Account, job: str) -> tuple[LimitState, ...]:
    """See `quota.Budget.usage`."""
    check_name("job", job)
    return states_of(*_numbers(account, job))


def unlogged_usage(account: Account) -> tuple[UnloggedUsage, ...]:
    """The usage that the ledger counts, in any limit, for charges that it has lost."""
    _, _, result = _numbers(account, "")
    return tuple([usage for of_limit in result.unlogged for usage in of_limit])


def _numbers(account: Account, job: str) -> Asked:
    """What each limit counts now."""
    checklist = account.checklists.of("", (), account.limits, (0,) * len(account.limits), job)
    return _counted(account, checklist, Charge(0, "", "", "", "", ""))


def _counted(account: Account, checklist: Checklist, charge: Charge) -> Asked:
    """What the ledger says to a look: people wait for one that has a long log to count first. Raises LedgerError."""
    for _ in range(MAX_COUNTING):
        _, request, result = asked = account.ask(checklist, (charge,), commit=False, looks=True)
        if result.outcome == "clock":
            clocks = clocks_of(request, result)
            raise LedgerError(f"ledger {account.ledger.label}: {clocks}; {SET_THE_CLOCK}")
        if result.outcome != "counting":
            return asked
    raise LedgerError(f"ledger {account.ledger.label}: {COUNTING}; run again, it goes on from there")


# -- one call ----------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a call would be told now, and from what that was computed: each limit that counts it. There are no
    `occupancies` where the clocks disagree, or the ledger still counts. `granted` is what upstream grants by bucket,
    where that is less than the configuration says.
    """

    decision: Decision
    occupancies: tuple[Occupancy, ...]
    clocks: Clocks
    granted: Mapping[str, int]


def ask(account: Account, method: str, units: int, job: str, together: Together | None = None) -> Answer:
    """As `peek`, by the ledger alone. Raises LedgerError, and UsageError for a call that can never be admitted."""
    units = charge_units(units)
    if together is None:
        checklist = account.checklists.make((method, units, None, job))
    else:
        checklist = account.checklists.of_former(method, units, job, together)
    checklist, request, result = asked = account.ask(checklist, charges_of(checklist.calls, job, ""), commit=False)
    decision = account.answers.decision(*asked, account.entries, commit=False)
    occupancies: tuple[Occupancy, ...] = ()
    clocks = Clocks(result.now_ms, request.caller_ms, result.last[0])
    if result.outcome not in ("clock", "counting"):
        occupancies = tuple(occupancies_of(*asked)[0])
    return Answer(decision, occupancies, clocks, checklist.grants.units)
