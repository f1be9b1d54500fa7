"""`quota.budget.Budget`, awaited: the same decisions, without blocking the event loop.

    AsyncBudget   the methods of a Budget, each awaited
    AsyncSpend    a charge around a block, or around a coroutine or async generator function
    Awaiter       runs in threads what a decision may wait for

`quota.budget` and the ledgers have all rules; this file only waits for them.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, CancelledError, Event, get_running_loop
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future as Submitted
from contextlib import AsyncContextDecorator, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from quota.budget import Budget, Call, calls_of
from quota.common.clock import elapsed_s
from quota.common.fork import OfOneProcess, start_here_and_in_child
from quota.deciding.outlook import Outlook
from quota.deciding.spend import ASYNC_KINDS, LetThrough, Spending, spendable
from quota.decision import Decision, LimitState
from quota.errors import LedgerError, QuotaError, SessionClosedError, UsageError
from quota.ledger.log import Log
from quota.rules.entry import Entry
from quota.terms.arguments import instance, text, texts
from quota.terms.limits import Limit

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

WAIT_S = 0.85
"""How long a decision waits for a thread of its ledger. Then it gives up, before a charge."""

HELD_UP_S = 0.25
"""A ledger that fails after this time was silent. Then the decisions that waited for its thread give up, too."""

ASKERS = 8
"""The number of threads that ask a ledger of several machines. A file takes one decision at a time, so it has one."""

REPORTERS = 8
"""The number of threads for corrections and reports. On a silent ledger they hold up no decision."""


class AsyncBudget(OfOneProcess):
    """The limits of one credential over one ledger, for event loops. `AsyncSession.budget` makes it.

    It has the methods of `quota.Budget`, with the same parameters, results and errors. Nothing in it blocks the loop.
    Tasks, loops and threads may share it, and it works in forked children. If a task is cancelled while it waits for a
    decision, its call must not leave; the charge is given back, unless the session is closed or the ledger silent by
    then.
    """

    def __init__(self, budget: Budget, awaiter: Awaiter) -> None:
        self._budget = instance(budget, Budget, "budget", "`AsyncSession.budget` makes an AsyncBudget")
        self._awaiter = instance(awaiter, Awaiter, "awaiter", "`AsyncSession.budget` makes an AsyncBudget")
        self.credential, self.project = budget.credential, budget.project
        self.book, self.limits = budget.book, budget.limits

    def __repr__(self) -> str:
        return repr(self._budget).replace("Budget", "AsyncBudget", 1)

    def limits_of(self, job: str) -> tuple[Limit, ...]:
        """The limits that count the calls of a job: `Budget.limits_of`."""
        return self._budget.limits_of(job)

    async def charge(
        self, method: str, *, units: int | None = None, job: str | None = None, region: str | None = None
    ) -> Decision:
        """Charge one call of `method` before it leaves, if every limit has room for it: `Budget.charge`."""
        return (await self._decide([Call(method, units)], job, region, commit=True))[0]

    async def charge_many(
        self, calls: Iterable[str | tuple[str, int]], *, job: str | None = None, region: str | None = None
    ) -> list[Decision]:
        """Charge 1 to 100 calls in one step before they leave, all or none: `Budget.charge_many`."""
        return await self._decide(calls_of(calls), job, region, commit=True)

    async def peek(
        self, method: str, *, units: int | None = None, job: str | None = None, region: str | None = None
    ) -> Decision:
        """The decision that `charge` would make now, without charging."""
        return (await self._decide([Call(method, units)], job, region, commit=False))[0]

    async def _decide(
        self,
        calls: Sequence[Call],
        job: str | None = None,
        region: str | None = None,
        *,
        commit: bool,
        reserved: bool = False,
    ) -> list[Decision]:
        """`Budget._decide`, with every step that may wait in a thread."""
        budget = self._budget
        priced = budget._price(calls, job, region, commit=commit, reserved=reserved)
        if not priced.charges:
            return budget._free(priced.checklist)
        try:
            return await self._awaiter.ask(partial(budget._ask_ledger, priced), self._give_back)
        except LedgerError as error:  # it does not answer, or no thread was free
            return await self._awaiter.in_thread(partial(budget._ask_allowance, priced, error), self._give_back)

    def _give_back(self, decisions: list[Decision]) -> None:
        """Refund these: no caller got the decisions, so no call left."""
        for decision in decisions:
            if decision.id is not None:
                self._budget.refund(decision.id)

    async def refund(self, charge_id: str) -> Entry:
        """Give back a charge whose request provably never left this machine: `Budget.refund`."""
        return await self._awaiter.in_thread(partial(self._budget.refund, charge_id))

    async def settle(self, charge_id: str, units: int) -> Entry:
        """Set the true cost of a charge, in absolute units: `Budget.settle`."""
        return await self._awaiter.in_thread(partial(self._budget.settle, charge_id, units))

    async def usage(self, job: str | None = None) -> tuple[LimitState, ...]:
        """The current state of every limit: `Budget.usage`."""
        return await self._awaiter.in_thread(partial(self._budget.usage, job))

    async def outlook(self, methods: Iterable[str] = ()) -> Outlook:
        """The state of this budget, and the decision for the dearest of these methods: `Budget.outlook`."""
        return await self._awaiter.in_thread(partial(self._budget.outlook, texts(methods, "methods")))

    async def owed_units(self) -> int:
        """The units that this machine drew on its allowance and has not handed over to the ledger yet."""
        return await self._awaiter.in_thread(self._budget.owed_units)

    def spend(
        self, method: str, *, units: int | None = None, job: str | None = None, region: str | None = None
    ) -> AsyncSpend:
        """Charge around a block or a function: `async with budget.spend("search.list"): ...`, or as a decorator.

        For clients without a metered transport. Each entry is one charge; a refusal raises Refused before the body
        runs. The charge stays whatever the body does, because a request that left is spent. With `units`, the block may
        settle it: `async with budget.spend("chat", units=8_000) as call: ...; await call.settle(used)`.
        """
        charge = partial(self._decide, [Call(text(method, "method"), units)], job, region, commit=True)
        return AsyncSpend(self, charge, reserves=units is not None)


# -- a charge around a block or a function -----------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Awaitable[Any] | AsyncIterator[Any]])


class AsyncSpend(Spending, AsyncContextDecorator):
    """`quota.deciding.spend.Spend`, awaited. As a decorator it charges when a coroutine is awaited, or when the first
    item of an async generator is.
    """

    def __call__(self, func: F) -> F:
        """`func` with a charge at each call. Raises UsageError for anything except a coroutine or async generator
        function."""
        kind, name = spendable(func)
        if kind not in ASYNC_KINDS:
            raise UsageError(
                f"{name} is not async, so nothing can be awaited before it runs; make it `async def`, or use a budget "
                "of quota.open()"
            )
        if kind == "coroutine":
            return super().__call__(func)  # type: ignore[type-var]
        return self._generator(func)  # type: ignore[return-value]

    def _generator(self, func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        async def charged(*args: Any, **options: Any) -> AsyncGenerator[Any, Any]:
            async with self._recreate_cm():
                items = func(*args, **options)
                try:
                    item = await anext(items)
                    while True:
                        try:
                            sent = yield item
                        except GeneratorExit:
                            raise
                        except BaseException as error:
                            item = await items.athrow(error)
                        else:
                            item = await items.asend(sent)
                except StopAsyncIteration:
                    return
                finally:
                    await items.aclose()

        return charged

    async def __aenter__(self) -> AsyncSpentCall:
        decision = (await self._charge(reserved=self._reserves))[0]
        call = AsyncSpentCall.of(decision, self._budget._budget.settle)
        call._in_thread = self._budget._awaiter.in_thread
        return call

    async def __aexit__(self, *exc: object) -> None:
        return None


class AsyncSpentCall(LetThrough):
    """`quota.deciding.spend.SpentCall`, awaited."""

    _in_thread: Callable[[Callable[[], None]], Awaitable[None]]

    async def settle(self, used_units: int) -> None:
        """Let the charge count what the call really cost: `SpentCall.settle`."""
        await self._in_thread(partial(self._settlement.settle, used_units))


# -- waiting in threads ------------------------------------------------------------------------------------------------


class Awaiter:
    """Waits for a ledger on behalf of the tasks of any loop. The budgets of a session share one."""

    def __init__(self, ledger: Log) -> None:
        self._label = ledger.label
        self._closed = False
        self._askers = ASKERS if ledger.shared else 1
        self._silent_until_s = 0.0
        start_here_and_in_child(self)

    async def in_thread(self, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Do any work except a decision, and return its result. If the task is cancelled meanwhile, the work is done
        all the same; with `undo` it is dropped or undone, as in `ask`."""
        return await self._result(running_loop(), self._submit(self._reporter, work), undo)

    def _submit(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> Submitted[T]:
        if self._closed:
            raise SessionClosedError
        try:
            return threads.submit(work)
        except RuntimeError as error:  # this process is ending, or may start no more threads
            raise LedgerError(f"ledger {self._label}: no thread can ask it: {error}") from None

    async def ask(self, question: Callable[[], T], undo: Callable[[T], None]) -> T:
        """Ask the ledger for a decision. Raises LedgerError, also if no thread was free within the second: then it does
        not ask. If the task is cancelled, it does not ask either, or the decision goes to `undo`."""
        loop = running_loop()
        asking = self._submit(self._asker, partial(self._ask_in_turn, question, elapsed_s()))
        timer = loop.call_later(WAIT_S, asking.cancel)  # without effect if it has begun
        try:
            return await self._result(loop, asking, undo)
        finally:
            timer.cancel()

    async def _result(self, loop: AbstractEventLoop, working: Submitted[T], undo: Callable[[T], None] | None) -> T:
        try:
            await ended(working, loop)
        except CancelledError:
            if undo is not None and not working.cancel():  # it has begun
                with suppress(QuotaError):  # the session was closed meanwhile: the charge stands
                    self._submit(self._reporter, lambda: undo(working.result()))
            raise
        if working.cancelled():
            raise self._not_asked("is asked more than it can answer")
        return working.result()

    def _ask_in_turn(self, question: Callable[[], T], since_s: float) -> T:
        if since_s < self._silent_until_s:
            raise self._not_asked("did not answer the decision before")
        began_s = elapsed_s()
        try:
            return question()
        except LedgerError:
            ended_s = elapsed_s()
            if ended_s - began_s > HELD_UP_S:
                self._silent_until_s = ended_s
            raise

    def _not_asked(self, because: str) -> LedgerError:
        return LedgerError(f"ledger {self._label} {because}, and was not asked this; nothing was charged")

    def close(self) -> None:
        """Give up the work under way; its charges may stand."""
        self._closed = True
        self._asker.shutdown(wait=False)
        self._reporter.shutdown(wait=False)

    def start_over_in_child(self) -> None:
        """Make new threads: a forked child lacks those of its parent."""
        from concurrent.futures import ThreadPoolExecutor  # late: it cannot be imported once a process ends

        self._asker = ThreadPoolExecutor(self._askers, thread_name_prefix="quota-ledger")
        self._reporter = ThreadPoolExecutor(REPORTERS, thread_name_prefix="quota-reports")


async def ended(working: Submitted[Any], loop: AbstractEventLoop) -> None:
    """Wait on this loop until work has ended or is cancelled. If the caller stops waiting, asyncio has no exception to
    log."""
    over = Event()

    def wake(_: Submitted[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(over.set)

    working.add_done_callback(wake)
    await over.wait()


def running_loop() -> AbstractEventLoop:
    """The running loop. Raises UsageError for a loop that is not asyncio's."""
    try:
        return get_running_loop()
    except RuntimeError:
        message = "an awaited budget needs a loop of asyncio or uvloop; elsewhere, as under trio, call a budget of "
        raise UsageError(f"{message}quota.open() in a thread") from None
