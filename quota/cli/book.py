"""`quota costs`: what each method costs; `quota book`: cost books as a whole. Nothing is sent or charged.

`try` shows the meaning of a recorded answer, `new` drafts a cost book from answers: `quota.cli.drafts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

import quota
from quota.cli.drafts import draft, read_answer
from quota.cli.options import PATH, Group, Options, apart, shared
from quota.cli.output import fail_each, print_as, say
from quota.common.clock import NEVER, host_clock, moment
from quota.common.redact import redact
from quota.common.text import listed, many, members, nearest, one_line, show
from quota.errors import ConfigError, UsageError
from quota.rules.evidence import evidence_of
from quota.settings.books import book_and_tables, book_names, load_book
from quota.terms.api import NO_BODY, VERBS, Hosts
from quota.terms.costs import CostBook, Price
from quota.terms.limits import leaves_at
from quota.wording import Table

if TYPE_CHECKING:
    from quota.clients.upstream import Meaning

NAMED = "NAME|FILE"


@click.command()
@click.argument("method", required=False)
@shared(Options.credential_of_book, Options.format_of_rows, Options.config)
def costs(method: str | None, credential: str | None, form: str, config: str | None) -> None:
    """Show the cost of each API method, or of METHOD alone.

    The prices are from the cost book of a credential. A price that will change has the date of the change. `quota book
    show NAME` shows another cost book.

    \b
    Example:
      quota costs
      quota costs search.list
    """
    if method is not None and method in book_names():
        raise click.UsageError(f"{method} is a cost book, no method; show it with: quota book show {method}")
    with quota.open(config) as session:
        shown = session.credential(credential).book
    print_prices(shown, method, form)


@click.group("book", cls=Group)
def book() -> None:
    """List, check, try and draft cost books.

    `show`, `diff` and `--book` take the NAME of a shipped book, or a FILE: a path that ends in .toml or has a slash.

    \b
    Example:
      quota book list
      quota book check ./github.toml
      quota book try "GET https://api.github.com/users" --book github
    """


@book.command("list")
@shared(Options.format_of_rows)
def list_(form: str) -> None:
    """List the shipped cost books: their buckets, windows and age.

    \b
    Example:
      quota book list
      quota book list --json | jq '.books[] | select(.age_days > 90)'
    """
    books = _listed_books()
    rows = []
    for shipped in books:
        windows = (grant["window"] for bucket in shipped["buckets"] for grant in bucket["quotas"])
        kinds = dict.fromkeys(window.partition("@")[0] for window in windows)
        buckets = ", ".join(bucket["bucket"] for bucket in shipped["buckets"])
        rows.append((shipped["book"], shipped["api"], buckets, ", ".join(kinds), many(shipped["age_days"], "day")))
    table = Table(("name", "provider", "unit", "window", "age"), rows, numbers=(4,))
    print_as(form, {"books": books}, ["book", "api", "source", "read_on", "age_days", "buckets"], books, [table])


@book.command("show")
@click.argument("name", metavar=NAMED, type=PATH)
@click.argument("method", required=False)
@shared(Options.format_of_rows)
def show_(name: str, method: str | None, form: str) -> None:
    """Show the price of each method in a cost book, or of METHOD alone.

    Without METHOD, the JSON has the whole file as `definition`.

    \b
    Example:
      quota book show youtube-v3-buckets
      quota book show github --json | jq '.definition.routes'
    """
    shown, definition = book_and_tables(name)
    print_prices(shown, method, form, also={"definition": definition} if method is None else {})


@book.command("check")
@click.argument("file", metavar="FILE", type=click.Path())
def check(file: str) -> int:
    """Check a cost book of your own, and list all its errors. Exit with 78 on an error.

    \b
    Example:
      quota book check ./github.toml
    """
    try:
        checked = load_book(file if "/" in file or file.endswith(".toml") else f"./{file}")
    except ConfigError as error:
        return fail_each(error)
    from quota.settings.lint import ageing, lint_book  # late: few commands need it

    for finding in (*lint_book(checked), *ageing(checked, host_clock())):
        say(str(finding))
    counted = ((checked.methods, "method"), (checked.buckets, "bucket"), (checked.routes, "route"))
    say(f"{one_line(file)}: no errors; {', '.join(many(len(names), noun) for names, noun in counted)}")
    return 0


@book.command("try", short_help="Show which method a request calls, and its cost.")
@click.argument("request_", metavar="REQUEST")
@click.option("--answer", metavar="FILE", type=click.Path(), help="Also show what this recorded answer means.")
@click.option("--book", "name", metavar=NAMED, type=PATH, help="This cost book, instead of a credential's.")
@shared(Options.credential_of_book, Options.format, Options.config)
def try_(
    request_: str, answer: str | None, name: str | None, credential: str | None, form: str, config: str | None
) -> None:
    """Show which method a REQUEST calls, and what it costs.

    Nothing is sent or charged. --answer takes JSON: {"status": 403, "headers": {}, "body": {}}. A header that
    was sent twice has a list of values.

    \b
    Example:
      quota book try "GET https://api.github.com/users"
      quota book try "GET https://api.github.com/users" --book ./github.toml
      quota book try "GET https://api.github.com/users" --answer answer.json
    """
    apart(book=name, credential=credential)
    apart(book=name, config=config)
    if name is not None:
        tried_by = load_book(name)
        hosts = tried_by.hosts
    else:
        with quota.open(config) as session:
            chosen = session.credential(credential)
            tried_by, hosts = chosen.book, chosen.hosts
    data, lines = try_request(tried_by.at(host_clock()), hosts, request_, answer)
    if not print_as(form, {"book": tried_by.name, **data}):
        say(*lines)


@book.command("diff")
@click.argument("old", metavar="OLD", type=PATH)
@click.argument("new", metavar="NEW", type=PATH)
@shared(Options.format)
def diff(old: str, new: str, form: str) -> None:
    """Show how two cost books differ.

    OLD and NEW are names or files. `-` marks what only OLD has, `+` what only NEW has, `~` what changed.

    \b
    Example:
      quota book diff youtube-v3 ./youtube-v3.toml
    """
    before, after = (dict(_flat("", book_and_tables(name)[1])) for name in (old, new))
    changed = [what for what in dict.fromkeys((*before, *after)) if before.get(what) != after.get(what)]
    rows = [{"what": what, "old": before.get(what), "new": after.get(what)} for what in changed]
    both = {what for what in before if what.startswith("routes.") and what in after}
    rows += _moved([what for what in before if what in both], [what for what in after if what in both])
    if print_as(form, {"old": old, "new": new, "differences": rows}):
        return
    for row in rows:
        if row["old"] is None:
            say(f"+ {row['what']}: {row['new']}")
        elif row["new"] is None:
            say(f"- {row['what']}: {row['old']}")
        else:
            say(f"~ {row['what']}: {row['old']} -> {row['new']}")
    if not rows:
        say("no difference")


@book.command("new", short_help="Draft a cost book from recorded answers.")
@click.argument("name")
@click.option(
    "--answer", "answers", multiple=True, metavar="FILE", type=click.Path(), help="A recorded answer; may be repeated."
)
def new(name: str, answers: tuple[str, ...]) -> None:
    """Print a draft of a cost book for the API NAME, from the headers of recorded answers.

    Each FILE of --answer is one answer, as JSON: {"request": "GET https://...", "status": 429, "headers": {}, "body":
    {}}. Where the answers lack a value, the draft has 0 or "". `quota book check` reports these values until you fill
    them in.

    \b
    Example:
      quota book new weather --answer answer.json > weather.toml
    """
    click.echo(draft(name, answers), nl=False)


# -- prices ------------------------------------------------------------------------------------------------------------


def print_prices(
    book: CostBook, method: str | None, form: str, *, also: Mapping[str, object] = MappingProxyType({})
) -> None:
    """The methods of a book, or one of them, with their prices. `also` goes into the JSON. Raises UnknownMethod."""
    names, rows, lines = sorted(book.methods) if method is None else [book.canonical(method)], [], []
    width, at_ms = max(map(len, names)), host_clock()
    for name in names:
        price, _ = book.price_at(name, at_ms)
        coming = [later for _, later in book.coming(name, at_ms)]
        following = {**_price_json(coming[0]), "since": coming[0].since.isoformat()} if coming else None
        rows.append({"method": name, **_price_json(price), "next": following})
        units, shown = "", "free"
        if price.parts:
            first, *others = price.parts
            units, shown = f"{first.units:,}", ", ".join([str(first).partition(" ")[2], *map(str, others)])
        further = [f"; {later} from {later.since}" for later in coming]
        lines.append(f"{name:<{width}}  {units:>6}  {shown}{''.join(further)}")
    source = {"book": book.name, "source": book.source, "read_on": book.read_on.isoformat()}
    if not print_as(form, {**source, **also, "methods": rows}, ["method", "units", "bucket", "parts", "next"], rows):
        say(*lines, f"cost book {book.name}, read on {book.read_on} from", book.source)


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


# -- diff --------------------------------------------------------------------------------------------------------------


def _moved(old: list[str], new: list[str]) -> Iterator[dict[str, Any]]:
    """The routes whose place among the routes of both books differs: the first match decides."""
    from difflib import SequenceMatcher

    stay = {
        what
        for at, _, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        for what in old[at : at + size]
    }

    def place(what: str, routes: list[str]) -> str:
        at = routes.index(what)
        return f"after {routes[at - 1]}" if at else "first"

    for what in old:
        if what not in stay:
            yield {"what": f"place of {what}", "old": place(what, old), "new": place(what, new)}


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each value of a book by its path in the file, such as `routes.GET /**`, and each row: `answers.closed[0]`."""
    if isinstance(value, dict) and ("." not in path or all(isinstance(inner, dict) for inner in value.values())):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and any(isinstance(row, dict) for row in value):
        yield from ((f"{path}[{number}]", json.dumps(row)) for number, row in enumerate(value))
    else:
        yield path, json.dumps(value)


