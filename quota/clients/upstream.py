"""The seam for upstreams: which method a request is, and what an answer means. The cost book chooses the upstream.

    upstream_of(book)   Google, or Described where the book itself says what its API is like
    Reading             what one answer means: an error, buckets that it closes, what remains, what the call cost
    Closing             a bucket that is closed for everybody
    Access              what a program needs that passes requests on to an API
    Upstream            what an upstream must do; a third one is a class here and a case in `upstream_of`

Reading an answer is pure and never raises. A header that is missing, absurd, sent twice, in the past or of another pool
changes nothing, and nothing in an answer but what the book calls `free` or `units` ever frees a unit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from quota.clients.discovery import KEY_HEADER, description, discovered, scopes_of
from quota.clients.routes import Routes
from quota.clients.upstream_errors import MAX_BODY_BYTES, UpstreamError, bucket_of, classify, words_of
from quota.common.clock import LATEST_MS, NEVER
from quota.common.hosts import plain_path
from quota.errors import ConfigError, UsageError
from quota.terms.api import ClosedRule, Field, Form, KeyPlace, LevelRule, Match, Pointer, Refill, Route, Used, value_at
from quota.terms.costs import CostBook
from quota.terms.evidence import Level
from quota.terms.limits import MAX_UNITS, SECOND_MS, UNITS_MS

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
Sent = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]

MAX_HEADER_LENGTH = 1_024
"""How much of a header is looked at."""

MAX_POLICIES = 10
"""How many items of a `RateLimit` header are looked at."""


class Closing(NamedTuple):
    """Upstream has closed a bucket until `until_ms`; None: until the bucket's own reset. `why` is upstream's word."""

    bucket: str
    until_ms: int | None
    why: str


class Reading(NamedTuple):
    """What one answer means.

    `error` is what the caller is told of an error, also of one inside a good answer. `used_units` is what the call
    really cost, and a `free` call is one that upstream does not count.
    """

    error: UpstreamError | None = None
    closes: tuple[Closing, ...] = ()
    levels: tuple[Level, ...] = ()
    used_units: int | None = None
    free: bool = False

    @property
    def changes_something(self) -> bool:
        """Whether the ledger is told of it."""
        return bool(self.closes or self.levels or self.free or self.used_units is not None)


NOTHING = Reading()


class Access(NamedTuple):
    """What a program needs that passes requests on to an API, as `quota proxy` does.

    `root` is its address without a slash at the end, `place` where its key goes, `scopes` what a login asks for.
    `method` names a request by its verb and URL; None: the routes of the book do. `is_batch` says of one whether
    several calls travel in it. `secret_fields` of a query hold what a caller signs with, beside `place`.
    """

    root: str
    place: KeyPlace
    scopes: tuple[str, ...] = ()
    method: Callable[[str, str], str] | None = None
    is_batch: Callable[[str, str], bool] = lambda verb, url: False
    secret_fields: tuple[str, ...] = ()


class Upstream(Protocol):
    @property
    def knows_methods(self) -> bool:
        """Whether `method` can name requests."""

    @property
    def overrides(self) -> bool:
        """Whether X-HTTP-Method-Override of a POST is the verb, as of a GET whose address would be too long."""

    def continues(self, verb: str, url: str) -> bool:
        """Whether a request goes on with a call that was charged when it began."""

    def method(self, verb: str, url: str) -> str | None:
        """The API method of a request; None where nothing says which it is."""

    def fit(self, verb: str, url: str) -> int:
        """How many characters of its path name that method; -1 where nothing says which it is."""

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether `read` needs the body of this answer."""

    def read(self, status: int, headers: Headers, body: bytes, *, method: str, at_ms: int) -> Reading:
        """What this answer to a call of `method` means. It came at `at_ms`, and times in the reading are by the same
        clock. Never raises: what cannot be read says nothing."""

    def client(self, session: Any, credential: str, **limits: Any) -> Any:
        """The client of a job, whose every attempt is charged. It keeps those of the job's limits that it can."""

    def address(self, client: Any, endpoint: str | None) -> str:
        """Where such a client of a credential with this endpoint sends its calls, for messages."""

    def access(self, endpoint: str | None) -> Access:
        """How to pass requests of a credential with this endpoint on. Raises ConfigError."""


