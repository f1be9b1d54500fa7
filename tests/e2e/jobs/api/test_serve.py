"""`quota serve` as its clients meet it: processes, HTTP, and a store that runs write meanwhile."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from quota.common.clock import host_clock
from quota.jobs.api.app import resolved
from quota.jobs.emulator import Emulator
from quota.jobs.job import Page
from quota.jobs.store.reader import MAX_HITS
from quota.jobs.store.store import Store
from quota.terms.limits import HOUR_MS
from support.commands import Quota, one_line
from support.configurations import configuration
from support.servers import until
from support.web import Served

JOBS = """
[jobs.trending]
fetch = "trending"
regions = ["US", "DE", "FR"]
pages = 2
[jobs.channels]
fetch = "channels"
regions = ["US"]
"""
CONFIG = configuration("http://127.0.0.1:9", JOBS)
TRENDING = "/api/v1/videos/trending"
SEARCH = "/api/v1/search"


class Api:
    def __init__(self, quota: Quota, upstream: Emulator, served: Served) -> None:
        self.quota = quota
        self.upstream = upstream
        self.served = served
        self.client = httpx.Client(base_url=served.address, timeout=300)

    @property
    def store(self) -> Path:
        return self.quota.folder / "videos.db"

    def get(self, path: str, **parameters: object) -> httpx.Response:
        return self.client.get(path, params={name: str(value) for name, value in parameters.items()})

    def json(self, path: str, **parameters: object) -> Any:
        answer = self.get(path, **parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def problem(self, status: int, path: str, **parameters: object) -> Any:
        return problem(self.get(path, **parameters), status)

    def rows(self, sql: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(self.store)) as db:
            return db.execute(sql, values).fetchall()

    def pages(self, path: str, **parameters: object) -> Iterator[Any]:
        page = self.json(path, **parameters)
        yield page
        while "nextPageToken" in page:
            page = self.json(path, **parameters, cursor=page["nextPageToken"])
            yield page


def problem(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    document = answer.json()
    assert document["status"] == status
    assert document["detail"].isprintable()
    return document


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    quota = Quota(tmp_path_factory.mktemp("api"))
    with Emulator() as upstream:
        (quota.folder / "key").write_text("a-key-for-the-api")
        quota.configure(configuration(upstream.address, JOBS))
        assert quota("run", "trending", "--region", "US", "--region", "DE").returncode == 0
        assert quota("run", "channels").returncode == 0
        with Served(quota.start("serve", "--listen", "127.0.0.1:0")) as served:
            api = Api(quota, upstream, served)
            yield api
            api.client.close()
            status, stderr = served.end(signal.SIGTERM)
            assert (status, stderr) == (0, "")


def video(number: int, title: str = "a title") -> dict[str, Any]:
    return {
        "id": f"v{number}",
        "snippet": {"title": title, "channelId": "UCa"},
        "statistics": {"viewCount": str(number)},
    }


def save(store: Store, numbers: range, *, job: str = "trending", region: str = "FR", finished: bool = True) -> None:
    """A page of a pass, in the region's ranking."""
    (checkpoint,) = store.start_round(job, [region])
    page = Page([video(number) for number in numbers], ranked=True, cursor={"after": numbers[-1]})
    store.save_page(checkpoint, page, started_at_ms=host_clock(), finished=finished)


@pytest.fixture
def store(api: Api) -> Iterator[Store]:
    with Store(str(api.store), retention_ms=10**10) as store:
        yield store


# -- what is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [7, 100])
def test_the_pages_of_a_ranking_are_the_ranking(api: Api, limit: int) -> None:
    pages = list(api.pages(TRENDING, region="DE", limit=limit))
    stored = api.rows(
        "SELECT r.video_id, r.rank, v.title FROM rankings r JOIN videos v USING (video_id)"
        " WHERE region = 'DE' ORDER BY rank"
    )
    assert [(each["id"], each["rank"], each["snippet"]["title"]) for page in pages for each in page["items"]] == stored
    assert {page["pageInfo"]["totalResults"] for page in pages} == {len(stored)}
    assert all(len(page["items"]) == limit for page in pages[:-1])


