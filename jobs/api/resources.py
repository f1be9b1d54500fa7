"""Rows of the store as upstream's resources: upstream's names and types, without fields that the store lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quota.common.clock import rfc3339
from quota.jobs.store.reader import Chart, Hits, StoredRow
from quota.jobs.store.rows import CHANNEL_FIELDS, VIDEO_FIELDS, Field, count_or_none

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
                "id": {"kind": "youtube#video", "videoId": _text(row["video_id"]) or ""},
                "snippet": _parts(row, _SEARCH_FIELDS).get("snippet", {}),
            }
            for row in hits.rows
        ],
        **_token(token),
        "pageInfo": {"totalResults": hits.total, "resultsPerPage": len(hits.rows)},
    }


def video(row: StoredRow) -> Json:
    """As an item of upstream's videos.list. Only `kind` and `id` if the store has no more fields."""
    return {"kind": "youtube#video", "id": _text(row["video_id"]) or "", **_parts(row, VIDEO_FIELDS)}


def channel(row: StoredRow) -> Json:
    """As an item of upstream's channels.list."""
    return {"kind": "youtube#channel", "id": _text(row["channel_id"]) or "", **_parts(row, CHANNEL_FIELDS)}


def _parts(row: StoredRow, fields: Mapping[str, Field]) -> Json:
    """The parts of a resource, without fields that the store lacks, and without empty parts."""
    parts: Json = {}
    for column, field in fields.items():
        show = _SHOWN.get(field.name, _count if field.part == "statistics" else _text)
        if (value := show(row.get(column))) is not None:
            parts.setdefault(field.part, {})[field.name] = value
    return parts


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


def _count(value: object) -> str | None:
    """Upstream writes counts as text."""
    number = count_or_none(value)
    return None if number is None else str(number)


def _caption(value: object) -> str | None:
    return {0: "false", 1: "true"}.get(value) if isinstance(value, int) else None


def _licensed(value: object) -> bool | None:
    return bool(value) if value in (0, 1) else None


_SHOWN: Mapping[str, Callable[[Any], Any]] = {
    "thumbnails": _thumbnails,
    "tags": _tags,
    "caption": _caption,
    "licensedContent": _licensed,
}
"""The fields that are neither texts nor counts."""

_SEARCH_FIELDS = {
    column: VIDEO_FIELDS[column]
    for column in (
        "published_at", "channel_id", "title", "description", "thumbnail_url", "channel_title", "live_broadcast",
    )
}  # fmt: skip
"""The columns of a search result."""


def _token(token: str | None) -> Json:
    return {} if token is None else {"nextPageToken": token}
