"""READ FIRST. A budget decides whether one call to a metered API may leave now.

    Budget      the limits of one credential over the log of its project; most callers want `charge`
    Decision    the answer (quota.decision): admitted, or refused and by which limit, what remains, when to retry
    Checklist   what a kind of call costs, and which limits count it (quota.rules.calls)
    decide      compares, and has the ledger append (quota.deciding.decide)

`charge`, `charge_many` and `peek` take one path, `Budget._decide`: `_price` finds what the calls cost and which limits
count them, `decide` compares and appends, `Answers.decision` makes the answer. AsyncBudget awaits the same steps.

The arithmetic, for a limit of L units over a window, of which U are used, and a call that costs C:

    admitted            U + C <= L
    remaining           L - U                       after the charge, if there was one
    retry_at            the first millisecond at which enough has left the window that U + C <= L holds again
    never               C > L                       CostExceedsLimit: no waiting helps

L is the limit's number after `cap`: upstream may grant less, a job may leave units to others, and a paced limit
releases its units over the day. The module quota.rules.retry computes `retry_at`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from quota.common.fork import OfOneProcess
from quota.common.log import line
from quota.common.text import listed, many, show
from quota.deciding.allowance import allowance_state, draw, owe_correction, owed_units, settle_draws, try_to_repay
from quota.deciding.answers import Answers
from quota.deciding.corrections import catch_up, correct, count_others, insist
from quota.deciding.decide import decide
from quota.deciding.levels import Levels
from quota.deciding.outlook import Outlook, counted, look
from quota.deciding.project import Project
from quota.decision import SHADOW, Allowance, AllowanceState, Decision, LimitState
from quota.errors import LedgerError, OtherApi, UnknownCharge, UnusableLedger, UsageError
from quota.rules.calls import Checklist, Checklists, Parts, charge_units, charges_of, settled_units
from quota.rules.entry import Entry, call_keys, id_of_call, parts_of_id
from quota.rules.facts import Compared, Exhaustion, Grant
from quota.rules.reading import Mark
from quota.terms.arguments import attribution, check_name, instance, text, texts
from quota.terms.costs import CostBook
from quota.terms.limits import Limit, named_twice

if TYPE_CHECKING:
    from quota.deciding.spend import Spend
    from quota.ledger.log import Log

MAX_CHARGES = 100
"""The most charges that are made in one step."""


class Call(NamedTuple):
    """A call to price: a method, the units that the caller gives, and what it is charged if the book has no price."""

    method: str
    units: int | None = None
    parts: Parts | None = None


class Priced(NamedTuple):
    """Calls that are to be decided: what they cost and which limits count them, their charges, how far this process has
    read the log, and whether to charge them."""

    checklist: Checklist
    charges: tuple[Entry, ...]
    read: Mark
    commit: bool


class Listener:
    """Whoever listens to a budget while a run uses it. `of_run`: the run's job and region, whose fetch function may
    charge in threads of its own."""

    of_run: tuple[str, str] | None = None

    def decided(self, decision: Decision) -> None:
        """A call was decided, and not only in a peek."""

    def corrected(self, charge_id: str, added_units: int | None) -> None:
        """A charge now counts so many units more; None: it was refunded."""

    def exhausted(self, decision: Decision) -> None:
        """Upstream answered this call with "no more"."""


class Budget(OfOneProcess):
    """The limits of one credential over the log of its project. Cheap to create and safe to share between threads.

    `leave` holds the units that each job leaves to others, by limit. `allowance` is what may be spent while the ledger
    does not answer. `hosts` replace those of the book, which clients meter.
    """

    def __init__(
        self,
        *,
        credential: str,
        book: CostBook,
        limits: Limit | Sequence[Limit],
        project: Project,
        leave: Mapping[str, Mapping[str, int]] | None = None,
        allowance: Allowance | None = None,
        hosts: Sequence[str] | None = None,
    ) -> None:
        leave = {} if leave is None else leave
        if not isinstance(leave, Mapping) or not all(isinstance(units, Mapping) for units in leave.values()):
            raise UsageError(f"leave {show(leave)}: write the units of each limit by job, {{job: {{limit: units}}}}")
        self._allowance = allowance
        self.credential = text(credential, "credential")
        self.book = instance(book, CostBook, "book", "quota.settings.books.load_book(name) reads one")
        self.hosts = self.book.hosts if hosts is None else texts(hosts, "hosts")
        self._project = project
        self.checklists = Checklists(self.credential, book, _limits(limits), leave, project.wall)
        self.limits = self.checklists.shown
        project.longest_ms = max([project.longest_ms, *(limit.view.window.longest_ms for limit in self.limits)])
        self.answers = Answers(project, self.checklists)
        self.levels = Levels(self.answers)
        self.listener = Listener()
        self.tally: Callable[[str, int, int, int], object] = lambda *_: None
        """Called with each change of what this process spends: a method, calls and units (after a correction 0 or
        less), and calls that were refused."""

    def __repr__(self) -> str:
        limits = listed(limit.name for limit in self.limits)
        return f"<quota.Budget of {self.credential}: project {self.project}, limits {limits}>"

    @property
    def project(self) -> str:
        return self._project.name

    @property
    def ledger(self) -> Log:
        return self._project.log

    def limits_of(self, job: str) -> tuple[Limit, ...]:
        """The limits that count calls of a job. `limits` has the limits of the configured jobs."""
        return self.checklists.limits_of(text(job, "job") if job else "")

    def charge(
        self, method: str, *, units: int | None = None, job: str | None = None, region: str | None = None
    ) -> Decision:
        """Charge one call of `method` before it leaves, if every limit has room for it.

        `units` overrides the cost book's price; `job` and `region` say who spends (default: what `labels` set). A
        refusal is an answer, not an error, and leaves the budget untouched.
        Raises UnknownMethod, CostExceedsLimit and UsageError for calls that can never succeed.
        """
        return self._decide([Call(method, units)], job, region, commit=True)[0]

    def charge_many(
        self, calls: Iterable[str | tuple[str, int]], *, job: str | None = None, region: str | None = None
    ) -> list[Decision]:
        """Charge 1 to 100 calls in one step before they leave: all of them if every limit has room for all, else none.

        Each call is a method, or a method with its units; with two buckets it counts as two calls. The decisions come
        in the order of the calls, each with an id of its own; `limits`, `retry_at` and the rest are those of all calls
        together. Raises as `charge` does.
        """
        return self._decide(calls_of(calls), job, region, commit=True)

    def peek(
        self, method: str, *, units: int | None = None, job: str | None = None, region: str | None = None
    ) -> Decision:
        """The decision that `charge` would make now, without charging."""
        return self._decide([Call(method, units)], job, region, commit=False)[0]

    def settle(self, charge_id: str, units: int) -> Entry:
        """Set the true cost of a charge, in absolute units: idempotent, never refused, its time and id unchanged.

        For a call of several buckets, `units` is the cost in the first bucket. Returns the charge as it was before.
        Raises UnknownCharge for an id that is unknown or has left the log.
        """
        return self._correct(charge_id, settled_units(units), of_all=False)

    def refund(self, charge_id: str) -> Entry:
        """Give back a charge whose request certainly never left this machine, in all of its buckets."""
        return self._correct(charge_id, 0, of_all=True)

    def _correct(self, charge_id: str, units: int, *, of_all: bool) -> Entry:
        ms, key, further = parts_of_id(text(charge_id, "the id of a charge, which a free or refused call lacks:"))
        keys = call_keys(key, further if of_all else 0)
        wanted = {name: units if name == key else 0 for name in keys}
        drawn = settle_draws(self._project, wanted)
        try:
            before = drawn or insist(self._project, lambda: correct(self._project, ms, keys, units))
        except LedgerError:
            if not of_all:  # a refund that fails is lost: then the charge is too high
                owe_correction(self._project, ms, key, units)
            raise
        if before is None:
            raise UnknownCharge(
                f"project {self.project!r} has no charge {show(charge_id)}; give the id that the charge returned, "
                "while the log has the charge; after a loss, the machine that charged it puts it back at its next call"
            )
        if not drawn and self._project.journal is not None:
            self._project.journal.draws.corrected(wanted)
        before_units = sum(charge.units for charge in before)
        self.tally(before[0].method, -1 if of_all and before_units else 0, units - before_units, 0)
        self.listener.corrected(charge_id, None if of_all else units - before_units)
        return before[0]

    def usage(self, job: str | None = None) -> tuple[LimitState, ...]:
        """The current state of every limit. Charges nothing. With a `job`, each number is lower by what the job leaves.

        Raises LedgerError.
        """
        job = "" if job is None else text(job, "job")
        check_name("job", job)
        checklist = self.checklists.of("", (), dict.fromkeys(self.limits, 0), job)
        outcome = counted(self._project, checklist)
        return self.answers.states(checklist, outcome, charged=False)

    def outlook(self, methods: Iterable[str] = ()) -> Outlook:
        """The state of this budget, and the decision for the dearest of these methods. Charges nothing.

        Raises LedgerError, also when this machine's clock and the ledger's disagree.
        """
        outlook = look(self.answers, texts(methods, "methods"))
        why = self._project.log.unwritable(self.project)
        return self._on_allowance(outlook, LedgerError(why)) if why else outlook

    def outlook_without_ledger(self, trouble: LedgerError) -> Outlook:
        """The outlook while the ledger does not answer for this project: no limits, and what the allowance admits."""
        nothing = Outlook(self._project.wall(), (), (), None, None, None, None)
        return self._on_allowance(nothing, trouble)

    def _on_allowance(self, outlook: Outlook, trouble: LedgerError) -> Outlook:
        outlook = outlook._replace(unwritable=str(trouble))
        if outlook.closed is not None or outlook.full is not None:
            return outlook
        cheapest, read = self.checklists.of_a_look(), self._project.reading.mark
        charges = charges_of([cheapest], "", "", self._project.keys.next)
        (decision,) = self._ask_allowance(Priced(cheapest, charges, read, commit=False), trouble)
        return outlook._replace(full=None if decision.admitted else decision, dearest=None)

    def owed_units(self) -> int:
        """The units that this machine drew on its local allowance and has not handed over to the ledger yet."""
        return owed_units(self._project)

    def repay(self) -> None:
        """Hand over to the ledger what this machine drew. Never raises: if it fails, the machine still owes it."""
        try_to_repay(self._project)

    def allowance(self) -> AllowanceState | None:
        """What this machine may spend while the ledger does not answer, and how much of it is drawn; None if nothing is
        configured."""
        return None if self._allowance is None else allowance_state(self._project, self._allowance)

    def spend(
        self, method: str, *, units: int | None = None, job: str | None = None, region: str | None = None
    ) -> Spend:
        """Charge around a block or a function: `with budget.spend("search.list"): ...`, or as a decorator.

        For clients that have no hook for charging. Each entry is one charge; a refusal raises Refused before the body
        runs. The charge stays whatever the body does, because upstream counts a request that was sent.

        The block gets the decision. If `units` are the most that a call may cost, `settle` sets its true cost:
        `with budget.spend("chat", units=8_000) as call: ...; call.settle(used)`. Until then these units are reserved.
        """
        from quota.deciding.spend import Spend  # late: few processes use it

        charge = partial(self._decide, [Call(text(method, "method"), units)], job, region, commit=True)
        return Spend(self, charge, reserves=units is not None)

    # -- facts -------------------------------------------------------------------------------------------------------

    def exhaust(
        self, bucket: str, since_ms: int, until_ms: int, evidence: str, reported_by: str = "", *, is_pause: bool = False
    ) -> Exhaustion:
        """Close a bucket for everybody, because upstream said "no more". Returns the exhaustion that stands then: see
        `quota.rules.facts.exhaust`."""
        return self._project.exhaust(Exhaustion(bucket, since_ms, until_ms, evidence, reported_by, is_pause=is_pause))

    def reopen(self, bucket: str, because: str) -> bool:
        """Lift an exhaustion. False if the bucket was open."""
        catch_up(self._project)  # the ledger may have just lost the exhaustion
        return self._project.state.reopen(bucket, because)

    def grant(self, grants: Sequence[Grant], compared: Sequence[Compared] | None = None) -> None:
        """Replace all stored grants by these, which upstream reported."""
        self._project.state.grant(grants, compared)

    def add_others(
        self, bucket: str, units: int, since_ms: int, until_ms: int, name: str, *, window_ms: int = 0, noun: str = ""
    ) -> None:
        """Count units that only upstream has counted, until its period ends. Of one name the largest counts. See
        `quota.rules.entry.Entry` for the rest."""
        key, period = self._project.keys.next(), (since_ms, until_ms)
        others = Entry.of_others(key, bucket, units, name, period, window_ms=window_ms, noun=noun)
        count_others(self._project, others)

    # -- the decision; other modules of this package take its steps, too -----------------------------------------------

    def _decide(
        self,
        calls: Sequence[Call],
        job: str | None = None,
        region: str | None = None,
        *,
        commit: bool,
        reserved: bool = False,
    ) -> list[Decision]:
        """The decisions about calls of one job that leave together, in order: all are admitted, or none. With
        `reserved`, the charge is an upper bound of the cost."""
        priced = self._price(calls, job, region, commit=commit, reserved=reserved)
        if not priced.charges:
            return self._free(priced.checklist)
        try:
            return self._ask_ledger(priced)
        except LedgerError as error:
            return self._ask_allowance(priced, error)

    def _ask_ledger(self, priced: Priced) -> list[Decision]:
        """The ledger's decision. Raises LedgerError."""
        checklist, charges, _, commit = priced
        outcome = decide(self._project, checklist, charges, commit=commit)
        decision = self.answers.decision(checklist, outcome, commit=commit)
        if decision.admitted and not commit and (why := self._project.log.unwritable(self.project)):
            raise LedgerError(why)  # a charge would fail
        if self._project.recorder is not None:
            self._project.recorder.answered()
        return self._of_each(priced, decision, outcome.first and outcome.first[0])

    def _of_each(self, priced: Priced, decision: Decision, first_ms: int | None) -> list[Decision]:
        """The decision about each call. The charges were made at `first_ms`; None: nothing was charged. Tells
        the listener unless this is a peek."""
        checklist, charges, _, commit = priced
        calls, decisions, at = checklist.calls, [], 0
        for call in calls:
            of_call = decision if call is checklist else decision._replace(method=call.method, cost_units=call.units)
            if first_ms is not None and call.parts:
                of_call = of_call._replace(id=id_of_call(first_ms, charges[at].key, len(call.parts) - 1))
            decisions.append(of_call)
            at += len(call.parts)
        if commit:
            self._note(checklist, charges[0], decision)
            for call, of_call in zip(calls, decisions, strict=True):
                if of_call.id is not None:
                    self.tally(call.method, 1, sum([part.units for part in call.parts]), 0)
                self.listener.decided(of_call)
        return decisions

    def _note(self, checklist: Checklist, charge: Entry, decision: Decision) -> None:
        """Count a refusal, and the calls that shadow limits would have refused."""
        if not decision.admitted:
            self.note_refusal(decision, charge.job, charge.region, len(checklist.calls))
        elif decision.would_refuse:
            import logging  # late: few processes come here

            for name in decision.would_refuse:
                about = {"method": charge.method, "job": charge.job, "region": charge.region}
                logging.getLogger("quota").info("%s", line("would_refuse", project=self.project, limit=name, **about))
                if self._project.recorder is not None:
                    self._project.recorder.count(decision.decided_at_ms, name, charge.job, SHADOW, len(checklist.calls))

    def note_refusal(self, decision: Decision, job: str, region: str, calls: int = 1) -> None:
        """Count a refusal of `calls` that were asked together. `charge` calls this itself; a job that a refused peek
        ends calls it, too. If this machine's clock is behind, the refusal has the ledger's time."""
        self.tally(decision.method, 0, 0, calls)
        if self._project.recorder is not None:
            dated = decision._replace(decided_at_ms=self._project.dated_ms(decision.decided_at_ms))
            self._project.recorder.refused(dated, job, region, self._project.keys.run, calls)

    def hand_over_refusals(self) -> None:
        """Report the refusals of this process to the ledger now: somebody is about to read them. Raises nothing."""
        if self._project.recorder is not None:
            self._project.recorder.close()

    def _price(
        self, calls: Sequence[Call], job: str | None, region: str | None, *, commit: bool, reserved: bool = False
    ) -> Priced:
        """What these calls cost, and which limits count them. Reads memory only, so it never waits.

        Raises UsageError for calls that can never be admitted, CostExceedsLimit and UnknownMethod among them.
        """
        checklists = self.checklists
        job, region = attribution(job, region, self.listener.of_run)
        each = []
        for method, units, parts in calls:
            if units is not None and type(units) is not int:  # a key: True would find the checklist of 1
                units = charge_units(units)
            each.append(checklists[text(method, "method"), units, parts, job])
        charges = charges_of(each, job, region, self._project.keys.next, reserved=reserved)
        if len(charges) > MAX_CHARGES:
            raise UsageError(
                f"these {many(len(each), 'call')} are {many(len(charges), 'charge')}, one for each bucket, and at most "
                f"{MAX_CHARGES} are made together; make fewer calls at once"
            )
        checklist = each[0] if len(each) == 1 else checklists.sum_of(each, job)
        return Priced(checklist, charges, self._project.reading.mark, commit)

    def _free(self, checklist: Checklist) -> list[Decision]:
        """The decisions about calls that cost nothing. They need no ledger."""
        now_ms = self._project.wall()
        free = Decision(admitted=True, credential=self.credential, project=self.project, decided_at_ms=now_ms)
        return [free._replace(method=call.method) for call in checklist.calls]

    def _ask_allowance(self, priced: Priced, trouble: LedgerError) -> list[Decision]:
        """The decision while the ledger does not answer: the local allowance decides; without an allowance the calls
        are refused, as are those of a bucket that upstream has closed. A project of another API draws nothing: nobody
        could hand that over."""
        checklist, charges, read, commit = priced
        if self._project.recorder is not None:
            self._project.recorder.unanswered()
        detail, left_units, allowance = str(trouble), None, None
        misconfigured = isinstance(trouble, OtherApi)
        usable = None if misconfigured else self._allowance
        closed = None if usable is None else self._project.noted_closing(checklist.closed_by)
        if usable is not None and closed is None:
            try:
                left_units = draw(self._project, usable, charges, detail, read=read, commit=commit)
                allowance = allowance_state(self._project, usable, [charge.units for charge in charges])
            except LedgerError as error:
                detail = f"{detail}; {error}"
        admitted = left_units is not None
        if not admitted and allowance is not None:
            detail = f"{detail}; {allowance}"
        decision = Decision(
            admitted=admitted,
            source="allowance" if admitted and commit else None,
            credential=self.credential,
            project=self.project,
            method=checklist.method,
            cost_units=checklist.units,
            reason="ok" if admitted else "ledger-unavailable",
            remaining_units=left_units or 0,
            decided_at_ms=self._project.wall(),
            detail=detail,
            lasting=isinstance(trouble, UnusableLedger),
            allowance=allowance,
            misconfigured=misconfigured,
        )
        if closed is not None:
            decision = decision._replace(**self.answers.closed(closed)._asdict())
        if commit and not admitted:
            self._project.note_refused(checklist.method, charges)
        first_ms = decision.decided_at_ms if decision.source else None
        return self._of_each(priced, decision, first_ms)


