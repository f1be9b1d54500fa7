"""One step of a fetch function: it uses the real client, retries transient errors, and gives up after a signal.

Attempts           the steps of one run, and what they have spent
refusal_of         the decision that would refuse the first call of a step
Failure            what an exception means for the run, from `classify_failure`
Interrupted        a signal came
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EADDRNOTAVAIL, EHOSTDOWN, EHOSTUNREACH, EMFILE, ENETDOWN, ENETRESET, ENETUNREACH, ENOBUFS
from inspect import signature
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import quota
from quota import Budget, Decision, Session
from quota.budget import Listener
from quota.clients.upstream_errors import RawAnswer, answer_in, is_any, is_transient, passed, refused_login
from quota.common.clock import elapsed_s, host_clock
from quota.common.files import LACKS_LIBRARY, remedy_for
from quota.common.log import line
from quota.common.redact import redact
from quota.common.text import describe, first_of, many, one_line, spell
from quota.errors import NoAnswer, behind
from quota.jobs import interruption
from quota.jobs.job import Fetch, Page, attempt_of, line_of
from quota.jobs.progress import Watcher
from quota.jobs.store.checkpoints import Checkpoint
from quota.jobs.store.file import StoreError
from quota.jobs.store.store import Store
from quota.settings.model import JobSettings
from quota.terms.costs import CostBook
from quota.terms.limits import cutoff

ATTEMPTS = 4
MAX_WAIT_S = 4.0
"""The longest wait between two attempts. With ATTEMPTS, one step waits at most 3 x 5 s, jitter included."""

LAST_ATTEMPT_S = 30.0
"""No attempt begins later after the first one: a server that says nothing costs each attempt a minute."""

SILENT_S = 15.0
"""How long a call waits for the next byte of an answer if the region before had no answer."""

log = logging.getLogger("quota.jobs")


def longest_step_ms(job: JobSettings) -> int:
    """The longest time between two pages of a job: a run waits only for upstream."""
    return round(ATTEMPTS * (job.max_answer_s + MAX_WAIT_S + 1)) * 1_000


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """A signal came, and the run no longer waits for a page."""


def refusal_of(budget: Budget, job: JobSettings, fetch: Fetch, checkpoint: Checkpoint) -> Decision | None:
    """The decision that refuses the first call at a checkpoint, also noted as a refusal. None if the budget would admit
    the call, or if the function names none."""
    method = attempt_of(fetch, checkpoint.cursor)
    if method is None:
        return None
    units = budget.checklists.least_reserved(method)
    decision = budget.peek(method, units=units, job=job.name, region=checkpoint.region)
    if decision.admitted:
        return None
    budget.note_refusal(decision, job.name, checkpoint.region)
    return decision


class _Admitted(NamedTuple):
    """A call that this run made: its region, the number of its page, and the units that it counts."""

    region: str
    page: int
    units: int


@dataclass(eq=False)
class _Calls:
    """The calls of one attempt. If the last one was refused, `refused` is the decision, or `refused_upstream` what
    follows from upstream's answer."""

    admitted: list[Decision] = field(default_factory=list)  # unless their cost was corrected since
    refused: Decision | None = None
    refused_upstream: Decision | None = None
    any_refused: bool = False


