"""The seam for upstreams: it names the method of a request, and reads an answer. The cost book chooses the upstream.

    upstream_of(book)   Google, or Described if the book itself describes its API
    Meaning             what one answer means: an error, buckets that it closes, what remains, what the call cost
    Closing             a bucket that is closed for everybody
    Google              what is asked of an upstream. A third upstream extends Described, and is a case in `upstream_of`

Reading an answer (`quota.clients.answer_fields`) is pure and never raises. An impossible value, or one about another
pool, changes nothing. Only what the book calls `free` or `units` ever frees a unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quota.clients.answer_fields import Answer, AnswerLimits, Headers, PoolState
from quota.clients.discovery import Routes, description, first_route, routes_of
from quota.clients.upstream_errors import UpstreamError, buckets_of, classify, error_in, plain
from quota.common.clock import NEVER, host_clock
from quota.common.hosts import readings_of
from quota.errors import ConfigError, UsageError
from quota.rules.evidence import Heard, Level
from quota.terms.api import NO_BODY, OVERRIDES, VERBS, ClosedRule, Field, RequestBody, Route, as_read
from quota.terms.costs import CostBook
from quota.terms.limits import HOUR_MS, SECOND_MS, leaves_at

Sent = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]


class Closing(NamedTuple):
    """Upstream has closed a bucket until `until_ms`; None: until the bucket's own reset. `why` is upstream's word."""

    bucket: str
    until_ms: int | None
    why: str


class Meaning(NamedTuple):
    """What one answer means.

    `error` is upstream's error, also an error inside a good answer. `used_units` is what the call really cost; upstream
    does not count a `free` call. `unread` has the headers that should hold a number or a time, and hold something else.
    `is_pause`: the answer closes a bucket without evidence that the bucket is used up.
    """

    error: UpstreamError | None = None
    closes: tuple[Closing, ...] = ()
    levels: tuple[Level, ...] = ()
    used_units: int | None = None
    free: bool = False
    unread: Mapping[str, str] = MappingProxyType({})
    is_pause: bool = False
    heard: tuple[Heard, ...] = ()

    @property
    def changes_something(self) -> bool:
        """Whether the meaning changes anything in the ledger."""
        return bool(self.closes or self.levels or self.free)

    def with_evidence(self, heard: Sequence[Heard]) -> Meaning:
        """The meaning with the evidence from its levels: it keeps only the levels from which something follows, and
        closes each bucket of which nothing remains."""
        emptied = {
            each.level.bucket: Closing(each.level.bucket, each.until_ms, each.why_empty)
            for each in sorted(heard, key=attrgetter("until_ms"))  # of several windows the last to end
            if each.why_empty
        }
        levels = tuple([each.level for each in heard])
        return self._replace(levels=levels, heard=tuple(heard), closes=(*self.closes, *emptied.values()))


NOTHING = Meaning()


def upstream_of(book: CostBook) -> Google:
    """The upstream of a cost book."""
    return Described(book) if book.described else Google(book)


def asked_wait_ms(status: int, headers: Headers, at_ms: int) -> int:
    """How long an answer asks to wait by its Retry-After, in ms; 0 without one."""
    return max(0, (Answer(status, headers, b"", at_ms).retry_at_ms or at_ms) - at_ms)


def passes_on(book: CostBook, endpoint: str | None) -> bool:
    """Whether `quota proxy` can serve a credential with this book and endpoint: it must know where the API is, and
    which method a request is."""
    upstream = upstream_of(book)
    with suppress(ConfigError):
        return bool(upstream.root(endpoint)) and upstream.knows_methods
    return False


def dearness(book: CostBook, verb: str, method: str, body: RequestBody | None) -> tuple[float, int]:
    """The sort key of a method by its price: the largest share of a bucket that a call takes now, then its units. A
    method outside the book costs the book's default. Without a body, a price that the body decides is the dearest."""
    in_book = book.canonical(method) in book.methods
    price = book.price_at(method, host_clock())[0] if in_book else book.default_price(verb)
    if price.reserved:
        if body is None:
            return inf, 0
        price = price.bound(body)
    return book.share_of(price), sum(part.units for part in price.parts)


