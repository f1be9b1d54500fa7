"""What a cost book says of its API beside the prices: where it is, which request is which method, what a request may
cost where that is known only after the call, and what an answer tells. Pure.

Hosts          the hosts of the API, as people write them and as clients spell them
Route          the requests that are one method
RequestBody    what is known of a request's body
Reserve        the most that the request may cost: until its price is known, that is charged
Field          where an answer has a figure: in a header, or in its JSON
Figure         a part of what a call used; Used: the sum of several
Match          the answers that a rule is about
ClosedRule     answers by which upstream closes a bucket
KeyPlace       where the API wants its key
LevelRule      where an answer says what remains of a bucket
AnswerRules    all of them; `quota.clients.upstream` reads answers by them
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from math import ceil, inf
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from quota.common.hosts import MAX_KNOWN, default_port, is_ambiguous, is_loopback, plain_path, readings_of
from quota.common.text import show
from quota.errors import UsageError
from quota.terms.arguments import texts

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Form = Literal["epoch", "seconds", "duration", "http-date", "rfc3339"]
"""How a time is written: seconds since 1970, seconds from now, `6m0s` or `40591s` from now, or a date. An answer that
writes it in another of these ways is read, too."""

Pointer = tuple[str, ...]
"""A place in a JSON document: `/errors/0/code` (RFC 6901) as its parts."""


def value_at(document: object, pointer: Pointer) -> object:
    """What stands at a place in a JSON document; None where nothing does."""
    value = document
    for part in pointer:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,6}", part, re.ASCII):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


# -- where it is -------------------------------------------------------------------------------------------------------


class Hosts:
    """The metered hosts: names such as `api.example.com`, which means any port, or `127.0.0.1:8765`. Where a host has
    several APIs, a name goes on with the beginning of the path: `www.googleapis.com/calendar/v3`.

    The names of loopback (`localhost`, `127.0.0.1`, `::1`) are one host, and so are `bücher.example` and the
    `xn--bcher-kva.example` that clients make of it, and the ways to write an address (`10.1`, `0xa.1`, `10.0.0.1`).
    Raises UsageError for an invalid host name.
    """

    def __init__(self, names: str | Iterable[str]) -> None:
        self._paths_of: dict[tuple[str, int | None], list[str]] = {}
        for name in texts(names, "host"):
            host, port, path = _split_host(name)
            self._paths_of.setdefault((host, port), []).append(path)

    def __contains__(self, host_port: tuple[str, int | None]) -> bool:
        """Whether anything of a host is meant."""
        return bool(self._paths(*host_port))

    def serve(self, url: str) -> bool:
        """Whether a URL is on one of them. Raises ValueError for a port that is none."""
        parts = urlsplit(url)
        port = parts.port or default_port(parts.scheme)
        paths = self._paths(parts.hostname or "", port)
        if not paths or "" in paths:
            return bool(paths)
        read = [path.lower() for path in readings_of(parts.path)]
        return any(path == begins or path.startswith(f"{begins}/") for begins in paths for path in read)

    def _paths(self, host: str, port: int | None) -> list[str]:
        """What the paths begin with that are meant of a host: "" for all."""
        try:
            host = _host(host)
        except ValueError:  # no name that a request could go to, as upstream may redirect to one
            return []
        of_any_port = self._paths_of.get((host, None), ()) if port is not None else ()
        return [*self._paths_of.get((host, port), ()), *of_any_port]


@lru_cache(MAX_KNOWN)
def _host(name: str) -> str:
    name = name.strip("[]").rstrip(".").lower()
    if name.rpartition(".")[2][:1].isdigit():  # no name's last part begins so: the system reads all of it as an address
        import socket  # late: few hosts are addresses

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


def _split_host(name: str) -> tuple[str, int | None, str]:
    try:
        parts = urlsplit(f"//{name}")
        host, port = _host(parts.hostname or ""), parts.port
    except ValueError:  # a port out of range, an unmatched bracket, a label that no name has
        host, port = "", None
    is_host = re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", host) is not None
    is_path = re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", parts.path) is not None if is_host else False
    if not is_host or not is_path or parts.query or "@" in name or is_ambiguous(f"http://{name}"):
        raise UsageError(f"{show(name)} is not a host; write for example 'api.example.com' or '127.0.0.1:8765'")
    return host, port, parts.path.lower()


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """The requests that are calls of `method`: those of a verb ("": of any) to a path.

    In a path `{x}` stands for one segment, or for a part of one, and `**` at its end for any rest, also for none. Upper
    and lower case are the same. What is asked by GET may be asked by HEAD.
    """

    verb: str
    path: str
    method: str
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _examples: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        path = plain_path(self.path.removesuffix("**"))
        pattern = re.sub(r"\\\{[^{}]*\\\}", "[^/]+", re.escape(path))
        if self.path.endswith("**"):
            pattern = f"{pattern.removesuffix('/')}(/.*)?"
        object.__setattr__(self, "_pattern", re.compile(pattern, re.IGNORECASE | re.DOTALL))
        # No route names this character, so only `{x}` and `**` take it.
        start = re.sub(r"\{[^{}]*\}", "\0", path).removesuffix("/")
        rests = ("", "/\0", "/\0/\0") if self.path.endswith("**") else ("",)
        object.__setattr__(self, "_examples", tuple([f"{start}{rest}" or "/" for rest in rests]))

    @property
    def named_chars(self) -> int:
        """How many characters of a path it names."""
        return len(re.sub(r"\{[^{}]*\}|\*\*", "", self.path))

    def matches(self, verb: str, path: str) -> bool:
        """Whether a request is one of these; `path` as `plain_path` returns it."""
        return self._takes(verb.upper()) and self._pattern.fullmatch(path) is not None

    def covers(self, other: Route) -> bool:
        """Whether every request of another route is one of these."""
        return self._takes(other.verb) and all(map(self._pattern.fullmatch, other._examples))

    def _takes(self, verb: str) -> bool:
        return self.verb in ("", verb) or (self.verb, verb) == ("GET", "HEAD")


MAX_PARSED_BYTES = 16_000_000
"""A longer body is not parsed: it counts by its length, and `default` stands for the number in it."""


class RequestBody(NamedTuple):
    """A request's body: all of it as `content`, b"" if there is none. None where the body is read only as it is sent;
    `length` is its bytes then, 0 where nobody knows them."""

    content: bytes | None = b""
    length: int = 0

    @classmethod
    def of(cls, body: object, content_length: object = None) -> RequestBody:
        """Of what a client is about to send: bytes, a text, nothing, or what it reads as it sends it. `content_length`
        is what the request's header says, if it does."""
        if isinstance(body, str):
            body = body.encode("utf-8", "replace")
        if body is None or isinstance(body, bytes | bytearray):
            return cls(bytes(body or b""))
        digits = str(content_length or "")
        return cls(None, int(digits) if re.fullmatch("[0-9]{1,15}", digits, re.ASCII) else 0)

    @property
    def makes_no_requests(self) -> bool:
        """Whether all of it is here. Else what makes it may send requests of its own while it is read, and an error
        that says that nothing left may be about one of them."""
        return self.content is not None


