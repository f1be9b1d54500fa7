"""A server of a test's own, with a thread for each connection."""

from __future__ import annotations

import threading
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from socketserver import BaseRequestHandler


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