def test_a_video_is_found_by_its_id(api: Api, store: Store) -> None:
    (checkpoint,) = store.start_round("one", ["XY"])
    named = {"id": "v é", "snippet": {"title": "Of itself", "tags": ["a"]}, "statistics": {"viewCount": "7"}}
    store.save_page(checkpoint, Page([named]), started_at_ms=1, finished=True)
    video = {"kind": "youtube#video", "id": "v é", "snippet": {"title": "Of itself", "tags": ["a"]}}
    assert api.json("/api/v1/videos/v%20%C3%A9") == {**video, "statistics": {"viewCount": "7"}}
    listed = api.json(TRENDING, region="DE", limit=1)["items"][0]
    assert api.json(f"/api/v1/videos/{listed['id']}") == {key: each for key, each in listed.items() if key != "rank"}
    api.problem(404, "/api/v1/videos/nobody")


def test_a_channel_is_what_a_job_fetched_or_what_its_videos_say(api: Api, store: Store) -> None:
    ((fetched, title),) = api.rows("SELECT channel_id, title FROM channels LIMIT 1")
    assert api.json(f"/api/v1/channels/{fetched}")["snippet"]["title"] == title
    (checkpoint,) = store.start_round("other", ["XY"])
    named = {"id": "v-named", "snippet": {"channelId": "UC é", "channelTitle": "Of a video"}}
    store.save_page(checkpoint, Page([named]), started_at_ms=1, finished=True)
    channel = {"kind": "youtube#channel", "id": "UC é", "snippet": {"title": "Of a video"}}
    assert api.json("/api/v1/channels/UC%20%C3%A9") == channel
    api.problem(404, "/api/v1/channels/UCnobody")


def test_a_word_that_more_videos_have_than_are_ranked_finds_the_newest_by_views(api: Api, store: Store) -> None:
    (checkpoint,) = store.start_round("many", ["XY"])
    many = [video(number, "ubiquitous") for number in range(MAX_HITS + 20)]
    store.save_page(checkpoint, Page(many), started_at_ms=1, finished=True)
    ids = [each["id"]["videoId"] for page in api.pages(SEARCH, q="ubiquitous", limit=100) for each in page["items"]]
    assert ids == [f"v{number}" for number in range(MAX_HITS + 19, 19, -1)]
    assert [each["video_id"] for each in api.quota.json("search", "ubiquitous", "--limit", "9")["videos"]] == ids[:9]


def test_the_page_lists_the_document_and_asks_nobody_else(api: Api) -> None:
    answer = api.get("/")
    assert "http" not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; style-src 'self'")
    for path in api.json("/openapi.json")["paths"]:
        assert path in answer.text
    assert api.get("/style.css").headers["content-type"] == "text/css; charset=utf-8"


def test_health_tells_of_store_ledger_and_freshness(api: Api, store: Store) -> None:
    save(store, range(3), job="no-longer-configured", region="XX")
    with closing(sqlite3.connect(api.store)) as db, db:
        db.execute("UPDATE checkpoints SET completed_at_ms = 1 WHERE region = 'XX'")
    health = api.json("/healthz")
    assert health["checks"]["ledger"] == {"status": "pass"}
    assert health["checks"]["store"] == {"status": "pass"}
    assert health["checks"]["freshness"]["age_s"] <= health["checks"]["freshness"]["oldest_age_s"] < 600
    assert health["status"] == "pass"


@pytest.mark.parametrize(
    "path", [f"{TRENDING}?region=US", f"{SEARCH}?q=nothing-has-this", "/openapi.json", "/", "/style.css"]
)
def test_an_answer_that_is_the_same_is_not_sent_again(api: Api, path: str) -> None:
    first = api.client.get(path)
    tag = first.headers["etag"]
    for condition in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = api.client.get(path, headers={"if-none-match": condition})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert again.headers["cache-control"] == first.headers["cache-control"]
    for condition in ('"other"', tag.strip('"'), ""):
        assert api.client.get(path, headers={"if-none-match": condition}).status_code == 200
    head = api.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "date": ""} == {**first.headers, "date": ""}


# -- pages while runs write --------------------------------------------------------------------------------------------


def ids(answer: Any) -> list[str]:
    return [each["id"] for each in answer["items"]]


