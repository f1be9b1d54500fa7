"""Serves an ASGI application with uvicorn behind a layer of checks, and ends cleanly on a signal.

    require_web     checks that the extra `web` is installed
    listen          opens a listening socket
    listening_at    the same at a path that only this user can reach, until the block ends
    address_of      the address of a socket, as people type it
    serve           serves until SIGTERM or SIGINT
    protected       an application behind the check of the Host, header fields for browsers, the last error handler
    names_of        the names of a loopback address

A thread of its own waits for the signals, so that they also end a process whose other threads hang. After a signal,
requests have GRACE_S to end, and the process ends within END_WITHIN_S, whatever it waits for.

A page of another site may point its own name at loopback, and make a browser send requests there (DNS rebinding). Such
a request has that name in Host, and `protected` refuses it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from quota.common.clock import elapsed_s
from quota.common.log import line
from quota.common.text import describe, one_line, show
from quota.errors import QuotaError, UsageError
from quota.web.documents import App, Message, Problem, Receive, Send, send_problem

if TYPE_CHECKING:
    import uvicorn

GRACE_S = 3
HEAD_WITHIN_S = 10.0
"""How long a client may take to send the head of a request. uvicorn would wait for ever, and a thousand such
connections are all that a process may open."""
READ_WITHIN_S = 60.0
"""How long a client may read nothing of its answer, as nginx's `send_timeout`."""

PIECE_BYTES = 32 * 1024
LOGGED_AGAIN_S = 60.0
END_WITHIN_S = 4.0
BACKLOG = 2048

OF_A_PAGE = "default-src 'self'; frame-ancestors 'none'"
"""The Content-Security-Policy for pages: the application is the only source, and no page may frame it."""

_FIELDS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

_HOST = re.compile(r"(?:\[([^]]*)\]|(?!\[)([^:]*?)\.?)(?::[0-9]*)?")
"""A Host field: the name is `::1` in `[::1]:80`, and `localhost` in `localhost:80`."""

_UNREADABLE = Problem(
    400,
    "The request is not valid HTTP: send one Host, the address in ASCII (%C3%BC for \u00fc), a head of at most 16 kB.",
    more=(("connection", "close"),),
)

_STOPPING = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger("quota.web")


def require_web(*also: str) -> None:
    """Import the modules that serving needs, and these. Raises UsageError if one is not installed, so that a supervisor
    does not restart the process."""
    try:
        for name in ("starlette", "uvicorn", *also):
            import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] or "a package"
        how = "pip install 'quota-ledger[web]', or pipx install --force 'quota-ledger[web]'"
        raise UsageError(f"{missing} is not installed: {how}") from None


def listen(host: str, port: int) -> socket.socket:
    """Listen at this address; port 0 takes a free port. Raises QuotaError."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise QuotaError(f"{show(host)} is not an address of this machine; choose another host") from None
    family, _, _, _, address = addresses[0]
    try:
        listener = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise QuotaError(f"{_spelled(address)}: {why}; choose another port or host") from None
    listener.setblocking(False)
    # Connections inherit it from the listener. asyncio sets it only for sockets that were created with a protocol
    # number. Without it, the second piece of an answer waits 40 ms until the client confirms the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def listening_at(path: str) -> Iterator[socket.socket]:
    """Listen at this path, with mode 0600, until the block ends. Raises QuotaError."""
    where = one_line(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _turn_in(os.path.dirname(path) or "."):
            with suppress(OSError):
                if stat.S_ISSOCK(os.lstat(path).st_mode) and listener.connect_ex(path) == errno.ECONNREFUSED:
                    os.unlink(path)  # left by a killed process
            listener.close()
            listener = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)
            try:
                listener.bind(path)
            finally:
                os.umask(before)
            listener.listen(BACKLOG)
        listener.setblocking(False)
        mine = os.lstat(path).st_ino
    except (OSError, ValueError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or str(error)
        raise QuotaError(f"{where}: {why}; choose an unused path in a folder of your own") from None
    try:
        yield listener
    finally:
        listener.close()
        with suppress(OSError):
            if os.lstat(path).st_ino == mine:
                os.unlink(path)


@contextmanager
def _turn_in(folder: str) -> Iterator[None]:
    """Entered by one process at a time: a socket that another has bound, and not listened at yet, looks like one left
    behind. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def address_of(listener: socket.socket) -> str:
    """The address of a socket, without a slash at the end."""
    name = listener.getsockname()
    return f"unix:{name}" if isinstance(name, str) else f"http://{_spelled(name)}"


