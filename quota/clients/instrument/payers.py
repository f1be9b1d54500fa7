"""Finds whose budget pays for a request, by host and path, and makes the answer to a refused request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from quota.budget import Budget
from quota.clients.gate import HostGate, answer_to, take_paid
from quota.clients.metering import Meter
from quota.clients.upstream import upstream_of
from quota.common.hosts import default_port, is_url, url_on
from quota.common.redact import redact
from quota.common.text import listed
from quota.errors import QuotaError, Refused, UsageError
from quota.terms.api import Hosts
from quota.web.documents import Problem

MAX_CACHED_HOSTS = 10_000
"""How many hosts the cache keeps. A crawler meets more."""


class Payer:
    """Pays for requests to the hosts of a credential, by its settings. The first request calls `open_budget`."""

    def __init__(self, credential: Any, open_budget: Callable[[], Budget]) -> None:
        self.credential, self._open_budget = credential, open_budget
        self.hosts = Hosts(credential.hosts)
        self._gate: HostGate | None = None
        self._async_gate: HostGate | None = None

    def answers(self, refusal: QuotaError) -> TypeGuard[Refused]:
        """Whether the program gets an answer of 429. A call that can never fit is an error: another try does not
        help."""
        return self.credential.on_refusal == "429" and isinstance(refusal, Refused)

    def answer_to(self, refusal: QuotaError, error: Exception) -> Problem:
        """The answer of 429 to a refused request. Raises the `error` of the program's library if the program gets no
        answer."""
        if not self.answers(refusal):
            raise with_refusal(error, refusal) from refusal
        return answer_to(refusal.decision)._replace(status=429)

    def gate(self, *, awaited: bool = False) -> HostGate:
        """The gate of this process, or, if it is `awaited`, the gate of its event loops. Of threads that ask for the
        first one at the same time, each may get its own."""
        if self._gate is None:
            self._gate = HostGate(Meter(self._open_budget()), None, self.credential.hosts, sends=True)
        if awaited and self._async_gate is None:
            self._async_gate = self._gate.on_loop()
        return self._async_gate if awaited and self._async_gate is not None else self._gate

    def close(self) -> None:
        if self._async_gate is not None:
            self._async_gate.close()


REFUSAL = "_quota_refusal"
"""The attribute in which an error or an answer of 429 keeps its refusal."""


def with_refusal(error: Exception, refusal: BaseException) -> Exception:
    """The error, which keeps its refusal when it is pickled. A pool of processes replaces its `__cause__`."""
    setattr(error, REFUSAL, refusal)
    return error


class Payers:
    """Finds the payer of a request. Of several it takes the `named` payer, else the payer that knows most of the
    path."""

    def __init__(self, payers: Iterable[Payer], named: str | None = None) -> None:
        self._payers = tuple(payers)
        self._named = named
        self.knows = lru_cache(MAX_CACHED_HOSTS)(self._knows)
        """Whether a payer serves a host and port. Every request of the program calls this."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of all payers, as the configuration names them."""
        return tuple(dict.fromkeys(name for payer in self._payers for name in payer.credential.hosts))

    def adds_buckets_up(self, methods: Collection[str]) -> bool:
        """Whether a sum of the units of these methods may add several buckets up."""
        books = [payer.credential.book for payer in self._payers]
        prices = (price for book in books for method in methods for price in book.methods.get(method, ()))
        return any(len(price.parts) > 1 for price in prices)

    def _knows(self, host: str, port: int | None) -> bool:
        return any((host, port) in payer.hosts for payer in self._payers)

    def of_connection(
        self, verb: str, scheme: str, host: str, port: int | None, target: str
    ) -> tuple[Payer | None, str]:
        """The payer and the URL of a request, by its connection."""
        if is_url(target):
            parts = urlsplit(target)
            scheme, host, port = parts.scheme, parts.hostname or "", parts.port
        if not self.knows(host, port or default_port(scheme)):
            return None, ""
        url = url_on(scheme, host, port, target)
        return self.of(verb, url), url

    def of(self, verb: str, url: str) -> Payer | None:
        """The payer of a request that is about to leave; None if nobody pays, or if a layer above has paid. Raises
        UsageError if several payers fit equally well."""
        fitting = [payer for payer in self._payers if payer.hosts.serve(url)]
        if not fitting or take_paid(url):
            return None
        if len(fitting) == 1:
            return fitting[0]
        fitting = [payer for payer in fitting if payer.credential.name == self._named] or fitting
        fits = [upstream_of(payer.credential.book).fit(verb, url) for payer in fitting]
        best = [payer for payer, fit in zip(fitting, fits, strict=True) if fit == max(fits)]
        if len({payer.credential.project for payer in best}) > 1:
            names = [payer.credential.name for payer in best]
            place = redact(url.partition("?")[0])
            raise UsageError(f"{listed(names)} could all pay for {verb} {place}; name one of these credentials")
        return best[0]

    def close(self) -> None:
        """From now on nobody pays."""
        payers, self._payers = self._payers, ()
        self.knows.cache_clear()
        for payer in payers:
            payer.close()
