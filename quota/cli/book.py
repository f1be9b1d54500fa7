"""`quota costs`: what each method costs; `quota book`: cost books as a whole. Nothing is sent or charged.

`recorded.py` has what `quota book` makes of recorded answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click

import quota
from quota.cli.options import Group, book_credential_option, config_option, format_option, rows_format_option
from quota.cli.output import Column, FirstThatFits, print_csv, print_json, print_rich, say, tables
from quota.common.clock import NEVER, host_clock
from quota.common.text import many, members, one_line
from quota.settings.books import book_names, book_tables, load_book
from quota.terms.costs import CostBook, Price

NAMED = "NAME|FILE"


@click.command()
@click.argument("method", required=False)
@book_credential_option
@rows_format_option
@config_option
def costs(method: str | None, credential: str | None, as_json: bool, as_csv: bool, config: str | None) -> None:
    """Show what each API method costs, or METHOD alone.

    The prices are from the cost book of a credential. A price that will change has its date. `quota book show NAME`
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


@click.group("book", cls=Group)
def book() -> None:
    """List, check, try and draft cost books.

    The commands take the NAME of a shipped book, or a FILE: a path that ends in .toml or has a slash.

    \b
    Example:
      quota book list
      quota book check ./github.toml
      quota book try "GET https://api.github.com/users" --book github
    """


@book.command("list")
@rows_format_option
def list_(as_json: bool, as_csv: bool) -> None:
    """List the shipped cost books: their buckets, windows and age.

    \b
    Example:
      quota book list
      quota book list --json | jq '.books[] | select(.age_days > 90)'
    """
    books = _listed_books()
    if as_json:
        print_json({"books": books})
    elif as_csv:
        print_csv(["book", "api", "source", "read_on", "age_days", "buckets"], books)
    else:
        _show_books(books)


@book.command("show")
@click.argument("name", metavar=NAMED)
@click.argument("method", required=False)
@rows_format_option
def show(name: str, method: str | None, as_json: bool, as_csv: bool) -> None:
    """Show the price of each method in a cost book, or of METHOD alone.

    Without METHOD, the JSON has the whole file as `definition`.

    \b
    Example:
      quota book show youtube-v3-buckets
      quota book show github --json | jq '.definition.routes'
    """
    definition = {"definition": book_tables(name)} if as_json and method is None else {}
    print_prices(load_book(name), method, as_json=as_json, as_csv=as_csv, also=definition)


@book.command("check")
@click.argument("file", metavar="FILE", type=click.Path())
def check(file: str) -> None:
    """Check a cost book of your own for errors. An error exits with 78.

    \b
    Example:
      quota book check ./github.toml
    """
    checked = load_book(file if "/" in file or file.endswith(".toml") else f"./{file}")
    counted = ((checked.methods, "method"), (checked.buckets, "bucket"), (checked.routes, "route"))
    say(f"{one_line(file)}: no errors; {', '.join(many(len(names), noun) for names, noun in counted)}")


@book.command("try", short_help="Show which method a request is, and its cost.")
@click.argument("request_", metavar="REQUEST")
@click.option("--answer", metavar="FILE", type=click.Path(), help="Also show what this recorded answer means.")
@click.option("--book", "name", metavar=NAMED, help="This cost book, instead of a credential's.")
@book_credential_option
@format_option
@config_option
def try_(
    request_: str, answer: str | None, name: str | None, credential: str | None, as_json: bool, config: str | None
) -> None:
    """Show which method a REQUEST is, and what it costs.

    Nothing is sent or charged. FILE of --answer is JSON: {"status": 403, "headers": {}, "body": {}}.

    \b
    Example:
      quota book try "GET https://api.github.com/users"
      quota book try "GET https://api.github.com/users" --book ./github.toml
      quota book try "GET https://api.github.com/users" --answer answer.json
    """
    from quota.cli.recorded import try_request

    if name is not None and (credential is not None or config is not None):
        option = "--config" if credential is None else "--credential"
        raise click.UsageError(f"{option} has a cost book of its own; leave {option} or --book out")
    if name is not None:
        tried_by = load_book(name)
        hosts = tried_by.hosts
    else:
        with quota.open(config) as session:
            chosen = session.credential(credential)
            tried_by, hosts = chosen.book, chosen.hosts
    tried = try_request(tried_by.at(host_clock()), hosts, request_, answer)
    if as_json:
        print_json({"book": tried_by.name, **tried.as_json()})
    else:
        say(*tried.lines())


@book.command("diff")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@format_option
def diff(old: str, new: str, as_json: bool) -> None:
    """Show how two cost books differ.

    OLD and NEW are names or files. `-` marks what only OLD has, `+` what only NEW has, `~` what changed.

    \b
    Example:
      quota book diff youtube-v3 ./youtube-v3.toml
    """
    rows = list(_differing(old, new))
    if as_json:
        print_json({"old": old, "new": new, "differences": rows})
    else:
        say(*_difference_lines(rows))


@book.command("new", short_help="Draft a cost book from recorded answers.")
@click.argument("name")
@click.option(
    "--answer", "answers", multiple=True, metavar="FILE", type=click.Path(), help="A recorded answer; may be repeated."
)
def new(name: str, answers: tuple[str, ...]) -> None:
    """Print the draft of a cost book for the API NAME, from the headers of recorded answers.

    FILE has an answer as JSON: {"request": "GET https://...", "status": 429, "headers": {}, "body": {}}. A value that
    no answer has is 0 or "" in the draft. `quota book check` reports it until you fill it in.

    \b
    Example:
      quota book new weather --answer answer.json > weather.toml
    """
    from quota.cli.recorded import draft

    click.echo(draft(name, answers), nl=False)