def project_of(budget: Budget) -> Project:
    """The project of a budget, for the modules of this package."""
    return budget._project


def check_call(budget: Budget, call: str | tuple[str, int], job: str) -> None:
    """Raise UsageError for a call that can never succeed, as `charge_many` does. Asks no ledger."""
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
    """The checked argument of `charge_many`. A lone call counts as a list of one call. A mapping would lose its values,
    a set has no order, and bytes hold numbers."""
    lone = isinstance(calls, str) or (isinstance(calls, tuple) and len(calls) == 2 and type(calls[1]) is int)
    try:
        if isinstance(calls, (Mapping, set, frozenset, bytes, bytearray, memoryview)):
            raise TypeError
        several = [calls] if lone else list(islice(calls, MAX_CHARGES + 1))
    except TypeError:
        raise UsageError(f"calls {show(calls)}: give a list of methods, or of (method, units)") from None
    if not 1 <= len(several) <= MAX_CHARGES:
        number = "none" if not several else f"more than {MAX_CHARGES}"
        raise UsageError(f"1 to {MAX_CHARGES} calls are charged together, and here are {number}")
    checked: list[Call] = []
    for call in several:
        if isinstance(call, str):
            checked.append(Call(text(call, "method")))
        elif isinstance(call, tuple) and len(call) == 2:
            checked.append(Call(text(call[0], "method"), charge_units(call[1])))
        else:
            raise UsageError(f"call {show(call)} is not a method, and not (method, units)")
    return checked
