"""`quota costs`: what each method costs, and what whole cost books say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click

import quota
from quota.cli.options import config_option, credential_option, json_option
from quota.cli.output import print_json, print_rich, say
from quota.cli.tables import Column, FirstThatFits, tables
from quota.common.clock import NEVER, host_clock
from quota.common.text import many, members, one_line
from quota.settings.books import book_names, book_tables, load_book
from quota.terms.costs import CostBook, Price


@click.command()
@click.argument("method", required=False)
@click.option("--book", metavar="NAME", help="A cost book by name, instead of a credential's.")
@click.option("--check", metavar="FILE", type=click.Path(), help="A cost book in a file: is it one?")
@click.option("--try", "request_", metavar="REQUEST", help='Which method "GET https://..." is, and what it costs.')
@click.option("--answer", metavar="FILE", type=click.Path(), help="With --try: what an answer means, in JSON.")
@click.option("--list", "listing", is_flag=True, help="The books that are shipped, and when each was read.")
@click.option("--diff", nargs=2, metavar="OLD NEW", help="In what two books differ, by name or file.")
@click.option("--new", metavar="NAME", help="The draft of a book, from the headers of answers (--from).")
@click.option(
    "--from", "from_", multiple=True, metavar="FILE", type=click.Path(), help="With --new: an answer, in JSON."
)
@credential_option
@json_option
@config_option
def costs(
    method: str | None,
    book: str | None,
    check: str | None,
    request_: str | None,
    answer: str | None,
    listing: bool,
    diff: tuple[str, str] | None,
    new: str | None,
    from_: tuple[str, ...],
    credential: str | None,
    as_json: bool,
    config: str | None,
) -> None:
    """Show what each API method costs, and when its price changes. METHOD may be the name of a shipped book.

    With --json, a book that is named has all that its file says as `definition`.

    With --try, show what a request is by the cost book's routes. FILE of --answer has its answer,
    {"status": 403, "headers": {}, "body": {}}. Nothing is sent or charged.

    \b
    Example:
      quota costs search.list
      quota costs --book youtube-v3-buckets
      quota costs github --json
      quota costs --list
      quota costs --diff youtube-v3 ./youtube-v3.toml
      quota costs --new weather --from answer.json > weather.toml
      quota costs --check github.toml --try "GET https://api.github.com/users"
    """
    if from_ and new is None:
        raise click.UsageError("--from needs --new: the name of the book to draft")
    if listing or diff or new is not None:
        others = (diff, new, method, book, check, request_, answer, credential, config)
        if listing + sum(other is not None for other in others) > 1:
            raise click.UsageError("--list, --diff and --new stand alone; leave the others out")
        if new is not None and as_json:
            raise click.UsageError("--new writes a draft in TOML; leave --json out")
        _whole_books(diff, new, from_, as_json)
        return
    if method in book_names() and book is None and check is None:
        method, book = None, method
    if check is not None and book is not None:
        raise click.UsageError("--check and --book both name a cost book; leave one out")
    if request_ is not None and method is not None:
        raise click.UsageError("--try finds the method of a request; leave METHOD out")
    if request_ is None and answer is not None:
        raise click.UsageError("--answer needs --try: the request that it answers")
    if check is not None:
        book = check if "/" in check or check.endswith(".toml") else f"./{check}"
    if book is not None:
        if credential is not None or config is not None:
            option = "--config" if credential is None else "--credential"
            raise click.UsageError(f"{option} shows the costs of its own book; leave it or the named book out")
        shown = load_book(book)
        hosts = shown.hosts
    else:
        with quota.open(config) as session:
            chosen = session.credential(credential)
            shown, hosts = chosen.book, chosen.hosts
    now_ms = host_clock()
    if request_ is not None:
        _show_tried(shown.at(now_ms), hosts, request_, answer, as_json)
    elif check is not None and method is None and not as_json:
        counted = ((shown.methods, "method"), (shown.buckets, "bucket"), (shown.routes, "route"))
        say(f"{one_line(check)}: no errors; {', '.join(many(len(names), noun) for names, noun in counted)}")
    else:
        rows = list(_priced(shown, method, now_ms))
        if as_json:
            definition = {} if book is None or method is not None else {"definition": book_tables(book)}
            source = {"book": shown.name, "source": shown.source, "read_on": shown.read_on.isoformat()}
            print_json({**source, **definition, "methods": [row.as_json() for row in rows]})
        else:
            _show_prices(shown, rows)


def _whole_books(diff: tuple[str, str] | None, new: str | None, answers: Sequence[str], as_json: bool) -> None:
    """The draft of a book, in what two differ, or those that are shipped."""
    if new is not None:
        from quota.cli.recorded import draft

        click.echo(draft(new, answers), nl=False)
    elif diff is not None:
        rows = list(_differing(*diff))
        if as_json:
            print_json({"old": diff[0], "new": diff[1], "differences": rows})
        else:
            say(*_difference_lines(rows))
    elif as_json:
        print_json({"books": _listed_books()})
    else:
        _show_books(_listed_books())


def _show_tried(book: CostBook, hosts: tuple[str, ...], request: str, answer: str | None, as_json: bool) -> None:
    from quota.cli.recorded import try_request

    tried = try_request(book, hosts, request, answer)
    if as_json:
        print_json({"book": book.name, **tried.as_json()})
    else:
        say(*tried.lines())


# -- prices ------------------------------------------------------------------------------------------------------------


class Priced(NamedTuple):
    """A method, its price now, and the one that follows; None where none is known."""

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


# -- whole books: --list, --diff ---------------------------------------------------------------------------------------


def _listed_books() -> list[dict[str, Any]]:
    """The books that are shipped, for --json. A window is `1h`, or a calendar period such as `day@UTC`."""
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
    """A line for each of these books: its buckets, and the windows in which upstream counts them."""
    rows = []
    for book in books:
        windows = (grant["window"] for bucket in book["buckets"] for grant in bucket["quotas"])
        kinds = dict.fromkeys(window.partition("@")[0] for window in windows)
        buckets = ", ".join(bucket["bucket"] for bucket in book["buckets"])
        rows.append((book["book"], book["api"], buckets, ", ".join(kinds), many(book["age_days"], "day")))
    columns = [Column("name"), Column("provider"), Column("unit"), Column("window"), Column("age", number=True)]
    print_rich(FirstThatFits(tables(columns, rows)))


def _differing(old: str, new: str) -> Iterator[dict[str, Any]]:
    """In what two books differ: `what` it is, and how the `old` and the `new` one have it; None: it has not."""
    before, after = _facts(old), _facts(new)
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield {"what": what, "old": before.get(what), "new": after.get(what)}
    both = {what for what in before if what.startswith("route ") and what in after}
    yield from _moved([what for what in before if what in both], [what for what in after if what in both])


def _moved(old: list[str], new: list[str]) -> Iterator[dict[str, Any]]:
    """The routes that stand elsewhere among those of both books: the first that takes a request names it."""
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
    """What a book says, each fact with a name of its own. The tables that no number is in are as the file has them."""
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
    """`answers.closed[0]` and what it is, for each value and each row."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list) and any(isinstance(row, dict) for row in value):
        yield from ((f"{name}[{number}]", json.dumps(row)) for number, row in enumerate(value))
    elif value is not None:
        yield name, json.dumps(value)


def _difference_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For people: `-` what the old book alone has, `+` what the new one alone has, `~` what both have differently."""
    for row in rows:
        if row["old"] is None:
            yield f"+ {row['what']}: {row['new']}"
        elif row["new"] is None:
            yield f"- {row['what']}: {row['old']}"
        else:
            yield f"~ {row['what']}: {row['old']} -> {row['new']}"
    if not rows:
        yield "no difference"
