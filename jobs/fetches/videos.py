"""The built-in job `videos`: what the store has, described anew, 50 videos for 1 unit.

The one that was asked for longest ago comes first. A video that upstream no longer has counts as asked for, like the
others, and expires in its time.
"""

from __future__ import annotations

from operator import index
from typing import Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS
from quota.jobs.job import Cursor, Page, first_attempt, resources
from quota.jobs.store.store import Store
from quota.terms.limits import HOUR_MS

_OLDEST = f"""
    SELECT video_id FROM videos WHERE (asked_ms IS NULL OR asked_ms < :began_ms OR asked_ms > :ahead_ms)
        AND (:region = '' OR video_id IN (SELECT video_id FROM rankings WHERE region = :region))
    ORDER BY asked_ms, id LIMIT {PAGE_ITEMS}
"""  # noqa: S608  # a constant


@first_attempt("videos.list")
def fetch(client: Any, region: str, cursor: Cursor | None, *, store: Store) -> Page:
    """The next 50 videos of the store (in the region). Without videos it sends no call and charges nothing."""
    now_ms = store.now_ms()
    step = cursor or {"began_ms": now_ms, "step": 0}
    step = {**step, "began_ms": min(index(step["began_ms"]), now_ms)}  # the clock may have gone back since
    when = {"began_ms": step["began_ms"], "ahead_ms": now_ms + HOUR_MS}
    names = [name for (name,) in store.select(_OLDEST, region=region, **when)]
    if not names:
        return Page(complete=False)
    answer = client.videos().list(part=PARTS, id=",".join(names), maxResults=PAGE_ITEMS).execute()
    found = {video["id"]: video for video in resources(answer)}
    videos = [found.get(name, {"id": name}) for name in names]
    return Page(videos=videos, again=True, cursor={**step, "step": step["step"] + 1})
