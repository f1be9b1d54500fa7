"""READ FIRST. A budget decides whether one call to a metered API may leave now.

    Budget      the limits of one credential over one ledger; most callers want `charge`
    Decision    the answer (quota.decision): admitted, or refused and by which limit, what remains, when to retry
    Spend       a charge around a block or a function, for clients that have no hook for charging

Only `Budget._decide` asks the ledger for a decision; `charge` and `peek` are thin wrappers around it. The ledger does
the comparison, because that must be atomic with the charge: see `quota.ledger.contract` for its four steps. The rules
of a decision stand in `_concluding` and `_asking`, generators of steps (`quota.common.steps`): they hold for who blocks
and for who awaits.

The arithmetic, for a limit of L units over a window, of which U are used, and a call that costs C:

    admitted            U + C <= L
    remaining           L - U                       after the charge, if there was one
    retry_at            the first millisecond at which enough has left the window that U + C <= L holds again
    never               C > L                       CostExceedsLimit: no waiting helps

L is the limit's number after `cap`: upstream may grant less, a job may leave some of it to others, and a paced limit
releases it over the day.
The module quota.retry_at computes `retry_at`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ContextDecorator
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from quota.arguments import MAX_NUMBER, text, whole, whole_clock
from quota.attribution import AttemptKeys, current_attribution
from quota.common.clock import NEVER, host_clock, rfc3339
from quota.common.log import warn
from quota.common.steps import run
from quota.common.text import many, show
from quota.common.values import NamedTuple, Value, replace
from quota.decision import COUNTING, REPAIR, SET_THE_CLOCK, Decision, LimitState
from quota.errors import CostExceedsLimit, LedgerError, Refused, UnknownCharge, UnusableLedger, UsageError
from quota.ledger.contract import (
    COUNT_AGAIN_MS,
    MAX_CHARGES,
    NOTHING_EXPECTED,
    RETENTION_SLACK_MS,
    ChargeRequest,
    Identity,
    LimitCheck,
    Question,
    read_entries,
    retention_of,
)
from quota.ledger.entry import Charge
from quota.ledger.grants import read_grants
from quota.ledger.unlogged import UPSTREAM
from quota.limits import DAY_MS, HOUR_MS, Calendar, Limit, Sliding, paced_units
from quota.recovery.observations import SeenAheadError
from quota.retry_at import Clocks, Standing, retry_at, room_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quota.common.steps import Steps
    from quota.costs import CostBook
    from quota.decision import Reason
    from quota.ledger.contract import ChargeResult, Exhaustion, Expected, Ledger
    from quota.ledger.entry import Entry
    from quota.ledger.unlogged import UnloggedUsage
    from quota.limits import Edges, View
    from quota.recorder import Recorder
    from quota.recovery.allowance import Allowance, Draw, Repaid
    from quota.recovery.high_water_mark import HighWaterMark
    from quota.retry_at import ReadEntries

MAX_LOSSES = 5
"""In one decision, the budget restores lost data to a ledger at most this many times."""

MAX_COUNTING = 50
"""So often a look at the numbers asks a ledger that answers "counting"."""

ALLOWANCE_ID = "allowance-"
"""The prefix of the id of a charge that the local allowance admitted."""


class _PriceChanged(Exception):  # noqa: N818 - not an error: the plan is built again
    """The price of a call has changed since its plan was built."""


class _LogNeededError(Exception):
    """The time at which a call fits cannot be said without reading the log."""


class _Grants(NamedTuple):
    """Upstream's grants as this process knows them: the ledger's text of them, those that are believed, and until
    when these are all of them."""

    text: str = ""
    units: Mapping[str, int] = MappingProxyType({})
    until_ms: int = NEVER


_NO_GRANTS = _Grants()


_Call = tuple[str, "int | None", "str | None"]
"""A method, and its units and bucket where they are not the book's."""

_Key = tuple[str, "int | None", "str | None", str]
"""The method, units, bucket and job by which a plan is known."""

_DECIDED = ("admitted", "refused", "exhausted")


class _Plan(Value, frozen=False):
    """What the ledger must check for one kind of call: computed once, reused for every decision."""

    method: str
    units: int
    bucket: str
    closed_by: tuple[str, ...]
    limits: tuple[Limit, ...]
    leaves: tuple[int, ...]
    caps: tuple[int, ...]
    costs: tuple[int, ...]
    paced: bool
    priced: tuple[int, int]
    """The times in ms from and until which the call has that price."""
    grants: _Grants
    """What upstream grants, as `caps` go by it."""
    cached_checks: tuple[int, int, tuple[LimitCheck, ...]] = (0, 0, ())
    """The latest checks, after the times in ms from and until which they are valid."""

    def checks_at(self, now_ms: int) -> tuple[LimitCheck, ...]:
        """The check of each limit at `now_ms`. It holds until the next calendar edge, unless the limit is paced.

        Raises _PriceChanged when the call has another price at that time.
        """
        since_ms, until_ms, checks = self.cached_checks
        if not since_ms <= now_ms < until_ms:
            self.check_price(now_ms)
            each = zip(self.limits, self.caps_at(now_ms), self.costs, strict=True)
            checks = tuple(LimitCheck(limit.view, cap, cost, _edges(limit.view, now_ms)) for limit, cap, cost in each)
            if not self.paced:
                edges = [check.edges for check in checks if check.edges is not None]
                since_ms = max([self.priced[0], *(edge[0] for edge in edges)])
                until_ms = min([self.priced[1], *(edge[1] for edge in edges)])
                self.cached_checks = (since_ms, until_ms, checks)  # one assignment: threads share the plan
        return checks

    def check_price(self, now_ms: int) -> None:
        if not self.priced[0] <= now_ms < self.priced[1]:
            raise _PriceChanged

    def caps_at(self, now_ms: int) -> tuple[int, ...]:
        """Each limit's enforced number at `now_ms`. `caps` holds it without pacing; most plans need no more."""
        if not self.paced:
            return self.caps
        together = zip(self.limits, self.leaves, self.costs, strict=True)
        return tuple(cap(limit, leave, cost, now_ms, self.grants.units) for limit, leave, cost in together)


_Asked = tuple[_Plan, "ChargeRequest", "ChargeResult"]
"""A request and the ledger's answer, with the plan that both follow."""


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


