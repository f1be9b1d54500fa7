"""The built-in job `comments`: what people say under videos, 100 threads for 1 unit, into the table `comments`.

A thread comes with some of its replies. Where it has more, they are asked for before the next page of threads: 100 for
1 unit. How the lists are walked is in `quota.jobs.fetches.walks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quota.jobs.fetches.walks import Place, Walks, usable, with_ids, with_next
from quota.jobs.job import Cursor, Page, first_attempt
from quota.jobs.store.rows import count_or_none, part, text_or_none
from quota.jobs.store.store import Store
from quota.terms.arguments import texts

PAGE_COMMENTS = 100
"""Upstream returns at most this many in one page."""

# Upstream counts no comments where they are disabled.
_KNOWN = """
    SELECT video_id, comment_count, published_at FROM videos WHERE (comment_count > 0 OR duration IS NULL)
        AND (:region = '' OR video_id IN (SELECT video_id FROM rankings WHERE region = :region))
"""
_NAMED = """
    SELECT value, comment_count, published_at FROM (SELECT DISTINCT value FROM json_each(:ids))
    LEFT JOIN videos ON video_id = value
"""
_STORED = """
    SELECT key, json_extract(data, '$.reply_count') FROM rows
    WHERE name = 'comments' AND key IN (SELECT value FROM json_each(:ids))
"""


@first_attempt("commentThreads.list")
def fetch(
    client: Any, region: str, cursor: Cursor | None, *, store: Store, videos: str | Sequence[str] | None = None
) -> Page:
    """The next page of one video, of `videos` or else of all that the store has (in the region)."""
    names = None if videos is None else json.dumps(texts(videos, "videos:"))
    lists = _KNOWN if videos is None else _NAMED
    walks = Walks(store, "places_of_comments", lists, cursor, ids=names, region=region)
    if not walks.places:
        return Page(complete=False)
    place = walks.places[0]
    threads = place.get("threads")
    try:
        return _replies(client, walks, place) if threads else _threads(client, store, walks, place)
    except Exception as error:
        return walks.failed(error, "video", _after_replies(place, None) if threads else {"id": place["id"]})


def _threads(client: Any, store: Store, walks: Walks, place: Place) -> Page:
    call = client.commentThreads().list(
        part="snippet,replies",
        videoId=place["id"],
        order="time",
        textFormat="plainText",
        maxResults=PAGE_COMMENTS,
        pageToken=place.get("token"),
    )
    answer = call.execute()
    found = {thread["id"]: thread for thread in usable(answer)}
    known = dict(store.select(_STORED, ids=json.dumps([*found])))
    comments: dict[str, dict[str, Any]] = {}
    waiting = []
    for name, thread in found.items():
        told = part(thread, "snippet")
        count = count_or_none(told.get("totalReplyCount"))
        inline = with_ids(part(thread, "replies").get("comments", []))
        comments[name] = {**_row(part(told, "topLevelComment"), place["id"]), "id": name, "reply_count": count}
        comments |= {reply["id"]: _row(reply, place["id"], name) for reply in inline}
        if count is not None and count > len(inline) and (walks.is_full(place) or known.get(name) != count):
            waiting.append(name)
    here = walks.moved(place, [*found], answer.get("nextPageToken"), known)
    if waiting:
        here = {**here, "opened": here.get("opened") or store.now_ms(), "threads": waiting}
    return walks.page(here, rows={"comments": [*comments.values()]})


def _replies(client: Any, walks: Walks, place: Place) -> Page:
    """The next replies of the first thread that waits for its own."""
    thread = place["threads"][0]
    call = client.comments().list(
        part="snippet",
        parentId=thread,
        textFormat="plainText",
        maxResults=PAGE_COMMENTS,
        pageToken=place.get("replies"),
    )
    answer = call.execute()
    comments = {reply["id"]: _row(reply, place["id"], thread) for reply in usable(answer)}
    return walks.page(_after_replies(place, answer.get("nextPageToken")), rows={"comments": [*comments.values()]})


def _after_replies(place: Place, token: str | None) -> Place:
    """The place after a page of replies. When no thread waits any longer, the next page of threads comes."""
    if token and (following := with_next(place, "replies", token)) is not None:
        return following
    here = {name: value for name, value in place.items() if name not in ("threads", "replies", "seen_replies")}
    if waiting := place["threads"][1:]:
        return {**here, "threads": waiting}
    return here if "token" in here else {**here, "opened": None}


def _row(comment: Mapping[str, Any], video: str, thread: str | None = None) -> dict[str, Any]:
    told = part(comment, "snippet")
    return {
        "id": comment.get("id"),
        "video_id": video,
        "parent_id": thread,
        "text": text_or_none(told.get("textDisplay")),
        "author": text_or_none(told.get("authorDisplayName")),
        "author_channel_id": text_or_none(part(told, "authorChannelId").get("value")),
        "like_count": count_or_none(told.get("likeCount")),
        "reply_count": None,
        "published_at": text_or_none(told.get("publishedAt")),
        "updated_at": text_or_none(told.get("updatedAt")),
    }