def upstream_of(book: CostBook) -> Upstream:
    """The upstream whose prices these are."""
    return Described(book) if book.described else Google(book)


def verb_of(upstream: Upstream, verb: str, headers: Sent) -> str:
    """By which verb the API reads a request with these header fields. Raises UsageError where that is not clear."""
    if verb.upper() != "POST" or not upstream.overrides:
        return verb
    fields = headers.items() if isinstance(headers, Mapping) else headers
    said = [_text(value) for name, value in fields if _text(name).lower() == "x-http-method-override"]
    if len(said) > 1 or not all(map(str.isalpha, said)):
        raise UsageError("X-HTTP-Method-Override does not name one method")
    return said[0].upper() if said else verb


def _text(part: str | bytes) -> str:
    return part.decode("latin-1") if isinstance(part, bytes) else str(part)


@cache
def _routes_of(api: str, version: str) -> Routes | None:
    """The methods of an API as the installed client describes them; None for one that it does not."""
    document = discovered(api, version)
    return None if document is None else Routes(document)


@dataclass(frozen=True)
class Google:
    """An API of Google: its client knows the methods, and its errors name what has run out. Headers say nothing."""

    book: CostBook

    @property
    def knows_methods(self) -> bool:
        return bool(self.book.hosts) and self._routes is not None

    @property
    def overrides(self) -> bool:
        return True

    def continues(self, verb: str, url: str) -> bool:
        parts = urlsplit(url)
        return self._routes is not None and self._routes.is_part(parts.path, parts.query)

    def method(self, verb: str, url: str) -> str | None:
        """Raises UsageError for a batch: it holds several calls."""
        routes, path = self._routes, urlsplit(url).path
        if routes is not None and routes.is_batch(verb.upper(), path):
            raise UsageError("a batch holds several calls; send it with q.google(), which charges each of them")
        return None if routes is None else routes.method(verb.upper(), path)

    def fit(self, verb: str, url: str) -> int:
        return -1 if self.method(verb, url) is None else 0

    @property
    def _routes(self) -> Routes | None:
        return _routes_of(self.book.api, self.book.version)

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        return status >= 400

    def read(self, status: int, headers: Headers, body: bytes, *, method: str, at_ms: int) -> Reading:
        if status < 400:
            return NOTHING
        error = classify(status, body, method=method, book=self.book)
        if error.bucket is None:
            return Reading(error)
        until_ms = NEVER if error.kind == "project_blocked" else None
        return Reading(error, (Closing(error.bucket, until_ms, error.message),))

    def client(self, session: Any, credential: str, **limits: Any) -> Any:
        return session.google(credential, self.book.api, self.book.version, **limits)

    def address(self, client: Any, endpoint: str | None) -> str:
        scheme, _, rest = client._baseUrl.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    def access(self, endpoint: str | None) -> Access:
        document = description(self.book.api, self.book.version)
        root = endpoint or document["rootUrl"].rstrip("/")
        routes = Routes({**document, "rootUrl": f"{root}/"})

        def method(verb: str, url: str) -> str:
            path = urlsplit(url).path
            return routes.method(verb, path) or f"{verb} {path}"

        return Access(
            root,
            KeyPlace(KEY_HEADER, ""),
            tuple(scopes_of(document)),
            method,
            lambda verb, url: routes.is_batch(verb, urlsplit(url).path),
            ("key", "access_token"),
        )


