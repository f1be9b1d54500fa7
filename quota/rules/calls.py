"""What a decision compares: the price of a call, the limits that count it, and their caps. Pure, but given a clock.

Checklist    of one kind of call: a method, its units if the caller gives them, and a job
Check        one limit of a checklist
Checklists   makes the checklists of a budget, and keeps them
charges_of   the charges of calls: one for each bucket of each call
cap          the number that a limit enforces for one call. Only this function lowers a limit
lowers       whether a grant of upstream lowers a limit; `wanted_grants` has those to remember
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.common.text import many
from quota.errors import CostExceedsLimit, UsageError
from quota.rules.entry import FURTHER, RESERVED, START, Entry
from quota.rules.facts import Grant
from quota.terms.arguments import MAX_NUMBER, check_name, whole
from quota.terms.costs import MAX_PARTS, CostBook, Part
from quota.terms.limits import DAY_MS, MAX_UNITS, Calendar, Limit, View, no_longer, of_jobs, paced_units

MAX_KEPT = 1_000
"""The most checklists that are kept, because a caller may give each call other units."""

CONFIRM_MS = DAY_MS
"""An unchanged grant is written again when it is this old."""

ALWAYS = (0, NEVER)
"""The times of a price that never changes."""

Parts = tuple[Part, ...]

CallKind = tuple[str, "int | None", "Parts | None", str]
"""A kind of call: its method, its units if the caller gives them, its charges if the book has none, and its job."""


# -- upstream's grants ------------------------------------------------------------------------------------------------


def granted_units(limit: Limit, granted: Mapping[str, int]) -> int | None:
    """The most that a limit may enforce if upstream grants these units by bucket: the grant less the limit's headroom,
    0 or more. None if the grants do not apply: the limit counts another bucket, several buckets, or calls, or its
    window is longer than a day, which is the longest period of an upstream grant."""
    selector = limit.view.selector
    if selector.count == "calls" or len(selector.buckets) != 1 or not no_longer(limit.view.window.longest_ms, DAY_MS):
        return None
    units = granted.get(selector.buckets[0])
    return None if units is None else max(0, units - limit.headroom_units)


def wanted_grants(
    limits: Sequence[Limit], granted: Mapping[str, int], before: Sequence[Grant], now_ms: int, believed_ms: int
) -> tuple[Grant, ...]:
    """The grants to remember: only grants that lower a limit. If upstream does not mention a bucket, its last grant
    stays as long as it counts. An unchanged number is not written again for a day."""
    stand = {grant.bucket: grant for grant in before if grant.believed_at(now_ms)}
    wanted = {bucket: grant for bucket, grant in stand.items() if bucket not in granted}
    for bucket, units in granted.items():
        if not lowers(limits, bucket, units):
            continue
        standing = stand.get(bucket)
        if standing is None or standing.quota_units != units or standing.since_ms <= now_ms - CONFIRM_MS:
            standing = Grant(bucket, units, now_ms, now_ms + believed_ms)
        wanted[bucket] = standing
    return tuple(sorted(wanted.values()))


def lowers(limits: Sequence[Limit], bucket: str, units: int) -> bool:
    """Whether a grant of so many units of a bucket lowers one of these limits."""
    return any(
        (most := granted_units(limit, {bucket: units})) is not None and most < limit.limit_units for limit in limits
    )


def cap(
    limit: Limit, leave_units: int, cost_units: int, now_ms: int | None, granted: Mapping[str, int] | None = None
) -> int:
    """The number enforced for one call: the limit's own number, lowered to upstream's grant (see `granted_units`), by
    the units that the job leaves to others, and by the limit's pace at `now_ms`. With `now_ms` None the pace does not
    count, so the result is the most that it will ever be.

    The pace of a job depends on the total that it may spend, so a job that leaves half to others spends its own half
    evenly too. Pace delays a call but never forbids it: an unused window always has room for one call.
    """
    most = granted_units(limit, granted) if granted else None
    units = max(0, (limit.limit_units if most is None else min(limit.limit_units, most)) - leave_units)
    window = limit.view.window
    if now_ms is None or not limit.paced or not isinstance(window, Calendar):
        return units
    paced = paced_units(units, window.edges(now_ms), now_ms)
    return min(units, max(cost_units, 1, paced))


# -- the checklists ----------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A limit that counts a call, the call's cost there, and the units that its job leaves to others. `cap_units` is
    the number enforced for the call, without the limit's pace and upstream's grants."""

    limit: Limit
    cost_units: int
    leave_units: int
    cap_units: int


