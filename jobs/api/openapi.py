"""The OpenAPI 3.1 document of the API, `openapi.json` beside this file. Tests hold every answer to it."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from quota.common.resources import read_text


def document() -> dict[str, Any]:
    written: dict[str, Any] = json.loads(read_text("quota.jobs.api", "openapi.json"))
    written["info"]["version"] = version("quota-ledger")
    return written


def resolved(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A part of the document; where it refers to another one, that one."""
    if "$ref" not in part:
        return part
    _, _, kind, name = part["$ref"].split("/")
    found: dict[str, Any] = document["components"][kind][name]
    return found
