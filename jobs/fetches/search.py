"""The built-in job `search`: the videos that upstream finds for some words in a region, with full details.

Each page takes two steps: the search (expensive, and it returns little more than ids), then the videos by their ids (1
unit). The cursor keeps the ids that the first step found, so a refusal between the two does not cost another search.

Several searches take turns: a page of each, then the next page of each. The cursor has those that wait, and with them
the one whose turn it is, so a refusal costs none of them its turn. One that fails is left out of its pass: it would
keep the others out, in the next pass too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS, Place, with_next
from quota.jobs.job import Cursor, Page, checked_id, first_attempt, leave_out, resources
from quota.terms.arguments import texts


def _attempt(cursor: Cursor | None) -> str:
    return "videos.list" if cursor and "ids" in cursor else "search.list"


@first_attempt(_attempt)
def fetch(
    client: Any,
    region: str,
    cursor: Cursor | None,
    *,
    words: str | Sequence[str],
    order: str = "relevance",
    published_after: str | None = None,
    pages: int = 1_000_000,
) -> Page:
    """Take the next step. `words` is the query, or a list of queries; `order` and `published_after` are upstream's own
    parameters. A search has at most so many `pages`."""
    queries = (words,) if isinstance(words, str) else texts(words, "words:")
    turns: list[Place] = cursor["turns"] if cursor else [{"words": query} for query in dict.fromkeys(queries)]
    if not turns:
        return Page(complete=False)
    try:
        if cursor and "ids" in cursor:
            return _details(client, cursor["ids"], _next_turn(turns, cursor["next"], pages))
        return _search(client, turns, pages, regionCode=region or None, order=order, publishedAfter=published_after)
    except Exception as error:
        if len(queries) > 1:
            left = Page(cursor={"turns": turns[1:]} if turns[1:] else None, complete=False)
            leave_out(error, f"search {turns[0]['words']!r:.100}", left)
        raise


def _search(client: Any, turns: Sequence[Place], pages: int, **parameters: str | None) -> Page:
    call = client.search().list(
        part="id",
        type="video",
        q=turns[0]["words"],
        maxResults=PAGE_ITEMS,
        pageToken=turns[0].get("token"),
        **parameters,
    )
    answer = call.execute()
    token = answer.get("nextPageToken")
    found = [item.get("id") for item in answer.get("items", [])]
    # Each id gives its kind. Skip the ids of channels and playlists.
    ids = [checked_id(one["videoId"]) for one in found if isinstance(one, dict) and "videoId" in one]
    if ids:
        return Page(cursor={"ids": ids, "next": token, "turns": turns}, complete=False)
    return Page(cursor=_next_turn(turns, token, pages))


def _details(client: Any, ids: Sequence[str], cursor: Cursor | None) -> Page:
    answer = client.videos().list(part=PARTS, id=",".join(ids), maxResults=PAGE_ITEMS).execute()
    found = {video["id"]: video for video in resources(answer)}
    # Keep the order of the search. Upstream omits videos deleted since then, and promises no order here.
    videos = [found[video_id] for video_id in ids if video_id in found]
    return Page(videos=videos, ranked=True, cursor=cursor)


def _next_turn(turns: Sequence[Place], token: str | None, pages: int) -> Cursor | None:
    """The cursor after a page of the first search, which waits behind the others if it may have another page."""
    first, *waiting = turns
    had = first.get("pages", 0) + 1
    if token and had < pages and (following := with_next(first, "token", token)) is not None:
        waiting.append({**following, "pages": had})
    return {"turns": waiting} if waiting else None
