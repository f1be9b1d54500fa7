"""The local store: what it keeps, what it lets go, and what it refuses to open."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quota
from quota.jobs.fetches import _RANKED_CHANNELS
from quota.jobs.job import Page
from quota.jobs.store.checkpoints import Checkpoint, is_stale
from quota.jobs.store.file import StoreError
from quota.jobs.store.reader import Reader
from quota.jobs.store.store import Store
from quota.reports.runs import Bought
from support.interrupts import STEP, Interrupted, at_every_place, interrupt

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def video(name: str, **snippet: Any) -> dict[str, Any]:
    return {
        "id": name,
        "snippet": {"title": f"Video {name}", "channelId": "UC1", "channelTitle": "A channel", **snippet},
        "statistics": {"viewCount": "10", "likeCount": "2"},
        "contentDetails": {"duration": "PT1M", "caption": "true", "licensedContent": False, "definition": "hd"},
    }


class Clock:
    def __init__(self) -> None:
        self.now_ms = 100 * DAY_MS

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Any:
    with Store(f"sqlite:///{tmp_path}/videos.db", retention_ms=30 * DAY_MS, clock=clock) as opened:
        yield opened


def save(store: Store, page: Page, *, region: str = "DE", at_ms: int = 1, finished: bool = False) -> Checkpoint:
    checkpoint = store.start_round("t", [region])[0]
    return store.save_page(checkpoint, page, units=[(1, 3)], started_at_ms=at_ms, finished=finished)


def rows(store: Store, sql: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(store.path)) as db:
        return db.execute(sql, values[0] if values and isinstance(values[0], dict) else values).fetchall()


def count(store: Store, table: str) -> int:
    number: int = rows(store, f"SELECT count(*) FROM {table}")[0][0]  # noqa: S608  # the tests' own names
    return number


# -- pages and checkpoints ---------------------------------------------------------------------------------------------


def test_a_run_by_hand_between_two_others_does_not_make_them_seem_frequent(tmp_path: Path) -> None:
    now_ms = 0
    with Store(str(tmp_path / "videos.db"), retention_ms=DAY_MS, clock=lambda: now_ms) as store:
        apart = []
        for now_ms in (2_000, 1_000, 25_000, 25_100, 49_000, 73_000, 60_000, 84_000):  # noqa: B007  # the store's clock
            apart.append(store.start_run("t", "p|trending"))
        assert apart == [None, 0, 24_000, 24_000, 23_900, 24_000, 24_000, 24_000]
        assert store.start_run("t", "p|search") is None


def test_a_page_and_its_checkpoint_are_stored_together(store: Store) -> None:
    checkpoint = save(store, Page(videos=[video("a"), video("b")], ranked=True, cursor={"token": "x"}), at_ms=77)
    assert checkpoint == Checkpoint("t", "DE", True, {"token": "x"}, pages=1, items=2, ranks=2, started_at_ms=77)
    assert rows(store, "SELECT * FROM rankings") == [("t", "DE", 77, 1, "a", 10), ("t", "DE", 77, 2, "b", 10)]
    assert store.runs.bought(0) == [Bought("t", 1, pages=1, items=2, new=2, units=3)]


def test_ranks_go_on_over_the_pages_of_one_pass(store: Store) -> None:
    save(store, Page(videos=[video("a"), video("b")], ranked=True, cursor={"token": "x"}), at_ms=77)
    checkpoint = save(store, Page(videos=[video("b"), video("c")], ranked=True), at_ms=999, finished=True)
    ranks = rows(store, "SELECT rank, video_id, taken_at_ms FROM rankings ORDER BY rank")
    assert ranks == [(1, "a", 77), (2, "b", 77), (4, "c", 77)], "a video that moves over the boundary is ranked once"
    assert (checkpoint.pending, checkpoint.cursor, checkpoint.completed_at_ms) == (False, None, 100 * DAY_MS)


def test_a_pass_at_the_very_millisecond_of_an_earlier_one_gets_a_time_of_its_own(store: Store) -> None:
    for _ in range(3):
        save(store, Page(videos=[video("a")], ranked=True), at_ms=5, finished=True)
    assert rows(store, "SELECT DISTINCT taken_at_ms FROM rankings ORDER BY 1") == [(5,), (6,), (7,)]


# -- what upstream sends -----------------------------------------------------------------------------------------------


def test_counts_that_upstream_leaves_out_or_hides_are_null_also_when_they_were_there_before(store: Store) -> None:
    save(store, Page(videos=[video("a")]))
    hidden = video("a") | {"statistics": {"viewCount": "11"}}
    statistics = {"subscriberCount": "0", "hiddenSubscriberCount": True, "viewCount": "5"}
    save(store, Page(videos=[hidden], channels=[{"id": "UC1", "statistics": statistics}]))
    assert rows(store, "SELECT subscriber_count, view_count FROM channels") == [(None, 5)]
    assert rows(store, "SELECT view_count, like_count, comment_count FROM videos") == [(11, None, None)]


def test_titles_are_kept_byte_for_byte(store: Store) -> None:
    titles = ["Ça va ? 日本語 🔥", " spaces  and\ttabs\n", "a\0b", "&amp; <b>", ""]
    save(store, Page(videos=[video(str(number), title=title) for number, title in enumerate(titles)]))
    assert [title for (title,) in rows(store, "SELECT title FROM videos ORDER BY id")] == titles


def test_a_field_of_the_wrong_type_does_not_stop_a_page(store: Store) -> None:
    odd = {"id": "a", "snippet": {"title": "x\ud800y", "tags": "no list"}, "statistics": {"viewCount": "9" * 30}}
    save(store, Page(videos=[odd, {"id": "b", "snippet": None, "statistics": []}], channels=[{"id": "c"}]))
    assert rows(store, "SELECT title, view_count, tags FROM videos WHERE video_id = 'a'") == [("x\ufffdy", None, None)]
    assert count(store, "channels") == 1


# -- search ------------------------------------------------------------------------------------------------------------


def matches(store: Store, words: str, **options: Any) -> list[str]:
    return [video.video_id for video in store.search(words, **options)]


def check_index(store: Store) -> None:
    """Raise sqlite3.DatabaseError if the index is not what the texts say."""
    with closing(sqlite3.connect(store.path)) as db:
        db.execute("INSERT INTO videos_text (videos_text, rank) VALUES ('integrity-check', 1)")


def test_search_looks_into_titles_descriptions_channels_and_tags_without_accents(store: Store) -> None:
    save(
        store,
        Page(
            videos=[
                video("a", title="Café crème"),
                video("b", description="the cafe"),
                video("c", channelTitle="CAFÉ TV"),
                video("d", tags=["ein Café"]),
                video("e"),
            ]
        ),
    )
    assert sorted(matches(store, "cafe")) == ["a", "b", "c", "d"]
    assert matches(store, "cafe")[0] == "a"  # the title counts most
    assert matches(store, "café crème") == ["a"]


def test_the_index_follows_changes_and_deletions(store: Store, clock: Clock) -> None:
    save(store, Page(videos=[video("a", title="before")]))
    save(store, Page(videos=[video("a", title="after")]))
    assert (matches(store, "before"), matches(store, "after")) == ([], ["a"])
    clock.now_ms += 31 * DAY_MS
    store.delete_expired()
    assert matches(store, "after") == []
    check_index(store)


def test_no_input_is_query_syntax(store: Store) -> None:
    save(store, Page(videos=[video("a")]))
    quoted = ['"', '"open', "x' --", "a\0b", "\ud800", "🔥", "!!!"]
    for words in (*quoted, "a OR", "NEAR(", "title:x", "a*", "-b", "^x", "(", "AND", "{a}"):
        assert isinstance(matches(store, words), list)


@pytest.mark.parametrize(
    ("title", "typed", "missing"),
    [
        # Inside a script without spaces.
        ("東京タワーから見る夜景", ["東京", "タワー", "夜景", "見る", "京"], ["京東", "タワ夜"]),
        ("𠮷野家へ 서울에서 먹방", ["𠮷野", "𠮷", "서울", "먹방", "에서 먹"], ["吉野", "울서"]),
        ("เที่ยวกรุงเทพวันนี้ดีมาก မင်္ဂလာပါကမ္ဘာ", ["กรุงเทพ", "วันนี้", "ดี", "ကမ္ဘာ", "လာ"], ["ดา", "ทเ", "ကဘ"]),
        ("हिन्दी दिल माँ", ["हिन्दी", "दिल", "दि*", "मां"], ["दल", "हद"]),  # the vowels are part of the word
        # Symbols that stand alone are words.
        ("Goal! 🔥🔥🔥", ["🔥", "🔥🔥", "goal 🔥", "GOAL🔥"], ["🥶", "goal 🥶"]),
        ("win🫠goal", ["win", "goal", "wi*"], ["winx"]),  # SQLite's tables of letters are of 2012
        ("Goal\u203c\ufe0f Why\u2049 \u3030\ufe0f", ["\u203c", "goal \u2049\ufe0f", "\u3030"], ["🥶", "\u303d"]),
        ("*\ufe0f\u20e3 🏴\U000e0067", ["*\ufe0f\u20e3", "*\u20e3", "🏴\U000e0067"], ["\u203c", "🏴\U000e0075"]),
        ("win🔥goal 🇩🇪 - 🇫🇷🇸🇪", ["🔥", "win goal", "win🥶goal", "🇩🇪", "🇸🇪", "🇫🇷 🇩🇪"], ["🥶", "🇪🇺", "🇩🇫", "🇷🇸"]),
        ("👍🏽 👨\u200d👩\u200d👧", ["👍", "👍🏿", "👩", "👨\u200d👩\u200d👧"], ["👎"]),
        ("Learn C++ and F#", ["c++", "C++", "F#", "c", "f"], ["C#", "F++", "c+", "++", "F♭", ".learn"]),
        ("ASP.NET, .NET 9 in E♭", [".NET", "(.net)", ".ne*", "net", "E♭", "asp net"], [".in", "A♭", "E#"]),
        ("C#入門 初心者のためのC++講座", ["C#", "c++", "c", "入門", "講座"], ["F#", "c+"]),
        ("C++프로그래밍, C++Builder, Pokémon+", ["C++", "프로그래밍", "builder", "pokémon+"], ["C#", "c+", "mon+"]),
        ("C tutorial: https://host.example/?c#c", ["c"], ["C++", "C#"]),
        ("÷ (Deluxe): 1 + 1 = 2, $100, 9€, 50%", ["÷", "+", "=", "€", "$", "50%", "50"], ["\u00d7", "£", "++", "2%"]),
        ("§230 ※ Sissy", ["§", "※", "§230", "230", "sissy"], ["†"]),
    ],
)
def test_a_word_is_found_wherever_it_stands(store: Store, title: str, typed: list[str], missing: list[str]) -> None:
    save(store, Page(videos=[video("a", title=title), video("b", description=title), video("c", tags=["x", title])]))
    assert [words for words in typed if sorted(matches(store, words)) != ["a", "b", "c"]] == []
    assert [words for words in missing if matches(store, words)] == []
    check_index(store)


def test_a_star_at_the_end_of_a_word_is_whatever_begins_with_it(store: Store) -> None:
    save(store, Page(videos=[video("a", title="Tokyo Drift"), video("b", title="東京都"), video("c", title="to")]))
    assert sorted(matches(store, "tok*")) == ["a"]
    assert sorted(matches(store, "t* drift")) == ["a"]
    assert sorted(matches(store, "\uff54\uff4f\uff0a")) == ["a", "c"]
    assert (matches(store, "東京*"), matches(store, "東京")) == (["b"], ["b"])
    assert matches(store, "t*o") == matches(store, "*kyo") == matches(store, "*") == []


def test_punctuation_parts_words_and_is_not_looked_for(store: Store) -> None:
    save(store, Page(videos=[video("a", title="Don't rock-n-roll! 🔥"), video("b", title="rock", tags=["n roll"])]))
    for words in ("don\u2019t", "rock-n-roll", "🔥 rock.n!!! -- roll"):
        assert matches(store, words) == ["a"]
    assert sorted(matches(store, "rock n roll")) == ["a", "b"]


@pytest.mark.parametrize(
    ("title", "typed", "missing"),
    [
        # One word in two forms of Unicode.
        ("\uff26\uff35\uff2c\uff2c \uff37\uff29\uff24\uff34\uff28 ﬁne ① ㌔", ["full width", "fine 1 キロ", "きろ"], []),
        ("か\u3099んば Z\u0351a\u0300l\u030ag\u0327o\u0328 שָׁלוֹם مُحَمَّد", ["がん", "zalgo", "שלום", "محمد"], []),
        # What people type for what is displayed.
        ("Ελλάδα ΟΔΌΣ", ["ελλαδα", "ΕΛΛΆΔΑ", "οδος", "Οδός"], []),
        ("soft\u00adware wo\u2060rd a\u200bbc", ["software", "soft\u00adware", "word", "abc"], ["soft", "ware"]),
        ("ශ්\u200dරී ರಾಜ್\u200cಕುಮಾರ್ می\u200cکنم", ["ශ්රී", "ರಾಜ್ಕುಮಾರ್", "می کنم"], ["میکنم", "ರಾಜ್"]),
        ("\u200fשמש\u200e \u202bעמק\u202c a\u2066b\u2069c", ["שמש", "עמק", "abc"], []),
        ("ёлка МОЙ ўсё їжа ґанок", ["елка", "ЁЛКА", "мой", "іжа", "ганок", "ўсе"], ["мои", "усё"]),
        ("Łódź Tromsø Điện Þór Œuvre Mən", ["lodz", "tromso", "DIEN", "thor", "oeuvre", "łódź", "men"], []),
        ("İstanbul \u0131rmak ᴊᴀᴢᴢ 🅵🆁🅴🅴 🅰\ufe0f", ["istanbul", "irmak", "IRMAK", "jazz", "FREE", "🅵🆁🅴🅴", "🅰"], ["🅱"]),
        ("أحمد إلى مكتبة كـــتاب ھم خانۀ ٣٤", ["احمد", "الي", "مكتبه", "كتاب", "ہم", "خانه", "34", "३४"], []),
        ("Ɗan Ƙasa Ɓauna Ƴar Ɔdɔ o\u02bbzbek", ["dan kasa", "BAUNA", "yar", "ɗan", "odo", "o'zbek", "o\u02bczbek"], []),
        ("Қазақ әнұраны E\u028begbe Ƒɔ Ɲɛ ɖo ❷ ⓴", ["казак", "анураны", "evegbe", "fo", "ne", "do", "2", "20"], []),
        ("เเมว น้ำ กี้ หลัง", ["แมว", "น\u0e4d\u0e49า", "ก\u0e49\u0e35"], ["แอว", "กี่"]),
        ("हिन्दी अंधा જંતર അവൻ अन्न", ["हिंदी", "अन्धा", "જન્તર", "അവന്\u200d", "अन्न"], ["अंन"]),
        (
            "Don't wi-fi: 10,000 Hawai\u02bbi צה״ל 5-10 U.S.A. v1.2 Node.js AC/DC",
            ["dont", "wifi", "10000", "hawaii", "צהל", "don't", "usa", "U.S.A.", "nodejs", "acdc"],
            ["510", "fi10", "12", "v12"],
        ),
        ("email 3D coop; WiFi", ["e-mail -", "3-D", "«Co-op»", "wi-fi", "wi-f*", "e-mail 3-d"], ["em-ai", "e-mai"]),
        ("Die Straße, die Strasse", ["strasse", "straße", "STRASSE", "STRAẞE", "strass*"], ["strase"]),
        ("ÜBER-München, Århus", ["uebermuenchen", "muenchen", "munchen", "MÜNCHEN", "aarhus", "arhus"], ["muench"]),
    ],
)
def test_typed_words_find_displayed_words(store: Store, title: str, typed: list[str], missing: list[str]) -> None:
    save(store, Page(videos=[video("a", title=title), video("b", title=" ".join(typed))]))
    assert [words for words in typed if sorted(matches(store, words)) != ["a", "b"]] == []
    assert [words for words in missing if matches(store, words)] == []
    assert "a" in matches(store, title)
    check_index(store)


def test_any_program_may_write_what_the_index_is_made_of(store: Store) -> None:
    save(store, Page(videos=[video("a", title="東京")]))
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("UPDATE videos SET title = 'Oslo', title_words = NULL")
        assert (matches(store, "oslo"), matches(store, "東京")) == (["a"], [])
        check_index(store)
        other.execute("DELETE FROM videos")
    assert matches(store, "oslo") == []
    check_index(store)


@pytest.mark.parametrize("words", ["", "  ", "a " * 33, "東" * 501])
def test_a_search_that_cannot_be_right_is_a_usage_error(store: Store, words: str) -> None:
    with pytest.raises(quota.UsageError):
        store.search(words)


def test_a_result_shows_its_newest_rank_in_each_region(store: Store) -> None:
    save(store, Page(videos=[video("x"), video("a")], ranked=True), region="DE", at_ms=1, finished=True)
    save(store, Page(videos=[video("a")], ranked=True), region="DE", at_ms=2, finished=True)
    save(store, Page(videos=[video("y"), video("z"), video("a")], ranked=True), region="FR", at_ms=3, finished=True)
    (result,) = store.search("video a", limit=1)
    assert [(r.region, r.rank, r.taken_at_ms) for r in result.rankings] == [("DE", 1, 2), ("FR", 3, 3)]
    assert [r["region"] for r in result.as_json()["rankings"]] == ["DE", "FR"]  # type: ignore[attr-defined]
    assert sorted(matches(store, "video", region="FR", limit=5)) == ["a", "y", "z"]
    assert matches(store, "video", region="BR") == []


def chart_of(store: Store) -> list[str]:
    with closing(Reader(f"sqlite:///{store.path}")) as reader:
        chart = reader.chart("DE", ["t"], 0, 9)
    return [] if chart is None else [row["video_id"] for _, row in chart.rows]


def test_the_ranking_of_a_trending_job_that_is_gone_comes_before_a_search(store: Store, clock: Clock) -> None:
    for job, work in (("gone", "p|trending|0a"), ("t", "p|search|0a"), ("t", "p|trending")):
        (checkpoint,) = store.start_round(job, ["DE"], work)
        page = Page([video(f"{job} {work}")], ranked=True)
        store.save_page(checkpoint, page, started_at_ms=clock.now_ms, finished=True)
        clock.now_ms += 1
        assert chart_of(store) == [f"{job} {work}" if "trending" in work else "gone p|trending|0a"]


def test_a_pass_that_other_options_left_half_way_is_no_whole_ranking(store: Store, clock: Clock) -> None:
    def page(work: str, *names: str, ends: bool) -> None:
        clock.now_ms += 1_000
        videos = [video(name, channelId=f"UC-{name}") for name in names]
        (checkpoint,) = store.start_round("t", ["DE"], work)
        cursor = None if ends else {"token": names}
        page = Page(videos=videos, ranked=True, cursor=cursor)
        store.save_page(checkpoint, page, started_at_ms=clock.now_ms, finished=ends)

    page("music", "a", ends=False)
    page("news", "b", ends=False)
    assert chart_of(store) == []
    page("music", "c", ends=True)
    assert chart_of(store) == ["a", "c"]
    assert store.select(_RANKED_CHANNELS, region="DE", after="") == [("UC-a",), ("UC-c",)]
    clock.now_ms += DAY_MS
    page("news", "d", ends=True)
    assert chart_of(store) == ["b", "d"]
    clock.now_ms += DAY_MS
    page("news", "e", ends=True)
    clock.now_ms -= 2 * DAY_MS
    page("music", "f", ends=True)
    assert chart_of(store) == ["f"]
    assert store.select(_RANKED_CHANNELS, region="DE", after="") == [("UC-f",)]


def test_a_pass_that_another_machine_went_on_with_is_no_whole_ranking_here(store: Store) -> None:
    """They take turns. One whose page was stored here, and not kept in the ledger, is fetched again, and is whole."""
    save(store, Page(videos=[video("whole")], ranked=True), at_ms=5, finished=True)
    began = save(store, Page(videos=[video("a")], ranked=True, cursor={"token": "x"}), at_ms=9)
    gone_on = began._replace(cursor={"token": "y"}, pages=2, items=2, ranks=2)
    store.stand([(gone_on, ())])
    store.save_page(gone_on, Page(videos=[video("c")], ranked=True), started_at_ms=10, finished=True)
    assert chart_of(store) == ["whole"]

    begun = save(store, Page(videos=[video("d")], ranked=True, cursor={"token": "x"}), at_ms=20)
    again = Page(videos=[video("e")], ranked=True, cursor={"token": "y"})
    store.save_page(begun, again, started_at_ms=20, finished=False)
    store.stand([(begun, ())])
    store.save_page(begun, Page(videos=[video("e")], ranked=True), started_at_ms=20, finished=True)
    assert chart_of(store) == ["d", "e"]
    store.stand([(begun._replace(started_at_ms=5, ranks=1), ())])
    assert rows(store, "SELECT taken_at_ms, count(*) FROM rankings GROUP BY 1") == [(5, 1), (9, 1), (20, 2)]


# -- retention ---------------------------------------------------------------------------------------------------------


def test_only_data_without_a_refresh_in_the_retention_is_deleted(store: Store, clock: Clock) -> None:
    start_ms = clock.now_ms
    save(
        store, Page(videos=[video("a"), video("b")], ranked=True, channels=[{"id": "c"}]), at_ms=start_ms, finished=True
    )
    clock.now_ms = start_ms + 30 * DAY_MS
    assert store.delete_expired() == 0  # exactly as old as allowed
    save(store, Page(videos=[video("b")], ranked=True), at_ms=clock.now_ms, finished=True)
    clock.now_ms += 1
    assert store.delete_expired() == 5  # two rankings, one video and its reading, one channel
    kept = rows(store, "SELECT video_id, taken_at_ms FROM videos LEFT JOIN history ON key = video_id")
    assert kept == [("b", start_ms)], "it has not changed since"
    assert rows(store, "SELECT taken_at_ms FROM rankings") == [(start_ms + 30 * DAY_MS,)]
    assert count(store, "channels") == 0


def test_a_clock_that_is_ahead_for_less_than_a_day_deletes_nothing(store: Store, clock: Clock) -> None:
    right_ms = clock.now_ms
    store.runs.begin("r", "p", "t")
    save(store, Page(videos=[video("a")], ranked=True, channels=[{"id": "c"}]), at_ms=right_ms, finished=True)
    clock.now_ms = right_ms + DAY_MS
    assert store.delete_expired() == 0
    for hour in range(24):
        clock.now_ms = right_ms + 60 * DAY_MS + hour * HOUR_MS
        store.runs.begin("r", "p", "t")
        assert store.delete_expired() == 0
    clock.now_ms = right_ms + 3 * DAY_MS  # right again
    assert store.delete_expired() == 0
    assert (count(store, "videos"), count(store, "rankings"), count(store, "checkpoints")) == (1, 1, 1)
    assert len(store.runs.read()) == 25, "nor is it forgotten which runs there were"
    for hour in (0, 23, 24):  # a machine that was off so long is believed after a day
        clock.now_ms = right_ms + 60 * DAY_MS + hour * HOUR_MS
        assert store.delete_expired() == (4 if hour == 24 else 0)


def test_a_ranking_that_a_wrong_clock_dated_ahead_hides_none_of_today(store: Store, clock: Clock) -> None:
    right_ms = clock.now_ms
    clock.now_ms += 30 * DAY_MS
    save(store, Page(videos=[video("a"), video("b")], ranked=True), at_ms=clock.now_ms, finished=True)
    clock.now_ms = right_ms
    save(store, Page(videos=[video("b")], ranked=True), at_ms=right_ms, finished=True)
    [result] = [result for result in store.search("b") if result.video_id == "b"]
    assert [(ranking.rank, ranking.taken_at_ms) for ranking in result.rankings] == [(1, right_ms)]
    [other] = [result for result in store.search("a") if result.video_id == "a"]
    assert [ranking.rank for ranking in other.rankings] == [1], "it is all there is"


def test_a_region_dated_ahead_is_stale() -> None:
    now_ms = 10 * DAY_MS
    assert [is_stale(now_ms - age_ms, now_ms, DAY_MS) for age_ms in (0, DAY_MS, DAY_MS + 1)] == [False, False, True]
    assert [is_stale(now_ms + ahead_ms, now_ms, DAY_MS) for ahead_ms in (HOUR_MS, HOUR_MS + 1)] == [False, True]


def test_a_clean_up_is_bounded_by_time(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quota.jobs.store.store.DELETE_PER_TRANSACTION", 3)
    save(store, Page(videos=[video(f"v{i}") for i in range(10)]), finished=True)
    clock.now_ms += 31 * DAY_MS
    for within_s, deleted in ((-1, 6), (3_600, 14), (3_600, 0)):
        monkeypatch.setattr("quota.jobs.store.store.DELETE_WITHIN_S", within_s)
        assert store.delete_expired() == deleted, "videos and their readings"


def test_a_pass_begun_before_the_retention_starts_over(store: Store, clock: Clock) -> None:
    page = Page(videos=[video("a")], ranked=True, cursor={"token": "x"})
    save(store, page, at_ms=clock.now_ms)
    clock.now_ms += 31 * DAY_MS
    store.start_run("t", "")
    store.delete_expired()
    checkpoint = store.checkpoint("t", "DE")
    assert (checkpoint.pending, checkpoint.cursor, checkpoint.pages, checkpoint.begun) == (True, None, 0, False)


def test_checkpoints_of_work_that_nobody_does_any_longer_are_deleted(store: Store, clock: Clock) -> None:
    page = Page(videos=[video("a")], ranked=True, cursor={"token": "x"})
    for work in ("given up", "done"):
        store.start_run("t", work)
        (checkpoint,) = store.start_round("t", ["DE"], work)
        store.save_page(checkpoint, page, started_at_ms=clock.now_ms, finished=False)
    clock.now_ms += 29 * DAY_MS
    store.start_run("t", "done")
    store.delete_expired()
    assert store.checkpoint("t", "DE", "given up").cursor == {"token": "x"}
    clock.now_ms += 2 * DAY_MS
    store.delete_expired()
    assert [store.checkpoint("t", "DE", work).pending for work in ("given up", "done")] == [False, True]


# -- the file ----------------------------------------------------------------------------------------------------------


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(StoreError) as caught:
        Store(f"sqlite:///{path}", retention_ms=1, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE charges (x)")
        db.execute("PRAGMA user_version = 1")
    before = path.read_bytes()
    assert "is another program's database" in refusal(path)
    assert path.read_bytes() == before


def test_a_page_waits_longer_for_another_program(store: Store) -> None:
    checkpoint = store.start_round("t", ["DE"])[0]
    with (
        closing(sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)) as other,
        Store(store.path, retention_ms=1, busy_timeout_ms=20) as waiting,
    ):
        waiting.checkpoint("t", "DE")
        other.execute("BEGIN IMMEDIATE")
        releases = threading.Timer(0.3, other.rollback)
        releases.start()
        saved = waiting.save_page(checkpoint, Page(videos=[video("a")]), started_at_ms=1, finished=True)
        releases.join()
    assert saved.items == 1


def test_a_full_disk_keeps_nothing_half_written(store: Store) -> None:
    checkpoint = save(store, Page(videos=[video("a")], ranked=True, cursor={"token": "x"}))
    pages = store._file._db.execute("PRAGMA page_count").fetchone()[0]
    store._file._db.execute(f"PRAGMA max_page_count = {pages}")
    bulky = [video(f"v{i}", description="x" * 5_000) for i in range(20)]
    with pytest.raises(StoreError, match="no space is left"):
        store.save_page(checkpoint, Page(videos=bulky, ranked=True), started_at_ms=1, finished=True)
    assert store.checkpoint("t", "DE") == checkpoint
    assert count(store, "videos") == count(store, "rankings") == 1
    store._file._db.execute("PRAGMA max_page_count = 1000000")
    assert store.save_page(checkpoint, Page(videos=bulky, ranked=True), started_at_ms=1, finished=True).items == 21


@pytest.mark.parametrize("damaged", ["[" * 5_000, '{"in":' * 600 + "1" + "}" * 600])
def test_a_checkpoint_that_no_store_wrote_begins_afresh(store: Store, damaged: str) -> None:
    save(store, Page(videos=[video("a")], cursor={"token": "x"}, ranked=True))
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("UPDATE checkpoints SET cursor = ?", (damaged,))
    assert store.checkpoint("t", "DE") == Checkpoint("t", "DE")
    assert save(store, Page(videos=[video("b")], cursor={"token": "y"}, ranked=True), at_ms=2) == Checkpoint(
        "t", "DE", True, {"token": "y"}, pages=1, items=1, ranks=1, started_at_ms=2
    )


def test_a_search_leaves_out_what_is_damaged(store: Store) -> None:
    save(store, Page(videos=[video("a")], ranked=True))
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("UPDATE videos SET view_count = 'x', published_at = CAST(x'ff' AS TEXT), channel_title = 5")
        db.execute("UPDATE rankings SET taken_at_ms = 9000000000000000")
        db.execute("INSERT INTO rankings VALUES ('t', 'FR', 1, 'first', 'a', NULL)")
    (result,) = store.search("video")
    assert result.as_json() == {
        "video_id": "a",
        "title": "Video a",
        "channel_title": "5",
        "published_at": "\ufffd",
        "view_count": None,
        "rankings": [],
    }


# -- damaged rows ------------------------------------------------------------------------------------------------------


def test_a_page_interrupted_anywhere_is_stored_whole_or_not_at_all(store: Store) -> None:
    pages = 0

    def save_a_page() -> None:
        nonlocal pages
        pages += 1
        page = Page(videos=[video(f"{pages} {n}") for n in range(2)], cursor={"page": pages}, ranked=True)
        save(store, page)

    for error in at_every_place(interrupt, save_a_page, step=STEP):
        assert error is None or isinstance(error, Interrupted)
        with closing(sqlite3.connect(store.path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            kept = other.execute("SELECT count(*), max(rank) FROM rankings").fetchone()
            checkpoint = store.checkpoint("t", "DE")
            assert kept == (2 * checkpoint.pages, 2 * checkpoint.pages or None)
            assert other.execute("SELECT count(*) FROM videos").fetchone() == (2 * checkpoint.pages,)
    assert pages > 50
    assert checkpoint.pages > 10
