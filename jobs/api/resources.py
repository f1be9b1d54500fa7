"""Rows of the store as upstream's resources: upstream's names and types, without fields that the store lacks."""

from __future__ import annotations

import json
from typing import Any

from quota.common.clock import rfc3339
from quota.jobs.store.reader import ChannelRow, Chart, Hits, VideoRow
from quota.jobs.store.rows import count_or_none

Json = dict[str, Any]

_THUMBNAILS = {"maxresdefault": "maxres", "sddefault": "standard", "hqdefault": "high", "mqdefault": "medium"}


def chart_response(chart: Chart, token: str | None) -> Json:
    """As upstream's videos.list, with `ranking` for the ranking, and `rank` for each video."""
    return {
        "kind": "youtube#videoListResponse",
        "ranking": {
            "regionCode": chart.region,
            "job": chart.job,
            "takenAt": rfc3339(chart.taken_ms),
            "completedAt": rfc3339(chart.completed_ms),
        },
        "items": [{**video(row), "rank": rank} for rank, row in chart.rows],
        **_token(token),
        "pageInfo": {"totalResults": chart.total, "resultsPerPage": len(chart.rows)},
    }


def search_response(hits: Hits, token: str | None) -> Json:
    """As upstream's search.list."""
    return {
        "kind": "youtube#searchListResponse",
        "items": [
            {
                "kind": "youtube#searchResult",
                "id": {"kind": "youtube#video", "videoId": _text(row.video_id) or ""},
                "snippet": _search_snippet(row),
            }
            for row in hits.rows
        ],
        **_token(token),
        "pageInfo": {"totalResults": hits.total, "resultsPerPage": len(hits.rows)},
    }


def video(row: VideoRow) -> Json:
    """As an item of upstream's videos.list. Only `kind` and `id` if the store has no more fields."""
    details = {
        "duration": _text(row.duration),
        "definition": _text(row.definition),
        "caption": {0: "false", 1: "true"}.get(row.has_caption) if isinstance(row.has_caption, int) else None,
        "licensedContent": bool(row.is_licensed) if row.is_licensed in (0, 1) else None,
    }
    counts = {"viewCount": row.view_count, "likeCount": row.like_count, "commentCount": row.comment_count}
    snippet = {
        **_search_snippet(row),
        "tags": _tags(row.tags),
        "categoryId": _text(row.category_id),
        "defaultLanguage": _text(row.default_language),
        "defaultAudioLanguage": _text(row.audio_language),
    }
    parts = {"snippet": _without_null(snippet), "contentDetails": _without_null(details), "statistics": _counts(counts)}
    return {"kind": "youtube#video", "id": _text(row.video_id) or "", **_not_empty(parts)}


def channel(row: ChannelRow) -> Json:
    """As an item of upstream's channels.list."""
    counts = {"viewCount": row.view_count, "subscriberCount": row.subscriber_count, "videoCount": row.video_count}
    snippet = {
        "title": _text(row.title),
        "description": _text(row.description),
        "customUrl": _text(row.custom_url),
        "publishedAt": _text(row.published_at),
        "thumbnails": _thumbnails(row.thumbnail_url),
        "country": _text(row.country),
    }
    parts = {"snippet": _without_null(snippet), "statistics": _counts(counts)}
    return {"kind": "youtube#channel", "id": _text(row.channel_id) or "", **_not_empty(parts)}


def _search_snippet(row: VideoRow) -> Json:
    return _without_null(
        {
            "publishedAt": _text(row.published_at),
            "channelId": _text(row.channel_id),
            "title": _text(row.title),
            "description": _text(row.description),
            "thumbnails": _thumbnails(row.thumbnail_url),
            "channelTitle": _text(row.channel_title),
            "liveBroadcastContent": _text(row.live_broadcast),
        }
    )


def _thumbnails(url: object) -> Json | None:
    """The single thumbnail of the store, under the size that its file name tells."""
    text = _text(url)
    if text is None:
        return None
    name = text.rpartition("/")[2].partition(".")[0]
    return {_THUMBNAILS.get(name, "default"): {"url": text}}


def _tags(written: object) -> list[str] | None:
    try:
        tags = json.loads(written) if isinstance(written, str) else None
    except (ValueError, RecursionError):
        return None
    return [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _counts(counts: Json) -> Json:
    """Upstream writes counts as text."""
    numbers = {name: count_or_none(value) for name, value in counts.items()}
    return {name: str(number) for name, number in numbers.items() if number is not None}


def _without_null(members: Json) -> Json:
    return {name: value for name, value in members.items() if value is not None}


def _not_empty(parts: Json) -> Json:
    return {name: part for name, part in parts.items() if part}


def _token(token: str | None) -> Json:
    return {} if token is None else {"nextPageToken": token}
