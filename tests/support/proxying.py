"""The proxy over a small API that a cost book describes, and an upstream that remembers what reached it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any, Self

import quota
from quota.proxy.app import make_app
from quota.web.serving import names_of
from support.plain_http import whole
from support.setup import charges_at
from support.web import served

if TYPE_CHECKING:
    from pathlib import Path

    from quota.rules.spent import Spent


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
[[credentials.main.limits]]
name = "hour"
quota = {limit}
window = "1h"
headroom = 0
"""


@dataclass
class Reached:
    """A request as it reached upstream: the head without its last empty line, and the body as it was framed."""

    head: bytes
    body: bytes = b""
    complete: bool = False

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def fields(self) -> list[tuple[str, str]]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]

    def field(self, name: str) -> str | None:
        (value,) = [value for known, value in self.fields if known == name] or [None]
        return value


Answering = Callable[[Reached], Iterable[bytes]]


@dataclass
class Upstream:
    """Serves inside `with`, on loopback. `answer` gives the pieces of an answer; after them the connection goes on,
    unless the last one is empty."""

    answer: Answering = lambda _: [answer(b"{}")]
    reached: list[Reached] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    """A connection has ended before its answer was sent."""
    read_body: bool = True

    def __enter__(self) -> Self:
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *tuple(self._open)):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def address(self) -> str:
        return f"http://{self.host}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            file = connection.makefile("rb")
            while head := self._head(file):
                request = Reached(head)
                self.reached.append(request)
                if self.read_body:
                    self._body(file, request)
                try:
                    last = b""
                    for last in self.answer(request):
                        connection.sendall(last)
                except OSError:
                    self.ended.set()
                    return
                if last == b"":  # nothing more is said, and the connection ends
                    return
        self._open.discard(connection)

    @staticmethod
    def _head(file: Any) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = file.readline()
            if not line:
                return b""
            head += line
        return head[:-4]

    @staticmethod
    def _body(file: Any, request: Reached) -> None:
        """The body, in memory only where it is small. Raises ValueError for one that is cut."""
        length = request.field("content-length")
        if request.field("transfer-encoding") is None:
            sizes: Iterable[int] = [int(length or 0)]
        else:
            sizes = iter(lambda: int(file.readline() or b"x", 16), 0)
        for size in sizes:
            left = size
            while left:
                piece = file.read(min(left, 1 << 16))
                if not piece:
                    raise ValueError
                left -= len(piece)
                if len(request.body) < 1 << 20:
                    request.body += piece
            if length is None and size:
                file.readline()
        if request.field("transfer-encoding") is not None:
            file.readline()
        request.complete = True


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
        with quota.open(config) as self.session, served(app, passes_on=True) as (_, self.port):
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

    def raw(self, sent: bytes) -> bytes:
        """Everything that comes back for these bytes, until the proxy ends the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            got = b""
            with suppress(ConnectionError):  # it may end what it refuses before all of it is sent
                connection.sendall(sent)
            with suppress(ConnectionResetError):
                while piece := connection.recv(1 << 16):
                    got += piece
            return got

    def raw_for(self, sent: bytes, answers: int) -> bytes:
        """What comes back for these bytes, until there are so many answers, or the proxy ends the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            got = b""
            with suppress(ConnectionError):
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
        (value,) = [value for known, value in self.fields if known == name] or [None]
        return value

    @property
    def problem(self) -> dict[str, Any]:
        assert self.field("content-type") == "application/problem+json"
        found: dict[str, Any] = json.loads(self.body)
        assert found["status"] == self.status
        return found


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """An answer after which the connection goes on."""
    return whole(body, *headers, status=status).replace(b"Connection: close\r\n", b"")