@dataclass(frozen=True)
class Described:
    """An API that its cost book describes: `hosts`, `routes`, `answers`. What the book does not say of an error is read
    as Google's, whose words many use."""

    book: CostBook

    @property
    def knows_methods(self) -> bool:
        return bool(self.book.routes)

    @property
    def overrides(self) -> bool:
        return not self.book.has_session  # then it is one of Google's

    def continues(self, verb: str, url: str) -> bool:
        return False

    def method(self, verb: str, url: str) -> str | None:
        route = self._route(verb, url)
        return None if route is None else route.method

    def fit(self, verb: str, url: str) -> int:
        route = self._route(verb, url)
        return -1 if route is None else route.said

    def _route(self, verb: str, url: str) -> Route | None:
        path = plain_path(re.split("[?#]", url.partition("://")[2], maxsplit=1)[0].partition("/")[2])
        return next((route for route in self.book.routes if route.matches(verb, path)), None)

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        if status >= 400:
            return True
        # Events come as they happen, and their reader waits for each.
        as_it_comes = headers.get("content-type", "").lower().startswith("text/event-stream")
        return not as_it_comes and self.book.answers.reads_body(status)

    def read(self, status: int, headers: Headers, body: bytes, *, method: str, at_ms: int) -> Reading:
        answer, rules = _Answer(status, headers, body, at_ms), self.book.answers
        said = list(self._said(answer, method))
        base = Google(self.book).read(status, headers, body, method=method, at_ms=at_ms)
        error, closes = self._closed(answer, method, said, base)
        closed = {closing.bucket for closing in closes}
        levels = (
            Level(one.bucket, one.remaining_units, one.limit_units, one.reset_ms)
            for one in said
            if one.remaining_units is not None and one.bucket in self.book.buckets and one.bucket not in closed
        )
        used_units = None if rules.units is None else rules.units.total(answer.units(rules.units))
        free = any(map(answer.fits, rules.free))
        return Reading(error, closes, tuple(levels), used_units, free)

    def client(self, session: Any, credential: str, **limits: Any) -> Any:
        if not self.book.has_session:
            return Google(self.book).client(session, credential, **limits)
        return session.requests(
            credential,
            max_units=limits.get("max_units"),
            timeout_s=limits.get("max_answer_s"),
            max_body_mb=limits.get("max_body_mb"),
        )

    def address(self, client: Any, endpoint: str | None) -> str:
        if not self.book.has_session:
            return Google(self.book).address(client, endpoint)
        return endpoint or self.book.address or f"https://{self.book.api}"

    def access(self, endpoint: str | None) -> Access:
        if not self.book.has_session:
            return Google(self.book).access(endpoint)
        if not (self.book.hosts or endpoint):
            raise ConfigError(f"cost book {self.book.name!r} names no host; give the credential its endpoint")
        return Access(endpoint or self.book.address, self.book.key)

    # -- what is closed ----------------------------------------------------------------------------------------------

    def _closed(
        self, answer: _Answer, method: str, said: list[_Said], base: Reading
    ) -> tuple[UpstreamError | None, tuple[Closing, ...]]:
        """The error of an answer, and what it closes: by the first rule that fits, by the pool that it says is empty,
        or as Google's answers do."""
        rule = next((rule for rule in self.book.answers.closed if answer.fits(rule.when)), None)
        if rule is not None:
            bucket = rule.bucket or (said[0].bucket if said and said[0].named else bucket_of(method, self.book))
        elif answer.status in (403, 429) and (empty := [one for one in said if one.remaining_units == 0]):
            bucket = empty[0].bucket
        else:
            lasting = base.error is not None and base.error.kind == "project_blocked"
            later = (one._replace(until_ms=self._until_ms(answer, None, one.bucket, said)) for one in base.closes)
            return base.error, base.closes if lasting else tuple(later)
        reason, message = words_of(answer.body)
        if rule is not None and isinstance(rule.when.value, str):
            reason = reason or rule.when.value
        message = message or reason or f"HTTP {answer.status}"
        until_ms = self._until_ms(answer, rule, bucket, said)
        return UpstreamError("closed", bucket, reason, message), (Closing(bucket, until_ms, message),)

    def _until_ms(self, answer: _Answer, rule: ClosedRule | None, bucket: str, said: list[_Said]) -> int | None:
        """Until when a bucket is closed: the later of its reset and of Retry-After, else for as long as the rule says;
        for no longer than its period. None where nobody says.

        While units remain, the reset is not what upstream waits for where the rule has a time of its own.
        """
        lasts = None if rule is None else rule.lasts
        times = [answer.retry_at_ms]
        times += [
            one.reset_ms for one in said if one.bucket == bucket and not (lasts is not None and one.remaining_units)
        ]
        until_ms = max((time for time in times if time is not None), default=None)
        if until_ms is None and lasts is not None:
            until_ms = answer.at_ms + lasts if isinstance(lasts, int) else answer.lasts_until_ms(lasts)
        return None if until_ms is None else min(until_ms, answer.at_ms + self._period_ms(bucket))

    def _period_ms(self, bucket: str) -> int:
        return self.book.buckets.get(bucket, self.book.main_bucket).window.longest_ms

    # -- what remains ------------------------------------------------------------------------------------------------

    def _said(self, answer: _Answer, method: str) -> Iterator[_Said]:
        """What the answer says of the book's pools, also where it says no more than when one resets."""
        for rule in self.book.answers.levels:
            bucket, named = self._pool(answer, rule, method)
            if bucket:
                remaining, limit = answer.remaining(rule)
                reset_ms = None if rule.reset is None else answer.moment_ms(rule.reset, "reset")
                yield from self._checked(answer, _Said(bucket, named, remaining, limit, reset_ms))
        items = answer.policies()
        for name, remaining, limit, reset_ms in items:
            bucket = self._named(name)
            if not bucket and len(items) == len(self.book.buckets) == 1:
                bucket = self.book.main_bucket.name
            if bucket:
                yield from self._checked(answer, _Said(bucket, True, remaining, limit, reset_ms))

    def _pool(self, answer: _Answer, rule: LevelRule, method: str) -> tuple[str, bool]:
        """The pool of which a rule's figures speak, and whether the answer names it; "" for one that is not ours."""
        if isinstance(rule.bucket, str):
            return rule.bucket, False
        name = None if rule.bucket is None else answer.text(rule.bucket, "bucket")
        return (bucket_of(method, self.book), False) if name is None else (self._named(name), True)

    def _named(self, name: str) -> str:
        """The bucket or pool that upstream calls so, by its name or one of its marks; "" if there is none."""
        if name in self.book.buckets:
            return name
        return next((pool.name for pool in self.book.pools if name in (pool.name, *pool.marks)), "")

    def _checked(self, answer: _Answer, said: _Said) -> Iterator[_Said]:
        """What is said, if it may be so: of a window that is over, nothing; a reset beyond the period is none."""
        remaining, limit, reset_ms = said.remaining_units, said.limit_units, said.reset_ms
        if reset_ms is not None and reset_ms <= answer.at_ms:
            return
        if remaining is not None and limit is not None and remaining > limit:
            said = said._replace(remaining_units=None, limit_units=None)
        if reset_ms is not None and reset_ms > answer.at_ms + self._period_ms(said.bucket) + CLOCK_MS:
            said = said._replace(reset_ms=None)
        yield said


