"""The shipped cost books from outside: what they are, in what two differ, and what time does to one."""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from quota.common.files import read_text
from quota.settings.books import book_names
from support.commands import Quota, one_line


def today() -> date:
    return datetime.now(UTC).date()


def test_the_books_are_listed_with_their_age(quota: Quota) -> None:
    lines = quota("book", "list").stdout.splitlines()
    assert lines[0].split() == ["name", "provider", "unit", "window", "age"]
    assert max(map(len, lines)) <= 80
    books = quota.json("book", "list")["books"]
    assert [book["book"] for book in books] == book_names()
    strava = next(book for book in books if book["api"] == "strava")
    assert strava["age_days"] == (today() - date.fromisoformat(strava["read_on"])).days
    grants = [(grant["units"], grant["window"]) for grant in strava["buckets"][0]["quotas"]]
    assert grants == [(200, "quarter-hour@UTC"), (2_000, "day@UTC")]


@pytest.mark.parametrize("name", ["analyticsdata-v1beta", "youtube-v3"])
def test_another_program_reads_a_book_as_its_file_has_it(quota: Quota, name: str) -> None:
    shown = quota.json("book", "show", name)
    file = tomllib.loads(read_text("quota.config", f"costs/{name}.toml"))
    assert shown["definition"] == json.loads(json.dumps(file, default=str))
    assert [row["method"] for row in shown["methods"]] == sorted(file["methods"])
    assert "definition" not in quota.json("costs")


def test_the_checks_list_each_mistake_of_a_book_on_a_line(quota: Quota) -> None:
    text = read_text("quota.config", "costs/github.toml").replace("quota = 5_000", "quota = 0")
    (quota.folder / "mine.toml").write_text(text.replace("status = 304", "status = 3"))
    quota.configure('[credentials.main]\napi = "./mine.toml"\n')
    wrong = ["buckets.core.quota: 0 is not a whole number", "answers.free[0].status: 3 is not"]
    for command, start in ((("book", "check", "mine.toml"), "quota: mine.toml: "), (("check",), "quota: quota.toml: ")):
        done = quota(*command)
        assert (done.returncode, done.stdout) == (78, "")
        lines = done.stderr.splitlines()
        assert len(lines) == len(wrong)
        assert all(line.startswith(start) and key in line for line, key in zip(lines, wrong, strict=True))
    (line,) = quota("status").stderr.splitlines()
    assert all(key in line for key in wrong), "other commands name all mistakes in a line"


def test_a_diff_lists_each_difference_of_two_books(quota: Quota) -> None:
    text = read_text("quota.config", "costs/github.toml")
    changed = text.replace("quota = 5_000", "quota = 6_000").replace('"OPTIONS /**" = "read"\n', "")
    changed = changed.replace("[routes]\n", '[routes]\n"GET /meta" = "rate-limit"\n').replace(
        "status = 304", "status = 305"
    )
    (quota.folder / "github.toml").write_text(changed)
    done = quota("book", "diff", "github", "./github.toml")
    assert done.stdout.splitlines() == [
        '~ buckets.core: {"quota": 5000, "resets": "1h"} -> {"quota": 6000, "resets": "1h"}',
        '- routes.OPTIONS /**: "read"',
        '~ answers.free[0]: {"status": 304} -> {"status": 305}',
        '+ routes.GET /meta: "rate-limit"',
    ]
    route = quota.json("book", "diff", "github", "./github.toml")["differences"][1]
    assert route == {"what": "routes.OPTIONS /**", "old": '"read"', "new": None}
    moved = '"GET /rate_limit" = "rate-limit"\n'  # the first route that matches decides
    (quota.folder / "moved.toml").write_text(text.replace(moved, "").replace('"GET /**"', f'{moved}"GET /**"'))
    places = "~ place of routes.GET /rate_limit: first -> after routes.GET /search/**\n"
    assert quota("book", "diff", "github", "./moved.toml").stdout == places
    assert quota("book", "diff", "stripe", "stripe").stdout == "no difference\n"
    assert quota("book", "diff", "stripe", "stripes").returncode == 78


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("shopify-admin", "X-Shopify-Access-Token", "X-Own", '~ key.header: "X-Shopify-Access-Token" -> "X-Own"'),
        (
            "analyticsdata-v1beta",
            'Report" = [{ reserve = { default = 10',
            'Report" = [{ reserve = { default = 10, bytes_per_unit = 9',
            '~ methods.properties.runReport[0]: {"reserve": {"default": 10}} '
            '-> {"reserve": {"default": 10, "bytes_per_unit": 9}}',
        ),
    ],
)
def test_every_change_of_a_book_is_a_difference(quota: Quota, name: str, before: str, after: str, message: str) -> None:
    text = read_text("quota.config", f"costs/{name}.toml").replace(before, after, 1)
    (quota.folder / "own.toml").write_text(text)
    assert quota("book", "diff", name, "./own.toml").stdout == f"{message}\n"


