"""The built-in job `search`: the videos that upstream finds for some words in a region, with full details.

Each page takes two steps: the search (expensive, and it returns little more than ids), then the videos by their ids (1
unit). The cursor keeps the ids that the first step found, so a refusal between the two does not cost another search.

Several searches take turns: a page of each, then the next page of each. The cursor has those that wait, and with them
the one whose turn it is, so a refusal costs none of them its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS
from quota.jobs.job import Cursor, Page, checked_id, first_attempt, resources
from quota.terms.arguments import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

Turn = tuple[str, str | None]
"""The words of a search, and the token of its next page."""


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
) -> Page:
    """Take the next step. `words` is the query, or a list of queries; `order` and `published_after` are upstream's own
    parameters."""
    queries = (words,) if isinstance(words, str) else texts(words, "words:")
    turns: list[Turn] = cursor["turns"] if cursor else [(query, None) for query in dict.fromkeys(queries)]
    if not turns:
        return Page(complete=False)
    if cursor and "ids" in cursor:
        return _details(client, cursor["ids"], turns, cursor["next"])
    query, token = turns[0]
    answer = (
        client.search()
        .list(
            part="id",
            type="video",
            q=query,
            regionCode=region or None,
            order=order,
            publishedAfter=published_after,
            maxResults=PAGE_ITEMS,
            pageToken=token,
        )
        .execute()
    )
    token = answer.get("nextPageToken")
    found = [item.get("id") for item in answer.get("items", [])]
    # Each id gives its kind. Skip the ids of channels and playlists.
    ids = [checked_id(one["videoId"]) for one in found if isinstance(one, dict) and "videoId" in one]
    if ids:
        return Page(cursor={"ids": ids, "next": token, "turns": turns}, complete=False)
    return Page(cursor=_next_turn(turns, token))


def _details(client: Any, ids: Sequence[str], turns: Sequence[Turn], token: str | None) -> Page:
    answer = client.videos().list(part=PARTS, id=",".join(ids), maxResults=PAGE_ITEMS).execute()
    found = {video["id"]: video for video in resources(answer)}
    # Keep the order of the search. Upstream omits videos deleted since then, and promises no order here.
    videos = [found[video_id] for video_id in ids if video_id in found]
    return Page(videos=videos, ranked=True, cursor=_next_turn(turns, token))


def _next_turn(turns: Sequence[Turn], token: str | None) -> Cursor | None:
    """The cursor after a page of the first search, which waits behind the others if it has another page."""
    (query, _), *waiting = turns
    if token:
        waiting.append((query, token))
    return {"turns": waiting} if waiting else None
