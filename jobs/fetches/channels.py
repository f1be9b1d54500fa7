"""The built-in job `channels`: details of channels, up to 50 for 1 unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS
from quota.jobs.job import Cursor, Page, first_attempt, resources
from quota.jobs.store.store import Store
from quota.terms.arguments import texts


@first_attempt("channels.list")
def fetch(
    client: Any, region: str, cursor: Cursor | None, *, store: Store, ids: str | Sequence[str] | None = None
) -> Page:
    """The next page of channels, from `ids` or else from the store's newest complete rankings of the region.

    Without channels it sends no call and charges nothing. The cursor is the last id done, not a position, because the
    rankings may change between two runs.
    """
    after = str(cursor["after"]) if cursor else ""
    if ids is None:
        wanted = store.channels_ranked(region, after, PAGE_ITEMS)
    else:
        wanted = sorted({name for name in texts(ids, "ids:") if name > after})[:PAGE_ITEMS]
    if not wanted:
        return Page(complete=False)
    answer = client.channels().list(part=PARTS, id=",".join(wanted), maxResults=PAGE_ITEMS).execute()
    more = len(wanted) == PAGE_ITEMS
    return Page(channels=resources(answer), cursor={"after": wanted[-1]} if more else None)
