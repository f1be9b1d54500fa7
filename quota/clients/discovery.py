"""The description of one of Google's APIs, from the installed client. Reading it imports no client.

description       the API's discovery document; `discovered` where there may be none
scopes_of         the scopes that a login may request
Routes            names the API method of a request by verb and path; knows batches and parts of uploads
batched_calls     the calls that travel in one batch
batched_answers   the answers that come back for them
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.parser import BytesParser
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from quota.common.hosts import readings_of
from quota.common.text import show
from quota.errors import ConfigError

if TYPE_CHECKING:
    from email.message import Message


def discovered(api: str, version: str) -> dict[str, Any] | None:
    """The discovery document of an API; None where the client has none."""
    from googleapiclient.discovery_cache import get_static_doc

    text = None
    with suppress(OSError, ValueError):  # a name that no file can have
        text = get_static_doc(api, version)
    if text is None:
        return None
    document: dict[str, Any] = json.loads(text)
    return document


def description(api: str, version: str) -> dict[str, Any]:
    """The discovery document of an API. Raises ConfigError where the client has none."""
    document = discovered(api, version)
    if document is None:
        raise ConfigError(
            f"the installed Google client has no description of {show(api)} {show(version)}; check both names"
        )
    return document


def scopes_of(document: Mapping[str, Any]) -> list[str]:
    """The scopes that a login may request from an API."""
    return list(document.get("auth", {}).get("oauth2", {}).get("scopes", {}))


# -- the method of a request -------------------------------------------------------------------------------------------


class Routes:
    """Names the requests to the API of this discovery document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        prefix = urlsplit(document["rootUrl"]).path.rstrip("/")
        self._batch = f"{prefix}/{document.get('batchPath', 'batch')}"
        self._patterns: list[tuple[int, str, re.Pattern[str], str]] = []
        self._uploads: list[re.Pattern[str]] = []
        base = f"/{document['servicePath']}"
        for method in methods_of(document):
            path = base + method.get("flatPath", method["path"])
            self._add(method, prefix + path)
            if "mediaUpload" in method:
                for protocol in method["mediaUpload"]["protocols"].values():
                    self._add(method, prefix + protocol["path"])
                    self._uploads.append(_pattern(prefix + protocol["path"]))
        # `/things/x:cancel` also fits `/things/{id}`, so the method with the longest fixed path comes first.
        self._patterns.sort(key=itemgetter(0), reverse=True)

    def _add(self, method: Mapping[str, Any], path: str) -> None:
        fixed = len(re.sub(r"\{[^}]*\}", "", path))
        self._patterns.append((fixed, method["httpMethod"], _pattern(path), method["id"]))

    def methods(self, verb: str, path: str) -> list[str]:
        """For example ["youtube.videos.list"] for ("GET", "/youtube/v3/videos"). A path with several readings has
        several methods; an unknown method has none.

        `/youtube/v3//Search/` counts as a search, and HEAD as GET: upstream may read them so, and the book's default
        price is far below a search.
        """
        get = "GET" if verb == "HEAD" else verb
        names = [self._matching(verb, path), *(self._matching(get, reading) for reading in readings_of(path))]
        return [name for name in names if name is not None]

    def _matching(self, verb: str, path: str) -> str | None:
        return next((name for _, v, pattern, name in self._patterns if v == verb and pattern.fullmatch(path)), None)

    def is_batch(self, verb: str, path: str) -> bool:
        begins = f"{self._batch}/".lower()
        return verb == "POST" and any(f"{reading}/".lower().startswith(begins) for reading in readings_of(path))

    def is_part(self, verb: str, path: str, query: str) -> bool:
        """Whether a request continues an upload. With another verb than PUT, upstream may begin a new upload."""
        is_clear = verb == "PUT" and len(readings_of(path)) == 1
        return is_clear and "upload_id" in parse_qs(query) and any(pattern.fullmatch(path) for pattern in self._uploads)


def _pattern(path: str) -> re.Pattern[str]:
    """`{+name}` may contain slashes, `{name}` may not."""
    parts = re.split(r"(\{[^}]*\})", path)
    return re.compile(
        "".join(
            re.escape(part) if not part.startswith("{") else ".+" if part.startswith("{+") else "[^/]+"
            for part in parts
        ),
        re.IGNORECASE,
    )


def methods_of(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from resource.get("methods", {}).values()
    for inner in resource.get("resources", {}).values():
        yield from methods_of(inner)


# -- batches -----------------------------------------------------------------------------------------------------------


def _parts(content_type: str, body: Any) -> Iterator[tuple[str, str, bytes]]:
    """(content id, first line, the rest) of each application/http part of a multipart body."""
    raw = body.encode("utf-8", "replace") if isinstance(body, str) else body
    if not isinstance(raw, bytes) or not content_type.lower().startswith("multipart/"):
        return
    message = BytesParser().parsebytes(
        b"content-type: " + content_type.encode("latin-1", "replace") + b"\r\n\r\n" + raw
    )
    for number, part in enumerate(message.get_payload() if message.is_multipart() else ()):
        payload: bytes = part.get_payload(decode=True) or b""
        line, _, rest = payload.lstrip().partition(b"\n")
        yield _content_id(part, number), line.decode("latin-1").strip(), rest


def _content_id(part: Message, number: int) -> str:
    """The id that a request and its answer share: upstream answers `<x + 1>` as `<response-x + 1>`.

    A part without an id gets its position in the batch.
    """
    given = str(part.get("content-id", "")).strip().strip("<>")
    return " ".join(given.removeprefix("response-").split()) or f"#{number}"


def batched_calls(content_type: str, body: Any) -> Iterator[tuple[str, str, str]]:
    """(verb, path, content id) of each call in a batch."""
    for content_id, line, _ in _parts(content_type, body):
        verb, _, target = line.partition(" ")
        yield verb.upper() or "?", urlsplit(target.partition(" ")[0]).path, content_id


def batched_answers(content_type: str, body: Any) -> Iterator[tuple[int, bytes, str]]:
    """(status, body, content id) of each answer in the answer to a batch."""
    for content_id, line, rest in _parts(content_type, body):
        words = line.split()
        status = int(words[1]) if len(words) > 1 and re.fullmatch("[0-9]{3}", words[1]) else 0
        head_and_body = re.split(rb"\r?\n\r?\n", rest, maxsplit=1)
        yield status, head_and_body[-1].strip() if len(head_and_body) == 2 else b"", content_id
