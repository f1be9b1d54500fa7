"""READ FIRST. A budget decides whether one call to a metered API may leave now.

    Budget      the limits of one credential over one ledger; most callers want `charge`
    Decision    the answer (quota.decision): admitted, or refused and by which limit, what remains, when to retry
    Checklist   what the ledger must check for a kind of call (quota.checklist): which limits, and which numbers
    Answers     makes the decision out of the ledger's result (quota.answer)

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

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quota.answer import Answers, LogNeededError, ahead_ms, clocks_of, standings_of, states_of, unread
from quota.arguments import MAX_NUMBER, one, text, texts, whole, whole_clock
from quota.attribution import AttemptKeys, check_name, current_attribution
from quota.checklist import (
    MAX_CHARGE_UNITS,
    MAX_KEPT,
    NO_GRANTS,
    Checklist,
    Checklists,
    PriceChangedError,
    believed,
    charge_units,
)
from quota.common.clock import NEVER, elapsed_s, host_clock, rfc3339
from quota.common.fork import OfOneProcess
from quota.common.log import warn
from quota.common.text import show
from quota.costs import CostBook
from quota.decision import COUNTING, REPAIR, SET_THE_CLOCK, Decision
from quota.errors import LedgerError, UnknownCharge, UnusableLedger, UsageError
from quota.ledger.contract import (
    COUNT_WITHIN_S,
    MAX_CHARGES,
    NOTHING_EXPECTED,
    RETENTION_SLACK_MS,
    ChargeRequest,
    Identity,
    asked_again,
    read_entries,
    repeating,
    retention_of,
)
from quota.ledger.entry import Charge
from quota.limits import DAY_MS, Limit
from quota.recovery.observations import SeenAheadError
from quota.retry_at import Clocks, Standing, room_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quota.checklist import Key, Together
    from quota.decision import LimitState
    from quota.ledger.contract import At, ChargeResult, Exhaustion, Expected, Ledger, LimitCheck, Repeated
    from quota.ledger.entry import Entry
    from quota.ledger.unlogged import UnloggedUsage
    from quota.recorder import Recorder
    from quota.recovery.allowance import Allowance, Draw, Repaid
    from quota.recovery.high_water_mark import HighWaterMark
    from quota.retry_at import ReadEntries
    from quota.spend import Spend

MAX_LOSSES = 5
"""In one decision, the budget restores lost data to a ledger at most this many times."""

MAX_COUNTING = 50
"""So often a look at the numbers asks a ledger that answers "counting"."""

ALLOWANCE_ID = "allowance-"
"""The prefix of the id of a charge that the local allowance admitted."""

T = TypeVar("T")

_Call = tuple[str, "int | None", "str | None"]
"""A method, and its units and bucket where they are not the book's."""

_Labelled = tuple[str, "int | None", "str | None", str, str, bool]
"""The same with job and region, and whether it is charged."""

_DECIDED = ("admitted", "refused", "exhausted")

_Asked = tuple[Checklist, "ChargeRequest", "ChargeResult"]
"""A request and the ledger's answer, with the checklist that both follow."""


class _Prepared:
    """A kind of call, with all that is the same each time that it is decided: from `since_ms` until `until_ms`, while
    the ledger and the grants are these."""

    __slots__ = ("checklist", "commit", "decide", "grants", "key", "ledger", "request", "since_ms", "until_ms")

    def __init__(self, key: Key, checklist: Checklist, request: ChargeRequest, ledger: Ledger, commit: bool) -> None:
        self.key, self.checklist, self.request, self.ledger, self.commit = key, checklist, request, ledger, commit
        self.grants = checklist.grants
        self.since_ms, self.until_ms, checks = checklist.cached_checks
        if checks is not request.checks:  # of a paced limit they hold for this moment alone
            self.since_ms = self.until_ms = 0
        self.until_ms = min(self.until_ms, self.grants.until_ms)
        self.decide: Repeated | None = None

    def repeated(self) -> Repeated:
        """What decides it."""
        self.decide = repeating(self.ledger, self.request, commit=self.commit)
        return self.decide