def _spelled(address: Any) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(
    make_app: Callable[[], App],
    listener: socket.socket,
    *,
    ready: Callable[[], object] | None = None,
    passes_on: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then return. The signals stay blocked, because the process is to end now.
    `passes_on` is for an application that passes on the answers of another server: it sets Date itself, and its
    connections buffer little.

    `serve` blocks the signals before it calls `make_app`, so that every thread that `make_app` starts blocks them too.
    It calls `ready` when it serves the socket. Call `serve` in the main thread, before other threads start. Raises
    QuotaError, as `make_app` does.
    """
    if not logging.getLogger("quota").isEnabledFor(logging.INFO):
        # `protected` logs failed requests in one line. Strangers can cause uvicorn's other lines.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    # Shells and systemd start with 1,024 open files, for programs that call `select`, and allow far more. A slow client
    # holds one file, or two if its request is passed on.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports "unlimited" but allows fewer
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = _server(make_app(), ready, passes_on=passes_on)
    threading.Thread(target=_end_on_signal, args=(server,), daemon=True).start()
    try:
        server.run(sockets=[listener])
    except SystemExit:  # uvicorn raises it if the application's start failed
        raise QuotaError("the application did not start; QUOTA_LOG=info shows why") from None


def hold_little(transport: Any) -> None:
    """Let a connection read and write in small pieces, so that a slow client holds little memory."""
    transport.max_size = PIECE_BYTES
    transport.set_write_buffer_limits(PIECE_BYTES)


def _server(app: App, ready: Callable[[], object] | None, *, passes_on: bool) -> uvicorn.Server:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Plain(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            if passes_on:
                hold_little(transport)
            super().connection_made(transport)

        def _should_upgrade(self) -> bool:
            return False  # uvicorn would log the advice to install a library for websockets

        def send_400_response(self, msg: str) -> None:
            head = h11.Response(status_code=400, reason="Bad Request", headers=_UNREADABLE.fields())
            self.transport.write(self.conn.send(head))
            with suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                self.transport.write(self.conn.send(h11.Data(data=_UNREADABLE.body())))
            self.transport.close()

    waiting: Waiting = {}

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave the signals to `_end_on_signal`."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().set_exception_handler(_Faults().say)
            await super().startup(sockets)
            if ready is not None and self.started:
                ready()

        async def on_tick(self, counter: int) -> bool:
            if counter % 10 == 0:
                _close_silent(self.server_state.connections, waiting)
            return await super().on_tick(counter)

    config = uvicorn.Config(
        app,
        loop="asyncio" if passes_on else "auto",  # uvloop always reads 256 kB at once
        # httptools, if installed, bounds neither the head of a request nor the number of pipelined requests.
        http=Plain,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=not passes_on,
        proxy_headers=False,  # `quota.inbound` identifies the client
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )
    return Server(config)


Waiting = dict[tuple[Any, object, int], float]
"""Since when a connection waits for its client, with the last request and the unsent bytes."""


def _end_on_signal(server: uvicorn.Server) -> None:
    """Wait for a signal, then tell the server to end. If it does not end in time, end the process."""
    signal.sigwait(_STOPPING)
    server.should_exit = True
    time.sleep(END_WITHIN_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


def _close_silent(connections: Iterable[Any], waiting: Waiting) -> None:
    """Close connections that sent no request for HEAD_WITHIN_S, or read nothing of an answer for READ_WITHIN_S. uvicorn
    itself closes a connection between two requests earlier. `waiting` becomes those that wait now."""
    now_s, before = elapsed_s(), waiting.copy()
    waiting.clear()
    for connection in list(connections):
        last = getattr(connection, "cycle", None)  # the last request
        unsent = connection.transport.get_write_buffer_size()
        if unsent or last is None or getattr(last, "response_complete", False):
            waits = connection, last, unsent  # until either changes
            waiting[waits] = since_s = before.get(waits, now_s)
            if unsent and now_s - since_s > READ_WITHIN_S:
                connection.transport.abort()  # close() would wait for the client
            elif not unsent and now_s - since_s > HEAD_WITHIN_S:
                connection.transport.close()


class _Faults:
    """Logs errors of the event loop as single lines, and the same error again only after a while."""

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}

    def say(self, _loop: object, context: Mapping[str, Any]) -> None:
        error, message = context.get("exception"), str(context.get("message", ""))
        why = message if error is None else describe(error)
        now_s = elapsed_s()
        if now_s - self._logged_s.get(why, -LOGGED_AGAIN_S) >= LOGGED_AGAIN_S:
            self._logged_s = {why: now_s}
            logger.warning("%s", line("server_fault", error=why))


# -- the layer before an application -----------------------------------------------------------------------------------


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
    name = _HOST.fullmatch(named[0]) if len(named) == 1 else None
    if name is not None and (name[1] or name[2] or "").lower() in hosts:
        return None
    host = show(named[0]) if named else "missing"
    return Problem(421, f"This server does not have this name: the Host is {host}.")
