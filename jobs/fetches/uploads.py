"""The built-in job `uploads`: what channels publish, 50 videos for 1 unit.

Upstream has a playlist of each channel's videos, and says its id with the channel's details. That costs 1 unit for 50
channels, and the store remembers it. A playlist names videos and tells little of them: the job `videos` fetches the
rest. How the lists are walked is in `quota.jobs.fetches.walks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quota.jobs.fetches.walks import PAGE_ITEMS, PARTS, Walks, usable
from quota.jobs.job import Cursor, Page, checked_id, first_attempt, resources
from quota.jobs.store.rows import channel_row
from quota.jobs.store.store import Store
from quota.terms.arguments import texts

_KNOWN = """
    SELECT channel_id AS id FROM videos WHERE channel_id IS NOT NULL AND (:region = '' OR video_id IN
        (SELECT video_id FROM rankings WHERE region = :region))
    UNION SELECT channel_id FROM channels WHERE :region = ''
"""
_NAMED = "SELECT DISTINCT value AS id FROM json_each(:ids)"
_LISTS = """
    SELECT wanted.id, video_count, published_at FROM ({wanted}) wanted
    LEFT JOIN channels ON channels.channel_id = wanted.id
"""
_PLAYLISTS = """
    SELECT channel_id, uploads_id FROM channels
    WHERE channel_id IN (SELECT value FROM json_each(:ids)) AND uploads_id <> ''
"""
_STORED = """
    SELECT video_id, duration IS NOT NULL FROM videos WHERE video_id IN (SELECT value FROM json_each(:ids))
"""


@first_attempt("playlistItems.list")
def fetch(
    client: Any, region: str, cursor: Cursor | None, *, store: Store, channels: str | Sequence[str] | None = None
) -> Page:
    """The next page of one channel, of `channels` or else of all that the store knows (in the region)."""
    names = None if channels is None else json.dumps(texts(channels, "channels:"))
    wanted = _KNOWN if channels is None else _NAMED
    walks = Walks(store, "places_of_uploads", _LISTS.format(wanted=wanted), cursor, ids=names, region=region)
    if not walks.places:
        return Page(complete=False)
    ids = [place["id"] for place in walks.places]
    playlists = dict(store.select(_PLAYLISTS, ids=json.dumps(ids)))
    if ids[0] not in playlists:
        return _playlists(client, walks, [one for one in ids if one not in playlists])
    try:
        return _videos(client, store, walks, playlists[ids[0]])
    except Exception as error:
        return walks.failed(error, "channel", {"id": ids[0]})


def _playlists(client: Any, walks: Walks, names: Sequence[str]) -> Page:
    """Find the playlists of channels. One that has none is not asked for again in this pass."""
    found = resources(client.channels().list(part=PARTS, id=",".join(names), maxResults=PAGE_ITEMS).execute())
    have = {channel["id"] for channel in found if channel_row(channel, 0)["uploads_id"]}
    return walks.page(*({"id": name} for name in names if name not in have), channels=found)


def _videos(client: Any, store: Store, walks: Walks, playlist: str) -> Page:
    place = walks.places[0]
    call = client.playlistItems().list(
        part="snippet,contentDetails",
        playlistId=playlist,
        maxResults=PAGE_ITEMS,
        pageToken=place.get("token"),
    )
    answer = call.execute()
    items = [_video(item) for item in usable(answer)]
    listed = {video["id"]: video for video in items if video is not None}
    known = dict(store.select(_STORED, ids=json.dumps([*listed])))
    # A video of which the store knows more than the playlist is only noted as listed.
    videos = [{"id": name} if known.get(name) else video for name, video in listed.items()]
    return walks.page(walks.moved(place, [*listed], answer.get("nextPageToken"), known), videos=videos)


def _video(item: Mapping[str, Any]) -> dict[str, Any] | None:
    """The video of a playlist's item, as far as the item tells. None for one that is private or was deleted."""
    details, told = item.get("contentDetails"), item.get("snippet")
    if not isinstance(details, dict) or not isinstance(told, dict) or "videoPublishedAt" not in details:
        return None
    snippet = {name: told.get(name) for name in ("title", "description", "channelId", "channelTitle", "thumbnails")}
    return {
        "id": checked_id(details.get("videoId")),
        "snippet": {**snippet, "publishedAt": details["videoPublishedAt"]},
    }
