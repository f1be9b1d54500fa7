"""The OpenAPI 3.1 document of the API. Tests hold every answer to it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from quota.jobs.api.parameters import DEFAULT_LIMIT, MAX_BEGINNINGS, MAX_CHARACTERS, MAX_LIMIT, MIN_BEGINNING
from quota.jobs.store.fulltext import MAX_WORDS
from quota.jobs.store.reader import MAX_HITS

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "string", "pattern": "^[0-9]+$"}
_TIME: Json = {"type": "string", "format": "date-time"}
_WHOLE: Json = {"type": "integer", "minimum": 0}


def document() -> Json:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "quota serve",
            "version": _version(),
            "summary": "What the jobs fetched, from the local store. Asking costs no quota.",
        },
        "paths": {
            "/api/v1/videos/trending": _path(
                "The newest complete ranking of a region",
                "As upstream's videos.list, with the fields that the store keeps. Each video has its rank; ranks may "
                "have gaps, where upstream's chart changed between two of its pages.",
                "videoListResponse",
                _parameter("region", {"type": "string", "minLength": 1}, "A region that a job fetches.", required=True),
                _LIMIT,
                _CURSOR,
                more={"404": _problem("No ranking of this region is complete yet.")},
            ),
            "/api/v1/search": _path(
                "Videos that have all these words",
                "As upstream's search.list, the best match first. Case and accents do not matter; word* matches every "
                f"word that begins with word. If more than {MAX_HITS} videos match, those that the store got last are "
                "listed, the most viewed first.",
                "searchListResponse",
                _parameter(
                    "q",
                    {"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS},
                    f"1 to {MAX_WORDS} words; {MAX_BEGINNINGS} may end with *, after {MIN_BEGINNING} or more letters "
                    "or digits.",
                    required=True,
                ),
                _LIMIT,
                _CURSOR,
            ),
            "/api/v1/channels/{channel_id}": _path(
                "A channel",
                "As an item of upstream's channels.list. If no job fetched the channel, it has what its videos say.",
                "channel",
                _parameter("channel_id", _TEXT, "Upstream's id of the channel.", within="path", required=True),
                more={"404": _problem("The store has no such channel.")},
            ),
            "/healthz": _path(
                "Store, ledger, freshness",
                "503 if the store cannot be read. Without the ledger what is stored is served.",
                "health",
                kept=False,
                more={"503": _answer("The store cannot be read.", "health")},
            ),
        },
        "components": {"schemas": _SCHEMAS, "headers": _HEADERS},
    }


def _version() -> str:
    try:
        return version("quota-ledger")
    except PackageNotFoundError:
        return "0"


def _path(summary: str, text: str, schema: str, *parameters: Json, kept: bool = True, more: Json | None = None) -> Json:
    answers: Json = {
        "200": _answer(summary, schema, "ETag" if kept else "", "Cache-Control"),
        **({"304": {"description": "The body of If-None-Match is the newest."}} if kept else {}),
        "400": _problem(
            "A parameter is unknown, given twice, missing, or out of range; or a cursor is of another query "
            "or of an older list."
        ),
        **({"429": _problem("A limit on who may ask how often is used up.", "Retry-After")} if kept else {}),
        "503": _problem("The store cannot be read, or too many requests wait.", "Retry-After"),
        **(more or {}),
        "default": _problem("Another name of the server than its own (421), or a failure of it (500)."),
    }
    operation = {"summary": summary, "description": text, "parameters": list(parameters), "responses": answers}
    return {"get": operation}


def _answer(text: str, schema: str, *headers: str, media_type: str = "application/json") -> Json:
    return {
        "description": text,
        "headers": {name: {"$ref": f"#/components/headers/{name}"} for name in headers if name},
        "content": {media_type: {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _problem(text: str, *headers: str) -> Json:
    return _answer(text, "problem", *headers, media_type="application/problem+json")


def _parameter(name: str, schema: Json, text: str, *, within: str = "query", required: bool = False) -> Json:
    return {"name": name, "in": within, "required": required, "description": text, "schema": schema}


def _object(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _list(item: Json) -> Json:
    return {"type": "array", "items": item}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_LIMIT = _parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "How many items a page has at most.",
)
_CURSOR = _parameter(
    "cursor",
    _TEXT,
    "The nextPageToken of the page before. It holds as long as the list stays the same: after a newer ranking begin "
    "again without one.",
)
_HEADERS: Json = {
    "ETag": {"description": "Names the body, for If-None-Match.", "schema": _TEXT},
    "Cache-Control": {"description": "How long the answer may be kept.", "schema": _TEXT},
    "Retry-After": {"description": "Seconds after which to ask again.", "schema": _WHOLE},
}
_SNIPPET: Json = {
    "publishedAt": _TEXT,
    "channelId": _TEXT,
    "title": _TEXT,
    "description": _TEXT,
    "thumbnails": {
        "type": "object",
        "description": "The largest one that upstream had.",
        "maxProperties": 1,
        "propertyNames": {"enum": ["default", "medium", "high", "standard", "maxres"]},
        "additionalProperties": _object(["url"], url=_TEXT),
    },
    "channelTitle": _TEXT,
    "liveBroadcastContent": _TEXT,
}
_PAGE_INFO = _object(["totalResults", "resultsPerPage"], totalResults=_WHOLE, resultsPerPage=_WHOLE)
_CHECK: Json = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"enum": ["pass", "warn", "fail"]}, "says": _TEXT},
}
_SCHEMAS: Json = {
    "videoListResponse": _object(
        ["kind", "ranking", "items", "pageInfo"],
        kind={"const": "youtube#videoListResponse"},
        ranking=_object(
            ["regionCode", "job", "takenAt", "completedAt"],
            regionCode=_TEXT,
            job=_TEXT,
            takenAt=_TIME,
            completedAt=_TIME,
        ),
        items=_list(_ref("video")),
        nextPageToken=_TEXT,
        pageInfo=_PAGE_INFO,
    ),
    "video": _object(
        ["kind", "id", "rank"],
        kind={"const": "youtube#video"},
        id=_TEXT,
        rank={"type": "integer", "minimum": 1},
        snippet=_object(
            [],
            **_SNIPPET,
            tags=_list(_TEXT),
            categoryId=_TEXT,
            defaultLanguage=_TEXT,
            defaultAudioLanguage=_TEXT,
        ),
        contentDetails=_object(
            [],
            duration=_TEXT,
            definition=_TEXT,
            caption={"enum": ["true", "false"]},
            licensedContent={"type": "boolean"},
        ),
        statistics=_object([], viewCount=_COUNT, likeCount=_COUNT, commentCount=_COUNT),
    ),
    "searchListResponse": _object(
        ["kind", "items", "pageInfo"],
        kind={"const": "youtube#searchListResponse"},
        items=_list(_ref("searchResult")),
        nextPageToken=_TEXT,
        pageInfo=_PAGE_INFO,
    ),
    "searchResult": _object(
        ["kind", "id", "snippet"],
        kind={"const": "youtube#searchResult"},
        id=_object(["kind", "videoId"], kind={"const": "youtube#video"}, videoId=_TEXT),
        snippet=_object([], **_SNIPPET),
    ),
    "channel": _object(
        ["kind", "id"],
        kind={"const": "youtube#channel"},
        id=_TEXT,
        snippet=_object(
            [],
            title=_TEXT,
            description=_TEXT,
            customUrl=_TEXT,
            publishedAt=_TEXT,
            thumbnails=_SNIPPET["thumbnails"],
            country=_TEXT,
        ),
        statistics=_object([], viewCount=_COUNT, subscriberCount=_COUNT, videoCount=_COUNT),
    ),
    "health": _object(
        ["status", "checks"],
        status={"enum": ["pass", "warn", "fail"]},
        checks={"type": "object", "additionalProperties": _CHECK},
    ),
    "problem": {
        "type": "object",
        "description": "RFC 9457.",
        "required": ["type", "title", "status", "detail"],
        "properties": {"type": _TEXT, "title": _TEXT, "status": _WHOLE, "detail": _TEXT, "parameter": _TEXT},
    },
}
