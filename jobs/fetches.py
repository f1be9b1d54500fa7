"""The built-in fetch functions, each under the name of its job: each call makes one request to upstream for one region.

    trending    a region's chart of most popular videos
    channels    details of channels
    videos      new details of the stored videos
    search      the videos that upstream finds for some words
    uploads     the videos that channels publish
    comments    the comments under videos

`uploads` and `comments` read many long lists: a channel's videos, a video's comments. `Walks` chooses the next list.

A walk reads one list, the newest page first, and may take many runs. Its *place* is a row, stored with each page. So
nothing is lost if `pages`, a refusal or a kill ends the run. A pass reads the first page of every list once, and first
the lists with the most expected new items. Every other call continues the oldest open walk, so that neither new nor old
items wait for all of the others.

A walk ends with its list. If a walk read the whole list within half of the retention, the next ones end at the first
page whose items are all stored. So a walk misses nothing below the fetched pages, and reads each list in full before
its items expire.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Any

from quota.clients.upstream_errors import answer_in, error_in
from quota.jobs.job import Cursor, Page, Shape, checked_id, first_attempt, is_id, leave_out, marked, resources
from quota.jobs.store.rows import channel_row, count_or_none, part, text_or_none
from quota.jobs.store.store import Store
from quota.terms.arguments import texts
from quota.terms.limits import HOUR_MS

PARTS = "snippet,statistics,contentDetails"
"""The parts of a video or a channel that a call asks for."""

PAGE_ITEMS = 50
"""Upstream returns at most this many videos or channels in one page."""

PAGE_COMMENTS = 100
"""The most comments that upstream returns in one page."""

Ids = str | Sequence[str] | None
"""An option with an id, or with several."""

Place = dict[str, Any]
"""Where one list stands: its `id`, and the number of its last `step`. An open walk also has the time when it was
`opened`, the `token` of its next page, and its last tokens (`seen_token`). `walked`: when the last complete full walk
was opened. `failed`: the step at which its last call failed; this pass does not try it again."""


@marked(shapes={"category": Shape("[0-9]{1,6}", "a category id, like '10'")})
@first_attempt("videos.list")
def trending(client: Any, region: str, cursor: Cursor | None, *, category: str | None = None) -> Page:
    """The next page of a region's chart: 50 videos for 1 unit. `category` narrows it to one category id ("10" is
    music)."""
    answer = _listed(
        client.videos(),
        part=PARTS,
        chart="mostPopular",
        regionCode=region or None,
        videoCategoryId=category,
        pageToken=cursor["token"] if cursor else None,
    )
    token, videos = answer.get("nextPageToken"), resources(answer)
    unknown = [region] if region and not (videos or token or cursor) else []
    return Page(videos=videos, ranked=True, cursor={"token": token} if token else None, unknown=unknown)


def _listed(resource: Any, most: int = PAGE_ITEMS, /, **parameters: str | None) -> Mapping[str, Any]:
    """Upstream's answer to a list call: a page of at most so many items."""
    answer: Mapping[str, Any] = resource.list(maxResults=most, **parameters).execute()
    return answer


_CHANNEL = Shape("UC[A-Za-z0-9_-]{22}", "the id of a channel, like 'UC_x5XG1OV2P6uZZ5FSM9Ttw'")

_RANKED_CHANNELS = f"""
    WITH jobs AS (SELECT DISTINCT job FROM checkpoints WHERE region = :region),
    newest AS (SELECT job, ifnull((SELECT taken_at_ms FROM charts WHERE job = j.job AND region = :region),
        (SELECT max(taken_at_ms) FROM rankings WHERE job = j.job AND region = :region)) AS ms FROM jobs j)
    SELECT DISTINCT v.channel_id FROM newest n
    JOIN rankings r ON r.job = n.job AND r.region = :region AND r.taken_at_ms = n.ms
    JOIN videos v ON v.video_id = r.video_id
    WHERE v.channel_id > :after AND typeof(v.channel_id) = 'text' ORDER BY v.channel_id LIMIT {PAGE_ITEMS}
"""  # noqa: S608  # a constant
"""The channels in the region's newest ranking of each job. An incomplete ranking counts only while the job has no
complete one."""