@dataclass(eq=False)
class Attempts(Listener):
    """The steps of one run; the last one began `here`."""

    session: Session
    job: JobSettings
    fetch: Fetch
    store: Store
    stop: Callable[[], int]
    watcher: Watcher

    def __post_init__(self) -> None:
        self._given: dict[str, Any] = {"store": self.store} if "store" in signature(self.fetch).parameters else {}
        if self.job.fetch == "search":
            self._given["pages"] = self.job.pages
        self._budget = self.session.budget(self.job.credential)
        self._outer, self._budget.listener = self._budget.listener, self  # a run may begin within a step of another
        self.client: Any = None  # until there is one, an error concerns all regions
        self._signalled_s: float | None = None  # when a signal came while a page was in flight
        self.here = Checkpoint(self.job.name, "")
        self.tries = 0  # the attempts of the last step
        self._silent_s = math.inf  # how long a call waits for the next byte
        self._admitted: dict[str, _Admitted] = {}  # by the id of the charge
        self._unnoted: deque[tuple[int, int]] = deque()  # page numbers and units that the store does not have yet
        self._calls = _Calls()  # of the last attempt
        self.passed_over: list[str] = []  # the regions with a page whose function went on without a refused call

    def close(self) -> None:
        self._budget.listener = self._outer
        if self.client is not None:
            self.client.close()

    def decided(self, decision: Decision) -> None:
        calls = self._calls
        calls.refused, calls.refused_upstream = None if decision.admitted else decision, None
        calls.any_refused |= not decision.admitted
        if decision.id is not None:
            call = _Admitted(self.here.region, self.here.pages + 1, decision.cost_units)
            self._admitted[decision.id] = call
            self._unnoted.append((call.page, call.units))
            calls.admitted.append(decision)
        self.watcher.decided(decision)

    def exhausted(self, decision: Decision) -> None:
        again = self._budget.peek(decision.method, units=decision.cost_units or None)
        self._calls.refused_upstream = None if again.admitted else again
        self._calls.any_refused |= not again.admitted

    def corrected(self, charge_id: str, added_units: int | None) -> None:
        calls = self._calls
        calls.admitted = [decision for decision in calls.admitted if decision.id != charge_id]
        if (call := self._admitted.get(charge_id)) is not None:
            units = 0 if added_units is None else call.units + added_units
            self._admitted[charge_id] = call._replace(units=units)
            self._unnoted.append((call.page, units - call.units))

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, checkpoint: Checkpoint, attempts: int, silent: Sequence[str]) -> Page:
        """One step of the fetch function. It makes no further attempt at an address that is `silent`. Raises the error
        of the last attempt, Refused, and Interrupted."""
        self.here, self.tries, self._silent_s = checkpoint, 0, SILENT_S if silent else math.inf
        if self.client is None:
            self._connect()
        self.of_run = self.job.name, checkpoint.region
        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(attempts) | tenacity.stop_before_delay(LAST_ATTEMPT_S),
            wait=tenacity.wait_exponential_jitter(initial=1, max=MAX_WAIT_S, jitter=1),
            retry=tenacity.retry_if_exception(lambda error: self._worth_retrying(error, silent)),
            before_sleep=self._say_retry,
            sleep=self._sleep,
            reraise=True,
        )
        page = retrying(self._attempt)
        if self._calls.any_refused:
            self.passed_over.append(checkpoint.region)
        if not isinstance(page, Page):
            if isinstance(page, Coroutine):  # a wrapper hides what it wraps
                page.close()  # Python warns of a coroutine that nobody awaited
            raise TypeError(f"fetch = {self.job.fetch!r} returned {type(page).__name__}, not a quota.jobs.job.Page")
        if page.items > self.job.max_items:
            why = f"a page holds {many(page.items, 'item')}, more than {self.job.max_items:,}"
            raise quota.BadAnswer(f"{why}; if that is right, raise max_items")
        return page

    def _attempt(self) -> Any:
        """One call of the fetch function. Raises Refused if it hid a refusal of its last call."""
        self.tries += 1
        self._calls = _Calls()
        # Pass copies: an earlier attempt may have changed its cursor and options.
        cursor, options = copy.deepcopy((self.here.cursor, dict(self.job.options)))
        try:
            page = self.fetch(self.client, self.here.region, cursor, **{**self._given, **options})
        except quota.QuotaError:
            raise
        except BaseException as error:  # a function may hide a refusal behind its own error
            hidden = (cause.decision for cause in behind(error) if isinstance(cause, quota.Refused))
            refused = next(hidden, None) or self._refusal_of_step()
            if refused is not None:
                raise quota.Refused(refused) from error
            first = first_of(error)
            if not (isinstance(first, Exception) or ends_program(first)):
                why = f"fetch ended with {describe(first)}; let it return a page, or raise an error"
                raise RuntimeError(why) from error
            if first is not error:
                raise first from error
            raise
        # The page lacks the refused call's result, unless the function made another call instead.
        if (refused := self._refusal_of_step()) is not None:
            raise quota.Refused(refused)
        return page

    def _refusal_of_step(self) -> Decision | None:
        """The refusal of the last call of this step, by the budget or by upstream. The budget has counted its own
        refusals; this method counts upstream's."""
        calls = self._calls
        if calls.refused_upstream is not None:
            self._budget.note_refusal(calls.refused_upstream, self.job.name, self.here.region)
        return calls.refused or calls.refused_upstream

    def too_dear(self, refused: Decision) -> str | None:
        """Why no run can end this step, if its calls together cost more than the refusing limit ever holds. A call
        that has left the limit's window, or whose cost was corrected, does not count."""
        full = next((state for state in refused.limits if state.name == refused.refused_by), None)
        if full is None:
            return None
        limit = next((limit for limit in self._budget.limits_of(self.job.name) if limit.name == full.name), None)
        if limit is None:  # the run's own `max_units`
            most, costs = full.limit_units, [decision.cost_units for decision in self._calls.admitted]
        else:
            most, since_ms = limit.limit_units - full.leave_units, cutoff(limit.view.window, refused.decided_at_ms)
            counted = [decision.limits for decision in self._calls.admitted if decision.decided_at_ms > since_ms]
            costs = [state.cost_units for states in counted for state in states if state.name == full.name]
        needed = sum(costs) + full.cost_units
        if needed <= most:
            return None
        needs = f"the calls of one step need {many(needed, full.noun)}, and {full.name!r} holds {most:,}"
        return f"{needs}, so no run can finish it; make fewer calls in a step, or raise the limit"

    def _connect(self) -> None:
        """Make the client, but only if the budget would admit its first call: the import is slow."""
        refused = refusal_of(self._budget, self.job, self.fetch, self.here)
        if refused is not None:
            raise quota.Refused(refused)
        from quota.clients.upstream import upstream_of

        self._upstream = upstream_of(self._budget.book)
        self.client = self._upstream.client(
            self.session,
            self.job.credential,
            max_body_mb=self.job.max_body_mb,
            max_answer_s=self.job.max_answer_s,
            max_items=self.job.max_items,
            max_units=self.job.max_units,
            waiting=self._wait_for_answer,
        )

    def _wait_for_answer(self, silent_s: float) -> None:
        """The client calls this again and again while it waits for an answer. After a signal it waits STOP_WITHIN_S."""
        if self.stop():
            now_s, within_s = elapsed_s(), interruption.STOP_WITHIN_S
            self._signalled_s = self._signalled_s or now_s
            if now_s - self._signalled_s >= within_s:
                raise Interrupted(f"; the page in flight took over {within_s:g} s and was abandoned")
        elif silent_s > self._silent_s:
            raise TimeoutError("timed out")

    def failure_of(self, error: Exception) -> Failure:
        """The meaning of an error of the last step."""
        method = attempt_of(self.fetch, self.here.cursor) or ""
        failure = classify_failure(error, method=method, book=self._budget.book)
        if self.client is None and failure.kind == "region":
            failure = failure._replace(kind="config")
        silent = (failure.kind == "transient" and not failure.answered) or isinstance(error, NoAnswer)
        # It may come out of a client that asks an API: a metered one, or one that names its request.
        of_client = (_request_of(cause) is not None or passed(cause, r"quota\.clients\.") for cause in behind(error))
        asks = any(of_client)
        if silent and asks:
            return failure._replace(silent=self._address(error))
        if not asks or failure.kind in ("region", "config"):  # perhaps an error of the function itself
            failure = failure._replace(message=failure.message + redact(line_of(error, self.job.fetch)))
        return failure

    def ends_run(self, error: Exception) -> bool:
        """Whether an error of a step ends the run. The code of the user's own function may raise any error of this
        package, and then only the region fails."""
        if isinstance(error, (Interrupted, quota.Refused, quota.LedgerError, StoreError)):
            return True
        if not isinstance(error, quota.QuotaError) or isinstance(error, quota.BadAnswer):
            return False
        return passed(error, r"quota\.clients\.") or not line_of(error, self.job.fetch)

    def _worth_retrying(self, error: BaseException, silent: Sequence[str]) -> bool:
        if not isinstance(error, Exception) or isinstance(error, quota.QuotaError):
            return False
        failure = self.failure_of(error)
        is_short = failure.wait_ms < LAST_ATTEMPT_S * 1_000
        return failure.kind == "transient" and is_short and failure.silent not in silent

    def _say_retry(self, state: Any) -> None:
        why, wait_s = self.failure_of(state.outcome.exception()).message, state.next_action.sleep
        facts = {"attempt": state.attempt_number, "wait_ms": round(wait_s * 1_000), "why": why}
        log.debug("%s", line("attempt_failed", job=self.here.job, region=self.here.region, **facts))
        self.watcher.retry(self.here, why, wait_s)

    def _sleep(self, seconds: float) -> None:
        """Wait between two attempts, in short pieces, because a signal ends the wait."""
        until_s = elapsed_s() + seconds
        while (left_s := until_s - elapsed_s()) > 0 and not self.stop():
            time.sleep(min(left_s, 0.1))
        if self.stop():
            raise Interrupted

    def _address(self, error: Exception) -> str:
        """The address of a failed call: from the error, if it is of requests or httpx, else that of the API. The client
        asks another server for its tokens."""
        url = urlsplit(str(getattr(_request_of(error), "url", "")))
        if not url.netloc:
            if passed(error, r"google\.(auth|oauth2)\."):
                return "the token server"
            if self.client is None:
                return "upstream"
            url = urlsplit(self._upstream.root(self.session.credential(self.job.credential).endpoint))
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}"

    # -- what they have spent ------------------------------------------------------------------------------------------

    def spent(self) -> tuple[dict[str, int], int]:
        """Units by region, and the number of attempts, for the calls of this run. Corrections are included; a refunded
        call does not count."""
        units: dict[str, int] = {}
        charged = [call for call in [*self._admitted.values()] if call.units]
        for call in charged:
            units[call.region] = units.get(call.region, 0) + call.units
        return units, len(charged)

    def unnoted(self) -> list[tuple[int, int]]:
        """The page numbers and units of calls and corrections since the last question."""
        return [self._unnoted.popleft() for _ in range(len(self._unnoted))]