def test_a_book_is_shown_by_its_name_and_not_by_a_credential(quota: Quota) -> None:
    done = quota("costs", "github")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quota: github is a cost book, no method; show it with: quota book show github")
    assert quota("book", "show", "github").stdout.splitlines()[0].split()[0] == "code-search"
    assert " ".join(quota("book", "show", "github", "read").stdout.split()).startswith("read 1 core, 1 points ")
    assert "no method 'raed'" in quota("book", "show", "github", "raed").stderr


def aged(quota: Quota, days: int, price_in_days: int = 400) -> None:
    """A book of two credentials that was read some days ago. Its price changes in some days, and the day after."""
    since, then = (today() + timedelta(price_in_days + more) for more in (0, 1))
    (quota.folder / "own.toml").write_text(
        f"""
        api = "own"
        source = "https://own.example/limits"
        read_on = {today() - timedelta(days)}
        buckets = {{ units = {{ quota = 1_000, resets = "1h" }} }}
        default = {{ get = 1, other = 1 }}
        [methods]
        read = {{ prices = [{{ units = 1 }}, {{ units = 25, since = {since} }}, {{ units = 40, since = {then} }}] }}
        """
    )
    quota.configure(
        '[credentials.a]\napi = "own.toml"\nkey = "env:HOME"\n[credentials.b]\napi = "own.toml"\nkey = "env:PATH"\n'
    )


@pytest.mark.parametrize(("days", "old"), [(180, False), (181, True)])
def test_an_old_book_is_named_once_with_its_page(quota: Quota, days: int, old: bool) -> None:
    aged(quota, days)
    for command in ("check", "doctor"):
        done = quota(command)
        lines = " ".join(done.stdout.split())
        assert (done.returncode, lines.count("book_old")) == (0, int(old)), "a warning, no error"
        assert lines.count("https://own.example/limits") == int(old), command


def test_a_book_that_was_read_in_the_future_is_named(quota: Quota) -> None:
    aged(quota, -2)
    for command in (("check",), ("book", "check", "own.toml")):
        assert "is yet to come; write into read_on the day when" in " ".join(quota(*command).stdout.split())


@pytest.mark.parametrize(("days", "is_announced"), [(29, True), (32, False), (-1, False)])
def test_a_price_that_changes_soon_is_announced(quota: Quota, days: int, is_announced: bool) -> None:
    aged(quota, 0, days)
    since = today() + timedelta(days)
    for command in ("check", "doctor"):
        text = " ".join(quota(command).stdout.split())
        assert (f"read costs 25 units from {since} on, and 1 units until then" in text) is is_announced, command
        assert text.count("on, and 25 units until then") == is_announced, command
    assert quota("costs", "read", "--credential", "a").stdout.count("units from") == 2 * (days > 0)


def test_two_apis_with_one_project_are_kept_apart(quota: Quota) -> None:
    """The default project is the name of the credential, and the default ledger is the user's."""
    quota.configure('[credentials.main]\napi = "asana"\n')
    assert quota("charge", "read").returncode == 0
    quota.configure('[ledger]\nunavailable = { max_cost = 1, allowance = 1 }\n[credentials.main]\napi = "hubspot"\n')
    message = "project 'main' has the charges of api 'asana', and upstream counts 'hubspot' separately"
    for words in ("charge read", "peek read", "status", "spend", "log", "check", "doctor"):
        done = quota(*words.split())
        assert done.returncode == (1 if words == "doctor" else 78), words
        assert message in " ".join((done.stdout + done.stderr).split()), words
    quota.configure('[credentials.main]\napi = "asana"\n')
    assert quota.json("status")["credentials"][0]["limits"][0]["used_units"] == 1


