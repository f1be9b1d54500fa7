"""Turns an outcome into the decision for the caller of a budget.

    Answers    the state of each limit, the refusing limit, and when the call fits

Nearly every answer follows from the outcome alone. Only the time when a refused call fits may need the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from quota.common.clock import NEVER
from quota.common.text import many
from quota.deciding.decide import Outcome
from quota.deciding.project import Project
from quota.decision import COUNTING, Decision, LimitState, Reason, both_clocks, enforced
from quota.errors import LedgerError
from quota.rules.calls import Checklist, Checklists, cap
from quota.rules.facts import Exhaustion
from quota.rules.retry import LimitAtCall, retry_at
from quota.terms.limits import Calendar

COUNT_AGAIN_MS = 1_000
"""When to try a call again that was refused with "counting"."""


class Refusal(NamedTuple):
    """Why a call is refused, by which limit or bucket, when to try again, and details; or "ok"."""

    reason: Reason
    refused_by: str | None = None
    retry_at_ms: int | None = None
    detail: str = ""


@dataclass
class Answers:
    """Makes the decisions of one budget."""

    project: Project
    checklists: Checklists

    def granted_now(self) -> dict[str, int]:
        """The units of upstream's grants that count now, by the facts that this process has read."""
        return self.project.reading.facts.granted(self.project.now_ms())

    def decision(self, checklist: Checklist, outcome: Outcome, *, commit: bool) -> Decision:
        admitted = outcome.reason == "ok"
        states = self.states(checklist, outcome, charged=admitted and commit)
        refusal = Refusal("ok") if admitted else self._refusal(checklist, outcome)
        # The limit that allows the fewest further calls.
        tightest = min(enforced(states), key=lambda x: x.remaining_units // max(x.cost_units, 1), default=None)
        return Decision(
            admitted=admitted,
            source="ledger" if admitted and commit else None,
            credential=self.checklists.credential,
            project=self.project.name,
            method=checklist.method,
            cost_units=checklist.units,
            reason=refusal.reason,
            refused_by=refusal.refused_by,
            remaining_units=0 if tightest is None else tightest.remaining_units,
            decided_at_ms=outcome.now_ms,
            retry_at_ms=refusal.retry_at_ms,
            limits=states,
            detail=refusal.detail,
            ahead_ms=self.project.ahead_ms(outcome.now_ms),
        )

    def states(self, checklist: Checklist, outcome: Outcome, *, charged: bool) -> tuple[LimitState, ...]:
        """The state of each limit at a decision."""
        granted, states = outcome.facts.granted(outcome.now_ms), []
        # A decision that compared nothing has no numbers.
        each = zip(checklist.checks, outcome.used_units, outcome.caps, strict=False)
        for (limit, cost_units, leave_units, _), used_units, cap_units in each:
            if limit.paced and cap_units <= cost_units and used_units and not charged:
                # Only an unused window has room for a call that costs more than the pace has released.
                cap_units = cap(limit, leave_units, 0, outcome.now_ms, granted)
            noun, left_units = limit.view.selector.noun, max(0, cap_units - used_units)
            state = LimitState(limit.name, cost_units, used_units, cap_units, left_units, noun=noun)
            if limit.shadow:
                further_units = 0 if charged else cost_units
                would_refuse = cost_units > 0 and used_units + further_units > cap_units
                state = state._replace(shadow=True, would_refuse=would_refuse)
            elif leave_units and cap_units == cap(limit, leave_units, cost_units, None, granted):
                state = state._replace(leave_units=cap(limit, 0, cost_units, None, granted) - cap_units)
            states.append(state)
        return tuple(states)

    def _refusal(self, checklist: Checklist, outcome: Outcome) -> Refusal:
        if outcome.reason == "clock":
            return Refusal("clock", detail=both_clocks(self.project.wall(), outcome.clock_ms))
        if outcome.reason == "counting":
            return Refusal("counting", None, outcome.now_ms + COUNT_AGAIN_MS, COUNTING)
        if outcome.closing is None:
            return self.full(checklist, outcome)
        refusal = self.closed(outcome.closing)
        if refusal.retry_at_ms is None:
            return refusal
        return refusal._replace(retry_at_ms=self._room_from(refusal.retry_at_ms, checklist, outcome))

    def closed(self, exhaustion: Exhaustion) -> Refusal:
        """The refusal of calls by an exhaustion, whatever our own limits say."""
        opens_ms = exhaustion.opens_ms(self.project.jitter_ms)
        if opens_ms == NEVER:
            return Refusal("closed", exhaustion.bucket, detail=exhaustion.evidence)
        return Refusal("exhausted", exhaustion.bucket, opens_ms, exhaustion.evidence)

    def _room_from(self, opens_ms: int, checklist: Checklist, outcome: Outcome) -> int:
        """When a call fits if upstream closed its bucket until `opens_ms`: our own limits may be full for longer."""
        states = self.limits_at_call(checklist, outcome, opens_ms)
        if not any(state.refuses or state.limit.paced for state in states):
            return opens_ms
        try:
            at_ms, _ = retry_at(states, self.project, opens_ms)
        except LedgerError:
            return opens_ms
        return at_ms if at_ms != NEVER else opens_ms

    def full(self, checklist: Checklist, outcome: Outcome) -> Refusal:
        """The limit that delays a refused call longest, the reason, the time when all limits have room, and details."""
        states = self.limits_at_call(checklist, outcome, 0)
        full = [state for state in states if state.refuses or state.limit.paced]
        granted = outcome.facts.granted(outcome.now_ms)
        for state in full:
            if state.refuses and state.cost_units > state.cap_units and state.lapses_ms == NEVER:
                units, unspent = granted[state.limit.view.selector.buckets[0]], state.limit.headroom_units
                too_little = f"{units:,}, of which {unspent:,} stay unspent" if unspent else f"{units:,}"
                return Refusal("closed", state.limit.name, detail=too_little)
        at_ms: int | None
        try:
            at_ms, longest = retry_at(full, self.project, outcome.now_ms)
            held = full[longest]
        except LedgerError:
            at_ms, held = None, next(state for state in full if state.refuses)
        n = states.index(held)
        limit, leave_units, window = held.limit, checklist.checks[n].leave_units, held.limit.view.window
        details = []
        released_units = cap(limit, leave_units, 0, outcome.now_ms, granted)
        if released_units < held.cap_units and isinstance(window, Calendar):  # only a calendar limit is paced
            details.append(f"of {held.cap_units:,} by the end of the {window.period}")
        if leave_units:
            details.append(f"this job leaves {leave_units:,} to others")
        if checklist.each:
            details.append(f"and these {many(len(checklist.each), 'call')} need {held.cost_units:,} together")
        reason: Reason = "limit"
        if leave_units:
            without_leave_units = cap(limit, 0, held.cost_units, outcome.now_ms, granted)
            reason = "leave" if held.used_units + held.cost_units <= without_leave_units else "limit"
        return Refusal(reason, limit.name, at_ms, ", ".join(details))

    def limits_at_call(self, checklist: Checklist, outcome: Outcome, opens_ms: int) -> list[LimitAtCall]:
        """The state of each limit at a decision, for `retry_at`. The call's bucket is closed until `opens_ms`."""
        facts, states = outcome.facts, []
        most = checklist.caps_at(None, facts.granted(outcome.now_ms))
        each = zip(checklist.checks, most, outcome.caps, outcome.used_units, strict=True)
        for (limit, cost_units, _, ungranted_units), most_units, cap_units, used_units in each:
            limit = replace(limit, paced=False) if limit.shadow else limit  # it delays nothing
            refuses = not limit.shadow and cost_units > 0 and used_units + cost_units > cap_units
            state = LimitAtCall(limit, most_units, cost_units, used_units, refuses)
            if most_units < ungranted_units:
                buckets = limit.view.selector.buckets
                lapses_ms = next(grant.until_ms for grant in facts.grants if grant.bucket in buckets)
                # If a grant is less than the call, its end is no time to wait for, unless the bucket is closed for
                # longer.
                if cost_units <= most_units or lapses_ms <= opens_ms:
                    state = state._replace(lapses_ms=lapses_ms, lapsed_units=ungranted_units)
            states.append(state)
        return states