def _dearest(
    book: CostBook, verb: str, path: str, first: Callable[[str], Route | None], body: RequestBody | None
) -> Route | None:
    """The route of a path, by the `first` route of a reading; None if the path costs the default. If the path has
    several readings, the dearest counts: the server may serve that one.

    A reading without a route costs the default. It counts if the plain path has no route either, or if `..` leads
    elsewhere. Otherwise an encoded character in a segment, such as the slash in GitLab's `group%2Fproject`, is data. If
    the route spells a dot, as Slack's `conversations.history` does, no format follows the dot.
    """
    routes = {reading: first(reading) for reading in readings_of(path)}
    plain = next(iter(routes.values()))
    if plain is not None and "{" not in plain.path and "." in plain.path.rpartition("/")[2]:
        routes = {reading: route for reading, route in routes.items() if "." in reading.rpartition("/")[2]}
    if len(routes) == 1:
        return plain
    leads_elsewhere = any("/../" in f"{reading}/" for reading in routes)
    counted = [route for route in routes.values() if route is not None or plain is None or leads_elsewhere]
    if len(set(counted)) == 1:
        return counted[0]
    return max(counted, key=lambda route: dearness(book, verb, "" if route is None else route.method, body))


_OTHER_PATHS = ("x-original-url", "x-rewrite-url")
"""The header fields in which some servers, as IIS and Symfony, read another path."""


def _overrides(headers: Sent, *, by_wsgi: bool) -> Iterator[tuple[str, str]]:
    """The header fields that name another verb, each with a value. Some clients join the values of a field that is
    there twice. `by_wsgi`: the server may read a name as `as_read` does. Raises UsageError for another path."""
    for field in headers.items() if isinstance(headers, Mapping) else headers:
        name, value = (part.decode("latin-1") if isinstance(part, bytes) else str(part) for part in field)
        read = as_read(name)
        if read in _OTHER_PATHS:
            raise UsageError(f"the header field {name} names another path to some servers; leave it out")
        if read in OVERRIDES and (by_wsgi or read == name.lower()):
            for part in value.split(","):
                yield read, part.strip().upper()


_VERB_FIELD = re.compile(rb"[._x](?<![\w.][._x])(?:(?<!x)(?:http)?|-(?:http-)?)method(?!\w)")
"""Matches the field that overrides the verb: `_method` in Laravel and Rails, `_METHOD` in Slim, `_HttpMethod` in
Salesforce, or the header's name. PHP reads `.` in a name as `_`."""


def _may_name_verb(sent: bytes) -> bool:
    """Whether a query, a form or JSON may have such a field. To decode all of a long body could take gigabytes."""
    read = sent.lower().replace(rb"\u00", b"%")  # JSON's escape
    for letter in b"._-methodxp":
        read = read.replace(b"%%%02x" % letter, b"%c" % letter)
    return _VERB_FIELD.search(read) is not None


