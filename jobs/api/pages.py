"""The one page of the API: what can be asked. It comes from here alone, without a script."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, StrictUndefined

from quota.common.resources import read_text
from quota.jobs.api.openapi import resolved

POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = read_text("quota.jobs.api", "style.css").encode()


def page(document: dict[str, Any]) -> bytes:
    """The page that lists an OpenAPI document."""
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = jinja.from_string(read_text("quota.jobs.api", "page.html"))
    return template.render(document=document, resolved=resolved).encode()
