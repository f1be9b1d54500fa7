"""The search over the videos of a store.

search          finds the videos that have some words
SearchResult    one result
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from quota.common.text import members
from quota.jobs.store.checkpoints import AHEAD_MS
from quota.jobs.store.file import MAX_COUNT, is_time
from quota.jobs.store.rows import count_or_none, text_or_none

MAX_RANKED = 50_000
"""The most videos that a search ranks: to rank 645,000 took 1.6 s."""


class Ranking(NamedTuple):
    """The newest rank of a video in one region's ranking of one job."""

    job: str
    region: str
    rank: int
    taken_at_ms: int


class SearchResult(NamedTuple):
    """One search result and its rankings. Texts and counts are None if upstream left them out."""

    video_id: str
    title: str | None
    channel_title: str | None
    published_at: str | None
    view_count: int | None
    rankings: tuple[Ranking, ...]

    def as_json(self) -> dict[str, object]:
        rankings = [members(ranking, "job region rank taken_at") for ranking in self.rankings]
        return {**members(self, "video_id title channel_title published_at view_count"), "rankings": rankings}


def search(
    db: sqlite3.Connection, phrases: str, region: str | None, limit: int, since_ms: int, now_ms: int
) -> list[SearchResult]:
    """Like `Store.search`, for a query of `quota.jobs.store.fulltext`."""
    values = {"query": phrases, "region": region, "since_ms": since_ms, "most": MAX_RANKED, "limit": limit}
    return [
        SearchResult(
            str(video_id),
            text_or_none(title),
            text_or_none(channel),
            text_or_none(published),
            count_or_none(views),
            _rankings(db, video_id, region, now_ms),
        )
        for video_id, title, channel, published, views in db.execute(_SEARCH, values).fetchall()
    ]


# The weights: a word in the title counts for more than a word in the description. The query reads only the videos that
# it may show: with long descriptions, reading is slower than ranking.
_SEARCH = """
WITH ranked AS (
    SELECT videos_text.rowid AS id, bm25(videos_text, 10, 1, 4, 4) AS score FROM videos_text
    WHERE videos_text MATCH :query
        AND (:since_ms = 0 OR :since_ms <= (SELECT refreshed_ms FROM videos v WHERE v.id = videos_text.rowid))
        AND (:region IS NULL OR EXISTS (
            SELECT 1 FROM rankings r WHERE r.region = :region AND r.taken_at_ms >= :since_ms
                AND r.video_id = (SELECT video_id FROM videos v WHERE v.id = videos_text.rowid)))
    ORDER BY videos_text.rowid DESC LIMIT :most
)
SELECT v.video_id, v.title, v.channel_title, v.published_at, v.view_count
FROM ranked JOIN videos v ON v.id = ranked.id
WHERE score <= ifnull((SELECT score FROM ranked ORDER BY score LIMIT 1 OFFSET :limit - 1), 0)
ORDER BY score, v.view_count DESC, v.video_id LIMIT :limit
"""


def _rankings(db: sqlite3.Connection, video_id: str, region: str | None, now_ms: int) -> tuple[Ranking, ...]:
    """The newest ranking of each job and region. A ranking that a wrong clock dated ahead counts only if it is
    alone."""
    rows = db.execute(
        # With max(), SQLite takes the other columns from the row that has the maximum.
        "SELECT job, region, rank, taken_at_ms, max(taken_at_ms - iif(taken_at_ms > ?, ?, 0)) FROM rankings"
        " WHERE video_id = ? AND ifnull(region = ?, 1) GROUP BY job, region ORDER BY rank, region, job",
        (now_ms + AHEAD_MS, MAX_COUNT, video_id, region),
    ).fetchall()
    return tuple(Ranking(*row[:4]) for row in rows if count_or_none(row[2]) is not None and is_time(row[3]))
