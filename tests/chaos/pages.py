"""The fetch function of the chaos ticks: a region's chart in small pages, each call under a name of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chaos.scene import PAGE_ITEMS
from quota.jobs.job import Page, first_attempt

if TYPE_CHECKING:
    from chaos.journal import Journal
    from quota.jobs.job import Cursor

journal: Journal | None = None
"""The worker's; set before its first tick."""


def call(client: Any, region: str, token: str | None, items: int) -> Any:
    """One call of the chart, noted with what came of it."""
    assert journal is not None
    name = journal.next_call()
    request = client.videos().list(
        part="snippet", chart="mostPopular", regionCode=region, maxResults=items, pageToken=token, quotaUser=name
    )
    try:
        answer = request.execute()
    except Exception as error:
        status = getattr(getattr(error, "resp", None), "status", None)
        journal.note("failed", call=name, kind=type(error).__name__, status=status and int(status))
        raise
    journal.note("answered", call=name, status=200)
    return answer


@first_attempt("videos.list")
def fetch(client: Any, region: str, cursor: Cursor | None) -> Page:
    assert journal is not None
    answer = call(client, region, cursor["token"] if cursor else None, PAGE_ITEMS)
    ids = [item["id"] for item in answer["items"]]
    journal.note("fetched", call=journal.call, region=region, ids=ids)
    token = answer.get("nextPageToken")
    return Page(videos=answer["items"], ranked=True, cursor={"token": token} if token else None)
