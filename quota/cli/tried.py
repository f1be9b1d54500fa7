"""What `quota costs --try` says: which method a request is, what it costs, and what an answer to it means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quota.clients.gate import MAX_PEEK_BYTES
from quota.clients.upstream import Reading, upstream_of
from quota.common.clock import NEVER, host_clock, moment
from quota.common.members import members
from quota.common.named import read_named
from quota.common.text import many, nearest, one_line, show
from quota.errors import ConfigError, UsageError
from quota.terms.api import VERBS
from quota.terms.costs import CostBook, Price
from quota.terms.hosts import Hosts


class Tried(NamedTuple):
    """A request as the cost book sees it. `method` is None where no route takes it, and the price is the book's default
    then. `reading` is what an answer means that came at `at_ms`."""

    request: str
    metered: bool
    method: str | None
    price: Price
    at_ms: int
    reading: Reading | None = None

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        said = self.reading
        return {
            **members(self, "request metered method"),
            "units": self.price.units,
            "parts": [part._asdict() for part in self.price.parts],
            "answer": None
            if said is None
            else {
                "kind": None if said.error is None else said.error.kind,
                "message": None if said.error is None else said.error.message,
                "closes": [members(one, "bucket until") for one in said.closes],
                "remaining": [
                    {**members(one, "bucket remaining_units limit_units"), "resets_at": members(one, "reset")["reset"]}
                    for one in said.levels
                ],
                "units": said.used_units,
                "free": said.free,
            },
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        if not self.metered:
            yield f"{self.request} is not charged: its host is not one of the book's"
            return
        cost = " and ".join(f"{many(part.units, 'unit')} of {part.bucket}" for part in self.price.parts) or "free"
        if self.method is None:
            yield f"{self.request}: no route takes it; it costs the default, {cost}"
        else:
            yield f"{self.request}: {self.method}, {cost}"
        if self.reading is not None:
            yield from self._meaning(self.reading)

    def _meaning(self, said: Reading) -> Iterator[str]:
        for closing in said.closes:
            until = "its own reset" if closing.until_ms is None else self._at(closing.until_ms)
            yield f"closes {closing.bucket} until {until}: {closing.why}"
        if said.error is not None and not said.closes:
            remedy = f"; {said.error.remedy}" if said.error.remedy else ""
            yield f"{said.error.kind}: {said.error.message}{remedy}"
        for level in said.levels:
            limit = "" if level.limit_units is None else f" of {level.limit_units:,}"
            until = "" if level.reset_ms is None else f" until {self._at(level.reset_ms)}"
            yield f"{level.remaining_units:,}{limit} remain in {level.bucket}{until}"
        if said.used_units is not None:
            yield f"it cost {many(said.used_units, 'unit')}"
        if said.free:
            yield "upstream does not count it: its charge is refunded"
        if said.error is None and not said.changes_something:
            yield "the answer changes nothing"

    def _at(self, at_ms: int) -> str:
        return "it is reopened" if at_ms == NEVER else moment(at_ms, self.at_ms)


def try_request(book: CostBook, request: str, answer: str | None) -> Tried:
    """What a request, `GET https://...`, is by a book, and what the answer in a file means.

    Raises UsageError for what is no request, ConfigError for a file that is no answer.
    """
    verb, _, url = request.strip().rpartition(" ")
    verb = verb.strip().upper() or "GET"
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isprintable():
        raise UsageError(f'{show(request)} is no request; write for example "GET https://api.example.com/users"')
    if verb not in VERBS:
        raise UsageError(f"{show(verb)} is no verb; {nearest(verb, VERBS)}")
    request, at_ms = f"{verb} {url}", host_clock()
    metered = not book.hosts or Hosts(book.hosts).serve(url)
    method = upstream_of(book).method(verb, url)
    price = book.default_price(verb) if method is None else book.price(method)
    tried = Tried(request, metered, method, price, at_ms)
    if answer is None:
        return tried
    status, headers, body, _ = read_answer(answer)
    return tried._replace(
        reading=upstream_of(book).read(status, headers, body, method=method or f"{verb} **", at_ms=at_ms)
    )


class Recorded(NamedTuple):
    """An answer in a file, with the `request` that it answers where the file has one."""

    status: int
    headers: dict[str, str]
    body: bytes
    request: str


def read_answer(path: str) -> Recorded:
    """The answer in a file, `{"status": 403, "headers": {...}, "body": ...}`, whose body is text, or JSON as it stands.
    Raises ConfigError for another file."""
    source = one_line(path)
    try:
        said = json.loads(read_named(path, 1 << 20))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # not JSON
        said = None
    said = said if isinstance(said, dict) else {}
    status, headers, body = said.get("status"), said.get("headers", {}), said.get("body", "")
    if type(status) is not int or not 100 <= status <= 599 or not isinstance(headers, dict):
        raise ConfigError(f'{source}: not an answer; write {{"status": 403, "headers": {{...}}, "body": ...}}')
    text = body if isinstance(body, str) else json.dumps(body)
    # As much of it as the transports look at.
    peeked = text.encode(errors="replace")[:MAX_PEEK_BYTES]
    request = said.get("request")
    return Recorded(
        status,
        {name: str(value) for name, value in headers.items()},
        peeked,
        request if isinstance(request, str) else "",
    )
