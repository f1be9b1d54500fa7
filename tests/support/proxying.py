"""The proxy over a small API that a cost book describes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Self

import quota
from quota.proxy.app import make_app
from quota.rules.spent import Spent
from quota.web.serving import names_of
from support.plain_http import Upstream
from support.setup import charges_at
from support.web import served

SECRET = "s-e-c-r-e-t/0123456789"  # noqa: S105  # of the test

BOOK = """
api = "things"
source = "https://things.example/limits"
read_on = 2026-11-25
hosts = ["api.things.example"]

[routes]
"GET /status" = "status"
"GET /search/**" = "search"
"POST /chat" = "chat"
"POST /dear" = "dear"
"GET /**" = "read"
"**" = "write"

[buckets.calls]
quota = 1_000
resets = "1h"

[default]
get = 1
other = 1

[methods]
status = 0
search = 10
read = 1
write = 5
dear = 2_000
chat = { reserve = { json = "/max_tokens", default = 100 } }

[answers]
units = { json = "/usage" }
closed = [{ status = 429, lasts = "10m" }]
"""

CONFIG = """
[ledger]
url = "{ledger}"
{more}
[credentials.main]
api = "things.toml"
{auth}
endpoint = "{address}"
limits = [{{ name = "hour", quota = {limit}, window = "1h", headroom = 0 }}]
"""


class House:
    """A folder with a configuration, and the proxy over it while `open` lasts."""

    def __init__(self, folder: Path, upstream: Upstream) -> None:
        self.folder, self.upstream = folder, upstream
        self.port = 0
        self.session: quota.Session

    def write(
        self,
        *,
        limit: int = 1_000,
        book: str = BOOK,
        auth: str = 'key = "file:key"',
        ledger: str = "sqlite:///ledger.db",
        more: str = "",
        rest: str = "",
        address: str = "",
    ) -> None:
        (self.folder / "key").write_text(SECRET)
        (self.folder / "things.toml").write_text(book)
        text = CONFIG.format(limit=limit, auth=auth, ledger=ledger, more=more, address=address or self.upstream.address)
        (self.folder / "quota.toml").write_text(text + rest)

    @contextmanager
    def open(self, *, token: str | None = None, **options: Any) -> Iterator[Self]:
        self.write(**options)
        config = self.folder / "quota.toml"
        app = make_app(quota.open_async(config), names_of("127.0.0.1"), token)
        with quota.open(config) as self.session, served(app, passes_on=True) as self.port:
            yield self

    def spent(self) -> list[Spent]:
        """All charges, as they count now."""
        return charges_at(self.session.ledger, "main")

    @property
    def units(self) -> int:
        return sum(entry.units for entry in self.spent())

    def ask(
        self, target: str, verb: str = "GET", body: Any = None, headers: Any = None, credential: str = "main"
    ) -> Answered:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(verb, f"/{credential}{target}", body, headers or {})
            return Answered.of(connection.getresponse())
        finally:
            connection.close()

    def raw(self, sent: bytes, answers: int = 1_000) -> bytes:
        """What comes back for these bytes, until there are so many answers, or the proxy ends the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            got = b""
            with suppress(ConnectionError):  # it may end what it refuses before all of it is sent
                connection.sendall(sent)
            with suppress(ConnectionResetError):
                while got.count(b"HTTP/1.1 ") < answers and (piece := connection.recv(1 << 16)):
                    got += piece
            return got


@dataclass
class Answered:
    status: int
    fields: list[tuple[str, str]]
    body: bytes

    @classmethod
    def of(cls, response: HTTPResponse) -> Answered:
        return cls(response.status, [(name.lower(), value) for name, value in response.getheaders()], response.read())

    def field(self, name: str) -> str | None:
        (value,) = [value for field_name, value in self.fields if field_name == name] or [None]
        return value

    @property
    def problem(self) -> dict[str, Any]:
        assert self.field("content-type") == "application/problem+json"
        document: dict[str, Any] = json.loads(self.body)
        assert document["status"] == self.status
        assert document["error"]["message"] == document["detail"], "as the SDKs of language models read it"
        return document