@dataclass(frozen=True)
class Google:
    """An API of Google. The installed client knows the methods, and errors name what has run out. Headers are
    ignored."""

    book: CostBook

    @property
    def knows_methods(self) -> bool:
        """Whether `method` can name requests."""
        return self._routes is not None

    def verbs(self, verb: str, url: str, headers: Sent, body: bytes = b"") -> list[str]:
        """The verbs by which the API may read a request. At Google X-HTTP-Method-Override of a POST replaces the verb.
        Raises UsageError if it does not name one, or if a field names another path."""
        named = [value for name, value in _overrides(headers, by_wsgi=False) if name == OVERRIDES[0]]
        overrides = named if verb.upper() == "POST" else []
        if len(overrides) > 1 or not all(map(str.isalpha, overrides)):
            raise UsageError("X-HTTP-Method-Override does not name one method")
        return overrides or [verb]

    def continues(self, verb: str, url: str) -> bool:
        """Whether a request continues a call that was charged at its beginning."""
        return self._routes is not None and self._routes.is_part(verb, url)

    def is_batch(self, verb: str, url: str) -> bool:
        """Whether a request carries several calls."""
        return self._routes is not None and self._routes.is_batch(verb, url)

    def method(self, verb: str, url: str, body: RequestBody | None = None) -> str | None:
        """The API method of a request; None if it is unknown. If it may be one of several, its `body` helps to find the
        dearest. Raises UsageError for a batch: it holds several calls."""
        if self.is_batch(verb, url):
            raise UsageError("a batch holds several calls; send it with q.google(), which charges each of them")
        return self._method(verb, url, body)

    def _method(self, verb: str, url: str, body: RequestBody | None) -> str | None:
        routes = self._routes
        return None if routes is None else self.named(routes, verb.upper(), urlsplit(url).path)

    def name(self, verb: str, url: str, body: RequestBody | None = None) -> str:
        """The method of a request; if it is unknown, as the route for it would read."""
        return self.method(verb, url, body) or f"{verb} **"

    def dearest_verb(
        self, verb: str, url: str, headers: Sent, body: RequestBody, name: Callable[[str, str, RequestBody], str]
    ) -> str:
        """Of the verbs by which the API may read a request, the dearest by the `name` of the method. Raises
        UsageError."""
        verbs = self.verbs(verb, url, headers, body.content or body.heads)
        if len(verbs) == 1:
            return verbs[0]
        return max(verbs, key=lambda verb: dearness(self.book, verb, name(verb, url, body), body))

    def named(self, routes: Routes, verb: str, path: str) -> str | None:
        """The method of a request by these routes; None if it is unknown."""
        route = _dearest(self.book, verb, path, partial(routes.first, verb), NO_BODY)  # no price of Google's needs one
        return None if route is None else route.method

    def fit(self, verb: str, url: str) -> tuple[int, int]:
        """How many characters of the path name the endpoint, and how many the method; -1 if the method is unknown."""
        return self._chars_of_base(url), -1 if self.method(verb, url) is None else 0

    def _chars_of_base(self, url: str) -> int:
        base = f"{self.book.base_path}/".lower()
        is_below = any(f"{path}/".lower().startswith(base) for path in readings_of(urlsplit(url).path))
        return len(base) if is_below else 0

    @property
    def _routes(self) -> Routes | None:
        book = self.book  # another vendor's API may be called `chat`, too
        return routes_of(book.api, book.version, book.base_path) if book.googles else None

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether `read` needs the body of this answer."""
        return status >= 400

    def read(self, status: int, headers: Headers, body: bytes, *, method: str, at_ms: int) -> Meaning:
        """What this answer to a call of `method` means. It came at `at_ms`; times in the meaning are by the same clock.
        Never raises: an unreadable part counts as absent."""
        if status < 400:
            return NOTHING
        error = classify(status, body, method=method, book=self.book)
        if error.bucket is None:
            return Meaning(error)
        until_ms = NEVER if error.kind == "project_blocked" else None
        return Meaning(error, (Closing(error.bucket, until_ms, error.message),))

    def client(self, session: Any, credential: str, **limits: Any) -> Any:
        """The metered client of a job. It keeps the job's limits as far as it can."""
        return session.google(credential, self.book.api, self.book.version, **limits)

    def root(self, endpoint: str | None) -> str:
        """The address of the API for a credential with this endpoint, without a slash at its end. Raises
        ConfigError."""
        address: str = description(self.book.api, self.book.version)["rootUrl"]
        return endpoint or address.rstrip("/")


