"""The cost book: it maps API methods to units in upstream's buckets. Its prices have dates and a source.

`headrooms` compares limits with a book.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time
from typing import NamedTuple
from zoneinfo import ZoneInfo

from quota.common.clock import NEVER
from quota.common.hosts import is_googles
from quota.common.text import listed, nearest, show
from quota.errors import UnknownMethod
from quota.terms.api import AnswerRules, KeyPlace, RequestBody, Reserve, Route
from quota.terms.limits import Calendar, Limit, Selector, Window, no_longer


class Quota(NamedTuple):
    """Upstream grants `units` in each `window`.

    Most upstreams count by calendar periods and reset at their end; a quota "per minute" has a sliding window.
    """

    units: int
    window: Window


class Bucket(NamedTuple):
    """A quota that upstream counts separately, in one window or several: so much an hour, and so much a day.

    `quota_units` and `window` are of the longest window. Its end is what people call the bucket's reset.
    """

    name: str
    quotas: tuple[Quota, ...]

    @property
    def quota_units(self) -> int:
        return self._longest.units

    @property
    def window(self) -> Window:
        return self._longest.window

    @property
    def limit_to_add(self) -> str:
        """The remedy if no limit holds the calls of this bucket."""
        return f'add a limit with bucket = "{self.name}" and quota = {self.quota_units:_}'

    @property
    def _longest(self) -> Quota:
        return max(self.quotas, key=lambda quota: quota.window.longest_ms)


MAX_PARTS = 10
"""The most buckets that one call is charged to."""


class Part(NamedTuple):
    """What one call adds to one bucket.

    The first part of a price may have a `reserve`: then only the answer says the units. `units` is the bound of a call
    whose request nobody knows.
    """

    bucket: str
    units: int
    reserve: Reserve | None = None

    def __str__(self) -> str:
        return f"{self.units:,} {self.bucket}" + (" reserved" if self.reserve else "")


class Price(NamedTuple):
    """The price of one call of a method, from `since` (inclusive) on: what it adds to each of its buckets.

    A call without parts is free. `units` and `bucket` are of the first part, for displays of one number; a free call
    has 0 and "". A caller's own units, and `settle`, also refer to the first part.
    """

    parts: tuple[Part, ...]
    since: date = date.min

    @property
    def units(self) -> int:
        return self.parts[0].units if self.parts else 0

    @property
    def bucket(self) -> str:
        return self.parts[0].bucket if self.parts else ""

    @property
    def reserved(self) -> bool:
        """Whether the price is a bound that an answer settles."""
        return bool(self.parts and self.parts[0].reserve)

    def bound(self, body: RequestBody, unread: Callable[[], object] = lambda: None) -> Price:
        """The price of a request with this body; see `Reserve.bound`."""
        return self._reserving(lambda reserve: reserve.bound(body, unread))

    @property
    def least(self) -> Price:
        """The price of the cheapest call: a reserve may be bound to less than its default."""
        return self._reserving(lambda reserve: reserve.least)

    def _reserving(self, units_of: Callable[[Reserve], int]) -> Price:
        """This price, with these units where it reserves."""
        if not self.reserved:
            return self
        parts = [part._replace(units=units_of(part.reserve)) if part.reserve else part for part in self.parts]
        return self._replace(parts=tuple(parts))

    def counted_by(self, selector: Selector) -> int:
        """What the call adds to a limit that selects its method."""
        return sum(selector.cost(part.units) for part in self.parts if selector.counts_bucket(part.bucket))

    def units_in(self, bucket: str) -> int:
        """What the call adds to one bucket."""
        return sum(part.units for part in self.parts if part.bucket == bucket)

    def __str__(self) -> str:
        """For people: `1 core and 5 points`."""
        return " and ".join(map(str, self.parts)) or "free"


class Pool(NamedTuple):
    """How upstream's error bodies name a pool, and the methods that stop when it runs out.

    An error belongs to the pool if its `quota_limit`, `quota_metric` or message contains one of `marks`. `methods` then
    stop. `name` is a bucket of the book, or a name of its own: upstream has a search pool even if the book charges
    searches to the shared bucket.
    """

    name: str
    marks: tuple[str, ...]
    methods: tuple[str, ...]


class Probe(NamedTuple):
    """A cheap call that any valid key may make. It shows whether upstream accepts the key."""

    method: str
    parameters: Mapping[str, object]


class Metric(NamedTuple):
    """How Cloud Monitoring names one bucket or pool: its label `quota_metric`, and the `limit_name` of its daily
    limit."""

    bucket: str
    quota_metric: str
    limit_name: str


class Monitoring(NamedTuple):
    """How Cloud Monitoring names an API: its `service`, its buckets and pools, and its methods.

    Upstream calls a method `SERVICE.Verb`; `resources` maps each SERVICE to the first half of the book's own name.
    """

    service: str
    metrics: tuple[Metric, ...]
    resources: Mapping[str, str]

    def method(self, name: str) -> str:
        """The book's name for one of upstream's: `youtube.api.v3.V3DataVideoService.List` -> `videos.list`. A name that
        the book does not map stays as it is."""
        service, _, verb = name.rpartition(".")
        resource = self.resources.get(service)
        return name if resource is None else f"{resource}.{verb[:1].lower()}{verb[1:]}"


class CostBook(NamedTuple):
    """The prices of one API, with their source and the date on which somebody read them there.

    The API's terms allow users to keep data for `retention_ms`; None if they say nothing. `quota doctor --call` makes
    the call `probe`, if there is one. `monitoring` is None if upstream's own figures cannot be read. `hosts`, `routes`
    and `answers` describe an API that is not Google's: see `quota.terms.api`. Clients put a key at `key`. An account
    that logs in asks for `scopes`. `base_path` is the path of the endpoint: the API's own paths begin below it.
    """

    name: str
    api: str
    source: str
    read_on: date
    retention_ms: int | None
    buckets: Mapping[str, Bucket]
    methods: Mapping[str, tuple[Price, ...]]
    default_get: Price
    default_other: Price
    pools: tuple[Pool, ...]
    probe: Probe | None = None
    monitoring: Monitoring | None = None
    hosts: tuple[str, ...] = ()
    key: KeyPlace = KeyPlace()
    routes: tuple[Route, ...] = ()
    answers: AnswerRules = AnswerRules()
    scopes: tuple[str, ...] = ()
    base_path: str = ""

    @property
    def main_bucket(self) -> Bucket:
        """The book's first bucket. A limit that names neither buckets nor methods counts this one."""
        return next(iter(self.buckets.values()))

    @property
    def most_parts(self) -> int:
        """The most buckets that one call is charged to."""
        prices = [price for of_method in self.methods.values() for price in of_method]
        return max([1, *(len(price.parts) for price in (*prices, self.default_get, self.default_other))])

    @property
    def version(self) -> str:
        """The API's version, from the book's name (`youtube-v3`): a client is built for it."""
        version = re.search(r"\bv[0-9]\w*", self.name)
        return version[0] if version else "v3"

    @property
    def described(self) -> bool:
        """Whether the book describes its API. Else the API is Google's, and `hosts` only say where it is."""
        return bool(self.routes) or self.answers != AnswerRules() or not all(map(is_googles, self.hosts))

    @property
    def has_session(self) -> bool:
        """Whether its client is a metered `requests` session, which may log in with a token. Else it is Google's
        client."""
        return self.described and bool(self.hosts or self.routes)

    @property
    def googles(self) -> bool:
        """Whether the API is one of Google's."""
        return not self.has_session or any(map(is_googles, self.hosts))

    @property
    def address(self) -> str:
        """The address for calls: the first host."""
        return f"https://{self.hosts[0].partition('/')[0]}" if self.hosts else ""

    def canonical(self, method: str) -> str:
        """The method's name as the book spells it: `youtube.search.list` and `search.list` are the same method."""
        return method if method in self.methods else method.removeprefix(f"{self.api}.")

    def price(self, method: str) -> Price:
        """The newest price of `method`; see `at`.

        Raises UnknownMethod, with the nearest known name, for a method the book does not have.
        """
        prices = self.methods.get(self.canonical(method))
        if prices is None:
            name = self.canonical(method)
            hint = nearest(name, self.methods)
            if len(begun := [each for each in self.methods if each.startswith(f"{name}.")]) > 1:
                hint = f"it has {listed(begun)}."
            elif hint.startswith("known:"):
                hint = f"`quota costs` lists the {len(self.methods)} it has."
            raise UnknownMethod(f"cost book {self.name!r} has no method {show(method)}; {hint}")
        return prices[-1]

    def price_at(self, method: str, at_ms: int) -> tuple[Price, tuple[int, int]]:
        """The price of `method` at `at_ms`, and the times in ms from and until which it holds (0, NEVER if unbounded).

        A price changes at midnight in the book's own zone. Raises UnknownMethod.
        """
        price = self.price(method)
        prices = self.methods[self.canonical(method)]
        if len(prices) == 1:
            return price, (0, NEVER)
        midnights = [datetime.combine(price.since, time(), ZoneInfo(self.zone)) for price in prices[1:]]
        starts_ms = [0, *(int(midnight.timestamp()) * 1000 for midnight in midnights), NEVER]
        newest = max(n for n in range(len(prices)) if n == 0 or starts_ms[n] <= at_ms)
        return prices[newest], (starts_ms[newest], starts_ms[newest + 1])

    def coming(self, method: str, at_ms: int) -> Iterator[tuple[int, Price]]:
        """The prices of `method` that begin after `at_ms`, each with its beginning."""
        _, (_, until_ms) = self.price_at(method, at_ms)
        while until_ms != NEVER:
            since_ms = until_ms
            price, (_, until_ms) = self.price_at(method, since_ms)
            yield since_ms, price

    def at(self, at_ms: int) -> CostBook:
        """This book with only the prices that are valid at `at_ms`."""
        dated = [method for method, prices in self.methods.items() if len(prices) > 1]
        valid = {method: (self.price_at(method, at_ms)[0],) for method in dated}
        return self._replace(methods={**self.methods, **valid}) if dated else self

    @property
    def zone(self) -> str:
        """The zone at whose midnight prices change: upstream's zone where upstream counts by the calendar."""
        window = self.main_bucket.window
        return window.zone if isinstance(window, Calendar) else "UTC"

    def default_price(self, verb: str) -> Price:
        """The price of a method that the book does not have, by its HTTP verb. Books set it high on purpose."""
        return self.default_get if verb.upper() in ("GET", "HEAD") else self.default_other

    def share_of(self, price: Price) -> float:
        """The largest share of a bucket that a call of this price takes."""
        return max((part.units / self.buckets[part.bucket].quota_units for part in price.parts), default=0)

    def closed_by(self, method: str, *buckets: str) -> tuple[str, ...]:
        """The names of the buckets that a call of `method` is charged to, and of the upstream pools whose exhaustion
        stops it."""
        pools = (pool.name for pool in self.pools if method in pool.methods)
        return tuple(dict.fromkeys([*buckets, *pools]))

    def least_parts(self) -> tuple[Part, ...]:
        """What every call of the main bucket is charged at least, in each bucket that all of them spend, the main one
        first."""
        main = self.main_bucket.name
        of_main = [price for price in self._least_prices() if price.units_in(main)]
        spent = {name: [price.units_in(name) for price in of_main] for name in self.buckets}
        least = [Part(name, min(units)) for name, units in spent.items() if units and all(units)]
        return tuple(least) or (Part(main, 1),)

    def _least_prices(self) -> list[Price]:
        newest = [*(prices[-1] for prices in self.methods.values()), self.default_get, self.default_other]
        return [price.least for price in newest]

    def least_units(self, selector: Selector) -> int:
        """The least units that a selected call adds to its limit, calls that add nothing aside; 1 if no call adds
        any."""
        prices = [self.price(method).least for method in selector.methods] or self._least_prices()
        return min(filter(None, [price.counted_by(selector) for price in prices]), default=1)


