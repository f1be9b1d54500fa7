"""How a cost book describes its API, beside the prices: hosts, routes, the bound of a request, rules for answers. Pure.

Hosts          the hosts of the API, in each spelling that people and clients use
Route          matches the requests of one method
RequestBody    a request's body, as far as it is known before the request leaves
Reserve        the most that a request may cost: charged until the answer says the price
Field          where an answer has a figure: in a header, or in its JSON
Figure         a part of what a call used; Used: the sum of several parts
Match          matches the answers of a rule
ClosedRule     matches answers by which upstream closes a bucket
KeyPlace       where a request carries its key
as_read        the name of a header field, as some servers read it
LevelRule      where an answer says what remains of a bucket
AnswerRules    all rules for answers; `quota.clients.upstream` applies them
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from io import SEEK_END, BufferedRandom, BufferedReader, BytesIO, FileIO
from ipaddress import ip_address
from math import ceil, inf
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from quota.common.hosts import MAX_HOSTS, default_port, is_ambiguous, is_loopback, plain_path, readings_of
from quota.common.text import show
from quota.errors import UsageError
from quota.terms.arguments import texts
from quota.terms.limits import MAX_UNITS

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

OVERRIDES = ("x-http-method-override", "x-http-method", "x-method-override")
"""The header fields that name another verb. Each server has its own choice of them."""

Form = Literal["epoch", "seconds", "duration", "http-date", "rfc3339"]
"""The form of a time: seconds since 1970, seconds from now, `6m0s` or `40591s` from now, or a date. The gate also reads
an answer that uses another of these forms."""

Pointer = tuple[str, ...]
"""A place in a JSON document: `/errors/0/code` (RFC 6901) as its parts."""


def document_in(body: bytes, of_pairs: Callable[[Any], object] | None = None) -> object:
    """The JSON in a body, as the most lenient reader takes it: invalid UTF-8 hides no number. `of_pairs` makes an
    object of its members. Raises ValueError or RecursionError."""
    text = body.decode(json.detect_encoding(body), "replace")
    return json.loads(text, strict=False, object_pairs_hook=of_pairs)


def value_at(document: object, pointer: Pointer) -> object:
    """The value at a place in a JSON document; None if the place does not exist."""
    value = document
    for part in pointer:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,6}", part, re.ASCII):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


# -- hosts -------------------------------------------------------------------------------------------------------------


class Hosts:
    """The metered hosts: `api.example.com` matches any port, `127.0.0.1:8765` only this one. If a host serves several
    APIs, the name also has the start of the path: `www.googleapis.com/calendar/v3`.

    Spellings of one host are equal: the names of loopback (`localhost`, `127.0.0.1`, `::1`, `0.0.0.0`),
    `bücher.example` and `xn--bcher-kva.example`, the forms of an address (`10.1`, `0xa.1`, `10.0.0.1`), and the host
    that Google's clients call with a certificate (`x.mtls.googleapis.com`).
    Raises UsageError for an invalid host name.
    """

    def __init__(self, names: str | Iterable[str]) -> None:
        self._paths_of: dict[tuple[str, int | None], list[str]] = {}
        for name in texts(names, "host"):
            try:
                parts = urlsplit(f"//{name}")
                host, port = _host(parts.hostname or ""), parts.port
            except ValueError:  # a port out of range, an unmatched bracket, an invalid label
                host, port = "", None
            is_host = re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", host)
            is_place = is_host and re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", parts.path)
            if not is_place or parts.query or "@" in name or is_ambiguous(f"http://{name}"):
                raise UsageError(f"{show(name)} is not a host; write for example 'api.example.com' or '127.0.0.1:8765'")
            self._paths_of.setdefault((host, port), []).append(parts.path.lower())

    def __contains__(self, host_port: tuple[str, int | None]) -> bool:
        """Whether any path on this host is metered."""
        return bool(self._paths(*host_port, any_port=True))

    def serve(self, url: str, *, any_port: bool = True) -> bool:
        """Whether a URL is on a metered host and path. Without `any_port`, a name without a port matches only the usual
        port. Raises ValueError for an invalid port."""
        parts = urlsplit(url)
        usual = default_port(parts.scheme)
        port = parts.port or usual
        paths = self._paths(parts.hostname or "", port, any_port=any_port or port == usual)
        if not paths or "" in paths:
            return bool(paths)
        read = [path.lower() for path in readings_of(parts.path)]
        return any(path == begins or path.startswith(f"{begins}/") for begins in paths for path in read)

    def _paths(self, host: str, port: int | None, *, any_port: bool) -> list[str]:
        """The starts of the metered paths on a host; "" matches all paths."""
        try:
            host = _host(host)
        except ValueError:  # an invalid name, for example in a redirect
            return []
        of_any_port = self._paths_of.get((host, None), ()) if any_port else ()
        return [*self._paths_of.get((host, port), ()), *of_any_port]


@lru_cache(MAX_HOSTS)
def _host(name: str) -> str:
    name = name.strip("[]").rstrip(".").lower().replace(".mtls.googleapis.com", ".googleapis.com")
    if name.rpartition(".")[2][:1].isdigit():  # no domain ends so: the system reads the name as an address
        import socket  # late: few hosts are addresses

        with suppress(OSError, ValueError):
            name = socket.inet_ntoa(socket.inet_aton(name))
    if is_loopback(name) or name in ("0.0.0.0", "::"):  # noqa: S104  # a connection to it reaches this machine
        return "localhost"
    if ":" in name:
        with suppress(ValueError):
            address = ip_address(name)
            return str(getattr(address, "ipv4_mapped", None) or address)
    if name.isascii():
        return name
    # As clients write it into URLs. Each client brings `idna` and encodes with it.
    try:
        from idna import encode
    except ImportError:
        return name.encode("idna").decode()
    return encode(name, uts46=True).decode().rstrip(".")


# -- requests ----------------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """Matches the requests of `method`: a verb ("": any) and a path.

    In the path, `{x}` matches one segment or a part of one, and `**` at the end matches the rest, even an empty one.
    Case does not matter. A route for GET also matches HEAD.
    """

    verb: str
    path: str
    method: str
    pattern: re.Pattern[str]
    examples: tuple[str, ...]

    @classmethod
    def of(cls, verb: str, path: str, method: str) -> Route:
        """The route for a path, with its pattern and with paths that only routes as wide as this one match."""
        start = plain_path(path.removesuffix("**"))
        pattern, rests = re.sub(r"\\\{[^{}]*\\\}", "[^/]+", re.escape(start)), [""]
        if path.endswith("**"):
            pattern, rests = f"{pattern.removesuffix('/')}(/.*)?", ["", "/\0", "/\0/\0"]
        pattern = re.sub("[\0-\x7f]+", r"(?a:\g<0>)", pattern)  # else the long s of Unicode would be an s
        # No route has this character, so only `{x}` and `**` match it.
        start = re.sub(r"\{[^{}]*\}", "\0", start).removesuffix("/")
        examples = tuple([f"{start}{rest}" or "/" for rest in rests])
        return cls(verb, path, method, re.compile(pattern, re.IGNORECASE | re.DOTALL), examples)

    @property
    def named_chars(self) -> int:
        """How many characters of a path the route spells out."""
        return len(re.sub(r"\{[^{}]*\}|\*\*", "", self.path))

    def matches(self, verb: str, path: str) -> bool:
        """Whether the route matches a request. `path` is as `plain_path` returns it."""
        return self._takes(verb.upper()) and self.pattern.fullmatch(path) is not None

    def covers(self, other: Route) -> bool:
        """Whether this route matches every request of another route."""
        return self._takes(other.verb) and all(map(self.pattern.fullmatch, other.examples))

    def _takes(self, verb: str) -> bool:
        return self.verb in ("", verb) or (self.verb, verb) == ("GET", "HEAD")


MAX_PARSED_BYTES = 16_000_000
"""A longer body is not parsed: `default` replaces the number in it."""


class RequestBody(NamedTuple):
    """A request's body: `content` has all of it, b"" if there is none. If the client reads the body only while it sends
    it, `content` is None, `length` has the least number of bytes that is known, and `heads` those of a form's parts."""

    content: bytes | None = b""
    length: int = 0
    heads: bytes = b""

    @classmethod
    def of(cls, body: object, content_length: object = None, heads: Iterable[bytes] = ()) -> RequestBody:
        """The body that a client is about to send: bytes, text, nothing, or a stream. `content_length` is the value of
        the request's header. Without it, files, buffers and lists tell their length."""
        if isinstance(body, str):
            body = body.encode("utf-8", "replace")
        if body is None or isinstance(body, bytes | bytearray | memoryview):
            return cls(bytes(body or b""))
        digits = str(content_length or "")
        length = int(digits) if re.fullmatch("[0-9]{1,18}", digits, re.ASCII) else _length_of(body)
        return cls(None, length, b"".join(heads))


