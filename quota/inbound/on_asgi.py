"""Limits for an ASGI application: FastAPI, Starlette, Django, Quart, Litestar, and any other."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Awaitable, Sequence
from typing import Any

from quota.inbound.answers import fields_of, problem_of
from quota.inbound.deciding import Decider, Verdict
from quota.inbound.fields import Fields
from quota.inbound.opening import callable_app, opened
from quota.inbound.rules import Rule, Rules
from quota.web.problem import App, Message, Problem, Receive, Send, send_problem

_DENIAL = "websocket.http.response"
_HEADS = frozenset(("http.response.start", "websocket.accept", f"{_DENIAL}.start"))
"""The messages that have the fields of an answer."""

_TRY_AGAIN_LATER = 1013


class asgi:  # noqa: N801  # used like a function: `asgi(app, rules)`, or `app.add_middleware(asgi, rules=rules)`
    """`app` behind `rules`: a Rules, or a list of Rule with everything else as it is by default.

    A request that is refused never reaches the application, and its body is not read. Whatever is admitted passes
    unchanged, in both directions: bodies stream, and only header fields are added to the answer. A request is counted
    before the application sees it, so one whose client goes away counts, too. A websocket is decided once, at its
    handshake. Raises ConfigError.
    """

    def __init__(self, app: App, rules: Rules | Sequence[Rule]) -> None:
        self._app = callable_app(app)
        self._rules, storage = opened(rules)
        self._decider = Decider(storage)
        # A FastAPI(root_path=...) says so to its own middleware only, and cuts it off the path by itself. A Quart's
        # root_path is the folder that it lies in.
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
        found = self._rules.find(method, scope["path"], mount, preflight=preflight)
        if not found:
            await self._app(scope, receive, send)
            return
        loop = get_running_loop()
        identity = self._rules.identify.asgi(scope)
        self._decider.hand_over_soon()
        with_x = self._rules.x_fields
        verdicts: list[Verdict] = []
        for rule in found:
            verdict = await self._decider.decide_soon(loop, rule, identity)
            verdicts.append(verdict)
            if not verdict.passes:
                problem = problem_of(verdict, with_x=with_x)
                await (send_problem(send, problem) if kind == "http" else _deny(scope, receive, send, problem))
                return
        await self._app(scope, receive, _adding(send, fields_of(verdicts, with_x=with_x), with_x=with_x))

    async def _live(self, scope: Any, receive: Receive, send: Send) -> None:
        """Hand over at the shutdown: a server may end the process by a signal after it. An application without a
        lifespan, such as Django, raises at once; the rest is said in its place."""
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


def _adding(send: Send, fields: Fields, *, with_x: bool) -> Send:
    """`send`, with fields added to the head of the answer. Those that the application sends itself stay.

    Its own RateLimit items are about other limits, and the two lists are one. Of X-RateLimit-* there can be only one.
    """
    added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]

    def sending(message: Message) -> Awaitable[None]:  # a coroutine of its own for each part of a body would only cost
        if message["type"] in _HEADS:
            own, more = list(message.get("headers", ())), added
            if with_x:
                names = {bytes(name).lower() for name, _ in own}
                more = [row for row in added if not (row[0].startswith(b"x-") and row[0] in names)]
            message = {**message, "headers": [*own, *more]}
        return send(message)

    return sending


async def _deny(scope: Any, receive: Receive, send: Send, problem: Problem) -> None:
    """Refuse the handshake of a websocket: with the whole answer where the server can send one, else with 403."""
    await receive()  # websocket.connect
    if _DENIAL not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": problem.detail})
        return

    async def denying(message: Message) -> None:
        await send({**message, "type": message["type"].replace("http.response", _DENIAL)})

    await send_problem(denying, problem)
