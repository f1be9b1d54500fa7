"""What a cost book says of its API: hosts, routes, answers. Each mistake is one line that names the place."""

from __future__ import annotations

import pytest

from quota.common.hosts import plain_path
from quota.errors import ConfigError
from quota.settings import books
from quota.terms.api import Field, Figure, LevelRule, Match, Used
from quota.terms.costs import CostBook
from support.books import parse_book

BOOK = """
api = "github"
source = "https://docs.github.example"
read_on = 2026-11-25
[buckets.core]
quota = 5_000
resets = "1h"
[buckets.points]
quota = 900
resets = "1m"
[default]
get = 1
other = 1
[methods]
search = 1
read = 1
write = 5
[pools.code]
marks = ["code_search"]
"""


def read(more: str = "", hosts: str = "") -> CostBook:
    return parse_book(f"{hosts}{BOOK}{more}", "github")


def message(more: str = "", hosts: str = "") -> str:
    with pytest.raises(ConfigError) as refused:
        read(more, hosts)
    line = str(refused.value).removeprefix("cost book github: ")
    assert line.isprintable()
    assert len(line) < 300
    return line


def test_a_book_without_these_tables_says_nothing_of_its_api() -> None:
    book = read()
    assert (book.hosts, book.routes, book.answers) == ((), (), type(book.answers)())


def test_hosts_are_names() -> None:
    assert read(hosts='hosts = ["api.github.com", "127.0.0.1:8765"]\n').hosts == ("api.github.com", "127.0.0.1:8765")
    for more in ("https://api.github.com", "api.github.com#x", "[::1]x:80", "x[::1]"):
        assert message(hosts=f'hosts = ["{more}"]\n').startswith(f"hosts[0]: '{more}' is not a host; write")
    assert message(hosts="hosts = []\n") == "hosts: an empty array selects nothing; remove the key or add a name"


@pytest.mark.parametrize(
    ("verb", "path", "method"),
    [
        ("GET", "/search/code", "search"),
        ("HEAD", "/search", "search"),
        ("GET", "/search//code/", "search"),
        ("GET", "/searches", "read"),
        ("POST", "/search/code", "write"),
        ("GET", "/repos/a%2Fb/c", "search"),
        ("POST", "/v1/properties/7:runReport", "search"),
        ("POST", "/v1/properties/7:runPivotReport", "write"),
        ("PURGE", "/", "write"),
    ],
)
def test_the_first_route_that_a_request_takes_names_its_method(verb: str, path: str, method: str) -> None:
    routes = read(
        """
        [routes]
        "GET /search/**" = "search"
        "GET /repos/{owner}/{repo}" = "search"
        "POST /v1/properties/{property}:runReport" = "search"
        "GET /**" = "read"
        "**" = "write"
        """
    ).routes
    assert next(route.method for route in routes if route.matches(verb, plain_path(path))) == method


@pytest.mark.parametrize(
    ("first", "then", "covered"),
    [
        ("GET /a", "HEAD /A/", True),
        ("HEAD /a", "GET /a", False),
        ("/a", "GET /a", True),
        ("GET /{x}", "GET /{y}", True),
        ("GET /a", "GET /{x}", False),
        ("GET /a/**", "GET /a", True),
        ("GET /a/{x}", "GET /a/**", False),
        ("GET **", "GET /**", True),
    ],
)
def test_a_route_that_no_request_reaches_is_a_mistake(first: str, then: str, covered: bool) -> None:
    both = f'[routes]\n"{first}" = "read"\n"{then}" = "write"\n'
    if covered:
        why = f"routes.{then!r}: never reached: {first!r} above it matches the same requests; "
        assert message(both) == f"{why}put this route first"
        assert message(both.replace("write", "read")) == f"{why}delete this route"
    else:
        assert [route.method for route in read(both).routes] == ["read", "write"]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("GETT /a", "'GETT' is no verb; did you mean 'GET'?"),
        ("GET a", "'a' is no path; write for example \"GET /users/{id}\""),
        *[
            (f"GET {path}", f"{path!r} is no path")
            for path in ("/a ", "/a?b=c", "/a/*", "/**/a", "/{a}{b}", "/{a", "/a/:id", "/<id>")
        ],
    ],
)
def test_a_route_is_a_verb_and_a_path(key: str, why: str) -> None:
    assert message(f'[routes]\n"{key}" = "read"\n').startswith(f"routes.{key!r}: {why}")


def test_the_method_of_a_route_has_a_price_and_a_book_has_few_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        message('[routes]\n"GET /a" = "raed"\n')
        == "routes.'GET /a': no method 'raed' in this book; did you mean 'read'?"
    )
    assert "no method 1 in this book" in message('[routes]\n"GET /a" = 1\n')
    monkeypatch.setattr(books, "MAX_ROUTES", 3)
    assert "more than 3 routes" in message("[routes]\n" + "".join(f'"GET /{n}" = "read"\n' for n in range(4)))


