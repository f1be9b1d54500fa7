"""An HTTP server that sends whatever bytes a test makes, also those that no server should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from typing import Self

Send = Callable[[str], Iterable[bytes]]
"""What to send for a request, by its target: piece by piece, until the client has enough."""


def head(*headers: str, status: str = "200 OK") -> bytes:
    """A status line and headers, without the empty line after them. The connection serves no other request: a client
    that believed it did would charge for one that nobody reads."""
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", "Connection: close", *headers)).encode()


def whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """An answer as it should be."""
    return head(f"Content-Length: {len(body)}", *headers, status=status) + b"\r\n" + body


class RawServer:
    """Serves inside `with`, on loopback, one request a connection. `targets` lists them; `sent` counts bytes."""

    def __init__(self, send: Send) -> None:
        self.targets: list[str] = []
        self.sent = 0
        self.stopping = threading.Event()
        self._send = send
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def pause(self, seconds: float) -> None:
        """For a `send` that takes its time: over at once when the server is."""
        self.stopping.wait(seconds)

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = b""
                while b"\r\n\r\n" not in request:
                    piece = connection.recv(65_536)
                    if not piece:
                        return
                    request += piece
                target = request.split(b" ", 2)[1].decode()
                self.targets.append(target)
                for piece in self._send(target):
                    if self.stopping.is_set():
                        return
                    connection.sendall(piece)
                    self.sent += len(piece)
            except OSError:
                return  # the client has enough

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