CLOCK_MS = 5 * SECOND_MS
"""How far a reset may be beyond its bucket's period: clocks differ, and headers count in whole seconds."""


class _Said(NamedTuple):
    """What an answer says of a pool, which the answer itself may have `named`."""

    bucket: str
    named: bool
    remaining_units: int | None
    limit_units: int | None
    reset_ms: int | None


# -- reading one answer ------------------------------------------------------------------------------------------------


class _Answer:
    """One answer. Each question about it returns None where the answer does not say, or says what cannot be so."""

    def __init__(self, status: int, headers: Headers, body: bytes, at_ms: int) -> None:
        self.status = status
        self.body = body if len(body) <= MAX_BODY_BYTES else b""
        self.at_ms = at_ms
        self._headers: dict[str, str] = {}
        pairs = headers.items() if hasattr(headers, "items") else headers
        for name, value in pairs:
            key = name.lower()
            # Sent twice, it is one text that is no figure.
            self._headers[key] = f"{self._headers[key]}, {value}" if key in self._headers else value

    def fits(self, match: Match) -> bool:
        """Whether a rule is about this answer."""
        if match.status not in (None, self.status) or (match.body and match.body not in self._text):
            return False
        if match.pointer is None:
            return True
        value = self._at(match.pointer)
        if match.value is None:
            return bool(value)
        return type(value) is type(match.value) and value == match.value

    def units(self, used: Used) -> list[int | None]:
        """What it says of each figure of what the call used."""
        return [
            next((units for place in figure.places if (units := self._units(place)) is not None), None)
            for figure in used.figures
        ]

    def _units(self, field: Field) -> int | None:
        """In JSON it is a whole number: an answer that writes it otherwise says nothing."""
        value = self._value(field, "units")
        is_text = bool(field.header) or field.pattern is not None
        return _whole(value) if isinstance(value, str if is_text else int) else None

    def remaining(self, rule: LevelRule) -> tuple[int | None, int | None]:
        """The units that remain, and of how many."""
        field = rule.remaining
        limit = _whole(self._value(field, "limit")) if field.pattern is not None else None
        if limit is None and rule.limit is not None:
            limit = _whole(self._value(rule.limit, "limit"))
        remaining = _whole(self._value(field, "remaining"))
        if remaining is None and field.pattern is not None and limit is not None:
            used = _whole(self._value(field, "used"))
            remaining = None if used is None else max(0, limit - used)
        return remaining, limit

    def text(self, field: Field, group: str) -> str | None:
        value = self._value(field, group)
        return value if isinstance(value, str) and value else None

    def moment_ms(self, field: Field, group: str) -> int | None:
        return self._moment_ms(self._value(field, group), field.form)

    @property
    def retry_at_ms(self) -> int | None:
        """The time that Retry-After names, if it is to come."""
        value = self._headers.get("retry-after", "")
        at_ms = self._moment_ms(value, "seconds")
        if at_ms is None:
            at_ms = self._moment_ms(value, "http-date")
        return None if at_ms is None or at_ms <= self.at_ms else at_ms

    def lasts_until_ms(self, lasts: Field | Refill) -> int | None:
        """Until when a closing lasts, as the answer says it."""
        if isinstance(lasts, Field):
            until_ms = self.moment_ms(lasts, "lasts")
        else:
            asked, left, per_second = (_figure(self._at(pointer)) for pointer in lasts)
            if asked is None or left is None or not per_second:
                return None
            span_ms = (asked - left) / per_second * SECOND_MS
            if not span_ms < LATEST_MS:  # it never comes back, or at no time that a ledger can hold
                return None
            until_ms = self.at_ms + math.ceil(span_ms)
        return None if until_ms is None or until_ms <= self.at_ms else until_ms

    def policies(self) -> list[tuple[str, int, int | None, int | None]]:
        """What `RateLimit` says of each policy: its name, what remains, of how many, until when. The draft of the IETF
        (draft-ietf-httpapi-ratelimit-headers) has the numbers of the policies in `RateLimit-Policy`."""
        quotas = {name: figures.get("q") for name, figures in _items(self._headers.get("ratelimit-policy", ""))}
        return [
            (name, figures["r"], quotas.get(name), self.at_ms + figures["t"] * SECOND_MS if "t" in figures else None)
            for name, figures in _items(self._headers.get("ratelimit", ""))
            if "r" in figures
        ]

    # -- values ------------------------------------------------------------------------------------------------------

    def _value(self, field: Field, group: str) -> object:
        """What stands at a field: a text of a header, or a value of the JSON."""
        value: object = self._headers.get(field.header) if field.header else self._at(field.pointer or ())
        if field.pattern is None or value is None:
            return value
        if not isinstance(value, str):
            return None
        found = field.pattern.search(value[:MAX_HEADER_LENGTH])
        return None if found is None else found.groupdict().get(group)

    def _at(self, pointer: Pointer) -> object:
        return value_at(self._json, pointer)

    @cached_property
    def _json(self) -> object:
        try:
            return json.loads(self.body) if self.body else None
        except (ValueError, RecursionError):
            return None

    @cached_property
    def _text(self) -> str:
        return self.body.decode("utf-8", "replace").lower()

    def _moment_ms(self, value: object, form: Form | None) -> int | None:
        """A time in ms by this machine's clock. One of the calendar is reckoned from the answer's own Date, so that it
        is right whatever this machine's clock says."""
        text = str(value).strip() if isinstance(value, str | int | float) else ""
        if form == "duration":
            span_ms = _duration_ms(text)
            return None if span_ms is None else self.at_ms + span_ms
        if form in ("epoch", "seconds"):
            if not re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,9})?", text, re.ASCII):
                return None
            ms = math.ceil(float(text) * SECOND_MS)
            return self.at_ms + ms if form == "seconds" else self._from_date(ms)
        date_ms = _date_ms(parsedate_to_datetime if form == "http-date" else datetime.fromisoformat, text)
        return None if date_ms is None else self._from_date(date_ms)

    def _from_date(self, ms: int) -> int:
        date_ms = _date_ms(parsedate_to_datetime, self._headers.get("date", ""))
        return ms if date_ms is None else self.at_ms + ms - date_ms


