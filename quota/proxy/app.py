"""The ASGI application of the proxy.

    make_app     the application over an open session: /CREDENTIAL/PATH, `/healthz`, `/metrics`

The proxy charges a request before a byte of it leaves, and streams it. It reads the answer while the answer passes, as
the cost book says, and updates the ledger. It sends nothing twice, follows no redirect, and keeps nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from quota.async_session import AsyncSession
from quota.common.log import warn
from quota.common.text import nearest, show
from quota.dashboard.reading import read_samples
from quota.errors import ConfigError, LedgerError, QuotaError
from quota.proxy.asked import CallerGoneError, CallerSide, UnfitError, asked_of
from quota.proxy.passage import Passage, Target, connections
from quota.reports.metrics import MEDIA_TYPE, Sample, exposition
from quota.reports.status import read_status
from quota.session import Session, ledger_answers
from quota.web.documents import App, Check, Problem, Receive, Send, health, send_problem
from quota.web.serving import protected

OWN_PATHS = ("/healthz", "/metrics")


def make_app(session: AsyncSession, hosts: Collection[str] | None, token: str | None = None) -> App:
    """The application, for requests to one of `hosts` (None: to any), with the `token` if there is one."""
    proxy = Proxy(session)
    inner = session._session

    def healthz(_: Request) -> JSONResponse:
        status, document = health([_ledger(inner)])
        return JSONResponse(document, status, {"cache-control": "no-store"})

    def metrics(_: Request) -> PlainTextResponse:
        text = exposition(_samples(inner))
        return PlainTextResponse(text, media_type=MEDIA_TYPE, headers={"cache-control": "no-store"})

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with session, proxy:
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
        await send_problem(send, Problem(400, "Request /CREDENTIAL/PATH: this proxy is not for HTTP_PROXY."))

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
        return Problem(403, "A web page may not spend units: leave out Origin and Sec-Fetch-Site.")
    if token is not None and scope["path"] != "/healthz" and not _has(scope, token):
        return Problem(401, "Send the token of this proxy as Quota-Token.")
    return None


def _has(scope: Any, token: str) -> bool:
    sent = [value for name, value in scope["headers"] if name == b"quota-token"]
    return len(sent) == 1 and hmac.compare_digest(sent[0], token.encode())


def _ledger(session: Session) -> Check:
    answers = ledger_answers(session)
    if answers is None:
        return Check("ledger", "warn", "nothing was charged yet")
    if answers:
        return Check("ledger")
    if session.settings.ledger.unavailable is None:
        return Check("ledger", "fail", "the ledger does not answer; no call is admitted")
    return Check("ledger", "warn", "the ledger does not answer; calls draw on the allowance")


def _samples(session: Session) -> Iterable[Sample]:
    try:
        status = read_status(session)
    except LedgerError:
        status = None
    return read_samples(session, status)


class Proxy:
    """Passes requests on, inside `async with`. Raises ConfigError if no credential is usable."""

    def __init__(self, session: AsyncSession) -> None:
        self._targets: dict[str, Target] = {}
        self._wrong: dict[str, str] = {}
        for credential in session.settings.credentials:
            try:
                self._targets[credential] = Target(session, credential)
            except QuotaError as error:
                self._wrong[credential] = str(error)
        wrong = [*self._wrong.items()]
        for credential, why in wrong if self._targets else wrong[:-1]:  # the last is the error
            warn("proxy_without", why, credential=credential)
        if not self._targets:
            raise ConfigError(wrong[-1][1])
        self._http: aiohttp.ClientSession  # set by `async with`

    async def __aenter__(self) -> None:
        self._http = connections()

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            asked = asked_of(scope)
            target = self._target(asked.credential)
            await Passage(asked, target, CallerSide(receive, asked.length), send, self._http).make()
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
        hint = nearest(credential, self._targets)
        ending = hint if hint.endswith("?") else f"{hint}."
        raise UnfitError(404, f"There is no credential {show(credential)} here; {ending}")
