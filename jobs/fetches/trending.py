"""The built-in job `trending`: a region's chart of most popular videos, 50 videos and 1 unit per page."""

from __future__ import annotations

from typing import Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS
from quota.jobs.job import Cursor, Page, first_attempt, resources


@first_attempt("videos.list")
def fetch(client: Any, region: str, cursor: Cursor | None, *, category: str | None = None) -> Page:
    """The next page of the chart. `category` narrows it to one category id ("10" is music)."""
    call = client.videos().list(
        part=PARTS,
        chart="mostPopular",
        regionCode=region or None,
        videoCategoryId=category,
        maxResults=PAGE_ITEMS,
        pageToken=cursor["token"] if cursor else None,
    )
    answer = call.execute()
    token = answer.get("nextPageToken")
    return Page(videos=resources(answer), ranked=True, cursor={"token": token} if token else None)