@marked(names={"ids": _CHANNEL})
@first_attempt("channels.list")
def channels(client: Any, region: str, cursor: Cursor | None, *, store: Store, ids: Ids = None) -> Page:
    """The next 50 channels for 1 unit, from `ids` or else from the store's newest complete rankings of the region.

    Without channels it sends no call and charges nothing. The cursor is the last id, not a position, because the
    rankings may change between two runs.
    """
    after = str(cursor["after"]) if cursor else ""
    if ids is None:
        wanted = [name for (name,) in store.select(_RANKED_CHANNELS, region=region, after=after)]
    else:
        wanted = sorted({name for name in texts(ids, "ids:") if name > after})[:PAGE_ITEMS]
    if not wanted:
        return Page(complete=False)
    described = resources(_listed(client.channels(), part=PARTS, id=",".join(wanted)))
    unknown = set() if ids is None else {*wanted} - {channel["id"] for channel in described}
    more = len(wanted) == PAGE_ITEMS
    return Page(channels=described, cursor={"after": wanted[-1]} if more else None, unknown=sorted(unknown))


_ASKED_LONGEST_AGO = f"""
    SELECT video_id FROM videos WHERE (asked_ms IS NULL OR asked_ms < :began_ms OR asked_ms > :ahead_ms)
        AND (:region = '' OR video_id IN (SELECT video_id FROM rankings WHERE region = :region))
    ORDER BY asked_ms, id LIMIT {PAGE_ITEMS}
"""  # noqa: S608  # a constant


@first_attempt("videos.list")
def videos(client: Any, region: str, cursor: Cursor | None, *, store: Store) -> Page:
    """New details of the next 50 stored videos (in the region) for 1 unit, the longest waiting first. Without videos it
    sends no call and charges nothing.

    A video counts as asked for even if upstream no longer has it. Then it expires.
    """
    now_ms = store.now_ms()
    step = cursor or {"began_ms": now_ms, "step": 0}
    step = {**step, "began_ms": min(index(step["began_ms"]), now_ms)}  # the clock may have gone back since
    when = {"began_ms": step["began_ms"], "ahead_ms": now_ms + HOUR_MS}
    ids = [video_id for (video_id,) in store.select(_ASKED_LONGEST_AGO, region=region, **when)]
    if not ids:
        return Page(complete=False)
    answered = _videos_of(client, ids)
    described = [answered.get(video_id, {"id": video_id}) for video_id in ids]
    return Page(videos=described, again=True, cursor={**step, "step": step["step"] + 1})


