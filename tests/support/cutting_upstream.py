"""A server that cuts its connections at random, once a request has arrived, and counts what arrived."""

from __future__ import annotations

import random
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler

from support.plain_http import Serving

BODY = b'{"items": [1, 2, 3]}'


class CuttingServer(Serving):
    """Serves inside `with`, on loopback. `arrived` counts the requests."""

    def __init__(self, seed: int) -> None:
        self.arrived = 0
        chance, lock, outer = random.Random(seed), threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def serve(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    outer.arrived += 1
                    fate = chance.choices(
                        ("ok", "moved", "busy", "silent", "head", "body", "reset"), (6, 2, 1, 2, 1, 1, 1)
                    )
                getattr(self, fate[0])()

            def say(self, status: int, body: bytes, *, sent: int | None = None, location: str = "") -> None:
                head = f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n"
                head += f"Location: {location}\r\n" if location else ""
                self.wfile.write((head.encode() + b"\r\n" + body)[:sent])

            def ok(self) -> None:
                self.say(200, BODY)

            def moved(self) -> None:
                self.say(302, b"", location="/there")

            def busy(self) -> None:
                self.say(503, BODY)

            def silent(self) -> None:
                self.close_connection = True

            def head(self) -> None:
                self.say(200, BODY, sent=20)
                self.close_connection = True

            def body(self) -> None:
                self.say(200, BODY, sent=-5)
                self.close_connection = True

            def reset(self) -> None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

            do_GET = do_POST = serve  # noqa: N815

            def log_message(self, *args: object) -> None: ...

        super().__init__(Handler)
        self.address = f"http://127.0.0.1:{self.port}"
