"""Others do not pay for what one region, one list or one clock does wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from quota.jobs.job import RunReport
from quota.jobs.store.store import Store
from quota.terms.limits import DAY_MS
from support.configurations import configuration
from support.installation import Installation, outcomes
from support.plain_http import Answer, Arrived, PlainServer

Say = Callable[[str, dict[str, str]], Any]


class Site(Installation):
    def __init__(self, folder: Path, server: PlainServer) -> None:
        super().__init__(folder)
        self.server, self.now_ms = server, 1_795_204_800_000
        self.says: Say = lambda *_: {}
        self.clock = lambda: self.now_ms

    def say(self, says: Say) -> None:
        self.says = says

    def run(self, job: str, *, units: int = 9_000, **options: Any) -> RunReport:
        """One run of a job that is configured so."""
        self.config.write_text(configuration(self.server.address, f"[jobs.j]\n{job}", units=units))
        return super().run("j", **options)

    def asked(self, name: str) -> list[str]:
        """The values of a parameter in the requests since the last call."""
        queries = [parse_qs(urlsplit(each.target).query) for each in self.server.arrived]
        self.server.arrived.clear()
        return [query[name][0] for query in queries if name in query]

    def store(self) -> Store:
        return Store(f"sqlite:///{self.folder / 'videos.db'}", retention_ms=30 * DAY_MS, clock=lambda: self.now_ms)


@pytest.fixture
def site(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def answer(request: Arrived) -> Answer:
        parts = urlsplit(request.target)
        content = site.says(parts.path.rpartition("/")[2], {k: v[0] for k, v in parse_qs(parts.query).items()})
        status, body = content if isinstance(content, tuple) else (200, content)
        return Answer(status, json.dumps(body).encode())

    with PlainServer(answer) as server:
        site = Site(tmp_path, server)
        yield site


def listed(ids: str) -> Any:
    return {"items": [{"id": each} for each in ids.split(",")]}


def playlists_of(ids: str) -> Any:
    """Channels, whose playlists are called as they, after a P."""
    playlists = [(each, {"relatedPlaylists": {"uploads": f"P{each}"}}) for each in ids.split(",")]
    return {"items": [{"id": each, "contentDetails": details} for each, details in playlists]}


def test_a_region_that_upstream_forbids_does_not_keep_the_others_out(site: Site) -> None:
    forbidden = {"error": {"code": 403, "message": "no", "errors": [{"reason": "forbidden"}]}}
    site.say(lambda _, q: (403, forbidden) if q["regionCode"] == "GB" else {"items": [{"id": q["regionCode"]}]})
    job = 'fetch = "trending"\nregions = ["US", "GB", "DE", "FR"]'
    first, second = site.run(job), site.run(job)
    assert outcomes(first) == {"US": "done", "GB": "failed", "DE": "skipped", "FR": "skipped"}
    assert (first.exit_status, outcomes(second)) == (78, {"DE": "done", "FR": "done", "GB": "failed"})


def test_calls_in_threads_of_a_fetch_function_count_for_its_job(site: Site) -> None:
    site.say(lambda _, q: {"items": [{"id": q["id"]}]})
    fetch = site.own_fetch(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def fetch(client, region, cursor):\n"
        "  ask = lambda name: client.videos().list(part='id', id=name).execute()['items'][0]\n"
        "  with ThreadPoolExecutor(2) as pool: return Page(videos=list(pool.map(ask, 'abc')))\n"
    )
    report = site.run(f'fetch = "{fetch}"\nregions = ["DE", "FR"]\nleave = 96', units=100)
    assert (report.outcome, report.refused_by, report.units) == ("stopped", "day", 4)
    assert {each.region: each.units for each in report.regions} == {"DE": 3, "FR": 1}
    assert len(site.server.arrived) == 4


def test_pages_in_a_circle_end_the_walk_of_their_list_alone(site: Site) -> None:
    def answers(path: str, q: dict[str, str]) -> Any:
        if path == "channels":
            return playlists_of(q["id"])
        number = int(q.get("pageToken", "0"))
        items = [{"id": "i", "contentDetails": {"videoId": f"{q['playlistId']}{number}", "videoPublishedAt": "2026"}}]
        items = [{**each, "snippet": {"title": "x"}} for each in items]
        following = (number + 1) % 3 if q["playlistId"] == "PA" else number + 1
        return {"items": items, **({"nextPageToken": str(following or 1)} if following < 5 else {})}

    site.say(answers)
    site.run('fetch = "uploads"\npages = 30\noptions = { channels = ["A", "B"] }')
    lists = site.asked("playlistId")
    assert (lists.count("PA"), lists.count("PB")) == (3, 5)


@pytest.mark.parametrize(
    ("following", "pages", "asked"),
    [
        ({"a": {}, "b": {"": "1", "1": "2", "2": "3", "3": "4"}}, 2, ["a", "b", "b"]),
        (
            {"a": {"": "1", "1": "2", "2": "1"}, "b": {str(n or ""): str(n + 1) for n in range(5)}},
            9,
            [*"ababab", *"bbb"],
        ),
        ({"a": {"": "1", "1": "1"}}, 9, ["a", "a"]),
    ],
    ids=["of few pages", "in a long circle", "in a short circle, alone"],
)
def test_no_search_takes_the_pages_of_another_or_goes_in_a_circle(
    site: Site, following: dict[str, dict[str, str]], pages: int, asked: list[str]
) -> None:
    def answers(path: str, q: dict[str, str]) -> Any:
        if path == "videos":
            return listed(q["id"])
        token = q.get("pageToken", "")
        page = {"items": [{"id": {"videoId": f"{q['q']}{token}"}}]}
        return page | ({"nextPageToken": following[q["q"]][token]} if token in following[q["q"]] else {})

    site.say(answers)
    report = site.run(f'fetch = "search"\npages = {pages}\noptions = {{ words = {json.dumps([*following])} }}')
    assert (report.outcome, report.regions[0].pages) == ("done", len(asked))
    assert site.asked("q") == asked


BROKEN = {
    "refused": (400, {"error": {"code": 400, "message": "no", "errors": [{"reason": "invalidSearchFilter"}]}}),
    "down": (500, {"error": {"code": 500, "message": "no", "errors": [{"reason": "backendError"}]}}),
    "odd": (200, {"items": [{"id": {"videoId": 7}}]}),
}


@pytest.mark.parametrize(
    ("words", "how"), [(["bad", "a", "b"], "refused"), (["a", "b", "bad"], "down"), (["a", "bad", "b"], "odd")]
)
def test_a_failed_search_is_named_and_stops_no_other_search(site: Site, words: list[str], how: str) -> None:
    def answers(path: str, q: dict[str, str]) -> Any:
        if path == "videos":
            return listed(q["id"])
        page = {"items": [{"id": {"videoId": f"{q['q']}{q.get('pageToken', '')}"}}]}
        return BROKEN[how] if q["q"] == "bad" else page | ({} if "pageToken" in q else {"nextPageToken": "2"})

    site.say(answers)
    for _ in range(2):
        report = site.run(f'fetch = "search"\npages = 2\noptions = {{ words = {json.dumps(words)} }}')
        (region,) = report.regions
        assert (report.exit_status, region.outcome, region.pages, region.cursor) == (1, "failed", 4, None)
        assert str(region.error).startswith("search 'bad': ")
        assert "\n" not in str(region.error)
        assert [word for word in site.asked("q") if word != "bad"] == ["a", "b", "a", "b"]
    assert site.rows("SELECT pending, completed_at_ms > 0 FROM checkpoints") == [(0, 1)]


def test_two_searches_in_a_row_that_fail_end_the_pass_and_the_next_one_has_the_others(site: Site) -> None:
    def answers(path: str, q: dict[str, str]) -> Any:
        if path == "videos":
            return listed(q["id"])
        return {"items": [{"id": {"videoId": q["q"]}}]} if q["q"] in "ab" else BROKEN["refused"]

    site.say(answers)
    job = 'fetch = "search"\noptions = { words = ["w", "x", "a", "y", "b"] }'
    asked = [(site.run(job).exit_status, site.asked("q")) for _ in range(3)]
    assert asked == [(1, ["w", "x"]), (1, ["a", "y", "b"]), (1, ["w", "x"])]


def test_the_next_pass_has_all_searches_if_all_failed(site: Site) -> None:
    site.say(lambda *_: BROKEN["refused"])
    for _ in range(2):
        report = site.run('fetch = "search"\npages = 2\noptions = { words = ["a", "b"] }')
        assert (report.exit_status, site.asked("q")) == (1, ["a", "b"])
        assert site.rows("SELECT cursor, completed_at_ms FROM checkpoints") == [(None, None)]


@pytest.mark.parametrize(("how", "page"), [("down", "2"), ("odd", "")])
def test_a_list_that_upstream_fails_keeps_no_other_out_and_goes_on_where_it_was(
    site: Site, how: str, page: str
) -> None:
    broken = [True]

    def answers(path: str, q: dict[str, str]) -> Any:
        if path == "channels":
            return playlists_of(q["id"])
        name, at = q["playlistId"], q.get("pageToken", "")
        if broken[0] and (name, at) == ("PA", page):
            return {"items": [{"id": 7}]} if how == "odd" else BROKEN[how]
        details = {"videoId": f"{name}{at}", "videoPublishedAt": "2026"}
        item = {"id": "i", "snippet": {}, "contentDetails": details}
        return {"items": [item], **({} if at >= "3" else {"nextPageToken": str(int(at or "1") + 1)})}

    site.say(answers)
    job = 'fetch = "uploads"\npages = 30\noptions = { channels = ["A", "B", "C"] }'
    for _ in range(3):
        site.server.arrived.clear()
        (region,) = site.run(job).regions
        assert str(region.error).startswith("channel A: ")
        assert len([name for name in site.asked("playlistId") if name == "PA"]) <= (8 if how == "down" else 2)
        site.now_ms += 1_000
    listed = {each for (each,) in site.rows("SELECT video_id FROM videos")}
    assert {f"P{name}{token}" for name in "BC" for token in ("", "2", "3")} <= listed
    broken[0] = False
    assert site.run(job).outcome == "done"
    assert site.asked("pageToken") == ["2", "3"], "of A alone: the others are known"
    assert len(site.rows("SELECT video_id FROM videos")) == 9


def test_a_comment_with_odd_values_holds_up_nobody(site: Site) -> None:
    odd = {"n": 2**63}
    names = ("textDisplay", "authorDisplayName", "likeCount", "publishedAt", "updatedAt", "authorChannelId")
    top = {"snippet": dict.fromkeys(names, odd) | {"authorChannelId": {"value": odd}}}
    thread = {"snippet": {"totalReplyCount": odd, "topLevelComment": top}, "replies": {"comments": [None]}}
    site.say(lambda *_: {"items": [{"id": "t", **thread}, {"snippet": {}}]})
    report = site.run('fetch = "comments"\npages = 3\noptions = { videos = "A" }')
    assert report.outcome == "done", report.why
    ((row,),) = site.rows("SELECT data FROM rows WHERE name = 'comments'")
    assert {name: value for name, value in json.loads(row).items() if value is not None} == {"id": "t", "video_id": "A"}
