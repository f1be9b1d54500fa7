"""The state of a budget, for people. Nothing is charged.

Outlook     the state of each limit, and whether any call may leave
look        reads it
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from quota.common.clock import NEVER, elapsed_s
from quota.deciding.answers import Answers
from quota.deciding.decide import Outcome, decide, room_of
from quota.deciding.project import Project
from quota.decision import COUNTING, SET_THE_CLOCK, Decision, LimitState, both_clocks
from quota.errors import LedgerError, UsageError
from quota.rules.calls import Checklist
from quota.rules.facts import Exhaustion
from quota.rules.retry import room_at

LOOK_WITHIN_S = 30.0
"""How long `counted` asks while totals have entries to read."""


class Outlook(NamedTuple):
    """The state of a budget at `at_ms` by the ledger's clock: each limit, and whether any call may leave.

    `room_ms` has for each limit the time when the cheapest call that it counts fits again; None if it fits now.
    `closed` is upstream's exhaustion of the main bucket, or of another that all its calls spend. `full` is the refusal
    of that bucket's cheapest call by the limits that count all its calls. At `next_ms` neither applies any more; it is
    None if neither is set, or one is permanent. `dearest` is the decision for the dearest of the given methods.
    `unwritable` is why the ledger accepts no charges now, or "": then `full` is a refusal without a time, unless the
    machine's allowance admits that call.
    """

    at_ms: int
    states: tuple[LimitState, ...]
    room_ms: tuple[int | None, ...]
    closed: Exhaustion | None
    full: Decision | None
    next_ms: int | None
    dearest: Decision | None
    unwritable: str = ""


def look(answers: Answers, methods: Sequence[str]) -> Outlook:
    """See `quota.Budget.outlook`. Raises LedgerError."""
    checklist, project = answers.checklists.of_a_look(), answers.project
    outcome = counted(project, checklist)
    at_call = answers.limits_at_call(checklist, outcome, 0)
    room_ms = tuple(room_at(state, project, outcome.now_ms) if state.refuses else None for state in at_call)
    full = _full(answers, checklist, outcome)
    closed, next_ms = outcome.closing, full.retry_at_ms if full is not None else None
    if closed is not None:
        next_ms = None if closed.until_ms == NEVER else max(next_ms or 0, closed.opens_ms(project.jitter_ms))
    dearest = _dearest(answers, methods) if closed is None and full is None else None
    states = answers.states(checklist, outcome, charged=False)
    return Outlook(outcome.now_ms, states, room_ms, closed, full, next_ms, dearest)


def counted(project: Project, checklist: Checklist) -> Outcome:
    """The outcome of a look. It waits while a long log is counted, because people ask. Raises LedgerError."""
    ends_s = elapsed_s() + LOOK_WITHIN_S
    while elapsed_s() < ends_s:
        outcome = decide(project, checklist, commit=False)
        if outcome.reason == "clock":
            clocks = both_clocks(project.wall(), outcome.clock_ms)
            raise LedgerError(f"ledger {project.log.label}: {clocks}; {SET_THE_CLOCK}")
        if outcome.reason != "counting":
            return outcome
    raise LedgerError(f"ledger {project.log.label}: {COUNTING}; run again to continue")


def _full(answers: Answers, checklist: Checklist, outcome: Outcome) -> Decision | None:
    """The refusal of a call by the limits that count every call of its buckets; None if they admit it."""
    count_all = [
        not limit.narrow and any(limit.view.selector.counts_bucket(part.bucket) for part in checklist.parts)
        for limit, *_ in checklist.checks
    ]
    costs = {check.limit: check.cost_units for check in compress(checklist.checks, count_all)}
    of_these = answers.checklists.of("", checklist.parts, costs, "")
    seen = outcome._replace(
        reason="limit",
        used_units=tuple(compress(outcome.used_units, count_all)),
        caps=tuple(compress(outcome.caps, count_all)),
        closing=None,
    )
    if room_of(of_these, seen.caps, seen.used_units) >= 0:
        return None
    return answers.decision(of_these, seen, commit=False)


def _dearest(answers: Answers, methods: Sequence[str]) -> Decision | None:
    """The decision for the dearest of these methods, by the share of its bucket that a call takes. None if the book
    has none of the methods, or the call can never be admitted."""
    project = answers.project
    book = answers.checklists.book.at(project.wall())
    priced = [name for name in methods if book.canonical(name) in book.methods and book.price(name).parts]
    if not priced:
        return None
    try:
        dearest = max(priced, key=lambda name: book.share_of(book.price(name)))
        checklist = answers.checklists.make((dearest, None, None, ""))
    except UsageError:
        return None
    outcome = decide(project, checklist, commit=False)
    return answers.decision(checklist, outcome, commit=False)
