"""The answers of the emulated API's methods. HTTP and quota are handled elsewhere.

A catalogue answers videos, search, channels, playlistItems, commentThreads, comments, videoCategories
and i18nRegions. The other methods exist so that their calls have a price: their lists are empty, their inserts and
updates echo the resource, and their other calls succeed without content.
"""

import base64
import hashlib
import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quota.common.files import read_text
from quota.common.text import number_in
from quota.jobs.emulator import replies
from quota.jobs.emulator.catalogue import (
    CATEGORIES,
    INLINE_REPLIES,
    REGIONS,
    Catalogue,
    etag,
    replies_to,
    resource,
    threads,
    uploads_playlist,
)
from quota.jobs.emulator.replies import Json, Rejected, Reply

MAX_IDS = 50
MAX_PAGE = 50
MAX_COMMENTS = 100
DEFAULT_PAGE = 5
_MAX_UPLOADED = 1_000  # later uploads succeed as well, but cannot be listed

# --- routes ------------------------------------------------------------------------------------------

_METHODS = tomllib.loads(read_text("quota.jobs.emulator", "methods.toml"))
_VERBS = {"GET": "list", "POST": "insert", "PUT": "update", "DELETE": "delete"}
_ROOT = "/youtube/v3/"
_UPLOAD_ROOT = "/upload" + _ROOT


def method_of(verb: str, path: str) -> str | None:
    """The API's name for a call: ("GET", "/youtube/v3/videos") is "videos.list"."""
    for root in (_ROOT, _UPLOAD_ROOT):
        if path.startswith(root):
            rest = path.removeprefix(root)
            action = _VERBS.get(verb, "")
            if action in _METHODS["collections"].get(rest, ()):
                return f"{rest}.{action}"
            if verb == "GET" and rest.startswith("captions/"):
                return "captions.download"
            name: str | None = _METHODS["actions"].get(f"{verb} {rest}")
            return name
    return None


def is_upload(path: str) -> bool:
    return path.startswith(_UPLOAD_ROOT)


# --- page tokens -------------------------------------------------------------------------------------
# A token is a protobuf message in URL-safe base64: field 1 an offset, field 2 a direction.

_FORWARD, _BACK = 0, 1
_MAX_OFFSET = 1_000_000