def test_init_takes_a_cost_book_of_the_user(quota: Quota) -> None:
    aged(quota, 0)
    (quota.folder / "quota.toml").unlink()
    assert quota("init", "--api", "own.toml").returncode == 0
    assert quota("check", OWN_KEY="x").returncode == 0
    assert "did you mean 'github'?" in quota("init", "--api", "gihub", "other.toml").stderr


def test_a_book_is_drafted_from_answers(quota: Quota) -> None:
    headers = {"Date": "Wed, 25 Nov 2026 12:00:00 GMT", "X-RateLimit-Limit": 600, "X-RateLimit-Remaining": 0}
    headers |= {"X-RateLimit-Reset": 1795608030, "X-RateLimit-Resource": "all"}
    refused = {"status": 429, "headers": headers, "body": {}, "request": "GET https://api.weather.example/v1"}
    (quota.folder / "one.json").write_text(json.dumps(refused))
    (quota.folder / "two.json").write_text(json.dumps({"status": 403, "headers": {}, "body": ""}))
    text = quota("book", "new", "weather", "--answer", "one.json", "--answer", "two.json").stdout
    book = tomllib.loads(text)
    assert (book["api"], book["hosts"]) == ("weather", ["api.weather.example"])
    assert book["buckets"]["requests"]["quota"] == 600
    assert book["answers"] == {
        "remaining": "X-RateLimit-Remaining",
        "limit": "X-RateLimit-Limit",
        "reset": {"header": "X-RateLimit-Reset", "as": "epoch"},
        "bucket": "X-RateLimit-Resource",
        "closed": [{"status": 429}, {"status": 403}],
    }
    (quota.folder / "weather.toml").write_text(text)
    assert "resets" in quota("book", "check", "weather.toml").stderr, "what no answer says is yours"
    whole = text.replace('resets = ""', 'resets = "1h"').replace('source = ""', 'source = "https://weather.example"')
    (quota.folder / "weather.toml").write_text(whole)
    assert quota("book", "check", "weather.toml").returncode == 0


def drafted(quota: Quota, name: str = "own", status: int = 200, request: str = "", **headers: object) -> dict[str, Any]:
    """The draft of a book from one answer."""
    named = {header.replace("_", "-"): value for header, value in headers.items()}
    answer = {"status": status, "headers": named, "body": "", "request": request}
    (quota.folder / "one.json").write_text(json.dumps(answer))
    return tomllib.loads(quota("book", "new", name, "--answer", "one.json").stdout)


def test_a_draft_has_no_number_that_no_answer_has(quota: Quota) -> None:
    book = drafted(quota, status=429, Retry_After="9")
    assert (book["buckets"]["requests"]["quota"], book["hosts"]) == (0, [])
    assert book["answers"] == {"closed": [{"status": 429, "lasts": "60s"}]}
    (quota.folder / "one.json").write_text("[]")
    assert quota("book", "new", "own", "--answer", "one.json").returncode == 78
    for address in ("/v1", "https://[x/"):
        (quota.folder / "one.json").write_text(json.dumps({"status": 200, "request": f"GET {address}"}))
        assert "its request names no host" in one_line(quota("book", "new", "own", "--answer", "one.json"), 78)
    assert quota("book", "new", "").returncode == 2
    book = drafted(quota, request="GET https://me:hush@a.example:8443/v1/a b HTTP/1.1")
    assert book["hosts"] == ["a.example:8443"], "no password"
    windows = [{"quota": 1_000, "resets": "24h"}, {"quota": 10, "resets": "1m"}]
    for policy in ('"day";q=1000;w=86400, "min";q=10;w=60', "1000;w=86400, 10;w=60"):
        assert drafted(quota, RateLimit_Policy=policy)["buckets"]["requests"] == {"windows": windows}
