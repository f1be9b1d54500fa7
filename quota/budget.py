"""READ FIRST. A budget decides whether one call to a metered API may leave now.

    Budget      the limits of one credential over one ledger; most callers want `charge`
    Decision    the answer: admitted, or refused by which limit, what remains, when to come back
    LimitState  one limit inside a decision

`Budget._decide` is the one place that decides; `charge` and `peek` are thin views of it. The comparison itself is the
ledger's, because it must be atomic with the charge: see `quota.ledger` for its four steps.

The arithmetic, for a limit of L units over a window, of which U are used, and a call that costs C:

    admitted            U + C <= L
    remaining           L - U                       after the charge, if there was one
    retry_at            the first millisecond at which enough has left the window that U + C <= L holds again
    never               C > L                       CostExceedsLimit: no waiting helps

    L = 500 over 24 h, charges of 100 at 09:00, 10:00, 11:00, 12:00, 13:00. A call for 200 at 14:00 is refused until
    10:00 tomorrow, when two of the five have left. (The oldest charge's expiry, 09:00, would be too early.)
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal

from quota.errors import CostExceedsLimit, LedgerError, UnknownCharge, UsageError
from quota.ledger import NEVER, Ask, Charge, Question
from quota.limits import Calendar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from quota.costs import CostBook
    from quota.ledger import Entry, Ledger, Verdict
    from quota.limits import Edges, Limit, View
    from quota.spending import Spend

Reason = Literal["ok", "limit", "leave", "exhausted", "closed", "clock", "ledger-unavailable"]
Source = Literal["ledger", "allowance"]

READ_CHUNK = 1_000


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit as a decision saw it. `limit_units` is the number that was enforced for this caller, after `leave`."""

    name: str
    cost_units: int
    used_units: int
    limit_units: int
    remaining_units: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to "may this call leave now?". Times are milliseconds since the epoch where the name ends in `_ms`.

    `remaining_units` is that of the limit which allows the fewest further identical charges after this decision.
    `retry_at_ms` is exact for this cost and never early; None when admitted, and when no reset will help ("closed").
    """

    admitted: bool
    id: str | None
    source: Source | None
    credential: str
    project: str
    method: str
    cost_units: int
    reason: Reason
    refused_by: str | None
    remaining_units: int
    decided_at_ms: int
    retry_at_ms: int | None
    limits: tuple[LimitState, ...]
    detail: str = ""

    @property
    def retry_at(self) -> datetime | None:
        """When to come back, as an aware datetime in UTC."""
        return None if self.retry_at_ms is None else utc(self.retry_at_ms)

    @property
    def retry_after_ms(self) -> int | None:
        """How long until `retry_at`, counted from the decision."""
        return None if self.retry_at_ms is None else max(0, self.retry_at_ms - self.decided_at_ms)

    def as_json(self) -> dict[str, object]:
        """The decision under the names that the command line prints."""
        return {
            "admitted": self.admitted,
            "id": self.id,
            "source": self.source,
            "credential": self.credential,
            "project": self.project,
            "method": self.method,
            "cost_units": self.cost_units,
            "reason": self.reason,
            "refused_by": self.refused_by,
            "remaining_units": self.remaining_units,
            "retry_at": None if self.retry_at_ms is None else rfc3339(self.retry_at_ms),
            "retry_after_ms": self.retry_after_ms,
            "limits": [
                {
                    "name": state.name,
                    "cost_units": state.cost_units,
                    "used_units": state.used_units,
                    "limit_units": state.limit_units,
                    "remaining_units": state.remaining_units,
                }
                for state in self.limits
            ],
        }

    def sentence(self) -> str:
        """One line for people: what was asked, the answer, and what to do about a refusal."""
        what = f"{self.method} ({self.cost_units} units) on {self.credential}"
        if self.admitted:
            return f"admitted {what}; {self.remaining_units} units remain"
        return f"refused {what}: {self.why()}; {self._when()}"

    def why(self) -> str:
        """What refused it, without what was asked and when to come back."""
        state = next((s for s in self.limits if s.name == self.refused_by), None)
        if self.reason in ("limit", "leave") and state is not None:
            left = " after what this job leaves for others" if self.reason == "leave" else ""
            return f"limit {state.name!r} has {state.used_units} of {state.limit_units} units used{left}"
        if self.reason == "exhausted":
            return f"upstream said its bucket {self.refused_by!r} is exhausted ({self.detail})"
        if self.reason == "closed":
            return f"upstream grants this project nothing in bucket {self.refused_by!r} ({self.detail})"
        if self.reason == "clock":
            return "this machine's clock and the ledger's do not agree"
        return self.detail

    def _when(self) -> str:
        if self.reason == "clock":
            return f"the ledger's clock reads {rfc3339(self.decided_at_ms)}: set this machine's clock and run again"
        if self.reason == "closed":
            return "waiting will not help: ask upstream for quota, then `quota reopen`"
        if self.retry_at_ms is None:
            return "run again when it answers"
        return f"next at {rfc3339(self.retry_at_ms)}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one kind of call asks of each limit that counts it: computed once, reused for every decision."""

    method: str
    units: int
    bucket: str
    closed_by: tuple[str, ...]
    limits: tuple[Limit, ...]
    caps: tuple[int, ...]
    costs: tuple[int, ...]


