"""Upstream's resources as rows of the store: what it sent under each name, or null where it is not what it should be.

    video_row, channel_row          one resource as a row, for UPSERT_VIDEO and UPSERT_CHANNEL
    part                            an object inside a resource
    as_text, text_or_none           text that SQLite can hold
    count_or_none                   a count

Nothing here raises for what upstream sent, apart from a resource without an id.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quota.jobs.store.fulltext import indexed

if TYPE_CHECKING:
    from collections.abc import Mapping

_VIDEO_COLUMNS = """
    video_id title description channel_id channel_title category_id published_at tags default_language audio_language
    live_broadcast thumbnail_url view_count like_count comment_count duration definition has_caption is_licensed
    title_words description_words channel_words tags_words
    first_seen_ms refreshed_ms
"""
_CHANNEL_COLUMNS = """
    channel_id title description custom_url country published_at thumbnail_url view_count subscriber_count video_count
    first_seen_ms refreshed_ms
"""


def _upsert(table: str, names: str) -> str:
    columns = names.split()
    kept = (columns[0], "first_seen_ms")
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608 - our names
        f" ON CONFLICT ({columns[0]}) DO UPDATE SET "
        + ", ".join(f"{column} = excluded.{column}" for column in columns if column not in kept)
    )


UPSERT_VIDEO = _upsert("videos", _VIDEO_COLUMNS)
UPSERT_CHANNEL = _upsert("channels", _CHANNEL_COLUMNS)


def video_row(video: Mapping[str, Any], now_ms: int) -> tuple[object, ...]:
    snippet, statistics, details = (part(video, name) for name in ("snippet", "statistics", "contentDetails"))
    title, description, channel_title = (
        text_or_none(snippet.get(name)) for name in ("title", "description", "channelTitle")
    )
    tags = snippet.get("tags")
    # Without \u escapes: the index reads this text too.
    tags = as_text(json.dumps([str(tag) for tag in tags], ensure_ascii=False)) if isinstance(tags, list) else None
    return (
        as_text(video["id"]),
        title,
        description,
        text_or_none(snippet.get("channelId")),
        channel_title,
        text_or_none(snippet.get("categoryId")),
        text_or_none(snippet.get("publishedAt")),
        tags,
        text_or_none(snippet.get("defaultLanguage")),
        text_or_none(snippet.get("defaultAudioLanguage")),
        text_or_none(snippet.get("liveBroadcastContent")),
        _thumbnail(snippet),
        count_or_none(statistics.get("viewCount")),
        count_or_none(statistics.get("likeCount")),
        count_or_none(statistics.get("commentCount")),
        text_or_none(details.get("duration")),
        text_or_none(details.get("definition")),
        _flag(details.get("caption")),
        _flag(details.get("licensedContent")),
        *(_words(text) for text in (title, description, channel_title, tags)),
        now_ms,
        now_ms,
    )


def channel_row(channel: Mapping[str, Any], now_ms: int) -> tuple[object, ...]:
    snippet, statistics = part(channel, "snippet"), part(channel, "statistics")
    return (
        as_text(channel["id"]),
        text_or_none(snippet.get("title")),
        text_or_none(snippet.get("description")),
        text_or_none(snippet.get("customUrl")),
        text_or_none(snippet.get("country")),
        text_or_none(snippet.get("publishedAt")),
        _thumbnail(snippet),
        count_or_none(statistics.get("viewCount")),
        None if statistics.get("hiddenSubscriberCount") is True else count_or_none(statistics.get("subscriberCount")),
        count_or_none(statistics.get("videoCount")),
        now_ms,
        now_ms,
    )


def part(resource: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = resource.get(name)
    return found if isinstance(found, dict) else {}


def as_text(text: str) -> str:
    """The text itself, with U+FFFD for half a surrogate pair, which no encoding can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text_or_none(value: object) -> str | None:
    return as_text(value) if isinstance(value, str) else None


def _words(text: str | None) -> str | None:
    """The text as the index reads it; None where that is the text itself."""
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