def encode_token(offset: int, direction: int = _FORWARD) -> str:
    """`encode_token(50)` is "CDIQAA": the page that starts at item 50."""
    raw = b"\x08" + _varint(offset) + b"\x10" + bytes([direction])
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decode_token(token: str, page_size: int) -> int:
    """The offset at which the token's page starts. A backward token names the end of its page."""
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    except ValueError:
        raise Rejected(replies.error("page_token_invalid")) from None
    offset = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(raw[1:-2]))
    direction = raw[-1] if raw else _FORWARD
    if direction > _BACK or offset > _MAX_OFFSET or encode_token(offset, direction) != token:
        raise Rejected(replies.error("page_token_invalid"))
    return offset if direction == _FORWARD else max(0, offset - page_size)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# --- methods -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of one API method. Repeated parameters are joined with commas, as upstream reads them."""

    method: str
    params: Mapping[str, str]
    body: Json = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The collection that the method belongs to."""
        return self.method.partition(".")[0]

    def ids(self) -> list[str]:
        """The distinct ids that the call asks for, in order."""
        ids = list(dict.fromkeys(part for part in self.params.get("id", "").split(",") if part))
        if len(ids) > MAX_IDS:
            raise Rejected(replies.error("filter_invalid", parameter="id"))
        return ids

    def parts(self, allowed: str) -> set[str]:
        """The parts that the call asks for, all of them in `allowed`."""
        parts = [part.strip() for part in self.params.get("part", "").split(",") if part.strip()]
        if not parts:
            raise Rejected(replies.error("part_missing"))
        for part in parts:
            if part not in allowed.split():
                raise Rejected(replies.error("part_unknown", part=part))
        return set(parts)

    def page_size(self, least: int = 0, most: int = MAX_PAGE, default: int = DEFAULT_PAGE) -> int:
        value = self.params.get("maxResults", str(default))
        size = number_in(value, least, most)
        if size is None:
            raise Rejected(replies.error("out_of_range", value=value, least=least, most=most))
        return size

    def required(self, name: str, expected: str) -> str:
        """A parameter without which upstream does not know what is asked for; `expected` are all that would do."""
        if name not in self.params:
            raise Rejected(replies.error("filter_missing", expected=expected))
        return self.params[name]

    def region(self) -> str | None:
        return self.params.get("regionCode") or None


_VIDEO_PARTS = (
    "contentDetails fileDetails id liveStreamingDetails localizations paidProductPlacementDetails "
    "player processingDetails recordingDetails snippet statistics status suggestions topicDetails"
)
_CHANNEL_PARTS = (
    "auditDetails brandingSettings contentDetails contentOwnerDetails id localizations snippet "
    "statistics status topicDetails"
)


class Api:
    """The API's methods over one catalogue. Safe to call from many threads."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._uploaded: dict[str, Json] = {}
        self._numbers = itertools.count()  # next() is atomic, so no two resources share one
        self._lists: dict[str, tuple[str, Callable[[Call, set[str]], Reply]]] = {
            "videos.list": (_VIDEO_PARTS, self._videos),
            "videos.batchGetStats": ("contentDetails id snippet statistics", self._video_stats),
            "search.list": ("id snippet", self._search),
            "channels.list": (_CHANNEL_PARTS, self._channels),
            "playlistItems.list": ("contentDetails id snippet status", self._playlist_items),
            "commentThreads.list": ("id replies snippet", self._comment_threads),
            "comments.list": ("id snippet", self._comments),
            "videoCategories.list": ("id snippet", self._categories),
            "i18nRegions.list": ("id snippet", self._regions),
        }

    def answer(self, call: Call) -> Reply:
        """The reply to a call. Raises Rejected if upstream would refuse the call."""
        if call.method in self._lists:
            allowed, listed = self._lists[call.method]
            return listed(call, call.parts(allowed))
        _, _, action = call.method.partition(".")
        if action == "list":
            if "part" not in call.params:
                raise Rejected(replies.error("part_missing"))
            return _listing(call, [])
        if action in ("insert", "update"):
            return Reply(200, self.stored(call))
        return Reply(204)

    def stored(self, call: Call) -> Json:
        """The resource that an insert or update returns: an echo, under an id that can be listed."""
        names = sorted(f"{name}={value}" for name, value in call.body.items())
        number = next(self._numbers)
        digest = hashlib.blake2b(repr((call.kind, number, names)).encode("utf-8", "replace")).digest()
        item_id = str(call.body.get("id") or base64.urlsafe_b64encode(digest)[:11].decode())
        made = resource(replies.singular(call.kind), item_id)
        item = made | call.body | made
        if call.method == "videos.insert":
            given = call.body.get("status")
            status = {"uploadStatus": "uploaded", "privacyStatus": "public"}
            item["status"] = status | (given if isinstance(given, dict) else {})
            if len(self._uploaded) < _MAX_UPLOADED:
                self._uploaded[item_id] = item
        parts = call.params.get("part", "").split(",")
        return {key: item[key] for key in item if key in ("kind", "etag", "id", *parts)}

    def _videos(self, call: Call, parts: set[str]) -> Reply:
        if "id" in call.params:
            return _listing(call, _with_parts(self._videos_by_id(call), parts))
        if call.required("chart", "myRating, chart, id") != "mostPopular":
            raise Rejected(replies.error("chart_not_found"))
        size = call.page_size(least=1)
        videos = self._catalogue.chart(call.region())
        if videos is None:
            raise Rejected(replies.error("region_invalid"))
        category = call.params.get("videoCategoryId", "0")
        if category != "0":
            videos = [item for item in videos if _snippet(item).get("categoryId") == category]
            if not videos:
                raise Rejected(replies.error("chart_not_found"))
        return _page(call, parts, videos, size)

    def _videos_by_id(self, call: Call) -> list[Json]:
        videos = (self._uploaded.get(name) or self._catalogue.video(name) for name in call.ids())
        return [video for video in videos if video is not None]

    def _video_stats(self, call: Call, parts: set[str]) -> Reply:
        call.required("id", "id")
        items = _with_parts(self._videos_by_id(call), parts)
        body = {"kind": "youtube#batchGetStatsResponse", "etag": etag(*map(str, items))}
        return Reply(200, {**body, "items": [{**item, "kind": "youtube#videoStats"} for item in items]})

    def _search(self, call: Call, parts: set[str]) -> Reply:
        """The search finds only videos: a search for other types returns nothing."""
        size = call.page_size()
        region = call.region() or "US"
        if region not in REGIONS:
            raise Rejected(replies.error("region_invalid"))
        videos: Sequence[Json] = ()
        if "video" in call.params.get("type", "video").split(","):
            words = call.params.get("q", "")
            videos = self._catalogue.search(words, call.params.get("channelId"))
        return _page(call, parts, videos, size, _search_result, regionCode=region)

    def _channels(self, call: Call, parts: set[str]) -> Reply:
        if "id" in call.params:
            ids = call.ids()
        else:
            handle = call.required("forHandle", "id, forHandle, forUsername, mine, managedByMe")
            ids = [self._catalogue.channel_id(handle) or ""]
        channels = [channel for name in ids if (channel := self._catalogue.channel(name))]
        return _listing(call, _with_parts(channels, parts))

    def _playlist_items(self, call: Call, parts: set[str]) -> Reply:
        """The playlists are the channels' uploads. Their ids are "UU" and the rest of the channel's id."""
        size = call.page_size()
        playlist = call.required("playlistId", "id, playlistId")
        videos = self._catalogue.uploads("UC" + playlist[2:]) if playlist.startswith("UU") else None
        if videos is None:
            raise Rejected(replies.error("playlist_not_found"))
        return _page(call, parts, list(enumerate(videos)), size, _playlist_item)

    def _comment_threads(self, call: Call, parts: set[str]) -> Reply:
        size = call.page_size(least=1, most=MAX_COMMENTS, default=20)
        video = self._catalogue.video(call.required("videoId", "allThreadsRelatedToChannelId, id, videoId"))
        if video is None:
            raise Rejected(replies.error("video_not_found"))
        comments = threads(video)
        if comments is None:
            raise Rejected(replies.error("comments_disabled"))
        return _page(call, parts, comments, size, _thread)

    def _comments(self, call: Call, parts: set[str]) -> Reply:
        size = call.page_size(least=1, most=MAX_COMMENTS, default=20)
        parent = call.required("parentId", "id, parentId")
        answers = replies_to(parent)
        if answers is None or self._catalogue.video(parent.partition(".")[0]) is None:
            raise Rejected(replies.error("comment_not_found"))
        return _page(call, parts, answers, size)

    def _categories(self, call: Call, parts: set[str]) -> Reply:
        if "id" in call.params:
            wanted = [name for name in call.ids() if name in CATEGORIES]
        elif (region := call.region()) is None:
            raise Rejected(replies.error("filter_missing", expected="id, regionCode"))
        elif region not in REGIONS:
            raise Rejected(replies.error("region_invalid"))
        else:
            wanted = list(CATEGORIES)
        owner = "UCBR8-60-B28hp2BmDPdntcQ"  # upstream's own channel owns every category
        items = [
            resource("videoCategory", name)
            | {"snippet": {"title": CATEGORIES[name], "assignable": True, "channelId": owner}}
            for name in wanted
        ]
        return Reply(200, _body(call, _with_parts(items, parts)))

    def _regions(self, call: Call, parts: set[str]) -> Reply:
        items = [
            resource("i18nRegion", region) | {"snippet": {"gl": region, "name": name}}
            for region, name in REGIONS.items()
        ]
        return Reply(200, _body(call, _with_parts(items, parts)))


