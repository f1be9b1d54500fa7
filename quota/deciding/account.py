"""What a budget stands on: one project at one ledger, and what this machine knows of it.

    Account    asks the ledger, and asks again where that is right: `ask`
    Asked      the checklist that the ledger was asked by in the end, with the request and its result

The ledger decides. Here is only what stands between a question and an answer that holds: the time and the grants that
the question goes by, what the machine has seen of the ledger (`quota.recovery.high_water_mark`), what it owes it
(`quota.recovery.allowance`), and what it has to tell (`quota.deciding.recorder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quota.common.clock import elapsed_s, host_clock, rfc3339
from quota.common.log import line, warn
from quota.deciding.answer import Answers, ahead_ms
from quota.deciding.checklist import NO_GRANTS, Checklist, Checklists, believed
from quota.decision import REPAIR, Decision
from quota.errors import LedgerError, UsageError
from quota.ledger.contract import (
    COUNT_WITHIN_S,
    NOTHING_EXPECTED,
    ChargeRequest,
    ChargeResult,
    Ledger,
    LimitCheck,
    read_entries,
    retention_of,
)
from quota.ledger.entry import FURTHER, Charge, Entry
from quota.ledger.identity import Identity
from quota.ledger.parts import correctable
from quota.recovery.observations import SeenAheadError
from quota.terms.arguments import MAX_NUMBER, whole, whole_clock
from quota.terms.attribution import RESERVED, AttemptKeys, is_reservation
from quota.terms.costs import CostBook
from quota.terms.limits import DAY_MS, Limit, View

if TYPE_CHECKING:
    from quota.deciding.recorder import Recorder
    from quota.recovery.allowance import Allowance
    from quota.recovery.high_water_mark import HighWaterMark

MAX_LOSSES = 5
"""The most times that one decision restores lost data to a ledger, or goes by other grants."""

Asked = tuple["Checklist", "ChargeRequest", "ChargeResult"]

_DECIDED = ("admitted", "refused", "exhausted")
"""The outcomes that say whether the call may leave."""


class SessionClosedError(UsageError):
    """A session that is closed was asked."""

    def __init__(self) -> None:
        super().__init__("this session is closed; open another one with quota.open() or quota.open_async()")


class Account:
    """One project at one ledger, with the limits of one credential. Safe to share between threads.

    For the modules of this package; users have a `quota.Budget`. `clock` and `jitter_ms` are as there.
    """

    def __init__(
        self,
        credential: str,
        project: str,
        book: CostBook,
        limits: tuple[Limit, ...],
        ledger: Ledger,
        leave: Mapping[str, Mapping[str, int]],
        *,
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
        self.ledger = ledger
        self.clock = host_clock if clock is None else whole_clock(clock)
        self.jitter_ms = whole(jitter_ms, "ms: the jitter", 0, MAX_NUMBER)
        self.answers = Answers(credential, project, self.jitter_ms)
        self.checklists = Checklists(credential, book, limits, leave, self.clock)
        self.limits = self.checklists.shown
        self.attempt_keys = attempt_keys or AttemptKeys()
        self.allowance = allowance
        self.high_water_mark = high_water_mark
        self.identity = identity or Identity("", project)
        self.recorder = recorder
        self.of_run: tuple[str, str] | None = None
        """The job and region of the run under way, whose fetch function may charge in threads of its own."""
        self.on_decision: Callable[[Decision], None] | None = None
        """Who wants to see each decision that is not a peek: a run that shows its progress."""
        windows = [limit.view.window for limit in limits]
        self.longest_ms = max((window.longest_ms for window in windows), default=DAY_MS)
        # Credentials of one project have the same limits, so these are all that the configuration has for it.
        self.retention_ms = retention_of(windows)
        self.grants = NO_GRANTS
        self.said_ahead = False
        """Whether it is said that the newest charge is dated far ahead."""
        self.told_ms: dict[tuple[str, bool], int] = {}
        """When the ledger was last told what an answer says of a bucket; by itself, that nothing remains in it."""

    @property
    def views(self) -> tuple[View, ...]:
        return tuple([limit.view for limit in self.limits])

    # -- the question ------------------------------------------------------------------------------------------------

    def ask(self, checklist: Checklist, charges: tuple[Charge, ...], *, commit: bool, looks: bool = False) -> Asked:
        """Put one question to the ledger. It is asked again with a fresh time if this machine's clock proved wrong,
        with lower caps if upstream grants less than this process knew, and after it was given back what it had lost.

        `looks`: somebody looks at the numbers, so the ledger's history is told nothing. Raises LedgerError, and
        UsageError for a call that by the price of now can never be admitted.
        """
        clock_tries = grant_tries = losses = 0
        while True:
            mark, caller_ms = self.high_water_mark, self.clock()
            since_ms, until_ms, checks = checklist.checks
            if not since_ms <= caller_ms < until_ms or checklist.grants is not self.grants:
                checklist, charges, checks = self._checked_at(caller_ms, checklist, charges)
            request = ChargeRequest(
                self.project,
                charges[0],
                checks,
                checklist.closed_by,
                caller_ms,
                self.jitter_ms,
                NOTHING_EXPECTED if mark is None else mark.expected(),
                self.retention_ms,
                checklist.grants.text,
                charges[1:],
            )
            result = self.ledger.decide(request, commit=commit)
            outcome = result.outcome
            if outcome in _DECIDED:
                if self.said_ahead or ahead_ms(result):
                    self._say_ahead(result)
                # Keep what the answer showed. It does not hold if the ledger lacked what it was told of just now.
                if (
                    mark is None
                    or not mark.record(checks, result)
                    or not mark.follow_up(self.ledger, result, self.attempt_keys.next(), self.retention_ms)
                    or losses >= MAX_LOSSES
                ):
                    if not looks and self.recorder is not None and self.recorder.is_due(result.now_ms):
                        self.recorder.answered(result.now_ms, max(request.expected.ids, default=(0, 0))[0])
                    return checklist, request, result
                losses += 1
                if result.ids:  # the call has not left
                    first, *others = result.ids
                    correctable(self.ledger).settle(self.project, first, 0, self.views, others)
                charges = self._under_new_keys(charges) if result.ids else charges
            elif outcome == "granted":
                grant_tries += 1
                if grant_tries > MAX_LOSSES:
                    raise LedgerError(f"ledger {self.ledger.label} changes what upstream grants with each call")
                self.grants = believed(result.granted, caller_ms)
            elif outcome == "behind" and mark is not None:
                losses += 1
                if losses > MAX_LOSSES:
                    raise LedgerError(f"ledger {self.ledger.label} loses what it is told; see its server's log")
                try:
                    mark.restore_missing(
                        self.ledger, result, request.expected, self.attempt_keys.next(), self.retention_ms
                    )
                except SeenAheadError as seen:
                    return checklist, request, result._replace(outcome="clock", seen_ahead_ms=seen.seen_ms)
                if commit:  # the lost request may still arrive; it must not be mistaken for this one
                    charges = self._under_new_keys(charges)
            elif outcome == "clock" and not clock_tries:
                clock_tries += 1
            else:  # it has not decided
                return checklist, request, result

    def _checked_at(
        self, caller_ms: int, checklist: Checklist, charges: tuple[Charge, ...]
    ) -> tuple[Checklist, tuple[Charge, ...], tuple[LimitCheck, ...]]:
        """What the ledger is asked to check at a time: by the price of then, and with the grants that are believed."""
        if not self.grants.since_ms <= caller_ms < self.grants.until_ms:
            self.grants = believed(self.grants.text, caller_ms)
        grants = self.grants
        checklist, charges = self.checklists.priced_at(caller_ms, checklist, charges, self.attempt_keys.next)
        if checklist.grants is not grants:
            checklist = self.checklists.with_grants(checklist, grants)
        return checklist, charges, checklist.checks_at(caller_ms)

    def _under_new_keys(self, charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
        key, renamed = "", []
        for charge in charges:
            _, further, number = charge.idempotency_key.partition(FURTHER)
            key = key if further else self.attempt_keys.next()
            mark = RESERVED if not further and is_reservation(charge.idempotency_key) else ""
            renamed.append(charge._replace(idempotency_key=f"{key}{mark}{further}{number}"))
        return tuple(renamed)

    def _say_ahead(self, result: ChargeResult) -> None:
        """Log that the newest charge is dated far ahead: once, until one is not."""
        ahead = ahead_ms(result) > 0
        if ahead and not self.said_ahead:
            said = (
                "a clock was wrong, and what it dated ahead counts for that much longer; if the clocks are right now, "
            )
            times = {"newest": rfc3339(result.last[0]), "now": rfc3339(result.now_ms)}
            warn("ledger_ahead", f"{said}run `{REPAIR}`", project=self.project, ledger=self.ledger.label, **times)
        self.said_ahead = ahead

    # -- the log -----------------------------------------------------------------------------------------------------

    def entries(self, since_ms: int, until_ms: int) -> Iterator[Entry]:
        """The log's entries from one time to another, both included."""
        return read_entries(self.ledger, self.project, since_ms, until_ms)

    def entries_in_time(self, since_ms: int, until_ms: int) -> Iterator[Entry]:
        """The same for a decision, which reads no longer than it may count. Raises LedgerError then."""
        ends_s = elapsed_s() + COUNT_WITHIN_S
        for number, entry in enumerate(self.entries(since_ms, until_ms)):
            if number % 100 == 0 and elapsed_s() > ends_s:
                raise LedgerError("the log is too long to be read for it; `quota explain` takes the time")
            yield entry

    # -- what the ledger is told beside its decisions ----------------------------------------------------------------

    def note_refusal(self, decision: Decision, job: str, region: str, calls: int = 1) -> None:
        """Count a refusal of `calls` together in the project's history (L30). `Budget.charge` does so itself; a job
        that ends with the refusal of a peek says so here."""
        if self.recorder is not None:
            self.recorder.refused(decision, job, region, self.attempt_keys.run, calls)

    def note_shadow(self, decision: Decision, job: str, region: str, calls: int) -> None:
        """Log and count calls that left, and that shadow limits would have refused."""
        import logging  # late: few processes come here

        for name in decision.would_refuse:
            said = line(
                "would_refuse", project=self.project, limit=name, method=decision.method, job=job, region=region
            )
            logging.getLogger("quota").info("%s", said)
            if self.recorder is not None:
                self.recorder.shadowed(name, job, decision.decided_at_ms, calls)

    def hand_over_refusals(self) -> None:
        """Tell the ledger now what this process was refused: somebody is about to look at the counts. Takes 50 ms at
        most, and raises nothing."""
        if self.recorder is not None:
            self.recorder.close()

    def close(self) -> None:
        """Let every later decision raise UsageError, because what it would go through is closed."""
        self.ledger = self.allowance = self.high_water_mark = _CLOSED


class _Closed:
    """Stands for the ledger, the allowance and the high-water mark of a closed session."""

    def __getattr__(self, name: str) -> Any:
        raise SessionClosedError


_CLOSED: Any = _Closed()
