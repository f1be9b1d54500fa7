"""Decides which requests of a transport are charged, and as which method."""

from __future__ import annotations

import io
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlsplit

from quota.async_budget import AsyncBudget, Awaiter
from quota.budget import Budget, Call
from quota.clients.answer_fields import Headers
from quota.clients.metering import Attempt, Meter, is_reserved
from quota.clients.upstream import Sent, upstream_of
from quota.clients.upstream_errors import MAX_BODY_BYTES
from quota.common.clock import elapsed_s
from quota.common.text import listed, show
from quota.decision import Decision
from quota.errors import QuotaError, UsageError
from quota.terms.api import NO_BODY, Hosts, RequestBody
from quota.terms.arguments import text, texts
from quota.web.documents import NO_RETRY, Problem, in_place_of, seconds

T = TypeVar("T")

MethodOf = str | Callable[[str, str], str]
"""An API method's name, or a function that gives it for (verb, url), for example ("GET", "https://...")."""

HostNames = str | Iterable[str]
"""The metered hosts, one or several: `api.example.com` (any port) or `127.0.0.1:8765`."""

MAX_REDIRECTS = 5
"""The most redirects of one request: each is charged. The libraries would follow a circle for 20 or 30."""

PEEK_WITHIN_S = 2.0
"""How long a gate waits for an error body. Then the part that has arrived classifies it: the reader may stream it."""

UNPACKED_AT_ONCE = 16
"""How many packed bytes are unpacked at once. In gzip they hold up to 16 kB, in brotli 16 MB; more bytes could fill the
memory."""


class Peeked(io.RawIOBase):
    """The raw bytes of an answer: first the `head`, which is read ahead, then the rest, or the error that ended the
    reading. `ended`: the head is all that came; `error`: the error that ended it."""

    def __init__(self, read: Callable[[int], bytes], hang_up: Callable[[], object], most: int = MAX_BODY_BYTES) -> None:
        self.head = b""
        self.ended = False
        self._read, self._hang_up = read, hang_up
        self._at = 0
        self.error: Exception | None = None
        ends_s = elapsed_s() + PEEK_WITHIN_S
        try:
            while len(self.head) < most and elapsed_s() < ends_s and not self.ended:
                more = read(most - len(self.head))
                self.head += more
                self.ended = not more
        except Exception as error:
            self.error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.head[self._at : self._at + len(buffer)]
        self._at += len(data)
        if not data and self.error is not None:
            raise self.error
        data = data or self._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._hang_up()
        super().close()


