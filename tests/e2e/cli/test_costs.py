"""`quota book check` and `quota book try`: a cost book tried before anything is sent."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from quota.clients.answer_fields import NO_USAGE, TOO_LONG
from quota.clients.gate import HostGate, at_once
from quota.clients.metering import Meter
from quota.ledger.factory import open_ledger
from quota.settings.books import load_book
from support.commands import Quota, one_line
from support.setup import budget_of, limit

BOOK = """
api = "github"
hosts = ["api.github.com"]
source = "https://docs.github.com"
read_on = 2026-11-25
[buckets.core]
quota = 5_000
resets = "1h"
[buckets.points]
quota = 900
resets = "1m"
[default]
get = 1
other = 5
[methods]
read = 2
ping = 0
ask = { bucket = "core", reserve = { default = 500 } }
write = [{ bucket = "core", units = 1 }, { bucket = "points", units = 5 }]
[routes]
"GET /repos/**" = "read"
"/ping" = "ping"
"POST /ask" = "ask"
"PUT /**" = "write"
[answers]
remaining = "X-RateLimit-Remaining"
limit = "X-RateLimit-Limit"
reset = { header = "X-RateLimit-Reset", as = "seconds" }
units = { json = "/cost" }
free = [{ status = 304 }, { body = "cached" }]
"""

TRY = ("book", "try", "--book", "github.toml")


@pytest.fixture
def quota(tmp_path: Path) -> Quota:
    (tmp_path / "github.toml").write_text(BOOK)
    return Quota(tmp_path)


def answer(quota: Quota, status: int, body: object = "", **headers: object) -> str:
    content = {"status": status, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}
    (quota.folder / "answer.json").write_text(json.dumps({**content, "body": body}))
    return "answer.json"


def test_a_file_is_a_cost_book_or_one_line_has_the_reason(quota: Quota) -> None:
    done = quota("book", "check", "github.toml")
    assert (done.returncode, done.stdout) == (0, "github.toml: no errors; 4 methods, 2 buckets, 4 routes\n")
    closed = 'closed = [{ status = 429, bucket = "core", lasts = "48h" }, { status = 403, lasts = "24h" }]'
    (quota.folder / "dear.toml").write_text(BOOK.replace("quota = 900", "quota = 4") + closed)
    long, dear, _ = quota("book", "check", "dear.toml").stdout.splitlines()
    assert "answers.closed[0]: lasts = '48h' closes a bucket for longer than a day, and than its longest window" in long
    never = " units of bucket 'points', and the quota is 4 per 1m: it never fits; correct one of them; ignore this if "
    assert dear == f"warning: cost book dear: write costs 5{never}upstream granted you more"
    (quota.folder / "github").write_text(BOOK.replace('= "read"\n', '= "raed"\n'))
    why = "github: routes.'GET /repos/**': no method 'raed' in this book; did you mean 'read'?"
    assert one_line(quota("book", "check", "github"), 78) == why


@pytest.mark.parametrize(
    ("request_", "output"),
    [
        ("GET https://api.github.com/repos/a/b?page=2", "read, 2 units of core"),
        ("PUT https://api.github.com/x", "write, 1 unit of core and 5 units of points"),
        ("POST https://api.github.com/x?_method=put", "write, 1 unit of core and 5 units of points"),
        ("https://api.github.com/ping", "ping, free"),
        ("https://api.github.com/users", "no route takes it; it costs the default, 1 unit of core"),
        ("FOO https://api.github.com/x", "no route takes it; it costs the default, 5 units of core"),
    ],
)
def test_a_request_is_a_method_by_its_route(quota: Quota, request_: str, output: str) -> None:
    done = quota(*TRY, request_)
    verb, _, url = request_.rpartition(" ")
    assert (done.returncode, done.stdout) == (0, f"{verb.upper() or 'GET'} {url}: {output}\n")


def test_an_answer_means_what_the_book_says(quota: Quota) -> None:
    command = (*TRY, "GET https://api.github.com/repos/a", "--answer")
    limited = {"X_RateLimit_Limit": 5_000, "X_RateLimit_Reset": "600"}

    def meanings(status: int, body: object = "", **headers: object) -> list[str]:
        return quota(*command, answer(quota, status, body, **headers)).stdout.splitlines()[1:]

    (line,) = meanings(403, {"message": "API rate limit exceeded"}, **limited, X_RateLimit_Remaining=0)
    assert line.startswith("closes core until ")
    assert line.endswith(": API rate limit exceeded")
    level, cost = meanings(200, {"cost": 7}, **limited, X_RateLimit_Remaining="4999")
    assert level.startswith("4,999 of 5,000 remain in core until ")
    assert cost == "it cost 7 units, but the price is fixed: only a call with `reserve` is settled"
    (empty,) = meanings(200, **limited, X_RateLimit_Remaining=0)
    assert empty.startswith("closes core until ")
    assert empty.endswith(": 0 of 5,000 remain")
    assert meanings(200, **{**limited, "X_RateLimit_Limit": 0}, X_RateLimit_Remaining=0) == [
        "the answer changes nothing"
    ]
    assert meanings(304) == meanings(200, "cached") == ["upstream does not count it: its charge is refunded"]
    assert meanings(206, "cached") == ["the answer changes nothing"]
    why = "is of no bucket or window of the book, or no possible number or time; it changes nothing"
    unread = meanings(200, **limited, X_RateLimit_Remaining=["1,000", "few"])
    assert unread == [f"x-ratelimit-remaining: '1,000, few' {why}"]
    (reset,) = meanings(403, {"error": {"errors": [{"reason": "dailyLimitExceeded", "message": "spent"}]}})
    assert (reset[:20], reset[43:]) == ("closes core until 20", ", when its window 1h resets: spent")
    assert meanings(403)[0].startswith("upstream does not accept the credential: HTTP 403")
    assert meanings(500, "Oops") == ["upstream is in trouble: Oops"]
    whole = quota.json(*command, answer(quota, 429, **limited, X_RateLimit_Remaining=0))
    assert (whole["method"], whole["units"], whole["answer"]["kind"]) == ("read", 2, "closed")
    assert [closing["bucket"] for closing in whole["answer"]["closes"]] == ["core"]
    command = (*TRY, "POST https://api.github.com/ask", "--answer")
    assert quota.json(*command[:-1])["parts"] == [{"bucket": "core", "units": 500, "reserved": True}]
    long = f'"{"9" * 300_000}"'
    rows = ((200, "9", "it cost 9 units"), (206, "9", NO_USAGE), (200, '"nine"', NO_USAGE), (200, long, TOO_LONG))
    for status, cost, meaning in rows:
        stream = f'data: {{"cost": 3}}\n\ndata: {{"cost": {cost}}}\n\n'
        assert meanings(status, stream, Content_Type="text/event-stream") == [meaning]


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["GE/T https://a.b/c"], 2, "'GE/T' is not an HTTP verb; did you mean 'GET'?"),
        (["GET /repos/a"], 2, "'GET /repos/a' is not a request; write for example \"GET https://api"),
        (["GET https://a:99999/b?key=k"], 2, "'GET https://a:99999/b?key=[redacted]' is not a request; write"),
        (["GET https://api.github.com/a/../b"], 2, "'GET https://api.github.com/a/../b' does not pass `quota proxy`: "),
        (["--answer", "github.toml"], 2, "Missing argument 'REQUEST'; see"),
        (["GET https://a.b/c", "--credential", "main"], 2, "--book and --credential cannot be combined"),
        (["GET https://a.b/c", "--answer", "github.toml"], 78, 'github.toml: not an answer; write {"status": 403'),
        (["GET https://a.b/c", "--answer", "list.json"], 78, 'list.json: not an answer; write {"status":'),
    ],
)
def test_a_wrong_question_is_one_line(quota: Quota, args: list[str], status: int, message: str) -> None:
    (quota.folder / "list.json").write_text("[]")
    done = quota(*TRY, *args)
    assert one_line(done, status).startswith(message)
    assert done.stdout == ""


ROOT = "https://youtube.googleapis.com"
DEFAULT = ", which the book does not have; it costs the default, "
GOES_ON = " is not charged: it continues a call that was charged when it began"
ELSEWHERE = f" is not charged: only requests to {', '.join(load_book('youtube-v3').hosts)} are"


@pytest.mark.parametrize(
    ("request_", "output"),
    [
        (f"GET {ROOT}/youtube/v3/liveChat/messages", f": youtube.liveChatMessages.list{DEFAULT}1 unit of units"),
        (f"PUT {ROOT}/upload/youtube/v3/videos?upload_id=x", GOES_ON),
        (f"POST {ROOT}/upload/youtube/v3/videos", ": youtube.videos.insert, 100 units of units"),
        ("PUT https://a.b/upload/youtube/v3/videos?upload_id=x", ELSEWHERE),
        ("POST https://a.b/batch", ELSEWHERE),
    ],
)
def test_a_request_to_google_is_tried_as_it_is_charged(
    quota: Quota, tmp_path: Path, request_: str, output: str
) -> None:
    """A gate over the same book charges that, and the command says it. Its peek charges nothing."""
    done = quota("book", "try", request_, "--book", "youtube-v3")
    assert (done.returncode, done.stdout) == (0, f"{request_}{output}\n")
    tried = quota.json("book", "try", request_, "--book", "youtube-v3")
    verb, _, url = request_.partition(" ")
    with closing(open_ledger(f"sqlite:///{tmp_path}/gate.db")) as ledger:
        budget = budget_of(ledger, limit(10_000), book=load_book("youtube-v3"))
        gate = HostGate(Meter(budget), None, None)
        if tried["metered"]:
            at_once(gate.peek(verb, url))
        attempt = at_once(gate.charge(verb, url))
        used_units = budget.usage()[0].used_units
    assert (tried["metered"], tried["units"] if tried["metered"] else 0) == (attempt is not None, used_units)


def test_a_request_to_the_endpoint_of_a_credential_is_tried_as_charged(quota: Quota) -> None:
    quota.configure('[credentials.main]\napi = "github.toml"\nendpoint = "http://127.0.0.1:8765"\n')
    there = quota("book", "try", "GET http://me:s3cret@127.0.0.1:8765/repos/a")
    assert there.stdout == "GET http://me:[redacted]@127.0.0.1:8765/repos/a: read, 2 units of core\n"
    elsewhere = quota("book", "try", "GET https://api.github.com/repos/a")
    assert "is not charged: only requests to 127.0.0.1:8765 are\n" in elsewhere.stdout


def test_check_names_only_credentials_that_the_proxy_serves(quota: Quota) -> None:
    routes, answers = BOOK.index("[routes]"), BOOK.index("[answers]")
    (quota.folder / "bare.toml").write_text(BOOK[:routes] + BOOK[answers:])
    quota.configure('[credentials.bare]\napi = "bare.toml"\n')
    message = "`quota proxy` does not serve bare: the cost book lacks [routes] or hosts"
    assert quota("check").stdout.splitlines()[-1] == message
    assert quota("proxy", "--listen", "127.0.0.1:0").returncode in (2, 78)
    quota.configure('[credentials.bare]\napi = "bare.toml"\n[credentials.hub]\napi = "github.toml"\n')
    assert quota("check").stdout.splitlines()[-2:] == ["`quota proxy` serves http://127.0.0.1:8790/hub", message]
    for secret, why in (
        ('key = "env:NO_SUCH_KEY"', "is not set"),
        ('auth = "service-account:bare.toml"', "bare.toml is no service-account file; download it again"),
    ):
        quota.configure(f'[credentials.hub]\napi = "github.toml"\n{secret}\n')
        shown = quota("check", COLUMNS="").stdout
        assert shown.endswith("`quota proxy` does not serve hub: the key or account cannot be read\n")
        assert why in shown
    quota.configure('[credentials.main]\napi = "youtube-v3"\nauth = "adc"\n')
    assert quota("check").stdout.splitlines()[-1] == "`quota proxy` looks for the account of main when it starts"


def test_a_book_is_read_once(quota: Quota) -> None:
    """A pipe, as of `quota book diff github <(git show ...)`, can be read no second time."""
    (quota.folder / "book.toml").write_text(BOOK)
    read = "cat book.toml | quota book"
    done = quota.shell(f"{read} diff ./book.toml /dev/stdin && {read} show /dev/stdin --json")
    same, _, shown = done.stdout.partition("\n")
    assert (same, json.loads(shown)["definition"]["api"], done.stderr) == ("no difference", "github", "")
