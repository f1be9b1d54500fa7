"""The time for an answer: its head, its body, and what a proxy says before. A silent connection has its own timeout.

Watch               the limits of one client, and the deadline of each thread's request
watch_each          watches over each attempt of a session of requests
connect_within_s    how long a request may wait for a connection
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPResponse
from socket import socket
from typing import Any

from quota.clients.answer_fields import AnswerLimits
from quota.common.clock import elapsed_s
from quota.errors import NoAnswer

CONNECT_WITHIN_S = 10.0
"""How long each address of a host has to take a connection. A firewall may drop all packets."""

SHORT_BODY_BYTES = 16_384
"""A socket takes a body of this length at once."""

POLL_S = 0.1
"""How often a waiting request checks its deadline."""


def connect_within_s(body: object, silent_s: float) -> float:
    """How long a request may wait for a connection. urllib3 sends its body, too, within that time."""
    is_short = body is None or (isinstance(body, bytes | str) and len(body) <= SHORT_BODY_BYTES)
    return min(CONNECT_WITHIN_S, silent_s) if is_short else silent_s


class Watch(threading.local):
    """The limits of one client. A waiting request calls `waiting` several times a second, with the seconds since the
    last byte; an exception from `waiting` ends the request.
    """

    def __init__(self, limits: AnswerLimits, waiting: Callable[[float], None] | None) -> None:
        self.limits = limits
        self._waiting = waiting
        self._until_s: float | None = None

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request of this thread, including its redirects. Its body may make another."""
        outer_until_s = self._until_s
        self.begin()
        try:
            yield
        finally:
            self._until_s = outer_until_s

    def begin(self) -> None:
        """From now on this thread's request has the time of an answer."""
        allowed_s = self.limits.max_answer_s
        self._until_s = math.inf if allowed_s is None else elapsed_s() + allowed_s

    def over(self, conn: Any) -> None:
        """Watch over what arrives on a connection of http.client."""
        conn.response_class = partial(_PatientResponse, watch=self)

    def left_s(self, silent_s: float = 0.0) -> float:
        """The time left for this thread's request. Raises NoAnswer when no time is left."""
        if self._waiting is not None:
            self._waiting(silent_s)
        left_s = math.inf if self._until_s is None else self._until_s - elapsed_s()
        if left_s <= 0:
            allowed = self.limits.max_answer_s
            raise NoAnswer(
                f"upstream's answer was not complete after {allowed:g} s; if this is expected, raise max_answer_s"
            )
        return left_s


class _Arriving(io.RawIOBase):
    """The bytes of an answer as they arrive. Short waits keep the deadline for a slow answer, too."""

    def __init__(self, raw: io.RawIOBase, sock: socket, watch: Watch) -> None:
        self._raw = raw
        self._sock = sock
        self._timeout_s = sock.gettimeout()
        self._watch = watch

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        began_s = elapsed_s()
        while True:
            self._sock.settimeout(min(POLL_S, self._watch.left_s(elapsed_s() - began_s)))
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                if self._timeout_s is not None and elapsed_s() - began_s >= self._timeout_s:
                    raise

    def close(self) -> None:
        with suppress(OSError):  # closed
            self._sock.settimeout(self._timeout_s)  # after a proxy's answer, TLS begins
        # The raw file keeps the socket open after the connection is closed, so close it too.
        self._raw.close()
        super().close()


class _PatientResponse(HTTPResponse):
    """An answer whose bytes arrive within a watch."""

    def __init__(self, sock: socket, *args: Any, watch: Watch, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        raw: io.RawIOBase = self.fp.detach()
        self.fp = io.BufferedReader(_Arriving(raw, sock, watch))


def watch_each(session: Any, limits: AnswerLimits, waiting: Callable[[float], None] | None) -> None:
    """Give each attempt of a session's metered adapters, and each for a token, the time of an answer."""

    def prepare(conn: Any) -> None:
        watch = Watch(limits, waiting)
        watch.begin()
        watch.over(conn)

    for adapter in session.adapters.values():
        adapter.caller.prepare = prepare
