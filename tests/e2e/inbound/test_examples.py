"""The examples in docs/inbound.md, each under a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.inbound_http import Client, serving
from support.pages import blocks

PAGE = (Path(__file__).resolve().parents[3] / "docs/inbound.md").read_text(encoding="utf-8")
FILES = {block.file: block.text for block in blocks(PAGE) if block.file}


def without_seconds(value: str) -> str:
    return re.sub("t=[0-9]+|^[0-9]+", "SECONDS", value)


(SHOWN,) = (block.text for block in blocks(PAGE) if block.language == "http")
REFUSAL = {
    name.lower(): without_seconds(value) for name, _, value in (line.partition(": ") for line in SHOWN.splitlines()[1:])
}
"""The header fields of the refusal on the page."""

SITE = {
    "mysite/__init__.py": "",
    "mysite/settings.py": """
ROOT_URLCONF = "mysite.urls"
ALLOWED_HOSTS = ["*"]
SECRET_KEY = "for-this-test-only"
""",
    "mysite/urls.py": """
from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt


def search(request):
    return JsonResponse({"q": request.GET.get("q", "")})


@csrf_exempt
def login(request):
    return JsonResponse({"ok": True})


urlpatterns = [path("search", search), path("login", login)]
""",
}
"""The Django project around the page's wsgi.py."""


@pytest.mark.parametrize(
    ("kind", "name"), [("asgi", "fastapi_app:app"), ("wsgi", "flask_app:app"), ("wsgi", "wsgi:application")]
)
def test_an_example_is_limited(kind: str, name: str, tmp_path: Path) -> None:
    for file, text in {**FILES, **SITE}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    with serving(tmp_path, kind, name) as served:
        ask = Client(served.port)
        found = ask("/search?q=a")
        assert (found.status, json.loads(found.body)["q"] in ("a", "any")) == (200, True)
        assert found.headers["ratelimit-policy"] == '"search";q=100;w=60'
        assert found.headers["ratelimit"].startswith('"search";r=99;t=')
        while (refused := ask("/search")).status == 200:
            pass
        assert {name: without_seconds(refused.headers[name]) for name in REFUSAL} == REFUSAL
        assert [ask("/login", "POST").status for _ in range(6)] == [200] * 5 + [429]
        refused = ask("/LOGIN/", "POST")
        assert refused.headers["content-type"] == "application/problem+json"
        assert json.loads(refused.body)["violated-policies"] == ["login"]
        assert int(refused.headers["retry-after"]) > 890
        assert ask("/login", "HEAD").headers["ratelimit-policy"] == '"default";q=600;w=60'
        ask.close()
