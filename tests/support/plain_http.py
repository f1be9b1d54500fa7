"""HTTP servers of a test's own: one that answers what a test tells it to and remembers what arrived, also as a proxy
for TLS, and one that sends whatever bytes a test makes, also those that no server should."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, Self

from support.certificates import Pair


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is no news."""


class Serving:
    """Serves inside `with`, on loopback."""

    def __init__(self, handler: type[BaseRequestHandler]) -> None:
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass(frozen=True)
class Arrived:
    """One request, its header names in lower case."""

    verb: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """Silence for `wait_s` comes before the reply, for `stall_s` after it; then `hang_up` closes the connection
    without having announced that."""

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    hang_up: bool = False
    stall_s: float = 0
    wait_s: float = 0


class PlainServer(Serving):
    """Serves inside `with`, on loopback. `answer` is asked for each request; `arrived` lists them in order.

    With `shown`, a certificate and its key, it speaks TLS. Asked to CONNECT, it is a proxy: it passes bytes to that
    port of loopback, whatever the host is called. An answer of 407 refuses that.
    """

    def __init__(self, answer: Callable[[Arrived], Answer], shown: Pair | None = None) -> None:
        self.arrived: list[Arrived] = []
        self._stopping = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1
            timeout = 30

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                while self.headers.get("Transfer-Encoding") == "chunked" and (size := self.rfile.readline().strip()):
                    body += self.rfile.read(int(size, 16) + 2)[:-2]
                    if size == b"0":
                        break
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Arrived(self.command, self.path, headers, body)
                outer.arrived.append(request)
                reply = answer(request)
                outer._stopping.wait(reply.wait_s)
                self.send_response_only(reply.status)
                length = {} if "Transfer-Encoding" in reply.headers else {"Content-Length": str(len(reply.body))}
                usual = {"Date": self.date_time_string(), "Content-Type": "application/json", **length}
                for name, value in (usual | dict(reply.headers)).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)
                self.wfile.flush()
                outer._stopping.wait(reply.stall_s)
                self.close_connection = self.close_connection or reply.hang_up

            do_GET = do_HEAD = do_POST = do_PUT = serve  # noqa: N815

            def do_CONNECT(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Arrived("CONNECT", self.path, headers, b"")
                outer.arrived.append(request)
                if answer(request).status == 407:
                    self.send_error(407)
                    return
                with socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2]))) as there:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.flush()
                    back = threading.Thread(target=_pass, args=(there, self.connection), daemon=True)
                    back.start()
                    _pass(self.connection, there)
                    back.join()
                self.close_connection = True

            def log_message(self, *args: object) -> None: ...

        super().__init__(Handler)
        self.host = f"127.0.0.1:{self.port}"
        self.address = f"{'https' if shown else 'http'}://{self.host}"
        if shown:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*shown)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        super().__exit__()


def _pass(source: socket.socket, sink: socket.socket) -> None:
    """Pass bytes on until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


# -- any bytes ---------------------------------------------------------------------------------------------------------


def head(*headers: str, status: str = "200 OK", keeps: bool = False) -> bytes:
    """A status line and headers, without the empty line after them. Unless it `keeps` the connection, that serves no
    other request: a client that believed it did would charge for one that nobody reads."""
    lines = (f"HTTP/1.1 {status}", *([] if keeps else ["Connection: close"]), *headers)
    return "".join(f"{line}\r\n" for line in lines).encode()


def whole(body: bytes, *headers: str, status: str = "200 OK", keeps: bool = False) -> bytes:
    """An answer as it should be."""
    return head(f"Content-Length: {len(body)}", *headers, status=status, keeps=keeps) + b"\r\n" + body


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """An answer after which the connection goes on."""
    return whole(body, *headers, status=status, keeps=True)


class ResetError(Exception):
    """Raised by what serves a connection: it is to be reset."""


class Connections:
    """Serves inside `with`, on loopback, each connection in a thread of its own."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.connections: list[socket.socket] = []
        """All that ever were."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.address = f"http://{self.host}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def serve(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        """For what takes its time: over at once when the server is."""
        self.stopping.wait(seconds)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client has enough
            try:
                self.serve(connection)
            except ResetError:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for connection in (self._listener, *self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


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
        (value,) = [value for field_name, value in self.fields if field_name == name] or [None]
        return value


Answering = Callable[[Reached], Iterable[bytes]]


class Upstream(Connections):
    """`answer` gives the pieces of an answer; after them the connection goes on, unless the last one is empty."""

    def __init__(self, answer: Answering = lambda _: [answer(b"{}")]) -> None:
        super().__init__()
        self.answer = answer
        self.reached: list[Reached] = []
        self.ended = threading.Event()
        """A connection has ended before its answer was sent."""
        self.read_body = True

    def serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as file, contextlib.suppress(ValueError):
            while head := _head(file):
                request = Reached(head)
                self.reached.append(request)
                if self.read_body:
                    _read_body(file, request)
                try:
                    last = b""
                    for last in self.answer(request):
                        connection.sendall(last)
                except OSError:
                    self.ended.set()
                    return
                if last == b"":  # nothing more is said, and the connection ends
                    return


def _head(file: Any) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = file.readline()
        if not line:
            return b""
        head += line
    return head[:-4]


def _read_body(file: Any, request: Reached) -> None:
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


Send = Callable[[str], Iterable[bytes]]
"""What to send for a request, by its target: piece by piece, until the client has enough."""


class RawServer(Upstream):
    """One request a connection. `targets` lists them."""

    def __init__(self, send: Send) -> None:
        super().__init__(lambda request: self._pieces(send(request.target)))

    @property
    def targets(self) -> list[str]:
        return [request.target for request in self.reached]

    def drip(self, start: bytes, piece: bytes = b" ") -> Iterator[bytes]:
        """All at once what comes before the drops, which never end."""
        yield start
        while not self.stopping.is_set():
            self.pause(0.05)
            yield piece

    def _pieces(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self.stopping.is_set():
                break
            yield piece
        yield b""