def ends_program(error: BaseException) -> bool:
    """Whether an exception ends a program that calls `run_job`, such as Ctrl-C or a killed greenlet. Runs of `quota`
    handle the signals, and nothing else may end them."""
    return not (interruption.handles_signals() or isinstance(error, (Exception, SystemExit)))


def _request_of(error: BaseException) -> object:
    with suppress(RuntimeError):  # httpx raises it for an error without a request
        return getattr(error, "request", None)
    return None


# -- what an error means ----------------------------------------------------------------------------------------------

Kind = Literal["exhausted", "transient", "answer", "config", "cursor", "region"]


class Failure(NamedTuple):
    """One failed step, classified. `message` is one line without secrets. `answered`: upstream answered with the error;
    `silent`: the address that did not answer, or not in time. `wait_ms`: how long upstream asks to wait.

    exhausted   upstream's own quota has run out, in `bucket`: no further call of this run can succeed
    transient   another attempt may succeed
    answer      upstream's answer is unusable; the same call may succeed later, at the same cost
    config      key, API or permissions are not set up: every call would fail
    cursor      upstream no longer knows this cursor
    region      an error of this region alone; other regions may succeed
    """

    kind: Kind
    message: str
    bucket: str | None = None
    answered: bool = False
    silent: str = ""
    wait_ms: int = 0

    @property
    def of_one_call(self) -> bool:
        """Whether other calls of the same region may succeed."""
        return self.kind in ("answer", "cursor", "region") or (self.kind == "transient" and self.answered)


