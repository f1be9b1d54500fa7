"""A socket that speaks just enough of Redis' protocol to say what a test tells it to."""

from __future__ import annotations

import socketserver
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class RespServer:
    """Serves inside `with`, on loopback. `answer` is given the words of each command, and returns the raw reply."""

    def __init__(self, answer: Callable[[list[bytes]], bytes]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while head := self.rfile.readline():
                    words = []
                    for _ in range(int(head[1:])):
                        length = int(self.rfile.readline()[1:])
                        words.append(self.rfile.read(length + 2)[:-2])
                    self.wfile.write(answer(words))

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that hung up is no news."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(100)
