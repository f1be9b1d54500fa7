"""A small language model over HTTP: it says what each answer used, in every way in which such APIs say it, or does not.

A request's JSON says what is to happen: `max_tokens`, `use` (what it really costs), and `how`:

    json      one document with `usage`         events    a stream of events, the last with `usage`, then [DONE]
    silent    one document without              no-done   the same stream without [DONE]
    header    the header X-Cost                 quiet     a stream without `usage`
    gzip, br  a packed document                 cut       a stream that breaks off after an event with a part of `usage`
    packed    a packed stream                   hang-up   no answer at all
    short     as json, but less than announced  closed    as json, with an `error`
    free      as json, with `free`
                                                steps     a stream whose every event waits for `go_on`
"""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


class Model:
    """Serves inside `with`, on loopback. `asked` lists the requests that arrived, in order."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.go_on = threading.Semaphore(0)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(asked)
                how, use = asked.get("how", "json"), asked["use"]
                if how == "hang-up":
                    self.close_connection = True
                elif how in ("events", "no-done", "quiet", "cut", "packed", "steps"):
                    self._stream(how, use)
                else:
                    self._document(how, use)

            def _document(self, how: str, use: int) -> None:
                usage: dict[str, Any] = {} if how in ("silent", "header") else {"usage": {"total_tokens": use}}
                usage |= {"closed": {"error": "slow"}, "free": {"free": True}, "short": {"free": True}}.get(how, {})
                body = json.dumps({"choices": ["x" * 100], **usage}).encode()
                headers = {"X-Cost": str(use)} if how in ("header", "short") else {}
                if how == "gzip":
                    body, headers = gzip.compress(body), {"Content-Encoding": "gzip"}
                elif how == "br":
                    import brotli

                    body, headers = brotli.compress(body), {"Content-Encoding": "br"}
                self.close_connection = how == "short"
                announced = len(body) + (800 if how == "short" else 0)
                self._begin("application/json", {**headers, "Content-Length": str(announced)})
                self.wfile.write(body)

            def _stream(self, how: str, use: int) -> None:
                go_on = outer.go_on
                packed = {"Content-Encoding": "gzip"} if how == "packed" else {}
                self._begin("text/event-stream; charset=utf-8", {**packed, "Transfer-Encoding": "chunked"})
                pieces = list(events(how, use))
                if how == "packed":
                    whole = gzip.compress(b"".join(pieces))
                    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
                for piece in pieces:
                    if how == "steps":
                        go_on.acquire()
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    self.wfile.flush()
                if how == "cut":
                    self.close_connection = True
                    return
                self.wfile.write(b"0\r\n\r\n")

            def _begin(self, content_type: str, headers: dict[str, str]) -> None:
                self.send_response(200)
                for name, value in {"Content-Type": content_type, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = 100  # two event loops connect ten times at once

            def handle_error(self, *args: object) -> None:
                """A client went away."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}/v1/chat"

    def forget(self) -> None:
        """Whoever waits to go on does so, and the next ones wait for another `go_on`."""
        self.go_on.release(100)
        self.go_on = threading.Semaphore(0)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forget()
        self._server.shutdown()
        self._server.server_close()


def events(how: str, use: int) -> Iterator[bytes]:
    for n in range(3):
        usage = {"total_tokens": use // 2} if how == "cut" else None
        yield b"data: " + json.dumps({"choices": [str(n)], "usage": usage}).encode() + b"\r\n\r\n"
    if how == "cut":
        return
    if how != "quiet":
        yield b"event: last\ndata: " + json.dumps({"choices": [], "usage": {"total_tokens": use}}).encode() + b"\n\n"
    if how != "no-done":
        yield b"data: [DONE]\n\n"
