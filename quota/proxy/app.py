"""The ASGI application of the proxy, and one request on its way.

    make_app     the application over an open session: /CREDENTIAL/PATH, `/healthz`, `/metrics`
    Proxy        finds the API of a request
    Target       the API of one credential
    Passage      one request: it is charged and sent, and its answer is read while it passes
    connections  the HTTP session that requests leave by

The proxy charges a request before a byte of it leaves, and streams it. It reads the answer while the answer passes, as
the cost book says, and updates the ledger. It sends nothing twice, follows no redirect, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from google.auth.exceptions import GoogleAuthError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from yarl import URL

from quota.async_session import AsyncSession
from quota.clients.aiohttp import peek, watch
from quota.clients.deadline import CONNECT_WITHIN_S
from quota.clients.gate import HostGate, answer_to, unpacked
from quota.clients.metering import Attempt
from quota.clients.upstream import upstream_of
from quota.clients.upstream_errors import refused_login
from quota.common.log import line, warn
from quota.common.redact import MIN_SECRET_LENGTH, spellings
from quota.common.text import describe, listed, nearest, show
from quota.dashboard.reading import read_samples
from quota.decision import Decision
from quota.errors import ConfigError, CostExceedsLimit, LedgerError, QuotaError, Refused, UsageError
from quota.proxy.asked import Asked, CallerGoneError, CallerSide, Fields, UnfitError, asked_of, without_hops
from quota.reports.metrics import MEDIA_TYPE, exposition
from quota.reports.status import allowances, read_status
from quota.session import Session, ledger_trouble
from quota.terms.api import GOOGLES_HEADERS, NO_BODY, RequestBody, as_read
from quota.terms.arguments import labels
from quota.web.documents import App, Check, Problem, Receive, Send, health, in_place_of, send_problem
from quota.web.serving import PIECE_BYTES, hold_little, protected

T = TypeVar("T")

SILENT_S = 600.0
"""How long upstream may be silent. Some answers take minutes, and callers have timeouts of their own."""

IDLE_S = 4.0
"""How long an idle connection to upstream is kept. Most servers close theirs after 5 s. A request on a closed
connection is lost, because the proxy sends nothing twice."""

MAX_FIELD_BYTES = 64 * 1024

logger = logging.getLogger("quota.proxy")

OWN_PATHS = ("/healthz", "/metrics")


def make_app(session: AsyncSession, hosts: Collection[str] | None, token: str | None = None) -> App:
    """The application, for requests to one of `hosts` (None: to any), with the `token` if there is one."""
    proxy = Proxy(session)
    inner = session._session

    def healthz(_: Request) -> JSONResponse:
        status, document = health([_ledger(inner)])
        return JSONResponse(document, status, {"cache-control": "no-store"})

    def metrics(_: Request) -> PlainTextResponse:
        status = None
        with suppress(LedgerError):
            status = read_status(inner)
        text = exposition(read_samples(inner, status))
        return PlainTextResponse(text, media_type=MEDIA_TYPE, headers={"cache-control": "no-store"})

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with session, connections() as proxy.http:
            yield

    own = Starlette(routes=[Route("/healthz", healthz), Route("/metrics", metrics)], lifespan=lifespan)

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := _turned_away(scope, token)) is not None:
            await send_problem(send, problem)
        elif scope["type"] != "http" or scope["path"] in OWN_PATHS:
            await own(scope, receive, send)
        else:
            await proxy(scope, receive, send)

    async def refuses(_: Any, __: Receive, send: Send) -> None:
        await send_problem(send, in_place_of(400, "Request /CREDENTIAL/PATH: this proxy is not for HTTP_PROXY."))

    # A client that names this proxy in HTTP_PROXY gets this answer for every host.
    passes_on, passes_by = protected(app, hosts=hosts, policy=None), protected(refuses, hosts=None, policy=None)

    async def outer(scope: Any, receive: Receive, send: Send) -> None:
        names_no_path = scope["type"] == "http" and (
            scope["method"].upper() == "CONNECT" or not (scope.get("raw_path") or b"").startswith(b"/")
        )
        await (passes_by if names_no_path else passes_on)(scope, receive, send)

    return outer


def _turned_away(scope: Any, token: str | None) -> Problem | None:
    """The refusal of a web page, or of a caller without the token; None for others. Health needs no token."""
    names = {name for name, _ in scope["headers"]}
    if names & {b"origin", b"sec-fetch-site"}:
        return in_place_of(403, "A web page may not spend units: leave out Origin and Sec-Fetch-Site.")
    if token is None or scope["path"] == "/healthz":
        return None
    sent = [value for name, value in scope["headers"] if name == b"quota-token"]
    if len(sent) == 1 and hmac.compare_digest(sent[0], token.encode()):
        return None
    return in_place_of(401, "Send the token of this proxy as Quota-Token.", more=(("www-authenticate", "Quota-Token"),))


def _ledger(session: Session) -> Check:
    trouble = ledger_trouble(session)
    if trouble is None:
        return Check("ledger", "warn", "nothing was charged yet")
    if not trouble:
        return Check("ledger")
    if session.settings.ledger.unavailable is None:
        return Check("ledger", "fail", f"{trouble}; no call is admitted")
    stands = allowances(session).values()
    if stands and not any(stand.remaining_units for stand in stands):
        return Check("ledger", "fail", f"{trouble}; the allowance has nothing left, so no call is admitted")
    return Check("ledger", "warn", f"{trouble}; calls draw on the allowance")


class Proxy:
    """Passes requests on, by its `http` session. Raises ConfigError if no credential is usable."""

    def __init__(self, session: AsyncSession) -> None:
        self._targets: dict[str, Target] = {}
        self._wrong: dict[str, str] = {}
        for credential in session.settings.credentials:
            try:
                self._targets[credential] = Target(session, credential)
            except QuotaError as error:
                self._wrong[credential] = str(error)
        if not self._targets:
            raise ConfigError("; ".join(self._wrong.values()))
        for credential, why in self._wrong.items():
            warn("proxy_without", why, credential=credential)
        self.http: aiohttp.ClientSession

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            asked = asked_of(scope)
            target = self._target(asked.credential)
            await Passage(asked, target, CallerSide(receive, asked.length), send, self.http).make()
        except UnfitError as error:
            await send_problem(send, error.problem)
        except CallerGoneError:
            pass

    def _target(self, credential: str) -> Target:
        target = self._targets.get(credential)
        if target is not None:
            return target
        if credential in self._wrong:
            raise UnfitError(500, self._wrong[credential])
        hint = nearest(credential, self._targets, f"known: {listed(self._targets) or 'none'}.")
        raise UnfitError(404, f"Ask for /CREDENTIAL/PATH: there is no credential {show(credential)} here; {hint}")


# -- one request -------------------------------------------------------------------------------------------------------


class Target:
    """The API of one credential: its address, the gate that charges its requests, and the caller that signs them.

    Raises ConfigError or UsageError if the configuration lacks something.
    """

    def __init__(self, session: AsyncSession, credential: str) -> None:
        inner = session._session
        chosen = inner.credential(credential)
        self.upstream = upstream_of(chosen.book)
        self.root = self.upstream.root(chosen.endpoint)
        self.credential = credential
        self.host = urlsplit(self.root).netloc
        self.gate = HostGate.of(session.budget(credential), None, self.host)
        self.reads_good_answers = chosen.book.answers.units is not None or chosen.book.answers.reads_body(200)
        self.caller = inner._caller(chosen, (self.host,))
        self._secret_headers = {as_read(chosen.book.key.header), *GOOGLES_HEADERS}

    def signed(self, asked: Asked, url: str) -> tuple[str, Fields, str | None]:
        """The URL and the header fields as they leave, and the secret in them. Waits for a token if the caller's
        credentials have no valid one."""
        if not self.caller.signs:
            return url, asked.fields, None
        signed, own = self.caller.signed(asked.verb, url, {})
        kept = [(name, value) for name, value in asked.fields if as_read(name) not in self._secret_headers]
        secret = self.caller.key
        if secret is None:  # a login; another thread may have renewed its token since
            secret = own.get("authorization", "").partition(" ")[2] or None
        return signed, [*kept, *own.items()], secret


class Passage:
    """One request, from its caller to its API and back. Raises UnfitError if its verb is ambiguous."""

    def __init__(
        self, asked: Asked, target: Target, caller: CallerSide, send: Send, http: aiohttp.ClientSession
    ) -> None:
        self._asked, self._target, self._caller, self._send, self._http = asked, target, caller, send, http
        self._url = f"{target.root}{asked.target}"
        try:
            self._verb = target.gate.verb(asked.verb, self._url, asked.fields)
        except UsageError as error:
            raise UnfitError(400, f"{error}.") from None
        # By the verb as it came: an override of the verb may begin another call.
        self._continues = target.upstream.continues(asked.verb, self._url)
        self._left = asyncio.Event()
        """Whether the first byte of the request was about to leave."""

    async def make(self) -> None:
        """Charge the request, send it, and pass the answer on. Raises CallerGoneError, and UnfitError before a
        charge."""
        asked, gate = self._asked, self._target.gate
        if self._target.upstream.is_batch(self._verb, self._url):
            raise UnfitError(501, "A batch holds several calls, each with its own price: send them one by one.")
        body = NO_BODY
        verb_by = partial(gate.verb, asked.verb, self._url, asked.fields)
        if asked.has_body and (verb_by(RequestBody(b"_method")) != self._verb or gate.reserves(self._verb, self._url)):
            body = await self._caller.beginning()
            self._verb = verb_by(RequestBody.of(self._caller.head))
        if asked.only_peek:
            await self._tell(await self._decided(partial(gate.peek, free=self._continues), body))
            return
        url, fields, mask = await self._signed()
        attempt = await self._decided(partial(gate.charge, free=self._continues), body)
        task = asyncio.current_task()
        assert attempt is not None  # noqa: S101  # the gate charges for the host of the target
        assert task is not None  # noqa: S101  # a request is a task of its own
        try:
            with self._caller.watched(task):
                await self._exchange(attempt, url, fields, mask)
        except BaseException as error:
            if not self._left.is_set():
                await gate.corrected(attempt.never_left)
            if isinstance(error, UnfitError):
                await send_problem(self._send, error.problem._replace(more=self._spent(attempt)))
            elif not self._caller.gone or not isinstance(error, asyncio.CancelledError) or task.uncancel():
                raise

    # -- the decision ------------------------------------------------------------------------------------------------

    async def _decided(self, decide: Callable[[str, str, RequestBody], Awaitable[T]], body: RequestBody) -> T:
        """The decision by `decide`. Raises UnfitError for a request that may not leave."""
        asked = self._asked
        try:
            with labels(job=asked.job, region=asked.region):
                return await decide(self._verb, self._url, body)
        except Refused as error:
            reason, sentence = str(error.decision.reason), error.decision.sentence()
            unfit = UnfitError(**answer_to(error.decision)._asdict())
        except UsageError as error:
            reason, sentence = "never", str(error)
            unfit = UnfitError(422 if isinstance(error, CostExceedsLimit) else 400, sentence)
        warn("proxy_refused", sentence, credential=asked.credential, job=asked.job, region=asked.region, reason=reason)
        raise unfit

    async def _tell(self, decision: Decision) -> None:
        """The answer to Quota-Peek."""
        if not decision.admitted:
            await send_problem(self._send, answer_to(decision))
            return
        body = json.dumps(decision.as_json()).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})
        await self._send({"type": "http.response.body", "body": body})

    def _spent(self, attempt: Attempt) -> tuple[tuple[str, str], ...]:
        """The header field with the charge; nothing without a charge, or for a charge that was refunded."""
        decision = attempt.decision
        stands = decision.id and not attempt.refunded
        return (("quota-charge", f"{decision.id}; units={decision.cost_units}"),) if stands else ()

    # -- the request -------------------------------------------------------------------------------------------------

    async def _signed(self) -> tuple[str, Fields, Mask]:
        """The URL and the header fields that leave, and the mask of their secret. Raises UnfitError if there is no
        token."""
        target, sign = self._target, partial(self._target.signed, self._asked, self._url)
        login = target.caller.credentials
        waits = login is not None and not login.valid  # it fetches a token first
        try:
            url, fields, secret = await asyncio.to_thread(sign) if waits else sign()
        except ConfigError as error:
            raise UnfitError(500, str(error)) from None
        except GoogleAuthError as error:
            raise self._unanswered(502, f"credential {target.credential}: {refused_login(error)}") from None
        # Accept what the proxy can read: gzip if it reads only errors, else identity.
        codings = [value for name, value in fields if name == "accept-encoding"]
        takes_gzip = any(re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", value, re.I) for value in codings)
        coding = "gzip" if takes_gzip and not target.reads_good_answers else "identity"
        fields = [(name, coding if name == "accept-encoding" else value) for name, value in fields]
        return url, fields, Mask(secret)

    async def _exchange(self, attempt: Attempt, url: str, fields: Fields, mask: Mask) -> None:
        answer = await self._sent(url, fields)
        whole = False
        try:
            whole = await self._pass_on(attempt, answer, mask)
        finally:
            if whole and self._caller.is_read:
                answer.release()
            else:
                answer.close()

    async def _sent(self, url: str, fields: Fields) -> aiohttp.ClientResponse:
        """Send the request, and return the head of the answer. Raises UnfitError if no answer comes."""
        asked, host = self._asked, self._target.host
        # The head of a request with a body leaves together with the first piece.
        _leaves.set((lambda: None) if asked.has_body else self._left.set)
        try:
            send = partial(
                self._http.request,
                asked.verb,
                URL(url, encoded=True),
                headers=fields,
                data=self._caller.pieces(self._left.set) if asked.has_body else None,
                allow_redirects=False,
            )
            return await self._target.gate.sent(send)  # `quota exec --auto` meters aiohttp itself
        except aiohttp.ClientConnectorError as error:
            why = error.os_error.strerror or type(error.os_error).__name__
            raise self._unanswered(502, f"{host} cannot be reached: {why}. Nothing was charged.") from None
        except TimeoutError:
            raise self._unanswered(504, f"{host} is silent.") from None
        except (aiohttp.ClientError, ValueError) as error:
            if self._caller.gone:
                raise CallerGoneError from None
            if isinstance(error, _LostError):
                raise self._unanswered(502, f"{host} closed the connection before it answered.") from None
            raise self._unanswered(502, f"{host} did not answer in HTTP ({type(error).__name__}).") from None

    def _unanswered(self, status: int, detail: str) -> UnfitError:
        """The answer in place of upstream's, which the log has too."""
        warn("proxy_cut", detail, credential=self._asked.credential, status=status)
        return UnfitError(status, detail)

    # -- the answer --------------------------------------------------------------------------------------------------

    async def _pass_on(self, attempt: Attempt, answer: aiohttp.ClientResponse, mask: Mask) -> bool:
        """Pass the answer on. Returns whether the caller got all of it. If upstream ends too early, the answer stays
        unfinished, so that its reader notices."""
        gate, host, status = self._target.gate, self._target.host, answer.status
        head, whole = b"", False
        if not self._continues:  # else its method is unknown, and so is the bucket that an error would close
            if attempt.reads_body(status, answer.headers):
                packed, whole = await peek(answer)
                head = unpacked(answer.headers.get("content-encoding", ""), packed)
            await gate.answered(attempt, status, head, answer.headers, whole=whole)
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.raw_headers]
        pairs = [*without_hops(pairs), *self._spent(attempt)]
        is_valid = all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in pairs)
        if not 200 <= status <= 599 or not is_valid:
            raise self._unanswered(502, f"{host} did not answer in valid HTTP.")
        fields = [(name.encode("latin-1"), mask.whole(value.encode("latin-1"))) for name, value in pairs]
        watch(gate, attempt, answer)
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        try:
            async for piece in answer.content.iter_any():
                if passes := mask.feed(piece):
                    await self._send({"type": "http.response.body", "body": passes, "more_body": True})
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("%s", line("proxy_cut", credential=self._asked.credential, error=type(error).__name__))
            return False
        await self._send({"type": "http.response.body", "body": mask.end()})
        return True


