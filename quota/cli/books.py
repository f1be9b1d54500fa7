"""What `quota costs` says of whole books: `--list`, `--diff`, and one book for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from quota.cli.output import print_rich
from quota.cli.tables import Column, FirstThatFits, tables
from quota.common.members import members
from quota.common.text import many
from quota.settings.ageing import age_days
from quota.settings.books import book_names, book_tables, load_book
from quota.terms.costs import Price
from quota.terms.limits import Calendar


def listed_books(at_ms: int) -> list[dict[str, Any]]:
    """The books that are shipped, for --json. A window is `1h`, or a calendar period such as `day@UTC`."""
    return [
        {
            "book": book.name,
            **members(book, "api source"),
            "read_on": book.read_on.isoformat(),
            "age_days": age_days(book, at_ms),
            "buckets": [
                {
                    "bucket": bucket.name,
                    "quotas": [{"units": quota.units, "window": quota.window.name} for quota in bucket.quotas],
                }
                for bucket in book.buckets.values()
            ],
        }
        for book in map(load_book, book_names())
    ]


def show_books(at_ms: int) -> None:
    """A line for each shipped book: its buckets, and the windows in which upstream counts them."""
    rows = []
    for book in map(load_book, book_names()):
        windows = (quota.window for bucket in book.buckets.values() for quota in bucket.quotas)
        kinds = dict.fromkeys(one.kind if isinstance(one, Calendar) else one.name for one in windows)
        age = many(age_days(book, at_ms), "day")
        rows.append((book.name, book.api, ", ".join(book.buckets), ", ".join(kinds), age))
    columns = [Column("name"), Column("provider"), Column("unit"), Column("window"), Column("age", number=True)]
    print_rich(FirstThatFits(tables(columns, rows)))


def differing(old: str, new: str) -> Iterator[dict[str, Any]]:
    """In what two books differ: `what` it is, and how the `old` and the `new` one have it; None: it has not."""
    before, after = _facts(old), _facts(new)
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield {"what": what, "old": before.get(what), "new": after.get(what)}
    both = {what for what in before if what.startswith("route ") and what in after}
    yield from _moved([what for what in before if what in both], [what for what in after if what in both])


def _moved(old: list[str], new: list[str]) -> Iterator[dict[str, Any]]:
    """The routes that stand elsewhere among those of both books: the first that takes a request names it."""
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
    book, tables = load_book(name), book_tables(name)
    facts = {"api": book.api, "source": book.source, "read on": book.read_on.isoformat()}
    facts["hosts"] = ", ".join(book.hosts)
    facts["scopes"] = ", ".join(book.scopes)
    for bucket in book.buckets.values():
        for quota in bucket.quotas:
            facts[f"bucket {bucket.name} in {quota.window.name}"] = f"{quota.units:,}"
    facts["default get"], facts["default other"] = str(book.default_get), str(book.default_other)
    facts |= {f"method {method}": "; ".join(map(_dated, prices)) for method, prices in sorted(book.methods.items())}
    for method, prices in book.methods.items():
        bounds = [part.reserve for price in prices for part in price.parts if part.reserve]
        facts.update(
            _flat(f"reserve of {method}", [{"json": one.pointer, "bytes": one.bytes_per_unit} for one in bounds])
        )
    facts |= {f"route {route.verb} {route.path}".replace("  ", " "): route.method for route in book.routes}
    for key in ("key", "answers", "pools", "probe", "monitoring", "retention"):
        facts.update(_flat(key, tables.get(key)))
    return {what: said for what, said in facts.items() if said}


def _flat(name: str, value: object) -> Iterator[tuple[str, str]]:
    """`answers.closed[0]` and what it is, for each value and each row."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(f"{name}.{key}", one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        yield from ((f"{name}[{number}]", json.dumps(one)) for number, one in enumerate(value))
    elif value is not None:
        yield name, json.dumps(value)


def _dated(price: Price) -> str:
    return str(price) if price.since == price.since.min else f"{price} from {price.since}"


def difference_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
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
