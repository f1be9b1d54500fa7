"""Recorded answers, for `quota book`: `try` shows the meaning of an answer, `new` drafts a cost book.

A draft has no number that no answer has: it has 0 or "" there, and `quota book check` names the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quota.clients.gate import MAX_PEEK_BYTES
from quota.clients.upstream import Reading, upstream_of
from quota.common.clock import NEVER, host_clock, moment, utc
from quota.common.files import read_named
from quota.common.text import many, members, nearest, one_line, show
from quota.errors import ConfigError, UsageError
from quota.settings.toml import in_toml
from quota.terms.api import VERBS, Hosts
from quota.terms.costs import CostBook, Price

_ABOUT = re.compile(r"(?i)rate-?limit|quota")
_FIGURES = {"remaining": "remaining|left", "reset": "reset", "bucket": "resource|bucket", "limit": "-limit$|max"}
_FORMS = {
    "epoch": r"[0-9]{9,12}(\.[0-9]+)?",
    "seconds": r"[0-9]{1,8}(\.[0-9]+)?",
    "duration": r"([0-9.]+(ms|[smhd]))+",
    "rfc3339": r"[0-9]{4}-[0-9]{2}-[0-9]{2}T.*",
    "http-date": r"[A-Z][a-z]{2}, .*GMT",
}
_REFUSED = (403, 429)


class Recorded(NamedTuple):
    """An answer in a file, with its `request` if the file has that."""

    status: int
    headers: dict[str, str]
    body: bytes
    request: str


def read_answer(path: str) -> Recorded:
    """The answer in a file, `{"status": 403, "headers": {...}, "body": ...}`. The body is text or JSON. Raises
    ConfigError for any other file."""
    source = one_line(path)
    try:
        answer = json.loads(read_named(path, 1 << 20))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # not JSON
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    status, headers, body = answer.get("status"), answer.get("headers", {}), answer.get("body", "")
    if type(status) is not int or not 100 <= status <= 599 or not isinstance(headers, dict):
        raise ConfigError(f'{source}: not an answer; write {{"status": 403, "headers": {{...}}, "body": ...}}')
    text = body if isinstance(body, str) else json.dumps(body)
    request = answer.get("request")
    return Recorded(
        status,
        {name: str(value) for name, value in headers.items()},
        text.encode(errors="replace")[:MAX_PEEK_BYTES],  # as much of it as the transports look at
        request if isinstance(request, str) else "",
    )


# -- try ---------------------------------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """A request as the gate sees it. `method` is None if no route takes the request. `by_default`: the book does not
    have the method, and the price is its default. `goes_on`: it continues a call, which was charged when it began.
    `reading` is what the answer means."""

    request: str
    metered: bool
    method: str | None
    price: Price
    by_default: bool = False
    goes_on: bool = False
    reading: Reading | None = None

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        reading = self.reading
        return {
            **members(self, "request metered method"),
            "units": 0 if self.goes_on else self.price.units,
            "parts": [] if self.goes_on else [part._asdict() for part in self.price.parts],
            "answer": None
            if reading is None
            else {
                "kind": None if reading.error is None else reading.error.kind,
                "message": None if reading.error is None else reading.error.message,
                "closes": [members(closing, "bucket until") for closing in reading.closes],
                "remaining": [
                    members(level, "bucket remaining_units limit_units")
                    | {"resets_at": members(level, "reset")["reset"]}
                    for level in reading.levels
                ],
                "units": reading.used_units,
                "free": reading.free,
            },
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        if not (self.metered or self.goes_on):
            yield f"{self.request} is not charged: the cost book does not have its host"
            return
        cost = " and ".join(f"{many(part.units, 'unit')} of {part.bucket}" for part in self.price.parts) or "free"
        if self.goes_on:
            yield f"{self.request} is not charged: it continues a call that was charged when it began"
            return
        if self.method is None:
            yield f"{self.request}: no route takes it; it costs the default, {cost}"
        elif self.by_default:
            yield f"{self.request}: {self.method}, which the book does not have; it costs the default, {cost}"
        else:
            yield f"{self.request}: {self.method}, {cost}"
        if self.reading is not None:
            yield from self._meaning(self.reading)

    def _meaning(self, reading: Reading) -> Iterator[str]:
        for closing in reading.closes:
            until = "its own reset" if closing.until_ms is None else self._at(closing.until_ms)
            yield f"closes {closing.bucket} until {until}: {closing.why}"
        if reading.error is not None and not reading.closes:
            remedy = f"; {reading.error.remedy}" if reading.error.remedy else ""
            yield f"{reading.error.kind}: {reading.error.message}{remedy}"
        for level in reading.levels:
            limit = "" if level.limit_units is None else f" of {level.limit_units:,}"
            until = "" if level.reset_ms is None else f" until {self._at(level.reset_ms)}"
            yield f"{level.remaining_units:,}{limit} remain in {level.bucket}{until}"
        if reading.used_units is not None:
            yield f"it cost {many(reading.used_units, 'unit')}"
        if reading.free:
            yield "upstream does not count it: its charge is refunded"
        if reading.error is None and not reading.changes_something:
            yield "the answer changes nothing"

    def _at(self, at_ms: int) -> str:
        return "it is reopened" if at_ms == NEVER else moment(at_ms)


def try_request(book: CostBook, hosts: tuple[str, ...], request: str, answer: str | None) -> Tried:
    """The method and the price of a request, `GET https://...`, and the meaning of the answer in a file. The API of the
    book is on these hosts.

    Raises UsageError if `request` is not a request, and ConfigError if the file has no answer.
    """
    verb, _, url = request.strip().rpartition(" ")
    verb = verb.strip().upper() or "GET"
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isprintable():
        raise UsageError(f'{show(request)} is not a request; write for example "GET https://api.example.com/users"')
    if verb not in VERBS:
        raise UsageError(f"{show(verb)} is not an HTTP verb; {nearest(verb, VERBS)}")
    request, at_ms = f"{verb} {url}", host_clock()
    metered = not hosts or Hosts(hosts).serve(url)
    upstream = upstream_of(book)
    method, goes_on = upstream.method(verb, url), metered and upstream.continues(verb, url)
    by_default = method is None or book.canonical(method) not in book.methods
    price = book.default_price(verb) if method is None or by_default else book.price(method)
    tried = Tried(request, metered and not goes_on, method, price, by_default, goes_on)
    if answer is None:
        return tried
    status, headers, body, _ = read_answer(answer)
    return tried._replace(reading=upstream.read(status, headers, body, method=method or f"{verb} **", at_ms=at_ms))


# -- new ---------------------------------------------------------------------------------------------------------------


def draft(name: str, paths: Iterable[str]) -> str:
    """The text of a cost book. Raises ConfigError for a file that has no answer."""
    answers = [read_answer(path) for path in paths]
    figures = _figures(answers)
    hosts = sorted({_host(answer.request) for answer in answers} - {""})
    limit = next(
        (answer.headers[figures["limit"]] for answer in answers if figures.get("limit", "") in answer.headers), ""
    )
    units = f"{int(limit):_}" if re.fullmatch("[0-9]{1,15}", limit) else "0"
    lines = [
        "# What the API counts, and for whom; the page of each number; what differs by plan; what is missing.",
        "",
        f"api = {in_toml(name)}",
        f"hosts = [{', '.join(map(in_toml, hosts))}]",
        'source = ""  # the vendor\'s page',
        f"read_on = {utc(host_clock()).date()}",
        "",
        "[buckets.requests]",
        f"quota = {units}" + ("  # from an answer; compare it with the vendor's page" if limit else ""),
        'resets = ""  # "1h", or { calendar = "day", zone = "UTC" }',
        "",
        "[default]",
        "get = 1",
        "other = 1",
        "",
        "[methods]",
        "read = 1",
        "write = 1",
        "",
        "[routes]",
        '"GET /**" = "read"',
        '"**" = "write"',
        "",
        "[answers]",
        *(f"{what} = {_field(what, header, answers)}" for what, header in figures.items() if "remaining" in figures),
        *_closed(answers, timed="reset" in figures),
    ]
    return "\n".join(lines) + "\n"


def _host(request: str) -> str:
    """The host of a recorded request, without a user and password; empty without a request."""
    with suppress(ValueError):
        return urlsplit(request.rpartition(" ")[2]).netloc.rpartition("@")[2]
    return ""


def _figures(answers: list[Recorded]) -> dict[str, str]:
    """The header of each figure."""
    figures: dict[str, str] = {}
    names = dict.fromkeys(header for answer in answers for header in answer.headers if _ABOUT.search(header))
    for header in names:
        what = next((what for what, words in _FIGURES.items() if re.search(words, header, re.IGNORECASE)), None)
        if what is not None:
            figures.setdefault(what, header)
    return {what: figures[what] for what in ("remaining", "limit", "reset", "bucket") if what in figures}


def _field(what: str, header: str, answers: list[Recorded]) -> str:
    if what != "reset":
        return in_toml(header)
    value = next(answer.headers[header] for answer in answers if header in answer.headers)
    form = next((form for form, pattern in _FORMS.items() if re.fullmatch(pattern, value.strip())), "")
    return f"{{ header = {in_toml(header)}, as = {in_toml(form)} }}"


def _closed(answers: list[Recorded], *, timed: bool) -> list[str]:
    """A rule for each status that refuses. It lasts a minute if no answer has a time."""
    statuses = dict.fromkeys(answer.status for answer in answers if answer.status in _REFUSED)
    lasts = "" if timed else ', lasts = "60s"'
    rules = [f"    {{ status = {status}{lasts} }},  # narrow it by `body` or `json`" for status in statuses]
    return ["closed = [", *rules, "]"] if rules else []