def unzipped(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces of a body in gzip or zlib, unpacked. Some servers send zlib without its header."""
    unpacking, first = zlib.decompressobj(zlib.MAX_WBITS | 32), next(pieces, b"")
    try:
        head = unpacking.decompress(first)
    except zlib.error:
        unpacking = zlib.decompressobj(-zlib.MAX_WBITS)
        head = unpacking.decompress(first)
    return chain([head], map(unpacking.decompress, pieces))


def unpacked(packing: str, head: bytes, unpack: Callable[[Iterator[bytes]], Iterable[bytes]] = unzipped) -> bytes:
    """The beginning of a body from its packed beginning. `unpack` is the client's own way, piece by piece.

    b"" for a body that is packed twice, which multiplies its size, or not packed as `packing` says. Then only the
    status classifies the answer.
    """
    packing, body = packing.strip().lower(), bytearray()
    if packing in ("", "identity"):
        return head
    if "," in packing:
        return b""
    try:
        for piece in unpack(head[at : at + UNPACKED_AT_ONCE] for at in range(0, len(head), UNPACKED_AT_ONCE)):
            body += piece[:MAX_BODY_BYTES]
            if len(body) >= MAX_BODY_BYTES:
                break
    except Exception:
        return b""
    return bytes(body)


def answer_to(decision: Decision) -> Problem:
    """The answer to a refused request: 429, or 503 if the ledger did not answer. Its Retry-After is never early."""
    after_ms = decision.retry_after_ms
    return in_place_of(
        503 if decision.reason == "ledger-unavailable" else 429,
        decision.sentence(),
        members={"decision": decision.as_json()},
        retry_after_s=None if after_ms is None else seconds(after_ms),
        more=NO_RETRY,
    )


# -- two layers, one charge --------------------------------------------------------------------------------------------

_paid: ContextVar[list[Hosts]] = ContextVar("quota_paid")


async def paid(hosts: Hosts, send: Callable[[], Awaitable[T]]) -> T:
    """Send a charged attempt to one of these hosts: the first patched layer below that sends to them does not charge it
    again."""
    mark, before = [hosts], _paid.get([])
    # Set the variable inside the `try`, and use no context manager: a signal handler may raise between any two steps.
    # If that left the mark, the next request would pass uncharged.
    try:
        _paid.set(mark)
        return await send()
    finally:
        mark.clear()
        if _paid.get([]) is mark:  # a closed loop ends its tasks in another context
            _paid.set(before)


def take_paid(url: str) -> bool:
    """Whether a layer above has charged this attempt. It answers True once: a retry between the layers is a new
    attempt."""
    ahead = _paid.get(None)
    if not ahead or not ahead[0].serve(url):
        return False
    ahead.pop()
    return True


# -- the gates ---------------------------------------------------------------------------------------------------------


class HostGate:
    """Charges the requests to metered hosts. `method` and `hosts` may be None if the cost book has `routes` and
    `hosts`. Its steps are awaited: `on_loop` makes a gate that waits in threads. This one asks the ledger at once, so
    `at_once` runs its steps.

    `sends` belongs to a gate whose layer sends the bytes itself. Such a gate hides its charge from the layers below: a
    request that runs meanwhile, such as one that the body of the first makes, would take that charge for its own."""

    def __init__(self, meter: Meter, method: MethodOf | None, hosts: HostNames | None, *, sends: bool = False) -> None:
        self._sends = sends
        self.meter = meter
        book = meter.budget.book
        self.upstream = upstream_of(book)
        if method is None and not self.upstream.knows_methods:
            raise UsageError(f"cost book {book.name!r} has no routes that name the method of a request; give it")
        names = meter.budget.hosts if hosts is None else texts(hosts, "host")
        if not names:
            raise UsageError("no host is given, so nothing would be charged; give the API's host")
        self._method = method if method is None or callable(method) else text(method, "method")
        self.hosts = Hosts(names)
        self._replaced = Hosts(book.hosts if hosts is None else ())
        self._budget: AsyncBudget | None = None
        self._threads: Awaiter | None = None

    @classmethod
    def of(cls, budget: AsyncBudget | Budget, method: MethodOf | None, hosts: HostNames | None) -> HostGate:
        """A gate on an event loop, for a budget of `quota.open_async()` or `quota.open()`."""
        if isinstance(budget, AsyncBudget):
            return cls(Meter(budget._budget), method, hosts).on_loop(budget)
        return cls(Meter(budget), method, hosts).on_loop()

    def on_loop(self, budget: AsyncBudget | None = None) -> HostGate:
        """This gate on an event loop, with this awaited budget. Without one it has threads of its own."""
        gate = copy(self)
        if budget is None:
            gate._threads = Awaiter(self.meter.budget.ledger)
            budget = AsyncBudget(self.meter.budget, gate._threads)
        gate._budget = budget
        return gate

    @property
    def awaits(self) -> bool:
        """Whether it is on an event loop."""
        return self._budget is not None

    def close(self) -> None:
        """Close the threads that this gate made."""
        if self._threads is not None:
            self._threads.close()

    # -- the name of a request -----------------------------------------------------------------------------------------

    def is_metered(self, verb: str, url: str) -> bool:
        """Raises UsageError for a host of the cost book that an endpoint replaces: nobody would pay."""
        if self.hosts.serve(url):
            return not (self._method is None and self.upstream.continues(verb, url))
        if self._replaced.serve(url):
            budget, host = self.meter.budget, urlsplit(url).hostname
            pays = f"credential {show(budget.credential)} pays for calls to {listed(budget.hosts)}, its endpoint"
            raise UsageError(f"{pays}, and not to {host}; call the endpoint, or remove it")
        return False

    def verb(self, verb: str, url: str, headers: Sent, body: RequestBody = NO_BODY) -> str:
        """The verb by which the API reads a request; the dearest, if it may read several. Raises UsageError."""
        return self.upstream.dearest_verb(verb, url, headers, body, self.name)

    def name(self, verb: str, url: str, body: RequestBody | None = None) -> str:
        if self._method is None:
            return self.upstream.name(verb, url, body)
        return text(self._method if isinstance(self._method, str) else self._method(verb, url), "method")

    def reserves(self, verb: str, url: str) -> bool:
        """Whether the price of such a request depends on its body."""
        return is_reserved(self.meter.call(self.name(verb, url), verb))

    # -- its attempt ---------------------------------------------------------------------------------------------------

    async def charge(
        self, verb: str, url: str, body: RequestBody = NO_BODY, headers: Sent = (), *, free: bool | None = None
    ) -> Attempt | None:
        """The attempt, charged unless it is `free`; None for a request that is not metered, unless the caller says
        whether it is free. Raises Refused."""
        if free is None and not self.is_metered(verb, url):
            return None
        verb = self.verb(verb, url, headers, body)
        try:
            call, decision = await self._decide(verb, url, body, free=bool(free), commit=True)
        except UsageError:
            self.meter.counts_refused(self.name(verb, url))
            raise
        return Attempt(self.meter, decision, call)

    async def peek(self, verb: str, url: str, body: RequestBody = NO_BODY, *, free: bool = False) -> Decision:
        """The decision that `charge` would make now about a request to a metered host."""
        return (await self._decide(verb, url, body, free=free, commit=False))[1]

    async def sent(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a charged attempt. A gate that `sends` does not tell the layers below that it is charged."""
        return await (send() if self._sends else paid(self.hosts, send))

    async def leave(
        self,
        attempt: Attempt,
        body: RequestBody,
        never_left: Callable[[BaseException], bool],
        send: Callable[[], Awaitable[T]],
    ) -> T:
        """Send an attempt with this body. If an error, or the end of the task or greenlet, stops the attempt before it
        leaves, its charge is refunded."""
        try:
            return await self.sent(send)
        except BaseException as error:
            await self.failed(attempt, body, never_left, error)
            raise

    async def failed(
        self, attempt: Attempt, body: RequestBody, never_left: Callable[[BaseException], bool], error: BaseException
    ) -> None:
        """Refund the charge if the attempt never left."""
        is_dropped = isinstance(error, GeneratorExit)  # nobody awaits the task, so it cannot await a refund
        # A stream may send requests of its own while the client reads it, and the error may be about one of them.
        if body.content is not None and not is_dropped and never_left(error):
            await self.corrected(attempt.never_left)

    async def answered(self, attempt: Attempt, status: int, body: bytes, headers: Headers, *, whole: bool) -> None:
        """Note the answer. A change of the ledger happens in a thread."""
        meaning = attempt.meaning(status, body, headers, whole=whole)
        if meaning.changes_something:
            await self.corrected(partial(attempt.follow, meaning))
        else:
            attempt.follow(meaning)

    async def settle(self, attempt: Attempt, used_units: int | None) -> None:
        """Settle the reserved units if the usage is known, in a thread, before the reader goes on."""
        if used_units is not None:
            await self.corrected(partial(attempt.settle, used_units))

    async def _decide(
        self, verb: str, url: str, body: RequestBody, *, free: bool, commit: bool
    ) -> tuple[Call, Decision]:
        """The call that a request makes, and the decision about it."""
        call = Call(f"{verb} **", parts=()) if free else self.meter.call(self.name(verb, url, body), verb, body)
        if self._budget is None:
            decide = self.meter.decide if commit else partial(self.meter.budget._decide, commit=False)
            return call, decide([call])[0]
        return call, (await self._budget._decide([call], commit=commit))[0]

    async def corrected(self, work: Callable[[], None]) -> None:
        """Do the work of an attempt that changes the ledger, even if the task that waits for it is cancelled."""
        if self._budget is None:
            work()
            return
        with suppress(QuotaError):  # the session was closed meanwhile: the charge stands
            await self._budget._awaiter.in_thread(work)


def at_once(steps: Coroutine[Any, Any, T]) -> T:
    """The result of steps that never wait, so that callers without an event loop take the same steps as a task."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a step waited")
