"""The one page of the API: what can be asked. It comes from here alone, without a script."""

from __future__ import annotations

from html import escape
from typing import Any

from quota.jobs.api.openapi import resolved

POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

STYLE = b"""\
:root { color-scheme: light dark; --line: light-dark(#dcdfe4, #3a3f47); --accent: light-dark(#0b57a4, #8ab8ea); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { font: 600 1rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere; color: var(--accent); margin: 0; }
section { border-top: 1px solid var(--line); margin-top: 2rem; padding-top: 1.5rem; }
p { margin: .5rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 1rem 0 0; }
dt { font-family: ui-monospace, monospace; }
dd { margin: 0; }
a { color: var(--accent); }
"""


def page(document: dict[str, Any]) -> bytes:
    """The page that lists an OpenAPI document."""
    info = document["info"]
    listed = "".join(_operation(document, path, one["get"]) for path, one in document["paths"].items())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(info["title"])}</title>\n<link rel="stylesheet" href="/style.css">\n</head>\n<body>\n'
        f"<h1>{escape(info['title'])}</h1>\n<p>{escape(info['summary'])}</p>\n"
        f'<p>For programs: <a href="/openapi.json">openapi.json</a>, OpenAPI {escape(document["openapi"])}.</p>\n'
        f"{listed}</body>\n</html>\n"
    ).encode()


def _operation(document: dict[str, Any], path: str, operation: dict[str, Any]) -> str:
    parameters = "".join(
        f"<dt>{escape(one['name'])}</dt><dd>{escape(one['description'])}{_range(one)}</dd>\n"
        for one in (resolved(document, named) for named in operation["parameters"])
    )
    return (
        f"<section>\n<h2>GET {escape(path)}</h2>\n<p>{escape(operation['summary'])}. "
        f"{escape(operation['description'])}</p>\n"
        + (f"<dl>\n{parameters}</dl>\n" if parameters else "")
        + "</section>\n"
    )


def _range(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    if "maximum" in schema:
        return f" {schema['minimum']} to {schema['maximum']}; without it {schema['default']}."
    return "" if parameter["required"] else " Optional."
