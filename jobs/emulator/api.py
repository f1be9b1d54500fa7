"""The answers of the emulated API's methods. HTTP and quota are handled elsewhere.

A catalogue answers videos, search, channels, playlistItems, commentThreads and comments. The other methods exist so
that their calls have a price: their lists are empty, their inserts and updates echo the resource, and their other
calls succeed without content.
"""

import base64
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quota.common.text import number_in
from quota.jobs.emulator import replies
from quota.jobs.emulator.catalogue import INLINE_REPLIES, REGIONS, Catalogue, decode_id, encode_id, replies_to, threads
from quota.jobs.emulator.replies import Json, Rejected, Reply, etag, or_reject, resource

MAX_IDS = 50

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

    @property
    def region(self) -> str | None:
        return self.params.get("regionCode") or None

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
            if part not in replies.METHODS["parts"].get(self.kind, parts):
                raise Rejected(replies.error("part_unknown", part=part))
        return set(parts)

    def page_size(self) -> int | None:
        """How many items the call asks for. None: all that it names."""
        sizes = replies.METHODS["pages"].get(self.kind)
        if sizes is None or (self.kind == "videos" and "id" in self.params):
            return None
        value, least, most = self.params.get("maxResults", str(sizes["default"])), sizes["least"], sizes["most"]
        return or_reject(number_in(value, least, most), "out_of_range", value=value, least=least, most=most)

    def required(self, name: str, expected: str) -> str:
        """A parameter without which upstream does not know what is asked for; `expected` are all that would do."""
        return or_reject(self.params.get(name), "filter_missing", expected=expected)


class Api:
    """The API's methods over one catalogue. Safe to call from many threads."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._numbers = itertools.count()  # next() is atomic, so no two resources share one

    def answer(self, call: Call) -> Reply:
        """The reply to a call. Raises Rejected if upstream would refuse the call."""
        _, _, action = call.method.partition(".")
        if action == "list":
            return Reply(200, self._page(call))
        if action in ("insert", "update"):
            return Reply(200, self.stored(call))
        return Reply(204)

    def stored(self, call: Call) -> Json:
        """The resource that an insert or update returns: an echo, with an id."""
        item_id = str(call.body.get("id") or encode_id(next(self._numbers).to_bytes(6)))
        made = replies.identity(replies.singular(call.kind), item_id)
        (item,) = _with_parts([made | call.body | made], set(call.params.get("part", "").split(",")))
        return item

    def _page(self, call: Call) -> Json:
        """One page of the list that the call asks for. Only that page's items get their shape."""
        parts, size = call.parts(), call.page_size()
        listed = self._listed(call)
        start, size = 0, len(listed) if size is None else size
        if token := call.params.get("pageToken"):
            start = int.from_bytes(or_reject(decode_id(token, 4), "page_token_invalid"))
        end = start + size
        items = _with_parts([_shown(call.kind, item) for item in listed[start:end]], parts)
        kind = f"youtube#{replies.singular(call.kind)}ListResponse"
        body = {"kind": kind, "etag": etag(kind, *(str(item.get("etag", "")) for item in items)), "items": items}
        if size and end < len(listed):
            body["nextPageToken"] = encode_id(end.to_bytes(4))
        if call.kind == "search":
            body["regionCode"] = call.region or "US"
        return {**body, "pageInfo": {"totalResults": len(listed), "resultsPerPage": size}}

    def _listed(self, call: Call) -> Sequence[Any]:
        """All items that the call lists."""
        catalogue = self._catalogue
        match call.kind:
            case "videos":
                return self._videos(call)
            case "search":  # it finds only videos: a search for other types returns nothing
                if call.region not in (None, *REGIONS):
                    raise Rejected(replies.error("region_invalid"))
                if "video" not in call.params.get("type", "video").split(","):
                    return ()
                return catalogue.search(call.params.get("q", ""), call.params.get("channelId"))
            case "channels":
                call.required("id", "id, forHandle, forUsername, mine, managedByMe")
                return [channel for name in call.ids() if (channel := catalogue.channel(name))]
            case "playlistItems":
                # The playlists are the channels' uploads. Their ids are "UU" and the rest of the channel's id.
                playlist = call.required("playlistId", "id, playlistId")
                videos = catalogue.uploads("UC" + playlist[2:]) if playlist.startswith("UU") else None
                return list(enumerate(or_reject(videos, "playlist_not_found")))
            case "commentThreads":
                name = call.required("videoId", "allThreadsRelatedToChannelId, id, videoId")
                return or_reject(threads(or_reject(catalogue.video(name), "video_not_found")), "comments_disabled")
            case "comments":
                parent = call.required("parentId", "id, parentId")
                or_reject(catalogue.video(parent.partition(".")[0]), "comment_not_found")
                return or_reject(replies_to(parent), "comment_not_found")
            case _:
                return ()

    def _videos(self, call: Call) -> Sequence[Json]:
        if "id" in call.params:
            return [video for name in call.ids() if (video := self._catalogue.video(name))]
        if call.required("chart", "myRating, chart, id") != "mostPopular":
            raise Rejected(replies.error("chart_not_found"))
        videos = or_reject(self._catalogue.chart(call.region), "region_invalid")
        category = call.params.get("videoCategoryId", "0")
        if category == "0":
            return videos
        of_category = [item for item in videos if _snippet(item).get("categoryId") == category]
        return or_reject(of_category or None, "chart_not_found")


# --- shapes ------------------------------------------------------------------------------------------


def _with_parts(items: Iterable[Json], parts: set[str]) -> list[Json]:
    wanted = {"kind", "etag", "id", *parts}
    return [{key: value for key, value in item.items() if key in wanted} for item in items]


def _snippet(video: Json) -> Json:
    """The video's snippet; a recording may lack this part."""
    snippet = video.get("snippet")
    return snippet if isinstance(snippet, dict) else {}


def _shown(kind: str, item: Any) -> Json:
    """An item as the list of this kind shows it. Some lists show another resource, or a video with its position."""
    match kind:
        case "search":
            snippet = _snippet(item)
            # A search result shows the beginning of the description on one line.
            brief = " ".join(snippet.get("description", "").split())[:120]
            return resource("searchResult", item["id"], **(snippet | {"brief": brief}))
        case "commentThreads":
            answers = replies_to(item["id"]) or []
            inline = {"comments": answers[:INLINE_REPLIES]} if answers else None
            values = {"comment": item, "answers": len(answers), "replies": inline}
            return resource("commentThread", item["id"], **item["snippet"], **values)
        case "playlistItems":
            position, video = item
            snippet = _snippet(video)
            playlist = "UU" + str(snippet.get("channelId", ""))[2:]
            item_id = base64.urlsafe_b64encode(f"{playlist}.{video['id']}".encode()).decode().rstrip("=")
            values = {"playlist": playlist, "position": position, "video_id": video["id"]}
            return resource("playlistItem", item_id, **(snippet | values))
        case _:
            return dict(item)