def test_an_answer_table_is_read() -> None:
    rules = read(
        """
        [answers]
        remaining = "X-RateLimit-Remaining"
        limit = "X-RateLimit-Limit"
        reset = "X-RateLimit-Reset"
        bucket = "X-RateLimit-Resource"
        units = { json = "/usage/total~1tokens" }
        free = [{ status = 304 }]
        closed = [
          { status = 429, bucket = "core" },
          { status = 403, body = "Secondary rate limit", bucket = "points", lasts = "60s" },
          { status = 200, json = "/errors/0/extensions/code", is = "THROTTLED" },
        ]
        """
    ).answers
    assert rules.levels == (
        LevelRule(
            Field("x-ratelimit-remaining"),
            Field("x-ratelimit-limit"),
            Field("x-ratelimit-reset"),
            Field("x-ratelimit-resource"),
        ),
    )
    assert rules.units == Used((Figure((Field(pointer=("usage", "total/tokens")),)),))
    assert rules.free == (Match(304),)
    assert [(rule.when, rule.bucket, rule.lasts) for rule in rules.closed] == [
        (Match(429), "core", None),
        (Match(403, "secondary rate limit"), "points", 60_000),
        (Match(200, "", ("errors", "0", "extensions", "code"), "THROTTLED"), "", None),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("limit = 'X'", "limit: has no effect without `remaining`; add the header that says what remains"),
        ("remaining = 'X Y'", "remaining: 'X Y' is not the name of a header"),
        (
            "remaining = { header = 'X', json = '/a' }",
            "remaining: give either a header or a place in the answer, such as { json =",
        ),
        ("remaining = { header = 'X', as = 'epoch' }", "remaining.as: is only for times, such as `reset`; remove it"),
        ("units = 'a.b'", """units: 'a.b' is not the name of a header; a place in the JSON is { json = "/a/b" }"""),
        ("remaining = { json = 'usage.total' }", "remaining.json: 'usage.total' is no JSON pointer; write for example"),
        ("remaining = 'X'\nreset = { header = 'Y', as = 'iso' }", "reset.as: 'iso' is not allowed here; "),
        ("units = { header = 'X', pattern = '[0-9]+' }", "units.pattern: the pattern needs a group, (?P<units>[0-9]+)"),
        (
            "remaining = { header = 'X', pattern = '(?P<used>[0-9]+)' }",
            "remaining: needs a group (?P<remaining>...), or (?P<used>...) and (?P<limit>...)",
        ),
        ("units = { header = 'X', pattern = '(?P<units>(a+)+)' }", "units.pattern: a group cannot be repeated; repeat"),
        ("units = { header = 'X', pattern = '.*(?P<units>1)' }", "units.pattern: a repeated . matches all that"),
        (f"units = {{ header = 'X', pattern = '{'a' * 201}' }}", "units.pattern: longer than 200 characters"),
        ("units = { header = 'X', pattern = '(' }", "units.pattern: not a pattern: missing )"),
        ("units = [" + "{ json = '/a' }," * 101 + "]", "units: 101 rules; 100 are the most"),
        ("free = [{ json = '/a', is = 1.5 }]", "free[0].is: write a text, a whole number, true or false"),
        ("free = [{}]", "free[0]: the rule has no condition; give `status`, `body` or `json`"),
        ("free = [{ status = 304, is = 1 }]", "free[0].is: needs `json`: the place in the answer that has this"),
        ("closed = [{ status = 200 }]", "closed[0]: every good answer has status 200; add `body` or `json` to match"),
        (
            "closed = [{ body = 'rate limit' }, { status = 403, body = 'secondary rate limit', lasts = '60s' }]",
            "closed[1]: never reached: closed[0] matches the same answers; put this rule first",
        ),
    ],
)
def test_each_mistake_is_one_line(line: str, why: str) -> None:
    assert message(f"[answers]\n{line}\n").startswith(f"answers.{why}")


@pytest.mark.parametrize(
    ("first", "then", "covered"),
    [
        (Match(pointer=("code",)), Match(pointer=("code",), value=7), True),
        (Match(pointer=("code",)), Match(pointer=("code",), value=0), False),  # 0 and "" are as if it was not there
        (Match(pointer=("code",), value=7), Match(pointer=("code",)), False),
        (Match(status=429), Match(status=429, pointer=("code",), value=0), True),
    ],
)
def test_a_rule_covers_another_only_if_it_matches_all_its_answers(first: Match, then: Match, *, covered: bool) -> None:
    assert first.covers(then) is covered


def test_an_empty_text_in_a_rule_is_the_same_as_none() -> None:
    rule = '[answers]\nremaining = { header = "", json = "/left" }\n[[answers.closed]]\nstatus = 429\n'
    assert read(f'{rule}body = ""\nbucket = ""\n').answers == read(rule.replace('header = "", ', "")).answers


def test_the_units_of_a_call_may_be_a_sum() -> None:
    rules = read("[answers]\nunits = [{ json = '/in' }, { json = ['/out', '/x/out'], default = 0 }]").answers
    assert rules.units == Used(
        (Figure((Field(pointer=("in",)),)), Figure((Field(pointer=("out",)), Field(pointer=("x", "out"))), 0))
    )


def test_a_pattern_takes_no_time_whatever_the_text() -> None:
    """A repeat gives nothing back, so a text is read once for each place where it may begin. Else this takes hours."""
    rules = read(
        "[answers]\nunits = { header = 'X', pattern = '[a0-9]*[a0-9]*[a0-9]*[a0-9]*(?P<units>[0-9]+)x' }"
    ).answers
    assert rules.units is not None
    pattern = rules.units.figures[0].places[0].pattern
    assert pattern is not None
    assert pattern.search("0" * 1_024) is None


def test_a_pattern_finds_what_it_names() -> None:
    pattern = "api-usage=(?P<used>[0-9]+)/(?P<limit>[0-9]{1,9}),? ?(?:[a-z]+)?"
    rules = read(f"[answers]\nremaining = {{ header = 'Sforce-Limit-Info', pattern = '{pattern}' }}").answers
    pattern = rules.levels[0].remaining.pattern
    assert pattern is not None
    match = pattern.search("api-usage=18/5000")
    assert match is not None
    assert match.groupdict() == {"used": "18", "limit": "5000"}