def units_in(used: Used, document: bytes) -> list[int | None]:
    """What a JSON document of an answer says of each figure of what a call used: the whole of it, or one event."""
    return _Answer(200, (), document, 0).units(used)


def _figure(value: object) -> float | None:
    """A number from 0 to the largest that is stored, fractions included."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_UNITS:
        return value
    return None


def _whole(value: object) -> int | None:
    """A whole number from 0 to the largest that is stored: as a number, or as its digits."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"\s*[0-9]{1,16}\s*", value, re.ASCII) else None
    figure = _figure(value)
    return int(figure) if figure is not None and figure == int(figure) else None


def _duration_ms(text: str) -> int | None:
    """`2h9m`, `6m0s`, `40591s`, `1.5s`, `20ms`; the full stop of a sentence may follow."""
    text = text.rstrip(".")[:64]
    parts = re.findall(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(ms|[smhd])", text, re.ASCII)
    if not parts or "".join(map("".join, parts)) != text:
        return None
    return math.ceil(sum(float(number) * UNITS_MS[unit] for number, unit in parts))


def _date_ms(read: Callable[[str], datetime], text: str) -> int | None:
    """A date, as it is read. Without a zone it is in UTC."""
    try:
        moment = read(text[:64])
        return math.ceil((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * SECOND_MS)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


_ITEM = re.compile(r'"([^"\\]{1,64})"((?:\s*;\s*[a-z*][a-z0-9_.*-]*(?:="[^"]*"|=[^;,"\s]*)?)*)', re.ASCII)


def _items(text: str) -> list[tuple[str, dict[str, int]]]:
    """The items of a structured field (RFC 9651), each with those of its parameters that are whole numbers."""
    items = _ITEM.findall(text[:MAX_HEADER_LENGTH])[:MAX_POLICIES]
    return [
        (name, {key: int(number) for key, number in re.findall(r";\s*([a-z]+)=([0-9]{1,15})(?=\s*(?:;|$))", figures)})
        for name, figures in items
    ]
