"""The built-in jobs that go by what the store has: real HTTP to the emulator, the real client, ledger and store."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.common.clock import host_clock
from quota.jobs.emulator import Emulator
from quota.jobs.emulator.catalogue import CHANNELS, INLINE_REPLIES, GeneratedCatalogue, _channel_id, replies_to, threads
from quota.jobs.job import RunReport
from quota.jobs.plan.plan import make_plan
from support.configurations import configuration
from support.installation import Installation
from support.processes import killed_anywhere

DAY_MS = 86_400_000
KILLS = int(os.environ.get("QUOTA_TEST_KILLS", "2"))
CHANNELS_TO_WALK = int(os.environ.get("QUOTA_TEST_CHANNELS", "10"))
CALLS_IN_A_WALK = 8_000
"""Of functions of ours, without the store's."""

CATALOGUE = GeneratedCatalogue()


class Site(Installation):
    """A configuration with one job, whose clock goes on by a second with each run."""

    upstream: Emulator

    def __init__(self, folder: Path, upstream: Emulator) -> None:
        super().__init__(folder, upstream)
        self.now_ms = 1_795_204_800_000
        self.clock = lambda: self.now_ms

    def configure(self, fetch: str, *, pages: int = 100, units: int = 100_000, **options: Any) -> None:
        given = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
        job = f'[jobs.j]\nfetch = "{fetch}"\npages = {pages}\n[jobs.j.options]\n{given}'
        self.config.write_text(configuration(self.upstream.address, job, units=units))

    def run(self, job: str = "j", **options: Any) -> RunReport:
        self.now_ms += 1_000
        return super().run(job, **options)

    def later(self, days: int) -> None:
        """So many days later, on which other jobs ran: else the store would doubt the time."""
        self.now_ms += days * DAY_MS
        self.change("UPDATE store SET time_ms = ?", self.now_ms)

    def calls(self) -> dict[str, int]:
        """The calls since this was last asked, by method."""
        now: dict[str, int] = self.upstream.usage()["by_method"]
        before, self._before = getattr(self, "_before", {}), now
        return {name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)}

    def store(self, names: list[str], **columns: object) -> None:
        """Videos as a job might have stored them."""
        values = {"first_seen_ms": 0, "refreshed_ms": self.now_ms, **columns}
        for name in names:
            columns_of = ", ".join(["video_id", *values])
            self.change(f"INSERT INTO videos ({columns_of}) VALUES (?{', ?' * len(values)})", name, *values.values())  # noqa: S608

    def videos(self, channel: str | None = None) -> set[str]:
        return {
            name for name, owner in self.rows("SELECT video_id, channel_id FROM videos") if channel in (None, owner)
        }


@pytest.fixture
def site(tmp_path: Path, state_dir: Path) -> Iterator[Site]:
    with Emulator(quota=1_000_000) as upstream:
        yield Site(tmp_path, upstream)


def channel(videos: int) -> str:
    return next(_channel_id(number) for number in range(CHANNELS) if (3 + number * 37 % 120) == videos)


def published(name: str) -> list[str]:
    """The newest first."""
    return [video["id"] for video in CATALOGUE.uploads(name) or ()]


def a_day(name: str) -> float:
    channel = CATALOGUE.channel(name) or {}
    age = datetime(2026, 11, 20, tzinfo=UTC) - datetime.fromisoformat(channel["snippet"]["publishedAt"])
    return int(channel["statistics"]["videoCount"]) / age.days


def test_uploads_are_stored_for_a_unit_a_page_and_a_channel_that_is_known_costs_one(site: Site) -> None:
    names = [channel(120), channel(50), channel(3)]
    site.configure("uploads", channels=names)
    assert site.run().outcome == "done"
    assert site.calls() == {"channels.list": 1, "playlistItems.list": 3 + 1 + 1}
    assert all(site.videos(name) == set(published(name)) for name in names)
    assert site.count("channels") == 3
    rows = site.rows("SELECT title, channel_title, published_at FROM videos WHERE video_id = ?", published(names[0])[7])
    snippet = CATALOGUE.video(published(names[0])[7])["snippet"]  # type: ignore[index]
    assert rows == [(snippet["title"], snippet["channelTitle"], snippet["publishedAt"])]
    site.run()
    assert site.calls() == {"playlistItems.list": 3}


