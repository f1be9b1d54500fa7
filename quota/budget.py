"""READ FIRST. A budget decides whether one call to a metered API may leave now.

    Budget      the limits of one credential over one ledger; most callers want `charge`
    Decision    the answer (quota.decision): admitted, or refused and by which limit, what remains, when to retry
    Checklist   what the ledger must check for a kind of call (quota.deciding.checklist): which limits, which numbers
    Account     the project at its ledger (quota.deciding.account): asks, and asks again where that is right
    Answers     makes the decision out of the ledger's result (quota.deciding.answer)

Every decision takes one way, `Budget._decide`: `_price` says what the calls cost and which limits count them, `_ask`
what the ledger decides, and `_go_without` what holds while no ledger answers. `charge`, `charge_many` and `peek` are
thin wrappers around it; an awaited decision takes the same steps (`quota.async_budget`). The ledger does the
comparison, because that must be atomic with the charge: see `quota.ledger.contract` for its four steps.

The arithmetic, for a limit of L units over a window, of which U are used, and a call that costs C:

    admitted            U + C <= L
    remaining           L - U                       after the charge, if there was one
    retry_at            the first millisecond at which enough has left the window that U + C <= L holds again
    never               C > L                       CostExceedsLimit: no waiting helps

L is the limit's number after `cap`: upstream may grant less, a job may leave some of it to others, and a paced limit
releases it over the day.
The module quota.deciding.retry_at computes `retry_at`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from quota.common.fork import OfOneProcess
from quota.common.text import listed, many, show
from quota.deciding.account import Account
from quota.deciding.checklist import Checklist, Parts, charge_units, charges_of
from quota.deciding.corrections import ALLOWANCE_ID, joined, refund, repay, settle
from quota.deciding.outlook import Outlook, look, usage
from quota.decision import Decision, LimitState
from quota.errors import LedgerError, UnusableLedger, UsageError
from quota.ledger.contract import MAX_CHARGES, Ledger
from quota.ledger.entry import Charge, Entry
from quota.ledger.identity import Identity
from quota.terms.arguments import one, text, texts
from quota.terms.attribution import AttemptKeys, attribution
from quota.terms.costs import CostBook
from quota.terms.limits import Limit, named_twice

if TYPE_CHECKING:
    from quota.deciding.recorder import Recorder
    from quota.deciding.spend import Spend
    from quota.recovery.allowance import Allowance
    from quota.recovery.high_water_mark import HighWaterMark

Call = tuple[str, "int | None", "Parts | None"]
"""A method, its units where the caller gives them, and what it is charged where the book does not say."""

Priced = tuple["Checklist", "tuple[Charge, ...]", bool]
"""Calls of one job that are decided together: the checklist of all, the charges of each in turn, and whether they are
made. Without charges all are free."""


class Budget(OfOneProcess):
    """The limits of one credential over one ledger.

    It is cheap to create and safe to share between threads. `clock` (ms since 1970) replaces the host's clock, for
    tests and simulation; it does not replace the ledger's clock.
    `quota.async_budget` and `quota.clients` take the steps of `_decide` themselves.
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
        if not isinstance(ledger, Ledger):
            raise UsageError(f"ledger {show(ledger)} is not one; quota.ledger.factory.open_ledger(url) opens one")
        if not isinstance(leave, Mapping | None) or not all(isinstance(one, Mapping) for one in (leave or {}).values()):
            raise UsageError(f"leave {show(leave)}: write the units of each limit by job, {{job: {{limit: units}}}}")
        self._account = Account(
            text(credential, "credential"),
            text(project, "project"),
            one(book, CostBook, "book", "quota.settings.books.load_book(name) reads one"),
            _limits(limits),
            ledger,
            leave or {},
            clock=clock,
            jitter_ms=jitter_ms,
            attempt_keys=attempt_keys,
            allowance=allowance,
            high_water_mark=high_water_mark,
            identity=identity,
            recorder=recorder,
        )

    def __repr__(self) -> str:
        limits = listed(limit.name for limit in self.limits)
        return f"<quota.Budget of {self.credential}: project {self.project}, limits {limits}>"

    @property
    def credential(self) -> str:
        return self._account.credential

    @property
    def project(self) -> str:
        return self._account.project

    @property
    def book(self) -> CostBook:
        return self._account.book

    @property
    def limits(self) -> tuple[Limit, ...]:
        return self._account.limits

    def limits_of(self, job: str) -> tuple[Limit, ...]:
        """The limits that the calls of a job can meet. `limits` has those of the configured jobs."""
        return self._account.checklists.limits_of(text(job, "job") if job else "")

    @property
    def ledger(self) -> Ledger:
        return self._account.ledger

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
        return self._decide([(method, units, None)], job, region, commit=True)[0]

    def charge_many(
        self, calls: Iterable[str | tuple[str, int]], *, job: str | None = None, region: str | None = None
    ) -> list[Decision]:
        """Charge 1 to 100 calls in one step before they leave: all of them if every limit has room for all, else none.

        Each call is a method, or a method with its units. They come in a list or another iterable with an order; a
        mapping or a set is refused with UsageError. The decisions come in the order of the calls, each with an id of
        its own; `limits`, `retry_at` and the rest are those of all calls together. Raises as `charge` does, also
        CostExceedsLimit for calls that can never fit together. Then, too, nothing is charged.
        """
        return self._decide(calls_of(calls), job, region, commit=True)

    def peek(
        self,
        method: str,
        *,
        units: int | None = None,
        job: str | None = None,
        region: str | None = None,
    ) -> Decision:
        """The decision that `charge` would make now, without charging."""
        return self._decide([(method, units, None)], job, region, commit=False)[0]

    def refund(self, charge_id: str) -> Charge | Entry:
        """Give back a charge whose request provably never left this machine: in all of its buckets.

        Returns the charge as it was before, of several buckets that in the first. Raises as `settle` does; it may be
        repeated.
        """
        return refund(self._account, charge_id)

    def settle(self, charge_id: str, units: int) -> Charge | Entry:
        """Set the true cost of a charge, in absolute units: idempotent, never refused, its time and id unchanged.

        Of a call of several buckets it is the cost in the first one; what it cost in the others stays. Returns the
        charge as it was before. Raises UnknownCharge for an id that is unknown or has left the log.
        """
        return settle(self._account, charge_id, units)

    def usage(self, job: str | None = None) -> tuple[LimitState, ...]:
        """The current state of every limit. Charges nothing. With a `job`, the numbers are lowered for that job.

        Raises LedgerError, also when this machine's clock and the ledger's disagree.
        """
        return usage(self._account, "" if job is None else text(job, "job"))

    def outlook(self, methods: Iterable[str] = ()) -> Outlook:
        """The state of this budget, and the decision for the dearest of these methods. Charges nothing.

        Raises LedgerError, also when this machine's clock and the ledger's disagree.
        """
        return look(self._account, texts(methods, "methods"))

    def owed_units(self) -> int:
        """The units that this machine drew on its local allowance and has not repaid to the ledger yet."""
        allowance = self._account.allowance
        return 0 if allowance is None else allowance.owed_units(self._account.identity)

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

        The block gets the decision. Where `units` are the most that a call may cost, `settle` says what it did cost:
        `with budget.spend("chat", units=8_000) as call: ...; call.settle(used)`. Until then these units count as
        reserved.
        """
        from quota.deciding.spend import Spend  # late: few processes use it

        charge = partial(self._decide, [(text(method, "method"), units, None)], job, region, commit=True)
        return Spend(charge, self.settle, reserves=units is not None)

    # -- the decision ------------------------------------------------------------------------------------------------

    def _decide(
        self,
        calls: Sequence[Call],
        job: str | None = None,
        region: str | None = None,
        *,
        commit: bool,
        reserved: bool = False,
    ) -> list[Decision]:
        """The decision about calls of one job that leave together: all of them, or none. One for each, in order. With
        `reserved`, what is charged is an upper bound of their cost."""
        priced = self._price(calls, job, region, commit=commit, reserved=reserved)
        if not priced[1]:
            return self._free(priced[0])
        try:
            return self._ask(priced)
        except LedgerError as error:
            return self._go_without(priced, error)

    def _price(
        self, calls: Sequence[Call], job: str | None, region: str | None, *, commit: bool, reserved: bool = False
    ) -> Priced:
        """What these calls cost, and which limits count them. From memory, so it never waits.

        Raises UsageError for calls that can never be admitted, CostExceedsLimit and UnknownMethod among them.
        """
        checklists = self._account.checklists
        job, region = attribution(job, region, self._account.of_run)
        each = []
        for method, units, parts in calls:
            if units is not None and type(units) is not int:
                units = charge_units(units)
            each.append(checklists.of_now((text(method, "method"), units, parts, job)))
        charges = charges_of(each, job, region, self._account.attempt_keys.next if commit else None, reserved=reserved)
        if len(charges) > MAX_CHARGES:
            raise UsageError(
                f"these {many(len(each), 'call')} are {many(len(charges), 'charge')}, one for each bucket, and at most "
                f"{MAX_CHARGES} are made together; make fewer calls at once"
            )
        return each[0] if len(each) == 1 else checklists.sum_of(each, job), charges, commit

    def _free(self, checklist: Checklist) -> list[Decision]:
        """The decision about calls that cost nothing: the ledger need not be asked."""
        account = self._account
        answer = Decision(
            True, None, None, account.credential, account.project, "", 0, "ok", None, 0, account.clock(), None, ()
        )
        return [answer._replace(method=call.method) for call in checklist.calls]

    def _ask(self, priced: Priced) -> list[Decision]:
        """What the ledger decides about priced calls. Raises LedgerError where it cannot; nothing may leave then,
        and the calls may have been charged."""
        account, (checklist, charges, commit) = self._account, priced
        repay(account)
        checklist, request, result = account.ask(checklist, charges, commit=commit)
        decision = account.answers.decision(checklist, request, result, account.entries_in_time, commit=commit)
        return self._of_each(checklist, (request.charge, *request.also), decision, result.ids, commit=commit)

    def _go_without(self, priced: Priced, trouble: LedgerError) -> list[Decision]:
        """What holds while the ledger does not answer: the local allowance decides, where there is one; else the calls
        are refused."""
        account, (checklist, charges, commit), detail = self._account, priced, str(trouble)
        next_key = account.attempt_keys.next
        checklist, charges = account.checklists.priced_at(account.clock(), checklist, charges, next_key)
        drawn = None
        if account.allowance is not None:
            try:
                drawn = account.allowance.draw(
                    account.identity, charges, account.longest_ms, commit=commit, because=detail
                )
            except LedgerError as error:
                detail = f"{detail}; {error}"
        admitted = drawn is not None
        ids = tuple([f"{ALLOWANCE_ID}{name}" for name in drawn.names]) if drawn is not None else ()
        decision = Decision(
            admitted=admitted,
            id=ids[0] if ids else None,
            source="allowance" if admitted and commit else None,
            credential=account.credential,
            project=account.project,
            method=checklist.method,
            cost_units=checklist.units,
            reason="ok" if admitted else "ledger-unavailable",
            refused_by=None,
            remaining_units=drawn.remaining_units if drawn is not None else 0,
            decided_at_ms=account.clock(),
            retry_at_ms=None,
            limits=(),
            detail=detail,
            lasting=isinstance(trouble, UnusableLedger),
        )
        return self._of_each(checklist, charges, decision, ids, commit=commit)

    def _of_each(
        self,
        checklist: Checklist,
        charges: tuple[Charge, ...],
        decision: Decision,
        ids: tuple[str, ...],
        *,
        commit: bool,
    ) -> list[Decision]:
        """The decision about each of the calls. A refusal is counted in the project's history."""
        if commit and not decision.admitted:
            self._account.note_refusal(decision, charges[0].job, charges[0].region, len(checklist.calls))
        elif commit and checklist.shadow and decision.would_refuse:
            self._account.note_shadow(decision, charges[0].job, charges[0].region, len(checklist.calls))
        if len(charges) == 1 and not checklist.each:
            decisions = [decision]
        else:
            left = iter(ids)
            decisions = [
                decision._replace(id=joined(islice(left, len(call.parts))), method=call.method, cost_units=call.units)
                for call in checklist.calls
            ]
        if commit and self._account.on_decision is not None:
            for one in decisions:
                self._account.on_decision(one)
        return decisions


def account_of(budget: Budget) -> Account:
    """What a budget stands on: for the modules of this package."""
    return budget._account


def check_call(budget: Budget, call: str | tuple[str, int], job: str) -> None:
    """Raises UsageError for a call that can never succeed, as `charge_many` does. Asks nobody."""
    budget._price(calls_of([call]), job, None, commit=False)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _limits(limits: Limit | Iterable[Limit]) -> tuple[Limit, ...]:
    with suppress(TypeError):
        several = (limits,) if isinstance(limits, Limit) else tuple(limits)
        if all(isinstance(limit, Limit) for limit in several):
            if (n := named_twice(several)) is not None:
                raise UsageError(f"limits: {show(several[n].name)} is the name of two; give each a name of its own")
            return several
    raise UsageError(f"limits {show(limits)}: give a quota.Limit, or several of them in a list")


def calls_of(calls: Any) -> list[Call]:
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
    checked: list[Call] = []
    for call in several:
        if isinstance(call, str):
            checked.append((text(call, "method"), None, None))
        elif isinstance(call, tuple) and len(call) == 2:
            checked.append((text(call[0], "method"), charge_units(call[1]), None))
        else:
            raise UsageError(f"call {show(call)} is not a method, and not (method, units)")
    return checked
