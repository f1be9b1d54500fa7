"""What one HTTP attempt does to a budget, for every client.

    attempt = meter.attempt("videos.list", "GET")     # charged; if it raises Refused, send nothing
    ...                                               # send it
    attempt.never_left()                              # only if no byte left this machine
    attempt.answered(status, body, headers)           # every answer, whole; it may close a bucket for everybody

A timeout, a broken connection and an error answer stay charged: the attempt may have arrived, and upstream charges for
failed calls too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from quota.budget import MAX_CHARGES, Budget, Call, project_of
from quota.clients.answer_fields import Headers, Usage
from quota.clients.upstream import NOTHING, Closing, Meaning, upstream_of
from quota.common.clock import NEVER, rfc3339
from quota.common.log import line, warn
from quota.common.redact import redact
from quota.common.text import shorten, show, spaced
from quota.deciding.levels import charged_ms
from quota.deciding.run_limit import RunLimit
from quota.deciding.spend import Settlement
from quota.decision import Decision
from quota.errors import QuotaError, Refused, UsageError
from quota.rules.calls import charge_units
from quota.rules.evidence import Heard
from quota.terms.api import NO_BODY, RequestBody
from quota.terms.arguments import current_attribution, machine_name, text
from quota.terms.limits import leaves_at

_log = logging.getLogger("quota")

MAX_NAME_LENGTH = 64
"""The longest method name that a charge can store."""


class Meter:
    """Charges attempts to one budget, at most `max_units` in all. Safe to share between threads."""

    def __init__(self, budget: Budget, max_units: int | None = None) -> None:
        if not isinstance(budget, Budget):
            raise UsageError(f"a blocking client needs a budget of quota.open(), not {show(budget)}")
        self.budget = budget
        self.run_limit = None if max_units is None else RunLimit(max_units)

    def attempt(self, method: str, verb: str, body: RequestBody = NO_BODY) -> Attempt:
        """Charge one attempt of `method`, which the caller is about to send with this HTTP verb and body. A method that
        the book does not know costs the book's default for the verb.

        Raises Refused when the budget has no room, and UsageError for a call that can never fit. After an error nothing
        is charged, and the caller must send nothing.
        """
        call = self.call(method, verb, body)
        return Attempt(self, self.decide([call])[0], call)

    def decide(self, calls: Sequence[Call]) -> list[Decision]:
        """Charge these calls, all or none, unless they exceed what the run may spend."""
        budget, run_limit = self.budget, self.run_limit
        if run_limit is None:
            return budget._decide(calls, commit=True)
        checklist = budget._price(calls, None, None, commit=True).checklist
        if not run_limit.take(checklist.units):
            at_ms = project_of(budget).wall()
            names = [call.method for call in checklist.calls]
            units, who = checklist.units, (budget.credential, budget.project)
            refused = [run_limit.refusal(*who, name, units, at_ms) for name in names]
            budget.listener.decided(refused[0])
            self.counts_refused(checklist.method, len(names))
            return refused
        admitted = False
        try:
            decisions = budget._decide(calls, commit=True)
            admitted = decisions[0].admitted
        finally:
            if not admitted:
                run_limit.give_back(checklist.units)
        return decisions

    def call(self, method: str, verb: str, body: RequestBody = NO_BODY) -> Call:
        """The call to charge for an attempt with this body; its units are an upper bound if the price is reserved."""
        book = self.budget.book
        name, verb = book.canonical(text(method, "method")), text(verb, "verb")
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            # The request is about to leave, so shorten its name instead of refusing it.
            name = spaced(name, "?")[-MAX_NAME_LENGTH:]
        if name in book.methods:
            price, _ = book.price_at(name, project_of(self.budget).wall())
            if not price.reserved:
                return Call(name)
        else:
            price = book.default_price(verb)
            detail = "the cost book has no such method; add it"
            _warn_once("default_price", detail, book.name, name, method=name, units=price.units)

        def unread() -> None:
            detail = (
                "the request is a stream, packed, larger than 16 MB, or has no number there, so the default is reserved"
            )
            _warn_once("reserve_unread", detail, book.name, name, method=name)

        parts = [part._replace(units=charge_units(part.units)) for part in price.bound(body, unread).parts]
        return Call(name, parts=tuple(parts))

    def counts_refused(self, method: str, calls: int = 1) -> None:
        """Count calls that were refused, and not by the budget."""
        self.budget.tally(self.budget.book.canonical(method), 0, 0, calls)

    def attempts(self, calls: Iterable[tuple[str, str]]) -> list[Attempt]:
        """Charge several (method, verb) that travel in one request: all of them, or none.

        One step makes up to 100 charges; a call makes one for each of its buckets. If a later step is refused, the
        earlier steps are refunded.
        """
        named = [self.call(method, verb) for method, verb in calls]
        charged: list[Attempt] = []
        at_once = MAX_CHARGES // self.budget.book.most_parts
        try:
            for first in range(0, len(named), at_once):
                part = named[first : first + at_once]
                charged += map(partial(Attempt, self), self.decide(part), part)
        except BaseException:
            for attempt in charged:
                attempt.never_left()
            raise
        return charged


def is_reserved(call: Call) -> bool:
    """Whether the units of a call are an upper bound."""
    return bool(call.parts and call.parts[0].reserve)


_warned: set[tuple[str, str, str]] = set()


def _warn_once(event: str, detail: str, book: str, name: str, **fields: object) -> None:
    if (event, book, name) not in _warned and len(_warned) < 1_000:
        _warned.add((event, book, name))
        warn(event, detail, book=book, **fields)


class Attempt:
    """One charged attempt of a call. Call `never_left` or `answered` once; later calls have no effect. Raises Refused
    if the decision is no."""

    def __init__(self, meter: Meter, decision: Decision, call: Call) -> None:
        if not decision.admitted:
            raise Refused(decision)
        budget = meter.budget
        self.decision = decision
        self._budget, self._run_limit = budget, meter.run_limit
        self._settlement = Settlement(budget.settle, decision) if is_reserved(call) else None
        self._job, region = current_attribution(budget.listener.of_run)
        self._is_over = self._succeeded = self.refunded = False
        self._unsettled: Sequence[Heard] = ()  # what its answer said, until the call is settled
        self._clock = project_of(budget).wall
        self._ahead_ms = decision.decided_at_ms - self._clock()
        if _log.isEnabledFor(logging.DEBUG):
            spent = {"method": decision.method, "units": decision.cost_units, "charge": decision.id}
            who = {"job": self._job, "region": region}
            _log.debug("%s", line("attempt_charged", **who, **spent, remaining=decision.remaining_units))

    def never_left(self) -> None:
        """Refund the charge, because no byte of the attempt left this machine. Never raises a QuotaError.

        If the ledger fails, the charge stands.
        """
        if self._is_over or self.decision.id is None:
            return
        self._is_over = True
        self._refund(self.decision.id)

    def _refund(self, charge_id: str) -> None:
        try:
            self._budget.refund(charge_id)
            self.refunded = True
        except QuotaError as error:
            warn("refund_failed", error, charge=charge_id, method=self.decision.method)
        else:
            self._returned(self.decision.cost_units)

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether `answered` needs the body of this answer; else b"" will do."""
        return upstream_of(self._budget.book).reads_body(status, headers)

    def answered(self, status: int, body: bytes, headers: Headers = (), *, whole: bool = True) -> None:
        """Handle upstream's answer.

        A body makes a call free only if it arrived `whole`. Other answers may still close a bucket. The body that the
        caller reads settles the call through `usage`.

        The ledger records a closed bucket for all processes. Never raises a QuotaError: the caller is about to report
        upstream's own error.
        """
        self.follow(self.meaning(status, body, headers, whole=whole))

    def meaning(self, status: int, body: bytes, headers: Headers, *, whole: bool) -> Meaning:
        """What the answer means. It does not ask the ledger; `follow` acts on the meaning."""
        if self._is_over:
            return NOTHING
        self._is_over, self._succeeded = True, 200 <= status < 300
        if status == 206:  # a part of an answer, which shows no usage of the whole
            whole, self._settlement = False, None
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", line("attempt_answered", charge=self.decision.id, status=status, bytes=len(body)))
        # The ledger's clock: its time of the decision, plus the time since then on this machine.
        at_ms = self._clock() + self._ahead_ms
        book = self._budget.book.at(charged_ms(self.decision))
        meaning = upstream_of(book).read(status, headers, body, method=self.decision.method, at_ms=at_ms)
        for header, value in meaning.unread.items():
            shown = shorten(redact(value), 60)
            detail = "it is of no bucket or window of the book, or no possible number or time; it changes nothing"
            _warn_once("header_unread", detail, book.name, header, header=header, value=shown)
        meaning = meaning._replace(free=meaning.free and (whole or book.answers.frees(status)))
        if not meaning.levels:
            return meaning
        return meaning.with_evidence(self._budget.levels.news(self.decision, meaning.levels, at_ms))

    def follow(self, meaning: Meaning) -> None:
        """Act on an answer: close buckets, refund a free call, count what others used. Never raises a QuotaError."""
        for closing in meaning.closes:
            try:
                self._close(closing, is_pause=meaning.is_pause)
            except QuotaError as trouble:
                warn("exhaustion_not_recorded", trouble, bucket=closing.bucket)
        if meaning.free and self.decision.id is not None:
            self._settlement = None
            self._refund(self.decision.id)
        # After the correction of this call: what it used beyond its charge would count as others' too.
        if meaning.heard and self._settles and all(each.level.remaining_units > 0 for each in meaning.heard):
            self._unsettled = meaning.heard
            self._observe(self._budget.levels.kept(meaning.heard, self._clock() + self._ahead_ms))
        else:
            self._observe(meaning.heard)
        error = meaning.error
        if error is not None and error.bucket is not None:
            with suppress(QuotaError):
                self._budget.listener.exhausted(self.decision)
        if error is not None and error.kind == "config":
            # The caller reports it as an error; this only logs it.
            named = {"credential": self._budget.credential, "method": self.decision.method, "reason": error.reason}
            _log.info("%s: %s", line("upstream_config", **named), f"{error.message}; {error.remedy}")

    @property
    def _settles(self) -> bool:
        """Whether the body of a good answer will settle the call, as far as former answers show."""
        reads = self._settlement is not None and self._budget.book.answers.units is not None
        return reads and self._succeeded and self.decision.method not in self._budget.levels.without_usage

    def usage(self, headers: Mapping[str, str], *, framed: bool = False) -> Usage | None:
        """Finds the call's usage while the caller reads the body; None if the body settles nothing. `framed`: the
        protocol itself marks the end of the body."""
        used = self._budget.book.answers.units
        if self._settlement is None or used is None:
            return None
        return Usage(used, headers, framed=framed, missing=self._note_unread)

    def _note_unread(self, why: str) -> None:
        """Note that a whole answer lacks the call's usage, or has none that counts. An error needs none."""
        if self._succeeded:
            method = self.decision.method
            self._budget.levels.without_usage.add(method)
            _warn_once("usage_unread", why, self._budget.book.name, method, method=method)

    def settle_by(self, headers: Mapping[str, str], body: bytes, unpacking: Any = None) -> None:
        """Settle the charge by the whole body of the answer, if the body has the usage. `unpacking` is for `Usage`."""
        if (usage := self.usage(headers)) is not None:
            self.settle(usage.feed(body))
            self.settle(usage.end(unpacking))

    def settle(self, used_units: int | None) -> None:
        """Settle the reserved units to the usage, once. None leaves the bound. Never raises a QuotaError; after an
        error the bound stands until this machine hands the usage over."""
        if used_units is None or self._settlement is None:
            return
        settlement, self._settlement = self._settlement, None
        try:
            settlement.settle(used_units)
        except QuotaError as error:
            warn("settle_failed", error, charge=self.decision.id, method=self.decision.method)
        else:
            self._returned(self.decision.cost_units - used_units)
        self._observe(self._unsettled)

    def _observe(self, heard: Sequence[Heard]) -> None:
        try:
            if heard:
                self._budget.levels.observe(heard)
        except QuotaError as trouble:
            warn("level_not_counted", trouble, bucket=heard[0].level.bucket)

    def _returned(self, returned_units: int) -> None:
        """Give the units back to the run. They hid as many units of others, so compare once more what was heard since
        this charge."""
        if self._run_limit is not None:
            self._run_limit.give_back(returned_units)
        if returned_units > 0:
            since_ms, now_ms = self.decision.decided_at_ms, self._clock() + self._ahead_ms
            self._observe(self._budget.levels.news_since(since_ms, now_ms))

    def _close(self, closing: Closing, *, is_pause: bool) -> None:
        bucket, until_ms, why = closing
        budget, decision = self._budget, self.decision
        since_ms, book = charged_ms(decision), budget.book
        if until_ms is None:  # a pool outside the book resets with the main bucket
            until_ms = leaves_at(book.buckets.get(bucket, book.main_bucket).window, since_ms)
        if until_ms <= self._clock() + self._ahead_ms:
            # The answer is about a past period: it must not close the current one.
            _log.info("%s", line("exhaustion_past", bucket=bucket, until=rfc3339(until_ms)))
            return
        reporter = f"{machine_name()}:{os.getpid()} {self._job}".rstrip()
        stands = budget.exhaust(bucket, since_ms, until_ms, why, reporter, is_pause=is_pause)
        if stands.reopened_ms:
            # The call left before somebody reopened the bucket.
            _log.info("%s", line("exhaustion_before_reopening", bucket=bucket, charge=decision.id))
            return
        until = "reopened" if stands.until_ms == NEVER else rfc3339(stands.until_ms)
        named = {"project": budget.project, "bucket": bucket, "until": until}
        warn("bucket_closed", why, **named, method=decision.method, charge=decision.id)
