"""Sends events to the command and the address of `[notify]`, each event once, and pings health checks.

    Notice      one event, and for how long it is not repeated
    notify      deliver notices, each once over all machines that share the ledger
    forget      deliver notices again whose cause had ended
    send_test   deliver a notice for a test, and report what came of it
    Ping        report to a health-check service that a job begins, and how it ended

A process claims a notice in the ledger before it delivers it, so only one of several machines does. If the ledger does
not answer, each machine delivers it once. `notify` never raises: a failed delivery is one line of the log, and the next
run more than RETRY_MS later tries again. The command and the address are independent: the failure of one neither stops
nor repeats the other. All deliveries together take at most DEADLINE_S; then the command is killed, and a request is
abandoned. Addresses are secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from http.client import HTTPConnection, HTTPSConnection
from secrets import token_hex
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from quota.common.clock import elapsed_s, host_clock, rfc3339
from quota.common.files import first_within, make_folder
from quota.common.hosts import is_ambiguous
from quota.common.log import warn
from quota.common.redact import redact, register
from quota.common.text import describe, members, one_line
from quota.errors import ConfigError, LedgerError
from quota.ledger.state import State
from quota.rules.claims import MAX_TICK_MS, Claim
from quota.session import Session
from quota.settings.model import NotifySettings, state_folder
from quota.settings.references import read_address
from quota.terms.arguments import machine_name
from quota.terms.limits import MINUTE_MS

DEADLINE_S = 5.0
RETRY_MS = 10 * MINUTE_MS
"""No machine tries a failed notice again earlier. So a command that hangs delays one run in ten minutes, and the other
notices have their turn in between."""

CLAIM = "notify"

TEST = "test"
"""The event that `quota doctor --notify` sends."""


class Notice(NamedTuple):
    """One event. `event` is one of the stable names in docs/alarms.md; `notify` delivers it once for each `subject` and
    `cause` within `once_ms`. `facts` are further values for machines. With `here`, each machine delivers it for itself.
    """

    event: str
    project: str
    subject: str
    message: str
    once_ms: int
    facts: Mapping[str, object] = {}
    here: bool = False
    cause: str = ""

    def as_json(self) -> dict[str, object]:
        """The document that a command reads on stdin and an address gets as its body."""
        return {
            **members(self, "event project subject message"),
            "at": rfc3339(host_clock()),
            "host": machine_name(),
            **self.facts,
        }


def notify(session: Session, notices: Sequence[Notice]) -> None:
    """Deliver the notices that no process has delivered yet. Does nothing if the configuration has no `[notify]`."""
    settings = session.settings.notify
    if settings is None:
        return
    until_s = elapsed_s() + DEADLINE_S
    for notice in notices:
        for way, deliver in _ways(settings):
            if elapsed_s() < until_s and (claimed := _claim(session, notice, way)):
                failure = _failure(deliver, notice, until_s)
                if failure is not None:
                    warn("notify_failed", failure, event=notice.event, subject=one_line(notice.subject))
                claimed(failure is None)


def forget(session: Session, notices: Sequence[Notice], *, here: bool = False) -> None:
    """Let these notices of one project be delivered again at once: their cause has ended. With `here`, only this
    machine forgets them. Raises nothing."""
    settings = session.settings.notify
    if settings is None:
        return
    keys = [_key(notice, way) for notice in notices for way, _ in _ways(settings)]
    with contextlib.suppress(LedgerError, ConfigError, OSError):
        for key in keys:
            (state_folder() / "notified" / key).unlink(missing_ok=True)
        if not here:
            State(session.ledger, notices[0].project, session.keys.next).forget_ticks(CLAIM, keys)


def send_test(settings: NotifySettings, projects: str, message: str) -> Iterator[tuple[str, str | None]]:
    """Deliver a notice of the event "test" by each way. Yields the way, and why its delivery failed, if it did. The
    command writes to our stderr: whoever tests it must see what it says."""
    for way, deliver in _ways(settings, stderr=None):
        yield way, _failure(deliver, Notice(TEST, projects, "", message, 0), elapsed_s() + DEADLINE_S)


_Deliver = Callable[[bytes, float], None]
"""Delivers a body within so many seconds, or raises one of _FAILURES."""


def _ways(settings: NotifySettings, stderr: int | None = subprocess.DEVNULL) -> Iterator[tuple[str, _Deliver]]:
    """Each way, and what delivers by it. A command may write a secret to its `stderr`."""
    if settings.command:
        yield "command", partial(_run, settings.command, stderr)
    if settings.url_ref is not None:
        address = partial(read_address, settings.url_ref, "url", insecure=settings.insecure_endpoint)
        yield "url", lambda body, timeout_s: _send(address(), body, timeout_s)


# -- once --------------------------------------------------------------------------------------------------------------

_Claimed = Callable[[bool], None]
"""Takes whether the notice was delivered."""


def _claim(session: Session, notice: Notice, way: str) -> _Claimed | None:
    """None if another process delivers the notice. Otherwise call the result with whether it was delivered."""
    once_ms = min(notice.once_ms, MAX_TICK_MS)
    key = _key(notice, way)
    if notice.here:
        return _claim_here(key, once_ms)
    run = f"{session.run}-{token_hex(8)}"  # two threads of one session are two
    claim = Claim(
        name=CLAIM,
        owner=CLAIM,
        run=run,
        machine=run,
        host=machine_name(),
        regions=(),
        hold_ms=MINUTE_MS,
        lease_ms=MINUTE_MS,  # of a process that dies meanwhile
        tick=key,
        tick_ms=once_ms,
    )
    try:
        state = State(session.ledger, notice.project, session.keys.next)
        claimed = state.claim(claim)
        if claimed.tick:
            return None
        if left_ms := _left_here(key, once_ms, claimed.now_ms):
            state.end_claim(claim._replace(tick_ms=left_ms), "done")
            return None
    except (LedgerError, ConfigError):
        return _claim_here(key, once_ms)

    def end(delivered: bool) -> None:
        ended = claim if delivered else claim._replace(tick_ms=min(RETRY_MS, once_ms))
        with contextlib.suppress(LedgerError):  # then the notice may come again
            state.end_claim(ended, "done")
        if delivered:
            _claim_here(key, 0)

    return end


def _key(notice: Notice, way: str) -> str:
    """The name of a notice among all that go this way."""
    names = (way, notice.event, notice.project, notice.subject, notice.cause)
    return blake2b("\0".join(names).encode(), digest_size=12).hexdigest()


def _left_here(key: str, once_ms: int, now_ms: int) -> int:
    """For how long a delivery by this machine still counts, whatever the ledger has lost; 0 if there was none."""
    with contextlib.suppress(OSError):
        delivered_ms = (state_folder() / "notified" / key).stat().st_mtime_ns // 1_000_000
        return max(0, delivered_ms + once_ms - now_ms) if delivered_ms <= now_ms else 0
    return 0


def _claim_here(key: str, once_ms: int) -> _Claimed | None:
    """The same for this machine alone. The state folder remembers."""
    folder = state_folder() / "notified"
    now_ms = host_clock()
    try:
        make_folder(folder)
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):  # another process removes it too
                if now_ms - entry.stat().st_mtime_ns // 1_000_000 > MAX_TICK_MS:
                    os.unlink(entry.path)
        if not first_within(folder / key, once_ms):
            return None
    except OSError:  # then the notice may come again
        pass

    def end(delivered: bool) -> None:
        if not delivered:
            again_s = (host_clock() - once_ms + min(RETRY_MS, once_ms)) / 1000
            with contextlib.suppress(OSError):
                os.utime(folder / key, (again_s, again_s))

    return end


# -- delivery ----------------------------------------------------------------------------------------------------------


_FAILURES = (OSError, ValueError, ConfigError, subprocess.SubprocessError)
"""What a delivery raises."""


def _failure(deliver: _Deliver, notice: Notice, until_s: float) -> str | None:
    """Deliver a notice. Returns why it failed, if it did."""
    try:
        deliver(json.dumps(notice.as_json()).encode(), until_s - elapsed_s())
    except _FAILURES as error:
        return _why(error)
    return None


def _run(command: Sequence[str], stderr: int | None, body: bytes, timeout_s: float) -> None:
    """Run a command with the notice on stdin. Raises OSError, SubprocessError, or ValueError for its exit status."""
    process = subprocess.Popen(  # noqa: S603  # the owner's own command
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )
    try:
        process.communicate(body, timeout=max(0.0, timeout_s))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with every process that it started
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):  # its message has the arguments, which may hold a secret
            raise ValueError(
                f"{one_line(command[0])} was killed after {DEADLINE_S:g} s, the most that all deliveries may take"
            ) from None
        raise
    if process.returncode:
        raise ValueError(f"{one_line(command[0])} ended with {process.returncode}")


def _why(error: Exception) -> str:
    """Why a delivery failed: our own sentence, or the kind of error and its message."""
    return redact(str(error) if isinstance(error, (ConfigError, ValueError)) else describe(error))


def _send(url: str, body: bytes | None, timeout_s: float) -> None:
    """POST the body, or GET without one. Redirects are not followed. Raises OSError or ValueError."""
    parts = urlsplit(url)
    connection = _connection(parts, timeout_s)
    headers = {"User-Agent": "quota-ledger", **_authorization("Authorization", parts)}
    if body is not None:
        headers["Content-Type"] = "application/json"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    answer: Future[int] = Future()

    def work() -> None:
        try:
            connection.request("POST" if body is not None else "GET", path, body, headers)
            answer.set_result(connection.getresponse().status)
        except Exception as error:  # raised below, in the caller's thread
            answer.set_exception(error)
        connection.close()

    try:
        threading.Thread(target=work, daemon=True).start()
    except RuntimeError as error:  # no more threads can be started
        raise OSError(str(error)) from error
    try:
        status = answer.result(max(0.0, timeout_s))
    except TimeoutError:
        with contextlib.suppress(OSError, AttributeError):  # it is not open yet, or not any more
            connection.sock.shutdown(socket.SHUT_RDWR)  # an answer that comes byte by byte would hold it for days
        raise TimeoutError(f"no answer within {DEADLINE_S:g} s") from None
    except Exception as error:
        raise ValueError(_why(error)) from error
    if status >= 300:
        raise ValueError(f"it answered {status}")


def _connection(parts: SplitResult, timeout_s: float) -> HTTPConnection:
    """To the address, or through the proxy that HTTPS_PROXY names for it. A proxy sees no http:// address. The port is
    given, because http.client would look for it in an address of IPv6."""
    host, timeout_s = parts.hostname or "", max(0.1, timeout_s)
    if parts.scheme != "https":
        return HTTPConnection(host, parts.port or 80, timeout=timeout_s)
    named = getproxies().get("https", "")
    if not named or proxy_bypass(host):
        return HTTPSConnection(host, parts.port or 443, timeout=timeout_s)
    proxy = urlsplit(named if "://" in named else f"http://{named}")
    register(proxy.password)
    try:
        port = proxy.port if proxy.scheme == "http" and proxy.hostname and not is_ambiguous(proxy.geturl()) else 0
    except ValueError:  # its message shows the port, which may be part of a password
        port = 0
    if port == 0:
        raise ValueError("HTTPS_PROXY names no http:// proxy; set one, or name the address's host in NO_PROXY")
    connection = HTTPSConnection(proxy.hostname or "", port or 443, timeout=timeout_s)
    connection.set_tunnel(host, parts.port or 443, _authorization("Proxy-Authorization", proxy))
    return connection


def _authorization(name: str, parts: SplitResult) -> dict[str, str]:
    """The header for the user and the password of an address; none if it holds none."""
    if parts.username is None and parts.password is None:
        return {}
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return {name: f"Basic {b64encode(pair.encode()).decode()}"}


# -- health checks -----------------------------------------------------------------------------------------------------


class Ping:
    """Requests a health-check service's `ADDRESS/start` when a job begins, and `ADDRESS/STATUS` when it ended."""

    def __init__(self, ref: str | None, job: str, *, insecure: bool) -> None:
        self._ref = ref
        self._job = job
        self._insecure = insecure
        self._starting: threading.Thread | None = None

    @property
    def began(self) -> bool:
        """Whether `start` was called, and a thread could begin."""
        return self._starting is not None

    def start(self) -> None:
        """Report that the job begins. Does not wait."""
        if self._ref is not None:
            starting = threading.Thread(target=self._say, args=("start", DEADLINE_S), daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads can be started; `end` still tries to report
                starting.start()
                self._starting = starting

    def end(self, exit_status: int) -> None:
        """Report how the job ended. Takes at most DEADLINE_S."""
        if self._ref is None:
            return
        until_s = elapsed_s() + DEADLINE_S
        if self._starting is not None:
            self._starting.join(DEADLINE_S)  # the service must hear them in their order
        self._say(str(exit_status), until_s - elapsed_s())

    def _say(self, word: str, timeout_s: float) -> None:
        assert self._ref is not None  # noqa: S101  # the callers check it
        try:
            address, _, query = read_address(self._ref, "ping", insecure=self._insecure).partition("?")
            _send(f"{address.rstrip('/')}/{word}" + (f"?{query}" if query else ""), None, timeout_s)
        except _FAILURES as error:
            warn("ping_failed", _why(error), job=one_line(self._job), ping=word)
