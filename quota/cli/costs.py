"""`quota costs`: what each method costs. `quota book` is about whole cost books."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import click

import quota
from quota.cli.options import book_credential_option, config_option, rows_format_option
from quota.cli.output import print_csv, print_json, say
from quota.common.clock import NEVER, host_clock
from quota.settings.books import book_names
from quota.terms.costs import CostBook, Price


@click.command()
@click.argument("method", required=False)
@book_credential_option
@rows_format_option
@config_option
def costs(method: str | None, credential: str | None, as_json: bool, as_csv: bool, config: str | None) -> None:
    """Show what each API method costs, or METHOD alone.

    The prices are those in the cost book of a credential. A price that will change has its date. `quota book show NAME`
    shows another cost book.

    \b
    Example:
      quota costs
      quota costs search.list
    """
    if method is not None and method in book_names():
        raise click.UsageError(f"{method} is a cost book, no method; show it with: quota book show {method}")
    with quota.open(config) as session:
        shown = session.credential(credential).book
    print_prices(shown, method, as_json=as_json, as_csv=as_csv)


def print_prices(
    book: CostBook, method: str | None, *, as_json: bool, as_csv: bool, also: Mapping[str, object] | None = None
) -> None:
    """The methods of a book, or one of them, with their prices. `also` goes into the JSON. Raises UnknownMethod."""
    rows = list(_priced(book, method, host_clock()))
    if as_json:
        source = {"book": book.name, "source": book.source, "read_on": book.read_on.isoformat()}
        print_json({**source, **(also or {}), "methods": [row.as_json() for row in rows]})
    elif as_csv:
        print_csv(["method", "units", "bucket", "parts", "next"], (row.as_json() for row in rows))
    else:
        _show_prices(book, rows)


class Priced(NamedTuple):
    """A method, its price now, and the next price, if the book has one."""

    method: str
    price: Price
    coming: Price | None

    def as_json(self) -> dict[str, object]:
        """For --json."""
        coming = self.coming
        following = None if coming is None else {**_price_json(coming), "since": coming.since.isoformat()}
        return {"method": self.method, **_price_json(self.price), "next": following}

    def line(self, width: int) -> str:
        """For a terminal, with the method `width` wide."""
        later = f"; {self.coming} from {self.coming.since}" if self.coming is not None else ""
        if not self.price.parts:
            return f"{self.method:<{width}}  {'':>6}  free{later}"
        first, *others = self.price.parts
        also = "".join(f", {part}" for part in others)
        return f"{self.method:<{width}}  {first.units:>6,}  {str(first).partition(' ')[2]}{also}{later}"


def _priced(book: CostBook, method: str | None, now_ms: int) -> Iterator[Priced]:
    """The methods of a book, or this one. Raises UnknownMethod."""
    for name in sorted(book.methods) if method is None else [book.canonical(method)]:
        price, (_, until_ms) = book.price_at(name, now_ms)
        yield Priced(name, price, None if until_ms == NEVER else book.price_at(name, until_ms)[0])


def _show_prices(book: CostBook, rows: Sequence[Priced]) -> None:
    width = max(len(row.method) for row in rows)
    say(*(row.line(width) for row in rows))
    say(f"cost book {book.name}, read on {book.read_on} from", book.source)


def _price_json(price: Price) -> dict[str, object]:
    return {
        "units": price.units,
        "bucket": price.bucket or None,
        "parts": [
            {"bucket": part.bucket, "units": part.units, **({"reserved": True} if part.reserve else {})}
            for part in price.parts
        ],
    }