def test_a_ranking_stays_as_it_is_until_the_next_one_is_complete(api: Api, store: Store) -> None:
    asked = {"region": "FR", "limit": 10}
    problem(api.get(TRENDING, **asked), 404)
    save(store, range(25), finished=False)
    problem(api.get(TRENDING, **asked), 404)  # its first page is stored, the second is not
    save(store, range(25, 50))
    first = api.json(TRENDING, **asked)
    assert ids(first) == [f"v{number}" for number in range(10)]

    save(store, range(100, 125), finished=False)  # the next pass
    second = api.json(TRENDING, **asked, cursor=first["nextPageToken"])
    assert ids(second) == [f"v{number}" for number in range(10, 20)]
    assert api.json(TRENDING, **asked) == first

    store.fail(store.checkpoint("trending", "FR"), keep_cursor=False)  # given up: what it stored is no ranking
    assert api.json(TRENDING, **asked) == first

    save(store, range(200, 225))
    old = api.problem(400, TRENDING, **asked, cursor=second["nextPageToken"])
    assert (old["parameter"], "has changed" in old["detail"]) == ("cursor", True)
    assert ids(api.json(TRENDING, **asked)) == [f"v{number}" for number in range(200, 210)]


def test_a_search_ends_with_what_the_store_gets_although_a_clock_was_ahead(api: Api, store: Store) -> None:
    """Videos stored after the clock was right are not newer than the others: the pages of a search would go on in
    another order."""
    with Store(str(api.store), retention_ms=10**10, clock=lambda: host_clock() + HOUR_MS) as ahead:
        save(ahead, range(9_100, 9_104), region="XY")
    save(store, range(9_100, 9_103), region="XY")
    first = api.json(SEARCH, q="title", limit=1)
    second = {"q": "title", "limit": 1, "cursor": first["nextPageToken"]}
    assert api.json(SEARCH, **second)["items"] != first["items"]
    save(store, range(9_100, 9_103), region="XY")
    assert api.problem(400, SEARCH, **second)["parameter"] == "cursor"


def test_a_configured_job_ranks_a_region(api: Api, store: Store) -> None:
    for job, numbers in (("another", range(5)), ("trending", range(10, 15)), ("zzz", range(20, 25))):
        save(store, numbers, job=job, region="US")
    assert api.json(TRENDING, region="US")["ranking"]["job"] == "trending"


def test_a_store_that_is_away_is_503_until_it_is_back(api: Api, tmp_path: Path) -> None:
    with Store(str(tmp_path / "other.db"), retention_ms=10**10) as other:
        save(other, range(3_000, 3_030), region="US")
    first = api.json(TRENDING, region="DE", limit=10)
    quota = Quota(tmp_path)
    quota.configure(CONFIG)
    shutil.copy(api.store, tmp_path / "videos.db")
    with (
        Served(quota.start("serve", "--listen", "127.0.0.1:0")) as served,
        httpx.Client(base_url=served.address, timeout=300) as client,
    ):

        def away() -> None:
            for path in (f"{TRENDING}?region=DE&limit=10", f"{SEARCH}?q=a", "/api/v1/channels/a"):
                assert int(client.get(path).headers["retry-after"]) > 0
                problem(client.get(path), 503)
            assert client.get("/").status_code == 200

        asked = {"region": "DE", "limit": 10}
        token = client.get(TRENDING, params=asked).json()["nextPageToken"]
        assert token == first["nextPageToken"]  # a copy is the same store
        assert client.get("/healthz").status_code == 200
        for name in ("videos.db", "videos.db-wal", "videos.db-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        away()
        until(lambda: client.get("/healthz").status_code == 503)
        for content in (b"not a database" * 100, b""):
            (tmp_path / "videos.db").write_bytes(content)
            away()
        (tmp_path / "videos.db").unlink()
        shutil.copy(tmp_path / "other.db", tmp_path / "videos.db")
        with closing(sqlite3.connect(tmp_path / "videos.db", isolation_level=None)) as writer:
            writer.execute("PRAGMA locking_mode = EXCLUSIVE")
            writer.execute("BEGIN EXCLUSIVE")
            away()
            writer.execute("ROLLBACK")
        assert ids(client.get(TRENDING, params={"region": "US", "limit": 2}).json()) == ["v3000", "v3001"]
        problem(client.get(TRENDING, params=asked), 404)  # another store, which has nothing of DE
        status, stderr = served.end(signal.SIGTERM)
    events = [each.removeprefix("quota: ").split()[0] for each in stderr.splitlines()]
    assert (status, events) == (0, ["store_away", "store_back"])


# -- what is asked wrongly ---------------------------------------------------------------------------------------------

BAD = [
    (TRENDING, "", "region"),
    (TRENDING, "region=YY", "region"),
    (TRENDING, "region=DE&limit=101", "limit"),
    (TRENDING, f"region=DE&cursor={'A' * 24}", "cursor"),
    (TRENDING, "region=DE&Limit=5", "Limit"),
    (SEARCH, "", "q"),
    (SEARCH, f"q={'a+' * 33}", "q"),
    (SEARCH, "q=a*", "q"),
    (SEARCH, "q=a%EF%BC%8A", "q"),  # a full-width *
    (SEARCH, "q=a*%00b", "q"),
    (SEARCH, "q=aa*+bb*+cc*+dd*", "q"),
    ("/healthz", "verbose=1", "verbose"),
    ("/", "x" * 30_000, "x" * 97 + "..."),
]


@pytest.mark.parametrize(("path", "query", "parameter"), BAD)
def test_a_question_that_cannot_be_right_is_400(api: Api, path: str, query: str, parameter: str) -> None:
    assert problem(api.client.get(f"{path}?{query}"), 400)["parameter"] == parameter


def test_the_error_about_a_long_search_counts_what_was_typed(api: Api) -> None:
    assert api.problem(400, SEARCH, q="\ufdfa" * 10)["detail"].endswith(" 100 characters, not 10; they are read as 180")


def test_a_cursor_of_another_query_is_400(api: Api) -> None:
    token = api.json(TRENDING, region="DE", limit=10)["nextPageToken"]
    for path, asked in ((TRENDING, {"region": "US"}), (SEARCH, {"q": "DE"})):
        assert api.problem(400, path, **asked, cursor=token)["parameter"] == "cursor"
    assert len(ids(api.json(TRENDING, region="DE", limit=20, cursor=token))) == 20  # another size of page is the same


@pytest.mark.parametrize("path", ["/x", f"{SEARCH}/", "/api/v1/channels/a/b", "/etc/../x"])
def test_the_api_answers_other_paths_with_404(api: Api, path: str) -> None:
    problem(api.client.get(path), 404)


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "QUERY"])
def test_the_api_answers_other_methods_with_405(api: Api, method: str) -> None:
    for path in (f"{TRENDING}?region=DE", "/healthz", "/"):
        answer = api.client.request(method, path)
        problem(answer, 405)
        assert answer.headers["allow"] == "GET, HEAD"


