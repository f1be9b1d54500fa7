"""The seam for upstreams: which method a request is, and what an answer means. The cost book chooses the upstream.

    upstream_of(book)   Google, or Described where the book itself says what its API is like
    Reading             what one answer means: an error, buckets that it closes, what remains, what the call cost
    Closing             a bucket that is closed for everybody
    Access              what a program needs that passes requests on to an API
    Upstream            what an upstream must do; a third one is a class here and a case in `upstream_of`

Reading an answer (`quota.clients.answer_fields`) is pure and never raises. What cannot be so, or is of another pool,
changes nothing, and nothing in an answer but what the book calls `free` or `units` ever frees a unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from quota.clients.answer_fields import Answer, Headers
from quota.clients.discovery import Routes, description, discovered, scopes_of
from quota.clients.upstream_errors import UpstreamError, bucket_of, classify, words_of
from quota.common.clock import NEVER
from quota.common.hosts import readings_of
from quota.errors import ConfigError, UsageError
from quota.terms.api import ClosedRule, KeyPlace, LevelRule, Route
from quota.terms.costs import CostBook
from quota.terms.evidence import Level
from quota.terms.limits import SECOND_MS

Sent = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]


class Closing(NamedTuple):
    """Upstream has closed a bucket until `until_ms`; None: until the bucket's own reset. `why` is upstream's word."""

    bucket: str
    until_ms: int | None
    why: str


class Reading(NamedTuple):
    """What one answer means.

    `error` is what the caller is told of an error, also of one inside a good answer. `used_units` is what the call
    really cost, and a `free` call is one that upstream does not count. `unread` has the headers that should say a
    number or a time, and say something else. `is_pause`: it closes a bucket, and nothing in it says that one is
    used up.
    """

    error: UpstreamError | None = None
    closes: tuple[Closing, ...] = ()
    levels: tuple[Level, ...] = ()
    used_units: int | None = None
    free: bool = False
    unread: Mapping[str, str] = MappingProxyType({})
    is_pause: bool = False

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


def passes_on(book: CostBook, endpoint: str | None) -> bool:
    """Whether `quota proxy` can serve a credential with this book and endpoint: it must know where the API is, and
    which method a request is."""
    upstream = upstream_of(book)
    try:
        return upstream.access(endpoint).method is not None or upstream.knows_methods
    except ConfigError:
        return False


def _dearest(book: CostBook, verb: str, methods: Iterable[str]) -> str | None:
    """Of these methods that which takes most of a bucket, the first of those that take the same; None if there is none.
    One that the book does not have costs its default."""

    def cost(method: str) -> tuple[float, int]:
        price = book.price(method) if book.canonical(method) in book.methods else book.default_price(verb)
        shares = [part.units / book.buckets[part.bucket].quota_units for part in price.parts]
        return max(shares, default=0), sum(part.units for part in price.parts)

    return max(methods, key=cost, default=None)


def verb_of(upstream: Upstream, verb: str, headers: Sent) -> str:
    """By which verb the API reads a request with these header fields. Raises UsageError where that is not clear."""
    if verb.upper() != "POST" or not upstream.overrides:
        return verb
    fields = headers.items() if isinstance(headers, Mapping) else headers
    overrides = [_text(value) for name, value in fields if _text(name).lower() == "x-http-method-override"]
    if len(overrides) > 1 or not all(map(str.isalpha, overrides)):
        raise UsageError("X-HTTP-Method-Override does not name one method")
    return overrides[0].upper() if overrides else verb


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
        return None if routes is None else self.named(routes, verb.upper(), path)

    def named(self, routes: Routes, verb: str, path: str) -> str | None:
        """The method of a request by these routes; of several that it may be, the dearest."""
        return _dearest(self.book, verb, routes.methods(verb, path))

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
            return self.named(routes, verb, path) or f"{verb} {path}"

        return Access(
            root,
            self.book.key,
            tuple(scopes_of(document)),
            method,
            lambda verb, url: routes.is_batch(verb, urlsplit(url).path),
            ("key", "access_token", "oauth_token"),
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
        return -1 if route is None else route.named_chars

    def _route(self, verb: str, url: str) -> Route | None:
        """Of a path that can be read in several ways, the route of the dearest method: the server may serve that."""
        path = re.split("[?#]", url.partition("://")[2], maxsplit=1)[0].partition("/")[2]
        firsts = (
            next((route for route in self.book.routes if route.matches(verb, reading)), None)
            for reading in readings_of(path)
        )
        routes = [route for route in firsts if route is not None]
        if len(routes) < 2:
            return next(iter(routes), None)
        method = _dearest(self.book, verb, [route.method for route in routes])
        return next(route for route in routes if route.method == method)

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        if status >= 400:
            return True
        # Events come as they happen, and their reader waits for each.
        as_it_comes = headers.get("content-type", "").lower().startswith("text/event-stream")
        return not as_it_comes and self.book.answers.reads_body(status)

    def read(self, status: int, headers: Headers, body: bytes, *, method: str, at_ms: int) -> Reading:
        answer, rules = Answer(status, headers, body, at_ms), self.book.answers
        states = list(self._states(answer, method))
        base = Google(self.book).read(status, headers, body, method=method, at_ms=at_ms)
        rule = next((rule for rule in rules.closed if answer.fits(rule.when)), None)
        error, closes = self._closed(answer, method, rule, states, base)
        closed = {closing.bucket for closing in closes}
        levels = (
            Level(state.bucket, state.remaining_units, state.limit_units, state.reset_ms)
            for state in states
            if state.remaining_units is not None and state.bucket in self.book.buckets and state.bucket not in closed
            if not state.is_over(at_ms)
        )
        used_units = None if rules.units is None else rules.units.total(answer.units(rules.units))
        free = any(map(answer.fits, rules.free))
        used_up = any(state.is_empty for state in states) or (rule is not None and rule.says_empty)
        return Reading(error, closes, tuple(levels), used_units, free, answer.unread, rule is not None and not used_up)

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
        self, answer: Answer, method: str, rule: ClosedRule | None, states: list[_PoolState], base: Reading
    ) -> tuple[UpstreamError | None, tuple[Closing, ...]]:
        """The error of an answer, and what it closes: by the first rule that fits, by the pool that it says is empty,
        or as Google's answers do."""
        if rule is not None:
            bucket = rule.bucket or (states[0].bucket if states and states[0].named else bucket_of(method, self.book))
        elif answer.status in (403, 429) and (
            empty := [x for x in states if x.is_empty and not x.is_over(answer.at_ms)]
        ):
            bucket = empty[0].bucket
        else:
            lasting = base.error is not None and base.error.kind == "project_blocked"
            later = (
                closing._replace(until_ms=self._until_ms(answer, None, closing.bucket, states))
                for closing in base.closes
            )
            return base.error, base.closes if lasting else tuple(later)
        reason, message = words_of(answer.body)
        if rule is not None and isinstance(rule.when.value, str):
            reason = reason or rule.when.value
        message = message or reason or f"HTTP {answer.status}"
        until_ms = self._until_ms(answer, rule, bucket, states)
        return UpstreamError("closed", bucket, reason, message), (Closing(bucket, until_ms, message),)

    def _until_ms(self, answer: Answer, rule: ClosedRule | None, bucket: str, states: list[_PoolState]) -> int | None:
        """Until when a bucket is closed: the later of its reset and of Retry-After, else for as long as the rule says;
        for no longer than its period. A time that is over is a short pause. None where nobody says.

        While units remain, the reset is not what upstream waits for where the rule has a time of its own.
        """
        lasts = None if rule is None else rule.lasts
        times = [answer.retry_at_ms]
        times += [
            state.reset_ms
            for state in states
            if state.bucket == bucket and not (lasts is not None and state.remaining_units)
        ]
        until_ms = max((time for time in times if time is not None), default=None)
        if lasts is not None and (until_ms is None or until_ms <= answer.at_ms):
            own_ms = answer.at_ms + lasts if isinstance(lasts, int) else answer.lasts_until_ms(lasts)
            until_ms = until_ms if own_ms is None else own_ms
        if until_ms is None:
            return None
        return min(max(until_ms, answer.at_ms + PAUSE_MS), answer.at_ms + self._period_ms(bucket))

    def _period_ms(self, bucket: str) -> int:
        return self.book.buckets.get(bucket, self.book.main_bucket).window.longest_ms

    # -- what remains ------------------------------------------------------------------------------------------------

    def _states(self, answer: Answer, method: str) -> Iterator[_PoolState]:
        """What the answer says of the book's pools, also where it says no more than when one resets."""
        for rule in self.book.answers.levels:
            bucket, named = self._pool(answer, rule, method)
            if bucket:
                remaining, limit = answer.remaining(rule)
                reset_ms = None if rule.reset is None else answer.moment_ms(rule.reset, "reset")
                yield from self._checked(answer, _PoolState(bucket, named, remaining, limit, reset_ms))
        items = answer.policies()
        for name, remaining, limit, reset_ms in items:
            bucket = self._named(name)
            if not bucket and len(items) == len(self.book.buckets) == 1:
                bucket = self.book.main_bucket.name
            if bucket:
                yield from self._checked(answer, _PoolState(bucket, True, remaining, limit, reset_ms))

    def _pool(self, answer: Answer, rule: LevelRule, method: str) -> tuple[str, bool]:
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

    def _checked(self, answer: Answer, state: _PoolState) -> Iterator[_PoolState]:
        """What is said, if it may be so. A reset beyond the period is none."""
        remaining, limit, reset_ms = state.remaining_units, state.limit_units, state.reset_ms
        if remaining is not None and limit is not None and remaining > limit:
            state = state._replace(remaining_units=None, limit_units=None)
        if reset_ms is not None and reset_ms > answer.at_ms + self._period_ms(state.bucket) + CLOCK_MS:
            state = state._replace(reset_ms=None)
        yield state


PAUSE_MS = SECOND_MS
"""How long a bucket is closed at least: where upstream names a time that is over, it may be asked again at once."""

CLOCK_MS = 5 * SECOND_MS
"""How far a reset may be beyond its bucket's period: clocks differ, and headers count in whole seconds."""


class _PoolState(NamedTuple):
    """What an answer says of a pool, which the answer itself may have `named`."""

    bucket: str
    named: bool
    remaining_units: int | None
    limit_units: int | None
    reset_ms: int | None

    @property
    def is_empty(self) -> bool:
        return self.remaining_units == 0

    def is_over(self, at_ms: int) -> bool:
        """Whether the window of which it speaks is over."""
        return self.reset_ms is not None and self.reset_ms <= at_ms
