"""A process that serves one ASGI application under uvicorn, and ends when it is told to.

    require_web     the extra `web` is installed, or one line says how
    listen          a socket, or one line that says why not
    address_of      where it listens, as people type it
    serve           serve until SIGTERM or SIGINT

The signals are waited for in a thread of its own, so that they also end a process whose every other thread hangs. From
the signal on, requests under way have GRACE_S to end by themselves; the process ends within END_WITHIN_S, whatever it
waits for.
"""

from __future__ import annotations

import _thread
import asyncio
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from quota.common.log import line
from quota.common.text import describe, shorten, show
from quota.errors import ConfigError, LedgerError, QuotaError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from quota.web.protection import App

    MakeApp = Callable[[], App]

GRACE_S = 3
HEAD_WITHIN_S = 10.0
"""A client that has not sent the head of a request by then is let go. uvicorn would wait for ever, and a thousand such
connections are all that a process may have."""
READ_WITHIN_S = 60.0
"""The same for a client that takes nothing of its answer for so long: nginx waits as long (`send_timeout`)."""

MAX_FILES = 65_536
SAID_AGAIN_S = 60.0
END_WITHIN_S = 4.0
BACKLOG = 2048
MAX_WORKERS = 64

RESTARTS = 5
RESTARTS_WITHIN_S = 10.0
"""Workers that end more often than that would end for ever."""

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_DID_NOT_START = 3
"""The exit status of a worker that cannot serve: its reason is in the pipe to the parent."""

logger = logging.getLogger("quota.web")