def _videos_of(client: Any, ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Upstream's details of these videos, by id, without deleted videos."""
    answer = _listed(client.videos(), part=PARTS, id=",".join(ids))
    return {video["id"]: video for video in resources(answer)}


# -- search ----------------------------------------------------------------------------------------------------------


_ORDERS = "date|rating|relevance|title|videoCount|viewCount"


@marked(
    names={"words": None},
    shapes={
        "order": Shape(_ORDERS, f"one of {_ORDERS.replace('|', ', ')}"),
        "published_after": Shape(
            r"\d{4}-(?!02-3|(0[469]|11)-31)(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
            r"T([01]\d|2[0-3])(:[0-5]\d){2}(\.\d+)?(Z|[+-]\d\d:\d\d)",
            "a time like '2026-01-01T00:00:00Z'",
        ),
    },
)
@first_attempt(lambda cursor: "videos.list" if cursor and "ids" in cursor else "search.list")
def search(
    client: Any,
    region: str,
    cursor: Cursor | None,
    *,
    words: str | Sequence[str],
    order: str = "relevance",
    published_after: str | None = None,
    pages: int = 1_000_000,
) -> Page:
    """The videos that upstream finds for some words in a region, with full details. `words` is the query, or a list of
    queries; `order` and `published_after` are upstream's own parameters. A search has at most `pages` pages.

    Each page takes two steps: the search (expensive, and it returns little more than ids), then the videos by their
    ids (1 unit). The cursor keeps the ids of the first step, so a refusal between the two does not cost another search.

    Several searches take turns: a page of each, then the next page of each. The cursor has the searches that wait, the
    current one first, so a refusal costs no search its turn. A pass goes on without a search that fails: it would stop
    the others, in the next pass too.
    """
    queries = texts(words, "words:")
    turns: list[Place] = cursor["turns"] if cursor else [{"words": query} for query in queries]
    if not turns:
        return Page(complete=False)
    try:
        if cursor and "ids" in cursor:
            described = _videos_of(client, cursor["ids"])
            # Keep the order of the search. Upstream omits videos deleted since then, and promises no order here.
            ranked = [described[video_id] for video_id in cursor["ids"] if video_id in described]
            return Page(videos=ranked, ranked=True, cursor=_next_turn(turns, cursor["next"], pages))
        return _search(client, turns, pages, regionCode=region or None, order=order, publishedAfter=published_after)
    except Exception as error:
        if len(queries) > 1:
            left = Page(cursor={"turns": turns[1:]} if turns[1:] else None, complete=False)
            leave_out(error, f"search {turns[0]['words']!r:.100}", left)
        raise


def _search(client: Any, turns: Sequence[Place], pages: int, **parameters: str | None) -> Page:
    turn, begun = turns[0]["words"], turns[0].get("token")
    answer = _listed(client.search(), part="id", type="video", q=turn, pageToken=begun, **parameters)
    token = answer.get("nextPageToken")
    names = [item.get("id") for item in answer.get("items", [])]
    # Each id gives its kind. Skip the ids of channels and playlists.
    ids = [checked_id(name["videoId"]) for name in names if isinstance(name, dict) and "videoId" in name]
    if ids:
        return Page(cursor={"ids": ids, "next": token, "turns": turns}, complete=False)
    region, may_have = parameters["regionCode"], token or begun or parameters["publishedAfter"]
    unknown = [] if may_have else [f"{turn} in {region}" if region else turn]
    return Page(cursor=_next_turn(turns, token, pages), unknown=unknown)


def _next_turn(turns: Sequence[Place], token: str | None, pages: int) -> Cursor | None:
    """The cursor after a page of the first search. If that may have another page, it goes to the end of the queue."""
    first, *waiting = turns
    had = first.get("pages", 0) + 1
    if token and had < pages and (following := with_next(first, "token", token)) is not None:
        waiting.append({**following, "pages": had})
    return {"turns": waiting} if waiting else None


# -- uploads ---------------------------------------------------------------------------------------------------------

_STORED_CHANNELS = """
    SELECT channel_id AS id FROM videos WHERE channel_id IS NOT NULL AND (:region = '' OR video_id IN
        (SELECT video_id FROM rankings WHERE region = :region))
    UNION SELECT channel_id FROM channels WHERE :region = ''
"""
_NAMED_CHANNELS = "SELECT DISTINCT value AS id FROM json_each(:ids)"
_UPLOADS = """
    SELECT wanted.id, video_count, published_at FROM ({wanted}) wanted
    LEFT JOIN channels ON channels.channel_id = wanted.id
"""
_PLAYLISTS = """
    SELECT channel_id, uploads_id FROM channels
    WHERE channel_id IN (SELECT value FROM json_each(:ids)) AND uploads_id <> ''
"""
_WITH_DETAILS = """
    SELECT video_id, duration IS NOT NULL FROM videos WHERE video_id IN (SELECT value FROM json_each(:ids))
"""


@marked(names={"channels": _CHANNEL})
@first_attempt("playlistItems.list")
def uploads(client: Any, region: str, cursor: Cursor | None, *, store: Store, channels: Ids = None) -> Page:
    """The next page of the videos of one channel, for 1 unit each 50: of `channels`, or of all channels in the store
    (in the region).

    Upstream has a playlist of each channel's videos. Its id comes with the channel's details, at 1 unit for 50
    channels, and the store keeps it. A playlist says little about its videos: the job `videos` fetches the rest.
    """
    walks = _walks_of_uploads(store, region, cursor, channels)
    if not walks.places:
        return Page(complete=False)
    ids = [place["id"] for place in walks.places]
    playlists = dict(store.select(_PLAYLISTS, ids=json.dumps(ids)))
    if ids[0] not in playlists:
        # Find the playlists of these channels. A channel without a playlist has no further call in this pass.
        lacking = [channel for channel in ids if channel not in playlists]
        answered = resources(_listed(client.channels(), part=PARTS, id=",".join(lacking)))
        have = {channel["id"] for channel in answered if channel_row(channel, 0)["uploads_id"]}
        unknown = {*lacking} - {channel["id"] for channel in answered}
        return walks.page(*({"id": name} for name in lacking if name not in have), channels=answered, unknown=unknown)
    try:
        return _uploaded(client, store, walks, playlists[ids[0]])
    except Exception as error:
        return walks.failed(error, "channel", {"id": ids[0]})


def _walks_of_uploads(store: Store, region: str, cursor: Cursor | None, channels: Ids = None) -> Walks:
    names = None if channels is None else json.dumps(texts(channels, "channels:"))
    wanted = _STORED_CHANNELS if channels is None else _NAMED_CHANNELS
    return Walks(store, "places_of_uploads", _UPLOADS.format(wanted=wanted), cursor, ids=names, region=region)


def _uploaded(client: Any, store: Store, walks: Walks, playlist: str) -> Page:
    place = walks.places[0]
    parts, token = "snippet,contentDetails", place.get("token")
    answer = _listed(client.playlistItems(), part=parts, playlistId=playlist, pageToken=token)
    items = [_uploaded_video(item) for item in _usable(answer)]
    listed = {video["id"]: video for video in items if video is not None}
    stored = dict(store.select(_WITH_DETAILS, ids=json.dumps([*listed])))
    # If the store has more details of a video than the playlist, only note that a list had it.
    page_videos = [{"id": name} if stored.get(name) else video for name, video in listed.items()]
    return walks.page(walks.moved(place, [*listed], answer.get("nextPageToken"), stored), videos=page_videos)


def _uploaded_video(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """The video of a playlist's item, with the item's details. None if the video is private or deleted."""
    details, source = item.get("contentDetails"), item.get("snippet")
    if not isinstance(details, dict) or not isinstance(source, dict) or "videoPublishedAt" not in details:
        return None
    snippet = {name: source.get(name) for name in ("title", "description", "channelId", "channelTitle", "thumbnails")}
    return {
        "id": checked_id(details.get("videoId")),
        "snippet": {**snippet, "publishedAt": details["videoPublishedAt"]},
    }


def _with_ids(items: Iterable[Any]) -> list[Mapping[str, Any]]:
    """The items that have an id. An item without an id does not stop its list."""
    return [item for item in items if isinstance(item, Mapping) and is_id(item.get("id"))]


def _usable(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The items of an answer that have an id. Raises BadAnswer if there are items and none has an id."""
    return _with_ids(answer.get("items", [])) or resources(answer)


# -- comments --------------------------------------------------------------------------------------------------------

# Upstream counts no comments where they are disabled.
_STORED_VIDEOS = """
    SELECT video_id, comment_count, published_at FROM videos WHERE (comment_count > 0 OR duration IS NULL)
        AND (:region = '' OR video_id IN (SELECT video_id FROM rankings WHERE region = :region))
"""
_NAMED_VIDEOS = """
    SELECT value, comment_count, published_at FROM (SELECT DISTINCT value FROM json_each(:ids))
    LEFT JOIN videos ON video_id = value
"""
_REPLY_COUNTS = """
    SELECT key, json_extract(data, '$.reply_count') FROM rows
    WHERE name = 'comments' AND key IN (SELECT value FROM json_each(:ids))
"""


@marked(names={"videos": Shape("[A-Za-z0-9_-]{11}", "the id of a video, like 'dQw4w9WgXcQ'")})
@first_attempt("commentThreads.list")
def comments(client: Any, region: str, cursor: Cursor | None, *, store: Store, videos: Ids = None) -> Page:
    """The next page of comments under one video, for 1 unit each 100 threads: of `videos`, or of all videos in the
    store (in the region). The rows go into the table `comments`.

    A thread comes with some of its replies. If it has more, the next steps fetch them before the next page of threads:
    100 for 1 unit.
    """
    walks = _walks_of_comments(store, region, cursor, videos)
    if not walks.places:
        return Page(complete=False)
    place = walks.places[0]
    threads = place.get("threads")
    passed = _after_replies(place, None) if threads else {"id": place["id"]}
    try:
        return _replies(client, walks, place) if threads else _threads(client, store, walks, place)
    except Exception as error:
        return walks.failed(error, "video", passed)


def _walks_of_comments(store: Store, region: str, cursor: Cursor | None, videos: Ids = None) -> Walks:
    names = None if videos is None else json.dumps(texts(videos, "videos:"))
    lists = _STORED_VIDEOS if videos is None else _NAMED_VIDEOS
    return Walks(store, "places_of_comments", lists, cursor, ids=names, region=region)


def _threads(client: Any, store: Store, walks: Walks, place: Place) -> Page:
    answer = _listed(
        client.commentThreads(),
        PAGE_COMMENTS,
        part="snippet,replies",
        videoId=place["id"],
        order="time",
        textFormat="plainText",
        pageToken=place.get("token"),
    )
    threads = {thread["id"]: thread for thread in _usable(answer)}
    stored_counts = dict(store.select(_REPLY_COUNTS, ids=json.dumps([*threads])))
    rows: dict[str, dict[str, Any]] = {}
    waiting = []
    for name, thread in threads.items():
        snippet = part(thread, "snippet")
        count = count_or_none(snippet.get("totalReplyCount"))
        inline = _with_ids(part(thread, "replies").get("comments", []))
        rows[name] = {**_comment_row(part(snippet, "topLevelComment"), place["id"]), "id": name, "reply_count": count}
        rows |= {reply["id"]: _comment_row(reply, place["id"], name) for reply in inline}
        if count is not None and count > len(inline) and (walks.is_full(place) or stored_counts.get(name) != count):
            waiting.append(name)
    here = walks.moved(place, [*threads], answer.get("nextPageToken"), stored_counts)
    if waiting:
        here = {**here, "opened": here.get("opened") or store.now_ms(), "threads": waiting}
    return walks.page(here, rows={"comments": [*rows.values()]})


def _replies(client: Any, walks: Walks, place: Place) -> Page:
    """The next replies of the first thread that lacks some."""
    thread = place["threads"][0]
    answer = _listed(
        client.comments(),
        PAGE_COMMENTS,
        part="snippet",
        parentId=thread,
        textFormat="plainText",
        pageToken=place.get("replies"),
    )
    rows = {reply["id"]: _comment_row(reply, place["id"], thread) for reply in _usable(answer)}
    return walks.page(_after_replies(place, answer.get("nextPageToken")), rows={"comments": [*rows.values()]})


def _after_replies(place: Place, token: str | None) -> Place:
    """The place after a page of replies. When no thread waits for replies, the next page of threads comes."""
    if token and (following := with_next(place, "replies", token)) is not None:
        return following
    here = {name: value for name, value in place.items() if name not in ("threads", "replies", "seen_replies")}
    if waiting := place["threads"][1:]:
        return {**here, "threads": waiting}
    return here if "token" in here else {**here, "opened": None}


def _comment_row(comment: Mapping[str, Any], video: str, thread: str | None = None) -> dict[str, Any]:
    snippet = part(comment, "snippet")
    return {
        "id": comment.get("id"),
        "video_id": video,
        "parent_id": thread,
        "text": text_or_none(snippet.get("textDisplay")),
        "author": text_or_none(snippet.get("authorDisplayName")),
        "author_channel_id": text_or_none(part(snippet, "authorChannelId").get("value")),
        "like_count": count_or_none(snippet.get("likeCount")),
        "reply_count": None,
        "published_at": text_or_none(snippet.get("publishedAt")),
        "updated_at": text_or_none(snippet.get("updatedAt")),
    }


# -- walks through many long lists -------------------------------------------------------------------------------------

KEPT_TOKENS = 20
"""How many tokens of its last pages a walk keeps. A token that comes again ends the walk."""

_PLACES = """
    WITH lists (id, amount, since) AS ({lists}),
    places AS (
        SELECT l.id, ifnull(r.data, json_object('id', l.id)) AS data, ifnull(r.refreshed_ms, 0) AS seen_ms,
            ifnull(json_extract(r.data, '$.step'), 0) AS step, json_extract(r.data, '$.opened') AS opened,
            ifnull(json_extract(r.data, '$.failed'), 0) AS failed,
            max(ifnull(l.amount, 0), 1)
                / max(1.0, :now_ms / 86400000.0 + 2440587.5 - ifnull(julianday(l.since), 0)) AS a_day
        FROM lists l LEFT JOIN rows r ON r.name = :table AND r.key = l.id)
    SELECT data FROM places WHERE
"""
_OPEN = "opened IS NOT NULL AND failed < :began ORDER BY opened, id LIMIT 1"
_DUE = f"opened IS NULL AND step < :began ORDER BY a_day * (:now_ms - seen_ms) DESC, id LIMIT {PAGE_ITEMS}"
_LAST = "SELECT ifnull(max(json_extract(data, '$.step')), 0) FROM rows WHERE name = :table"


class Walks:
    """The walks of one job. Their places are rows of `table`. `lists` is SQL for the `id` of each list, and the
    `amount` of items that it got `since` a time. `values` are the SQL's parameters.

    Steps are numbered over all passes: `began` is the first step of the cursor's pass.
    """

    def __init__(self, store: Store, table: str, lists: str, cursor: Cursor | None, **values: object) -> None:
        self._store = store
        self.table = table
        self._named = values.get("ids") is not None
        if cursor is None:
            first = store.select(_LAST, table=table)[0][0] + 1
            cursor = {"began": first, "step": first}
        self._began, self._step = index(cursor["began"]), index(cursor["step"])
        values = {"table": table, "began": self._began, "now_ms": store.now_ms(), **values}
        sql = _PLACES.format(lists=lists)
        self._all = partial(store.select, sql + "1", **values)
        due = [json.loads(data) for (data,) in store.select(sql + _DUE, **values)]
        begun = [json.loads(data) for (data,) in store.select(sql + _OPEN, **values)]
        self.places: list[Place] = begun if begun and (self._step % 2 or not due) else due
        """The place of this step. If this pass has not read its list yet, also the places of the next lists."""

    def ids(self) -> list[str]:
        """The lists of the job in its region, whether this pass has read them or not."""
        return [json.loads(data)["id"] for (data,) in self._all()]

    def page(self, *places: Place, unknown: Collection[str] = (), **more: Any) -> Page:
        """The page of this step, with these places after it. It names the lists for which upstream has nothing, if they
        are in the configuration."""
        stand = {self.table: [{**place, "step": self._step} for place in places]}
        cursor = {"began": self._began, "step": self._step + 1}
        return Page(places=stand, cursor=cursor, unknown=sorted(unknown) if self._named else (), **more)

    def failed(self, error: Exception, what: str, passed: Place) -> Page:
        """The page of a step whose call failed, with the place `passed`, if upstream refused this list alone. Else
        raises the error; the pass may go on with other lists."""
        answer = answer_in(error)
        reasons = () if answer is None else error_in(answer.body).reasons
        if reason := next((reason for reason in reasons if reason in _PASSED_OVER), ""):
            return self.page(passed, unknown={passed["id"]} if reason in _NOTHING_THERE else ())
        place = {**self.places[0], "failed": self._step}
        leave_out(error, f"{what} {place['id']}", self.page(place, complete=False))
        raise error

    def is_full(self, place: Place) -> bool:
        """Whether its walk reads the list to the end, even if all items of a page are stored."""
        now_ms = self._store.now_ms()
        return not now_ms - self._store.retention_ms // 2 <= place.get("walked", 0) <= now_ms

    def moved(self, place: Place, ids: Sequence[str], token: str | None, stored: Container[object]) -> Place:
        """The place after a page with the items `ids`; the store already has the items in `stored`."""
        full = self.is_full(place)
        if not full and ids and all(name in stored for name in ids):
            token = None
        opened = place.get("opened") or self._store.now_ms()
        if token is not None:
            following = with_next(place, "token", token)
            return {"id": place["id"]} if following is None else {**following, "opened": opened}
        return {"id": place["id"], "walked": opened if full else place["walked"]}


WALKS: Mapping[str, Callable[..., Walks]] = {"uploads": _walks_of_uploads, "comments": _walks_of_comments}
"""The walks of each job that has some."""


def with_next(place: Place, name: str, token: str) -> Place | None:
    """The place with the token of its next page under this name; None if upstream's pages form a circle."""
    seen = place.get(f"seen_{name}", [])
    return None if token in seen else {**place, name: token, f"seen_{name}": [*seen, token][-KEPT_TOKENS:]}


_PASSED_OVER = frozenset(
    (
        "channelNotFound", "commentNotFound", "commentThreadNotFound", "commentsDisabled", "invalidPageToken",
        "operationNotSupported", "playlistItemsNotAccessible", "playlistNotFound", "playlistOperationUnsupported",
        "processingFailure", "videoNotFound",
    )
)  # fmt: skip
"""Reasons that concern one list or page alone, from upstream's pages on playlistItems.list, commentThreads.list and
comments.list: the others may go on. If such an error failed the region, the same list would come first in the next
pass, and the others never."""

_NOTHING_THERE = frozenset(
    ("channelNotFound", "commentsDisabled", "playlistItemsNotAccessible", "playlistNotFound", "videoNotFound")
)
