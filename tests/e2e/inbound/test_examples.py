"""The examples in docs/inbound.md, each under a real server. PHP, Node and Python share one limit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quota.inbound.contract import Limit, Policy
from quota.inbound.rules import open_storage
from support.inbound_http import Client, serving
from support.pages import blocks
from support.servers import RedisServer

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
        response = ask("/search?q=a")
        assert (response.status, json.loads(response.body)["q"] in ("a", "any")) == (200, True)
        assert response.headers["ratelimit-policy"] == '"search";q=100;w=60'
        assert response.headers["ratelimit"].startswith('"search";r=99;t=')
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


# -- other languages ---------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[3]
LOGIN = Policy("login", (Limit(3, 10_000),), "log")

SEND = """
// RESP over a socket, enough for these commands.
function connect(port) {
  const waiting = [];
  let rest = Buffer.alloc(0);
  const socket = require('node:net').connect(port, '127.0.0.1');
  const line = (at) => {
    const end = rest.indexOf('\\r\\n', at);
    return end < 0 ? null : [rest.toString('latin1', at, end), end + 2];
  };
  const read = (at) => {
    const head = line(at);
    if (!head) return null;
    const [text, next] = head, kind = text[0], value = text.slice(1);
    if (kind === '+') return [value, next];
    if (kind === '-') return [new Error(value), next];
    if (kind === ':') return [Number(value), next];
    if (kind === '$') {
      if (value === '-1') return [null, next];
      const end = next + Number(value);
      return rest.length < end + 2 ? null : [rest.toString('utf8', next, end), end + 2];
    }
    const items = [];
    let place = next;
    for (let n = 0; n < Number(value); n++) {
      const one = read(place);
      if (!one) return null;
      items.push(one[0]);
      place = one[1];
    }
    return [items, place];
  };
  socket.on('data', (data) => {
    rest = Buffer.concat([rest, data]);
    for (let found; (found = read(0)); ) {
      rest = rest.subarray(found[1]);
      const [resolve, reject] = waiting.shift();
      found[0] instanceof Error ? reject(found[0]) : resolve(found[0]);
    }
  });
  const send = (...words) => new Promise((resolve, reject) => {
    waiting.push([resolve, reject]);
    const parts = [Buffer.from(`*${words.length}\\r\\n`)];
    for (const word of words.map((word) => Buffer.from(word))) {
      parts.push(Buffer.from(`$${word.length}\\r\\n`), word, Buffer.from('\\r\\n'));
    }
    socket.write(Buffer.concat(parts));
  });
  return { send, close: () => socket.end() };
}
"""

ASK = """
(async () => {
  const { send, close } = connect(PORT);
  console.log(JSON.stringify(await admit(send, '203.0.113.7')));
  close();
})();
"""


def example(language: str) -> str:
    return (ROOT / "docs" / "examples" / f"login_limit.{language}").read_text(encoding="utf-8")


def program(language: str, server: RedisServer, folder: Path) -> list[str]:
    """The command that runs the example, which asks once."""
    path = folder / f"inbound.{language}"
    if language == "php":
        if shutil.which("php") is None:
            pytest.skip("no php on PATH; on Debian: apt-get install php-cli php-redis")
        path.write_text(example("php").replace("6379", str(server.port)))
        return ["php", str(path)]
    if shutil.which("node") is None:
        pytest.skip("no node on PATH; on Debian: apt-get install nodejs")
    path.write_text(example("js") + SEND + ASK.replace("PORT", str(server.port)))
    return ["node", str(path)]


@pytest.mark.parametrize("languages", [("php", "python", "js"), ("js", "php", "python"), ("python", "js", "php")])
def test_one_visitor_has_three_logins_whatever_they_are_counted_by(
    server: RedisServer, home: Path, languages: tuple[str, ...]
) -> None:
    """Whoever comes first makes the salts for all."""
    storage = open_storage(server.url)
    for _ in range(2):
        left = []
        for language in languages:
            if language == "python":
                left.append(storage.decide(LOGIN, "203.0.113.7").admitted)
            else:
                command = program(language, server, home)
                done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=300, check=False)
                assert (done.stderr, done.returncode) == ("", 0), done.stdout
                left.append(json.loads(done.stdout)["admitted"])
        assert left in ([True] * 3, [False] * 3)
    assert left == [False] * 3
    storage.close()
