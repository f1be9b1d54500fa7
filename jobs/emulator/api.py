"""The answers of the emulated API's methods. HTTP and quota are handled elsewhere.

A catalogue answers videos, search, channels, playlistItems, commentThreads and comments. The other methods exist so
that their calls have a price: their lists are empty, their inserts and updates echo the resource, and their other
calls succeed without content.
"""

import base64
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quota.common.text import number_in
from quota.jobs.emulator import replies
from quota.jobs.emulator.catalogue import (
    INLINE_REPLIES,
    REGIONS,
    Catalogue,
    decode_id,
    encode_id,
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

# --- routes ------------------------------------------------------------------------------------------

_VERBS = {"GET": "list", "POST": "insert", "PUT": "update", "DELETE": "delete"}
_ROOT = "/youtube/v3/"
_UPLOAD_ROOT = "/upload" + _ROOT


def method_of(verb: str, path: str) -> str | None:
    """The API's name for a call: ("GET", "/youtube/v3/videos") is "videos.list"."""
    for root in (_ROOT, _UPLOAD_ROOT):
        if path.startswith(root):
            rest = path.removeprefix(root)
            action = _VERBS.get(verb, "")
            if action in replies.METHODS["collections"].get(rest, ()):
                return f"{rest}.{action}"
            if verb == "GET" and rest.startswith("captions/"):
                return "captions.download"
            name: str | None = replies.METHODS["actions"].get(f"{verb} {rest}")
            return name
    return None


def is_upload(path: str) -> bool:
    return path.startswith(_UPLOAD_ROOT)


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

    def parts(self) -> set[str]:
        """The parts that the call asks for. Raises Rejected if its method has no such part."""
        parts = [part.strip() for part in self.params.get("part", "").split(",") if part.strip()]
        if not parts:
            raise Rejected(replies.error("part_missing"))
        for part in parts:
            if part not in replies.METHODS["parts"][self.kind]:
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


class Api:
    """The API's methods over one catalogue. Safe to call from many threads."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._numbers = itertools.count()  # next() is atomic, so no two resources share one
        self._lists: dict[str, Callable[[Call, set[str]], Reply]] = {
            "videos.list": self._videos,
            "search.list": self._search,
            "channels.list": self._channels,
            "playlistItems.list": self._playlist_items,
            "commentThreads.list": self._comment_threads,
            "comments.list": self._comments,
        }

    def answer(self, call: Call) -> Reply:
        """The reply to a call. Raises Rejected if upstream would refuse the call."""
        if call.method in self._lists:
            return self._lists[call.method](call, call.parts())
        _, _, action = call.method.partition(".")
        if action == "list":
            if "part" not in call.params:
                raise Rejected(replies.error("part_missing"))
            return _listing(call, [])
        if action in ("insert", "update"):
            return Reply(200, self.stored(call))
        return Reply(204)

    def stored(self, call: Call) -> Json:
        """The resource that an insert or update returns: an echo, with an id."""
        item_id = str(call.body.get("id") or encode_id(next(self._numbers).to_bytes(6)))
        made = resource(replies.singular(call.kind), item_id)
        (item,) = _with_parts([made | call.body | made], set(call.params.get("part", "").split(",")))
        return item

    def _videos(self, call: Call, parts: set[str]) -> Reply:
        if "id" in call.params:
            videos_of_ids = [video for name in call.ids() if (video := self._catalogue.video(name))]
            return _listing(call, _with_parts(videos_of_ids, parts))
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
        call.required("id", "id, forHandle, forUsername, mine, managedByMe")
        channels = [channel for name in call.ids() if (channel := self._catalogue.channel(name))]
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
    start = 0
    if token := call.params.get("pageToken"):
        offset = decode_id(token, 4)
        if offset is None:
            raise Rejected(replies.error("page_token_invalid"))
        start = int.from_bytes(offset)
    end = start + size
    body: Json = _body(call, _with_parts(map(shape, items[start:end]), parts))
    if size and end < len(items):
        body["nextPageToken"] = encode_id(end.to_bytes(4))
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