def test_new_uploads_are_fetched_until_all_of_a_page_is_known(site: Site) -> None:
    name = channel(120)
    site.configure("uploads", channels=name)
    site.run()
    site.calls()
    for forgotten, calls in ((published(name)[:1], 2), (published(name)[:55], 3), (published(name)[30:40], 2)):
        site.change("DELETE FROM videos WHERE video_id IN (SELECT value FROM json_each(?))", json.dumps(forgotten))
        site.run()
        assert site.calls() == {"playlistItems.list": calls}
        assert site.videos() == set(published(name))


def test_a_walks_place_is_no_item_and_a_step_without_a_call_is_no_page(site: Site) -> None:
    (site.folder / "sink_of_walks.py").write_text(
        "handed = []\ndef put(page, job, region):\n    handed.append((page.items, [*page.rows]))\n"
    )
    site.configure("uploads", channels=[channel(50), channel(3), "UC-is-not-there"])
    site.config.write_text(site.config.read_text().replace("pages = ", 'sink = "sink_of_walks:put"\npages = '))
    report = site.run()
    assert [(each.outcome, each.pages, each.items) for each in report.regions] == [("done", 3, 2 + 50 + 3)]
    assert report.units == 3
    from sink_of_walks import handed  # type: ignore[import-not-found]

    assert sorted(handed) == [(2, []), (3, []), (50, [])]
    bought = site.rows("SELECT sum(pages), sum(items), sum(new), sum(units), max(page) FROM bought")
    assert bought == [(3, 55, 55, 3, 3)]
    assert site.rows("SELECT name, count(*) FROM rows GROUP BY name") == [("places_of_uploads", 3), ("unknown_ids", 1)]
    assert site.quota.json("tables", "--json") == {"tables": []}


@pytest.mark.parametrize(("fetch", "option"), [("channels", "ids"), ("uploads", "channels"), ("comments", "videos")])
def test_an_id_that_upstream_does_not_know_is_named_once(
    site: Site, caplog: pytest.LogCaptureFixture, fetch: str, option: str
) -> None:
    site.configure(fetch, **{option: ["not-there"]})
    assert "upstream has nothing for 'not-there'" in site.run().why
    site.run()
    assert caplog.messages == ["unknown_ids job=j: upstream has nothing for 'not-there': correct or remove them"]
    config = site.folder / "quota.toml"
    config.write_text(config.read_text().replace("[jobs.j", "[jobs.other"))
    assert "upstream has nothing for 'not-there'" in site.run("other").why, "in each job that names it"


def test_check_and_run_refuse_an_invalid_id(site: Site) -> None:
    site.configure("uploads", channels=["@MrBeast"])
    why = "'@MrBeast' is not the id of a channel, like 'UC"
    assert why in site.quota("check").stderr
    done = site.quota("run", "j")
    assert (done.returncode, why in done.stderr, site.calls()) == (78, True, {})


@pytest.mark.parametrize("fetch", ["channels", "uploads", "comments", "videos"])
def test_a_pass_that_finds_nothing_to_ask_for_has_no_page(site: Site, fetch: str) -> None:
    site.configure(fetch)
    report = site.run()
    assert (report.outcome, report.units, [each.pages for each in report.regions]) == ("done", 0, [0])
    assert report.why == "there was nothing to fetch"
    assert site.count("bought") == 0
    assert site.rows("SELECT pending, completed_at_ms > 0 FROM checkpoints") == [(0, 1)]


def test_channels_that_publish_most_come_first_and_none_is_forgotten(site: Site) -> None:
    names = sorted([channel(3), channel(100), channel(50), channel(60)], key=a_day)
    site.configure("uploads", channels=names, pages=2)
    site.run()  # the playlists, and a page
    assert [len(site.videos(name)) for name in names[:3]] == [0, 0, 0]
    for _ in range(3):
        site.run()
    assert site.videos() == {video for name in names for video in published(name)}


def test_without_a_list_the_channels_of_the_store_are_walked_and_those_that_are_gone_do_no_harm(site: Site) -> None:
    site.configure("uploads")
    report = site.run()
    assert (report.outcome, report.units) == ("done", 0)
    for number, name in enumerate(("UC-gone", channel(3), channel(10))):
        site.store([f"v{number}"], channel_id=name)
    nothing = "INSERT INTO channels (channel_id, uploads_id, first_seen_ms, refreshed_ms) VALUES ('UCx', 'UUx', 0, ?)"
    site.change(nothing, site.now_ms)
    for _ in range(2):
        assert site.run().outcome == "done"
        assert site.videos() == {"v0", "v1", "v2", *published(channel(3)), *published(channel(10))}
    assert site.calls() == {"channels.list": 2, "playlistItems.list": 2 * 3}


