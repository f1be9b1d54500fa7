"""Shared by the transports: which requests are charged, and as what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quota.arguments import text, texts
from quota.clients.metering import Attempt, Hosts, Meter
from quota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quota.budget import Budget

MethodOf = str | Callable[[str, str], str]
"""An API method's name, or a function that gives it for (verb, url), for example ("GET", "https://...")."""

MAX_PEEK_BYTES = 64 * 1024
"""How much of an error body is read to classify it. The client still gets all of it."""


class HostGate:
    def __init__(self, budget: Budget, method: MethodOf, hosts: str | Iterable[str]) -> None:
        if not callable(method):
            method = text(method, "method")
        names = texts(hosts, "host")
        if not names:
            raise UsageError("no host is given, so nothing would be charged; give the API's host")
        self._meter = Meter(budget)
        self._method = method
        self._hosts = Hosts(names)

    def charge(self, verb: str, url: str) -> Attempt | None:
        """The charged attempt; None for a host that is not metered. Raises Refused."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if (parts.hostname or "", port) not in self._hosts:
            return None
        method = self._method if isinstance(self._method, str) else self._method(verb, url)
        return self._meter.attempt(method, verb)
