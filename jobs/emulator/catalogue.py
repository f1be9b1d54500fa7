"""The catalogue: videos, channels and comments that the emulator serves, generated or recorded.

Each generated item is a pure function of its own name (a region and rank, a search and rank, an
id). Two emulators therefore answer alike on any machine. Nothing uses global randomness.
"""

import base64
import hashlib
import json
import re
import threading
import tomllib
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from quota.common.files import read_text
from quota.jobs.emulator.replies import Json, resource

T = TypeVar("T")

# Names and texts for generated videos, and upstream's own list of regions.
_WORDS = tomllib.loads(read_text("quota.jobs.emulator", "words.toml"))

REGIONS: dict[str, str] = _WORDS["regions"]
_REGIONS = list(REGIONS)
LANGUAGES: dict[str, str] = {
    region: language for language, regions in _WORDS["languages"].items() for region in regions
}
NAMES: list[str] = _WORDS["names"]
TAGS: list[str] = _WORDS["tags"]
DESCRIPTIONS: list[str] = _WORDS["descriptions"]

# Ordinary titles are repeated until they make up most of a chart.
TITLES: dict[str, list[str]] = {
    language: ordinary * (24 // len(ordinary)) + _WORDS["titles_everywhere"]
    for language, ordinary in _WORDS["titles"].items()
}

CHART_VIDEOS = 200  # upstream lists exactly this many per region
SEARCH_VIDEOS_MIN, SEARCH_VIDEOS_MAX = 60, 250
CHANNELS = 5_000
_REMEMBERED_SEARCHES = 10_000
_NEWEST = datetime(2026, 6, 1, 12, tzinfo=UTC)  # fixed: answers do not depend on today
_CATEGORY_IDS = ("1", "2", "10", "15", "17", "19", "20", "22", "23", "24", "25", "26", "27", "28")


# --- ids ---------------------------------------------------------------------------------------------
# An id encodes the item it names, with two check bytes. The catalogue therefore recognises a made-up id as
# unknown without a table of the known ones. A page token encodes an offset in the same way.


def encode_id(payload: bytes) -> str:
    check = hashlib.blake2b(payload, digest_size=2).digest()
    return base64.urlsafe_b64encode(check + payload).decode().rstrip("=")


def decode_id(text: str, length: int) -> bytes | None:
    try:
        payload = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[2:]
    except ValueError:
        return None
    return payload if len(payload) == length and encode_id(payload) == text else None


_IN_CHART, _IN_SEARCH, _IN_CHANNEL = range(3)


def _video_id(place: int, group: int, rank: int) -> str:
    return encode_id(bytes([place]) + group.to_bytes(4) + bytes([rank]))


def _channel_id(number: int) -> str:
    return "UC" + encode_id(number.to_bytes(14))


def _channel_number(channel_id: str) -> int | None:
    payload = decode_id(channel_id[2:], 14) if channel_id.startswith("UC") else None
    number = int.from_bytes(payload) if payload is not None else CHANNELS
    return number if number < CHANNELS else None


# --- generated ---------------------------------------------------------------------------------------


class _Draw:
    """A number generator seeded by a name alone."""

    def __init__(self, name: str) -> None:
        self._pool = int.from_bytes(hashlib.blake2b(name.encode()).digest())

    def below(self, bound: int) -> int:
        self._pool, number = divmod(self._pool, bound)
        return number

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


class GeneratedCatalogue:
    """Charts for every region, results for every search, and five thousand channels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._searches: dict[int, str] = {}  # maps an id found by a search back to its words

    def chart(self, region: str | None) -> Sequence[Json] | None:
        """The most popular videos of a region (None: the default region)."""
        region = region or "US"
        return _chart(region) if region in REGIONS else None

    def video(self, video_id: str) -> Json | None:
        payload = decode_id(video_id, 6)
        if payload is None:
            return None
        place, group, rank = payload[0], int.from_bytes(payload[1:5]), payload[5]
        if place == _IN_CHART and group < len(REGIONS) and rank < CHART_VIDEOS:
            return _video(video_id, language=LANGUAGES.get(_REGIONS[group], "en"))
        if place == _IN_CHANNEL and group < CHANNELS and rank < _upload_count(group):
            return _video(video_id, channel=group)
        with self._lock:
            words = self._searches.get(group) if place == _IN_SEARCH else None
        return None if words is None else _video(video_id, words=words)

    def search(self, words: str, channel_id: str | None) -> Sequence[Json]:
        """The matching videos, best match first."""
        words = " ".join(words.split())[:60]
        if channel_id is not None:
            uploads = self.uploads(channel_id) or ()
            return [video for video in uploads if _mentions(video, words)]
        group = zlib.crc32(words.casefold().encode("utf-8", "replace"))
        with self._lock:
            words = self._searches.setdefault(group, words)
            if len(self._searches) > _REMEMBERED_SEARCHES:
                del self._searches[next(iter(self._searches))]
        return _results(group, words)

    def channel(self, channel_id: str) -> Json | None:
        number = _channel_number(channel_id)
        if number is None:
            return None
        draw = _Draw(channel_id)
        subscribers = draw.below(30_000_000)
        return resource(
            "channel",
            channel_id,
            number=number,
            title=_channel_title(number),
            uploads="UU" + channel_id[2:],  # upstream derives the id of the playlist from the channel's id
            subscribers=str(subscribers),
            videos=str(_upload_count(number)),
            published=_timestamp(draw, 5_000),
            country=draw.pick(_REGIONS),
            views=str(subscribers * (20 + draw.below(400))),
        )

    def uploads(self, channel_id: str) -> Sequence[Json] | None:
        number = _channel_number(channel_id)
        if number is None:
            return None
        ids = (_video_id(_IN_CHANNEL, number, rank) for rank in range(_upload_count(number)))
        return [_video(video_id, channel=number) for video_id in ids]


@lru_cache(maxsize=32)
def _chart(region: str) -> Sequence[Json]:
    """The chart of one region. Every tenth video is a worldwide hit: every region's chart has it."""
    own = _REGIONS.index(region)
    groups = [0 if rank % 10 == 9 else own for rank in range(CHART_VIDEOS)]
    return [
        _video(_video_id(_IN_CHART, group, rank), language=LANGUAGES.get(_REGIONS[group], "en"))
        for rank, group in enumerate(groups)
    ]


@lru_cache(maxsize=32)
def _results(group: int, words: str) -> Sequence[Json]:
    count = SEARCH_VIDEOS_MIN + group % (SEARCH_VIDEOS_MAX - SEARCH_VIDEOS_MIN + 1)
    return [_video(_video_id(_IN_SEARCH, group, rank), words=words) for rank in range(count)]


def _upload_count(channel: int) -> int:
    return 3 + channel * 37 % 120


def _channel_title(number: int) -> str:
    return f"{NAMES[number % len(NAMES)]} {number}"


def _timestamp(draw: _Draw, days: int) -> str:
    published = _NEWEST - timedelta(seconds=draw.below(days * 86_400))
    return published.strftime("%Y-%m-%dT%H:%M:%SZ")


def _video(video_id: str, *, language: str = "en", channel: int | None = None, words: str = "") -> Json:
    draw = _Draw(video_id)
    if channel is None:
        channel = draw.below(CHANNELS)
    title = draw.pick(TITLES[language]).format(name=draw.pick(NAMES), number=2 + draw.below(98))
    if words:
        title = f"{words} | {title}"[:100]
    description = draw.pick(DESCRIPTIONS).format(title=title)
    minutes, seconds = divmod(15 + draw.below(5_400), 60)
    # Some counts pass 2^31, as the largest real ones do.
    views = draw.below(9_000_000_000) if draw.below(50) == 0 else draw.below(20_000_000)
    return resource(
        "video",
        video_id,
        channel_id=_channel_id(channel),
        channel_title=_channel_title(channel),
        title=title,
        description=description,
        language=language,
        duration=f"PT{minutes}M{seconds}S" if minutes else f"PT{seconds}S",
        views=str(views),
        # An owner may hide likes and turn comments off.
        likes=str(views // (10 + draw.below(90))) if draw.below(12) else None,
        comments=str(views // (200 + draw.below(3_000))) if draw.below(15) else None,
        published=_timestamp(draw, 14),
        tags=[draw.pick(TAGS) for _ in range(draw.below(5))],
        category_id=draw.pick(_CATEGORY_IDS),
        definition="hd" if draw.below(10) else "sd",
        caption="true" if draw.below(4) == 0 else "false",
        is_licensed=draw.below(3) > 0,
    )


# --- comments ----------------------------------------------------------------------------------------

INLINE_REPLIES = 5
"""The most replies that come with their thread."""


def threads(video: Json) -> list[Json] | None:
    """The threads of a video's comments, the newest first; None if they are disabled."""
    count = video.get("statistics", {}).get("commentCount")
    if count is None:
        return None
    number = min(int(count), _Draw(f"threads {video['id']}").below(250))
    return [_comment(f"{video['id']}.{place}") for place in range(number)]


def replies_to(thread_id: str) -> list[Json] | None:
    """The replies to a thread. Most threads have few; one of ten has up to 150."""
    if re.fullmatch(r"[\w-]+\.[0-9]{1,3}", thread_id, re.ASCII) is None:
        return None
    draw = _Draw(f"replies {thread_id}")
    number = draw.below(4) if draw.below(10) else draw.below(151)
    return [_comment(f"{thread_id}.{place}") for place in range(number)]


def _comment(comment_id: str) -> Json:
    draw = _Draw(comment_id)
    author, published = draw.below(CHANNELS), _timestamp(draw, 14)
    video_id, _, place = comment_id.partition(".")
    is_answer = "." in place
    return resource(
        "comment",
        comment_id,
        author=author,
        channel_id=_channel_id(author),
        published=published,
        text=f"{draw.pick(NAMES)}? {draw.pick(DESCRIPTIONS).format(title='This')}"[:200],
        likes=draw.below(500),
        video_id=None if is_answer else video_id,
        parent_id=comment_id.rpartition(".")[0] if is_answer else None,
    )


def _mentions(video: Json, words: str) -> bool:
    snippet = video.get("snippet", {})
    text = f"{snippet.get('title', '')}\n{snippet.get('description', '')}"
    return words.casefold() in text.casefold()


# --- recorded ----------------------------------------------------------------------------------------

_PAGE_FILE = re.compile(r"videos_list_mostPopular_([A-Z]{2})_p([1-9][0-9]{0,3})\.json")


class RecordedCatalogue:
    """Charts read from saved pages of videos.list, named `videos_list_mostPopular_US_p1.json`.

    The catalogue joins a region's pages, so it can serve any page size. At the recorded page size it
    serves the recorded pages. It never changes an item.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, with a one-line message, when `folder` holds nothing usable."""
        pages: dict[tuple[str, int], Path] = {}
        for path in folder.glob("*.json"):
            if match := _PAGE_FILE.fullmatch(path.name):
                pages[match[1], int(match[2])] = path
        if not pages:
            raise ValueError(f"no recording in {folder}: it needs files like videos_list_mostPopular_US_p1.json")
        self._charts: dict[str, list[Json]] = {}
        for (region, number), path in sorted(pages.items()):
            if number > 1 and (region, number - 1) not in pages:
                raise ValueError(f"the recording in {folder} lacks page {number - 1} of {region}")
            self._charts.setdefault(region, []).extend(_items(path))
        self._videos: dict[str, Json] = {}
        for chart in self._charts.values():
            for video in chart:
                self._videos.setdefault(video["id"], video)

    def chart(self, region: str | None) -> Sequence[Json] | None:
        if region is None:
            region = "US" if "US" in self._charts else next(iter(self._charts))
        return self._charts.get(region)

    def video(self, video_id: str) -> Json | None:
        return self._videos.get(video_id)

    def search(self, words: str, channel_id: str | None) -> Sequence[Json]:
        videos = self._videos.values() if channel_id is None else self.uploads(channel_id) or ()
        return [video for video in videos if _mentions(video, words.strip())]

    def channel(self, channel_id: str) -> Json | None:
        """None: the recorded pages have no channels."""
        return None

    def uploads(self, channel_id: str) -> Sequence[Json] | None:
        videos = self._videos.values()
        return [video for video in videos if video.get("snippet", {}).get("channelId") == channel_id] or None


def _items(path: Path) -> list[Json]:
    try:
        items: list[Json] = json.loads(path.read_bytes())["items"]
        if not all(isinstance(item["id"], str) for item in items):
            raise TypeError("an item has no id")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no page of videos.list: {error}") from error
    return items


Catalogue = GeneratedCatalogue | RecordedCatalogue
"""What the emulator can list, in a fixed order. An unknown name gives None, never an error."""