class Budget:
    """The limits of one credential over one ledger.

    Cheap to make and safe to share between threads. `clock` (ms since the epoch) replaces the host's, for tests and
    simulation; the ledger's own clock is the ledger's business.
    """

    def __init__(
        self,
        *,
        credential: str,
        project: str,
        book: CostBook,
        limits: Sequence[Limit],
        ledger: Ledger,
        leave: Mapping[str, Mapping[str, int]] | None = None,
        clock: Callable[[], int] | None = None,
        jitter_ms: int = 0,
        tokens: Tokens | None = None,
    ) -> None:
        self.credential = credential
        self.project = project
        self.book = book
        self.limits = tuple(limits)
        self.ledger = ledger
        self._leave = leave or {}
        self._clock = clock or host_clock
        self._jitter_ms = jitter_ms
        self._plans: dict[tuple[str, int | None, str | None, str], _Plan] = {}
        self.tokens = tokens or Tokens()

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
        Raises UnknownMethod, CostExceedsLimit and UsageError for calls that can never be right. A ledger that cannot
        answer is a refusal too (reason "ledger-unavailable"); in doubt the charge counts as spent there.
        """
        return self._decide(method, units, None, job, region, commit=True)

    def peek(
        self,
        method: str,
        *,
        units: int | None = None,
        job: str | None = None,
        region: str | None = None,
    ) -> Decision:
        """The decision `charge` would take now, without charging."""
        return self._decide(method, units, None, job, region, commit=False)

    def charge_attempt(self, method: str, verb: str) -> Decision:
        """`charge` for a call on its way out: a method the book does not have costs its default for the HTTP verb."""
        book = self.book
        if book.canonical(method) in book.methods:
            return self._decide(method, None, None, None, None, commit=True)
        price = book.default_price(verb)
        _warn_default_price(book.name, method, price.units)
        return self._decide(method, price.units, price.bucket, None, None, commit=True)

    def refund(self, charge_id: str) -> Entry:
        """Give back a charge whose request provably never left this machine. The charge as it stood before."""
        return self.settle(charge_id, 0)

    def settle(self, charge_id: str, units: int) -> Entry:
        """Set what a charge really cost, absolutely: idempotent, never refused, its time and id unchanged.

        Returns the charge as it stood before. Raises UnknownCharge for an id that is unknown or has left the log.
        """
        if not 0 <= units <= MAX_UNITS:
            raise UsageError(f"{units} units: settle a charge to 0 (a refund) or more, up to {MAX_UNITS}")
        views = tuple(limit.view for limit in self.limits)
        entry = self.ledger.settle(self.project, charge_id, units, views) if _is_id(charge_id) else None
        if entry is None:
            raise UnknownCharge(
                f"project {self.project!r} has no charge {charge_id!r}; `quota spend` shows what the log still holds"
            )
        return entry

    def usage(self, job: str | None = None) -> tuple[LimitState, ...]:
        """Every limit as it stands now. Charges nothing; a `job` sees its own, lower numbers."""
        leave = self._leave.get(job or "", {})
        caps = tuple(cap(limit, leave) for limit in self.limits)
        plan = _Plan("", 0, "", (), self.limits, caps, (0,) * len(caps))
        return _states(plan, self._ask(plan, Charge(0, "", "", "", "", ""), commit=False))

    def spend(
        self,
        method: str,
        *,
        units: int | None = None,
        job: str | None = None,
        region: str | None = None,
    ) -> Spend:
        """Charge around a block or a function: `with budget.spend("search.list"): ...`, or as a decorator.

        For clients without a seam of their own. Each entry is one charge; a refusal raises Refused before the body
        runs. The charge stands whatever the body does: what was sent was spent.
        """
        from quota.spending import Spend

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
        if job is None or region is None:
            labelled = current_labels()
            job = labelled[0] if job is None else job
            region = labelled[1] if region is None else region
        key = (method, units, bucket, job)
        plan = self._plans.get(key) or self._make_plan(key)
        _check_name("region", region)
        charge = Charge(plan.units, plan.bucket, plan.method, job, region, self.tokens.next() if commit else "")
        try:
            verdict = self._ask(plan, charge, commit=commit)
            return self._decision(plan, verdict, commit=commit)
        except LedgerError as error:
            return self._unanswered(plan, str(error))

    def _ask(self, plan: _Plan, charge: Charge, *, commit: bool) -> Verdict:
        """One question to the ledger; asked once more with a fresh clock if ours proved wrong."""
        for _ in range(2):
            caller_ms = self._clock()
            asks = [
                Ask(limit.view, cap, cost, _edges(limit.view, caller_ms))
                for limit, cap, cost in zip(plan.limits, plan.caps, plan.costs, strict=True)
            ]
            question = Question(self.project, charge, asks, plan.closed_by, caller_ms, self._jitter_ms)
            verdict = self.ledger.decide(question, commit=commit)
            if verdict.outcome != "clock":
                break
        return verdict

    def _make_plan(self, key: tuple[str, int | None, str | None, str]) -> _Plan:
        method, units, bucket, job = key
        _check_name("job", job)
        if units is None:
            price = self.book.price(method, utc(self._clock()).date())
            units, bucket = price.units, price.bucket
        elif not isinstance(units, int) or not 1 <= units <= MAX_UNITS:
            raise UsageError(f"{units} units: a charge is a whole number from 1 to {MAX_UNITS}")
        method = self.book.canonical(method)
        _check_name("method", method, least=1)
        if bucket is None:
            known = self.book.methods.get(method)
            bucket = known[-1].bucket if known else self.book.main_bucket.name
        limits = tuple(x for x in self.limits if x.view.selector.counts(bucket, method, job))
        caps = tuple(cap(limit, self._leave.get(job, {})) for limit in limits)
        costs = tuple(limit.view.selector.cost(units) for limit in limits)
        for limit, cap_units, cost_units in zip(limits, caps, costs, strict=True):
            if cost_units > cap_units:
                left = f" after leaving {limit.limit_units - cap_units}" if cap_units < limit.limit_units else ""
                raise CostExceedsLimit(
                    f"{method} costs {cost_units} units and limit {limit.name!r} of credential {self.credential!r} "
                    f"holds {cap_units}{left}: it can never fit; raise the limit or make a cheaper call"
                )
        plan = _Plan(method, units, bucket, self.book.closed_by(method, bucket), limits, caps, costs)
        if len(self._plans) < 1_000:
            self._plans[key] = plan
        return plan

    def _decision(self, plan: _Plan, verdict: Verdict, *, commit: bool) -> Decision:
        states = _states(plan, verdict)
        admitted = verdict.outcome == "admitted"
        reason: Reason = "ok"
        refused_by: str | None = None
        retry_at_ms: int | None = None
        detail = ""
        if verdict.outcome == "clock":
            reason = "clock"
        elif verdict.exhaustion is not None:
            exhaustion = verdict.exhaustion
            refused_by, detail = exhaustion.bucket, exhaustion.evidence
            reason = "closed" if exhaustion.until_ms == NEVER else "exhausted"
            if reason == "exhausted":
                retry_at_ms = exhaustion.until_ms + self._jitter_ms
        elif not admitted:
            refused_by, reason, retry_at_ms = self._refusal(plan, verdict)
        tightest = min(states, key=lambda s: s.remaining_units // s.cost_units, default=None)
        return Decision(
            admitted=admitted,
            id=verdict.id,
            source="ledger" if admitted and commit else None,
            credential=self.credential,
            project=self.project,
            method=plan.method,
            cost_units=plan.units,
            reason=reason,
            refused_by=refused_by,
            remaining_units=tightest.remaining_units if tightest else 0,
            decided_at_ms=verdict.now_ms,
            retry_at_ms=retry_at_ms,
            limits=states,
            detail=detail,
        )

    def _unanswered(self, plan: _Plan, detail: str) -> Decision:
        """The refusal when the ledger could not answer."""
        return Decision(
            admitted=False,
            id=None,
            source=None,
            credential=self.credential,
            project=self.project,
            method=plan.method,
            cost_units=plan.units,
            reason="ledger-unavailable",
            refused_by=None,
            remaining_units=0,
            decided_at_ms=self._clock(),
            retry_at_ms=None,
            limits=(),
            detail=detail,
        )

    def _refusal(self, plan: _Plan, verdict: Verdict) -> tuple[str, Reason, int]:
        """Which limit holds a refused call back longest, why, and until when."""
        latest: tuple[int, str, Reason] | None = None
        for limit, cap_units, cost, used in zip(plan.limits, plan.caps, plan.costs, verdict.used_units, strict=True):
            if used + cost <= cap_units:
                continue
            free_at_ms = self._room_at(limit.view, verdict, used, cap_units - cost)
            if latest is None or free_at_ms > latest[0]:
                latest = (
                    free_at_ms,
                    limit.name,
                    "limit" if used + cost > limit.limit_units else "leave",
                )
        assert latest is not None, "a refusal has a limit that refused"  # noqa: S101  # narrows the type
        return latest[1], latest[2], latest[0]

    def _room_at(self, view: View, verdict: Verdict, used_units: int, room_units: int) -> int:
        """The first millisecond at which `view` counts at most `room_units`, if nothing more is charged.

        A sliding window frees its charges one by one, oldest first: walk the log from the window's tail until enough
        is free. A calendar window frees all of them at its edge (unless the clock went back and left charges dated
        behind that edge: then the edge after it, and so on).
        """
        window = view.window
        if isinstance(window, Calendar):
            edge_ms = window.edges(verdict.now_ms)[1]
            while verdict.last_ms >= edge_ms:
                left = sum(_counted(view, e) for e in self._entries(edge_ms, verdict.last_ms))
                if left <= room_units:
                    break
                edge_ms = window.edges(edge_ms)[1]
            return edge_ms
        freed_units = 0
        for entry in self._entries(verdict.now_ms - window.window_ms + 1, verdict.last_ms):
            freed_units += _counted(view, entry)
            if used_units - freed_units <= room_units:
                return entry.ms + window.window_ms
        return verdict.now_ms  # what refused it was given back while we looked

    def _entries(self, since_ms: int, until_ms: int) -> Iterator[Entry]:
        return read_entries(self.ledger, self.project, since_ms, until_ms)


# -- what the budget is made of ----------------------------------------------------------------------------------------

MAX_UNITS = 10**9
"""The dearest single charge. Sums of a whole log of them stay exact in Lua's and JSON's 53-bit integers."""


def cap(limit: Limit, leave: Mapping[str, int]) -> int:
    """The number a limit is held to for one caller: the enforced one, lowered by what the caller's job leaves.

    The one function that lowers a limit; the ledger only ever sees its result.
    """
    return max(0, limit.limit_units - leave.get(limit.name, 0))


class Tokens:
    """Names for attempts, unique over processes: 8 characters of the run's id, then a counter.

    One for all budgets of a process. A forked child gets a run id of its own.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = run or run_id()
        self._pid = os.getpid()
        self._counter = count(1)

    def next(self) -> str:
        if self._pid != os.getpid():
            self.__init__()  # type: ignore[misc]  # a forked child starts over under a name of its own
        return f"{self.run}{next(self._counter)}"


