"""What one region, one list or one clock does wrong, others do not pay for."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tenacity import wait_none

import quota
from quota.jobs.job import RunReport
from quota.jobs.store.reader import Reader
from quota.jobs.store.store import Store
from quota.terms.limits import DAY_MS, HOUR_MS
from support.configurations import configuration
from support.installation import Installation, outcomes
from support.plain_http import Answer, Arrived, PlainServer

Say = Callable[[str, dict[str, str]], Any]

NOW_MS = 1_795_204_800_000


class Site(Installation):
    def __init__(self, folder: Path, server: PlainServer) -> None:
        super().__init__(folder)
        self.server, self.now_ms = server, NOW_MS
        self.says: Say = lambda *_: {}
        self.clock = lambda: self.now_ms

    def say(self, says: Say) -> None:
        """What upstream answers from now on."""
        self.says = says

    def run(self, job: str, *, units: int = 9_000, **options: Any) -> RunReport:
        """One run of a job that is configured so."""
        self.config.write_text(configuration(self.server.address, f"[jobs.j]\n{job}", units=units))
        return super().run("j", wait=wait_none(), **options)

    def asked(self, name: str) -> list[str]:
        """The values of a parameter in the requests since the last call."""
        queries = [parse_qs(urlsplit(one.target).query) for one in self.server.arrived]
        self.server.arrived.clear()
        return [query[name][0] for query in queries if name in query]

    def store(self) -> Store:
        return Store(f"sqlite:///{self.folder / 'videos.db'}", retention_ms=30 * DAY_MS, clock=lambda: self.now_ms)


@pytest.fixture
def site(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def answer(request: Arrived) -> Answer:
        parts = urlsplit(request.target)
        told = site.says(parts.path.rpartition("/")[2], {k: v[0] for k, v in parse_qs(parts.query).items()})
        status, body = told if isinstance(told, tuple) else (200, told)
        return Answer(status, json.dumps(body).encode())

    with PlainServer(answer) as server:
        site = Site(tmp_path, server)
        yield site


def listed(ids: str) -> Any:
    """The videos of these ids."""
    return {"items": [{"id": one} for one in ids.split(",")]}


def playlists_of(ids: str) -> Any:
    """Channels, whose playlists are called as they, after a P."""
    playlists = [(one, {"relatedPlaylists": {"uploads": f"P{one}"}}) for one in ids.split(",")]
    return {"items": [{"id": one, "contentDetails": details} for one, details in playlists]}


def test_a_region_that_upstream_forbids_does_not_keep_the_others_out(site: Site) -> None:
    forbidden = {"error": {"code": 403, "message": "no", "errors": [{"reason": "forbidden"}]}}
    site.say(lambda _, q: (403, forbidden) if q["regionCode"] == "GB" else {"items": [{"id": q["regionCode"]}]})
    job = 'fetch = "trending"\nregions = ["US", "GB", "DE", "FR"]'
    first, second = site.run(job), site.run(job)
    assert outcomes(first) == {"US": "done", "GB": "failed", "DE": "skipped", "FR": "skipped"}
    assert (first.exit_status, outcomes(second)) == (78, {"DE": "done", "FR": "done", "GB": "failed"})


def test_a_region_whose_fetch_ends_the_run_does_not_keep_the_others_out(site: Site) -> None:
    fetch = site.own_fetch(
        "import quota\ndef fetch(client, region, cursor):\n"
        "  if region == 'GB': raise quota.UsageError('odd')\n  return Page()\n"
    )
    job = f'fetch = "{fetch}"\nregions = ["GB", "DE"]'
    with pytest.raises(quota.UsageError):
        site.run(job)
    assert outcomes(site.run(job)) == {"DE": "done"}


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
    assert {one.region: one.units for one in report.regions} == {"DE": 3, "FR": 1}
    assert len(site.server.arrived) == 4


def test_pages_in_a_circle_end_the_walk_of_their_list_alone(site: Site) -> None:
    def told(path: str, q: dict[str, str]) -> Any:
        if path == "channels":
            return playlists_of(q["id"])
        number = int(q.get("pageToken", "0"))
        items = [{"id": "i", "contentDetails": {"videoId": f"{q['playlistId']}{number}", "videoPublishedAt": "2026"}}]
        items = [{**one, "snippet": {"title": "x"}} for one in items]
        following = (number + 1) % 3 if q["playlistId"] == "PA" else number + 1
        return {"items": items, **({"nextPageToken": str(following or 1)} if following < 5 else {})}

    site.say(told)
    site.run('fetch = "uploads"\npages = 30\noptions = { channels = ["A", "B"] }')
    lists = site.asked("playlistId")
    assert (lists.count("PA"), lists.count("PB")) == (3, 5)


def test_replies_in_a_circle_and_an_item_without_an_id_hold_up_nobody(site: Site) -> None:
    top = {"snippet": {"textDisplay": "hi", "likeCount": 10**30}}

    def told(path: str, q: dict[str, str]) -> Any:
        if path == "comments":
            return {"items": [{"id": "r", "snippet": {}}], "nextPageToken": "T"}
        thread = {"snippet": {"totalReplyCount": 5, "topLevelComment": top}, "replies": {"comments": [None]}}
        return {"items": [{"id": f"{q['videoId']}t", **thread}, {"snippet": {}}]}

    site.say(told)
    report = site.run('fetch = "comments"\npages = 12\noptions = { videos = ["A", "B"] }')
    assert report.outcome == "done", report.why
    assert [one.target.partition("?")[0].rpartition("/")[2] for one in site.server.arrived].count("comments") == 4
    keys = {key for (key,) in site.rows("SELECT key FROM rows WHERE name = 'comments'")}
    assert keys == {"At", "Bt", "r"}


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
    def told(path: str, q: dict[str, str]) -> Any:
        if path == "videos":
            return listed(q["id"])
        token = q.get("pageToken", "")
        found = {"items": [{"id": {"videoId": f"{q['q']}{token}"}}]}
        return found | ({"nextPageToken": following[q["q"]][token]} if token in following[q["q"]] else {})

    site.say(told)
    report = site.run(f'fetch = "search"\npages = {pages}\noptions = {{ words = {json.dumps([*following])} }}')
    assert (report.outcome, report.regions[0].pages) == ("done", len(asked))
    assert site.asked("q") == asked


BROKEN = {
    "refused": (400, {"error": {"code": 400, "message": "no", "errors": [{"reason": "invalidSearchFilter"}]}}),
    "down": (500, {"error": {"code": 500, "message": "no", "errors": [{"reason": "backendError"}]}}),
    "odd": (200, {"items": [{"id": {"videoId": 7}}]}),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("words", [["bad", "a", "b"], ["a", "b", "bad"]])
def test_a_failed_search_is_named_and_stops_no_other_search(site: Site, words: list[str], how: str) -> None:
    def told(path: str, q: dict[str, str]) -> Any:
        if path == "videos":
            return listed(q["id"])
        found = {"items": [{"id": {"videoId": f"{q['q']}{q.get('pageToken', '')}"}}]}
        return BROKEN[how] if q["q"] == "bad" else found | ({} if "pageToken" in q else {"nextPageToken": "2"})

    site.say(told)
    for _ in range(2):
        report = site.run(f'fetch = "search"\npages = 2\noptions = {{ words = {json.dumps(words)} }}')
        (region,) = report.regions
        assert (report.exit_status, region.outcome, region.pages, region.cursor) == (1, "failed", 4, None)
        assert str(region.error).startswith("search 'bad': ")
        assert "\n" not in str(region.error)
        assert [word for word in site.asked("q") if word != "bad"] == ["a", "b", "a", "b"]
    assert site.rows("SELECT pending, completed_at_ms > 0 FROM checkpoints") == [(0, 1)]


def test_two_searches_in_a_row_that_fail_end_the_pass_and_the_next_one_has_the_others(site: Site) -> None:
    def told(path: str, q: dict[str, str]) -> Any:
        if path == "videos":
            return listed(q["id"])
        return {"items": [{"id": {"videoId": q["q"]}}]} if q["q"] in "ab" else BROKEN["refused"]

    site.say(told)
    job = 'fetch = "search"\noptions = { words = ["w", "x", "a", "y", "b"] }'
    asked = [(site.run(job).exit_status, site.asked("q")) for _ in range(3)]
    assert asked == [(1, ["w", "x"]), (1, ["a", "y", "b"]), (1, ["w", "x"])]


def test_the_next_pass_has_all_searches_if_all_failed(site: Site) -> None:
    site.say(lambda *_: BROKEN["refused"])
    for _ in range(2):
        report = site.run('fetch = "search"\npages = 2\noptions = { words = ["a", "b"] }')
        assert (report.exit_status, site.asked("q")) == (1, ["a", "b"])
        assert site.rows("SELECT cursor, completed_at_ms FROM checkpoints") == [(None, None)]


@pytest.mark.parametrize("how", ["down", "odd"])
@pytest.mark.parametrize("page", ["", "2"], ids=["at its first page", "at its second"])
def test_a_list_that_upstream_fails_keeps_no_other_out_and_goes_on_where_it_was(
    site: Site, how: str, page: str
) -> None:
    broken = [True]

    def told(path: str, q: dict[str, str]) -> Any:
        if path == "channels":
            return playlists_of(q["id"])
        name, at = q["playlistId"], q.get("pageToken", "")
        if broken[0] and (name, at) == ("PA", page):
            return {"items": [{"id": 7}]} if how == "odd" else BROKEN[how]
        details = {"videoId": f"{name}{at}", "videoPublishedAt": "2026"}
        item = {"id": "i", "snippet": {}, "contentDetails": details}
        return {"items": [item], **({} if at >= "3" else {"nextPageToken": str(int(at or "1") + 1)})}

    site.say(told)
    job = 'fetch = "uploads"\npages = 30\noptions = { channels = ["A", "B", "C"] }'
    for _ in range(3):
        site.server.arrived.clear()
        (region,) = site.run(job).regions
        assert str(region.error).startswith("channel A: ")
        assert len([name for name in site.asked("playlistId") if name == "PA"]) <= (8 if how == "down" else 2)
        site.now_ms += 1_000
    listed = {one for (one,) in site.rows("SELECT video_id FROM videos")}
    assert {f"P{name}{token}" for name in "BC" for token in ("", "2", "3")} <= listed
    broken[0] = False
    assert site.run(job).outcome == "done"
    assert site.asked("pageToken") == ["2", "3"], "of A alone: the others are known"
    assert len(site.rows("SELECT video_id FROM videos")) == 9


@pytest.mark.parametrize("broken", ["commentThreads", "comments"])
def test_a_video_whose_comments_upstream_fails_keeps_no_other_out(site: Site, broken: str) -> None:
    top = {"snippet": {"textDisplay": "hi"}}

    def told(path: str, q: dict[str, str]) -> Any:
        if path == broken and "A" in (q.get("videoId", ""), q.get("parentId", "")[:1]):
            return BROKEN["down"]
        if path == "comments":
            return {"items": [{"id": f"{q['parentId']}r", "snippet": {}}]}
        return {"items": [{"id": f"{q['videoId']}t", "snippet": {"totalReplyCount": 5, "topLevelComment": top}}]}

    site.say(told)
    (region,) = site.run('fetch = "comments"\npages = 12\noptions = { videos = ["A", "B", "C"] }').regions
    assert str(region.error).startswith("video A: upstream said 500")
    keys = {key for (key,) in site.rows("SELECT key FROM rows WHERE name = 'comments'")}
    assert keys == {"Bt", "Btr", "Ct", "Ctr"} | ({"At"} if broken == "comments" else set())


@pytest.mark.parametrize("odd", [10**30, {"n": 2**63}], ids=["huge", "in an object"])
def test_a_comment_with_odd_values_holds_up_nobody(site: Site, odd: object) -> None:
    names = ("textDisplay", "authorDisplayName", "likeCount", "publishedAt", "updatedAt", "authorChannelId")
    top = {"snippet": dict.fromkeys(names, odd) | {"authorChannelId": {"value": odd}}}
    site.say(lambda path, q: {"items": [{"id": "t", "snippet": {"totalReplyCount": odd, "topLevelComment": top}}]})
    report = site.run('fetch = "comments"\npages = 3\noptions = { videos = "A" }')
    assert report.outcome == "done", report.why
    ((row,),) = site.rows("SELECT data FROM rows WHERE name = 'comments'")
    assert {name: value for name, value in json.loads(row).items() if value is not None} == {"id": "t", "video_id": "A"}


def test_videos_are_bought_once_after_the_clock_went_back(site: Site) -> None:
    site.say(lambda _, q: listed(q["id"]))
    fetch = site.own_fetch(
        "def fetch(client, region, cursor):\n  return Page(videos=[{'id': f'v{n:03}'} for n in range(150)])\n"
    )
    site.run(f'fetch = "{fetch}"')
    videos = 'fetch = "videos"\npages = 40\n'
    site.now_ms = NOW_MS + DAY_MS
    assert site.run(f"{videos}max_units = 1").units == 1
    site.now_ms = NOW_MS + 1
    site.asked("id")
    assert site.run(videos).outcome == "done"
    assert sorted(one for page in site.asked("id") for one in page.split(",")) == [f"v{n:03}" for n in range(150)]
    site.now_ms += HOUR_MS
    assert site.run(videos).units == 3


def test_readings_are_compared_with_the_last_before_them(site: Site) -> None:
    for price, hours in ((10, 0), (11, 24), (12, 1), (12, 2), (11, 3), (11, 4), (11, 25)):
        fetch = site.own_fetch(
            f"def fetch(client, region, cursor): return Page(rows={{'t': [{{'id': 'x', 'price': {price}}}]}})\n"
        )
        site.now_ms = NOW_MS + hours * HOUR_MS
        site.run(f'fetch = "{fetch}"\ntables = {{ t = {{ history = ["price"] }} }}')
    kept = site.rows("SELECT taken_at_ms, data FROM history ORDER BY taken_at_ms")
    assert [((at_ms - NOW_MS) // HOUR_MS, json.loads(data)["price"]) for at_ms, data in kept] == [
        (0, 10),
        (1, 12),
        (3, 11),
        (24, 11),
    ]


def test_a_search_that_is_named_twice_is_made_once(site: Site) -> None:
    site.say(lambda *_: {"items": []})
    site.run('fetch = "search"\npages = 2\noptions = { words = ["a", "a"] }')
    assert site.asked("q") == ["a"]


def test_a_carriage_return_stays_in_its_record(site: Site) -> None:
    fetch = site.own_fetch(
        "def fetch(client, region, cursor): return Page(rows={'t': [{'id': '1', 'text': 'a\\rb'}]})\n"
    )
    site.run(f'fetch = "{fetch}"')
    done = site.quota("export", "t", "--format", "csv", "--output", "t.csv")
    assert done.returncode == 0, done.stderr
    with (site.folder / "t.csv").open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["a\rb"]


def test_an_expiry_between_two_pages_changes_the_searchs_version(site: Site) -> None:
    fetch = site.own_fetch("def fetch(client, region, cursor): return Page(videos=[{'id': one} for one in 'abc'])\n")
    site.run(f'fetch = "{fetch}"')
    reader = Reader(f"sqlite:///{site.folder / 'videos.db'}")
    before = reader.search("x", 0, 2).version
    with site.store() as store:
        store._write(lambda db: db.execute("DELETE FROM videos WHERE video_id = 'b'"))
    assert reader.search("x", 0, 2).version != before
