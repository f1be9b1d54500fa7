"""What one HTTP attempt does to a budget, whatever client sends it.

    attempt = meter.attempt("videos.list", "GET")     # charged; if it raises Refused, send nothing
    ...                                               # send it
    attempt.never_left()                              # only if no byte left this machine
    attempt.answered(response.status, response.body)  # every answer; an error may close a bucket for everybody

A timeout, a broken connection and an error answer stay charged: the attempt may have arrived, and upstream charges for
failed calls too.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quota.budget import Budget, account_of
from quota.clients.upstream_errors import UpstreamError, classify
from quota.common.clock import NEVER, rfc3339
from quota.common.hosts import is_loopback
from quota.common.log import line, warn
from quota.common.text import show, spaced
from quota.deciding.checklist import charge_units
from quota.deciding.run_limit import RunLimit
from quota.errors import QuotaError, Refused, UsageError
from quota.ledger.contract import MAX_CHARGES, Exhaustion
from quota.ledger.parts import notes_in
from quota.terms.arguments import text, texts
from quota.terms.attribution import current_attribution, machine_name
from quota.terms.costs import Part
from quota.terms.limits import Calendar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quota.budget import Call
    from quota.decision import Decision
    from quota.terms.costs import CostBook

_log = logging.getLogger("quota")

MAX_NAME_LENGTH = 64
"""The longest method name that a charge can store."""


class Meter:
    """Charges attempts to one budget, at most `max_units` in all, if given. Safe to share between threads."""

    def __init__(self, budget: Budget, max_units: int | None = None) -> None:
        if not isinstance(budget, Budget):
            raise UsageError(f"a client that is not awaited needs a budget of quota.open(), not {show(budget)}")
        self.budget = budget
        self._run_limit = None if max_units is None else RunLimit(max_units)

    def attempt(self, method: str, verb: str) -> Attempt:
        """Charge one attempt of `method`, which the caller is about to send with this HTTP verb. A method that the book
        does not know costs the book's default for the verb.

        Raises Refused when the budget has no room for it, and UsageError for what can never be admitted. After any
        error nothing was charged and nothing may be sent.
        """
        return self.attempted(self._decide([self.call(method, verb)])[0])

    def _decide(self, calls: Sequence[Call]) -> list[Decision]:
        run_limit = self._run_limit
        if run_limit is None:
            return self.budget._decide(calls, commit=True)
        checklist, _, _ = self.budget._price(calls, None, None, commit=False)
        if not run_limit.take(checklist.units):
            return [run_limit.refusal(account_of(self.budget), of.method, checklist.units) for of in checklist.calls]
        admitted = False
        try:
            decisions = self.budget._decide(calls, commit=True)
            admitted = decisions[0].admitted
        finally:
            if not admitted:
                run_limit.give_back(checklist.units)
        return decisions

    def call(self, method: str, verb: str) -> Call:
        """What is charged for an attempt."""
        book = self.budget.book
        name, verb = book.canonical(text(method, "method")), text(verb, "verb")
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            # The request is about to leave, so charge it under a shortened name.
            name = spaced(name, "?")[-MAX_NAME_LENGTH:]
        if name in book.methods:
            return name, None, None
        price = book.default_price(verb)
        _warn_default_price(book.name, name, price.units)
        return name, None, tuple([Part(bucket, charge_units(units)) for bucket, units in price.parts])

    def attempted(self, decision: Decision) -> Attempt:
        """The attempt that was decided about. Raises Refused."""
        if not decision.admitted:
            raise Refused(decision)
        return Attempt(self.budget, decision)

    def attempts(self, calls: tuple[str, str] | Iterable[tuple[str, str]]) -> list[Attempt]:
        """Charge several (method, verb) that travel in one request, or a lone pair: all of them, or none.

        They are charged in one step. Only of more than 100, or of so many that their charges are more (one for each
        bucket of a call), those before a refusal are refunded.
        """
        pairs: Iterable[Any] = [calls] if isinstance(calls, tuple) and calls and isinstance(calls[0], str) else calls
        named = [self.call(method, verb) for method, verb in pairs]
        charged: list[Attempt] = []
        at_once = MAX_CHARGES // self.budget.book.most_parts
        try:
            for first in range(0, len(named), at_once):
                decisions = self._decide(named[first : first + at_once])
                charged += map(self.attempted, decisions)
        except BaseException:
            for attempt in charged:
                attempt.never_left()
            raise
        return charged


_warned: set[tuple[str, str]] = set()


def _warn_default_price(book: str, method: str, units: int) -> None:
    if (book, method) not in _warned and len(_warned) < 1_000:
        _warned.add((book, method))
        warn("default_price book=%s method=%s units=%d: the cost book has no such method; add it", book, method, units)


class Attempt:
    """One charged attempt. Call `never_left` or `answered` once; later calls have no effect."""

    def __init__(self, budget: Budget, decision: Decision) -> None:
        self.decision = decision
        self._budget = budget
        self._job, region = current_attribution()
        self._closed = False
        if _log.isEnabledFor(logging.DEBUG):
            charged = line(
                "attempt_charged",
                job=self._job,
                region=region,
                method=decision.method,
                units=decision.cost_units,
                charge=decision.id,
                remaining=decision.remaining_units,
            )
            _log.debug("%s", charged)

    def never_left(self) -> None:
        """Refund the charge, because no byte of the attempt left this machine. Never raises a QuotaError.

        If the ledger fails, the charge stands.
        """
        if self._closed or self.decision.id is None:
            return
        self._closed = True
        try:
            self._budget.refund(self.decision.id)
        except QuotaError as error:
            _log.warning("refund_failed charge=%s method=%s: %s", self.decision.id, self.decision.method, error)

    def answered(self, status: int, body: bytes) -> UpstreamError | None:
        """Handle upstream's answer. Returns the meaning of an error (`status` >= 400), else None.

        An exhausted pool is recorded in the ledger for all processes. Never raises a QuotaError: the caller is about to
        report upstream's own error.
        """
        if self._closed:
            return None
        self._closed = True
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", line("attempt_answered", charge=self.decision.id, status=status, bytes=len(body)))
        if status < 400:
            return None
        error = classify(status, body, method=self.decision.method, book=self._book())
        if error.bucket is not None:
            try:
                self._close(error, error.bucket)
            except QuotaError as trouble:
                _log.warning("exhaustion_not_recorded bucket=%s: %s", error.bucket, trouble)
        elif error.kind == "config":
            # The caller reports it as an error; this only logs it.
            _log.info(
                "upstream_config credential=%s method=%s reason=%s: %s; %s",
                self._budget.credential,
                self.decision.method,
                error.reason,
                error.message,
                error.remedy,
            )
        return error

    def _close(self, error: UpstreamError, bucket: str) -> None:
        charged_ms = _charged_at_ms(self.decision)
        until_ms = NEVER if error.kind == "project_blocked" else self._reset_after(bucket, charged_ms)
        ledger = self._budget.ledger
        if until_ms <= ledger.now_ms():
            # The answer is about a period that is over: it must not close the current one.
            _log.info("exhaustion_past bucket=%s until=%s", bucket, rfc3339(until_ms))
            return
        stands = notes_in(ledger).exhaust(
            self._budget.project, Exhaustion(bucket, charged_ms, until_ms, error.message, reporter(self._job))
        )
        if stands.reopened_ms:
            # The call left before somebody reopened the bucket.
            _log.info("exhaustion_before_reopening bucket=%s charge=%s", bucket, self.decision.id)
            return
        _log.warning(
            "bucket_closed project=%s bucket=%s until=%s method=%s charge=%s: %s",
            self._budget.project,
            bucket,
            "reopened" if stands.until_ms == NEVER else rfc3339(stands.until_ms),
            self.decision.method,
            self.decision.id,
            error.message,
        )

    def _book(self) -> CostBook:
        """The cost book with the prices at the time of the charge."""
        return self._budget.book.at(_charged_at_ms(self.decision))

    def _reset_after(self, bucket: str, at_ms: int) -> int:
        """When upstream resets `bucket`. A pool that is not a bucket of the book follows the main bucket."""
        book = self._budget.book
        window = book.buckets.get(bucket, book.main_bucket).window
        return window.edges(at_ms)[1] if isinstance(window, Calendar) else at_ms + window.window_ms


def reporter(job: str) -> str:
    """Who reports an exhaustion: `host:pid job`."""
    return f"{machine_name()}:{os.getpid()} {job}".rstrip()


def _charged_at_ms(decision: Decision) -> int:
    """The time of the charge, read from its id `ms-seq`; for any other id, the time of the decision."""
    ms = (decision.id or "").partition("-")[0]
    return int(ms) if ms.isascii() and ms.isdigit() else decision.decided_at_ms


class Hosts:
    """The metered hosts: names such as `api.example.com`, which means any port, or `127.0.0.1:8765`.

    The names of loopback (`localhost`, `127.0.0.1`, `::1`) are one host, and so are `bücher.example` and the
    `xn--bcher-kva.example` that clients make of it, and the ways to write an address (`10.1`, `0xa.1`, `10.0.0.1`).
    Raises UsageError for an invalid host name.
    """

    def __init__(self, names: str | Iterable[str]) -> None:
        self._known = {_split_host(name) for name in texts(names, "host")}

    def __contains__(self, host_port: tuple[str, int | None]) -> bool:
        try:
            host, port = _host(host_port[0]), host_port[1]
        except ValueError:  # no name that a request could go to, as upstream may redirect to one
            return False
        return (host, port) in self._known or (host, None) in self._known


def _host(name: str) -> str:
    name = name.strip("[]").rstrip(".").lower()
    if name.rpartition(".")[2][:1].isdigit():  # no name's last part begins so: the system reads all of it as an address
        with suppress(OSError, ValueError):
            name = socket.inet_ntoa(socket.inet_aton(name))
    if is_loopback(name):
        return "localhost"
    if ":" in name:
        with suppress(ValueError):
            address = ip_address(name)
            return str(getattr(address, "ipv4_mapped", None) or address)
    return name if name.isascii() else _in_ascii(name)


def _in_ascii(name: str) -> str:
    """A name as clients write it into URLs. They encode it with `idna`, which comes with each of them."""
    try:
        from idna import encode
    except ImportError:
        return name.encode("idna").decode()
    return encode(name, uts46=True).decode().rstrip(".")


def _split_host(name: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(f"//{name}")
        host, port = _host(parts.hostname or ""), parts.port
    except ValueError:  # a port out of range, an unmatched bracket, a label that no name has
        host, port = "", None
    is_host = re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", host) is not None
    if not is_host or parts.path or parts.query or "@" in name or not name.isprintable():
        raise UsageError(f"{show(name)} is not a host; write for example 'api.example.com' or '127.0.0.1:8765'")
    return host, port
