"""The configuration that `quota init --api NAME` writes: that provider's limits, and a first call in its comments."""

from __future__ import annotations

import re

from quota.common.resources import read_text
from quota.settings.books import book_names
from quota.settings.limits import default_limits
from quota.settings.lint import EXAMPLE_PROJECT, as_written
from quota.settings.model import DEFAULT_HEADROOM_PERCENT
from quota.settings.toml import in_toml
from quota.terms.api import KeyPlace
from quota.terms.costs import CostBook
from quota.terms.limits import Limit

ELSEWHERE = "https://api.example.com"
"""For an API whose host is another one for each customer."""


def configuration_for(api: str, book: CostBook) -> str:
    """The text of a configuration whose one credential has this cost book; `api` is how the user named it."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", book.name)
    secret = f"{re.sub('[^A-Z0-9]', '_', book.api.upper())}_{'TOKEN' if book.has_session else 'KEY'}"
    parts = [
        "# Configuration of quota-ledger. `quota check` reports errors and surprises in it.\n"
        "# `quota init` without --api writes one with every setting there is, and with jobs.\n",
        "# What the cost book says of its numbers, and which of them are yours to set:\n#\n" + _comment(api),
        "# Where charges are kept. Machines that share a token must share a ledger, a redis:// one for example.\n"
        "# Without a url it is SQLite in your state folder.\n"
        '[ledger]\n# url = "redis://127.0.0.1:6379/0"\n',
        f"[credentials.{name}]\napi = {in_toml(api)}\n\n"
        "# Upstream counts by this. Tokens that share a budget upstream have the same project here.\n"
        f'project = "{EXAMPLE_PROJECT}"\n\n' + _login(book, secret),
        "# The limits that the book alone gives: 5% of each stays unspent. Set `quota` to what your plan grants.\n\n"
        + "\n".join(_limit(name, limit) for limit in default_limits(book)),
        _first_call(name, book),
    ]
    return "\n".join(parts)


def _comment(api: str) -> str:
    """What a shipped book says before its first key."""
    if api not in book_names():
        return "# See the comment in its file.\n"
    return read_text("quota.config", f"costs/{api}.toml").partition("\napi = ")[0].rstrip() + "\n"


def _login(book: CostBook, secret: str) -> str:
    where = ""
    if book.routes and not book.hosts:
        where = f'# The API has no host that is the same for all: name yours.\nendpoint = "{ELSEWHERE}"\n\n'
    if not book.has_session or book.key != KeyPlace():
        return f'{where}# Where to find the key, never the key itself.\nkey = "env:{secret}"\n'
    account = '# Or log in as an account: auth = "adc" or "service-account:PATH".\n' if book.scopes else ""
    return (
        f"{where}# Whose token goes along, and where it is; never the token itself.\n{account}"
        f'auth = "bearer:env:{secret}"\n'
    )


def _limit(credential: str, limit: Limit) -> str:
    lines = {
        "name": in_toml(limit.name),
        "bucket": in_toml(limit.view.selector.buckets[0]),
        "quota": f"{limit.quota_units:_}",
        "headroom": f'"{DEFAULT_HEADROOM_PERCENT}%"',
        "window": as_written(limit.view.window),
    }
    return f"[[credentials.{credential}.limits]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items())


def _first_call(name: str, book: CostBook) -> str:
    """What to try first: on the command line, and from Python."""
    route = next((route for route in book.routes if route.verb in ("GET", "")), None)
    route = route or next(iter(book.routes), None)
    if route is None:
        method = book.probe.method if book.probe else next(iter(book.methods), "METHOD")
        call = f'q.google("{name}", "{book.api}", "{book.version}")  # each call of it is charged'
    else:
        method = route.method
        address = (book.address or ELSEWHERE) + route.path.removesuffix("**")
        call = f'q.requests("{name}").{(route.verb or "GET").lower()}("{address}")'
    return (
        "# A first call. A shell asks before it calls:\n"
        "#\n"
        f"#   quota peek {method}\n"
        f"#   quota exec {method} -- COMMAND\n"
        "#\n"
        "# A program in Python runs as it is, and one in any other language asks `quota proxy`:\n"
        "#\n"
        "#   quota exec --auto --summary -- python etl.py\n"
        "#\n"
        "# Python is charged by itself, for each request that leaves, and a refusal raises quota.Refused:\n"
        "#\n"
        "#   with quota.open() as q:\n"
        f"#       answer = {call}\n"
    )