def run_id() -> str:
    """8 random characters that name one run."""
    return os.urandom(5).hex()[:8]


def host_clock() -> int:
    """The host's clock in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def utc(at_ms: int) -> datetime:
    """An aware datetime in UTC, exact to the millisecond."""
    from datetime import UTC, datetime, timedelta

    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)


def rfc3339(at_ms: int) -> str:
    """`2026-11-21T09:30:00.125Z`."""
    return utc(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_labels: ContextVar[tuple[str, str]] = ContextVar("quota_labels", default=("", ""))


def current_labels() -> tuple[str, str]:
    """The job and region that `labels` set here; empty where it set none."""
    return _labels.get()


@contextmanager
def labels(*, job: str = "", region: str = "") -> Iterator[None]:
    """Say who spends inside this block: charges made in it carry this job and region unless they name their own."""
    token = _labels.set((job, region))
    try:
        yield
    finally:
        _labels.reset(token)


def read_entries(ledger: Ledger, project: str, since_ms: int, until_ms: int) -> Iterator[Entry]:
    """The log's entries with since_ms <= ms <= until_ms, in order, read in bounded chunks."""
    after = (since_ms - 1, NEVER)
    size = 100  # most refusals are explained by the first few entries
    while True:
        chunk = ledger.read(project, after, until_ms, size)
        yield from chunk
        if len(chunk) < size:
            return
        after = (chunk[-1].ms, chunk[-1].seq)
        size = READ_CHUNK