def unlimited(limits: Iterable[Limit], book: CostBook) -> list[Bucket]:
    """The buckets of which no limit counts any call."""
    counted = {bucket for limit in limits for bucket in limit.view.selector.buckets}
    return [bucket for name, bucket in book.buckets.items() if name not in counted]


def covers(limit: Limit, bucket: str, book: CostBook) -> bool:
    """Whether a limit counts every call charged to a bucket, whoever makes it."""
    selector = limit.view.selector
    if bucket not in selector.buckets or selector.jobs or limit.per_job or limit.shadow:
        return False
    charged = {method: units for method in book.methods if (units := book.price(method).units_in(bucket))}
    if selector.count == "calls" and any(units > 1 for units in charged.values()):
        return False
    # The book charges an unknown method by its defaults, and no list of methods selects such a call.
    return not selector.methods or (
        charged.keys() <= set(selector.methods)
        and not any(price.units_in(bucket) for price in (book.default_get, book.default_other))
    )


def upstream_grant(limit: Limit, bucket: Bucket, granted_units: int | None) -> int:
    """Upstream's grant of the bucket of a limit: by its own answer, by the configuration, or by the book."""
    if granted_units is not None:
        return granted_units
    return max(limit.quota_units, bucket.quota_units) if limit.quota_unwritten else limit.quota_units


def headrooms(limits: Iterable[Limit], book: CostBook, max_cost_units: int) -> list[tuple[int, Limit]]:
    """The headroom of each limit that covers a bucket and counts calls of up to `max_cost_units`: calls that the ledger
    does not see must fit into it. It is the part of upstream's quota that the limit leaves unused: its own headroom, or
    for a limit of `units` alone the gap to the cost book's quota, of no longer window than its own."""
    rows = []
    for limit in limits:
        selector = limit.view.selector
        if book.least_units(selector) <= max_cost_units and any(covers(limit, name, book) for name in book.buckets):
            unused_units = limit.headroom_units
            if limit.quota_unwritten:
                granted = min(_granted_within(book.buckets[name], limit.view.window) for name in selector.buckets)
                unused_units = max(0, granted - limit.limit_units)
            rows.append((unused_units, limit))
    return rows


def _granted_within(bucket: Bucket, window: Window) -> int:
    """The least that upstream grants in a window which a limit of that window bounds."""
    bounded = [quota for quota in bucket.quotas if no_longer(quota.window.longest_ms, window.longest_ms)]
    return min((quota.units for quota in bounded), default=bucket.quota_units)
