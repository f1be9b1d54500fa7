"""The middleware: `asgi` for FastAPI, Starlette, Django, Quart, Litestar and others, `wsgi` for Flask, Django, Bottle,
Pyramid and others. And the responses to clients: header fields for every answer, and problem documents for refused
requests.

`RateLimit-Policy` and `RateLimit` follow draft-ietf-httpapi-ratelimit-headers-11 of 23 May 2026, which is not an RFC
yet. Both are lists of structured fields (RFC 9651), with one item per limit:

    RateLimit-Policy: "api-60s";q=100;w=60, "api-1d";q=5000;w=86400      the grant: q requests in w seconds
    RateLimit: "api-60s";r=42;t=18, "api-1d";r=4100;t=75600              the rest: at most r within t seconds

Both count requests: units divided by the rule's cost. The draft calls `t` the "effective window": a client can use at
most `r` within these seconds. It says nothing about the time after them. If nothing is left, `t` lasts until the next
request fits. The draft wants `Retry-After` not to be earlier than `t`, so a refusal has no `t` for the other limits.

The `X-RateLimit-*` fields have no specification. Here they describe the limit with the fewest requests left, and
`X-RateLimit-Reset` is its `t`.
"""

from __future__ import annotations

import random
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from quota.common.text import show
from quota.errors import ConfigError
from quota.inbound.deciding import Decider, Verdict
from quota.inbound.rules import Rule, Rules, opened
from quota.terms.api import OVERRIDES
from quota.web.documents import App, Message, Problem, Receive, Send, seconds, send_problem

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]
Fields = list[tuple[str, str]]

_OVERRIDES = frozenset(name.encode() for name in OVERRIDES)
_OVERRIDES_OF_WSGI = [f"HTTP_{name.upper().replace('-', '_')}" for name in OVERRIDES]

_DENIAL = "websocket.http.response"
_HEADS = frozenset(("http.response.start", "websocket.accept", f"{_DENIAL}.start"))
"""The messages that carry the header fields of an answer."""

_TRY_AGAIN_LATER = 1013

QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
"""The draft asks IANA to register it. IANA has not done so yet."""

POLICY, CURRENT = "ratelimit-policy", "ratelimit"

MAX_JITTER_S = 60
AWAY_S = 1
"""When a client should come back during an outage: the breaker tries the storage after a second."""


class asgi:  # noqa: N801  # used like a function: `asgi(app, rules)`, or `app.add_middleware(asgi, rules=rules)`
    """`app` behind `rules`: a Rules, or a list of Rule with the defaults of Rules.

    A refused request never reaches the application, and its body is not read. An admitted request and its answer pass
    unchanged: bodies stream, and the middleware only adds header fields to the answer. It counts a request before the
    application sees it, also if the client then disconnects. It decides a websocket once, at the handshake. Raises
    ConfigError.
    """

    def __init__(self, app: App, rules: Rules | Sequence[Rule]) -> None:
        self._app = app
        self._rules, self._decider = _behind(app, rules)
        # FastAPI(root_path=...) tells only its own middleware, and removes it from the path itself. Quart's root_path
        # is the folder of the application.
        self._mount = getattr(app, "root_path", "") if hasattr(app, "root_path_in_servers") else ""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._live(scope, receive, send)
            return
        if kind not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = scope["method"] if kind == "http" else "GET"
        preflight = method == "OPTIONS" and any(key == b"access-control-request-method" for key, _ in scope["headers"])
        mount = self._mount or scope.get("root_path", "")
        named = ((key.replace(b"_", b"-"), value) for key, value in scope["headers"])  # as a WSGI application reads it
        overrides = [value.decode("latin-1") for key, value in named if key in _OVERRIDES]
        rules = self._rules.find(method, scope["path"], mount, preflight=preflight, overrides=overrides)
        if not rules:
            await self._app(scope, receive, send)
            return
        loop = get_running_loop()
        identity = self._rules.identify.asgi(scope)
        self._decider.hand_over_soon()
        with_x = self._rules.x_fields
        verdicts: list[Verdict] = []
        for rule in rules:
            verdict = await self._decider.decide_soon(loop, rule, identity)
            verdicts.append(verdict)
            if not verdict.passes:
                problem = problem_of(verdict, with_x=with_x)
                await (send_problem(send, problem) if kind == "http" else _deny(scope, receive, send, problem))
                return
        await self._app(scope, receive, _send_adding(send, fields_of(verdicts, with_x=with_x), with_x=with_x))

    async def _live(self, scope: Any, receive: Receive, send: Send) -> None:
        """Hand over at the shutdown, because the server may then end the process by a signal. An application without a
        lifespan, such as Django, raises at once; then this method answers in its place."""
        is_asked = False

        async def received() -> Message:
            nonlocal is_asked
            is_asked = True
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await get_running_loop().run_in_executor(None, self._decider.hand_over)
            return message

        try:
            await self._app(scope, received, send)
        except Exception:
            if is_asked:
                raise
        if not is_asked:
            while (await received())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})


def _send_adding(send: Send, fields: Fields, *, with_x: bool) -> Send:
    """`send`, with fields added to the head of the answer. The application's own fields stay.

    Its own RateLimit items describe other limits, and clients join the lists. X-RateLimit-* fields describe one limit,
    so its own leave no room for ours.
    """
    added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]

    def sending(message: Message) -> Awaitable[None]:  # not async: a coroutine for each part of a body would cost time
        if message["type"] in _HEADS:
            own, more = list(message.get("headers", ())), added
            if with_x and any(bytes(name).lower().startswith(b"x-ratelimit-") for name, _ in own):
                more = [row for row in added if not row[0].startswith(b"x-")]
            message = {**message, "headers": [*own, *more]}
        return send(message)

    return sending


