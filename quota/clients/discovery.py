"""One of Google's APIs, as the installed client describes it. Reading that imports no client.

description   the discovery document of an API
Routes        names the API method of a request to it; knows batches and parts of uploads
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any
from urllib.parse import parse_qs, urlsplit

from quota.common.hosts import readings_of
from quota.common.text import show
from quota.errors import ConfigError
from quota.terms.api import Route


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
        why = f"the installed Google client has no description of {show(api)} {show(version)}"
        raise ConfigError(f"{why}; check both names, or install google-api-python-client again")
    return document


def scopes_of(document: Mapping[str, Any]) -> list[str]:
    """The scopes that a login may request from an API."""
    return list(document.get("auth", {}).get("oauth2", {}).get("scopes", {}))


@cache
def routes_of(api: str, version: str, base_path: str) -> Routes | None:
    """The methods of an API in the installed client; None for an API that the client does not describe."""
    document = discovered(api, version)
    return None if document is None else Routes({**document, "rootUrl": f"{base_path}/"})


class Routes:
    """Names the requests to the API of this discovery document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        prefix = urlsplit(document["rootUrl"]).path.rstrip("/")
        self._batch = f"{prefix}/{document.get('batchPath', 'batch')}"
        base = f"{prefix}/{document['servicePath']}"
        calls: list[Route] = []
        self._uploads: list[Route] = []
        for method in methods_of(document):
            calls.append(_route(method, base + method.get("flatPath", method["path"])))
            protocols = method.get("mediaUpload", {}).get("protocols", {}).values()
            self._uploads += [_route(method, prefix + protocol["path"]) for protocol in protocols]
        # `/things/x:cancel` also fits `/things/{id}`, so the method with the longest fixed path comes first.
        self._all = sorted([*calls, *self._uploads], key=attrgetter("named_chars"), reverse=True)

    def first(self, verb: str, reading: str) -> Route | None:
        """For example the route of "youtube.videos.list" for ("GET", "/youtube/v3/videos"). HEAD counts as GET, and
        case does not matter: upstream may read them so, and the book's default price is far below a search."""
        return first_route(self._all, verb, reading)

    def is_batch(self, verb: str, url: str) -> bool:
        begins = f"{self._batch}/".lower()
        readings = readings_of(urlsplit(url).path) if verb.upper() == "POST" else ()
        return any(f"{reading}/".lower().startswith(begins) for reading in readings)

    def is_part(self, verb: str, url: str) -> bool:
        """Whether a request continues an upload. With another verb than PUT, or another `uploadType`, it may begin
        one."""
        path, fields = urlsplit(url).path, parse_qs(urlsplit(url).query)
        is_resumed = "upload_id" in fields and {*fields.get("uploadType", ())} <= {"resumable"}
        is_clear = is_resumed and verb.upper() == "PUT" and len(readings_of(path)) == 1
        return is_clear and any(route.pattern.fullmatch(path) for route in self._uploads)


def first_route(routes: Sequence[Route], verb: str, reading: str) -> Route | None:
    """The first of these routes that such a request matches."""
    return next((route for route in routes if route.matches(verb, reading)), None)


def _route(method: Mapping[str, Any], path: str) -> Route:
    """`{+name}` may contain slashes, `{name}` may not."""
    pattern = re.sub(r"\\{(\\\+)?[^}]*\}", lambda named: ".+" if named[1] else "[^/]+", re.escape(path))
    flags = re.IGNORECASE | re.ASCII | re.DOTALL
    return Route(method["httpMethod"], path, method["id"], re.compile(pattern, flags), ())


def methods_of(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from resource.get("methods", {}).values()
    for inner in resource.get("resources", {}).values():
        yield from methods_of(inner)