@dataclass(frozen=True)
class Checklist:
    """What a decision checks for one kind of call. It is made once, and all threads that ask about such a call share
    it."""

    method: str
    parts: Parts
    """The charges of the call; none if it is free, or if this checklist is of several calls."""
    units: int
    """The cost of the call in its first bucket; of several calls, the sum of these."""
    closed_by: tuple[str, ...]
    """The buckets and pools whose exhaustion closes the call."""
    checks: tuple[Check, ...]
    views: tuple[View, ...]
    """The view of each limit."""
    priced: tuple[int, int]
    """The span of time in which the call has this price, in ms. For several calls ALWAYS: nobody keeps their sum."""
    each: tuple[Checklist, ...] = ()
    """If it is of several calls that are decided together, their checklists."""

    @property
    def calls(self) -> tuple[Checklist, ...]:
        """The checklist of each call."""
        return self.each or (self,)

    def caps_at(self, now_ms: int | None, granted: Mapping[str, int]) -> tuple[int, ...]:
        """Each limit's enforced number at `now_ms`, if upstream grants these units; None: without its pace."""
        return tuple([cap(limit, leave, cost, now_ms, granted) for limit, cost, leave, _ in self.checks])


@dataclass(eq=False)
class Checklists:
    """The checklists of a budget, by kind of call: `checklists[kind]` makes one, and keeps it.

    `leave` has the units that each job leaves to others, by job and limit. Raises UsageError (such as CostExceedsLimit)
    for a call that can never be admitted.
    """

    credential: str
    book: CostBook
    limits: tuple[Limit, ...]
    leave: Mapping[str, Mapping[str, int]]
    clock: Callable[[], int]
    kept: dict[CallKind, Checklist] = field(default_factory=dict)

    @cached_property
    def shown(self) -> tuple[Limit, ...]:
        """The limits for people: if each job has its own of a limit, the limits of the jobs in `leave`."""
        return of_jobs(self.limits, self.leave)

    def __getitem__(self, kind: CallKind) -> Checklist:
        """The checklist of a kind of call, by the current price."""
        kept = self.kept.get(kind)
        made = kept or self.make(kind)
        if not made.priced[0] <= self.clock() < made.priced[1]:
            made = self.make(kind)
        if made is not kept and (kept or len(self.kept) < MAX_KEPT):
            self.kept[kind] = made
        return made

    def make(self, kind: CallKind) -> Checklist:
        """A new checklist, by the current price."""
        method, units, parts, job = kind
        check_name("job", job)
        book, priced = self.book, ALWAYS
        if parts is None and (units is None or book.canonical(method) in book.methods):
            price, priced = book.price_at(method, self.clock())
            parts = price.parts
        if units is not None:
            first, *others = parts or (Part(book.main_bucket.name, units),)
            parts = (first._replace(units=units), *others)
        parts = tuple([part._replace(units=charge_units(part.units)) for part in parts or ()])
        if len(parts) > MAX_PARTS:
            raise UsageError(f"a call of {method} has charges in {many(len(parts), 'bucket')}; the most is {MAX_PARTS}")
        method = book.canonical(method)
        check_name("method", method, least=1)
        costs = {}
        for limit in self.limits_of(job):
            selector = limit.view.selector
            counted = [selector.cost(part.units) for part in parts if selector.counts(part.bucket, method, job)]
            if counted:
                costs[limit] = sum(counted)
        made = self.of(method, parts, costs, job, priced)
        self._check_fits(made, 1)
        return made

    def of(
        self, method: str, parts: Parts, costs: Mapping[Limit, int], job: str, priced: tuple[int, int] = ALWAYS
    ) -> Checklist:
        """A checklist of these limits, each with its cost."""
        checks, leave = [], self.leave.get(job, {})
        for limit, cost_units in costs.items():
            leave_units = whole(leave.get(limit.name, 0), "units: what a job leaves", 0, MAX_NUMBER)
            checks.append(Check(limit, cost_units, leave_units, cap(limit, leave_units, cost_units, None)))
        closed_by = self.book.closed_by(method, *[part.bucket for part in parts]) if parts else ()
        return Checklist(
            method=method,
            parts=parts,
            units=parts[0].units if parts else 0,
            closed_by=closed_by,
            checks=tuple(checks),
            views=tuple([limit.view for limit in costs]),
            priced=priced,
        )

    def least_reserved(self, method: str) -> int | None:
        """The units of the cheapest call of `method` now, before its request is known; None if they do not depend on
        the request. Raises UnknownMethod."""
        price, _ = self.book.price_at(method, self.clock())
        return price.least.units if price.reserved else None

    def of_a_look(self) -> Checklist:
        """The checklist of the cheapest call of the main bucket, in each bucket that all its calls spend. Each limit
        counts the least that it can count."""
        book = self.book.at(self.clock())
        # `quota check` reports a smaller limit as an error; here it is full when used up.
        costs = {limit: min(book.least_units(limit.view.selector), limit.limit_units) for limit in self.shown}
        return self.of("", book.least_parts(), costs, "")

    def sum_of(self, checklists: Sequence[Checklist], job: str) -> Checklist:
        """One checklist for calls that are decided together: each limit that counts any of them, with their sum."""
        sums = Counter[str]()
        for checklist in checklists:
            for check in checklist.checks:
                sums[check.limit.name] += check.cost_units
        costs = {limit: sums[limit.name] for limit in self.limits_of(job) if limit.name in sums}
        units = sum([checklist.units for checklist in checklists])
        closed_by = tuple(dict.fromkeys([name for checklist in checklists for name in checklist.closed_by]))
        made = self.of(checklists[0].method, (), costs, job)
        made = replace(made, units=units, closed_by=closed_by, each=tuple(checklists))
        self._check_fits(made, len(checklists))
        return made

    def of_former(
        self, method: str, units: int, job: str, calls: int, costs: Mapping[str, int], closed: str | None
    ) -> Checklist:
        """One checklist for so many calls of a job, `method` the first, that were decided together before. They cost
        `units`, and in each limit that counted any of them `costs`, by name; a limit that is not among these counts
        them as one call of the first method. A bucket may have been `closed` to one of them."""
        verb, _, rest = method.partition(" ")
        parts = self.book.default_price(verb).parts if rest == "**" else None  # a request that no route named
        first = self.make((method, 1, parts, job))
        costs = {**{check.limit.name: check.limit.view.selector.cost(units) for check in first.checks}, **costs}
        parts = (first.parts[0]._replace(units=units), *first.parts[1:])
        of_limits = {limit: costs[limit.name] for limit in self.limits_of(job) if limit.name in costs}
        made = replace(self.of(first.method, parts, of_limits, job), each=(first,) * calls)
        if closed is not None:
            made = replace(made, closed_by=tuple(dict.fromkeys([*made.closed_by, closed])))
        self._check_fits(made, calls)
        return made

    def limits_of(self, job: str) -> tuple[Limit, ...]:
        """The limits that can count a job's calls. If each job has its own of a limit, the job's own."""
        return of_jobs(self.limits, (job,))

    def _check_fits(self, checklist: Checklist, calls: int) -> None:
        """Raises CostExceedsLimit if these calls can never be admitted."""
        for limit, cost_units, leave_units, cap_units in checklist.checks:
            if cost_units > cap_units and not limit.shadow:
                what, remedy = f"{checklist.method} costs", "make a cheaper call"
                if calls > 1:
                    what, remedy = f"{many(calls, 'call')} together cost", "make fewer calls at once"
                left = f" after leaving {leave_units:,}" if leave_units else ""
                raise CostExceedsLimit(
                    f"{what} {many(cost_units, limit.view.selector.noun)} and limit {limit.name!r} of credential "
                    f"{self.credential!r} holds {cap_units:,}{left}: it can never fit; raise the limit or {remedy}"
                )