def classify_failure(error: Exception, *, method: str, book: CostBook) -> Failure:
    """The meaning of `error`. `method` is the API method of the probable call; it only helps to name a bucket."""
    answer = answer_in(error)
    if answer is not None:
        return _classify_answer(answer, method, book)
    message = redact(describe(error))
    if isinstance(error, quota.BadAnswer):
        return Failure("answer", one_line(redact(str(error))))
    if isinstance(error, OSError) and error.errno == EMFILE:
        return Failure("config", f"{error.strerror}; {remedy_for(EMFILE, '')}")
    if isinstance(error, ImportError):  # perhaps an upgrade is under way: the place is not the cause
        return Failure("config", f"{message}; {LACKS_LIBRARY}")
    if is_any(error, (("ssl", "SSLCertVerificationError"),)) or "TLS CA certificate bundle" in message:  # requests
        return Failure("config", f"{message}; check endpoint, proxies and trusted CAs (REQUESTS_CA_BUNDLE)")
    unreachable = isinstance(error, OSError) and error.errno in _UNREACHABLE
    if unreachable or isinstance(error, (ConnectionError, TimeoutError)) or is_transient(error):
        return Failure("transient", message)
    if type(error).__name__ in ("HttpLib2Error", "InvalidProxyURL"):  # no server to ask; a subclass is about an answer
        return Failure("config", f"{message}; check endpoint and proxies")
    refused = refused_login(error)
    return Failure("region", message) if refused is None else Failure("config", refused)


_UNREACHABLE = frozenset((ENETDOWN, ENETUNREACH, ENETRESET, EHOSTDOWN, EHOSTUNREACH, EADDRNOTAVAIL, ENOBUFS))
"""System errors of a network that is down or busy. Python has no exception classes for them."""


def _classify_answer(answer: RawAnswer, method: str, book: CostBook) -> Failure:
    from quota.clients.upstream import asked_wait_ms, upstream_of

    (status, headers, body), at_ms = answer, host_clock()
    fault = upstream_of(book).read(status, headers, body, method=method, at_ms=at_ms).error
    if fault is None:
        return Failure("region", f"upstream said {status}", answered=True)
    reason = "" if fault.message.startswith(fault.reason) else f" ({fault.reason})"
    message = f"upstream said {status}{reason}: {fault.message}"
    match fault.kind:
        case "daily_exhausted" | "project_blocked" | "closed":
            return Failure("exhausted", message, fault.bucket, answered=True)
        case "transient_rate" | "transient_server":
            wait_ms = asked_wait_ms(status, headers, at_ms)
            asks = f"; upstream asks to wait {spell(wait_ms)}" if wait_ms else ""
            return Failure("transient", message + asks, answered=True, wait_ms=wait_ms)
        case "config":
            return Failure("config", f"{message}; {fault.remedy}" if fault.remedy else message, answered=True)
        case "request" if fault.reason == "invalidPageToken":
            return Failure("cursor", message, answered=True)
        case _:
            return Failure("region", message, answered=True)