def test_a_reset_begins_each_list_anew_and_names_the_others_that_read_it(site: Site) -> None:
    site.configure("uploads", channels=channel(120), pages=2)
    text = site.config.read_text()
    site.config.write_text(text + text[text.index("[jobs.j]") :].replace("jobs.j", "jobs.k"))
    site.run()
    reset = site.quota("place", "reset", "j")
    site.change("DELETE FROM videos")
    site.run()
    assert site.videos() == {*published(channel(120))[:100]}
    assert reset.stdout.splitlines()[1:] == ["the places of lists are shared: k begins the same lists anew, too"]


def test_a_page_that_upstream_no_longer_knows_begins_the_walk_anew(site: Site) -> None:
    name = channel(120)
    site.configure("uploads", channels=name, pages=2)
    site.run()
    site.change("UPDATE rows SET data = json_set(data, '$.token', 'not-a-token')")
    for _ in range(3):
        assert site.run().outcome == "done"
    assert site.videos() == set(published(name))


def test_videos_that_were_asked_for_longest_ago_come_first_and_one_that_is_gone_holds_up_nobody(site: Site) -> None:
    site.configure("videos", pages=1)
    assert site.run().units == 0
    for age, names in ((2, [f"gone-{n}" for n in range(60)]), (1, published(channel(60)))):
        at_ms = site.now_ms - age * DAY_MS
        site.store(names, refreshed_ms=at_ms, asked_ms=at_ms)
    read = []
    for _ in range(4):
        site.run()
        read.append(site.rows("SELECT count(*) FROM videos WHERE view_count IS NOT NULL")[0][0])
    assert read == [0, 40, 60, 60]
    assert site.calls() == {"videos.list": 4}
    assert site.rows("SELECT count(*) FROM videos WHERE video_id LIKE 'gone%'") == [(60,)], "they expire in their time"


def test_a_video_that_is_read_again_has_new_numbers_and_expires_all_the_same(site: Site) -> None:
    """Else a store would keep every video that was once in a chart. A video that a list still has is kept."""
    site.configure("uploads", channels=channel(10))
    site.run()
    kept = published(channel(10))[0]
    site.configure("videos")
    for _ in range(2):
        site.later(days=14)
        site.run()
    assert site.rows("SELECT DISTINCT refreshed_ms, view_count > 0 FROM videos") == [(site.now_ms, 1)]
    site.change("UPDATE videos SET listed_ms = ? WHERE video_id = ?", site.now_ms, kept)
    site.later(days=3)
    site.run()
    assert site.videos() == {kept}


def test_searches_take_turns_and_a_refusal_costs_none_of_them_its_turn(site: Site) -> None:
    words = [f"word{number}" for number in range(7)]
    site.configure("search", pages=2, units=3 * 101, words=words)
    turns = []
    for _ in range(5):
        site.run()
        turns.append([matches(site, word) for word in words])
        site.later(days=1)
    assert [sum(map(bool, day)) for day in turns] == [3, 6, 7, 7, 7]
    assert turns[1] == [50] * 6 + [0]
    assert min(turns[4]) > 50
    assert site.calls() == {"search.list": 14, "videos.list": 14}, "a pass of two pages each"


def matches(site: Site, word: str) -> int:
    number: int = site.rows("SELECT count(*) FROM videos WHERE title LIKE ?", f"{word} |%")[0][0]
    return number


def said_under(video: str) -> dict[str, list[str]]:
    matches = threads(CATALOGUE.video(video) or {}) or []
    return {each["id"]: [reply["id"] for reply in replies_to(each["id"]) or ()] for each in matches}


