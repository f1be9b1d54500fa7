"""What stands in a request and in its answer: parameters, cursors, and rows of the store as upstream's resources.

read_parameters    the parameters of a query string; `limit_of` and `words_of` read two of them. Unknown parameters
                   are errors, so that nobody misspells one without noticing
ProblemError       ends a request with a problem; `ParameterError` names the wrong parameter
encode, decode     a cursor: opaque text that is valid for one question, while its answer stays the same
chart_response     a ranking, with upstream's names and types, without fields that the store lacks;
                   `search_response` and `resource` show the others
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping
from hashlib import blake2b
from struct import pack, unpack
from typing import Any
from urllib.parse import unquote_to_bytes

from quota.common.clock import rfc3339
from quota.common.text import nearest, number_in, shorten, show
from quota.errors import UsageError
from quota.jobs.store.fulltext import as_read, length_of_last
from quota.jobs.store.reader import Chart, Hits, StoredRow
from quota.jobs.store.rows import CHANNEL_FIELDS, VIDEO_FIELDS, Field, text_or_none
from quota.web.documents import Problem

DEFAULT_LIMIT = 50
MAX_LIMIT = 100

MAX_CHARACTERS = 100
MAX_BEGINNINGS = 3
MIN_BEGINNING = 2
"""Bounds that keep a search by strangers within 100 ms. `quota search` has wider bounds: over 100,000 videos, a* to z*
in one search took 3 s, a phrase of 500 characters 1 s."""


class ProblemError(Exception):
    """Ends a request with this problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class ParameterError(ProblemError):
    """A wrong parameter, with its name and the mistake."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(Problem(400, detail, members={"parameter": name} if name else {}))


def read_parameters(query: bytes, names: Collection[str], needed: str = "") -> dict[str, str]:
    """The parameters of a query string; `names` are allowed, and `needed` must be there. Raises ParameterError."""
    parameters: dict[str, str] = {}
    for pair in query.split(b"&") if query else []:
        try:
            name, value = (unquote_to_bytes(part.replace(b"+", b" ")).decode() for part in pair.partition(b"=")[::2])
        except UnicodeDecodeError:
            raise ParameterError(
                "", f"the query string is not UTF-8: {show(pair.decode('ascii', 'backslashreplace'))}"
            ) from None
        if name not in names:
            raise ParameterError(shorten(name, 100), f"there is no parameter {show(name)}; {nearest(name, names)}")
        if name in parameters:
            raise ParameterError(name, f"{name} is given twice")
        parameters[name] = value
    if needed and needed not in parameters:
        raise ParameterError(needed, f"{needed} is missing")
    return parameters


def limit_of(parameters: Mapping[str, str]) -> int:
    """The most items on a page."""
    written = parameters.get("limit", str(DEFAULT_LIMIT))
    limit = number_in(written, 1, MAX_LIMIT)
    if limit is None:
        raise ParameterError("limit", f"limit={show(written)}: write a number from 1 to {MAX_LIMIT}")
    return limit


def words_of(parameters: Mapping[str, str]) -> str:
    """The words of a search."""
    words = parameters["q"]
    try:
        text = as_read(words, MAX_CHARACTERS)
    except UsageError as error:
        raise ParameterError("q", str(error)) from None
    beginnings = [word.rstrip("*") for word in text.split() if word.endswith("*")]
    if len(beginnings) > MAX_BEGINNINGS:
        raise ParameterError("q", f"at most {MAX_BEGINNINGS} words may end with *, not {len(beginnings)}")
    if short := [beginning for beginning in beginnings if length_of_last(beginning) < MIN_BEGINNING]:
        raise ParameterError("q", f"write at least {MIN_BEGINNING} letters or digits before *, not {show(short[0])}")
    return words


# -- cursors -----------------------------------------------------------------------------------------------------------

_WRITTEN = re.compile(r"[A-Za-z0-9_-]{24}")


def encode(question: str, version: str, position: int) -> str:
    """A cursor: 24 characters for 18 bytes, which are 6 of the question's digest, 8 of the version's, 4 of position."""
    return base64.urlsafe_b64encode(_digest(question, 6) + _digest(version, 8) + pack(">I", position)).decode()


def decode(question: str, parameters: Mapping[str, str]) -> tuple[bytes | None, int]:
    """The version of the list, for `check_version`, and the position to continue at. The version is None for the first
    page. Raises ParameterError if the cursor is of another question."""
    if "cursor" not in parameters:
        return None, 0
    written = parameters["cursor"]
    data = base64.urlsafe_b64decode(written) if _WRITTEN.fullmatch(written) else b""
    if data[:6] != _digest(question, 6):
        raise ParameterError("cursor", "this is not a nextPageToken of this query; ask without a cursor")
    (position,) = unpack(">I", data[14:])
    return data[6:14], position


def check_version(asked: bytes | None, version: str) -> None:
    """Raises ParameterError if the cursor is of another version of the list."""
    if asked is not None and asked != _digest(version, 8):
        raise ParameterError("cursor", "the list has changed since this nextPageToken; begin again without a cursor")


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()


# -- resources ---------------------------------------------------------------------------------------------------------

Json = dict[str, Any]


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
        "items": [{**resource("video", row), "rank": rank} for rank, row in chart.rows],
        **_page(chart, token),
    }


def search_response(hits: Hits, token: str | None) -> Json:
    """As upstream's search.list."""
    return {
        "kind": "youtube#searchListResponse",
        "items": [
            {
                "kind": "youtube#searchResult",
                "id": {"kind": "youtube#video", "videoId": text_or_none(row["video_id"]) or ""},
                "snippet": _parts(row, _SEARCH_FIELDS).get("snippet", {}),
            }
            for row in hits.rows
        ],
        **_page(hits, token),
    }


def resource(kind: str, row: StoredRow) -> Json:
    """A "video" or a "channel" as an item of upstream's lists. Only `kind` and `id` if the store has no more fields."""
    fields = VIDEO_FIELDS if kind == "video" else CHANNEL_FIELDS
    return {"kind": f"youtube#{kind}", "id": text_or_none(row[f"{kind}_id"]) or "", **_parts(row, fields)}


def _parts(row: StoredRow, fields: Mapping[str, Field]) -> Json:
    """The parts of a resource, without fields that the store lacks, and without empty parts."""
    parts: Json = {}
    for column, field in fields.items():
        if (value := field.show(row.get(column))) is not None:
            parts.setdefault(field.part, {})[field.name] = value
    return parts


_SEARCH_FIELDS = {
    column: VIDEO_FIELDS[column]
    for column in (
        "published_at", "channel_id", "title", "description", "thumbnail_url", "channel_title", "live_broadcast",
    )
}  # fmt: skip
"""The columns of a search result."""


def _page(page: Chart | Hits, token: str | None) -> Json:
    """The end of a list: the token of the next page, if there is one, and the numbers of results."""
    following = {} if token is None else {"nextPageToken": token}
    return {**following, "pageInfo": {"totalResults": page.total, "resultsPerPage": len(page.rows)}}