NO_BODY = RequestBody()


class Reserve(NamedTuple):
    """The bound of one call, in units: the number at `pointer` in the request's JSON, or `default` where that is no
    number from 0 on; and a unit for each `bytes_per_unit` of the body, rounded up, if that is given."""

    default: int
    pointer: Pointer | None = None
    bytes_per_unit: int | None = None

    def bound(self, body: RequestBody) -> int:
        """The units of a request, 1 or more. Never raises. A fraction is rounded up."""
        length = body.length if body.content is None else len(body.content)
        of_bytes = 0 if self.bytes_per_unit is None else -(-length // self.bytes_per_unit)
        number = None if self.pointer is None else _number(body.content, self.pointer)
        return max(1, (self.default if number is None else number) + of_bytes)


def _number(content: bytes | None, pointer: Pointer) -> int | None:
    if not content or len(content) > MAX_PARSED_BYTES:
        return None
    try:  # as the most lenient server does: a text that is no UTF-8 hides no number
        document = json.loads(content.decode(json.detect_encoding(content), "replace"), strict=False)
        value = value_at(document, pointer)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        return None
    return ceil(value)


# -- answers -----------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """Where an answer has a figure: in a `header`, or in its JSON at a `pointer`.

    A `pattern` finds it within the text there, by the names of its groups. `form` is how a time is written.
    """

    header: str = ""
    pointer: Pointer | None = None
    pattern: re.Pattern[str] | None = None
    form: Form | None = None


class Figure(NamedTuple):
    """A part of what a call used: a number in the first of its `places` that has one, else `default`; None: its answer
    has to say it."""

    places: tuple[Field, ...]
    default: int | None = None


class Used(NamedTuple):
    """What a call used: the sum of these figures."""

    figures: tuple[Figure, ...]

    def total(self, read: Sequence[int | None]) -> int | None:
        """Of what was read of each figure; None where nothing was, or where one is missing."""
        if not any(units is not None for units in read):
            return None
        counted = [figure.default if units is None else units for figure, units in zip(self.figures, read, strict=True)]
        numbers = [units for units in counted if units is not None]
        return sum(numbers) if len(numbers) == len(counted) else None


class Match(NamedTuple):
    """The answers that a rule is about: all that is given must hold.

    `body` is text in it, in lower case. With a `pointer` the answer's JSON has `value` there, or without one anything
    that is not null, false, 0 or empty.
    """

    status: int | None = None
    body: str = ""
    pointer: Pointer | None = None
    value: str | int | None = None

    @property
    def reads_body(self) -> bool:
        return bool(self.body) or self.pointer is not None

    def covers(self, other: Match) -> bool:
        """Whether every answer that another rule is about is one of these."""
        if self.status not in (None, other.status) or self.body not in other.body:
            return False
        at_all = self.value is None and bool(other.value)
        return self.pointer is None or (self.pointer == other.pointer and (at_all or self.value == other.value))


class Refill(NamedTuple):
    """Where an answer says what a bucket that fills steadily lacks: the units asked for, those left, and how many come
    back each second."""

    asked: Pointer
    left: Pointer
    per_second: Pointer


class ClosedRule(NamedTuple):
    """Answers by which upstream closes `bucket` ("": the one that the answer names, else the call's).

    It stays closed until the time that the answer names; where it names none, for as long as it `lasts`, in ms or as
    the answer says it; else until the bucket's own reset.
    """

    when: Match
    bucket: str = ""
    lasts: int | Field | Refill | None = None

    @property
    def says_empty(self) -> bool:
        """Whether upstream's own words say that a bucket is used up. Where it says only that a call came too soon, it
        is a status alone, or a pause."""
        return self.when.reads_body and self.lasts is None


class KeyPlace(NamedTuple):
    """Where the API wants its key: in a `header`, after a `scheme` where there is one, or in a field of the `query`."""

    header: str = "Authorization"
    scheme: str = "Bearer"
    query: str = ""


GOOGLES_KEY = KeyPlace("x-goog-api-key", "")
"""Where Google's APIs take a key. Not in the URL, which others log."""


class LevelRule(NamedTuple):
    """Where an answer says what remains of a bucket. `bucket` is its name, or where the answer names it; None: it is
    the call's."""

    remaining: Field
    limit: Field | None = None
    reset: Field | None = None
    bucket: str | Field | None = None


class AnswerRules(NamedTuple):
    """What an answer tells: which units remain, what the call cost (`units`), whether it was `free`, what it closed."""

    levels: tuple[LevelRule, ...] = ()
    units: Used | None = None
    free: tuple[Match, ...] = ()
    closed: tuple[ClosedRule, ...] = ()

    def frees(self, status: int) -> bool:
        """Whether upstream counts no answer of this status, whatever its body says."""
        return any(match.status == status and not match.reads_body for match in self.free)

    def reads_body(self, status: int) -> bool:
        """Whether the body of an answer with this status must be read before its caller has it. For `units` it is read
        as the caller reads it."""
        fields = [part for level in self.levels for part in level if isinstance(part, Field)]
        matches = [*self.free, *(rule.when for rule in self.closed)]
        return any(field.pointer is not None for field in fields) or any(
            match.reads_body and match.status in (None, status) for match in matches
        )
