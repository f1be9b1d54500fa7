"""The decision that follows from a ledger's result: what the caller of a budget is told.

    Answers         makes the decisions of one budget
    states_of       each limit, as a result shows it
    occupancies_of  the same with all that `quota.deciding.retry_at` needs

Nearly every answer follows from the result alone. When a refused call fits again may have to be read from the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quota.common.clock import NEVER, rfc3339
from quota.common.log import warn
from quota.common.text import many
from quota.deciding.checklist import Checklist, Grants, cap
from quota.deciding.retry_at import Clocks, Occupancy, ReadEntries, retry_at
from quota.decision import COUNTING, REPAIR, Decision, LimitState, Reason, enforced
from quota.errors import LedgerError
from quota.ledger.contract import COUNT_AGAIN_MS, RETENTION_SLACK_MS, ChargeRequest, ChargeResult
from quota.ledger.unlogged import UPSTREAM
from quota.terms.limits import MINUTE_MS, Calendar, Limit

Refusal = tuple["str | None", "Reason", "int | None", str]
"""The limit or bucket that refused a call, the reason, when to come back, and details."""

_NOT_REFUSED: Refusal = None, "ok", None, ""

SAY_AGAIN_MS = MINUTE_MS
"""The least time between two lines of the log about one limit that cannot say when it has room."""

MAX_SAID = 1_000
"""The most limits of which that is remembered: a limit of each job may have any name."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Makes decisions. `jitter_ms` is added to the end of an exhaustion, as the ledger does. `said_ms` is when the log
    was told of a limit last."""

    credential: str
    project: str
    jitter_ms: int
    said_ms: dict[str, int] = field(default_factory=dict)

    def decision(
        self,
        checklist: Checklist,
        request: ChargeRequest,
        result: ChargeResult,
        read: ReadEntries,
        *,
        commit: bool,
    ) -> Decision:
        """The decision about a call. `read` reads the ledger's log."""
        states = states_of(checklist, request, result)
        admitted = result.outcome == "admitted"
        refusal = _NOT_REFUSED if admitted else self._refusal(checklist, request, result, read)
        refused_by, reason, retry_at_ms, detail = refusal
        refusing = enforced(states) if checklist.shadow else states
        tightest = refusing[0] if len(refusing) == 1 else min(refusing, key=_further_calls, default=None)
        return Decision(
            admitted,
            result.id,
            "ledger" if admitted and commit else None,
            self.credential,
            self.project,
            checklist.method,
            checklist.units,
            reason,
            refused_by,
            tightest.remaining_units if tightest else 0,
            result.now_ms,
            retry_at_ms,
            states,
            detail,
            ahead_ms(result),
        )

    def _refusal(
        self, checklist: Checklist, request: ChargeRequest, result: ChargeResult, read: ReadEntries
    ) -> Refusal:
        if result.outcome == "clock":
            return None, "clock", None, clocks_of(request, result)
        if result.outcome == "counting":
            return None, "counting", result.now_ms + COUNT_AGAIN_MS, COUNTING
        exhaustion = result.exhaustion
        if exhaustion is None:
            return self._full(checklist, request, result, read)
        if exhaustion.until_ms == NEVER:
            return exhaustion.bucket, "closed", None, exhaustion.evidence
        opens_ms = exhaustion.until_ms + self.jitter_ms
        retry_at_ms = _room_from(opens_ms, checklist, request, result, read)
        return exhaustion.bucket, "exhausted", retry_at_ms, exhaustion.evidence

    def _full(self, checklist: Checklist, request: ChargeRequest, result: ChargeResult, read: ReadEntries) -> Refusal:
        """The limit that delays a refused call longest, the reason, the time when all limits have room, and details.

        The time is None where the log can no longer be read. The ledger has refused, so the allowance is not asked.
        """
        occupancies, clocks = occupancies_of(checklist, request, result, of_all=checklist.paced)
        for one in occupancies:
            if one.cost_units > one.cap_units:  # by the configuration it fits: see `Checklists.make`
                return one.limit.name, "closed", None, _too_little(one.limit, checklist.grants)
        retry_at_ms: int | None
        try:
            retry_at_ms, i = retry_at(occupancies, clocks, read, clocks.now_ms)
            limit = occupancies[i].limit
        except LedgerError as error:
            retry_at_ms, limit = None, next(one.limit for one in occupancies if one.full)
            self._say_unknown(limit.name, error, clocks.now_ms)
        n = checklist.limits.index(limit)
        check, leave_units = request.checks[n], checklist.leaves[n]
        most = checklist.caps[n]
        details = [f"of {most:,} by the end of the {_period(limit)}"] if check.cap_units < most else []
        details += [f"this job leaves {leave_units:,} to others"] if leave_units else []
        if checklist.each:
            details.append(f"and these {many(len(checklist.each), 'call')} need {check.cost_units:,} together")
        if not leave_units:
            return limit.name, "limit", retry_at_ms, ", ".join(details)
        alone = cap(limit, 0, check.cost_units, request.caller_ms, checklist.grants.units)
        reason: Reason = "limit" if result.used_units[n] + check.cost_units > alone else "leave"
        return limit.name, reason, retry_at_ms, ", ".join(details)

    def _say_unknown(self, limit: str, error: LedgerError, now_ms: int) -> None:
        if not 0 <= now_ms - self.said_ms.get(limit, -SAY_AGAIN_MS) < SAY_AGAIN_MS:
            if len(self.said_ms) >= MAX_SAID:
                self.said_ms.clear()
            self.said_ms[limit] = now_ms
            warn("retry_at_unknown", error, project=self.project, limit=limit)