async def _deny(scope: Any, receive: Receive, send: Send, problem: Problem) -> None:
    """Refuse the handshake of a websocket, with the whole answer if the server can send it, else with 403."""
    await receive()  # websocket.connect
    if _DENIAL not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": problem.detail})
        return

    async def denying(message: Message) -> None:
        await send({**message, "type": message["type"].replace("http.response", _DENIAL)})

    await send_problem(denying, problem)


class wsgi:  # noqa: N801  # used like a function: `wsgi(app, rules)`
    """`app` behind `rules`: a Rules, or a list of Rule with the defaults of Rules.

    As with `asgi`, a refused request never reaches the application, and an admitted request passes unchanged. A
    decision waits up to 0.25 s in the server's thread. Raises ConfigError.
    """

    def __init__(self, app: WsgiApp, rules: Rules | Sequence[Rule]) -> None:
        self._app = app
        self._rules, self._decider = _behind(app, rules)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD", "GET")
        preflight = method == "OPTIONS" and "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ
        mount = _decoded(environ.get("SCRIPT_NAME", ""))
        inside = _decoded(environ.get("PATH_INFO", ""))
        path = mount + (inside if inside.startswith("/") or not inside else f"/{inside}")
        overrides = [environ[key] for key in _OVERRIDES_OF_WSGI if key in environ]
        rules = self._rules.find(method, path, mount, preflight=preflight, overrides=overrides)
        if not rules:
            return self._app(environ, start_response)
        identity = self._rules.identify.wsgi(environ)
        verdicts: list[Verdict] = []
        for rule in rules:
            verdict = self._decider.decide(rule, identity)
            verdicts.append(verdict)
            if not verdict.passes:
                break
        self._decider.hand_over_soon()
        with_x = self._rules.x_fields
        if not verdicts[-1].passes:
            problem = problem_of(verdicts[-1], with_x=with_x)
            start_response(f"{problem.status} {HTTPStatus(problem.status).phrase}", problem.fields())
            return [] if method == "HEAD" else [problem.body()]
        fields = fields_of(verdicts, with_x=with_x)

        def starting(status: str, headers: Sequence[tuple[str, str]], *exc_info: Any) -> Any:
            """The application's own fields stay, as in `asgi`."""
            has_own = any(name.lower().startswith("x-ratelimit-") for name, _ in headers)
            more = [row for row in fields if not (has_own and row[0].startswith("x-"))]
            return start_response(status, [*headers, *more], *exc_info)

        return self._app(environ, starting)


def _decoded(text: str) -> str:
    """A part of the path, whose bytes PEP 3333 passes as characters. For bytes that are not UTF-8 see `readings`."""
    return text if text.isascii() else text.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _behind(app: object, rules: Rules | Sequence[Rule]) -> tuple[Rules, Decider]:
    """The rules of an application, and what decides by them. Raises ConfigError if `app` cannot be an application, so
    that the start fails and not the first request."""
    if not callable(app):
        raise ConfigError(f"{show(app)} is not an application; pass an ASGI or WSGI application")
    whole, storage = opened(rules)
    return whole, Decider(storage)


# -- the responses -----------------------------------------------------------------------------------------------------


def fields_of(verdicts: Sequence[Verdict], *, with_x: bool) -> Fields:
    """The fields to add to an answer. Without the storage's answer, only the policy."""
    fields: Fields = []
    shown: list[tuple[int, int, int]] = []
    for rule, outcome, decision in verdicts:
        if rule.shadow:  # its visitors would slow down, and a trial changes nothing for them
            continue
        fields.append((POLICY, rule.policy_field))
        if decision is None:
            continue
        items = []
        for name, limit, state in zip(rule.policies, rule.limits, decision.limits, strict=True):
            left = state.remaining // rule.cost
            effective_s = seconds(state.retry_after_ms or min(state.reset_ms or limit.window_ms, limit.window_ms))
            has_window = outcome != "refused" or state.retry_after_ms > 0
            items.append(f'"{name}";r={left}' + (f";t={effective_s}" if has_window else ""))
            shown.append((left, effective_s, limit.number // rule.cost))
        fields.append((CURRENT, ", ".join(items)))
    if with_x and shown:  # for clients that know only these
        left, reset_s, number = min(shown, key=lambda limit: (limit[0], -limit[1]))
        fields += [
            ("x-ratelimit-limit", str(number)),
            ("x-ratelimit-remaining", str(left)),
            ("x-ratelimit-reset", str(reset_s)),
        ]
    return fields


def problem_of(verdict: Verdict, *, with_x: bool) -> Problem:
    """The answer to a refused request."""
    rule, _, decision = verdict
    wait_s = AWAY_S if decision is None else seconds(decision.retry_after_ms)
    # Up to a tenth more, so that clients who were refused together do not come back together.
    retry_after_s = wait_s + random.randint(0, max(1, min(MAX_JITTER_S, wait_s // 10)))  # noqa: S311  # no secret
    fields = tuple(fields_of([verdict], with_x=with_x))
    if decision is None:
        why = "The limits of this service cannot be checked now."
        return Problem(503, why, retry_after_s=retry_after_s, more=fields)
    violated = [
        name for name, state in zip(rule.policies, decision.limits, strict=True) if state.retry_after_ms > 0
    ] or list(rule.policies)
    return Problem(
        429,
        f"Too many requests. Come back in {retry_after_s} s.",
        type=QUOTA_EXCEEDED,
        title="Request cannot be satisfied as assigned quota has been exceeded",
        members={"violated-policies": violated},
        retry_after_s=retry_after_s,
        more=fields,
    )
