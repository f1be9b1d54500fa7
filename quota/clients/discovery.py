"""What the installed Google client knows of an API: its discovery document. Reading it imports no client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from quota.common.text import show
from quota.errors import ConfigError

KEY_HEADER = "x-goog-api-key"
"""Where Google's APIs take a key. Not in the URL, which others log."""


def discovered(api: str, version: str) -> dict[str, Any] | None:
    """The discovery document of an API; None where the client has none."""
    from googleapiclient.discovery_cache import get_static_doc

    text = None
    with suppress(OSError, ValueError):  # what no file can be called
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
    """What a login may ask for at an API."""
    return list(document.get("auth", {}).get("oauth2", {}).get("scopes", {}))
