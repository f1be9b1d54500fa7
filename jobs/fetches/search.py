"""The built-in job `search`: the videos that upstream finds for some words in a region, with full details.

Each page takes two steps: the search (expensive, and it returns little more than ids), then the videos by their ids (1
unit). The cursor keeps the ids that the first step found, so a refusal between the two does not cost another search.
"""

from __future__ import annotations

from typing import Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS
from quota.jobs.job import Cursor, Page, checked_id, first_attempt, resources


def _attempt(cursor: Cursor | None) -> str:
    return "videos.list" if cursor and "ids" in cursor else "search.list"


@first_attempt(_attempt)
def fetch(
    client: Any,
    region: str,
    cursor: Cursor | None,
    *,
    words: str,
    order: str = "relevance",
    published_after: str | None = None,
) -> Page:
    """Take the next step. `words` is the query; `order` and `published_after` are upstream's own parameters."""
    if cursor and "ids" in cursor:
        return _details(client, cursor)
    answer = (
        client.search()
        .list(
            part="id",
            type="video",
            q=words,
            regionCode=region or None,
            order=order,
            publishedAfter=published_after,
            maxResults=PAGE_ITEMS,
            pageToken=cursor["token"] if cursor else None,
        )
        .execute()
    )
    token = answer.get("nextPageToken")
    found = [item.get("id") for item in answer.get("items", [])]
    # Each id gives its kind. Skip the ids of channels and playlists.
    ids = [checked_id(one["videoId"]) for one in found if isinstance(one, dict) and "videoId" in one]
    if ids:
        return Page(cursor={"ids": ids, "next": token}, complete=False)
    return Page(cursor={"token": token} if token else None)


def _details(client: Any, cursor: Cursor) -> Page:
    ids, token = cursor["ids"], cursor["next"]
    answer = client.videos().list(part=PARTS, id=",".join(ids), maxResults=PAGE_ITEMS).execute()
    found = {video["id"]: video for video in resources(answer)}
    # Keep the order of the search. Upstream omits videos deleted since then, and promises no order here.
    videos = [found[video_id] for video_id in ids if video_id in found]
    return Page(videos=videos, ranked=True, cursor={"token": token} if token else None)
