"""Limits for a WSGI application: Flask, Django, Bottle, Pyramid, and any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from quota.inbound.answers import fields_of, problem_of
from quota.inbound.deciding import Decider, Verdict
from quota.inbound.fields import Fields
from quota.inbound.opening import callable_app, opened
from quota.inbound.rules import Rule, Rules

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class wsgi:  # noqa: N801  # used like a function: `wsgi(app, rules)`
    """`app` behind `rules`: a Rules, or a list of Rule with everything else as it is by default.

    The same as `quota.inbound.on_asgi`: a refused request never reaches the application, and an admitted one passes
    unchanged. A decision waits for up to 0.25 s in the server's thread. Raises ConfigError.
    """

    def __init__(self, app: App, rules: Rules | Sequence[Rule]) -> None:
        self._app = callable_app(app)
        self._rules, storage = opened(rules)
        self._decider = Decider(storage)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD", "GET")
        preflight = method == "OPTIONS" and "HTTP_ACCESS_CONTROL_REQUEST_METHOD" in environ
        mount = _decoded(environ.get("SCRIPT_NAME", ""))
        inside = _decoded(environ.get("PATH_INFO", ""))
        path = mount + (inside if inside.startswith("/") or not inside else f"/{inside}")
        found = self._rules.find(method, path, mount, preflight=preflight)
        if not found:
            return self._app(environ, start_response)
        identity = self._rules.identify.wsgi(environ)
        verdicts: list[Verdict] = []
        for rule in found:
            verdict = self._decider.decide(rule, identity)
            verdicts.append(verdict)
            if not verdict.passes:
                break
        self._decider.hand_over_soon()
        with_x = self._rules.x_fields
        if not verdicts[-1].passes:
            problem = problem_of(verdicts[-1], with_x=with_x)
            body = problem.body()
            fields = [*problem.fields(), ("content-length", str(len(body)))]
            start_response(f"{problem.status} {HTTPStatus(problem.status).phrase}", fields)
            return [] if method == "HEAD" else [body]
        return self._app(environ, _adding(start_response, fields_of(verdicts, with_x=with_x)))


def _decoded(text: str) -> str:
    """A part of the path. PEP 3333 hands its bytes over as characters. For those that are not UTF-8 see `readings`."""
    return text if text.isascii() else text.encode("latin-1", "replace").decode("utf-8", "surrogateescape")


def _adding(start_response: StartResponse, fields: Fields) -> StartResponse:
    """`start_response`, with fields added. Those that the application sends stay, as in `quota.inbound.on_asgi`."""

    def starting(status: str, headers: Sequence[tuple[str, str]], *exc_info: Any) -> Any:
        names = {name.lower() for name, _ in headers}
        more = [row for row in fields if not (row[0].startswith("x-") and row[0] in names)]
        return start_response(status, [*headers, *more], *exc_info)

    return starting