def test_the_absolute_form_of_a_target_is_that_of_a_path(api: Api) -> None:
    """Its host decides, not the Host: RFC 9112, 3.2.2."""
    url = api.client.base_url
    for target, status in ((f"HTTP://{url.host}/%68ealthz", b" 200 "), ("http://rebound.example/healthz", b" 421 ")):
        with socket.create_connection((url.host, url.port or 80), timeout=60) as each:
            each.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            head = each.makefile("rb").readline()
        assert status in head, (target, head)


def test_another_host_is_421(api: Api) -> None:
    document = problem(api.client.get("/healthz", headers={"host": "rebound.example"}), 421)
    described = api.json("/openapi.json")
    for operations in described["paths"].values():
        answer = resolved(described, operations["get"]["responses"]["default"])
        schema = answer["content"]["application/problem+json"]["schema"]
        jsonschema.validate(document, {**schema, "components": described["components"]})


def test_every_answer_is_as_the_document_says(api: Api) -> None:
    chance = random.Random(13)
    document = api.json("/openapi.json")
    channels = [row[0] for row in api.rows("SELECT channel_id FROM channels LIMIT 5")]
    token = api.json(TRENDING, region="DE", limit=10)["nextPageToken"]
    values = ["DE", "US", "YY", "", "a", "music video", "5", "100", "101", "-1", "é", "\0", "x" * 600, "a*"]
    values += [token, "東京"]
    seen: set[tuple[str, int]] = set()
    for _ in range(200):
        path = chance.choice(list(document["paths"]))
        operation = document["paths"][path]["get"]
        parameters = [resolved(document, each) for each in operation["parameters"]]
        names = [each["name"] for each in parameters if each["in"] == "query"]
        asked = [(name, chance.choice(values)) for name in names if chance.random() < 0.6]
        if chance.random() < 0.1:
            asked.append((chance.choice([*names, "other"]), chance.choice(values)))
        target = path.replace("{channel_id}", chance.choice([*channels, "UCx", "%20", "%ff"]))
        answer = api.client.get(target, params=asked)
        described = resolved(document, operation["responses"][str(answer.status_code)])
        (media_type,) = described["content"]
        assert answer.headers["content-type"] == media_type
        schema = {**described["content"][media_type]["schema"], "components": document["components"]}
        jsonschema.validate(answer.json(), schema, cls=jsonschema.Draft202012Validator)
        for name in described["headers"]:
            assert name in answer.headers
        seen.add((path, answer.status_code))
    assert {status for path, status in seen if path == TRENDING} == {200, 400}
    assert {status for path, status in seen if "channel" in path} == {200, 400, 404}
    assert {status for path, status in seen if path == SEARCH} == {200, 400}