def _length_of(body: Any) -> int:
    """How many bytes a client will read of this body; 0 if only reading it would tell, as a packed file."""
    file = getattr(body, "file", body)  # of a tempfile
    with suppress(TypeError, ValueError, OSError):
        if isinstance(file, FileIO | BufferedReader | BufferedRandom | BytesIO):
            at = file.tell()
            length = file.seek(0, SEEK_END) - at
            file.seek(at)
            return max(0, length)
        return sum(memoryview(piece).nbytes for piece in (body if isinstance(body, list | tuple) else [body]))
    return 0


NO_BODY = RequestBody()


class Reserve(NamedTuple):
    """The bound of one call, in units: the largest number at one of `pointers` in the request's JSON, or `default` if
    there is no number of 0 or more; plus one unit for each `bytes_per_unit` of the body, rounded up, if that is
    given."""

    default: int
    pointers: tuple[Pointer, ...] = ()
    bytes_per_unit: int | None = None

    @property
    def least(self) -> int:
        """The least units of any request."""
        return 1 if self.pointers else self.default

    def bound(self, body: RequestBody, unread: Callable[[], object] = lambda: None) -> int:
        """The units of a request, 1 or more. Never raises. A fraction is rounded up. `unread` is called if the body
        cannot be read, or has something else where its number should be."""
        length = body.length if body.content is None else len(body.content)
        of_bytes = 0 if self.bytes_per_unit is None else -(-length // self.bytes_per_unit)
        document = None
        if self.bytes_per_unit and body[:2] == (None, 0):
            unread()
        if self.pointers and body.content != b"":
            try:
                document = _document(body.content)
            except (ValueError, RecursionError):
                unread()
        numbers: list[int] = []
        is_unread = False
        for pointer in self.pointers:
            values = [*_values_at(document, pointer)]
            read = [_number(value) for value in values]
            if {*read} != {None}:
                numbers += [self.default if number is None else number for number in read]
            is_unread = is_unread or any(value is not None for value in values)
        if is_unread and not numbers:
            unread()
        return max(1, max(numbers, default=self.default) + of_bytes)


def _document(content: bytes | None) -> object:
    """The JSON of a request; an object is a tuple of its members. Raises ValueError or RecursionError."""
    if content is None or len(content) > MAX_PARSED_BYTES:
        raise ValueError("a stream, or too long")
    return document_in(content, tuple)


def _values_at(document: object, pointer: Pointer) -> Iterator[object]:
    """All values that servers may read at a place, None for no value: of a name that is there twice some read the
    first, and only Go ignores case."""
    if not pointer:
        yield document
        return
    values = [value_at(document, pointer[:1])]
    if isinstance(document, tuple):
        named = [name for name, _ in document]
        values = [value for name, value in document if name.casefold() == pointer[0].casefold()]
        values += [] if pointer[0] in named else [None]
    for value in values:
        yield from _values_at(value, pointer[1:])


DECIMAL = r"(?:[0-9]{1,16}(?:\.[0-9]{0,16})?|\.[0-9]{1,16})(?:[eE][+-]?[0-9]{1,2})?"
"""A number in a text. Go, Lua and PHP write large numbers as `1.8e+09`, and small ones as `1e-05`."""


def _number(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(rf"\s*\+?{DECIMAL}\s*", value, re.ASCII):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        return None
    return ceil(value)


# -- answers -----------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """Where an answer has a figure: in a `header`, or in its JSON at a `pointer`.

    A `pattern` finds the figure in the text there, by the names of its groups.
    """

    header: str = ""
    pointer: Pointer | None = None
    pattern: re.Pattern[str] | None = None


UNREADABLE = -1
"""A figure that the answer has, but not as a possible number."""


class Figure(NamedTuple):
    """A part of what a call used: the number in the first of `places` that has one; `default` if no place has anything.
    If `default` is None, the answer must have the number."""

    places: tuple[Field, ...]
    default: int | None = None


class Used(NamedTuple):
    """What a call used: the sum of `figures`."""

    figures: tuple[Figure, ...]

    def total(self, read: Sequence[int | None]) -> int | None:
        """The sum of the numbers that were read, one for each figure; None if none was read, if one is missing or
        UNREADABLE, or if the sum is more than a charge can have."""
        if UNREADABLE in read or not any(units is not None for units in read):
            return None
        counted = [figure.default if units is None else units for figure, units in zip(self.figures, read, strict=True)]
        numbers = [units for units in counted if units is not None]
        return sum(numbers) if len(numbers) == len(counted) and sum(numbers) <= MAX_UNITS else None


class Match(NamedTuple):
    """Matches answers. Every given condition must hold.

    `body` is a text in the body, in lower case. At `pointer` the answer's JSON must have `value`; without a `value`,
    anything but null, false, 0 or empty.
    """

    status: int | None = None
    body: str = ""
    pointer: Pointer | None = None
    value: str | int | None = None

    @property
    def reads_body(self) -> bool:
        return bool(self.body) or self.pointer is not None

    def covers(self, other: Match) -> bool:
        """Whether this rule matches every answer that another rule matches."""
        if self.status not in (None, other.status) or self.body not in other.body:
            return False
        at_all = self.value is None and bool(other.value)
        return self.pointer is None or (self.pointer == other.pointer and (at_all or self.value == other.value))


class Refill(NamedTuple):
    """Where an answer says how a leaking bucket refills: the units that the call asked for, the units left, and the
    units that return each second."""

    asked: Pointer
    left: Pointer
    per_second: Pointer


class ClosedRule(NamedTuple):
    """Matches answers by which upstream closes `bucket` ("": the bucket of the call that the answer shows as used up,
    else the bucket that it names, else the call's first).

    The bucket opens at the time that the answer names; else after `lasts`, in ms or as the answer says; else at its
    own reset.
    """

    when: Match
    bucket: str = ""
    lasts: int | Field | Refill | None = None


class KeyPlace(NamedTuple):
    """Where a request carries its key: in a `header`, after a `scheme` if there is one, or in a field of the
    `query`."""

    header: str = "Authorization"
    scheme: str = "Bearer"
    query: str = ""


GOOGLES_KEY = KeyPlace("x-goog-api-key", "")
"""Where Google's APIs take a key. Servers and proxies log URLs, so the key is not there."""

GOOGLES_HEADERS = (
    "authorization", "x-allowed-locations", "x-goog-api-key", "x-goog-iam-authority-selector",
    "x-goog-iam-authorization-token", "x-goog-user-project", "x-identity-trust-boundary", "x-serverless-authorization",
)  # fmt: skip
"""The header fields of keys and of Google's auth libraries, old ones too."""

GOOGLES_FIELDS = ("key", "access_token", "oauth_token")
"""The fields of a query in which Google's APIs also take a key or a token."""


def as_read(name: str) -> str:
    """The name of a header field in small letters, as WSGI and PHP read it: they take `_` for `-`."""
    return name.lower().replace("_", "-")


class LevelRule(NamedTuple):
    """Where an answer says what remains of a bucket. `bucket` is its name, or the place where the answer names it;
    None: the call's bucket."""

    remaining: Field
    limit: Field | None = None
    reset: Field | None = None
    bucket: str | Field | None = None


class AnswerRules(NamedTuple):
    """The rules for answers: what remains, what the call used (`units`), which answers are `free`, which close a
    bucket."""

    levels: tuple[LevelRule, ...] = ()
    units: Used | None = None
    free: tuple[Match, ...] = ()
    closed: tuple[ClosedRule, ...] = ()

    def frees(self, status: int) -> bool:
        """Whether all answers with this status are free, whatever their bodies say."""
        return any(match.status == status and not match.reads_body for match in self.free)

    def reads_body(self, status: int) -> bool:
        """Whether the gate must read the body of an answer with this status before the caller does. For `units` it
        reads along with the caller."""
        fields = [part for level in self.levels for part in level if isinstance(part, Field)]
        matches = [*self.free, *(rule.when for rule in self.closed)]
        return any(field.pointer is not None for field in fields) or any(
            match.reads_body and match.status in (None, status) for match in matches
        )