# --- shapes ------------------------------------------------------------------------------------------


def _with_parts(items: Iterable[Json], parts: set[str]) -> list[Json]:
    wanted = {"kind", "etag", "id", *parts}
    return [{key: value for key, value in item.items() if key in wanted} for item in items]


def _body(call: Call, items: Sequence[Json]) -> Json:
    kind = f"youtube#{replies.singular(call.kind)}ListResponse"
    tags = (str(item.get("etag", "")) for item in items)
    return {"kind": kind, "etag": etag(kind, *tags), "items": list(items)}


def _listing(call: Call, items: Sequence[Json]) -> Reply:
    """A list on one page: the resources that a call named by id."""
    page_info = {"totalResults": len(items), "resultsPerPage": len(items)}
    return Reply(200, {**_body(call, items), "pageInfo": page_info})


def _page(
    call: Call, parts: set[str], items: Sequence[Any], size: int, shape: Callable[[Any], Json] = dict, **extra: Any
) -> Reply:
    """One page of `items`. Only that page's items go through `shape`."""
    token = call.params.get("pageToken")
    start = decode_token(token, size) if token else 0
    end = start + size
    body: Json = _body(call, _with_parts(map(shape, items[start:end]), parts))
    if size and end < len(items):
        body["nextPageToken"] = encode_token(end)
    if size and start:
        body["prevPageToken"] = encode_token(start, _BACK)
    page_info = {"totalResults": len(items), "resultsPerPage": size}
    return Reply(200, {**body, **extra, "pageInfo": page_info})


