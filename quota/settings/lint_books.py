"""Findings about a cost book without errors: prices above its quotas, bounds that no answer settles, usage that settles
no price, keys and answers that cannot be meant, and its age."""

from __future__ import annotations

from collections.abc import Iterator

from quota.common.clock import utc
from quota.common.findings import Finding, warning
from quota.common.text import many
from quota.terms.costs import CostBook
from quota.terms.limits import DAY_MS, format_duration

OLD_DAYS = 180
SOON_DAYS = 30

CLIENTS_OWN = frozenset(("host", "content-length", "content-type", "transfer-encoding", "connection", "user-agent"))
"""Headers of a request that say something else than its key."""


def lint_book(book: CostBook) -> Iterator[Finding]:
    """Findings about a cost book that has no errors."""
    location = f"cost book {book.name}"
    priced = {**book.methods, "default.get": (book.default_get,), "default.other": (book.default_other,)}
    bounds = [method for method, prices in priced.items() if any(price.reserved for price in prices)]
    if bounds and book.answers.units is None:  # the bounds stay: soon the budget is spent, though nobody used it
        message = f"{', '.join(bounds[:3])}: `answers` has no `units` that say what a call with `reserve` did cost"
        remedy = 'add for example units = { json = "/usage/total" }, or settle each call in your program'
        yield warning(location, message, remedy)
    if book.answers.units is not None and not bounds:
        message = "`units` of `answers` changes nothing: it settles calls with `reserve`, and every price is fixed"
        yield warning(location, message, "write { reserve = { default = UNITS } } in place of the price of such a call")
    if book.key.header.lower() in CLIENTS_OWN:
        message = f"key: clients set the header {book.key.header} themselves, so it can hold no key"
        yield warning(location, message, "name the header in which the API takes its key")
    for number, match in enumerate(book.answers.free):
        if match.status == 200 and not match.reads_body:
            message = f"answers.free[{number}]: every good answer has status 200, so no call would count"
            yield warning(location, message, "add `body` or `json` to match only those that upstream does not count")
    for number, rule in enumerate(book.answers.closed):
        named = [book.buckets[rule.bucket]] if rule.bucket in book.buckets else [*book.buckets.values()]
        window = max((bucket.window for bucket in named), key=lambda window: window.longest_ms)
        if isinstance(rule.lasts, int) and rule.lasts > max(DAY_MS, window.longest_ms):
            lasts = f"answers.closed[{number}]: lasts = {format_duration(rule.lasts)!r}"
            message = f"{lasts} closes a bucket for longer than a day, and than its longest window of {window.name}"
            yield warning(location, message, "write a shorter time; ignore this if upstream refuses calls for so long")
    for method, prices in book.methods.items():
        for part in prices[-1].parts:
            quota = min(book.buckets[part.bucket].quotas, key=lambda quota: quota.units)
            if part.units > quota.units:
                does = "reserves" if part.reserve else "costs"
                costs = f"{method} {does} {many(part.units, 'unit')} of bucket {part.bucket!r}"
                message = f"{costs}, and the quota is {quota.units:,} per {quota.window.name}: it never fits"
                yield warning(location, message, "correct one of them; ignore this if upstream granted you more")


def age_days(book: CostBook, at_ms: int) -> int:
    """How many days ago a book was read at its source."""
    return (utc(at_ms).date() - book.read_on).days


def ageing(book: CostBook, at_ms: int) -> Iterator[Finding]:
    """`book_old` for a book that was read more than 180 days ago, and each price that changes within 30 days."""
    location, days = f"cost book {book.name}", age_days(book, at_ms)
    if days > OLD_DAYS:
        message = f"book_old: its prices were read {many(days, 'day')} ago, on {book.read_on}"
        remedy = f"compare it with {book.source}, and write today's date into a book of your own"
        yield warning(location, message, remedy)
    if days < -1:  # somewhere it may be tomorrow already
        message = f"{book.read_on} is yet to come"
        yield warning(location, message, "write into read_on the day when you read its prices")
    for method in book.methods:
        price, _ = book.price_at(method, at_ms)
        for since_ms, coming in book.coming(method, at_ms):
            if since_ms <= at_ms + SOON_DAYS * DAY_MS:
                message = f"{method} costs {coming} from {coming.since} on, and {price} until then"
                yield warning(location, message, "see whether its limits still fit")
            price = coming