def test_no_question_spends_quota_or_writes(api: Api) -> None:
    def contents() -> tuple[list[str], list[str], Any]:
        with (
            closing(sqlite3.connect(api.quota.folder / "ledger.db")) as ledger,
            closing(sqlite3.connect(api.store)) as store,
        ):
            return list(ledger.iterdump()), list(store.iterdump()), api.upstream.usage()

    before = contents()
    for path in (
        f"{TRENDING}?region=FR&limit=99",
        f"{TRENDING}?region=DE&limit=98",
        f"{SEARCH}?q=some+words",
        "/healthz",
    ):
        assert api.client.get(path).status_code in (200, 404)
    assert contents() == before


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Quota:
    """An installation of the test's own, without a store."""
    quota = Quota(tmp_path)
    quota.configure(CONFIG)
    return quota


def test_serve_needs_and_makes_no_store_and_no_ledger(own: Quota) -> None:
    with Served(own.start("serve", "--listen", "127.0.0.1:0", "--hostname", "Api.example")) as served:
        for host in ("api.example", "localhost"):
            answer = httpx.get(f"{served.address}/healthz", headers={"host": host}, timeout=100)
            assert (answer.status_code, answer.json()["checks"]["store"]["status"]) == (503, "fail")
        assert served.end(signal.SIGINT)[0] == 0
    assert [path.name for path in own.folder.iterdir() if path.suffix == ".db"] == []


INBOUND = """
[inbound]
url = "sqlite:///inbound.db"
[inbound.api]
path = "{path}"
limit = 3
window = "1h"
algorithm = "log"
shadow = {shadow}
"""


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        ("", "/api/v1/videos/trending"),
        (INBOUND.format(path="/login", shadow="false"), "/api/v1/videos/trending"),
        (INBOUND.format(path="/api/v1/videos/*", shadow="false"), "/api/v1/search"),
        (INBOUND.format(path="/api/*", shadow="true"), "/api/v1/videos/trending"),
    ],
)
def test_an_address_that_others_reach_needs_a_rule_or_unlimited(own: Quota, rules: str, missing: str) -> None:
    own.configure(CONFIG + rules)
    refusal = one_line(own("serve", "--listen", "0.0.0.0:0"), 2)
    assert f"no rule limits {missing}: write [inbound.NAME] in quota.toml, or set --unlimited" in refusal


def test_other_machines_are_limited_by_the_rules(own: Quota) -> None:
    own.configure(CONFIG + INBOUND.format(path="/api/*", shadow="false"))
    with Served(own.start("serve", "--listen", "[::]:0")) as served:
        address, any_host = f"http://[::1]:{served.port}", {"host": "any.example"}
        answers = [httpx.get(f"{address}/api/v1/channels/a", headers=any_host, timeout=100) for _ in range(8)]
        assert [each.status_code for each in answers] == [503] * 3 + [429] * 5
        assert problem(answers[3], 429)["violated-policies"] == ["api"]
        for field in ("retry-after", "ratelimit", "content-security-policy"):
            assert field in answers[3].headers
        assert {httpx.get(f"{address}/healthz", timeout=100).status_code for _ in range(5)} == {503}
        assert served.end(signal.SIGTERM)[0] == 0


def test_serve_unlimited_admits_other_machines(own: Quota) -> None:
    with Served(own.start("serve", "--listen", "0.0.0.0:0", "--unlimited")) as served:
        answer = httpx.get(f"http://127.0.0.1:{served.port}/", headers={"host": "any.example"}, timeout=100)
    assert answer.status_code == 200


def test_the_reason_for_a_failed_start_is_one_line(own: Quota) -> None:
    assert "write HOST:PORT, for example 127.0.0.1:8080" in one_line(own("serve", "--listen", "127.0.0.1:70000"), 2)
    for name in ("api.example.org:443", "https://api.example.org", "*.example.org", "a b"):
        assert "write only the name" in one_line(own("serve", "--listen", "127.0.0.1:0", "--hostname", name), 2)
    own.configure("[oops]\n")
    assert "oops" in one_line(own("serve", "--listen", "127.0.0.1:0"), 78)
