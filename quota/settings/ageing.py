"""What time does to a cost book: prices that were read long ago, and those that are about to change."""

from __future__ import annotations

from collections.abc import Iterator

from quota.common.clock import utc
from quota.common.findings import Finding, warning
from quota.common.text import many
from quota.terms.costs import CostBook
from quota.terms.limits import DAY_MS

OLD_DAYS = 180
SOON_DAYS = 30


def age_days(book: CostBook, at_ms: int) -> int:
    """How many days ago a book was read at its source."""
    return (utc(at_ms).date() - book.read_on).days


def ageing(book: CostBook, at_ms: int) -> Iterator[Finding]:
    """`book_old`, once, for a book that was read more than 180 days ago; and each price that changes within 30 days."""
    days = age_days(book, at_ms)
    if days > OLD_DAYS:
        yield warning(
            f"cost book {book.name}",
            f"book_old: its prices were read {many(days, 'day')} ago, on {book.read_on}",
            f"compare it with {book.source}, and write today's date into a book of your own",
        )
    for method in book.methods:
        price, (_, until_ms) = book.price_at(method, at_ms)
        if at_ms < until_ms <= at_ms + SOON_DAYS * DAY_MS:
            coming, _ = book.price_at(method, until_ms)
            yield warning(
                f"cost book {book.name}",
                f"{method} costs {coming} from {coming.since} on, and {price} until then",
                "see whether its limits still fit",
            )