def require_web(*also: str) -> None:
    """Import what serving needs, and these modules. Raises QuotaError where one is not installed."""
    try:
        for name in ("starlette", "uvicorn", *also):
            import_module(name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] or "a package"
        raise QuotaError(f"{missing} is not installed: pip install 'quota-ledger[web]'") from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one. Raises UsageError and QuotaError."""
    if not 0 <= port <= 65_535:
        raise UsageError(f"port {port}: a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise QuotaError(f"{show(host)} is no address of this machine: choose another host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise QuotaError(f"{_spelled(address)}: {error.strerror}; choose another port or host") from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """The address, without a slash at the end."""
    return f"http://{_spelled(listener.getsockname())}"


def _spelled(address: Any) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(
    make_app: MakeApp, listener: socket.socket, *, workers: int = 1, ready: Callable[[], object] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then return. The signals stay blocked: the process is to end now.

    `make_app` makes the application: in this process, or with several workers in each of them, so that nothing open is
    shared over the fork. `ready` is called when the socket is served. Call it in the main thread, before any other
    thread has begun. Raises UsageError; QuotaError, ConfigError or LedgerError as `make_app` does; QuotaError if the
    workers end by themselves again and again.
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{workers} workers: start 1 to {MAX_WORKERS}")
    require_web()
    if not logging.getLogger("quota").isEnabledFor(logging.INFO):
        # What uvicorn says of requests that fail, `protected` says in a line; strangers make it say the rest.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    _admit_many()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    if workers == 1:
        _serve_here(make_app, listener, ready)
    else:
        _Workers(make_app, listener, workers).run(ready)


# -- one process -------------------------------------------------------------------------------------------------------


def _serve_here(
    make_app: MakeApp, listener: socket.socket, ready: Callable[[], object] | None, parent: int | None = None
) -> None:
    """Serve in this process. `parent` is the end of a pipe that closes when the parent is gone."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """The thread below has them."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().set_exception_handler(_Faults().say)
            await super().startup(sockets)
            if ready is not None and self.started:
                ready()

        async def on_tick(self, counter: int) -> bool:
            if counter % 10 == 0:
                silent.close(self.server_state.connections)
            return await super().on_tick(counter)

    silent = _Silent()
    config = uvicorn.Config(
        make_app(),
        http="h11",  # httptools, where it is installed, bounds neither heads nor how many requests wait for their turn
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who asks is `quota.inbound`'s to say
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )
    server = Server(config)
    # What was made so far lives as long as the process: a collection need not look through it, 10 ms each time.
    gc.freeze()

    def end() -> None:
        server.should_exit = True
        time.sleep(END_WITHIN_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    def on_signal() -> None:
        signal.sigwait(_STOPPING)
        end()

    def on_orphaned(pipe: int) -> None:
        os.read(pipe, 1)
        end()

    _thread.start_new_thread(on_signal, ())
    if parent is not None:
        _thread.start_new_thread(on_orphaned, (parent,))
    try:
        server.run(sockets=[listener])
    except SystemExit:  # uvicorn's way to say that the application's own start failed
        raise QuotaError("the application did not start; QUOTA_LOG=info shows why") from None


class _Silent:
    """Connections whose client is to send a request or to take its answer, and since when it has not."""

    def __init__(self) -> None:
        self._since: dict[Any, tuple[object, int, float]] = {}

    def close(self, connections: Iterable[Any]) -> None:
        """Close those that have sent no request for HEAD_WITHIN_S, or taken nothing of an answer for READ_WITHIN_S. One
        that waits for its next request ends earlier, unless it has begun to send it."""
        now_s = time.monotonic()
        waiting: dict[Any, tuple[object, int, float]] = {}
        for one in list(connections):
            last = getattr(one, "cycle", None)  # the last request
            unsent = one.transport.get_write_buffer_size()
            if unsent or last is None or getattr(last, "response_complete", False):
                before, before_unsent, since_s = self._since.get(one, (last, unsent, now_s))
                if before is not last or before_unsent != unsent:
                    since_s = now_s
                waiting[one] = (last, unsent, since_s)
                if unsent and now_s - since_s > READ_WITHIN_S:
                    one.transport.abort()  # to close it would wait for the client
                elif not unsent and now_s - since_s > HEAD_WITHIN_S:
                    one.transport.close()
        self._since = waiting


class _Faults:
    """What the event loop met, each as one line of the log, and again only after a while."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}

    def say(self, _loop: object, context: Mapping[str, Any]) -> None:
        error, message = context.get("exception"), str(context.get("message", ""))
        why = message if error is None else describe(error)
        now_s = time.monotonic()
        if now_s - self._said_s.get(why, -SAID_AGAIN_S) >= SAID_AGAIN_S:
            self._said_s = {why: now_s}
            logger.warning("%s", line("server_fault", error=why))


def _admit_many() -> None:
    """Raise how many files, and so connections, this process may have open, as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# -- several -----------------------------------------------------------------------------------------------------------


class _Workers:
    """Forked processes that serve one socket, each with an application of its own. One that ends is replaced."""

    def __init__(self, make_app: MakeApp, listener: socket.socket, workers: int) -> None:
        self._make_app = make_app
        self._listener = listener
        self._workers = workers
        self._children: set[int] = set()
        self._ended_s: list[float] = []
        self._alive, self._held = os.pipe()  # closes in the children when this process is gone
        self._failures, self._failing = os.pipe()
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        os.set_blocking(self._failures, False)

    def run(self, ready: Callable[[], object] | None) -> None:
        for number in (*_STOPPING, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        try:
            for _ in range(self._workers):
                self._fork()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            if ready is not None:
                ready()
            while not self._told(None):
                self._replace_ended()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
            self._end()
            signal.set_wakeup_fd(-1)

    def _told(self, within_s: float | None) -> bool:
        """Wait for a signal. Whether one of them told this process to end."""
        with suppress(InterruptedError):
            select.select([self._woken], [], [], within_s)
        with suppress(BlockingIOError):
            return any(number in _STOPPING for number in os.read(self._woken, 4096))
        return False

    def _fork(self) -> None:
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        child = os.fork()
        if not child:
            self._work()
        self._children.add(child)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def _work(self) -> NoReturn:
        """What a worker does, until its process ends."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._held, self._failures, self._woken, self._waking):
                os.close(end)
            _serve_here(self._make_app, self._listener, None, self._alive)
            status = 0
        except QuotaError as error:
            os.write(self._failing, f"{error.exit_status} {shorten(str(error), 1_000)}\n".encode(errors="replace"))
            status = _DID_NOT_START
        except BaseException as error:
            logger.error("%s", line("worker_failed", error=f"{type(error).__name__}: {error}"))
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(status)

    def _replace_ended(self) -> None:
        for child, status in self._reap():
            if status == _DID_NOT_START:
                raise self._failure()
            now_s = time.monotonic()
            self._ended_s = [at_s for at_s in self._ended_s if now_s - at_s < RESTARTS_WITHIN_S]
            self._ended_s.append(now_s)
            if len(self._ended_s) > RESTARTS:
                raise QuotaError("the workers end as soon as they start; QUOTA_LOG=debug shows why")
            logger.warning("%s", line("worker_replaced", pid=child, status=status))
            self._fork()

    def _reap(self) -> Iterator[tuple[int, int]]:
        """The workers that ended, with their exit status; negative: the signal that ended it."""
        for child in list(self._children):
            with suppress(ChildProcessError):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended:
                    continue
                self._children.discard(child)
                yield child, os.waitstatus_to_exitcode(status)

    def _failure(self) -> QuotaError:
        try:
            first = os.read(self._failures, 4000).decode(errors="replace").partition("\n")[0]
            status, _, why = first.partition(" ")
        except BlockingIOError:
            status, why = "1", "a worker did not start"
        kinds = {str(kind.exit_status): kind for kind in (ConfigError, LedgerError, UsageError)}
        return kinds.get(status, QuotaError)(why)

    def _end(self) -> None:
        """End the workers, all within END_WITHIN_S. They count the seconds themselves; one that cannot is killed."""
        until_s = time.monotonic() + END_WITHIN_S + 0.3
        self._listener.close()
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        while self._children:
            list(self._reap())
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if self._children:
                self._told(min(left_s, 0.1))
        for child in self._children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
