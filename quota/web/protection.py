"""The layer before an application: the check of the Host, header fields for browsers, and the last error handler.

    names_of        the names of a loopback address
    protected       an application behind all three

A page of another site may point its own name at loopback, and make a browser send requests there (DNS rebinding). Such
a request has that name in Host, and the check refuses it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

from quota.common.log import line
from quota.common.text import describe, show
from quota.web.documents import App, Message, Problem, Receive, Send, send_problem

OF_A_PAGE = "default-src 'self'; frame-ancestors 'none'"
"""The Content-Security-Policy for pages: the application is the only source, and no page may frame it."""

_FIELDS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

logger = logging.getLogger("quota.web")


def names_of(host: str) -> tuple[str, ...]:
    """The names that Host may have for the loopback address `host`."""
    return tuple(dict.fromkeys((host.strip("[]").lower(), "localhost", "127.0.0.1", "::1")))


def protected(app: App, *, hosts: Collection[str] | None, policy: str | None = OF_A_PAGE) -> App:
    """`app` behind the check of the Host, with header fields for browsers on every answer.

    `hosts` are the names that Host may have, with any port; None allows every name. `policy` is the
    Content-Security-Policy of answers that have none. None adds no header field, for answers of another server. An
    error that `app` raises becomes a log line and a problem document, never a traceback.
    """
    fields = () if policy is None else (*_FIELDS, (b"content-security-policy", policy.encode("latin-1")))

    async def outer(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        scope = _in_origin_form(scope)
        started = False
        unsent: Exception | None = None

        async def sends(message: Message) -> None:
            nonlocal started, unsent
            if message["type"] == "http.response.start":
                started = True
                present = {name.lower() for name, _ in message["headers"]}
                added = [field for field in fields if field[0] not in present]
                message = {**message, "headers": [*message["headers"], *added]}
            try:
                await send(message)
            except Exception as error:
                unsent = error
                raise

        try:
            if hosts is not None and (wrong := _wrong_host(scope, hosts)) is not None:
                await send_problem(sends, wrong)
            else:
                await app(scope, receive, sends)
        except asyncio.CancelledError:
            # The server ends before this request.
            if not started:
                await send_problem(sends, Problem(503, "The server is ending.", retry_after_s=1))
        except Exception as error:
            if unsent is not None:  # the rest of the request was not HTTP; the server answers that
                logger.debug("%s", line("answer_unsent", path=scope["path"], error=describe(unsent)))
                return
            logger.error(
                "%s", line("request_failed", method=scope["method"], path=scope["path"], error=describe(error))
            )
            logger.debug("%s", line("request_traceback", path=scope["path"]), exc_info=error)
            if not started:
                await send_problem(sends, Problem(500, "The server failed to answer this request; see its log."))

    return outer


def _in_origin_form(scope: Any) -> Any:
    """Rewrite `GET http://host/path`, which clients send to a proxy, as `/path` with this Host. The url overrides the
    Host field (RFC 9112, 3.2.2)."""
    raw: bytes = scope.get("raw_path") or b""
    if not raw.lower().startswith((b"http://", b"https://")):
        return scope
    authority, _, rest = raw.partition(b"://")[2].partition(b"/")
    headers = [(b"host", authority), *(field for field in scope["headers"] if field[0] != b"host")]
    return {**scope, "path": unquote(f"/{rest.decode('latin-1')}"), "raw_path": b"/" + rest, "headers": headers}


def _wrong_host(scope: Any, hosts: Collection[str]) -> Problem | None:
    named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(named) == 1 and _without_port(named[0]) in hosts:
        return None
    host = show(named[0]) if named else "missing"
    return Problem(421, f"This server does not have this name: the Host is {host}.")


_HOST = re.compile(r"(?:\[([^]]*)\]|(?!\[)([^:]*?)\.?)(?::[0-9]*)?")


def _without_port(host: str) -> str:
    """The name in a Host field: `[::1]:80` -> `::1`, `Localhost:80` -> `localhost`; "" for an invalid field."""
    match = _HOST.fullmatch(host)
    return (match[1] or match[2] or "").lower() if match else ""