# -- try ---------------------------------------------------------------------------------------------------------------


def _sentences(meaning: Meaning, book: CostBook, at_ms: int, missing: str, *, settles: bool) -> Iterator[str]:
    """What an answer of `at_ms` means. `missing` says why it lacks the usage; without `settles`, no usage counts."""
    for closing in meaning.closes:
        window = book.buckets.get(closing.bucket, book.main_bucket).window
        until = _opens(leaves_at(window, at_ms) if closing.until_ms is None else closing.until_ms)
        until += f", when its window {window.name} resets" if closing.until_ms is None else ""
        yield f"closes {closing.bucket} until {until}: {closing.why}"
    if meaning.error is not None and not meaning.closes:
        remedy = f"; {meaning.error.remedy}" if meaning.error.remedy else ""
        yield f"{_MEANINGS.get(meaning.error.kind, 'closed')}: {meaning.error.message}{remedy}"
    for level in filter(attrgetter("remaining_units"), meaning.levels):
        limit = "" if level.limit_units is None else f" of {level.limit_units:,}"
        until = "" if level.reset_ms is None else f" until {_opens(level.reset_ms)}"
        yield f"{level.remaining_units:,}{limit} remain in {level.bucket}{until}"
    if meaning.used_units is not None:
        ignored = "" if settles else ", but the price is fixed: only a call with `reserve` is settled"
        yield f"it cost {many(meaning.used_units, 'unit')}{ignored}"
    if missing:
        yield missing
    for header, value in meaning.unread.items():
        why = "of no bucket or window of the book, or no possible number or time; it changes nothing"
        yield f"{header}: {show(value)} is {why}"
    if meaning.free:
        yield "upstream does not count it: its charge is refunded"
    is_priced = meaning.used_units is not None
    if not (is_priced or meaning.error or meaning.changes_something or meaning.unread or missing):
        yield "the answer changes nothing"