# -- prices ------------------------------------------------------------------------------------------------------------


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
        width = max(len(row.method) for row in rows)
        say(*(row.line(width) for row in rows))
        say(f"cost book {book.name}, read on {book.read_on} from", book.source)


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


def _price_json(price: Price) -> dict[str, object]:
    return {
        "units": price.units,
        "bucket": price.bucket or None,
        "parts": [
            {"bucket": part.bucket, "units": part.units, **({"reserved": True} if part.reserve else {})}
            for part in price.parts
        ],
    }


# -- list --------------------------------------------------------------------------------------------------------------


def _listed_books() -> list[dict[str, Any]]:
    """The shipped books, for --json. A window is `1h`, or a calendar period such as `day@UTC`."""
    from quota.settings.lint import age_days

    return [
        {
            "book": book.name,
            **members(book, "api source"),
            "read_on": book.read_on.isoformat(),
            "age_days": age_days(book, host_clock()),
            "buckets": [
                {
                    "bucket": bucket.name,
                    "quotas": [{"units": grant.units, "window": grant.window.name} for grant in bucket.quotas],
                }
                for bucket in book.buckets.values()
            ],
        }
        for book in map(load_book, book_names())
    ]


def _show_books(books: list[dict[str, Any]]) -> None:
    """A line for each book: its buckets, and the windows in which upstream counts them."""
    rows = []
    for book in books:
        windows = (grant["window"] for bucket in book["buckets"] for grant in bucket["quotas"])
        kinds = dict.fromkeys(window.partition("@")[0] for window in windows)
        buckets = ", ".join(bucket["bucket"] for bucket in book["buckets"])
        rows.append((book["book"], book["api"], buckets, ", ".join(kinds), many(book["age_days"], "day")))
    columns = [Column("name"), Column("provider"), Column("unit"), Column("window"), Column("age", number=True)]
    print_rich(FirstThatFits(tables(columns, rows)))


# -- diff --------------------------------------------------------------------------------------------------------------


def _differing(old: str, new: str) -> Iterator[dict[str, Any]]:
    """The differences of two books: `what` differs, and its value in the `old` and the `new` book, or None."""
    before, after = _facts(old), _facts(new)
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield {"what": what, "old": before.get(what), "new": after.get(what)}
    both = {what for what in before if what.startswith("route ") and what in after}
    yield from _moved([what for what in before if what in both], [what for what in after if what in both])


def _moved(old: list[str], new: list[str]) -> Iterator[dict[str, Any]]:
    """The routes whose place among the routes of both books differs: the first match decides."""
    from difflib import SequenceMatcher

    stay = {
        what
        for at, _, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        for what in old[at : at + size]
    }
    behind = [
        dict(zip(routes, ("first", *(f"after {what}" for what in routes)), strict=False)) for routes in (old, new)
    ]
    for what in old:
        if what not in stay:
            yield {"what": f"place of {what}", "old": behind[0][what], "new": behind[1][what]}


def _facts(name: str) -> dict[str, str]:
    """The facts of a book by their names. Tables without numbers are as the file has them."""
    book, definition = load_book(name), book_tables(name)
    facts = {"api": book.api, "source": book.source, "read on": book.read_on.isoformat()}
    facts["hosts"] = ", ".join(book.hosts)
    facts["scopes"] = ", ".join(book.scopes)
    for bucket in book.buckets.values():
        for grant in bucket.quotas:
            facts[f"bucket {bucket.name} in {grant.window.name}"] = f"{grant.units:,}"
    facts["default get"], facts["default other"] = str(book.default_get), str(book.default_other)
    for method, prices in sorted(book.methods.items()):
        dated = (str(price) if price.since == price.since.min else f"{price} from {price.since}" for price in prices)
        facts[f"method {method}"] = "; ".join(dated)
    for method, prices in book.methods.items():
        bounds = [part.reserve for price in prices for part in price.parts if part.reserve]
        reserves = [{"json": bound.pointer, "bytes": bound.bytes_per_unit} for bound in bounds]
        facts.update(_flat(f"reserve of {method}", reserves))
    facts |= {f"route {route.verb} {route.path}".replace("  ", " "): route.method for route in book.routes}
    for key in ("key", "answers", "pools", "probe", "monitoring", "retention"):
        facts.update(_flat(key, definition.get(key)))
    return {what: fact for what, fact in facts.items() if fact}


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Each value and each row by its path, such as `answers.closed[0]`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list) and any(isinstance(row, dict) for row in value):
        yield from ((f"{name}[{number}]", json.dumps(row)) for number, row in enumerate(value))
    elif value is not None:
        yield name, json.dumps(value)


def _difference_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For people: `-` only the old book has it, `+` only the new book, `~` both, and they differ."""
    for row in rows:
        if row["old"] is None:
            yield f"+ {row['what']}: {row['new']}"
        elif row["new"] is None:
            yield f"- {row['what']}: {row['old']}"
        else:
            yield f"~ {row['what']}: {row['old']} -> {row['new']}"
    if not rows:
        yield "no difference"