def charges_of(
    calls: Iterable[Checklist],
    job: str,
    region: str,
    next_key: Callable[[], str],
    *,
    reserved: bool = False,
) -> tuple[Entry, ...]:
    """The charges of calls of one job, in their order: one for each bucket of each call, none for a free call.

    The first charge of a call has a new key. It ends in RESERVED if the charge is an upper bound, by its price or with
    `reserved`. The other charges have the same key, followed by FURTHER and their number.
    """
    charges = []
    for call in calls:
        if not call.parts:
            continue
        key = next_key() + (RESERVED if reserved or call.parts[0].reserve else "")
        for n, part in enumerate(call.parts):
            part_key = f"{key}{FURTHER}{n}" if n else key
            charges.append(Entry(START, part.units, part.bucket, call.method, job, region, part_key))
    return tuple(charges)


def charge_units(units: object) -> int:
    """The units of a charge, checked. Raises UsageError; CostExceedsLimit if no limit can ever hold them."""
    try:
        return whole(units, "units: a charge", 1, MAX_UNITS)
    except UsageError as error:
        if isinstance(units, int) and units > MAX_UNITS:
            raise CostExceedsLimit(str(error)) from None
        raise


def settled_units(units: object) -> int:
    """The new units of a charge, checked. Raises UsageError."""
    return whole(units, "units: a settled charge", 0, MAX_UNITS)
