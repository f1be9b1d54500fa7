"""A socket that speaks just enough of Redis' protocol to say what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable
from socketserver import StreamRequestHandler

from support.plain_http import Serving


class RespServer(Serving):
    """Serves inside `with`, on loopback. `answer` is given the words of each command, and returns the raw reply."""

    def __init__(self, answer: Callable[[list[bytes]], bytes]) -> None:
        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                while head := self.rfile.readline():
                    words = []
                    for _ in range(int(head[1:])):
                        length = int(self.rfile.readline()[1:])
                        words.append(self.rfile.read(length + 2)[:-2])
                    self.wfile.write(answer(words))

        super().__init__(Handler)
