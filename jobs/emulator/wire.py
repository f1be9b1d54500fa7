"""The emulator's HTTP server: reads requests and writes replies."""

import gzip
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from quota.jobs.emulator import replies
from quota.jobs.emulator.replies import Rejected, Reply

MAX_BODY_BYTES = 64 * 1024 * 1024
_GZIP_ABOVE_BYTES = 1024
_IDLE_SECONDS = 300
_LINGER_SECONDS = 5
_STOP_SECONDS = 2
_MAX_PARAMETERS = 1_000

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """One request, read in full. If `malformed`, its target does not decode, and `params` is empty."""

    verb: str
    path: str
    params: Mapping[str, str]
    headers: Message
    body: bytes
    target: str
    malformed: bool = False


def make_request(verb: str, target: str, headers: Message, body: bytes) -> Request:
    """Decode a request's target. A client sends an overlong GET as a POST with the query as its body."""
    override = headers.get("X-HTTP-Method-Override")
    try:
        if re.search(r"%(?![0-9A-Fa-f]{2})", target):
            raise ValueError("a percent sign without two hexadecimal digits")
        split = urlsplit(target)
        query, path = split.query, unquote(split.path, errors="strict")
        if override and verb == "POST":
            verb = override.upper()
            if headers.get_content_type() == "application/x-www-form-urlencoded":
                query, body = body.decode(), b""
        params: dict[str, str] = {}
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_PARAMETERS)
        for name, value in pairs:
            params[name] = f"{params[name]},{value}" if name in params else value
    except ValueError:
        path = target.partition("?")[0]
        return Request(verb, path, {}, headers, body, target, malformed=True)
    return Request(verb, path, params, headers, body, target)


def encode_body(body: object) -> bytes:
    """The body in UTF-8, as upstream sends it. A lone surrogate, which UTF-8 cannot encode, becomes a JSON escape."""
    if isinstance(body, bytes):
        return body
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    server: "Server"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # without this, a page on a kept-alive connection takes 44 ms
    wbufsize = -1  # headers and body leave in one write
    timeout = _IDLE_SECONDS

    def _serve(self) -> None:
        body = self._read_body()
        if body is None:
            return
        request = make_request(self.command, self.path, self.headers, body)
        try:
            reply = self.server.service(request)
        except Rejected as rejected:
            reply = rejected.reply
        except Exception as error:  # one bad request must not stop the emulator
            # Print only the kind of error: its text might quote a key.
            _log.error("emulator_failed path=%s error=%s", request.path, type(error).__name__)
            reply = replies.error("internal_error")
        self.send_reply(reply)

    # The base class looks these names up.
    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815

    def handle_expect_100(self) -> bool:
        accepted = super().handle_expect_100()
        self.wfile.flush()  # the client does not send its body until it sees this
        return accepted

    def _read_body(self) -> bytes | None:
        """The request's body. None when it is incomplete: the client gets an error, or has disconnected."""
        length, wrong = self.headers.get("Content-Length", "0"), None
        if "Transfer-Encoding" in self.headers:
            wrong = replies.bad_request("Length Required", 411)
        elif not (length.isascii() and length.isdigit()):
            wrong = replies.bad_request("Bad Content-Length")
        elif len(length) > 15 or int(length) > MAX_BODY_BYTES:
            wrong = replies.bad_request("Request Entity Too Large", 413)
        if wrong is not None:
            self._refuse(wrong)
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        return body

    def send_reply(self, reply: Reply) -> None:
        head, content = self.head_and_content(reply)
        self.wfile.write(head + content)

    def head_and_content(self, reply: Reply) -> tuple[bytes, bytes]:
        headers = list(reply.headers)
        content = b""
        if reply.body is not None:
            headers.append(("Content-Type", reply.content_type))
            content = encode_body(reply.body)
        accepted = self.headers.get("Accept-Encoding", "") if self.headers else ""
        if len(content) > _GZIP_ABOVE_BYTES and "gzip" in accepted:
            content = gzip.compress(content, compresslevel=1, mtime=0)
            headers.append(("Content-Encoding", "gzip"))
        if reply.status != 204:  # a 204 has neither a body nor a length, by definition
            headers.append(("Content-Length", str(len(content))))
        if self.close_connection:
            headers.append(("Connection", "close"))
        phrase = self.responses.get(reply.status, ("", ""))[0]
        lines = [f"HTTP/1.1 {reply.status} {phrase}", f"Date: {self.date_time_string()}"]
        lines += [f"{name}: {value}" for name, value in headers]
        return "\r\n".join((*lines, "", "")).encode("latin-1", "replace"), content

    def hang_up(self) -> None:
        """Close without notice, but cleanly: the client reads the end of the stream, not a reset.

        The server discards what the client still writes, as if the connection were dead.
        """
        self.close_connection = True
        self.wfile.flush()
        deadline = time.monotonic() + _LINGER_SECONDS
        with suppress(OSError):  # the client may have gone first
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_SECONDS)
            while self.connection.recv(65_536) and time.monotonic() < deadline:
                pass

    def _refuse(self, reply: Reply) -> None:
        """Answer a request that was not read to its end, and close the connection."""
        self.close_connection = True
        self.send_reply(reply)
        self.hang_up()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the base class's errors about malformed requests in upstream's shape."""
        self.headers = getattr(self, "headers", None) or Message()
        self._refuse(replies.bad_request(self.responses.get(code, ("Bad Request", ""))[0], code))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: a request line may hold a key."""


class Server(ThreadingHTTPServer):
    """Serves on loopback with one thread per connection. Stopping does not wait for idle clients."""

    request_queue_size = 128
    daemon_threads = True
    handler: type[Handler] = Handler

    def __init__(self, port: int, service: Callable[[Request], Reply]) -> None:
        """`service` answers a request, or raises Rejected."""
        self.service = service
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), self.handler)

    def server_bind(self) -> None:
        # HTTPServer's own method looks up the host's name, which may take seconds without a network.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._connections.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: clients may disconnect at any time, and the server must not print a traceback."""

    def close(self) -> None:
        """Stop listening, close all connections, and wait for their threads to end."""
        self.server_close()
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):  # the client may have gone first
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._connections, _STOP_SECONDS)