class Budget:
    """The limits of one credential over one ledger.

    It is cheap to create and safe to share between threads. `clock` (ms since 1970) replaces the host's clock, for
    tests and simulation; it does not replace the ledger's clock.
    """

    def __init__(
        self,
        *,
        credential: str,
        project: str,
        book: CostBook,
        limits: Limit | Sequence[Limit],
        ledger: Ledger,
        leave: Mapping[str, Mapping[str, int]] | None = None,
        clock: Callable[[], int] | None = None,
        jitter_ms: int = 0,
        attempt_keys: AttemptKeys | None = None,
        allowance: Allowance | None = None,
        high_water_mark: HighWaterMark | None = None,
        identity: Identity | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.credential = credential
        self.project = project
        self.book = book
        self.limits = (limits,) if isinstance(limits, Limit) else tuple(limits)
        self.ledger = ledger
        # Credentials of one project have the same limits, so these are all that the configuration has for it.
        self._retention_ms = retention_of(limit.view.window for limit in self.limits)
        self._leave = leave or {}
        self._clock = host_clock if clock is None else whole_clock(clock)
        self._jitter_ms = whole(jitter_ms, "ms: the jitter", 0, MAX_NUMBER)
        self._plans: dict[_Key, _Plan] = {}
        self._said_ahead = False
        self._grants = _NO_GRANTS
        self._attempt_keys = attempt_keys or AttemptKeys()
        self._allowance = allowance
        self._high_water_mark = high_water_mark
        self._identity = identity or Identity("", project)
        self._recorder = recorder

    def charge(
        self,
        method: str,
        *,
        units: int | None = None,
        job: str | None = None,
        region: str | None = None,
    ) -> Decision:
        """Charge one call of `method` before it leaves, if every limit has room for it.

        `units` overrides the cost book's price; `job` and `region` say who spends (default: what `labels` set). A
        refusal is an answer, not an error, and leaves the budget untouched.
        Raises UnknownMethod, CostExceedsLimit and UsageError for calls that can never succeed. When the ledger cannot
        answer, the local allowance decides (source "allowance"). Without one the call is refused, with the reason
        "ledger-unavailable"; if the ledger may have stored the charge, it counts as spent there. A ledger that has to
        count a long log first, for a limit that is new, refuses with the reason "counting" until it is done.
        """
        return self._decide(method, units, None, job, region, commit=True)

    def charge_many(
        self, calls: Iterable[str | tuple[str, int]], *, job: str | None = None, region: str | None = None
    ) -> list[Decision]:
        """Charge 1 to 100 calls in one step before they leave: all of them if every limit has room for all, else none.

        Each call is a method, or a method with its units. They come in a list or another iterable with an order; a
        mapping or a set is refused with UsageError. The decisions come in the order of the calls, each with an id of
        its own; `limits`, `retry_at` and the rest are those of all calls together. Raises as `charge` does, also
        CostExceedsLimit for calls that can never fit together. Then, too, nothing is charged.
        """
        return run(deciding_many(self, calls, job=job, region=region))

    def peek(
        self,
        method: str,
        *,
        units: int | None = None,
        job: str | None = None,
        region: str | None = None,
    ) -> Decision:
        """The decision that `charge` would make now, without charging."""
        return self._decide(method, units, None, job, region, commit=False)

    def refund(self, charge_id: str) -> Charge | Entry:
        """Give back a charge whose request provably never left this machine. Returns the charge as it was before."""
        return self.settle(charge_id, 0)

    def settle(self, charge_id: str, units: int) -> Charge | Entry:
        """Set the true cost of a charge, in absolute units: idempotent, never refused, its time and id unchanged.

        Returns the charge as it was before. Raises UnknownCharge for an id that is unknown or has left the log.
        """
        charge_id = text(charge_id, "charge")
        units = whole(units, "units: what a charge counts, 0 after a refund,", 0, MAX_UNITS)
        before: Charge | Entry | None = None
        name = charge_id.removeprefix(ALLOWANCE_ID)
        if name != charge_id:
            number = None if self._allowance is None else self._allowance.number(name)
            if self._allowance is not None and number is not None:
                before = self._settle_drawn(self._allowance, number, units)
        elif _is_id(charge_id):
            before = self.ledger.settle(self.project, charge_id, units, tuple(limit.view for limit in self.limits))
        if before is None:
            remedy = "give the id that the charge returned, while the ledger's log still has it"
            if name != charge_id:
                remedy = "it was drawn on another machine, which can correct it, or this one's journal no longer has it"
            raise UnknownCharge(f"project {self.project!r} has no charge {charge_id!r}; {remedy}")
        return before

    def _settle_drawn(self, allowance: Allowance, number: int, units: int) -> Charge | Entry | None:
        """Correct a charge that the allowance admitted: in its journal, or in the ledger once it was repaid there."""
        before: Charge | Entry | None = allowance.settle(self._identity, number, units)
        if before is None:
            repaid = allowance.repaid(self._identity, number)
            before = None if repaid is None else self._settle_repaid(repaid._replace(units=units))
            if before is not None:
                allowance.correct_repaid(self._identity, number, units)
        return before

    def _settle_repaid(self, repaid: Repaid) -> Entry | None:
        """Correct the ledger's entry for a repaid draw; None where the log no longer has it.

        The newest entry with the draw's idempotency key is the draw. An earlier one is the charge of the same call,
        whose answer was lost. It counted while its outcome was unknown, and can now be corrected.
        """
        views = tuple(limit.view for limit in self.limits)
        log = read_entries(self.ledger, self.project, repaid.drawn_ms - RETENTION_SLACK_MS, NEVER)
        found = [entry for entry in log if entry.idempotency_key == repaid.idempotency_key]
        for entry in found:
            self.ledger.settle(self.project, entry.id, repaid.units if entry is found[-1] else 0, views)
        return found[-1] if found else None

    def usage(self, job: str | None = None) -> tuple[LimitState, ...]:
        """The current state of every limit. Charges nothing. With a `job`, the numbers are lowered for that job.

        Raises LedgerError, also when this machine's clock and the ledger's disagree.
        """
        plan, request, result = self._look(text(job or "", "job"))
        return _states(plan, request, result)

    def outlook(self, methods: Iterable[str] = ()) -> Outlook:
        """The state of this budget, and the decision for the dearest of these methods. Charges nothing.

        Raises LedgerError, also when this machine's clock and the ledger's disagree.
        """
        book, main = self.book.at(self._clock()), self.book.main_bucket.name
        # `quota check` reports a limit below the price of the cheapest call as an error; here it is full when used up.
        costs = tuple(min(book.least_units(limit.view.selector), limit.limit_units) for limit in self.limits)
        plan = self._plan("", book.cheapest_units(main), main, self.limits, costs, "")
        plan, request, result = self._counted(plan, Charge(0, main, "", "", "", ""))
        standings, clocks = _standings(plan, request, result)
        room_ms = tuple(room_at(one, clocks, self._entries, clocks.now_ms) if one.full else None for one in standings)
        full = self._full(plan, request, result)
        closed, next_ms = result.exhaustion, full.retry_at_ms if full is not None else None
        if closed is not None:
            next_ms = None if closed.until_ms == NEVER else max(next_ms or 0, closed.until_ms + self._jitter_ms)
        dearest = None
        if closed is None and full is None:
            known = [method for method in methods if book.canonical(method) in book.methods]
            prices = {method: book.price(method) for method in known}
            by_share = sorted(prices, key=lambda m: prices[m].units / book.buckets[prices[m].bucket].quota_units)
            dearest = self._would_be_told(by_share[-1]) if by_share else None
        return Outlook(
            result.now_ms, _states(plan, request, result), room_ms, closed, full, next_ms, dearest, _ahead_ms(result)
        )

    def _full(self, plan: _Plan, request: ChargeRequest, result: ChargeResult) -> Decision | None:
        """The refusal of a call by the limits that count every call of its bucket; None where these admit it."""
        counting_all = [n for n, limit in enumerate(plan.limits) if not limit.narrow and _selects(limit, plan.bucket)]
        checks = [request.checks[n] for n in counting_all]
        used_units = [result.used_units[n] for n in counting_all]
        if all(used + check.cost_units <= check.cap_units for check, used in zip(checks, used_units, strict=True)):
            return None
        limits, costs = tuple(plan.limits[n] for n in counting_all), tuple(plan.costs[n] for n in counting_all)
        return self._decision(
            self._with_grants(self._plan(plan.method, plan.units, plan.bucket, limits, costs, ""), plan.grants),
            request._replace(checks=checks),
            result._replace(
                outcome="refused",
                used_units=tuple(used_units),
                exhaustion=None,
                unlogged=tuple(result.unlogged[n] for n in counting_all) if result.unlogged else (),
                leaving_ms=tuple(result.leaving_ms[n] for n in counting_all) if result.leaving_ms else (),
            ),
            self._entries,
            commit=False,
        )

    def _would_be_told(self, method: str) -> Decision | None:
        """The decision of `peek` for a method by the ledger alone; None for a call that can never be admitted."""
        try:
            plan = self._make_plan((method, None, None, ""))
            plan, request, result = self._ask_ledger(
                plan, Charge(plan.units, plan.bucket, plan.method, "", "", ""), commit=False
            )
        except UsageError:
            return None
        except _PriceChanged:  # it changed just now
            return self._would_be_told(method)
        return self._decision(plan, request, result, self._entries, commit=False)

    def _look(self, job: str) -> tuple[_Plan, ChargeRequest, ChargeResult]:
        plan = self._plan("", 0, "", self.limits, (0,) * len(self.limits), job)
        return self._counted(plan, Charge(0, "", "", "", "", ""))

    def _counted(self, plan: _Plan, charge: Charge) -> tuple[_Plan, ChargeRequest, ChargeResult]:
        """What the ledger counts, for people: they wait for one that has a long log to count first."""
        for _ in range(MAX_COUNTING):
            plan, request, result = self._ask_ledger(plan, charge, commit=False)
            if result.outcome == "clock":
                raise LedgerError(f"ledger {self.ledger.label}: {_clocks(request, result)}; {SET_THE_CLOCK}")
            if result.outcome != "counting":
                return plan, request, result
        raise LedgerError(f"ledger {self.ledger.label}: {COUNTING}; run again, it goes on from there")

    def owed_units(self) -> int:
        """The units that this machine drew on its local allowance and has not repaid to the ledger yet."""
        return 0 if self._allowance is None else self._allowance.owed_units(self._identity)

    def spend(
        self,
        method: str,
        *,
        units: int | None = None,
        job: str | None = None,
        region: str | None = None,
    ) -> Spend:
        """Charge around a block or a function: `with budget.spend("search.list"): ...`, or as a decorator.

        For clients that have no hook for charging. Each entry is one charge; a refusal raises Refused before the body
        runs. The charge stays whatever the body does, because a request that was sent has been spent.
        """
        return Spend(self, method, units=units, job=job, region=region)

    # -- the decision ------------------------------------------------------------------------------------------------

    def _decide(
        self,
        method: str,
        units: int | None,
        bucket: str | None,
        job: str | None,
        region: str | None,
        *,
        commit: bool,
    ) -> Decision:
        """The ordinary decision needs none of the rules of `_asking`: the ledger is asked at once, and its answer said.
        All else is left to the steps, with what was answered."""
        key, plan, charge = self._call(method, units, bucket, job, region, commit)
        asked: _Asked | LedgerError | None = None
        try:
            ready = self._ready(plan, charge)
            if ready is not None:
                plan, request = ready
                asked = plan, request, self.ledger.decide(request, commit=commit)
                decision = self._at_once(asked, charge, commit)
                if decision is not None:
                    return decision
        except LedgerError as error:
            asked = error
        except _PriceChanged:
            pass
        return run(self._concluding((key,), plan, (charge,), commit, asked))[0]

    def _deciding(
        self,
        method: str,
        units: int | None,
        bucket: str | None,
        job: str | None,
        region: str | None,
        *,
        commit: bool,
    ) -> Steps[Decision]:
        """A decision, for whoever does its steps. What may take long is a step; the rest is quick, and in memory. It
        goes as in `_decide`."""
        key, plan, charge = self._call(method, units, bucket, job, region, commit)
        asked: _Asked | LedgerError | None = None
        try:
            ready = self._ready(plan, charge)
            if ready is not None:
                plan, request = ready
                asked = plan, request, (yield Question(self.ledger, request, commit))
                decision = self._at_once(asked, charge, commit)
                if decision is not None:
                    return decision
        except LedgerError as error:
            asked = error
        except _PriceChanged:
            pass
        return (yield from self._concluding((key,), plan, (charge,), commit, asked))[0]

    def _ready(self, plan: _Plan, charge: Charge) -> tuple[_Plan, ChargeRequest] | None:
        """What the ledger may be asked at once; None where something must be looked up or repaid before."""
        allowance, high_water_mark = self._allowance, self._high_water_mark
        expected = NOTHING_EXPECTED if high_water_mark is None else high_water_mark.known()
        if expected is None or (allowance is not None and allowance.may_owe(self._identity)):
            return None
        return self._request(plan, charge, expected)

    def _at_once(self, asked: _Asked, charge: Charge, commit: bool) -> Decision | None:
        """What an ordinary answer says; None where there is more to be done before."""
        plan, request, result = asked
        if not self._is_ordinary(request, result):
            return None
        try:
            decision = self._decision(plan, request, result, _unread, commit=commit)
        except _LogNeededError:
            return None
        if commit and not decision.admitted:
            note_refusal(self, decision, charge.job, charge.region)
        return decision

    def _deciding_all(self, calls: Sequence[_Call], job: str | None, region: str | None) -> Steps[list[Decision]]:
        """The decisions about calls that are charged together."""
        labelled = current_attribution()
        job = text(labelled[0] if job is None else job, "job")
        region = text(labelled[1] if region is None else region, "region")
        check_name("region", region)
        keys = tuple([(method, units, bucket, job) for method, units, bucket in calls])
        plan, charges = self._together(keys, region, commit=True)
        decision, charges, ids = yield from self._concluding(keys, plan, charges, commit=True)
        return [
            decision._replace(id=charge_id, method=charge.method, cost_units=charge.units)
            for charge, charge_id in zip(charges, ids or (None,) * len(charges), strict=True)
        ]

    def _together(self, keys: Sequence[_Key], region: str, commit: bool) -> tuple[_Plan, tuple[Charge, ...]]:
        """The plan of calls of one job that are decided together, and a charge for each of them."""
        job, next_key = keys[0][3], self._attempt_keys.next
        plans = [self._plans.get(key) or self._make_plan(key) for key in keys]
        charges = [Charge(x.units, x.bucket, x.method, job, region, next_key() if commit else "") for x in plans]
        return plans[0] if len(plans) == 1 else self._sum_of(plans, job), tuple(charges)

    def _sum_of(self, plans: Sequence[_Plan], job: str) -> _Plan:
        """One plan for all: each limit that counts any of the calls, with what it counts of all."""
        calls, costs, units = Counter(map(id, plans)), Counter[int](), 0
        kinds = {id(plan): plan for plan in plans}.values()
        for plan in kinds:
            times = calls[id(plan)]
            units += times * plan.units
            for limit, cost_units in zip(plan.limits, plan.costs, strict=True):
                costs[id(limit)] += times * cost_units
        limits = tuple([limit for limit in self.limits if id(limit) in costs])
        priced = max(plan.priced[0] for plan in kinds), min(plan.priced[1] for plan in kinds)
        sums = self._plan(plans[0].method, units, "", limits, tuple([costs[id(x)] for x in limits]), job, priced)
        sums.closed_by = tuple(dict.fromkeys([name for plan in kinds for name in plan.closed_by]))
        self._check_fit_together(sums, len(plans))
        return sums

    def _call(
        self, method: str, units: int | None, bucket: str | None, job: str | None, region: str | None, commit: bool
    ) -> tuple[_Key, _Plan, Charge]:
        if job is None or region is None:
            labelled = current_attribution()
            job = labelled[0] if job is None else job
            region = labelled[1] if region is None else region
        if units is not None:
            units = whole(units, _A_CHARGE, 1, MAX_UNITS)  # before it is used as a key, where True equals 1
        if not type(method) is type(job) is type(region) is str:
            method, job, region = text(method, "method"), text(job, "job"), text(region, "region")
        key = (method, units, bucket, job)
        plan = self._plans.get(key) or self._make_plan(key)
        check_name("region", region)
        idempotency_key = self._attempt_keys.next() if commit else ""
        return key, plan, _new(Charge, (plan.units, plan.bucket, plan.method, job, region, idempotency_key))

    def _concluding(
        self,
        keys: tuple[_Key, ...],
        plan: _Plan,
        charges: tuple[Charge, ...],
        commit: bool,
        asked: _Asked | LedgerError | None = None,
    ) -> Steps[tuple[Decision, tuple[Charge, ...], tuple[str, ...]]]:
        """The decision about a call, or several together, what was to be charged, and the ids of it. `asked`: the
        ledger's answer, or the error in its place, if it was asked."""
        try:
            try:
                if isinstance(asked, LedgerError):
                    raise asked
                if asked is None and self._allowance is not None and self._allowance.may_owe(self._identity):
                    yield self._repay
                plan, request, result = yield from self._asking(plan, charges, commit, asked)
                ids = result.ids
                try:
                    decision = self._decision(plan, request, result, _unread, commit=commit)
                except _LogNeededError:
                    decision = yield partial(self._decision, plan, request, result, self._entries, commit=commit)
            except LedgerError as error:
                plan.check_price(self._clock())
                decision, ids = yield partial(self._unanswered, plan, charges, error, commit=commit)
        except _PriceChanged:  # the price changed after the plan was built, as happens in a long-lived process
            for key in keys:
                self._plans.pop(key, None)
            plan, charges = self._together(keys, charges[0].region, commit)
            return (yield from self._concluding(keys, plan, charges, commit))
        if commit and not decision.admitted:
            note_refusal(self, decision, charges[0].job, charges[0].region, len(charges))
        return decision, charges, ids

    def _repay(self) -> None:
        """Hand the ledger what this machine drew on its allowance. Tasks of an event loop that decide meanwhile share
        one: a silent ledger would hold up each of them in a thread."""
        if self._allowance is not None:
            for corrected in self._allowance.repay(self._identity, self.ledger, self._retention_ms, self._clock()):
                self._settle_repaid(corrected)

    def _ask_ledger(self, plan: _Plan, charge: Charge, *, commit: bool) -> _Asked:
        return run(self._asking(plan, (charge,), commit))

    def _asking(
        self, plan: _Plan, charges: tuple[Charge, ...], commit: bool, asked: _Asked | None = None
    ) -> Steps[_Asked]:
        """Send one request to the ledger; return it with the result, and with the plan that it follows. The budget
        sends it again with a fresh time if this machine's clock proved wrong, with lower caps if upstream grants less
        than this process knew, and after it has restored data that the ledger lost. `asked`: it was sent once."""
        high_water_mark = self._high_water_mark
        clock_tries = behind_tries = grant_tries = 0
        while True:
            if asked is None:
                expected = NOTHING_EXPECTED
                if high_water_mark is not None:
                    expected = high_water_mark.known() or (yield high_water_mark.expected)
                plan, request = self._request(plan, charges[0], expected, charges[1:])
                result: ChargeResult = yield Question(self.ledger, request, commit)
            else:
                plan, request, result = asked
                asked = None
            if result.outcome == "clock" and clock_tries < 1:
                clock_tries += 1
            elif result.outcome == "granted":
                grant_tries += 1
                if grant_tries > MAX_LOSSES:
                    raise LedgerError(f"ledger {self.ledger.label} changes what upstream grants with each call")
                self._grants = _believed(result.granted, request.caller_ms)
            elif result.outcome == "behind" and high_water_mark is not None:
                behind_tries += 1
                if behind_tries > MAX_LOSSES:
                    raise LedgerError(f"ledger {self.ledger.label} loses what it is told; see its server's log")
                new_key, retention_ms = self._attempt_keys.next(), self._retention_ms
                try:
                    restore = high_water_mark.restore_missing
                    yield partial(restore, self.ledger, result, request.expected, new_key, retention_ms)
                except SeenAheadError as seen:
                    return plan, request, result._replace(outcome="clock", seen_ahead_ms=seen.seen_ms)
                if commit:  # the lost request may still arrive; it must not be mistaken for this one
                    charges = self._anew(charges)
            elif result.outcome in ("clock", "counting") or self._is_ordinary(request, result):
                return plan, request, result
            else:
                if self._said_ahead or _ahead_ms(result):
                    self._say_ahead(result)
                if high_water_mark is not None and (yield partial(high_water_mark.record, request.checks, result)):
                    new_key, retention_ms = self._attempt_keys.next(), self._retention_ms
                    lacked = yield partial(high_water_mark.follow_up, self.ledger, result, new_key, retention_ms)
                    if lacked and behind_tries < MAX_LOSSES:
                        behind_tries += 1
                        for charge_id in result.ids:  # the call has not left
                            views = tuple(limit.view for limit in self.limits)
                            yield partial(self.ledger.settle, self.project, charge_id, 0, views)
                        charges = self._anew(charges) if result.ids else charges
                        continue
                recorder = self._recorder
                if recorder is not None and recorder.is_due(result.now_ms):
                    newest_before_ms = max(request.expected.ids, default=(0, 0))[0]
                    yield partial(recorder.answered, result.now_ms, newest_before_ms)
                return plan, request, result

    def _anew(self, charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
        """The same charges under other idempotency keys."""
        return tuple([charge._replace(idempotency_key=self._attempt_keys.next()) for charge in charges])

    def _request(
        self, plan: _Plan, charge: Charge, expected: Expected, also: tuple[Charge, ...] = ()
    ) -> tuple[_Plan, ChargeRequest]:
        """What the ledger is asked now, and the plan that it follows: with the grants that are believed now."""
        caller_ms, grants = self._clock(), self._grants
        if caller_ms >= grants.until_ms:
            grants = self._grants = _believed(grants.text, caller_ms)
        if plan.grants is not grants:
            plan = self._with_grants(plan, grants)
        return plan, _new(
            ChargeRequest,
            (
                self.project,
                charge,
                plan.checks_at(caller_ms),
                plan.closed_by,
                caller_ms,
                self._jitter_ms,
                expected,
                self._retention_ms,
                grants.text,
                also,
            ),
        )

    def _is_ordinary(self, request: ChargeRequest, result: ChargeResult) -> bool:
        """Whether a decision needs nothing more but to be said. What it showed is recorded then, or is once more."""
        recorder, high_water_mark = self._recorder, self._high_water_mark
        return (
            result.outcome in _DECIDED
            and not (self._said_ahead or _ahead_ms(result))
            and (recorder is None or not recorder.is_due(result.now_ms))
            and (high_water_mark is None or high_water_mark.record_at_once(request.checks, result) is False)
        )

    def _with_grants(self, plan: _Plan, grants: _Grants) -> _Plan:
        """The same plan with the caps that follow from these grants, and in the place of that plan."""
        together = zip(plan.limits, plan.leaves, plan.costs, strict=True)
        caps = tuple(cap(limit, leave, cost, None, grants.units) for limit, leave, cost in together)
        new = replace(plan, caps=caps, grants=grants, cached_checks=(0, 0, ()))
        for key in [key for key, known in self._plans.copy().items() if known is plan]:
            self._plans[key] = new
        return new

    def _say_ahead(self, result: ChargeResult) -> None:
        """Log that the newest charge is dated far ahead: once, until one is not."""
        ahead = _ahead_ms(result) > 0
        if ahead and not self._said_ahead:
            warn(
                "ledger_ahead project=%s ledger=%s newest=%s now=%s: a clock was wrong, and what it dated ahead counts "
                "for that much longer; if the clocks are right now, run `%s`",
                self.project,
                self.ledger.label,
                rfc3339(result.last[0]),
                rfc3339(result.now_ms),
                REPAIR,
            )
        self._said_ahead = ahead

    def _make_plan(self, key: _Key) -> _Plan:
        method, units, bucket, job = key
        check_name("job", job)
        priced = (0, NEVER)
        if units is None:
            price, priced = self.book.price_at(method, self._clock())
            units, bucket = whole(price.units, _A_CHARGE, 1, MAX_UNITS), price.bucket
        method = self.book.canonical(method)
        check_name("method", method, least=1)
        if bucket is None and method in self.book.methods:
            price, priced = self.book.price_at(method, self._clock())
            bucket = price.bucket
        bucket = bucket or self.book.main_bucket.name
        limits = tuple(x for x in self.limits if x.view.selector.counts(bucket, method, job))
        costs = tuple(limit.view.selector.cost(units) for limit in limits)
        plan = self._plan(method, units, bucket, limits, costs, job, priced)
        self._check_fits(plan, f"{method} costs", "make a cheaper call")
        if len(self._plans) < 1_000:
            self._plans[key] = plan
        return plan

    def _check_fit_together(self, plan: _Plan, calls: int) -> None:
        self._check_fits(plan, f"{many(calls, 'call')} together cost", "make fewer calls at once")

    def _check_fits(self, plan: _Plan, what: str, remedy: str) -> None:
        for limit, cap_units, cost_units in zip(plan.limits, plan.caps, plan.costs, strict=True):
            if cost_units > cap_units:
                left = f" after leaving {limit.limit_units - cap_units:,}" if cap_units < limit.limit_units else ""
                raise CostExceedsLimit(
                    f"{what} {many(cost_units, 'unit')} and limit {limit.name!r} of credential {self.credential!r} "
                    f"holds {cap_units:,}{left}: it can never fit; raise the limit or {remedy}"
                )

    def _plan(
        self,
        method: str,
        units: int,
        bucket: str,
        limits: tuple[Limit, ...],
        costs: tuple[int, ...],
        job: str,
        priced: tuple[int, int] = (0, NEVER),
    ) -> _Plan:
        leave = self._leave.get(job, {})
        leaves = tuple(whole(leave.get(limit.name, 0), "units: what a job leaves", 0, MAX_NUMBER) for limit in limits)
        caps = tuple(cap(limit, left, cost, None) for limit, left, cost in zip(limits, leaves, costs, strict=True))
        closed_by = self.book.closed_by(method, bucket) if bucket else ()
        paced = any(x.paced for x in limits)
        return _Plan(method, units, bucket, closed_by, limits, leaves, caps, costs, paced, priced, _NO_GRANTS)

    def _decision(
        self,
        plan: _Plan,
        request: ChargeRequest,
        result: ChargeResult,
        read: ReadEntries,
        *,
        commit: bool,
    ) -> Decision:
        if not result.unlogged:
            refused = _room_at_once(plan, request, result) if result.outcome == "refused" else None
            if refused is not None or result.outcome == "admitted":
                return self._ordinary(plan, request, result, refused, commit=commit)
        states = _states(plan, request, result)
        admitted = result.outcome == "admitted"
        reason: Reason = "ok"
        refused_by: str | None = None
        retry_at_ms: int | None = None
        detail = ""
        if result.outcome == "clock":
            reason, detail = "clock", _clocks(request, result)
        elif result.outcome == "counting":
            reason, detail, retry_at_ms = "counting", COUNTING, result.now_ms + COUNT_AGAIN_MS
        elif result.exhaustion is not None:
            exhaustion = result.exhaustion
            refused_by, detail = exhaustion.bucket, exhaustion.evidence
            reason = "closed" if exhaustion.until_ms == NEVER else "exhausted"
            if reason == "exhausted":
                retry_at_ms = exhaustion.until_ms + self._jitter_ms
        elif not admitted:
            refused_by, reason, retry_at_ms, detail = self._refusal(plan, request, result, read)
        if len(states) == 1:
            tightest: LimitState | None = states[0]
        else:
            tightest = min(states, key=_further_calls, default=None)
        return _new(
            Decision,
            (
                admitted,
                result.id,
                "ledger" if admitted and commit else None,
                self.credential,
                self.project,
                plan.method,
                plan.units,
                reason,
                refused_by,
                tightest.remaining_units if tightest else 0,
                result.now_ms,
                retry_at_ms,
                states,
                detail,
                _ahead_ms(result),
                False,
            ),
        )

    def _ordinary(
        self,
        plan: _Plan,
        request: ChargeRequest,
        result: ChargeResult,
        refused: tuple[str, int] | None,
        *,
        commit: bool,
    ) -> Decision:
        """The decision of nearly every call, in one go. What it says is what `_decision` would say. `refused`: by which
        limit, and until when."""
        states, fewest, remaining = [], NEVER, 0
        for limit, check, used in zip(plan.limits, request.checks, result.used_units, strict=False):
            _, cap_units, cost_units, _ = check
            left = cap_units - used if cap_units > used else 0
            states.append(_new(LimitState, (limit.name, cost_units, used, cap_units, left, 0, 0, 0, 0)))
            if left // (cost_units or 1) < fewest:
                fewest, remaining = left // (cost_units or 1), left
        admitted = refused is None
        refused_by, retry_at_ms = refused or (None, None)
        return _new(
            Decision,
            (
                admitted,
                result.id,
                "ledger" if commit and admitted else None,
                self.credential,
                self.project,
                plan.method,
                plan.units,
                "ok" if admitted else "limit",
                refused_by,
                remaining,
                result.now_ms,
                retry_at_ms,
                tuple(states),
                "",
                _ahead_ms(result),
                False,
            ),
        )

    def _unanswered(
        self, plan: _Plan, charges: tuple[Charge, ...], trouble: LedgerError, *, commit: bool
    ) -> tuple[Decision, tuple[str, ...]]:
        """The decision when the ledger could not answer: the local allowance's where there is one, else a refusal."""
        drawn, detail = None, str(trouble)
        if self._allowance is not None:
            longest_ms = max((limit.view.window.longest_ms for limit in self.limits), default=DAY_MS)
            try:
                drawn = self._allowance.draw(self._identity, charges, longest_ms, commit=commit, because=detail)
            except LedgerError as error:
                detail = f"{detail}; {error}"
        admitted = drawn is not None
        ids = tuple([f"{ALLOWANCE_ID}{name}" for name in drawn.names]) if drawn is not None else ()
        decision = Decision(
            admitted=admitted,
            id=ids[0] if ids else None,
            source="allowance" if admitted and commit else None,
            credential=self.credential,
            project=self.project,
            method=plan.method,
            cost_units=plan.units,
            reason="ok" if admitted else "ledger-unavailable",
            refused_by=None,
            remaining_units=drawn.remaining_units if drawn is not None else 0,
            decided_at_ms=self._clock(),
            retry_at_ms=None,
            limits=(),
            detail=detail,
            lasting=isinstance(trouble, UnusableLedger),
        )
        return decision, ids

    def _refusal(
        self, plan: _Plan, request: ChargeRequest, result: ChargeResult, read: ReadEntries
    ) -> tuple[str, Reason, int | None, str]:
        """The limit that delays a refused call longest, the reason, the time when all limits have room, and details.

        The time is None where the log can no longer be read. The ledger has refused, so the allowance is not asked.
        """
        standings, clocks = _standings(plan, request, result, of_all=plan.paced)
        for one in standings:
            if one.cost_units > one.cap_units:  # by the configuration it fits: see `_make_plan`
                return one.limit.name, "closed", None, _too_little(one.limit, plan.grants)
        retry_at_ms: int | None
        try:
            retry_at_ms, i = retry_at(standings, clocks, read)
            limit = standings[i].limit
        except LedgerError as error:
            retry_at_ms, limit = None, next(one.limit for one in standings if one.full)
            warn("retry_at_unknown project=%s limit=%s: %s", self.project, limit.name, error)
        n = plan.limits.index(limit)
        check, leave_units = request.checks[n], plan.leaves[n]
        details = [f"of {plan.caps[n]:,} by the end of the {_period(limit)}"] if check.cap_units < plan.caps[n] else []
        details += [f"this job leaves {leave_units:,} to others"] if leave_units else []
        if request.also:
            details.append(f"and these {many(1 + len(request.also), 'call')} need {check.cost_units:,} together")
        if not leave_units:
            return limit.name, "limit", retry_at_ms, ", ".join(details)
        alone = cap(limit, 0, check.cost_units, request.caller_ms, plan.grants.units)
        reason: Reason = "limit" if result.used_units[n] + check.cost_units > alone else "leave"
        return limit.name, reason, retry_at_ms, ", ".join(details)

    def _entries(self, since_ms: int, until_ms: int) -> Iterator[Entry]:
        return read_entries(self.ledger, self.project, since_ms, until_ms)


# -- for clients and jobs, not for users -------------------------------------------------------------------------------


def deciding(
    budget: Budget,
    method: str,
    *,
    units: int | None = None,
    job: str | None = None,
    region: str | None = None,
    commit: bool,
) -> Steps[Decision]:
    """`Budget.charge`, or without `commit` `Budget.peek`, for whoever does the steps: see `quota.common.steps`."""
    return budget._deciding(method, units, None, job, region, commit=commit)


def deciding_many(
    budget: Budget, calls: Iterable[str | tuple[str, int]], *, job: str | None = None, region: str | None = None
) -> Steps[list[Decision]]:
    """`Budget.charge_many`, for whoever does the steps."""
    return (yield from budget._deciding_all(_calls(calls), job, region))


def check_call(budget: Budget, call: str | tuple[str, int], job: str) -> None:
    """Raises UsageError for a call that can never succeed, as `charge_many` does. Asks nobody."""
    method, units = (call, None) if isinstance(call, str) else call
    budget._call(method, units, None, job, "", commit=False)


def charge_attempt(budget: Budget, method: str, verb: str) -> Decision:
    """`Budget.charge` for an outgoing call. A method unknown to the book costs the book's default for the HTTP verb."""
    return budget._decide(*_attempt(budget, method, verb), None, None, commit=True)


def charging_attempt(budget: Budget, method: str, verb: str) -> Steps[Decision]:
    """The same for whoever does the steps."""
    return budget._deciding(*_attempt(budget, method, verb), None, None, commit=True)


def charge_attempts(budget: Budget, calls: Iterable[tuple[str, str]]) -> list[Decision]:
    """`Budget.charge_many` for 1 to 100 outgoing calls, each a method and its HTTP verb."""
    return run(budget._deciding_all([_attempt(budget, method, verb) for method, verb in calls], None, None))


def _attempt(budget: Budget, method: str, verb: str) -> _Call:
    """The method, units and bucket of an outgoing call."""
    book = budget.book
    method, verb = text(method, "method"), text(verb, "verb")
    if book.canonical(method) in book.methods:
        return method, None, None
    price = book.default_price(verb)
    _warn_default_price(book.name, method, price.units)
    return method, whole(price.units, _A_CHARGE, 1, MAX_UNITS), price.bucket


class Asked(NamedTuple):
    """What a call would be told now, and from what that was computed: each limit that counts it. There are no
    `standings` where the clocks disagree, or the ledger still counts. `granted` is what upstream grants by bucket,
    where that is less than the configuration says.
    """

    decision: Decision
    standings: tuple[Standing, ...]
    clocks: Clocks
    granted: Mapping[str, int]


class Together(NamedTuple):
    """What is known of several calls that were decided together, beside the first one's method and the units of all:
    what they cost in each limit that counted any of them, by name, and a bucket that was closed to one of them."""

    calls: int
    costs: Mapping[str, int]
    closed: str | None


def ask(budget: Budget, method: str, units: int, job: str, together: Together | None = None) -> Asked:
    """As `peek`, by the ledger alone. Raises LedgerError, and UsageError for a call that can never be admitted."""
    try:
        units = whole(units, _A_CHARGE, 1, MAX_UNITS)
        if together is None:
            plan = budget._make_plan((method, units, None, job))
        else:
            plan = _plan_together(budget, method, units, job, together)
        charge = Charge(plan.units, plan.bucket, plan.method, job, "", "")
        plan, request, result = budget._ask_ledger(plan, charge, commit=False)
    except _PriceChanged:  # it changed just now
        return ask(budget, method, units, job, together)
    decision = budget._decision(plan, request, result, budget._entries, commit=False)
    if result.outcome in ("clock", "counting"):
        return Asked(decision, (), Clocks(result.now_ms, request.caller_ms, result.last[0]), plan.grants.units)
    standings, clocks = _standings(plan, request, result)
    return Asked(decision, tuple(standings), clocks, plan.grants.units)


def _plan_together(budget: Budget, method: str, units: int, job: str, together: Together) -> _Plan:
    """One plan for all. A limit that `together` does not tell of counts them as one call of the first method."""
    first = budget._make_plan((method, 1, None, job))
    costs = {limit.name: limit.view.selector.cost(units) for limit in first.limits} | dict(together.costs)
    limits = tuple(limit for limit in budget.limits if limit.name in costs)
    plan = budget._plan(first.method, units, first.bucket, limits, tuple(costs[x.name] for x in limits), job)
    if together.closed is not None:
        plan.closed_by = tuple(dict.fromkeys([*plan.closed_by, together.closed]))
    budget._check_fit_together(plan, together.calls)
    return plan


def leaves_of(budget: Budget, job: str) -> Mapping[str, int]:
    """The units that a job leaves to others, by limit."""
    return budget._leave.get(job, {})


def draw_of(budget: Budget, charge_id: str) -> Draw | None:
    """What this machine's journal has of a charge that the allowance admitted. Raises LedgerError."""
    allowance, name = budget._allowance, charge_id.removeprefix(ALLOWANCE_ID)
    number = None if allowance is None or name == charge_id else allowance.number(name)
    return None if allowance is None or number is None else allowance.find(budget._identity, number)


def drawn_units(budget: Budget, at_ms: int) -> int:
    """What this machine had drawn on its allowance at a time, and what counted then. Raises LedgerError."""
    longest_ms = max((limit.view.window.longest_ms for limit in budget.limits), default=DAY_MS)
    return 0 if budget._allowance is None else budget._allowance.drawn_units(budget._identity, at_ms, longest_ms)


def note_refusal(budget: Budget, decision: Decision, job: str, region: str, calls: int = 1) -> None:
    """Count a refusal in the project's history (L30), of so many calls together. `charge` does so itself; a job that
    ends with the refusal of a peek says so here."""
    if budget._recorder is not None:
        budget._recorder.refused(decision, job, region, budget._attempt_keys.run, calls)


def hand_over_refusals(budget: Budget) -> None:
    """Tell the ledger now what this process was refused: somebody is about to look at the counts. Takes 50 ms at most,
    and raises nothing."""
    if budget._recorder is not None:
        budget._recorder.close()


def unlogged_usage(budget: Budget) -> tuple[UnloggedUsage, ...]:
    """The usage that the ledger counts, in any limit of a budget, for charges that it has lost."""
    _, _, result = budget._look("")
    return tuple(usage for of_limit in result.unlogged for usage in of_limit)


def drawn_by(budget: Budget, run: str) -> list[Charge]:
    """The charges that a run drew on this machine's local allowance, repaid or not. Raises LedgerError."""
    return [] if budget._allowance is None else budget._allowance.drawn_by(budget._identity, run)


def close_budget(budget: Budget) -> None:
    """Let every later decision raise UsageError, because what it would go through is closed."""
    closed: Any = _Closed()
    budget.ledger = budget._allowance = budget._high_water_mark = closed


class _Closed:
    """Stands for the ledger, the allowance and the high-water mark of a closed session."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(SESSION_CLOSED)


SESSION_CLOSED = "this session is closed; open another one with quota.open() or quota.open_async()"


# -- a charge around a block or a function -----------------------------------------------------------------------------

F = TypeVar("F", bound="Callable[..., Any]")


class Spend(ContextDecorator):
    """Charges on every entry, and raises Refused before the body runs. The charge stays whatever the body does.

    Entering yields the decision, whose `id` can be settled once the true cost is known. As a decorator it accepts a
    function that runs when it is called; raises UsageError for anything else.
    """

    def __init__(self, budget: Budget, method: str, *, units: int | None, job: str | None, region: str | None) -> None:
        self._budget = budget
        self._method = method
        self._units = units
        self._job = job
        self._region = region

    def __call__(self, func: F) -> F:
        """`func` with a charge at each call. Raises UsageError for a coroutine or generator function."""
        kind, name = spendable(func)
        if kind in ASYNC_KINDS:
            raise UsageError(
                f"{name} is async, and to charge for it here would block its event loop; use a budget of "
                "`async with quota.open_async() as q:`"
            )
        if kind == "generator":
            raise UsageError(
                f"{name} runs later than it is called, and would be charged for without being run; write "
                "`with budget.spend(...):` inside it"
            )
        return super().__call__(func)

    def __enter__(self) -> Decision:
        decision = self._budget.charge(self._method, units=self._units, job=self._job, region=self._region)
        if not decision.admitted:
            raise Refused(decision)
        return decision

    def __exit__(self, *exc: object) -> None:
        return None


ASYNC_KINDS = ("coroutine", "async generator")


def spendable(func: Any) -> tuple[str, str]:
    """What a call of a function makes, a "coroutine", a "generator", an "async generator" or "" for its result; and the
    function's name. Raises UsageError for what no spend can decorate."""
    import inspect  # imported late: few processes use the decorator

    name = str(getattr(func, "__qualname__", type(func).__name__))[:80]
    if isinstance(func, (staticmethod, classmethod)):
        raise UsageError(f"{name}: write the spend below @{type(func).__name__}, next to the function")
    if isinstance(func, type) or not callable(func):
        raise UsageError(f"spend decorates functions, and {name} is none")
    while isinstance(func, partial):
        func = func.func
    if not inspect.isroutine(func):
        func = type(func).__call__
    kinds = {
        "coroutine": inspect.iscoroutinefunction,
        "generator": inspect.isgeneratorfunction,
        "async generator": inspect.isasyncgenfunction,
    }
    return next((kind for kind, is_one in kinds.items() if is_one(func)), ""), name


# -- parts of the budget -----------------------------------------------------------------------------------------------

MAX_UNITS = 10**9
"""The largest single charge. The sum of a whole log of them stays exact in Lua's and JSON's 53-bit integers."""

_A_CHARGE = "units: a charge"


def cap(
    limit: Limit, leave_units: int, cost_units: int, now_ms: int | None, granted: Mapping[str, int] | None = None
) -> int:
    """The number enforced for one call: the limit's own, lowered to what upstream grants (see `granted_units`), by the
    units that the job leaves to others, and by the limit's pace at `now_ms`. With `now_ms` None the pace does not
    count: the result is the most that it will ever be.

    Only this function lowers a limit; the ledger sees only its result. Each job is paced by the total that it may
    spend, so a job that leaves half to others spends its own half evenly too. Pace delays a call but never forbids it:
    an unused window always has room for one.
    """
    most = granted_units(limit, granted) if granted else None
    units = max(0, (limit.limit_units if most is None else min(limit.limit_units, most)) - leave_units)
    window = limit.view.window
    if now_ms is None or not limit.paced or not isinstance(window, Calendar):
        return units
    paced = paced_units(units, window.edges(now_ms), now_ms)
    return min(units, max(cost_units, 1, paced))


def granted_units(limit: Limit, granted: Mapping[str, int]) -> int | None:
    """The number that a limit may enforce where upstream grants so many units by bucket: its grant less the limit's
    headroom, 0 or more. None where the grants say nothing about it: it counts another bucket, several, or calls, or in
    a longer window than a day, the longest period that upstream's grant may stand for."""
    selector = limit.view.selector
    if selector.count == "calls" or len(selector.buckets) != 1 or limit.view.window.longest_ms > _LONG_DAY_MS:
        return None
    units = granted.get(selector.buckets[0])
    return None if units is None else max(0, units - limit.headroom_units)


_LONG_DAY_MS = 25 * HOUR_MS


def _believed(text: str, now_ms: int) -> _Grants:
    """The grants in the ledger's text of them, without those that are too old to be believed, and those that a clock
    which stood ahead has dated."""
    live = [grant for grant in read_grants(text) if grant.believed_at(now_ms)]
    until_ms = min((grant.until_ms for grant in live), default=NEVER)
    return _Grants(text, {grant.bucket: grant.quota_units for grant in live}, until_ms)


def _too_little(limit: Limit, grants: _Grants) -> str:
    unspent = f", of which {limit.headroom_units} stay unspent" if limit.headroom_units else ""
    return f"{grants.units[limit.view.selector.buckets[0]]}{unspent}"


def _ahead_ms(result: ChargeResult) -> int:
    """The time of the newest charge, where it is dated further ahead of now than a clock may go back; else 0."""
    newest_ms = result.last[0]
    return newest_ms if newest_ms > result.now_ms + RETENTION_SLACK_MS else 0


def _clocks(request: ChargeRequest, result: ChargeResult) -> str:
    """What both clocks read, for people."""
    if result.seen_ahead_ms:
        return (
            f"the clocks read {rfc3339(result.now_ms)}, and this machine saw charges dated "
            f"{rfc3339(result.seen_ahead_ms)}, which the ledger lacks (`{REPAIR}`, if the clocks are right now)"
        )
    return f"this machine's clock reads {rfc3339(request.caller_ms)}, the ledger's {rfc3339(result.now_ms)}"


def _unread(_since_ms: int, _until_ms: int) -> Iterable[Entry]:
    """The log's entries, for who must not wait for them."""
    raise _LogNeededError


def _selects(limit: Limit, bucket: str) -> bool:
    """Whether a limit counts calls of a bucket."""
    return not limit.view.selector.buckets or bucket in limit.view.selector.buckets


def _room_at_once(plan: _Plan, request: ChargeRequest, result: ChargeResult) -> tuple[str, int] | None:
    """Which limit delays a refused call longest, and until when: what `_refusal` would say. None where that takes
    more than the ledger's answer."""
    if plan.paced or request.also or not result.leaving_ms:
        return None
    now_ms, newest_ms, latest_ms, name = result.now_ms, result.last[0], -1, ""
    each = zip(plan.limits, plan.leaves, request.checks, result.used_units, result.leaving_ms, strict=True)
    for limit, leave_units, check, used, leaving_ms in each:
        view, cap_units, cost_units, edges = check
        if used + cost_units <= cap_units:
            continue
        if leave_units or cost_units > cap_units:
            return None
        if edges is not None:  # a calendar window frees everything at its edge
            room_ms = edges[1]
            if not (edges[0] <= now_ms < room_ms and newest_ms < room_ms):
                return None
        elif leaving_ms is not None and isinstance(view.window, Sliding):
            room_ms = max(now_ms, leaving_ms + view.window.window_ms)
        else:
            return None
        if room_ms > latest_ms:
            latest_ms, name = room_ms, limit.name
    return (name, latest_ms) if name else None


def _standings(
    plan: _Plan, request: ChargeRequest, result: ChargeResult, *, of_all: bool = True
) -> tuple[list[Standing], Clocks]:
    """The state of each limit at a decision, with the clocks, for `retry_at`. Not `of_all`: of those that refused."""
    standings = []
    for n, (check, used) in enumerate(zip(request.checks, result.used_units, strict=True)):
        full = used + check.cost_units > check.cap_units
        if full or of_all:
            unlogged = result.unlogged[n] if result.unlogged else ()
            leaving_ms = result.leaving_ms[n] if result.leaving_ms else None
            standings.append(Standing(plan.limits[n], plan.caps[n], plan.costs[n], used, unlogged, full, leaving_ms))
    return standings, Clocks(result.now_ms, request.caller_ms, result.last[0])


_new = tuple.__new__
"""Makes a named tuple of all its fields, in half the time that its class takes."""


def _further_calls(state: LimitState) -> int:
    return state.remaining_units // state.cost_units


def _states(plan: _Plan, request: ChargeRequest, result: ChargeResult) -> tuple[LimitState, ...]:
    states = []
    for limit, check, used in zip(plan.limits, request.checks, result.used_units, strict=False):
        _, cap_units, cost_units, _ = check
        left = cap_units - used if cap_units > used else 0
        states.append(_new(LimitState, (limit.name, cost_units, used, cap_units, left, 0, 0, 0, 0)))
    for n, usages in enumerate(result.unlogged):
        live = [part for usage in usages for part in usage.expiries if part[1] > result.now_ms]
        if live:
            untils_ms = [until_ms for _, until_ms in live]
            states[n] = states[n]._replace(
                unlogged_units=sum(units for units, _ in live),
                unlogged_next_ms=min(untils_ms),
                unlogged_until_ms=max(untils_ms),
                upstream_units=sum(u.units_at(result.now_ms) for u in usages if u.epoch.startswith(UPSTREAM)),
            )
    return tuple(states)


def _period(limit: Limit) -> str:
    return limit.view.window.period if isinstance(limit.view.window, Calendar) else limit.view.window.name


def _edges(view: View, now_ms: int) -> Edges | None:
    return view.window.edges(now_ms) if isinstance(view.window, Calendar) else None


def _calls(calls: Any) -> list[_Call]:
    """The argument of `charge_many`, checked. A lone call is one. A mapping would lose its values, and a set has no
    order; bytes hold numbers."""
    lone = isinstance(calls, str) or (isinstance(calls, tuple) and len(calls) == 2 and type(calls[1]) is int)
    try:
        if isinstance(calls, (Mapping, set, frozenset, bytes, bytearray, memoryview)):
            raise TypeError
        several = [calls] if lone else list(islice(calls, MAX_CHARGES + 1))
    except TypeError:
        raise UsageError(f"calls {show(calls)}: give a list of methods, or of (method, units)") from None
    if not 1 <= len(several) <= MAX_CHARGES:
        found = "none" if not several else f"more than {MAX_CHARGES}"
        raise UsageError(f"1 to {MAX_CHARGES} calls are charged together, and here are {found}")
    checked: list[_Call] = []
    for call in several:
        if isinstance(call, str):
            checked.append((text(call, "method"), None, None))
        elif isinstance(call, tuple) and len(call) == 2:
            checked.append((text(call[0], "method"), whole(call[1], _A_CHARGE, 1, MAX_UNITS), None))
        else:
            raise UsageError(f"call {show(call)} is not a method, and not (method, units)")
    return checked


def check_name(what: str, name: str, least: int = 0) -> None:
    """Raises UsageError for a name that no charge may have."""
    if not least <= len(name) <= 64 or not name.isprintable():
        raise UsageError(f"{what} {name[:80]!r}: a name has 1 to 64 printable characters")


def _is_id(text: str) -> bool:
    ms, dash, seq = text.partition("-")
    return bool(dash) and all(part.isascii() and part.isdigit() and len(part) <= 15 for part in (ms, seq))


_warned: set[tuple[str, str]] = set()


def _warn_default_price(book: str, method: str, units: int) -> None:
    if (book, method) not in _warned and len(_warned) < 1_000:
        _warned.add((book, method))
        warn(
            "default_price book=%s method=%s units=%d: the cost book has no such method; add it",
            book,
            method,
            units,
        )