def _counted(view: View, entry: Entry) -> int:
    selector = view.selector
    return selector.cost(entry.units) if selector.counts(entry.bucket, entry.method, entry.job) else 0


def _states(plan: _Plan, verdict: Verdict) -> tuple[LimitState, ...]:
    return tuple(
        LimitState(limit.name, cost, used, cap_units, max(0, cap_units - used))
        for limit, cap_units, cost, used in zip(plan.limits, plan.caps, plan.costs, verdict.used_units, strict=False)
    )


def _edges(view: View, now_ms: int) -> Edges | None:
    return view.window.edges(now_ms) if isinstance(view.window, Calendar) else None


def _check_name(what: str, name: str, least: int = 0) -> None:
    if not least <= len(name) <= 64 or not name.isprintable():
        raise UsageError(f"{what} {name[:80]!r}: a name has 1 to 64 printable characters")


def _is_id(text: str) -> bool:
    ms, dash, seq = text.partition("-")
    return bool(dash) and all(part.isascii() and part.isdigit() and len(part) <= 15 for part in (ms, seq))


_warned: set[tuple[str, str]] = set()


def _warn_default_price(book: str, method: str, units: int) -> None:
    if (book, method) not in _warned and len(_warned) < 1_000:
        _warned.add((book, method))
        import logging

        logging.getLogger("quota").warning(
            "cost book %r has no method %r: charged %d units, its default; add the method to the book",
            book,
            method,
            units,
        )
