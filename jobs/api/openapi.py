"""The OpenAPI 3.1 document of the API, `openapi.json` beside this file, and the one page that lists it.

Tests hold every answer to the document. The page comes from here alone, without a script.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, StrictUndefined

from quota.common.resources import read_text

POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = read_text("quota.jobs.api", "style.css").encode()


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


def page(document: dict[str, Any]) -> bytes:
    """The page that lists an OpenAPI document."""
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = jinja.from_string(read_text("quota.jobs.api", "page.html"))
    return template.render(document=document, resolved=resolved).encode()
