"""The answer to "may this call leave now?": the same from every ledger and every door.

Named tuples, because each decision makes several, and a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import index
from typing import Any, Literal, NamedTuple

from quota.common.clock import host_clock, moment, rfc3339, stamp, utc
from quota.common.text import listed, many, members

Reason = Literal["ok", "limit", "leave", "exhausted", "closed", "clock", "counting", "ledger-unavailable", "run"]
Source = Literal["ledger", "allowance"]

REPAIR = "quota ledger repair"

SET_THE_CLOCK = "set the one that is wrong, then run again"
"""The remedy for a refusal with the reason "clock". The line before it shows both clocks."""


def both_clocks(host_ms: int, ledger_ms: int) -> str:
    """The times of two clocks that disagree."""
    return f"this machine's clock reads {stamp(host_ms)}, the ledger's {stamp(ledger_ms)}"


COUNTING = "the ledger still counts what was charged before"
"""Why a call is refused with the reason "counting"."""

UNKNOWN_WAIT_MS = 5 * 60_000
"""How long to wait before another try if nobody knows when the call fits."""


class When(NamedTuple):
    """When a refused call is worth another try, for schedulers: `Decision.when`.

    `at` is an aware datetime in UTC, `seconds` the time from now until then, by this machine's clock: 0 if it is past.
    """

    at: datetime
    seconds: float


class LimitState(NamedTuple):
    """One limit as a decision saw it. `limit_units` is the number enforced for this caller then: see `cap`.

    A `shadow` limit refuses nothing; `would_refuse` says that it has no room for this call. Its numbers count `noun`s:
    "unit" or "call". The caller's job leaves `leave_units` to others; `limit_units` is lower by that.
    """

    name: str
    cost_units: int
    used_units: int
    limit_units: int
    remaining_units: int
    would_refuse: bool = False
    noun: str = "unit"
    shadow: bool = False
    leave_units: int = 0


class Allowance(NamedTuple):
    """What each of `machines` may draw while the ledger does not answer: calls of up to `max_cost_units` each, and
    `allowance_units` in total, within any window as long as the longest."""

    max_cost_units: int
    allowance_units: int
    machines: int = 1


class AllowanceState(NamedTuple):
    """What this machine may spend while the ledger does not answer: calls of at most `max_cost_units`, and how much is
    drawn in the longest window. From `frees_ms` on the allowance has room for the call, or more room than now; None:
    it has that room already, or never has it. `trouble` is why nothing can be drawn now; "" if nothing is known."""

    max_cost_units: int
    allowance_units: int
    drawn_units: int
    frees_ms: int | None
    trouble: str = ""

    @property
    def remaining_units(self) -> int:
        return 0 if self.trouble else max(0, self.allowance_units - self.drawn_units)

    def as_json(self) -> dict[str, object]:
        fields = "max_cost_units allowance_units drawn_units remaining_units frees_at"
        return members(self, fields, if_any="trouble")

    def __str__(self) -> str:
        """How much is drawn and left, and when that changes; or why nothing can be drawn."""
        if self.trouble:
            return self.trouble
        drawn = f"{self.drawn_units:,} of {many(self.allowance_units, 'unit')} drawn"
        dearest = f"calls of at most {many(self.max_cost_units, 'unit')}"
        more = "" if self.frees_ms is None else f", more from {moment(self.frees_ms)}"
        return f"this machine's allowance, for {dearest}: {drawn}, {self.remaining_units:,} left{more}"


SHADOW = "shadow"
"""The history counts calls that a shadow limit would have refused under this reason."""


def enforced(limits: Sequence[LimitState]) -> list[LimitState]:
    """The limits that refuse: all but shadow limits."""
    return [state for state in limits if not state.shadow]


class Decision(NamedTuple):
    """The answer to "may this call leave now?". Times are milliseconds since 1970 where the name ends in `_ms`.

    `id` is the id of the charge. If the call is charged to several buckets, the id ends in `+N` for N further charges,
    and `cost_units` is the cost in the first bucket. A free call is admitted without a charge: it has no id, no source
    and no limits.

    `remaining_units` is what remains of the limit that allows the fewest further identical charges after this decision.
    `retry_at_ms` is exact for this cost and never early. It is None for an admitted call, if no reset helps ("closed"),
    if only this run may spend no more ("run"), and if the ledger stopped answering before the log was read. `ahead_ms`
    is the time of the ledger's newest charge, if a wrong clock dated it more than 25 h ahead; else 0. `lasting`: no
    command can use the ledger until somebody does what the message says. `misconfigured`: the configuration must change
    first. `allowance` is what this machine may spend while the ledger does not decide.
    """

    admitted: bool
    id: str | None = None
    source: Source | None = None
    credential: str = ""
    project: str = ""
    method: str = ""
    cost_units: int = 0
    reason: Reason = "ok"
    refused_by: str | None = None
    remaining_units: int = 0
    decided_at_ms: int = 0
    retry_at_ms: int | None = None
    limits: tuple[LimitState, ...] = ()
    detail: str = ""
    ahead_ms: int = 0
    lasting: bool = False
    allowance: AllowanceState | None = None
    misconfigured: bool = False

    @property
    def retry_at(self) -> datetime | None:
        """When to come back, as an aware datetime in UTC."""
        return None if self.retry_at_ms is None else utc(self.retry_at_ms)

    @property
    def retry_after_ms(self) -> int | None:
        """How long until `retry_at`, counted from the decision."""
        return None if self.retry_at_ms is None else max(0, self.retry_at_ms - self.decided_at_ms)

    def when(self, now_ms: int | None = None) -> When | None:
        """When the call is worth another try: at `retry_at`; in five minutes if nobody knows when it fits, as while the
        ledger does not answer; now if it was admitted. None if waiting does not help: `sentence()` says what to do.
        `now_ms`, a whole number, replaces this machine's clock, as `clock` of `quota.open` does.

        Hand it to a scheduler and end. This method does not wait.
        """
        if self.lasting or self.reason in ("closed", "clock"):
            return None
        now_ms = host_clock() if now_ms is None else index(now_ms)
        unknown_ms = now_ms if self.admitted else now_ms + UNKNOWN_WAIT_MS
        at_ms = unknown_ms if self.retry_at_ms is None else self.retry_at_ms
        return When(utc(at_ms), max(0, at_ms - now_ms) / 1_000)

    @property
    def would_refuse(self) -> tuple[str, ...]:
        """The shadow limits that have no room for this call."""
        return tuple([state.name for state in self.limits if state.would_refuse])

    def as_json(self) -> dict[str, object]:
        """The decision under the names that the command line prints."""
        asked = "admitted id source credential project method cost_units reason refused_by remaining_units"
        fields = "name cost_units used_units limit_units remaining_units"
        return {
            **members(self, asked),
            "retry_at": None if self.retry_at_ms is None else rfc3339(self.retry_at_ms),
            "retry_after_ms": self.retry_after_ms,
            "limits": [members(state, fields, if_any="would_refuse leave_units") for state in self.limits],
            **({} if self.allowance is None else {"allowance": self.allowance.as_json()}),
        }

    def __str__(self) -> str:
        return self.sentence()

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """A notebook shows what people read; `repr` has all fields."""
        printer.text(self.sentence())

    def sentence(self) -> str:
        """One line for people: what was asked, the answer, and what to do about a refusal."""
        state, other_cost = self._refusing(), ""
        if state is not None and state.noun == "unit" and state.cost_units != self.cost_units:
            other_cost = f", {state.cost_units:,} in limit {state.name!r}"  # it counts another bucket than the first
        what = f"{self.method} ({many(self.cost_units, 'unit')}{other_cost}) on {self.credential}"
        if self.admitted and not self.cost_units:
            return f"admitted {self.method} on {self.credential}: it is free, and nothing is charged"
        if self.admitted:
            answer = "admitted" if self.source else "would admit"
            shadows = f"; limit {listed(map(repr, self.would_refuse))} would refuse it" if self.would_refuse else ""
            of = f" of this machine's allowance: {self.detail.partition(';')[0]}" if self.allowance else ""
            left = f"{self.left()} left" if enforced(self.limits) or self.allowance else "no limit counts it"
            return f"{answer} {what}; {left}{of}{shadows}"
        return "; ".join(filter(None, (f"refused {what}: {self._cause()}", self._when())))

    def left(self) -> str:
        """`remaining_units` in words, with the noun of the limit that they belong to."""
        nouns = [state.noun for state in enforced(self.limits) if state.remaining_units == self.remaining_units]
        return many(self.remaining_units, nouns[0] if nouns else "unit")

    def why(self) -> str:
        """Why the call was refused, without the time; with its cost, if the limit has units left."""
        state = self._refusing()
        if self.reason == "limit" and not self.detail and state is not None and state.used_units < state.limit_units:
            return f"{self._cause()}, {self.method or 'a call'} needs {state.cost_units:,}"
        return self._cause()

    def _refusing(self) -> LimitState | None:
        return next((state for state in self.limits if state.name == self.refused_by), None)

    def _cause(self) -> str:
        state = self._refusing()
        if self.reason in ("limit", "leave") and state is not None:
            used = f"{state.used_units:,} of {many(state.limit_units + state.leave_units, state.noun)} used"
            return f"limit {state.name!r} has {used}" + (f", {self.detail}" if self.detail else "")
        if self.reason == "exhausted":
            return f"upstream said its bucket {self.refused_by!r} is exhausted ({self.detail})"
        if self.reason == "closed" and state is not None and state.cost_units > state.limit_units:
            cost = many(state.cost_units, state.noun)
            return f"limit {state.name!r} never has room for {cost}: upstream grants {self.detail}"
        if self.reason == "closed":
            return f"upstream grants this project nothing in bucket {self.refused_by!r} ({self.detail})"
        return self.detail

    def remedy(self) -> str:
        """What somebody must do before the call fits; empty if waiting is enough."""
        if self.reason == "clock":
            return SET_THE_CLOCK
        if self.reason == "closed":
            state = self._refusing()  # a limit can never hold this call if upstream grants less than configured
            then = "reopen" if state is None or state.cost_units <= state.limit_units else "reconcile"
            return f"waiting will not help: ask upstream for quota, then `quota {then}`"
        return ""

    def _when(self) -> str:
        if self.reason in ("clock", "closed"):
            return self.remedy()
        if self.reason == "run":
            return "the next run goes on"
        if self.lasting:
            return ""  # the detail says what to do
        if self.retry_at_ms is None:
            return "" if "run again" in self.detail else "run again when the ledger answers"
        ahead = f"; a charge is dated {stamp(self.ahead_ms)}, see `{REPAIR}`" if self.ahead_ms else ""
        return f"next at {moment(self.retry_at_ms)}{ahead}"