class Described(Google):
    """An API that its cost book describes: `hosts`, `routes`, `answers`. For errors that the book does not describe,
    Google's rules apply: many APIs use Google's words."""

    @property
    def knows_methods(self) -> bool:
        return bool(self.book.routes)

    def verbs(self, verb: str, url: str, headers: Sent, body: bytes = b"") -> list[str]:
        if not self.book.has_session:
            return super().verbs(verb, url, headers, body)
        named = [value for _, value in _overrides(headers, by_wsgi=True) if value in VERBS]
        sent = urlsplit(url).query.encode(), body if verb.upper() == "POST" else b""  # WordPress reads it for any verb
        return [verb, *named, *(VERBS if any(map(_may_name_verb, sent)) else ())]

    def _method(self, verb: str, url: str, body: RequestBody | None) -> str | None:
        route = self._route(verb, url, body)
        return None if route is None else route.method

    def fit(self, verb: str, url: str) -> tuple[int, int]:
        route = self._route(verb, url)
        return self._chars_of_base(url), -1 if route is None else route.named_chars

    def _route(self, verb: str, url: str, body: RequestBody | None = None) -> Route | None:
        bases = [self.book.base_path, *[f"/{host.partition('/')[2]}".rstrip("/") for host in self.book.hosts]]

        def first(reading: str) -> Route | None:
            # Read without the path of the endpoint or of a host, and with it: some books name it in their routes.
            below = [base for base in bases if base and f"{reading}/".lower().startswith(f"{base}/".lower())]
            ways = [*[reading[len(base) :] or "/" for base in below], reading]
            routes = [first_route(self.book.routes, verb, way) for way in ways]
            return max(filter(None, routes), key=attrgetter("named_chars"), default=None)

        path = re.split("[?#]", url.partition("://")[2], maxsplit=1)[0].partition("/")[2]
        return _dearest(self.book, verb, f"/{path}", first, body)

    def reads_body(self, status: int, headers: Mapping[str, str]) -> bool:
        if status >= 400:
            return True
        # Events come as they happen, and the reader waits for each.
        as_it_comes = headers.get("content-type", "").lower().startswith("text/event-stream")
        return not as_it_comes and self.book.answers.reads_body(status)

    def read(self, status: int, headers: Headers, body: bytes, *, method: str, at_ms: int) -> Meaning:
        answer, rules = Answer(status, headers, body, at_ms), self.book.answers
        rule = next((rule for rule in rules.closed if answer.fits(rule.when)), None)
        states = list(self._states(answer, method, rule))
        base = super().read(status, headers, body, method=method, at_ms=at_ms)
        error, closes = self._closed(answer, method, rule, states, base)
        closed = {closing.bucket for closing in closes}  # says already that nothing remains
        own = [state for state in states if not state.is_others]
        levels = (
            Level(state.bucket, state.remaining_units, state.limit_units, state.reset_ms, state.window_ms)
            for state in own
            if state.bucket in self.book.buckets and state.remaining_units is not None
            if not state.is_over(at_ms) and not (state.is_empty and state.bucket in closed)
        )
        used_units = None if rules.units is None else rules.units.total(answer.units(rules.units))
        free = any(map(answer.fits, rules.free))
        is_empty = any(state.is_empty for state in own)
        # A rule with a status alone, or with `lasts`, matches calls that came too soon.
        is_pause = rule is not None and not is_empty and (rule.lasts is not None or not rule.when.reads_body)
        return Meaning(error, closes, tuple(dict.fromkeys(levels)), used_units, free, answer.unread, is_pause)

    def client(self, session: Any, credential: str, **limits: Any) -> Any:
        if not self.book.has_session:
            return super().client(session, credential, **limits)
        from quota.clients.deadline import watch_each  # late: it imports http.client

        answer_s, body_mb = limits.get("max_answer_s"), limits.get("max_body_mb")
        made = session.requests(credential, max_units=limits.get("max_units"), timeout_s=answer_s, max_body_mb=body_mb)
        watch_each(made, AnswerLimits(body_mb, answer_s), limits.get("waiting"))
        return made

    def root(self, endpoint: str | None) -> str:
        if not self.book.has_session:
            return super().root(endpoint)
        if not (self.book.hosts or endpoint):
            raise ConfigError(f"cost book {self.book.name!r} names no host; give the credential its endpoint")
        return endpoint or self.book.address

    # -- what is closed ----------------------------------------------------------------------------------------------

    def _closed(
        self, answer: Answer, method: str, rule: ClosedRule | None, states: list[PoolState], base: Meaning
    ) -> tuple[UpstreamError | None, tuple[Closing, ...]]:
        """The error of an answer, and the buckets that it closes: by the first matching rule, else by a pool that the
        answer reports as empty, else by Google's rules."""
        empty = [state for state in states if state.is_empty and not state.is_over(answer.at_ms)]
        if rule is not None:
            named = states[0].bucket if states and states[0].named else ""
            charged, used_up = buckets_of(method, self.book), {state.bucket for state in states if state.is_empty}
            bucket = rule.bucket or next((name for name in charged if name in used_up), named or charged[0])
        elif answer.status in (403, 429) and empty:
            bucket = empty[0].bucket
        elif base.error is not None and base.error.kind == "project_blocked":
            return base.error, base.closes
        else:
            later = (
                closing._replace(until_ms=self._until_ms(answer, None, closing.bucket, states))
                for closing in base.closes
            )
            return base.error, tuple(later)
        error = error_in(answer.body)
        at_rule = None if rule is None else answer.text(Field(pointer=rule.when.pointer), "")
        reason = error.reason or plain(at_rule or "")
        message = error.words or reason or f"HTTP {answer.status}"
        until_ms = self._until_ms(answer, rule, bucket, states)
        return UpstreamError("closed", bucket, reason, message), (Closing(bucket, until_ms, message),)

    def _until_ms(self, answer: Answer, rule: ClosedRule | None, bucket: str, states: list[PoolState]) -> int | None:
        """Until when a bucket is closed: the later of its reset and Retry-After, else the time of the rule or the end
        of a shorter window that is used up, and never after `_latest_ms`. A time in the past makes a short pause. None
        if no time is known.

        If the rule has a time of its own and units remain, the reset does not count: upstream does not wait for it.
        """
        lasts = None if rule is None else rule.lasts
        own = [state for state in states if state.bucket == bucket]
        empty = [state for state in own if state.is_empty]  # what remains elsewhere is not the cause
        named = empty or [state for state in own if not (lasts is not None and state.remaining_units)]
        resets = sorted(state.reset_ms for state in named if state.reset_ms is not None)
        times = [answer.retry_at_ms, *(resets if empty else resets[:1])]  # of unknown cause: the first window to end
        until_ms = max((time for time in times if time is not None), default=None)
        shorter_ms = self._shorter_end_ms(empty, answer.at_ms)
        if lasts is not None and (until_ms or 0) <= answer.at_ms:
            own_ms = answer.at_ms + lasts if isinstance(lasts, int) else answer.lasts_until_ms(lasts)
            until_ms = min(filter(None, (own_ms, shorter_ms)), default=until_ms)
        if until_ms is None:
            return shorter_ms
        latest_ms = max(self._latest_ms(answer, rule, bucket), answer.at_ms + BELIEVED_WAIT_MS)
        return min(until_ms if until_ms > answer.at_ms else answer.at_ms + PAUSE_MS, latest_ms)

    def _shorter_end_ms(self, empty: Sequence[PoolState], at_ms: int) -> int | None:
        """When the windows end that these states of one bucket name. None if one of them names none, or the longest."""
        ends: list[int] = []
        for state in empty:
            quotas = self.book.buckets[state.bucket].quotas if state.bucket in self.book.buckets else ()
            longest_ms = self._period_ms(state.bucket)
            windows = [quota.window for quota in quotas if state.names(quota)]
            if len(windows) != 1 or windows[0].longest_ms == longest_ms:
                return None
            ends.append(leaves_at(windows[0], at_ms))
        return max(ends, default=None)

    def _latest_ms(self, answer: Answer, rule: ClosedRule | None, bucket: str) -> int:
        """The latest time that an answer may name: after the bucket's period, or the book's own `lasts` if that is
        longer."""
        lasts = rule.lasts if rule is not None and rule.bucket in ("", bucket) else None
        return answer.at_ms + max(self._period_ms(bucket), lasts if isinstance(lasts, int) else 0)

    def _period_ms(self, bucket: str) -> int:
        return self.book.buckets.get(bucket, self.book.main_bucket).window.longest_ms

    # -- what remains ------------------------------------------------------------------------------------------------

    def _states(self, answer: Answer, method: str, closed_by: ClosedRule | None) -> Iterator[PoolState]:
        """The states of the book's pools in the answer, even if it has only a reset. A cached answer has none: it is
        about another time."""
        if answer.is_stored:
            return
        for rule in self.book.answers.levels:
            place, name = rule.bucket, None
            if isinstance(place, str):
                bucket = place
            else:
                name = None if place is None else answer.text(place, "bucket")
                bucket = buckets_of(method, self.book)[0] if name is None else self._named(name)
            if not bucket:
                answer.note_outside(rule)
            else:
                remaining, limit = answer.remaining(rule)
                reset_ms = None if rule.reset is None else answer.moment_ms(rule.reset, "reset")
                given = PoolState(bucket, remaining, limit, reset_ms, named=name is not None)
                checked = self._checked(answer, closed_by, given)
                answer.note_impossible(rule.remaining, remaining, checked.remaining_units)
                answer.note_impossible(rule.reset, reset_ms, checked.reset_ms)
                yield checked
        has_rule = any(rule.remaining.header.startswith("ratelimit") for rule in self.book.answers.levels)
        for policy in answer.policies():
            state = self._state_by(policy, answer.at_ms)
            changes = state is not None and (answer.status in (403, 429) or not state.is_others)
            if not (changes or has_rule):
                answer.note_unmatched()
            if state is not None:
                yield self._checked(answer, closed_by, state)

    def _state_by(self, policy: PoolState, at_ms: int) -> PoolState | None:
        """The state of a pool by a policy; None if the policy says nothing of a pool of the book."""
        bucket, main = self._named(policy.bucket), self.book.main_bucket
        if not bucket and len(self.book.buckets) > 1:
            # Number and window together tell which bucket it is about, if they are of one bucket alone.
            quotas = {each.name: each.quotas for each in self.book.buckets.values()}
            same = [name for name in quotas if any(map(policy.is_of, quotas[name]))]
            return policy._replace(bucket=same[0]) if len(same) == 1 and policy.counts_calls else None
        # Without a bucket's name, the policy is the book's only bucket if its window's length says so, else if its
        # limit does, else if the answer has no other policy.
        is_named = policy.window_ms is not None or policy.limit_units is not None
        is_of_main = any(map(policy.names, main.quotas)) if is_named else policy.is_only
        if bucket or (policy.counts_calls and is_of_main):
            return policy._replace(bucket=bucket or main.name)
        ends_ms = None if policy.window_ms is None else at_ms + policy.window_ms
        reset_ms = policy.reset_ms or ends_ms
        if policy.remaining_units or reset_ms is None:
            return None
        return PoolState(main.name, 0, None, reset_ms, is_others=True)

    def _named(self, name: str) -> str:
        """The bucket or pool with this name or mark; "" if there is none."""
        if name in self.book.buckets:
            return name
        return next((pool.name for pool in self.book.pools if name in (pool.name, *pool.marks)), "")

    def _checked(self, answer: Answer, closed_by: ClosedRule | None, state: PoolState) -> PoolState:
        """The state without impossible values: more remaining than the limit, or a reset after `_latest_ms`. If nothing
        remains, a later Retry-After is the reset."""
        remaining, limit, reset_ms = state.remaining_units, state.limit_units, state.reset_ms
        if remaining is not None and limit is not None and remaining > limit:
            state = state._replace(remaining_units=None, limit_units=None)
        latest_ms = self._latest_ms(answer, closed_by, state.bucket)
        if reset_ms is not None and reset_ms > latest_ms + CLOCK_MS:
            reset_ms = None
        if state.is_empty and (answer.retry_at_ms or 0) > max(answer.at_ms, reset_ms or 0):
            reset_ms = min(answer.retry_at_ms or 0, latest_ms)
        return state._replace(reset_ms=reset_ms)


PAUSE_MS = SECOND_MS
"""The shortest time for which a bucket is closed, if upstream names a time in the past."""

BELIEVED_WAIT_MS = HOUR_MS
"""A wait of upstream's may be longer than the bucket's period, but a mistake in it must not cost more than this."""

CLOCK_MS = 5 * SECOND_MS
"""How far a reset may lie beyond its bucket's period: clocks differ, and headers count whole seconds."""