def _snippet(video: Json) -> Json:
    """The video's snippet; a recording may lack this part."""
    snippet = video.get("snippet")
    return snippet if isinstance(snippet, dict) else {}


def _search_result(video: Json) -> Json:
    snippet = _snippet(video)
    kept = ("channelId", "title", "thumbnails", "channelTitle", "liveBroadcastContent")
    published = snippet.get("publishedAt", "")
    # A search result shows the beginning of the description on one line.
    brief = " ".join(snippet.get("description", "").split())[:120]
    shown = {key: snippet[key] for key in kept if key in snippet}
    return {
        "kind": "youtube#searchResult",
        "etag": etag("search", video["id"]),
        "id": {"kind": "youtube#video", "videoId": video["id"]},
        "snippet": {"publishedAt": published, **shown, "description": brief, "publishTime": published},
    }


def _thread(comment: Json) -> Json:
    answers = replies_to(comment["id"]) or []
    thread = {
        **resource("commentThread", comment["id"]),
        "snippet": {
            "videoId": comment["snippet"]["videoId"],
            "topLevelComment": comment,
            "canReply": True,
            "totalReplyCount": len(answers),
            "isPublic": True,
        },
    }
    return {**thread, "replies": {"comments": answers[:INLINE_REPLIES]}} if answers else thread


def _playlist_item(placed: tuple[int, Json]) -> Json:
    """A video with its position in the playlist, as an item of it."""
    position, video = placed
    snippet = _snippet(video)
    kept = ("publishedAt", "channelId", "title", "description", "thumbnails", "channelTitle")
    playlist = uploads_playlist(str(snippet.get("channelId", "")))
    item_id = base64.urlsafe_b64encode(f"{playlist}.{video['id']}".encode()).decode().rstrip("=")
    return {
        **resource("playlistItem", item_id),
        "snippet": {
            **{key: snippet[key] for key in kept if key in snippet},
            "playlistId": playlist,
            "position": position,
            "resourceId": {"kind": "youtube#video", "videoId": video["id"]},
        },
        "contentDetails": {"videoId": video["id"], "videoPublishedAt": snippet.get("publishedAt", "")},
        "status": {"privacyStatus": "public"},
    }