# -- parts of a decision -----------------------------------------------------------------------------------------------


def _room_from(
    opens_ms: int, checklist: Checklist, request: ChargeRequest, result: ChargeResult, read: ReadEntries
) -> int:
    """When a call fits whose bucket upstream closed until `opens_ms`: limits of ours may be full for longer than that.
    Where they cannot say when they have room, `opens_ms`."""
    occupancies, clocks = occupancies_of(checklist, request, result, of_all=checklist.paced, opens_ms=opens_ms)
    if not any(one.full or one.limit.paced for one in occupancies):
        return opens_ms
    try:
        at_ms, _ = retry_at(occupancies, clocks, read, opens_ms)
    except LedgerError:
        return opens_ms
    return at_ms if at_ms != NEVER else opens_ms


def occupancies_of(
    checklist: Checklist, request: ChargeRequest, result: ChargeResult, *, of_all: bool = True, opens_ms: int = 0
) -> tuple[list[Occupancy], Clocks]:
    """The state of each limit at a decision, with the clocks, for `retry_at`. Not `of_all`: of those that refused. The
    call's bucket is closed until `opens_ms`."""
    occupancies, behind_ms = [], result.now_ms - request.caller_ms
    each = zip(checklist.limits, checklist.caps, checklist.costs, request.checks, result.used_units, strict=True)
    for n, (limit, cap_units, cost_units, check, used) in enumerate(each):
        if limit.shadow:
            limit, cap_units = replace(limit, paced=False), check.cap_units
        full = used + check.cost_units > check.cap_units
        if full or of_all:
            unlogged = result.unlogged[n] if result.unlogged else ()
            leaving_ms = result.leaving_ms[n] if result.leaving_ms else None
            one = Occupancy(limit, cap_units, cost_units, used, unlogged, full, leaving_ms)
            occupancies.append(one if limit.shadow else _with_lapse(one, checklist, n, behind_ms, opens_ms))
    return occupancies, Clocks(result.now_ms, request.caller_ms, result.last[0])


def _with_lapse(one: Occupancy, checklist: Checklist, n: int, behind_ms: int, opens_ms: int) -> Occupancy:
    """The same with the end of the grant that lowers it, by the ledger's clock: callers believe it by theirs. For a
    call that costs more than the grant allows, nobody waits so long, unless its bucket is closed until then."""
    lapsed_units = cap(one.limit, checklist.leaves[n], one.cost_units, None)
    if one.cap_units >= lapsed_units:
        return one
    lapses_ms = checklist.grants.until_ms_of(one.limit.view.selector.buckets[0]) + behind_ms
    if one.cost_units > one.cap_units and lapses_ms > opens_ms:
        return one
    return one._replace(lapses_ms=lapses_ms, lapsed_units=lapsed_units)


def _further_calls(state: LimitState) -> int:
    return state.remaining_units // max(state.cost_units, 1)


def states_of(checklist: Checklist, request: ChargeRequest, result: ChargeResult) -> tuple[LimitState, ...]:
    """Each limit as a result shows it, with what it counts of charges that the ledger has lost."""
    states = []
    caps = checklist.caps_at(request.caller_ms) if checklist.shadow else ()
    for n, (limit, check, used) in enumerate(zip(checklist.limits, request.checks, result.used_units, strict=False)):
        _, cap_units, cost_units, _ = check
        would_refuse = False
        if limit.shadow:
            cap_units = caps[n]
            would_refuse = cost_units > 0 and used + (cost_units if result.id is None else 0) > cap_units
        left = cap_units - used if cap_units > used else 0
        states.append(
            LimitState(
                limit.name,
                cost_units,
                used,
                cap_units,
                left,
                would_refuse=would_refuse,
                noun=limit.view.selector.noun,
                shadow=limit.shadow,
            )
        )
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


def _too_little(limit: Limit, grants: Grants) -> str:
    unspent = f", of which {limit.headroom_units} stay unspent" if limit.headroom_units else ""
    return f"{grants.units[limit.view.selector.buckets[0]]}{unspent}"


def ahead_ms(result: ChargeResult) -> int:
    """The time of the newest charge, where it is dated further ahead of now than a clock may go back; else 0."""
    newest_ms = result.last[0]
    return newest_ms if newest_ms > result.now_ms + RETENTION_SLACK_MS else 0


def clocks_of(request: ChargeRequest, result: ChargeResult) -> str:
    """What both clocks read, for people."""
    if result.seen_ahead_ms:
        return (
            f"the clocks read {rfc3339(result.now_ms)}, and this machine saw charges dated "
            f"{rfc3339(result.seen_ahead_ms)}, which the ledger lacks (`{REPAIR}`, if the clocks are right now)"
        )
    return f"this machine's clock reads {rfc3339(request.caller_ms)}, the ledger's {rfc3339(result.now_ms)}"
