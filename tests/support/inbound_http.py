"""Applications behind inbound limits, under a real uvicorn: in a thread, or as a process with workers.

Run as a program, it serves `answer` behind the rules of the quota.toml in its working folder, with so many workers:
`support.inbound_http 4`. Or an application in that folder: `support.inbound_http asgi MODULE:NAME`, or `wsgi`.
"""

from __future__ import annotations

import http.client
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

import uvicorn

from quota.inbound import Rule, Rules, asgi, load_rules
from quota.web.serving import address_of, listen, serve
from support.commands import Quota, program
from support.patience import be_patient
from support.web import Served, helped_by, in_a_thread, shared_socket

CONNECTIONS = 8


class Answer(NamedTuple):
    """One answer over HTTP, with the times of this machine's clock between which it was decided."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    asked_s: float
    answered_s: float

    @property
    def admitted(self) -> bool:
        return self.status == 200


class Client:
    """One connection to a server, kept open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def __call__(self, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        asked_s = time.monotonic()
        named = {name if "-" in name else name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, named)
        response = self._connection.getresponse()
        body = response.read()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, fields, body, asked_s, time.monotonic())

    def close(self) -> None:
        self._connection.close()


def status_of(port: int) -> int:
    """The status of one request, over a connection of its own."""
    with closing(Client(port)) as client:
        return client().status


def burst(port: int, path: str, count: int) -> list[Answer]:
    """So many requests at once, over several connections."""

    def send(share: int) -> list[Answer]:
        with closing(Client(port)) as client:
            return [client(path) for _ in range(share)]

    shares = [count // CONNECTIONS + (n < count % CONNECTIONS) for n in range(CONNECTIONS)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return [answer for answers in pool.map(send, shares) for answer in answers]


def running(app: Any, **options: Any) -> AbstractContextManager[int]:
    """`app` under a uvicorn in a thread of this process. Yields its port."""
    options = {"log_level": "critical", "ws": "websockets-sansio", "proxy_headers": False, **options}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # not the main thread
    return in_a_thread(server, listen("127.0.0.1", 0))


@contextmanager
def limited(app: Any, url: str, *rules: Rule, **options: Any) -> Iterator[Client]:
    """A client of `app` behind these rules, whose storage is at this url. The options are those of Rules."""
    with running(asgi(app, Rules(rules, url=url, **options))) as port, closing(Client(port)) as client:
        yield client


def serving(folder: Path, *arguments: str) -> Served:
    """This module as a program, with the quota.toml in a folder."""
    env = {"QUOTA_CONFIG": str(folder / "quota.toml")}
    return Served(Quota(folder).start(*arguments, script=program("support.inbound_http"), env=env))


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Says which process answers."""
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])
    body = str(os.getpid()).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def main(what: str, name: str = "") -> None:
    if what == "worker":
        serve(_patient_app, shared_socket(name), ready=lambda: print("ready", flush=True))
        return
    listener = listen("127.0.0.1", 0)
    address = address_of(listener)
    if what == "wsgi":
        _serve_wsgi(_loaded(name), listener)
    elif what == "asgi":
        serve(lambda: _loaded(name), listener, ready=lambda: print(address, flush=True))
    else:
        _helpers = helped_by([sys.executable, "-c", program("support.inbound_http"), "worker"], listener, int(what) - 1)
        serve(_patient_app, listener, ready=lambda: print(address, flush=True))


def _patient_app() -> Any:
    """In each worker: what is shown is what they admit together, however busy the machine is."""
    be_patient()
    return asgi(answer, load_rules())


def _loaded(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def _serve_wsgi(app: Any, listener: socket.socket) -> None:
    port = int(address_of(listener).rpartition(":")[2])
    listener.close()
    with make_server("127.0.0.1", port, app, handler_class=_Quiet) as server:
        print(f"http://127.0.0.1:{port}", flush=True)
        server.serve_forever()


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    main(*sys.argv[1:])