_MEANINGS = {
    "project_blocked": "upstream grants this project nothing",
    "transient_rate": "too many calls in a short time",
    "transient_server": "upstream is in trouble",
    "config": "upstream does not accept the credential",
    "channel_limit": "a limit on the channel or user, not on the project",
    "request": "upstream does not accept this call",
}
"""The kinds of errors that may close nothing, in words."""


def _meaning_json(meaning: Meaning) -> dict[str, Any]:
    levels = [
        {**members(level, "bucket remaining_units limit_units"), "resets_at": members(level, "reset")["reset"]}
        for level in meaning.levels
    ]
    return {
        "kind": None if meaning.error is None else meaning.error.kind,
        "message": None if meaning.error is None else meaning.error.message,
        "closes": [members(closing, "bucket until") for closing in meaning.closes],
        "remaining": levels,
        "units": meaning.used_units,
        "free": meaning.free,
    }


def _opens(at_ms: int) -> str:
    return "it is reopened" if at_ms == NEVER else moment(at_ms)


def try_request(
    book: CostBook, hosts: tuple[str, ...], request: str, answer: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The method and the price of a request, `GET https://...`, and the meaning of the answer in a file, as JSON and as
    lines for people. The API of the book is on these hosts.

    Raises UsageError if `request` is not a request or the proxy would not pass it on, and ConfigError if the file has
    no answer.
    """
    from quota.clients.upstream import upstream_of

    verb, url = _verb_and_url(request)
    request, is_ours, upstream = redact(f"{verb} {url}"), not hosts or Hosts(hosts).serve(url), upstream_of(book)
    method, goes_on = None, False
    if is_ours:
        _check_for_proxy(request, url)
        goes_on = upstream.continues(verb, url)
        verb = upstream.dearest_verb(verb, url, (), NO_BODY, upstream.name)
        method = upstream.method(verb, url)
    by_default = method is None or book.canonical(method) not in book.methods
    price = book.default_price(verb) if method is None or by_default else book.price(method)
    cost = " and ".join(f"{many(part.units, 'unit')} of {part.bucket}" for part in price.parts) or "free"
    if goes_on:
        price, says = Price(()), f"{request} is not charged: it continues a call that was charged when it began"
    elif not is_ours:
        says = f"{request} is not charged: only requests to {listed(hosts)} are"
    elif method is None:
        says = f"{request}: no route takes it; it costs the default, {cost}"
    else:
        unknown = ", which the book does not have; it costs the default" if by_default else ""
        says = f"{request}: {method}{unknown}, {cost}"
    metered = is_ours and not goes_on
    data = {"request": request, "metered": metered, "method": method, **_price_json(price), "answer": None}
    if answer is None:
        return data, [says]
    at_ms = host_clock()
    status, meaning, missing = _meaning(book, answer, method or f"{verb} **", at_ms)
    is_missing = 200 <= status < 300 and meaning.used_units is None and price.reserved and not meaning.free
    why = missing if is_missing else ""
    means = _sentences(meaning, book, at_ms, why, settles=price.reserved) if metered else ()
    return {**data, "answer": _meaning_json(meaning)}, [says, *means]


def _verb_and_url(request: str) -> tuple[str, str]:
    """The two parts of a request. Raises UsageError."""
    verb, _, url = request.strip().rpartition(" ")
    verb = verb.strip().upper() or "GET"
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or not url.isprintable():
        raise UsageError(f'{show(request)} is not a request; write for example "GET https://api.example.com/users"')
    if re.fullmatch(r"[A-Z0-9!#$%&'*+.^_`|~-]+", verb) is None:
        raise UsageError(f"{show(verb)} is not an HTTP verb; {nearest(verb, VERBS)}")
    return verb, url


def _check_for_proxy(request: str, url: str) -> None:
    """Raise UsageError if the proxy would not pass a request on."""
    from quota.proxy.asked import UnfitError, check_target

    parts = urlsplit(url)
    try:
        check_target(parts.path[1:], parts.query + "#" * ("#" in url))
    except UnfitError as error:
        raise UsageError(f"{show(request)} does not pass `quota proxy`: {error}") from None


def _meaning(book: CostBook, answer: str, method: str, at_ms: int) -> tuple[int, Meaning, str]:
    """The status of the answer in a file, what it means at `at_ms`, and why it may lack the usage. Raises
    ConfigError."""
    from quota.clients.answer_fields import NO_USAGE, Usage
    from quota.clients.upstream import upstream_of
    from quota.clients.upstream_errors import MAX_BODY_BYTES

    status, headers, body, _ = read_answer(answer)
    head = body[:MAX_BODY_BYTES]  # as much of it as the transports look at
    meaning = upstream_of(book).read(status, headers, head, method=method, at_ms=at_ms)
    meaning = meaning._replace(free=meaning.free and (status != 206 or book.answers.frees(status)))
    missing = [NO_USAGE]
    if (used := book.answers.units) is not None:
        fields = {name.lower(): value for name, value in headers.items()}
        for of_the_wire in ("content-length", "content-encoding"):
            fields.pop(of_the_wire, None)
        usage = Usage(used, fields, framed=True, missing=missing.append)
        pieces = () if status == 206 else (usage.feed(body), usage.end())  # a part shows no usage of the whole
        meaning = meaning._replace(used_units=next((units for units in pieces if units is not None), None))
    evidence = [each for level in meaning.levels if (each := evidence_of(level, book, (), at_ms, at_ms)) is not None]
    return status, meaning.with_evidence(evidence), missing[-1]