def _limits(limits: Limit | Iterable[Limit]) -> tuple[Limit, ...]:
    with suppress(TypeError):
        several = (limits,) if isinstance(limits, Limit) else tuple(limits)
        if all(isinstance(limit, Limit) for limit in several):
            return several
    raise UsageError(f"limits {show(limits)}: give a quota.Limit, or several of them in a list")


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


class Budget(OfOneProcess):
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
        self.credential = text(credential, "credential")
        self.project = text(project, "project")
        self.book = one(book, CostBook, "book", "quota.settings.books.load_book(name) reads one")
        self.limits = _limits(limits)
        if not callable(getattr(ledger, "decide", None)):
            raise UsageError(f"ledger {show(ledger)} is not one; quota.ledger.factory.open_ledger(url) opens one")
        self.ledger = ledger
        if not isinstance(leave, Mapping | None) or not all(isinstance(one, Mapping) for one in (leave or {}).values()):
            raise UsageError(f"leave {show(leave)}: write the units of each limit by job, {{job: {{limit: units}}}}")
        # Credentials of one project have the same limits, so these are all that the configuration has for it.
        self._retention_ms = retention_of(limit.view.window for limit in self.limits)
        self._clock = host_clock if clock is None else whole_clock(clock)
        self._jitter_ms = whole(jitter_ms, "ms: the jitter", 0, MAX_NUMBER)
        self._answers = Answers(credential, project, self._jitter_ms)
        self._checklists = Checklists(credential, book, self.limits, leave or {}, self._clock)
        self._prepared: dict[_Labelled, _Prepared] = {}
        self._said_ahead = False
        self._grants = NO_GRANTS
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
        return self._deciding_all(_calls(calls), job, region)

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
        units = whole(units, "units: what a charge counts, 0 after a refund,", 0, MAX_CHARGE_UNITS)
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
            raise UnknownCharge(f"project {self.project!r} has no charge {show(charge_id)}; {remedy}")
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
        job = "" if job is None else text(job, "job")
        check_name("job", job)
        checklist, request, result = self._look(job)
        return states_of(checklist, request, result)

    def outlook(self, methods: Iterable[str] = ()) -> Outlook:
        """The state of this budget, and the decision for the dearest of these methods. Charges nothing.

        Raises LedgerError, also when this machine's clock and the ledger's disagree.
        """
        return self._looking(texts(methods, "methods"))

    def _looking(self, methods: Sequence[str]) -> Outlook:
        checklist = self._checklists.of_a_look()
        charge = Charge(0, checklist.bucket, "", "", "", "")
        checklist, request, result = self._counting(checklist, charge)
        room_ms: tuple[int | None, ...] = (None,) * len(self.limits)
        full: Decision | None = None
        if result.outcome != "admitted":  # else every limit has room
            room_ms = self._with_log(partial(_room_of_each, *standings_of(checklist, request, result)))
            full = self._with_log(partial(self._full, checklist, request, result))
        closed, next_ms = result.exhaustion, full.retry_at_ms if full is not None else None
        if closed is not None:
            next_ms = None if closed.until_ms == NEVER else max(next_ms or 0, closed.until_ms + self._jitter_ms)
        dearest = None
        if closed is None and full is None and methods:
            book = self.book.at(request.caller_ms)
            known = [method for method in methods if book.canonical(method) in book.methods]
            prices = {method: book.price(method) for method in known}
            by_share = sorted(prices, key=lambda m: prices[m].units / book.buckets[prices[m].bucket].quota_units)
            dearest = (self._would_be_told(by_share[-1])) if by_share else None
        return Outlook(
            result.now_ms,
            states_of(checklist, request, result),
            room_ms,
            closed,
            full,
            next_ms,
            dearest,
            ahead_ms(result),
        )

    def _with_log(self, say: Callable[[ReadEntries], T]) -> T:
        """What can mostly be said without the log. Where it must be read, that is a step."""
        try:
            return say(unread)
        except LogNeededError:
            return say(self._entries)  # type: ignore[no-any-return]

    def _full(
        self, checklist: Checklist, request: ChargeRequest, result: ChargeResult, read: ReadEntries
    ) -> Decision | None:
        """The refusal of a call by the limits that count every call of its bucket; None where these admit it."""
        bucket = checklist.bucket
        counting_all = [n for n, one in enumerate(checklist.limits) if not one.narrow and _selects(one, bucket)]
        checks = [request.checks[n] for n in counting_all]
        used_units = [result.used_units[n] for n in counting_all]
        if all(used + check.cost_units <= check.cap_units for check, used in zip(checks, used_units, strict=True)):
            return None
        limits = tuple(checklist.limits[n] for n in counting_all)
        costs = tuple(checklist.costs[n] for n in counting_all)
        of_these = self._checklists.of(checklist.method, checklist.units, bucket, limits, costs, "")
        return self._answers.decision(
            self._checklists.with_grants(of_these, checklist.grants),
            request._replace(checks=checks),
            result._replace(
                outcome="refused",
                used_units=tuple(used_units),
                exhaustion=None,
                unlogged=tuple(result.unlogged[n] for n in counting_all) if result.unlogged else (),
                leaving_ms=tuple(result.leaving_ms[n] for n in counting_all) if result.leaving_ms else (),
            ),
            read,
            commit=False,
        )

    def _would_be_told(self, method: str) -> Decision | None:
        """The decision of `peek` for a method by the ledger alone; None for a call that can never be admitted."""
        try:
            checklist = self._checklists.make((method, None, None, ""))
            charge = Charge(checklist.units, checklist.bucket, checklist.method, "", "", "")
            checklist, request, result = self._asking(checklist, (charge,), False, looks=True)
        except UsageError:
            return None
        except PriceChangedError:  # it changed just now
            return self._would_be_told(method)
        return self._with_log(partial(self._answers.decision, checklist, request, result, commit=False))

    def _look(self, job: str) -> _Asked:
        return self._looking_at(job)

    def _looking_at(self, job: str) -> _Asked:
        checklist = self._checklists.of("", 0, "", self.limits, (0,) * len(self.limits), job)
        return self._counting(checklist, Charge(0, "", "", "", "", ""))

    def _counting(self, checklist: Checklist, charge: Charge) -> _Asked:
        """What the ledger counts, for people: they wait for one that has a long log to count first."""
        for _ in range(MAX_COUNTING):
            checklist, request, result = self._asking(checklist, (charge,), False, looks=True)
            if result.outcome == "clock":
                raise LedgerError(f"ledger {self.ledger.label}: {clocks_of(request, result)}; {SET_THE_CLOCK}")
            if result.outcome != "counting":
                return checklist, request, result
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
        from quota.spend import Spend  # late: few processes use it

        return Spend(partial(self.charge, text(method, "method"), units=units, job=job, region=region))

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
        prepared, caller_ms = self._prepared_for(method, units, bucket, job, region, commit)
        asked: ChargeResult | LedgerError | None = None
        at = self._ready(prepared, caller_ms)
        if at is not None:
            try:
                asked = result = (prepared.decide or prepared.repeated())(*at)
                decision = self._at_once(prepared, at, result, commit)
                if decision is not None:
                    return decision
            except LedgerError as error:
                asked = error
        return self._going_on(prepared, at, asked, commit)

    def given_up(
        self, calls: Sequence[_Call], job: str | None, region: str | None, commit: bool, error: LedgerError
    ) -> list[Decision]:
        """The decision of calls that were not asked of the ledger, because others wait for it: see `_unanswered`."""
        labelled = current_attribution()
        job, region = labelled[0] if job is None else job, labelled[1] if region is None else region
        checklist, charges = self._together([(*call, job) for call in calls], region, commit)
        decision, ids = self._unanswered(checklist, charges, error, commit=commit)
        if commit and not decision.admitted:
            note_refusal(self, decision, job, region, len(charges))
        each = zip(charges, ids or (None,) * len(charges), strict=True)
        return [decision._replace(id=i, method=c.method, cost_units=c.units) for c, i in each]

    def _prepared_for(
        self, method: str, units: int | None, bucket: str | None, job: str | None, region: str | None, commit: bool
    ) -> tuple[_Prepared, int]:
        """The call as it was prepared for the decision before, if it still stands like that; and the time."""
        if job is None or region is None:
            labelled = current_attribution()
            job = labelled[0] if job is None else job
            region = labelled[1] if region is None else region
        if units is not None and type(units) is not int:
            units = charge_units(units)  # before it is used as a key, where True equals 1
        if not type(method) is type(job) is type(region) is str:
            method, job, region = text(method, "method"), text(job, "job"), text(region, "region")
        call = (method, units, bucket, job, region, commit)
        prepared, caller_ms = self._prepared.get(call), self._clock()
        if (
            prepared is None
            or not prepared.since_ms <= caller_ms < prepared.until_ms
            or prepared.grants is not self._grants
            or prepared.ledger is not self.ledger
        ):
            prepared = self._prepare(call, caller_ms)
        return prepared, caller_ms

    def _prepare(self, call: _Labelled, caller_ms: int) -> _Prepared:
        method, units, bucket, job, region, commit = call
        key = (method, None if units is None else charge_units(units), bucket, job)
        checklist = self._checklists[key]
        check_name("region", region)
        charge = Charge(checklist.units, checklist.bucket, checklist.method, job, region, "")
        try:
            checklist, request = self._request(checklist, charge, NOTHING_EXPECTED, caller_ms)
        except PriceChangedError:
            self._checklists.pop(key, None)
            return self._prepare(call, self._clock())
        prepared = _Prepared(key, checklist, request, self.ledger, commit)
        if prepared.until_ms and (call in self._prepared or len(self._prepared) < MAX_KEPT):
            self._prepared[call] = prepared
        return prepared

    def _ready(self, prepared: _Prepared, caller_ms: int) -> At | None:
        """With what the ledger may be asked at once; None where something must be looked up or repaid before, or the
        call is prepared for this moment alone."""
        if not prepared.until_ms:
            return None
        allowance, high_water_mark = self._allowance, self._high_water_mark
        if allowance is not None and allowance.may_owe(self._identity):
            return None
        expected = NOTHING_EXPECTED if high_water_mark is None else high_water_mark.expected()
        return caller_ms, self._attempt_keys.next() if prepared.commit else "", expected

    def _at_once(self, prepared: _Prepared, at: At, result: ChargeResult, commit: bool) -> Decision | None:
        """What an ordinary answer says; None where there is more to be done before."""
        checklist, request = prepared.checklist, prepared.request
        if not self._is_ordinary(request.checks, result):
            return None
        if result.outcome == "admitted" and not result.unlogged:
            return self._answers.ordinary(checklist, request.checks, result, None, commit=commit)
        try:
            decision = self._answers.decision(checklist, asked_again(request, *at), result, unread, commit=commit)
        except LogNeededError:
            return None
        if commit and not decision.admitted:
            note_refusal(self, decision, request.charge.job, request.charge.region)
        return decision

    def _going_on(
        self, prepared: _Prepared, at: At | None, asked: ChargeResult | LedgerError | None, commit: bool
    ) -> Decision:
        """What follows where the answer was not ordinary, or the ledger could not be asked at once."""
        key, checklist = prepared.key, prepared.checklist
        if at is None:  # the rules find out the time, and what to expect
            at = 0, self._attempt_keys.next() if commit else "", NOTHING_EXPECTED
        request = asked_again(prepared.request, *at)
        so_far = asked if asked is None or isinstance(asked, LedgerError) else (checklist, request, asked)
        return (self._concluding((key,), checklist, (request.charge,), commit, so_far))[0]

    def _deciding_all(self, calls: Sequence[_Call], job: str | None, region: str | None) -> list[Decision]:
        """The decisions about calls that are charged together."""
        labelled = current_attribution()
        job = text(labelled[0] if job is None else job, "job")
        region = text(labelled[1] if region is None else region, "region")
        check_name("region", region)
        keys = tuple([(method, units, bucket, job) for method, units, bucket in calls])
        checklist, charges = self._together(keys, region, commit=True)
        decision, charges, ids = self._concluding(keys, checklist, charges, commit=True)
        return [
            decision._replace(id=charge_id, method=charge.method, cost_units=charge.units)
            for charge, charge_id in zip(charges, ids or (None,) * len(charges), strict=True)
        ]

    def _together(self, keys: Sequence[Key], region: str, commit: bool) -> tuple[Checklist, tuple[Charge, ...]]:
        """The checklist of calls of one job that are decided together, and a charge for each of them."""
        job, next_key = keys[0][3], self._attempt_keys.next
        kinds = [self._checklists[key] for key in keys]
        charges = [Charge(x.units, x.bucket, x.method, job, region, next_key() if commit else "") for x in kinds]
        return kinds[0] if len(kinds) == 1 else self._checklists.sum_of(kinds, job), tuple(charges)

    def _concluding(
        self,
        keys: tuple[Key, ...],
        checklist: Checklist,
        charges: tuple[Charge, ...],
        commit: bool,
        asked: _Asked | LedgerError | None = None,
    ) -> tuple[Decision, tuple[Charge, ...], tuple[str, ...]]:
        """The decision about a call, or several together, what was to be charged, and the ids of it. `asked`: the
        ledger's answer, or the error in its place, if it was asked."""
        try:
            try:
                if isinstance(asked, LedgerError):
                    raise asked
                if asked is None and self._allowance is not None and self._allowance.may_owe(self._identity):
                    self._repay()
                checklist, request, result = self._asking(checklist, charges, commit, asked)
                ids = result.ids
                try:
                    decision = self._answers.decision(checklist, request, result, unread, commit=commit)
                except LogNeededError:
                    decision = self._answers.decision(
                        checklist, request, result, self._entries_in_time(), commit=commit
                    )
            except LedgerError as error:
                checklist.check_price(self._clock())
                decision, ids = self._unanswered(checklist, charges, error, commit=commit)
        except PriceChangedError:  # the price changed after the checklist was built, as happens in a long-lived process
            for key in keys:
                self._checklists.pop(key, None)
            checklist, charges = self._together(keys, charges[0].region, commit)
            return self._concluding(keys, checklist, charges, commit)
        if commit and not decision.admitted:
            note_refusal(self, decision, charges[0].job, charges[0].region, len(charges))
        return decision, charges, ids

    def _repay(self) -> None:
        """Hand the ledger what this machine drew on its allowance. Tasks of an event loop that decide meanwhile share
        one: a silent ledger would hold up each of them in a thread."""
        if self._allowance is not None:
            for corrected in self._allowance.repay(self._identity, self.ledger, self._retention_ms, self._clock()):
                self._settle_repaid(corrected)

    def _ask_ledger(self, checklist: Checklist, charge: Charge, *, commit: bool) -> _Asked:
        return self._asking(checklist, (charge,), commit)

    def _asking(
        self,
        checklist: Checklist,
        charges: tuple[Charge, ...],
        commit: bool,
        asked: _Asked | None = None,
        *,
        looks: bool = False,
    ) -> _Asked:
        """Send one request to the ledger; return it with the result, and with the checklist that it follows. The budget
        sends it again with a fresh time if this machine's clock proved wrong, with lower caps if upstream grants less
        than this process knew, and after it has restored data that the ledger lost. `asked`: it was sent once. `looks`:
        somebody looks at the numbers; of that, the ledger's history is told nothing."""
        high_water_mark = self._high_water_mark
        clock_tries = behind_tries = grant_tries = 0
        while True:
            if asked is None:
                expected = NOTHING_EXPECTED
                if high_water_mark is not None:
                    expected = high_water_mark.expected()
                checklist, request = self._request(checklist, charges[0], expected, self._clock(), charges[1:])
                result: ChargeResult = self.ledger.decide(request, commit=commit)
            else:
                checklist, request, result = asked
                asked = None
            if result.outcome == "clock" and clock_tries < 1:
                clock_tries += 1
            elif result.outcome == "granted":
                grant_tries += 1
                if grant_tries > MAX_LOSSES:
                    raise LedgerError(f"ledger {self.ledger.label} changes what upstream grants with each call")
                self._grants = believed(result.granted, request.caller_ms)
            elif result.outcome == "behind" and high_water_mark is not None:
                behind_tries += 1
                if behind_tries > MAX_LOSSES:
                    raise LedgerError(f"ledger {self.ledger.label} loses what it is told; see its server's log")
                new_key, retention_ms = self._attempt_keys.next(), self._retention_ms
                try:
                    restore = high_water_mark.restore_missing
                    restore(self.ledger, result, request.expected, new_key, retention_ms)
                except SeenAheadError as seen:
                    return checklist, request, result._replace(outcome="clock", seen_ahead_ms=seen.seen_ms)
                if commit:  # the lost request may still arrive; it must not be mistaken for this one
                    charges = self._anew(charges)
            elif result.outcome in ("clock", "counting") or self._is_ordinary(request.checks, result, looks=looks):
                return checklist, request, result
            else:
                if self._said_ahead or ahead_ms(result):
                    self._say_ahead(result)
                if high_water_mark is not None and high_water_mark.record(request.checks, result):
                    new_key, retention_ms = self._attempt_keys.next(), self._retention_ms
                    lacked = high_water_mark.follow_up(self.ledger, result, new_key, retention_ms)
                    if lacked and behind_tries < MAX_LOSSES:
                        behind_tries += 1
                        for charge_id in result.ids:  # the call has not left
                            views = tuple(limit.view for limit in self.limits)
                            self.ledger.settle(self.project, charge_id, 0, views)
                        charges = self._anew(charges) if result.ids else charges
                        continue
                recorder = self._recorder
                if not looks and recorder is not None and recorder.is_due(result.now_ms):
                    newest_before_ms = max(request.expected.ids, default=(0, 0))[0]
                    recorder.answered(result.now_ms, newest_before_ms)
                return checklist, request, result

    def _anew(self, charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
        """The same charges under other idempotency keys."""
        return tuple([charge._replace(idempotency_key=self._attempt_keys.next()) for charge in charges])

    def _request(
        self, checklist: Checklist, charge: Charge, expected: Expected, caller_ms: int, also: tuple[Charge, ...] = ()
    ) -> tuple[Checklist, ChargeRequest]:
        """What the ledger is asked now, and the checklist that it follows: with the grants that are believed now."""
        grants = self._grants
        if caller_ms >= grants.until_ms:
            grants = self._grants = believed(grants.text, caller_ms)
        if checklist.grants is not grants:
            checklist = self._checklists.with_grants(checklist, grants)
        return checklist, ChargeRequest(
            self.project,
            charge,
            checklist.checks_at(caller_ms),
            checklist.closed_by,
            caller_ms,
            self._jitter_ms,
            expected,
            self._retention_ms,
            grants.text,
            also,
        )

    def _is_ordinary(self, checks: Sequence[LimitCheck], result: ChargeResult, *, looks: bool = False) -> bool:
        """Whether a decision needs nothing more but to be said. What it showed is recorded then, or is once more."""
        recorder, high_water_mark = self._recorder, self._high_water_mark
        return (
            result.outcome in _DECIDED
            and not (self._said_ahead or ahead_ms(result))
            and (looks or recorder is None or not recorder.is_due(result.now_ms))
            and (high_water_mark is None or not high_water_mark.record(checks, result))
        )

    def _say_ahead(self, result: ChargeResult) -> None:
        """Log that the newest charge is dated far ahead: once, until one is not."""
        ahead = ahead_ms(result) > 0
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

    def _unanswered(
        self, checklist: Checklist, charges: tuple[Charge, ...], trouble: LedgerError, *, commit: bool
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
            method=checklist.method,
            cost_units=checklist.units,
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

    def _entries(self, since_ms: int, until_ms: int) -> Iterator[Entry]:
        return read_entries(self.ledger, self.project, since_ms, until_ms)

    def _entries_in_time(self) -> ReadEntries:
        """The same for a decision, which takes no longer than one that counts: it ends with a LedgerError then."""
        ends_s = elapsed_s() + COUNT_WITHIN_S

        def read(since_ms: int, until_ms: int) -> Iterator[Entry]:
            for number, entry in enumerate(self._entries(since_ms, until_ms)):
                if number % 100 == 0 and elapsed_s() > ends_s:
                    raise LedgerError("the log is too long to be read for it; `quota explain` takes the time")
                yield entry

        return read


# -- for clients and jobs, not for users -------------------------------------------------------------------------------


def looking(budget: Budget, methods: Iterable[str] = ()) -> Outlook:
    """`Budget.outlook`, for whoever does the steps."""
    return budget._looking(tuple(methods))


def counting(budget: Budget) -> object:
    """What `Budget.usage` asks, for whoever does the steps."""
    return budget._looking_at("")


def check_call(budget: Budget, call: str | tuple[str, int], job: str) -> None:
    """Raises UsageError for a call that can never succeed, as `charge_many` does. Asks nobody."""
    method, units = (call, None) if isinstance(call, str) else call
    budget._checklists[text(method, "method"), None if units is None else charge_units(units), None, text(job, "job")]


def charge_attempt(budget: Budget, method: str, verb: str) -> Decision:
    """`Budget.charge` for an outgoing call. A method unknown to the book costs the book's default for the HTTP verb."""
    return budget._decide(*_attempt(budget, method, verb), None, None, commit=True)


def charge_attempts(budget: Budget, calls: Iterable[tuple[str, str]]) -> list[Decision]:
    """`Budget.charge_many` for 1 to 100 outgoing calls, each a method and its HTTP verb."""
    return budget._deciding_all([_attempt(budget, method, verb) for method, verb in calls], None, None)


def _attempt(budget: Budget, method: str, verb: str) -> _Call:
    """The method, units and bucket of an outgoing call."""
    book = budget.book
    method, verb = text(method, "method"), text(verb, "verb")
    if book.canonical(method) in book.methods:
        return method, None, None
    price = book.default_price(verb)
    _warn_default_price(book.name, method, price.units)
    return method, charge_units(price.units), price.bucket


class Asked(NamedTuple):
    """What a call would be told now, and from what that was computed: each limit that counts it. There are no
    `standings` where the clocks disagree, or the ledger still counts. `granted` is what upstream grants by bucket,
    where that is less than the configuration says.
    """

    decision: Decision
    standings: tuple[Standing, ...]
    clocks: Clocks
    granted: Mapping[str, int]


def ask(budget: Budget, method: str, units: int, job: str, together: Together | None = None) -> Asked:
    """As `peek`, by the ledger alone. Raises LedgerError, and UsageError for a call that can never be admitted."""
    try:
        units = charge_units(units)
        if together is None:
            checklist = budget._checklists.make((method, units, None, job))
        else:
            checklist = budget._checklists.of_former(method, units, job, together)
        charge = Charge(checklist.units, checklist.bucket, checklist.method, job, "", "")
        checklist, request, result = budget._ask_ledger(checklist, charge, commit=False)
    except PriceChangedError:  # it changed just now
        return ask(budget, method, units, job, together)
    decision = budget._answers.decision(checklist, request, result, budget._entries, commit=False)
    if result.outcome in ("clock", "counting"):
        return Asked(decision, (), Clocks(result.now_ms, request.caller_ms, result.last[0]), checklist.grants.units)
    standings, clocks = standings_of(checklist, request, result)
    return Asked(decision, tuple(standings), clocks, checklist.grants.units)


def leaves_of(budget: Budget, job: str) -> Mapping[str, int]:
    """The units that a job leaves to others, by limit."""
    return budget._checklists.leaves_of(job)


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
    budget.ledger = budget._allowance = budget._high_water_mark = _CLOSED


class _Closed:
    """Stands for the ledger, the allowance and the high-water mark of a closed session."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(SESSION_CLOSED)


_CLOSED: Any = _Closed()

SESSION_CLOSED = "this session is closed; open another one with quota.open() or quota.open_async()"


# -- parts of the budget -----------------------------------------------------------------------------------------------


def _room_of_each(standings: Sequence[Standing], clocks: Clocks, read: ReadEntries) -> tuple[int | None, ...]:
    """When each limit that refused has room; None for the others."""
    return tuple(room_at(one, clocks, read, clocks.now_ms) if one.full else None for one in standings)


def _selects(limit: Limit, bucket: str) -> bool:
    """Whether a limit counts calls of a bucket."""
    return not limit.view.selector.buckets or bucket in limit.view.selector.buckets


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
            checked.append((text(call[0], "method"), charge_units(call[1]), None))
        else:
            raise UsageError(f"call {show(call)} is not a method, and not (method, units)")
    return checked


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
