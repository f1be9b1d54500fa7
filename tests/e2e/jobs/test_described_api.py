"""A job on an API that its cost book describes: the user's own function over a metered session of requests."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import quota
from quota.jobs.job import RunReport
from quota.jobs.runner import run_job
from support.commands import ROOT, Quota
from support.installation import Installation
from support.patience import without_waits
from support.plain_http import Answer, Arrived, PlainServer, Reached, Upstream, head

CONFIG = """
[ledger]
url = "sqlite:///ledger.db"
[credentials.main]
api = "github.toml"
endpoint = "{address}"
auth = "bearer:env:GITHUB_TOKEN"
[store]
url = "sqlite:///store.db"
[jobs.issues]
credential = "main"
fetch = "own_github_job:issues"
regions = ["a", "b"]
pages = 3
options = {{ address = "{address}" }}
"""

BOOK = """
api = "github"
hosts = ["api.github.com"]
source = "https://docs.github.com"
read_on = 2026-11-25
[buckets.core]
quota = 5_000
resets = "1h"
[default]
get = 7
other = 7
[methods]
read = 2
[routes]
"GET /issues/{region}" = "read"
[answers]
remaining = "X-RateLimit-Remaining"
reset = { header = "X-RateLimit-Reset", as = "epoch" }
"""

FETCH = """
from quota.jobs.job import Page, first_attempt

@first_attempt("read")
def issues(client, region, cursor, address):
    page = cursor["page"] if cursor else 1
    answer = client.get(f"{address}/issues/{region}", params={"page": page})
    answer.raise_for_status()
    return Page(cursor={"page": page + 1} if page < 3 else None)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "github.toml").write_text(BOOK)
    (tmp_path / "own_github_job.py").write_text(FETCH)
    monkeypatch.setenv("GITHUB_TOKEN", "a-token-of-github")
    monkeypatch.setenv("QUOTA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_github_job", None)


def run(folder: Path, address: str, more: str = "") -> RunReport:
    (folder / "quota.toml").write_text(CONFIG.format(address=address) + more)
    with quota.open(folder / "quota.toml") as session, without_waits():
        return run_job(session, "issues")


def test_a_job_fetches_its_pages_and_each_is_charged_by_its_route(folder: Path) -> None:
    with PlainServer(lambda _: Answer(200)) as server:
        report = run(folder, server.address)
    assert (report.outcome, report.units, report.attempts) == ("done", 12, 6)
    assert {request.headers["authorization"] for request in server.arrived} == {"Bearer a-token-of-github"}
    assert [urlsplit(request.target).path for request in server.arrived] == ["/issues/a"] * 3 + ["/issues/b"] * 3


def test_the_default_of_a_reserve_is_not_the_cheapest_call(folder: Path) -> None:
    """Before its request is known, a call is judged as the cheapest request."""
    reserve = '{ reserve = { json = "/n", default = 6_000 } }'
    book = BOOK.replace("read = 2", f"read = {reserve}").replace("= 7", f"= {reserve}")
    (folder / "github.toml").write_text(book.replace("[answers]", '[answers]\nunits = "X-Cost"'))
    (folder / "own_github_job.py").write_text(FETCH.replace("params=", 'json={"n": 2}, params='))
    more = 'max_units = 12\nleave = { hour = 4_730 }\nschedule = "0 * * * *"\n'
    with PlainServer(lambda _: Answer(200)) as server:
        report = run(folder, server.address, more)
    assert (report.outcome, report.units) == ("done", 12)
    asked = [Quota(folder)(*command.split()) for command in ("check", "status --check", "plan")]
    assert [(answer.returncode, answer.stderr) for answer in asked] == [(0, "")] * 3, asked
    with quota.open(folder / "quota.toml") as session:
        session.budget().charge("read", units=4_737)
        assert session.budget().outlook().full is None


def test_an_empty_pool_stops_the_run_until_its_reset_and_the_next_run_goes_on(folder: Path) -> None:
    now_s = int(time.time())
    empty = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(now_s + 900)}
    refusal = Answer(403, b'{"message": "API rate limit exceeded"}', empty)
    answers = chain([Answer(200)] * 4, repeat(refusal))
    with PlainServer(lambda _: next(answers)) as server:
        report = run(folder, server.address)
        assert (report.outcome, report.refused_by, len(server.arrived)) == ("stopped", "core", 5)
        assert "API rate limit exceeded" in report.why
        assert "credential may not" not in report.why
        assert (report.retry_at_ms or 0) >= (now_s + 900) * 1_000
        ended = [(region.region, region.outcome, region.cursor) for region in report.regions]
        assert ended == [("a", "done", None), ("b", "partial", {"page": 2})]
        assert run(folder, server.address).outcome == "stopped"
    assert len(server.arrived) == 5
    (folder / "own_github_job.py").write_text(FETCH.replace('@first_attempt("read")', ""))
    other = 'ping = { units = 1, bucket = "pings" }\n[buckets.pings]\nquota = 9\nresets = "1h"\n[routes]'
    (folder / "github.toml").write_text(BOOK.replace("[routes]", other))
    quota = Quota(folder)
    (job,), ahead = quota.json("status")["credentials"][0]["jobs"], quota.json("run", "issues", "--dry-run")
    stopped_by = job["refused_by"], ahead["calls"][0]["method"]
    assert stopped_by == ("core", "read"), "the call that stopped it would stop it again"


