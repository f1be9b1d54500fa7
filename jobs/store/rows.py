"""Upstream's resources as rows of the store: the value under each name, or null if the value is invalid.

    video_row, channel_row          one resource as a row
    upsert                          put a row into its table
    save_video                      put a video into its table, or note that a list had it or a call asked for it
    part                            an object inside a resource
    as_text, text_or_none           text that SQLite can hold
    count_or_none                   a count

No value from upstream raises an error here, except a resource without an id.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from quota.jobs.store.fulltext import indexed


def upsert(db: sqlite3.Connection, table: str, row: Mapping[str, object]) -> None:
    """Insert a row, or refresh the row with the same key. The first column is the key."""
    key, *others = row
    fresh = ", ".join(f"{column} = excluded.{column}" for column in others if column != "first_seen_ms")
    db.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{column}' for column in row)})"  # noqa: S608 - ours
        f" ON CONFLICT ({key}) DO UPDATE SET {fresh}",
        row,
    )


def save_video(
    db: sqlite3.Connection, video: Mapping[str, Any], now_ms: int, *, again: bool
) -> dict[str, object] | None:
    """Store a video of a page. Returns its row; None if the video tells nothing new.

    A video that is read `again` does not count as listed, and stays away if it has expired meanwhile. If the page has
    only the id of a stored video, its details stay.
    """
    times = "asked_ms = :now_ms" if again else "asked_ms = :now_ms, listed_ms = :now_ms"
    values = {"video_id": as_text(video["id"]), "now_ms": now_ms}
    stored = db.execute(f"UPDATE videos SET {times} WHERE video_id = :video_id", values).rowcount  # noqa: S608 - ours
    if (again and not stored) or (stored and len(video) == 1):
        return None
    row = video_row(video, now_ms)
    upsert(db, "videos", row if again else {**row, "listed_ms": now_ms, "asked_ms": now_ms})
    return row


def video_row(video: Mapping[str, Any], now_ms: int) -> dict[str, object]:
    snippet, statistics, details = (part(video, name) for name in ("snippet", "statistics", "contentDetails"))
    title, description, channel_title = (
        text_or_none(snippet.get(name)) for name in ("title", "description", "channelTitle")
    )
    tags = snippet.get("tags")
    # Without \u escapes: the index reads this text too.
    tags = as_text(json.dumps([str(tag) for tag in tags], ensure_ascii=False)) if isinstance(tags, list) else None
    return {
        "video_id": as_text(video["id"]),
        "title": title,
        "description": description,
        "channel_id": text_or_none(snippet.get("channelId")),
        "channel_title": channel_title,
        "category_id": text_or_none(snippet.get("categoryId")),
        "published_at": text_or_none(snippet.get("publishedAt")),
        "tags": tags,
        "default_language": text_or_none(snippet.get("defaultLanguage")),
        "audio_language": text_or_none(snippet.get("defaultAudioLanguage")),
        "live_broadcast": text_or_none(snippet.get("liveBroadcastContent")),
        "thumbnail_url": _thumbnail(snippet),
        "view_count": count_or_none(statistics.get("viewCount")),
        "like_count": count_or_none(statistics.get("likeCount")),
        "comment_count": count_or_none(statistics.get("commentCount")),
        "duration": text_or_none(details.get("duration")),
        "definition": text_or_none(details.get("definition")),
        "has_caption": _flag(details.get("caption")),
        "is_licensed": _flag(details.get("licensedContent")),
        "title_words": _words(title),
        "description_words": _words(description),
        "channel_words": _words(channel_title),
        "tags_words": _words(tags),
        "first_seen_ms": now_ms,
        "refreshed_ms": now_ms,
    }


def channel_row(channel: Mapping[str, Any], now_ms: int) -> dict[str, object]:
    snippet, statistics = part(channel, "snippet"), part(channel, "statistics")
    hidden = statistics.get("hiddenSubscriberCount") is True
    return {
        "channel_id": as_text(channel["id"]),
        "title": text_or_none(snippet.get("title")),
        "description": text_or_none(snippet.get("description")),
        "custom_url": text_or_none(snippet.get("customUrl")),
        "country": text_or_none(snippet.get("country")),
        "published_at": text_or_none(snippet.get("publishedAt")),
        "thumbnail_url": _thumbnail(snippet),
        "view_count": count_or_none(statistics.get("viewCount")),
        "subscriber_count": None if hidden else count_or_none(statistics.get("subscriberCount")),
        "video_count": count_or_none(statistics.get("videoCount")),
        "uploads_id": text_or_none(part(part(channel, "contentDetails"), "relatedPlaylists").get("uploads")),
        "first_seen_ms": now_ms,
        "refreshed_ms": now_ms,
    }


def part(resource: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = resource.get(name)
    return value if isinstance(value, dict) else {}


def as_text(text: str) -> str:
    """The text, with U+FFFD for half a surrogate pair, which no encoding allows."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text_or_none(value: object) -> str | None:
    return as_text(value) if isinstance(value, str) else None


def _words(text: str | None) -> str | None:
    """The text for the index; None if it equals the text itself."""
    if text is None:
        return None
    words = indexed(text)
    return None if words == text else words


def count_or_none(value: object) -> int | None:
    """Upstream sends counts as decimal text. Anything else, or a number too long for the column, is None."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        number = int(value)
    else:
        return None
    return number if 0 <= number < 2**63 else None


def _flag(value: object) -> int | None:
    return {True: 1, False: 0, "true": 1, "false": 0}.get(value) if isinstance(value, (bool, str)) else None


def _thumbnail(snippet: Mapping[str, Any]) -> str | None:
    """The URL of the largest thumbnail that upstream has."""
    sizes = part(snippet, "thumbnails")
    for size in ("maxres", "standard", "high", "medium", "default"):
        url = part(sizes, size).get("url")
        if isinstance(url, str):
            return as_text(url)
    return None