def calls_for(video: str) -> dict[str, int]:
    comments = said_under(video)
    more = [-(-len(replies) // 100) for replies in comments.values() if len(replies) > INLINE_REPLIES]
    return {"commentThreads.list": max(1, -(-len(comments) // 100)), "comments.list": sum(more)}


def with_threads(least: int, most: int) -> str:
    for name in published(channel(122)):
        comments = said_under(name)
        if least <= len(comments) <= most and any(len(replies) > 100 for replies in comments.values()):
            return name
    raise AssertionError("there is none")


DISABLED = next(name for name in published(channel(122)) if threads(CATALOGUE.video(name) or {}) is None)


def all_of(video: str) -> set[str]:
    return {each for thread, replies in said_under(video).items() for each in (thread, *replies)}


def comments(site: Site) -> set[str]:
    return {key for (key,) in site.rows("SELECT key FROM rows WHERE name = 'comments'")}


def test_comments_are_stored_with_all_replies_and_a_video_that_allows_none_is_passed_over(site: Site) -> None:
    names = [with_threads(101, 200), DISABLED, "no-such-vid", with_threads(5, 60)]
    site.configure("comments", videos=names)
    report = site.run()
    assert (report.outcome, DISABLED in report.why) == ("done", True)
    assert comments(site) == all_of(names[0]) | all_of(names[3])
    calls = Counter(calls_for(names[0])) + Counter(calls_for(names[3])) + Counter({"commentThreads.list": 2})
    assert site.calls() == calls
    thread, replies = next((thread, some) for thread, some in said_under(names[3]).items() if some)
    ((row,),) = site.rows("SELECT data FROM rows WHERE name = 'comments' AND key = ?", thread)
    ((reply,),) = site.rows("SELECT data FROM rows WHERE name = 'comments' AND key = ?", replies[0])
    assert (json.loads(row)["reply_count"], json.loads(row)["parent_id"]) == (len(replies), None)
    assert (json.loads(reply)["parent_id"], json.loads(reply)["video_id"]) == (thread, names[3])
    assert json.loads(reply)["text"]


def test_a_plan_counts_a_page_of_a_list_as_one_call_of_the_first_method(site: Site) -> None:
    site.configure("comments", videos=with_threads(101, 200), pages=7)
    assert "7 units, if each page is one such call" in site.quota("run", "j", "--dry-run").stdout
    assert "counted as one call of their first method per page: j" in site.quota("plan").stdout


def test_a_video_whose_comments_are_known_costs_a_unit_and_is_walked_anew_before_they_expire(site: Site) -> None:
    name = with_threads(101, 200)
    site.configure("comments", videos=name)
    calls = []
    for day in range(0, 42, 14):
        site.run()
        calls.append(sum(site.calls().values()))
        site.later(days=14)
        assert comments(site) == all_of(name), day
    full = sum(calls_for(name).values())
    assert calls == [full, 1, full]


def test_the_comments_of_the_videos_in_the_store_are_fetched_those_with_most_first(site: Site) -> None:
    many, few = with_threads(101, 200), with_threads(5, 60)
    site.configure("comments", pages=1)
    assert site.run().units == 0
    site.store([few], comment_count=10, published_at="2026-05-01T00:00:00Z")
    site.store([many], comment_count=900, published_at="2026-05-01T00:00:00Z")
    site.store([DISABLED], duration="PT1M")
    site.run()
    assert comments(site) <= all_of(many)
    site.configure("comments")
    site.run()
    assert comments(site) == all_of(many) | all_of(few)
    assert site.calls()["commentThreads.list"] == 2 + 1


def test_walks_killed_anywhere_lose_no_row_and_double_none(site: Site) -> None:
    names = [channel(122), channel(60)]
    site.now_ms = host_clock()
    site.configure("uploads", channels=names)
    dice, kills = random.Random(2), 0
    while kills < KILLS:
        kills += killed_anywhere(site, dice, CALLS_IN_A_WALK, "run", "j")
    site.now_ms = host_clock()
    assert site.run().outcome == "done"
    assert site.videos() == {video for name in names for video in published(name)}
    assert site.count("videos") == site.count("history"), "a reading is stored once"
    assert site.rows("SELECT count(*) - count(DISTINCT name || key) FROM rows") == [(0,)]
    assert site.requests <= site.units() <= site.requests + kills


def test_the_uploads_of_500_channels_fit_into_10_000_units_a_day(site: Site) -> None:
    """The plan proves it of the most that the job may do. The first day does it, and the second looks at each channel
    every two hours. QUOTA_TEST_CHANNELS says of how many channels that is fetched."""
    site.configure("uploads", units=10_000, pages=CHANNELS_TO_WALK * 8 // 5, channels=_names(500))
    config = site.config.read_text()
    for pages, fits in ((800, True), (900, False)):
        planned = config.replace("[jobs.j.options]", f'schedule = "every 2h"\npages = {pages}\n[jobs.j.options]')
        site.config.write_text(planned.replace(f"pages = {CHANNELS_TO_WALK * 8 // 5}\n", "", 1))
        with quota.open(site.config) as session:
            plan = make_plan(session.settings, site.now_ms, days=1, find_changes=False)
        assert plan.fits is fits
    names = _names(CHANNELS_TO_WALK)
    site.configure("uploads", units=10_000, pages=CHANNELS_TO_WALK * 8 // 5, channels=names)
    for _ in range(3):
        site.run()
    assert site.videos() == {video for name in names for video in published(name)}
    site.calls()
    site.run()
    assert site.calls() == {"playlistItems.list": CHANNELS_TO_WALK}


def _names(count: int) -> list[str]:
    return [_channel_id(number) for number in range(count)]