LOGIN = """from google.oauth2.credentials import Credentials
    client.get_adapter(address).caller.credentials = Credentials(None, "r", None, address, "c", "s")
    answer ="""


@pytest.mark.parametrize("begins", ["answer =", LOGIN], ids=["a call", "a token"])
def test_an_answer_has_a_deadline_here_too(folder: Path, begins: str) -> None:
    def drip(_: Reached) -> Iterator[bytes]:
        yield head("Content-Length: 30") + b"\r\n"
        for _ in range(30):
            time.sleep(0.1)
            yield b"x"

    fetch = FETCH.replace("client.get(", "client.get(timeout=9, url=").replace("answer =", begins)
    (folder / "own_github_job.py").write_text(fetch)
    with Upstream(drip) as upstream:
        report = run(folder, upstream.address, "max_answer_s = 1\n")
    assert "upstream's answer was not complete after 1 s" in str(report.regions[0].error)
    assert report.units == report.attempts * 2
    assert (report.units > 0) is (begins != LOGIN)


def test_a_login_goes_to_the_hosts_of_the_book_alone_and_never_in_plain_text(folder: Path) -> None:
    with PlainServer(lambda request: Answer(200)) as api, PlainServer(lambda request: Answer(200)) as other:
        for address in (api.address, "http://127.0.0.1"):  # without a port, it has the usual one
            (folder / "quota.toml").write_text(CONFIG.format(address=address))
            with quota.open(folder / "quota.toml") as session:
                client = session.requests()
                assert client.get(f"{other.address}/issues/a").status_code == 200
                assert client.get(f"{api.address}/issues/a").status_code == 200
        assert ["authorization" in each.headers for each in (*api.arrived, *other.arrived)] == [True] + [False] * 3
    (folder / "quota.toml").write_text(CONFIG.format(address="https://192.0.2.1"))
    with quota.open(folder / "quota.toml") as session, pytest.raises(quota.ConfigError, match="in plain text"):
        session.requests().get("http://192.0.2.1/issues/a")


class GitHub(Installation):
    """The job of docs/own-jobs.md, with the server for GitHub: 5 issues of each repository, two on a page."""

    def __init__(self, folder: Path, server: PlainServer) -> None:
        super().__init__(folder)
        text = (ROOT / "docs" / "own-jobs.md").read_text().partition("## Another API")[2]
        blocks = dict(reversed(re.findall(r"```(python|toml)\n(.*?)```", text, re.DOTALL)))
        (folder / "github_issues.py").write_text(blocks["python"])
        github = blocks["toml"].replace('"github"\n', f'"github"\nendpoint = "{server.address}"\n', 1)
        own = f'[ledger]\nurl = "sqlite:///ledger.db"\n[store]\nurl = "sqlite:///videos.db"\n{github}'
        self.config.write_text(f'{own}options = {{ address = "{server.address}" }}\n')
        self.quota.env["GITHUB_TOKEN"] = "a-token-of-github"  # noqa: S105

    @property
    def issues(self) -> list[tuple[str, str, str]]:
        return self.rows(
            "SELECT region, key, json_extract(data, '$.title') FROM rows WHERE name = 'issues' ORDER BY 1, 2"
        )


def github(request: Arrived) -> Answer:
    path, _, query = request.target.partition("?")
    page, repository = int(parse_qs(query)["page"][0]), path.removeprefix("/repos/").removesuffix("/issues")
    issues = [{"id": id_of(repository, n), "title": f"{repository} {n}", "state": "open"} for n in range(1, 6)]
    link = {"Link": f'<http://127.0.0.1{path}?page={page + 1}>; rel="next"'} if page < 3 else {}
    return Answer(200, json.dumps(issues[2 * page - 2 : 2 * page]).encode(), link)


def id_of(repository: str, number: int) -> int:
    return 1_000 * ord(repository[0]) + number


EVERY_ISSUE = [
    (repository, str(id_of(repository, n)), f"{repository} {n}")
    for repository in ("encode/httpx", "psf/requests")
    for n in range(1, 6)
]


def test_the_issues_of_two_repositories_become_rows(folder: Path) -> None:
    with PlainServer(github) as server:
        machine = GitHub(folder, server)
        done = machine.quota("run", "issues")
        assert done.returncode == 0, done.stderr
        assert machine.issues == EVERY_ISSUE
        assert machine.count("history") == len(EVERY_ISSUE), "a reading is stored once"
        units = machine.quota.json("spend")["total_units"] // 2  # each request is one of core and one point
        assert units == len(server.arrived)
    assert {request.headers["authorization"] for request in server.arrived} == {"Bearer a-token-of-github"}