_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


# -- the connections to upstream ---------------------------------------------------------------------------------------


class _LostError(aiohttp.ClientError):
    """A connection that ended before the answer. aiohttp would send some requests again, uncharged."""


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise _LostError(describe(error)) from error


_leaves: ContextVar[Callable[[], object]] = ContextVar("quota_leaves")
"""The function to call before the head of a request leaves."""


class _Connections(aiohttp.TCPConnector):
    """Calls `_leaves` before the head of a request leaves: aiohttp writes the head as soon as it has a connection. Its
    own traces cost ten times as much."""

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        connection: Any = await super().connect(req, traces, timeout)
        while len(connection.protocol):  # bytes that came while it was idle answer no request
            connection.close()
            connection = await super().connect(req, traces, timeout)
        hold_little(connection.transport)
        _leaves.get()()
        return connection


def connections() -> aiohttp.ClientSession:
    """The HTTP session that requests leave by: without a proxy, without cookies, and each request once. Close it."""
    return aiohttp.ClientSession(
        connector=_Connections(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S, sock_read=SILENT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        middlewares=(_once,),
        read_bufsize=PIECE_BYTES // 2,  # aiohttp holds twice that
        max_line_size=MAX_FIELD_BYTES,
        max_field_size=MAX_FIELD_BYTES,
    )


# -- the secret in an answer -------------------------------------------------------------------------------------------


class Mask:
    """Replaces a secret in one answer by as many stars, because callers must not learn the key.

    `feed` returns the bytes that may pass. It holds back a possible beginning of a secret until the next piece or the
    `end`. It does not search packed bodies, and recognizes the `spellings` of a secret only.
    """

    def __init__(self, secret: str | None) -> None:
        spelled = spellings(secret) if secret else ()
        self._secrets = [text.encode() for text in spelled if len(text) >= MIN_SECRET_LENGTH]
        self._longest = max(map(len, self._secrets), default=0)
        self._kept = b""

    def whole(self, data: bytes) -> bytes:
        lower = data.lower()
        for secret in self._secrets:
            if secret in lower:
                data = re.sub(re.escape(secret), b"*" * len(secret), data, flags=re.IGNORECASE)
                lower = data.lower()
        return data

    def feed(self, piece: bytes) -> bytes:
        if not self._secrets:
            return piece
        data = self.whole(self._kept + piece)
        keep_from, lower = len(data), data.lower()
        for secret in self._secrets:  # its beginning may stand at the end of the data
            at = lower.find(secret[:1], max(0, len(data) - self._longest + 1))
            while at >= 0 and not secret.startswith(lower[at:]):
                at = lower.find(secret[:1], at + 1)
            if at >= 0:
                keep_from = min(keep_from, at)
        self._kept = data[keep_from:]
        return data[:keep_from]

    def end(self) -> bytes:
        kept, self._kept = self._kept, b""
        return kept
